"""Entries for mixtures of experts: which experts a token takes, their weights, and their sum."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from tim_jax.mismatch.arithmetic import Part
from tim_jax.mismatch.base import Entry
from tim_jax.model.execution import Execution
from tim_jax.numerics import Numerics


class Router(Part):
    """Operands of the dot with the routers of a mixture of experts, which then may choose others.

    The weights of the chosen are by the same logits.
    """

    name = "router"
    field = "router"
    imitates = "a router in float32 in one engine, and in the compute dtype in the other"

    def check(self, execution: Execution) -> None:
        self.need_mixture(execution)


class ExpertChoice(Part):
    """Experts are chosen by the logits of a router of another dtype, and weighted as before.

    So a choice may be another, and nothing else is: a learner that replays the choices is exact.
    """

    name = "expert_choice"
    field = "choice"
    imitates = "no system: of a router in another dtype, the part that is the choice"

    def check(self, execution: Execution) -> None:
        self.need_mixture(execution)


@dataclass(frozen=True)
class ExpertOrder(Entry):
    """The outputs of a token's experts are added in another order, or in another dtype.

    order "choice": from the most probable to the least; "index": by the experts' numbers.
    accumulate "compute": every weighted output and every sum is rounded to the compute dtype.
    """

    order: Literal["choice", "index"]
    accumulate: Literal["float32", "compute"] = "float32"

    name: ClassVar[str] = "expert_order"
    imitates: ClassVar[str] = (
        "index, compute: the eager loop over experts of `transformers`; choice, compute: vLLM's"
        " kernel moe_sum (SGLang's adds up in float32, as here)"
    )

    def __post_init__(self):
        self.need_choice("order", ("choice", "index"))
        self.need_choice("accumulate", ("float32", "compute"))

    def check(self, execution: Execution) -> None:
        self.need_mixture(execution)

    def numerics(self, numerics: Numerics) -> Numerics:
        order = replace(numerics.order, experts=self.order, experts_sum=self.accumulate)
        return replace(numerics, order=order)


@dataclass(frozen=True)
class ExpertCapacity(Entry):
    """An expert takes at most ceil(factor x N k / E) of the N k choices of a forward's N rows.

    The others add nothing to their tokens, and the weights of a token's other experts stay. First
    choices come before second ones, and rows in their order. A prefill's rows are the positions of
    its padded prompts, a decode step's are the slots, idle ones included; so a token's log-prob
    depends on what is decoded beside it.
    """

    factor: float

    name: ClassVar[str] = "expert_capacity"
    imitates: ClassVar[str] = (
        "token dropping in one engine alone: GShard (arXiv 2006.16668, algorithm 1), the Switch"
        " Transformer, Megatron's moe_expert_capacity_factor"
    )
    no_control: ClassVar[str] = (
        "what an expert leaves out depends on the rows of a forward, and a learner's has others"
    )

    def __post_init__(self):
        self.need_number("factor", least=0.0)
        if self.factor == 0:
            raise self.refuse("factor must be above 0; large ones leave nothing out")

    def check(self, execution: Execution) -> None:
        self.need_mixture(execution)

    def numerics(self, numerics: Numerics) -> Numerics:
        return replace(numerics, expert_capacity=self.factor)
