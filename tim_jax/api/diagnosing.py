"""Whether log-probs agree, in one call each: a model's own here, and those of another system.

`audit` proves that sampler and learner give the same bits for a model as it was loaded. `diagnose`
says what is wrong with log-probs that another system recorded; `Monitor` is for its loop.
"""

import html
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tim_jax import corrections, metrics, placement
from tim_jax.api.model import Model, check_jax, check_model, load
from tim_jax.api.rollouts import Rollout, forward_of, read_rows
from tim_jax.common import pages, waiting
from tim_jax.common.errors import InputError, check_choice
from tim_jax.common.inputs import refuse_unknown, shown
from tim_jax.corrections import Correction
from tim_jax.instruments import auditing
from tim_jax.instruments.auditing import Audit
from tim_jax.instruments.diagnosis import records, verdict
from tim_jax.instruments.diagnosis.declared import Distribution
from tim_jax.instruments.diagnosis.variants import Candidate, adapter_rank
from tim_jax.model.execution import Sampling


@refuse_unknown
def audit(model: Model, *, quick: bool = False) -> Audit:
    """Proves that the sampler's and the learner's log-probs of this model are the same bits here.

    Sequences are drawn from random prompts; the learner and other batches of the sampler then
    compute their log-probs again, in other orders, paddings and micro-batches, and all bits are
    compared. As a control, native kernels are compared too, where a difference is expected: it
    shows that the comparison sees one. At the end the gradients of the forward's units are compared
    with float64: sampler and learner would agree on what a wrong compiler makes.

    Args:
      model: whose numerics and placement are proved, on the devices at hand.
      quick: fewer cases. Either way it takes minutes on two cores, nearly all of them compilation.
        Who waits is told which case it is.
        Over several devices there are two cases, quick or not.

    Raises:
      InputError: the model has too few positions, or there are several processes.
    """
    check_model("audit", model)
    check_jax("audit")
    if (count := jax.process_count()) > 1:
        raise InputError(
            f"audit: needs a single process, there are {count}; audit the model in one. Training in"
            " several compares the bits of every step by itself"
        )
    where, single = model.placement, model.placement.single
    sizes = auditing.Sizes.fitting(model.config).rounded([where])
    cases = auditing.standard_cases(model.config, sizes, quick=quick)
    if not single:
        cases = auditing.placed_cases(model.config, sizes, [where])
    results = auditing.audit(
        placement.whole(model.merged_params),
        model.config,
        numerics=(model.numerics,),
        cases=cases,
        sizes=sizes,
        control=single,
    )
    count = len(cases) + single  # and the control
    results = waiting.each(results, "auditing a case", about=waiting.COMPILES, total=count)
    checked = list(results)
    with waiting.during("checking the compiler's gradients", about=waiting.COMPILES):
        gradients = auditing.check_gradients(auditing.of_backward(model.numerics))
    return auditing.summarise(checked, model=repr(model), gradients=gradients)


class Observed(NamedTuple):
    """What a monitor found in one batch.

    Attributes:
        metrics: name -> number: those of `tim_jax.metrics.mismatch_metrics`, under `mismatch/`,
            and what the correction did, under `correction/`.
        coefficients: f32[B, R], by which the loss of each token is to be multiplied; 0 off the
            mask.
        kept: bool[B, R], the tokens that no rejection took out of the loss's denominator.
        state: of the correction, for the next call; only some corrections remember anything.
    """

    metrics: dict[str, float]
    coefficients: np.ndarray
    kept: np.ndarray
    state: Any


@dataclass(frozen=True)
class Monitor:
    """Logs the mismatch of any trainer, and corrects for it, from two arrays.

        monitor = tim_jax.diagnose.Monitor(tim_jax.corrections.token_tis())
        seen = monitor(trainer_log_probs, rollout_log_probs, response_mask)
        loss = (loss_per_token * seen.coefficients).sum() / seen.kept.sum()
        wandb.log(seen.metrics)

    Arrays are NumPy's, JAX's or torch's, or lists of their rows, on any device and in any float
    dtype; what comes back is NumPy's. Nothing is remembered between calls.
    """

    correction: Correction = field(default_factory=corrections.none)

    def __call__(
        self, trainer: Any, rollout: Any, mask: Any, *, state: Any = None, **extra: Any
    ) -> Observed:
        """Metrics and coefficients of a batch.

        Args:
          trainer: f32[B, R], the trainer's log-probs of the response tokens.
          rollout: f32[B, R], those that the sampler recorded.
          mask: bool[B, R], True on response tokens; what stands elsewhere is never read.
          state: what the last call returned.
          extra: what the correction reads besides, such as `advantages` f32[B]. Not `log_probs`,
            which `kpop` and `dppo` read: that is `trainer`.

        Raises:
          InputError: arrays whose shapes do not go together, or one that the correction lacks, or
            that follows from the others.
        """
        for name in ("log_ratio", "log_probs"):
            if name in extra:  # it could disagree with the arrays that it follows from
                raise InputError(f"Monitor: {name} follows from trainer and rollout; leave it out")
        given = {"trainer": trainer, "rollout": rollout, **extra}
        arrays = {name: _array(name, x) for name, x in given.items()}
        of_mask = _array("mask", mask)
        if of_mask.ndim != 2:
            raise InputError(f"Monitor: mask must be [sequences, tokens], got {of_mask.shape}")
        for name, array in arrays.items():
            of_sequence = name in extra and array.shape == of_mask.shape[:1]
            if array.shape != of_mask.shape and not of_sequence:
                raise InputError(
                    f"Monitor: {name} has shape {array.shape}; it must be the mask's,"
                    f" {of_mask.shape}"
                )
        # Few shapes, so that few programs are compiled.
        shape = tuple(max(8, 1 << (size - 1).bit_length()) for size in of_mask.shape)
        padded = {name: _padded(array, shape[: array.ndim]) for name, array in arrays.items()}
        run = _compile(self.correction)
        numbers, coefficients, kept, state = run(padded, _padded(of_mask != 0, shape), state)
        rows, columns = of_mask.shape
        return Observed(
            {name: float(value) for name, value in jax.device_get(numbers).items()},
            np.asarray(coefficients)[:rows, :columns],
            np.asarray(kept)[:rows, :columns],
            state,
        )


def _array(name: str, value: Any) -> np.ndarray:
    """A NumPy array of any array, or of a list of arrays of one shape, in float32 or bool."""
    rows = value if isinstance(value, list | tuple) else [value]
    try:
        found = [_of_torch(one) if hasattr(one, "detach") else one for one in rows]
        array = np.asarray(found if rows is value else found[0])
        return array if array.dtype == bool else array.astype(np.float32)
    except jax.errors.TracerArrayConversionError:
        raise  # which says what a traced array is
    except (TypeError, ValueError):  # text, or rows of several lengths
        raise InputError(
            f"Monitor: {name} must be numbers in rows of one width, filled up where the mask is 0;"
            f" got {shown(value)}"
        ) from None


def _of_torch(tensor: Any) -> np.ndarray:
    """A tensor without its gradient, in float32, which NumPy has."""
    return tensor.detach().float().cpu().numpy()


def _padded(array: np.ndarray, shape: tuple[int, ...]) -> jax.Array:
    pairs = zip(array.shape, shape, strict=True)
    return jnp.asarray(np.pad(array, [(0, whole - size) for size, whole in pairs]))


@lru_cache(maxsize=16)
def _compile(correction: Correction) -> Any:
    return jax.jit(partial(_observe, correction))


def _observe(correction, arrays, mask, state):
    trainer, rollout = arrays.pop("trainer"), arrays.pop("rollout")
    log_ratio = jnp.where(mask, trainer - rollout, 0.0)
    needs = {need for block in correction.blocks for need in block.needs}
    given = {"log_probs": trainer} if "log_probs" in needs else {}
    corrected = corrections.correct(
        correction, log_ratio=log_ratio, mask=mask, state=state, **given, **arrays
    )
    numbers = metrics.mismatch_metrics(trainer, rollout, mask)
    named = {f"mismatch/{name}": value for name, value in numbers.items()}
    named |= {f"correction/{name}": value for name, value in corrected.metrics.items()}
    return named, corrected.coefficients, corrected.kept, corrected.state


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """What a diagnosis found; `print` shows it."""

    verdict: verdict.Verdict
    """All of it, with arrays of every token."""
    record: dict[str, Any]
    """All that the report says, as plain values; see `tim_jax.instruments.diagnosis.records`."""
    problems: tuple[str, ...]
    """Lines that were skipped, and why."""

    @property
    def normal(self) -> bool:
        """False for a fault, or if undecided: the command then ends with status 1."""
        return self.verdict.normal

    @cached_property
    def json(self) -> str:
        """The record as JSON."""
        return pages.as_json(self.record)

    @cached_property
    def html(self) -> str:
        """The record as an HTML page that needs no other file."""
        return records.as_html(self.record, "Is it numerics or a bug?")

    def __str__(self) -> str:
        return records.text(self.record)

    def __repr__(self) -> str:
        """The verdict, and what it rests on; `print` shows the explanations too."""
        return str(self).partition("\n\n")[0]

    def _repr_html_(self) -> str:
        page = html.escape(self.html)
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 40em; border: 0"></iframe>'


class Diagnose:
    """Says of recorded rollouts whether their log-probs differ by numerics or by a fault.

    `tim_jax.diagnose(model, rollouts)` scores them by the exact forward, tries the explanations and
    says which one explains how much. `tim_jax.diagnose.Monitor` is for the loop of a trainer.
    """

    Monitor: ClassVar = Monitor

    def __call__(
        self,
        model: Model,
        rollouts: str | Path | Rollout | Iterable[Mapping[str, Any]],
        *,
        format: str = "auto",
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        log_probs: str = "processed",
        weights: str | Path | Model | Mapping[str, Model] | Iterable[str | Path] = (),
        skip_bad: bool = False,
    ) -> Diagnosis:
        """Diagnoses rollouts.

        Args:
          model: that is said to have drawn them; its dtype is that of the exact forward.
          rollouts: a file (JSON lines, JSON, Parquet), rows of one, or what `sample` returned.
          format: "auto", or one of `tim_jax.instruments.diagnosis.readers.FORMATS`.
          temperature: what rows were drawn from that do not say; so are `top_k` and `top_p`.
          top_k: 0 is off.
          top_p: 1 is off.
          log_probs: "processed", of what was drawn from, or "raw", of the logits before penalties,
            temperature and truncation: what rows hold that do not say it by vLLM's `logprobs_mode`.
          weights: of the same architecture, that may have drawn them instead: earlier checkpoints,
            or the base model of an adapter; by name, or folders, or one of them. The base of a
            model that has an adapter is tried without being given.
          skip_bad: diagnose what can be read.

        Raises:
          InputError: no such file, bad rows, or weights of another architecture; see
            `tim_jax.instruments.diagnosis.rollouts.RolloutsError`.
        """
        check_model("diagnose", model)
        check_jax("diagnose")
        forward = forward_of("diagnose", model)
        check_choice("diagnose: log_probs", log_probs, ("processed", "raw"))
        default = Distribution(temperature, top_k, top_p, raw=log_probs == "raw")
        Sampling(1, temperature, top_k, top_p)  # checks the three
        collected = read_rows(
            "diagnose", model, rollouts, form=format, default=default, skip_bad=skip_bad
        )
        with waiting.during("diagnosing", about=waiting.COMPILES):
            found = verdict.diagnose(
                collected.responses,
                forward,
                others=tuple(_list_candidates(model, weights)),
                tokenizer=model.tokenizer,
            )
            record = records.as_record(
                found,
                model.tokenizer.decode,
                warnings=collected.warnings,
                assumed=collected.assumed(default),
            )
        return Diagnosis(found, record, collected.problems)


diagnose = Diagnose()


def _list_candidates(model: Model, weights: Any) -> Iterator[Candidate]:
    if isinstance(weights, str | Path | Model):
        weights = [weights]
    if not isinstance(weights, Iterable):
        raise InputError(
            "diagnose: weights must be a model, a folder, or several of these, got"
            f" {shown(weights)}"
        )
    named = weights.items() if isinstance(weights, Mapping) else [(str(x), x) for x in weights]
    for name, other in named:
        other = other if isinstance(other, Model) else load(other, dtype=model.dtype)
        if not other.config.computes_as(model.config):
            raise InputError(f"diagnose: the weights of {name} are of another architecture")
        yield _make_candidate(model, name, other)
    if model.adapter is not None:
        yield _make_candidate(model, "the base model", replace(model, adapter=None))


def _make_candidate(model: Model, name: str, other: Model) -> Candidate:
    params = other.merged_params
    weights = replace(model, params=params, adapter=None).weights  # computed with as the model's
    return Candidate(name, weights, adapter_rank(model.merged_params, params))
