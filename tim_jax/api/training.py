"""Training as a generator of steps: the caller logs, stops and keeps what it wants."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, get_args

import jax
import optax

from tim_jax import corrections, mismatch, objectives
from tim_jax.api import data
from tim_jax.api.model import Model, check_devices, check_model
from tim_jax.api.rollouts import text_of
from tim_jax.common.errors import InputError, check_choice
from tim_jax.corrections import Correction, Mode
from tim_jax.mismatch import Entry, Mismatch
from tim_jax.model import adapters
from tim_jax.model.adapters import Adapter, Lora
from tim_jax.model.execution import Routing, Sampling
from tim_jax.objectives import Objective, advantages
from tim_jax.placement import Devices, Placement, processes, split
from tim_jax.rl import loop, programs, sharded
from tim_jax.rl.drawing import Sample, Text
from tim_jax.rl.programs import Programs
from tim_jax.rl.types import Learning, TrainState
from tim_jax.tasks.base import Task, whole

_COUNTS = ("steps", "prompts_per_step", "samples", "mini_batches", "epochs", "max_staleness")


@dataclass(frozen=True)
class Step:
    """One finished step of training."""

    number: int
    """From 1."""
    metrics: dict[str, float]
    """What was measured: `reward`, `exact_share`, `response_length`, `loss` and many more."""
    timing: dict[str, float]
    """Seconds and tokens per second."""
    samples: list[Sample]
    """Each completion with its prompt, answer and reward."""
    _state: TrainState = field(repr=False)
    _before: Model = field(repr=False)
    _lora: Lora | None = field(repr=False)
    _merged: Callable[[Any], Any] = field(repr=False)

    @cached_property
    def model(self) -> Model:
        """The model after this step.

        A copy of its own if training goes on, as that takes the step's buffers: ask for it before
        the next step, and only at steps where you need it. Adapters are merged; it computes the
        bits that training had.

        Raises:
          InputError: training has gone on, and the step's weights are gone.
        """
        self._check_there()
        return replace(self._before, params=self._merged(self._state.params))

    @cached_property
    def adapter(self) -> Adapter:
        """The adapter after this step, to save it (`save_adapter`) or go on from it; a copy too.

        Raises:
          InputError: none is trained, or as `model`.
        """
        if self._lora is None:
            raise InputError("there is no adapter: give grpo one, such as lora=tim_jax.Lora(8)")
        self._check_there()
        return Adapter(self._lora, loop.copied(self._state.params))

    def _check_there(self) -> None:
        leaves = jax.tree.leaves(self._state.params)
        if any(leaf.is_deleted() for leaf in leaves):
            raise InputError(
                f"the model of step {self.number} is gone, its memory was taken by the next step;"
                " take step.model before going on"
            )


def grpo(
    model: Model,
    prompts_and_answers: Iterable[Any],
    *,
    reward: Callable[..., Any],
    steps: int,
    samples: int,
    optimizer: optax.GradientTransformation,
    batched: bool = False,
    prompts_per_step: int = 8,
    max_tokens: int = 256,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    objective: Objective | None = None,
    correction: Correction | None = None,
    mode: Mode | None = None,
    sampler: Mismatch | Sequence[Entry | Mapping[str, Any]] = (),
    exact: bool | None = None,
    micro_batch: int | None = None,
    mini_batches: int = 1,
    epochs: int = 1,
    refills: int = 0,
    max_staleness: int = 0,
    remat: bool = False,
    routing: Routing = "own",
    placement: Placement | None = None,
    sampler_placement: Placement | None = None,
    lora: Lora | Adapter | None = None,
    chat_template: bool | Literal["auto"] = "auto",
    template_options: Mapping[str, Any] = MappingProxyType({}),
    seed: int = 0,
) -> Iterator[Step]:
    """Trains a model by group-relative policy gradients, and yields each step as it is done.

    A step draws `samples` responses to each of `prompts_per_step` prompts, grades them, and updates
    the weights `mini_batches` x `epochs` times. Everything is checked before the first step;
    nothing is written to disk; `model` itself stays as it is. The steps are a function of the
    arguments and the seed alone. Under several processes all call this with the same arguments, and
    share the grading.

    Args:
      model: to start from.
      prompts_and_answers: (prompt, answer) pairs or rows with these keys, from any iterable, which
        is read once, at once. A prompt is text or a list of chat messages, an answer any value.
        They are visited in an order of the seed, as often as the steps need.
      reward: (prompt, completion, answer) -> a finite number; with `batched`, lists of all three ->
        as many numbers. Called in this process, without a time limit.
      steps: how many.
      samples: responses per prompt, the group whose mean reward is the baseline.
      optimizer: of optax. A model in float16 scales the loss, so that small gradients are not lost:
        as `optimizers.dynamic_loss_scale(optimizer)` does, unless it is one already.
      batched: whether `reward` takes and returns lists.
      prompts_per_step: groups of a step; `prompts_per_step` x `samples` responses.
      max_tokens: of a response.
      temperature: as in `sample`.
      top_k: as in `sample`.
      top_p: as in `sample`.
      objective: advantages, loss and how losses are added up, see `tim_jax.objectives`. None: the
        advantages of GRPO, the clipped ratio, the mean over tokens, and no KL term.
      correction: of a mismatch between sampler and learner, see `tim_jax.corrections`.
      mode: "bypass" takes the ratio of the loss to the sampler's log-probs; "recompute" takes it to
        the learner's own before the step, by one more forward. None: "bypass", unless `correction`
        weights by a ratio to the sampler that the loss would then hold a second time.
      sampler: how the sampler differs from the learner on purpose, see `tim_jax.mismatch`.
      exact: stop with `MismatchError` at the first token whose log-probs by sampler and learner are
        not the same bits. None: yes, unless `sampler` differs. `exact_share` is reported anyway.
      micro_batch: responses per forward and backward, to bound memory; must divide a mini-batch.
      mini_batches: parts of a step's responses that are learnt from one after the other.
      epochs: how often a step's responses are learnt from.
      refills: draw again, so often, for groups whose rewards are all equal.
      max_staleness: steps that are drawn ahead of the one that is learnt from, by weights that are
        so many steps older. Exactness is then that of the learner at the weights that drew.
      remat: recompute layers in the backward, for less memory and more time.
      routing: the experts that the learner takes in a mixture: its "own", its own with those of the
        sampler recorded and "compared", or the sampler's, "replayed" (R3).
      placement: of sampler and learner; None: that of the model. Changes no bit.
      sampler_placement: of a sampler with devices of its own, those after the learner's. With
        `max_staleness` it draws while the learner learns. Changes no bit.
      lora: adapters to train in place of all weights, new ones of these sizes, or those of
        `step.adapter` or `load_adapter` to go on from.
      chat_template: as in `sample`.
      template_options: as in `sample`.
      seed: names the random numbers and the order of the prompts.

    Raises:
      InputError: an argument that is wrong or does not go with the others; from a step, a reward
        that raises or is no finite number.
      MismatchError: from a step, see `exact`.
      NonFiniteError: from a step, after five updates in a row that were not finite.
    """
    _check_switches(exact=exact, remat=remat, batched=batched)
    counts = _checked(steps, prompts_per_step, samples, mini_batches, epochs, max_staleness)
    model, dial = _placed(model, placement), _dial(sampler)
    how = {"micro_batch": micro_batch, "remat": remat, "routing": routing}
    learning = _learning(objective, correction, mode, samples, **how)
    _check_drawing(learning.objective, temperature, refills, seed)
    _check_rows(learning, model.placement, prompts=prompts_per_step, mini_batches=mini_batches)
    own = _own_devices(model.placement, sampler_placement, learning, prompts_per_step)
    examples = data.as_examples(prompts_and_answers)
    text = text_of(model, examples, max_tokens, chat_template, template_options)
    execution = model.execution(Sampling(max_tokens, temperature, top_k, top_p))
    adapter = _adapter(model, lora, seed)
    built = programs.build(
        replace(execution, lora=adapter and adapter.lora),
        learning,
        _optimizer(optimizer),
        mini_batches=mini_batches,
        epochs=epochs,
        mismatch=dial,
        max_staleness=max_staleness,
        sampler_placement=sampler_placement,
        sampler_devices=own,
    )
    settings = (*counts, max_tokens, seed, refills, learning.objective, dial)
    data.agree(examples, repr((*settings, routing, adapter and adapter.lora)))
    return _steps(
        model,
        data.as_task(examples, reward, batched=batched),
        text,
        built,
        adapter,
        seed=seed,
        steps=steps,
        prompts_per_step=prompts_per_step,
        exact=not dial.active if exact is None else exact,
        refills=refills,
    )


def _placed(model: Model, placement: Placement | None) -> Model:
    check_model("grpo", model)
    if not isinstance(placement, Placement | None):
        raise InputError(f"grpo: placement must be a tim_jax.Placement, got {placement!r}")
    model = model if placement is None else replace(model, placement=placement)
    check_devices(model.placement)
    return model


def _check_switches(**switches: bool | None) -> None:
    for name, value in switches.items():
        if not isinstance(value, bool) and (value is not None or name != "exact"):
            raise InputError(f"grpo: {name} must be True or False, got {value!r}")


def _checked(*counts: int) -> tuple[int, ...]:
    for name, value in zip(_COUNTS, counts, strict=True):
        whole(f"grpo: {name}", value, least=int(name != "max_staleness"))
    return counts


def _check_drawing(objective: Objective, temperature: float, refills: int, seed: int) -> None:
    whole("grpo: refills", refills, least=0)
    whole("grpo: seed", seed, least=0, most=2**32 - 1)
    if refills and (rule := advantages.why_no_refills(objective.estimator)):
        raise InputError(f"grpo: refills = {refills} {rule}")
    if temperature == 0:
        raise InputError(
            f"grpo: temperature must be greater than 0, got {temperature}: greedy responses have no"
            " log-probs to learn from"
        )


def _own_devices(
    learner: Placement, sampler: Placement | None, learning: Learning, prompts: int
) -> Devices | None:
    """Those of a sampler on a mesh of its own. Refuses what would be refused after a rollout."""
    objective, rows = learning.objective, prompts * learning.group_size
    drawing = learner if sampler is None else sampler
    sharded.check_rows(rows, drawing, "of the sampler")
    if objective.estimator == "remax":
        sharded.check_rows(prompts, drawing, "of the greedy responses of remax")
    if objective.controller is not None:
        objective.controller.check(rows)
    return None if sampler is None else split(learner, sampler, jax.devices())


def _steps(
    model: Model, task: Task, text: Text, built: Programs, adapter: Adapter | None, **how: Any
) -> Iterator[Step]:
    trained = model.params if adapter is None else adapter.arrays
    base = None
    if adapter is not None:
        base = built.place(adapters.narrowed(processes.whole(model.params)))
    # Training takes the buffers of what it starts from: the model keeps its own.
    start = built.init(_apart(trained))
    reference = None
    if built.learning.objective.has_reference:
        reference = built.prepare(adapters.whole(_apart(trained), base))
    how |= {"programs": built, "reference": reference, "base": base}
    kept = model, adapter and adapter.lora, _merging(built, base)
    for step in loop.train(start, task, text, **how):
        yield Step(step.number, step.metrics, step.timing, step.samples, step.state, *kept)


def _merging(built: Programs, base: Any) -> Callable[[Any], Any]:
    """What makes the parameters of a model of what is trained, in buffers of their own."""
    merged = built.merged
    if merged is None:
        return loop.copied
    return lambda trained: merged(adapters.whole(trained, base))


def _adapter(model: Model, lora: Lora | Adapter | None, seed: int) -> Adapter | None:
    """The adapter to start from."""
    if isinstance(lora, Adapter):
        adapters.check(lora.arrays, model.config, lora.lora)
        return lora
    if lora is None:
        return None
    if not isinstance(lora, Lora):
        raise InputError(f"grpo: lora must be a tim_jax.Lora or an adapter, got {lora!r}")
    return Adapter(lora, adapters.init(model.config, lora, seed))


def _apart(params: Any) -> Any:
    """Parameters in buffers of their own; those on the host are copied by being moved."""
    on_device = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))
    return loop.copied(params) if on_device else params


def _learning(
    objective: Objective | None,
    correction: Correction | None,
    mode: Mode | None,
    samples: int,
    **how: Any,
) -> Learning:
    if how["micro_batch"] is not None:
        whole("grpo: micro_batch", how["micro_batch"], least=1)
    check_choice("grpo: routing", how["routing"], get_args(Routing))
    objective = objectives.Objective() if objective is None else objective
    if not isinstance(objective, Objective):
        raise InputError(
            f"grpo: objective must be one of tim_jax.objectives, got {type(objective).__name__}"
        )
    correction = corrections.none() if correction is None else corrections.chain(correction)
    if mode is None:
        weighs = any(block.effect == "weight" for block in correction.blocks)
        mode = "recompute" if weighs and objective.has_ratio else "bypass"
    return Learning(objective, samples, mode=mode, correction=correction, **how)


def _check_rows(learning: Learning, where: Placement, *, prompts: int, mini_batches: int) -> None:
    """Before anything is compiled, what compiling would refuse."""
    rows, micro_batch = prompts * learning.group_size, learning.micro_batch
    if rows % mini_batches:
        raise InputError(
            f"grpo: mini_batches = {mini_batches} must divide the {rows} responses of a step"
            " (prompts_per_step x samples)"
        )
    own = rows // mini_batches
    sharded.check_rows(own, where, "of an update")
    if micro_batch is None:
        return
    if own % min(micro_batch, own):
        raise InputError(
            f"grpo: micro_batch = {micro_batch} must divide the {own} responses of an update"
        )
    sharded.check_rows(min(micro_batch, own), where, "micro_batch")


def _optimizer(optimizer: Any) -> optax.GradientTransformationExtraArgs:
    if not isinstance(optimizer, optax.GradientTransformation):
        raise InputError(
            "grpo: optimizer must be of optax, such as optax.adamw(1e-6), got"
            f" {type(optimizer).__name__}"
        )
    return optax.with_extra_args_support(optimizer)


def _dial(sampler: Any) -> Mismatch:
    """Entries as values or as a configuration's tables."""
    if isinstance(sampler, Mismatch):
        return sampler
    if isinstance(sampler, Entry | Mapping | str) or not isinstance(sampler, Iterable):
        raise InputError(
            "grpo: sampler must be a list of entries, such as"
            f' [tim_jax.mismatch.kv_cache(dtype="float8_e4m3fn")], got {sampler!r}'
        )
    entries: list[Entry] = []
    for entry in sampler:
        entries += [entry] if isinstance(entry, Entry) else mismatch.build([entry]).entries
    return Mismatch(tuple(entries))
