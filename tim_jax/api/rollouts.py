"""Responses drawn from a model; log-probs of these, or of other engines' rows, computed again."""

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from numbers import Integral
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import jax
import numpy as np

from tim_jax import placement
from tim_jax.api.model import Model, check_jax, check_model
from tim_jax.app.run.display import printable
from tim_jax.common import types, waiting
from tim_jax.common.errors import InputError
from tim_jax.common.inputs import check_whole, refuse_unknown, shown
from tim_jax.instruments.diagnosis import evidence, readers
from tim_jax.instruments.diagnosis.evidence import Forward
from tim_jax.instruments.diagnosis.rollouts import Collected, Limits, Response, collect
from tim_jax.model.execution import Batching, Execution, Sampling
from tim_jax.rl import drawing, programs
from tim_jax.rl.drawing import Text
from tim_jax.tasks.base import Example, Message
from tim_jax.tasks.dataset import message_of

_LOG = logging.getLogger("tim_jax")
_SHORTEST = 16  # tokens that prompts and responses are padded to


@dataclass(frozen=True, repr=False)
class Rollout:
    """Sampled responses. Row p * samples + s is sample s of prompt p; B rows, R tokens at most."""

    tokens: np.ndarray
    """i32[B, R], the responses, with the token that ended each; off the mask, filler."""
    lengths: np.ndarray
    """i32[B], tokens of each response."""
    mask: np.ndarray
    """bool[B, R], True on response tokens."""
    log_probs: np.ndarray
    """f32[B, R], of each token under the distribution that it was drawn from; 0 off the mask."""
    text: tuple[str, ...]
    """The responses as text, B of them, without special tokens."""
    finished: np.ndarray
    """bool[B], False where `max_tokens` cut the response off."""
    arrays: types.Rollout
    """Responses with their prompts, as `tim_jax.rl` and `tim_jax.policy` take them."""
    sampling: Sampling
    """The distribution: temperature, top-k, top-p and the longest response."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __repr__(self) -> str:
        """The size, and the first responses with their log-probs."""
        return "\n".join(itertools.islice(self._lines(), 5))

    def __str__(self) -> str:
        """The size, and every response with its log-prob."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        rows, longest = self.tokens.shape
        yield (
            f"Rollout({rows} responses, {int(self.lengths.sum())} tokens): tokens, mask and"
            f" log_probs are [{rows}, {longest}]"
        )
        for row, text in enumerate(map(printable, self.text)):
            said = text if len(text) <= 60 else f"{text[:59]}…"
            log_prob, length = float(self.log_probs[row].sum()), int(self.lengths[row])
            yield f"  {row}: {said}   ({length} tokens, log-prob {log_prob:.3f})"


@refuse_unknown
def sample(
    model: Model,
    prompts: Sequence[str | Sequence[Mapping[str, str]]],
    *,
    samples: int = 1,
    max_tokens: int | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    chat_template: bool | Literal["auto"] | None = None,
    template_options: Mapping[str, Any] | None = None,
    slots: int | None = None,
) -> Rollout:
    """Draws responses, with the log-probs of what was drawn.

    A response depends on the model, its prompt's place in the list, its number among the prompt's
    samples, and the seed; not on the other prompts. It depends on the date too if the chat template
    prints it, see `grpo`. The first call compiles; later ones with as many prompts, and prompts of
    similar lengths, do not.

    Args:
      model: as `load` gives it.
      prompts: texts, or lists of chat messages ({"role": ..., "content": ...}).
      samples: responses per prompt.
      max_tokens: of a response. None: 256, or half of the model's positions if that is less.
      temperature: 0 takes the likeliest token, with log-prob 0.
      top_k: the number of likeliest tokens that are drawn from; 0 is all.
      top_p: the mass of the likeliest tokens that are drawn from; 1 is all. Log-probs are those of
        the distribution that temperature, top-k and top-p leave.
      seed: names the random numbers.
      chat_template: True puts prompts through the tokenizer's template, False takes them as plain
        text; "auto" is True if there is a template. None: as the model has it.
      template_options: variables of the template, such as {"enable_thinking": False}. None: those
        of the model.
      slots: responses that are decoded at a time, to bound memory; when one ends, the next takes
        its slot. None: all of them. Changes no bit.

    Raises:
      InputError: a prompt that is empty or too long, or a number out of its range.
    """
    check_model("sample", model)
    check_jax("sample")
    asked = request(
        model,
        prompts,
        samples=samples,
        sampling=Sampling(
            model.most_tokens if max_tokens is None else max_tokens, temperature, top_k, top_p
        ),
        seed=seed,
        template=model.chat_template if chat_template is None else chat_template,
        options=model.template_options if template_options is None else template_options,
        slots=slots,
    )
    return draw(model, asked)


@dataclass(frozen=True)
class Request:
    """Responses to be drawn, checked against a model's config and tokenizer."""

    examples: Sequence[Example]  # filled up, so that every device gets as many rows
    count: int  # of them without the filling
    samples: int
    sampling: Sampling
    seed: int
    text: Text
    slots: int | None

    @property
    def rows(self) -> int:
        """Responses that are drawn, with those of the filling."""
        return len(self.examples) * self.samples


def request(
    model: Model,
    prompts: Sequence[Any],
    *,
    samples: int,
    sampling: Sampling,
    seed: int,
    template: bool | Literal["auto"],
    options: Mapping[str, Any] = MappingProxyType({}),
    slots: int | None = None,
) -> Request:
    """What `sample` would draw. Needs no weights; arguments and errors as of `sample`."""
    samples = check_whole("sample: samples", samples, least=1)
    seed = check_whole("sample: seed", seed, least=0, most=2**32 - 1)
    if slots is not None:
        slots = check_whole("sample: slots", slots, least=1)
    model.execution(sampling)  # which refuses a distribution that the model cannot have
    if isinstance(prompts, str) or not isinstance(prompts, Iterable) or has_columns(prompts):
        raise InputError(
            f"sample: prompts must be a list of prompts, got {shown(prompts)}; one prompt is"
            " [prompt], and a column of a table is [*table[name]]"
        )
    asked = [Example(as_prompt(x, f"sample: prompt {i}"), "") for i, x in enumerate(prompts)]
    if not asked:
        raise InputError("sample: prompts is empty; give one or more")
    most = sampling.max_tokens
    text = text_of(model, asked, most, template, options)
    width = min(padded(text.max_prompt_length), model.config.most_positions - most)
    text = replace(text, max_prompt_length=width)
    # Every device gets as many rows: the last prompt is repeated, and its rows are dropped.
    filling = -len(asked) % model.placement.prompts_multiple(samples)
    wanted = Request(asked + asked[-1:] * filling, len(asked), samples, sampling, seed, text, slots)
    if wanted.rows * (width + most) >= 2**31:  # places in an array are numbers of 32 bits
        raise InputError(
            f"sample: {samples} samples of {len(asked)} prompts are {wanted.rows} sequences of up"
            f" to {width + most} tokens, over 2**31 tokens"
        )
    return wanted


def draw(model: Model, asked: Request) -> Rollout:
    """Draws what was requested of this model."""
    execution = model.execution(asked.sampling)
    program = _sampler(execution, asked.samples, asked.slots)
    drawn = asked.text.prompts(asked.examples, range(len(asked.examples)))
    weights, key = model.weights, drawing.step_key(asked.seed, 0)
    with waiting.during(drawing.SAMPLING, about=waiting.COMPILES):
        found = jax.device_get(program(weights, drawn, key))
    found = jax.tree.map(lambda x: x[: asked.count * asked.samples], found)
    return Rollout(
        tokens=found.responses,
        lengths=found.lengths,
        mask=np.asarray(found.mask),
        log_probs=found.log_probs,
        text=tuple(asked.text.completions(found)),
        finished=found.finished,
        arrays=found,
        sampling=execution.sampling,
    )


def has_columns(value: Any) -> bool:
    """Whether it is a table, such as a DataFrame or a dict, which iterates over its columns."""
    return isinstance(value, Mapping) or hasattr(value, "columns")


def as_prompt(prompt: Any, where: str) -> str | tuple[Message, ...]:
    """Text as it is; a list of chat messages as `Message`s.

    Raises:
      InputError: it is neither; `where` says which one in the message.
    """
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Sequence) and prompt and not isinstance(prompt[0], Integral):
        return tuple(message_of(message, where) for message in prompt)
    raise InputError(
        f"{where} must be text or a list of chat messages, not token ids, got {shown(prompt)}"
    )


def padded(length: int) -> int:
    """Returns the length to pad prompts or responses to: a power of two.

    So few programs are compiled. Padding changes no bit.
    """
    return max(_SHORTEST, 1 << (length - 1).bit_length())


def text_of(
    model: Model,
    examples: Sequence[Example],
    max_tokens: int,
    chat_template: bool | Literal["auto"],
    template_options: Mapping[str, Any],
) -> Text:
    """How prompts become tokens. The longest that it allows is the longest of these examples'.

    Raises:
      InputError: one leaves fewer than `max_tokens` positions of the model for a response.
    """
    if chat_template not in (True, False, "auto"):
        raise InputError(f'chat_template must be True, False or "auto", got {shown(chat_template)}')
    if not isinstance(template_options, Mapping):
        raise InputError(f"template_options must be a mapping, got {shown(template_options)}")
    room = model.config.most_positions - max_tokens
    if room < 1:
        raise InputError(
            f"max_tokens = {max_tokens} leaves no room for a prompt in the model's"
            f" {model.config.most_positions} positions"
        )
    now = datetime.fromisoformat(placement.led(lambda: datetime.now().isoformat()))
    text = Text(model.tokenizer, room, chat_template, tuple(template_options.items()), now)
    encoded = text.encoded(examples, range(len(examples)))
    return replace(text, max_prompt_length=max(map(len, encoded)))


@refuse_unknown
def score(
    model: Model,
    rollout: Rollout | str | Path | Iterable[Mapping[str, Any]],
    *,
    micro_batch: int | None = None,
    format: str = "auto",
) -> np.ndarray:
    """Computes a rollout's log-probs again, by the learner's forward of whole sequences.

    For the model that drew it, these are the same bits as `rollout.log_probs`; for another one they
    are that model's log-probs of the same tokens under the same temperature, top-k and top-p. Rows
    of another engine are read as `tim_jax.diagnose` reads them, and scored under what each of them
    says: its options, and its `supports` or `kept_log_mass` if the engine recorded them. These are
    the numbers that a sound engine would have recorded.

    Args:
      model: whose log-probs they are.
      rollout: as `sample` gives it; or a file or rows of another engine.
      micro_batch: responses of a `sample` that are scored at a time, to bound memory. Changes no
        bit.
      format: of rows, one of `tim_jax.instruments.diagnosis.readers.FORMATS`.

    Returns:
      f32[B, R], 0 off the mask.

    Raises:
      InputError: rows that cannot be read, or a rollout that this model has no room or no
        vocabulary for.
    """
    check_model("score", model)
    check_jax("score")
    if not isinstance(rollout, Rollout):
        if micro_batch is not None:
            raise InputError(
                "score: micro_batch is for a rollout of `sample`; leave it out of rows"
            )
        return _score_rows(model, rollout, format)
    _check_fits(model, rollout)
    rows, shards = len(rollout), model.placement.shards
    if micro_batch is not None:
        micro_batch = check_whole("score: micro_batch", micro_batch, least=1)
        micro_batch = min(micro_batch + -micro_batch % shards, rows + -rows % shards)
    # Whole micro-batches, on every device as many rows: filled up with copies of the last one.
    chosen = np.minimum(np.arange(rows + -rows % (micro_batch or shards)), rows - 1)
    filled = jax.tree.map(lambda x: x[chosen], rollout.arrays)
    program = _scorer(model.execution(rollout.sampling), micro_batch=micro_batch)
    with waiting.during("scoring", about=waiting.COMPILES):
        log_probs = jax.device_get(program(model.weights, filled))[:rows]
    return np.where(rollout.mask, log_probs, np.float32(0.0))


def _check_fits(model: Model, rollout: Rollout) -> None:
    """Refuses a rollout of another model with tokens or positions that this one lacks."""
    arrays = rollout.arrays
    prompts, lengths = arrays.prompts, arrays.prompt_lengths
    inside = np.arange(prompts.shape[1])[None, :] < lengths[:, None]
    tokens = np.concatenate([prompts[inside], arrays.responses[rollout.mask]])
    if (highest := int(tokens.max())) >= model.config.vocab_size:
        raise InputError(
            f"score: the rollout has token {highest}, but the model's vocabulary ends at"
            f" {model.config.vocab_size - 1}; give one drawn with the model's tokenizer"
        )
    longest, most = int((lengths + rollout.lengths).max()), model.config.most_positions
    if longest > most:
        raise InputError(
            f"score: a prompt and its response have {longest} tokens, but the model has {most}"
            " positions"
        )


@lru_cache(maxsize=32)
def _sampler(execution: Execution, samples: int, slots: int | None) -> Any:
    batching = Batching(slots).rounded(execution.placement.shards)
    return programs.sampling_program(execution, samples=samples, batching=batching)


_scorer = lru_cache(maxsize=32)(programs.scoring_program)


# Rows of another engine


def read_rows(who: str, model: Model, rows: Any, *, form: str, **how: Any) -> Collected:
    """What another engine or `sample` drew, as `diagnosis.rollouts.collect` gives it.

    Raises:
      InputError: it is neither a file nor rows, they cannot be read, or a `Rollout` is greedy.
    """
    if isinstance(rows, Rollout):
        rows = _as_rows(rows, who)
    if not isinstance(rows, str | Path | Iterable) or has_columns(rows):
        hint = ""
        if isinstance(rows, Mapping):
            hint = "; give one row as [row]"
        elif has_columns(rows):
            hint = "; its rows are df.to_dict('records'), in polars df.to_dicts()"
        raise InputError(
            f"{who}: give what tim_jax.sample returns, a file, or rows of another engine, got"
            f" {type(rows).__name__}{hint}"
        )
    return collect(
        readers.read(rows, form=form, pad=model.tokenizer.pad_token_id),
        limits=Limits.of(model.config),
        tokenizer=model.tokenizer,
        **how,
    )


def _as_rows(rollout: Rollout, who: str) -> Iterator[dict[str, Any]]:
    """The responses as rows of another engine, with their token ids and log-probs."""
    arrays, sampling = rollout.arrays, rollout.sampling
    if sampling.temperature == 0:
        raise InputError(f"{who}: the rollout is greedy: its log-probs are 0 by definition")
    prompts, lengths = np.asarray(arrays.prompts), np.asarray(arrays.prompt_lengths)
    for i, length in enumerate(rollout.lengths):
        yield {
            "prompt_token_ids": prompts[i, : lengths[i]].tolist(),
            "response_token_ids": rollout.tokens[i, :length].tolist(),
            "logprobs": rollout.log_probs[i, :length].tolist(),
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "logprobs_mode": "processed_logprobs",
            "finish_reason": "stop" if rollout.finished[i] else "length",
        }


def lay_out(responses: Sequence[Response], execution: Execution) -> types.Rollout:
    """The responses in few shapes, so that few programs are compiled. Padding changes no bit."""
    most, stops = execution.config.most_positions, execution.sampling.stop_tokens
    responses = [one.without_padding(stops) for one in responses]
    longest = max(len(r) for r in responses)
    prompts = max(len(r.prompt) for r in responses)
    prompts = max(prompts, min(padded(prompts), most - longest))
    size = max(longest, min(padded(longest), most - prompts))
    # How a response ended that does not say it, its last drawn token shows.
    lasts = [r.tokens[max(r.drawn_size(stops), 1) - 1] for r in responses]
    said = [
        replace(r, ended=r.ended or ("token" if last in (*stops, *r.stops) else "cut"))
        for r, last in zip(responses, lasts, strict=True)
    ]
    rollout = evidence.side_by_side(said, prompts, size)
    # What a mask leaves out, such as a tool's reply, is context: no length counts it.
    drawn = None if rollout.hidden is None else ~rollout.hidden
    return replace(rollout, hidden=None, drawn=drawn)


def forward_of(who: str, model: Model) -> Forward:
    """The exact forward of a model on one device, for rows of other engines.

    Raises:
      InputError: the model lies on a mesh.
    """
    if not model.placement.single:
        raise InputError(f"{who}: load the model on one device, not on a mesh")
    execution = model.execution(Sampling(1))
    size = min(len(model.tokenizer), model.config.vocab_size)
    return Forward(model.weights, execution, size, execution.sampling.stop_tokens)


def _score_rows(model: Model, rows: Any, form: str) -> np.ndarray:
    """Log-probs f32[B, R] of rows by the exact forward, 0 off their masks.

    A warning says how many rows do not say their temperature.
    """
    collected = read_rows("score", model, rows, form=form)
    responses, silent = collected.responses, collected.silent.get("temperature", 0)
    if silent:
        _LOG.warning(
            "tim_jax: score: %d of %d rows do not say their temperature; they are scored at 1",
            silent,
            len(responses),
        )
    with waiting.during("scoring", about=waiting.COMPILES):
        found = evidence.log_probs(forward_of("score", model), responses)
    size = max(len(response) for response in responses)
    scored = np.zeros((len(responses), size), np.float32)
    ends = np.cumsum([len(response) for response in responses])[:-1]
    for row, response, own in zip(scored, responses, np.split(found, ends), strict=True):
        kept = np.ones(len(own), bool) if response.mask is None else response.mask
        row[: len(own)] = np.where(kept, own, np.float32(0.0))
    return scored
