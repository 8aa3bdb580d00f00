"""What is wrong with log-probs that another system recorded, in one call."""

import html
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from tim_jax.api import foreign
from tim_jax.api.model import Model, check_jax, check_model, load
from tim_jax.api.rollouts import Rollout, as_rows
from tim_jax.common import pages, waiting
from tim_jax.common.errors import InputError, check_choice
from tim_jax.instruments.diagnosis import records, verdict
from tim_jax.instruments.diagnosis.declared import Distribution
from tim_jax.instruments.diagnosis.monitor import Monitor
from tim_jax.instruments.diagnosis.variants import Candidate, adapter_rank
from tim_jax.model.execution import Sampling


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
        forward = foreign.forward_of("diagnose", model)
        check_choice("diagnose: log_probs", log_probs, ("processed", "raw"))
        default = Distribution(temperature, top_k, top_p, raw=log_probs == "raw")
        Sampling(1, temperature, top_k, top_p)  # checks the three
        given = as_rows(rollouts, "diagnose") if isinstance(rollouts, Rollout) else rollouts
        collected = foreign.read(
            "diagnose", model, given, form=format, default=default, skip_bad=skip_bad
        )
        with waiting.during("diagnosing", about=waiting.COMPILES):
            found = verdict.diagnose(
                collected.responses,
                forward,
                others=tuple(_others(model, weights)),
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


def _others(model: Model, weights: Any) -> Iterator[Candidate]:
    if isinstance(weights, str | Path | Model):
        weights = [weights]
    named = weights.items() if isinstance(weights, Mapping) else [(str(x), x) for x in weights]
    for name, other in named:
        other = other if isinstance(other, Model) else load(other, dtype=model.dtype)
        if not other.config.computes_as(model.config):
            raise InputError(f"diagnose: the weights of {name} are of another architecture")
        yield _candidate(model, name, other)
    if model.adapter is not None:
        yield _candidate(model, "the base model", replace(model, adapter=None))


def _candidate(model: Model, name: str, other: Model) -> Candidate:
    params = other.merged_params
    weights = replace(model, params=params, adapter=None).weights  # computed with as the model's
    return Candidate(name, weights, adapter_rank(model.merged_params, params))
