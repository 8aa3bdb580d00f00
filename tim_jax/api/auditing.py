"""The proof, for a model as it was loaded, that sampler and learner give the same bits here."""

import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from rich.console import Console

from tim_jax.api.model import Model, check_jax, check_model
from tim_jax.common import waiting
from tim_jax.common.errors import InputError
from tim_jax.common.inputs import refuse_unknown
from tim_jax.instruments import auditing
from tim_jax.placement import processes


@dataclass(frozen=True, repr=False)
class Audit:
    """What an audit found; `print` shows its cases. Counts are over all that must be equal."""

    passed: bool
    """Whether every token of every case was equal, some were compared, and all gradients right."""
    compared_tokens: int
    unequal_tokens: int
    cases: Sequence[auditing.CaseResult]
    """Case by case, with the first unequal token of each, if there is one."""
    gradients: Sequence[auditing.GradientResult]
    """How far the compiler's gradients are from float64, unit by unit of the forward."""
    text: str
    """A table for people, and two lines on the whole."""

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        """The two lines, and the first cases that failed."""
        failed = [case for case in self.cases if not case.passed]
        lines = (f"unequal: {x.name}, {x.unequal_tokens:,} tokens" for x in failed[:6])
        return "\n".join(
            [f"Audit of {len(self.cases)} cases", *self.text.splitlines()[-2:], *lines]
        )

    def _repr_html_(self) -> str:
        return f'<pre style="line-height: 1.1; overflow-x: auto">{html.escape(self.text)}</pre>'


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
        processes.whole(model.merged_params),
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
    found = auditing.summarise(checked, model=repr(model), gradients=gradients)
    return Audit(
        found.passed,
        found.compared_tokens,
        found.unequal_tokens,
        found.cases,
        found.gradients,
        f"{_drawn(auditing.table(found.cases))}{auditing.verdict(found)}",
    )


def _drawn(table: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=140, force_terminal=False).print(table)
    return out.getvalue()
