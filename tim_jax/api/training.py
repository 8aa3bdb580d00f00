"""Training as a generator of steps: the caller logs, stops and keeps what it wants."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import optax

from tim_jax import corrections, placement
from tim_jax.api.model import Model, check_jax, check_model
from tim_jax.api.rollouts import as_prompt, has_columns, text_of
from tim_jax.app.run import display
from tim_jax.common import waiting
from tim_jax.common.errors import InputError, did_you_mean
from tim_jax.common.inputs import check_whole, refuse_all_but, shown
from tim_jax.corrections import Correction, Mode
from tim_jax.model import adapters
from tim_jax.model.adapters import Adapter
from tim_jax.objectives import Objective
from tim_jax.rl import drawing, loop, programs, rules
from tim_jax.rl.drawing import Sample, Text
from tim_jax.rl.programs import Programs
from tim_jax.rl.rules import Turns
from tim_jax.rl.training import FIELDS, TOLD, Training
from tim_jax.rl.types import TrainState
from tim_jax.tasks import custom
from tim_jax.tasks.base import Environment, Example, Task, check_open
from tim_jax.tasks.custom import user_code
from tim_jax.tasks.environments import Here, Noted, pack

_KEYS = ("prompt", "answer")
_ANSWER = "answer"  # where an example's data keep it: any value, not only text


@dataclass(frozen=True, repr=False)
class Step:
    """One finished step of training; `print` shows it as a line."""

    number: int
    """From 1."""
    metrics: dict[str, float]
    """What was measured: `reward`, `exact_share`, `response_length`, `loss` and many more."""
    timing: dict[str, float]
    """Seconds and tokens per second."""
    samples: list[Sample]
    """Each completion with its prompt, answer and reward."""
    state: TrainState
    """All that an update changes; the next step takes its memory."""
    _weights: Any
    started: "Started"
    """What all steps have in common."""

    def __str__(self) -> str:
        fields = display.step_fields(self.metrics | self.timing)
        return f"step {self.number}  " + "  ".join(f"{label} {text}" for label, text in fields)

    def __repr__(self) -> str:
        """The line, and the first completions with their rewards."""
        lines = (display.completion_line(sample, width=100) for sample in self.samples[:4])
        return "\n".join([str(self), *lines])

    def _repr_html_(self) -> str:
        return display.completions_html(str(self), self.samples[:8])

    @cached_property
    def model(self) -> Model:
        """The model after this step.

        A copy of its own if training goes on, as that takes the step's buffers: ask for it before
        the next step, and only at steps where you need it. Adapters are merged; it computes the
        bits that training had.

        Raises:
          InputError: training has gone on, and the step's weights are gone.
        """
        self.check_there()
        started = self.started
        return replace(started.model, params=started.merged(self.state.params), adapter=None)

    @cached_property
    def adapter(self) -> Adapter:
        """The adapter after this step, to save it (`save_adapter`) or go on from it; a copy too.

        Raises:
          InputError: none is trained, or as `model`.
        """
        lora = self.started.programs.training.execution.lora
        if lora is None:
            raise InputError(
                "there is no adapter; training=model.training(lora=tim_jax.Lora(8)) trains one"
            )
        self.check_there()
        return Adapter(lora, loop.copied(self.state.params))

    @property
    def weights(self) -> Any:
        """The parameters as they are computed with. Raises `InputError` as `model`."""
        self._check(self._weights)
        return self._weights

    def check_there(self) -> None:
        """Raises `InputError` if training has gone on, and the step's weights are gone."""
        self._check(self.state.params)

    def _check(self, arrays: Any) -> None:
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(arrays)):
            raise InputError(
                f"the model of step {self.number} is gone, its memory was taken by the next step;"
                " take step.model before going on"
            )


class Started(NamedTuple):
    """What a training started from, and computes with: the same at each of its steps."""

    model: Model
    programs: Programs
    base: Any  # the parameters that stay as they are, if adapters are trained
    reference: Any  # compute weights of the KL term's reference policy, if there is one

    def prepared(self, state: TrainState) -> Any:
        """The parameters of a state as they are computed with."""
        return self.programs.prepare(adapters.whole(state.params, self.base))

    def merged(self, trained: Any) -> Any:
        """The parameters of a model of what is trained, in buffers of their own."""
        merge = self.programs.merged
        return loop.copied(trained) if merge is None else merge(adapters.whole(trained, self.base))


@waiting.during("putting the model on the devices", about=waiting.COMPILES)
def start(model: Model, built: Programs, seed: int) -> tuple[TrainState, Started]:
    """The state before the first step, and what stays; `seed` names the values of new adapters."""
    lora, trained, base = built.training.execution.lora, model.params, None
    if lora is not None:
        given = model.adapter
        trained = adapters.init(model.config, lora, seed) if given is None else given.arrays
        base = built.place(adapters.narrowed(placement.whole(model.params)))
    # Training takes the buffers of what it starts from: the model keeps its own.
    state = built.init(_copy_apart(trained))
    reference = None
    if built.training.learning.objective.has_reference:
        reference = built.prepare(adapters.whole(_copy_apart(trained), base))
    return state, Started(model, built, base, reference)


def _copy_apart(params: Any) -> Any:
    """Parameters in buffers of their own; those on the host are copied by being moved."""
    on_device = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))
    return loop.copied(params) if on_device else params


_OF_OBJECTIVES = "objective=tim_jax.objectives.Objective({}=...)"
IN_TRAINING = {
    **{one.name: _OF_OBJECTIVES.format(one.name) for one in fields(Objective)},
    **{name: f"training=model.training({name}=...)" for name in FIELDS},
    "sampler": "training=model.training(mismatch=[...])",
    "max_episode_tokens": "training=model.training(turns=tim_jax.Turns(...), max_tokens=...)",
    "history": 'training=model.training(turns=tim_jax.Turns(..., history="cut"), max_tokens=...)',
}
"""Arguments that `grpo` and `learn` take inside of others, and how."""


@refuse_all_but(IN_TRAINING)
def grpo(
    model: Model,
    prompts_and_answers: Iterable[Any],
    *,
    reward: Callable[..., Any] | None = None,
    respond: Callable[..., Any] | None = None,
    steps: int,
    samples: int | None = None,
    prompts_per_step: int | None = None,
    max_tokens: int | None = None,
    max_turns: int | None = None,
    optimizer: optax.GradientTransformation | None = None,
    objective: Objective | None = None,
    correction: Correction | None = None,
    training: Training | None = None,
    seed: int = 0,
) -> Iterator[Step]:
    """Trains a model by group-relative policy gradients, and yields each step as it is done.

    A step draws `samples` responses to each of `prompts_per_step` prompts, grades them, and updates
    the weights. Everything is checked before the first step; nothing is written to disk; `model`
    itself stays as it is. The steps are a function of the arguments and the seed alone, and of the
    date of the call if the chat template prints it and is not told it, as templates of Llama can
    be: `dataclasses.replace(model, template_options={"date_string": "26 Jul 2024"})`. Several
    processes all call this with the same arguments, and share the grading.

    Args:
      model: to start from.
      prompts_and_answers: (prompt, answer) pairs or rows with these keys, from any iterable, which
        is read at once. A prompt is text or a list of chat messages, an answer any value. They are
        visited in an order of the seed, as often as the steps need.
      reward: (prompts, completions, answers) -> one finite number for each completion, all in
        lists; `tim_jax.per_item` makes one of a function of one completion. Called in this process,
        without a time limit; and once at the start, to try it, with an answer as the completion.
      respond: in place of a reward, an environment that takes turns with the policy: (state,
        completion) -> (state, `tim_jax.Reply`), with the turn's key u32[2] as a third argument if
        it takes one. `completion` has `text`, `tokens` and `ended`. Episodes begin with the answers
        of the rows as states, a copy for each sample. Called in this process, one turn after
        another, from a thread of its own. An episode's reward is the sum over its turns.
      steps: how many.
      samples: responses per prompt, the group whose mean reward is the baseline; 8 if None.
      prompts_per_step: groups of a step; 8 if None.
      max_tokens: of a response, with `respond` of one turn; if None, 256, or half of the model's
        positions (with `respond`, a 32nd) if that is less.
      max_turns: of an episode, after which it ends as it is; 8 if None. All its turns and replies
        have at most twice `max_turns` times `max_tokens` tokens, or as many as the model has room
        for; if `training` has turns, its `max_tokens`, which is 256 unless set. An episode ends
        before a reply that does not fit. What is done about a chat template that rewrites earlier
        turns is in the training's turns: `tim_jax.Turns(8, 64, history="cut")`.
      optimizer: of optax; AdamW with a learning rate of 1e-6 if None. A model in float16 scales the
        loss as `optimizers.dynamic_loss_scale(optimizer)` does, unless it is one already. Arrays of
        the layers are stacked: a norm has the shape [layers, n], a matrix [layers, in, out]. So
        choose masks by name, not by the number of axes, and give Muon its
        `muon_weight_dimension_numbers` (docs/python.md).
      objective: advantages, loss and how losses are added up, see `tim_jax.objectives`. None: the
        advantages of GRPO, the clipped ratio, the mean over tokens, and no KL term.
      correction: of a mismatch between sampler and learner, see `tim_jax.corrections`. If the loss
        would hold its ratio a second time, the mode becomes "recompute".
      training: everything else, as `model.training` makes it; arguments given beside it win.
        `model.training(micro_batch=4, epochs=2)` changes how a step is learnt from,
        `model.training(mismatch=[...])` makes the sampler differ from the learner on purpose (see
        `tim_jax.mismatch`), and `model.training(lora=tim_jax.Lora(8))` trains adapters in place of
        all weights; those of `model.adapter` are gone on with. None: `model.training()`.
      seed: names the random numbers and the order of the prompts.

    Raises:
      InputError: an argument that is wrong or does not go with the others; from a step, a reward
        that raises or is no finite number; from the first step, a `respond` that fails in all
        episodes.
      MismatchError: from a step, see `Training.exact`.
      NonFiniteError: from a step, after five updates in a row that were not finite, or if the
        log-probs of both sides are not finite.
    """
    check_model("grpo", model)
    check_jax("grpo")
    steps = check_whole("grpo: steps", steps, least=1)
    seed = check_whole("grpo: seed", seed, least=0, most=2**32 - 1)
    given = {
        "samples": samples,
        "prompts_per_step": prompts_per_step,
        "max_tokens": max_tokens,
        "turns": None,
        "optimizer": optimizer,
        "objective": objective,
        "correction": correction,
    }
    examples = _as_examples(prompts_and_answers)
    if respond is None:
        _refuse_turns(reward, training, max_turns)
        task = drawing.shared(_as_task(examples, reward))
    elif reward is not None:
        raise InputError("grpo: give reward or respond, not both: respond gives the rewards")
    else:
        task = _as_episodes(examples, respond)
        given |= _limit_episodes(model, task, training, max_turns, max_tokens)
    model, run = settle("grpo", model, training, given)
    most = run.execution.sampling.max_tokens
    text = text_of(model, examples, most, *_read_template(model, task))
    run.check_longest(text.max_prompt_length + most)
    environment = None
    if task.environment is not None:
        assert run.turns is not None  # of `_limit_episodes`
        stops, history = run.execution.sampling.stop_tokens, run.turns.history
        environment = text.bridged(task.environment, stops, history)
    built = programs.build_once(run)
    if jax.process_count() > 1:
        prompts = repr([example.prompt for example in examples])
        digest = hashlib.sha256(prompts.encode()).hexdigest()
        # An optimizer is functions, which have no text.
        settings = [getattr(run, one.name) for one in fields(run) if one.name != "optimizer"]
        same = f"{digest} {(steps, seed, settings)!r}"
        placement.agree(same, "its prompts or its arguments of grpo")
    return _train(model, task, text, built, seed=seed, steps=steps, environment=environment)


def _as_examples(prompts_and_answers: Any) -> tuple[Example, ...]:
    """Pairs, or rows with the keys "prompt" and "answer"; their other keys are left alone."""
    if isinstance(prompts_and_answers, str) or not isinstance(prompts_and_answers, Iterable):
        raise InputError(
            "grpo: prompts_and_answers must be a list of (prompt, answer) or another iterable of"
            f" them, got {shown(prompts_and_answers)}"
        )
    if has_columns(prompts_and_answers):
        raise InputError(
            "grpo: prompts_and_answers must be rows, got a table of columns"
            f' ({type(prompts_and_answers).__name__}); zip(table["prompt"], table["answer"]) gives'
            " its rows"
        )
    rows = tuple(_example(row, f"grpo: row {i}") for i, row in enumerate(prompts_and_answers))
    if not rows:
        raise InputError(
            "grpo: prompts_and_answers is empty; a generator that was read before has nothing left"
        )
    return rows


def _example(row: Any, where: str) -> Example:
    if isinstance(row, Mapping):
        for key in _KEYS:
            if key not in row:
                hint = did_you_mean(key, map(str, row)) if row else ""
                raise InputError(f"{where} has no {key!r}{hint}")
        prompt, answer = (row[key] for key in _KEYS)
    elif isinstance(row, Sequence) and not isinstance(row, str) and len(row) == len(_KEYS):
        prompt, answer = row
    else:
        raise InputError(
            f'{where} must be a pair (prompt, answer) or {{"prompt": ..., "answer": ...}}, got'
            f" {shown(row)}"
        )
    asked = as_prompt(prompt, f"{where}: prompt")
    check_open(asked, f"{where}: prompt")
    with user_code(f"{where}: the answer's text"):
        text = str(answer)
    return Example(asked, text, {_ANSWER: answer})


def _as_episodes(examples: tuple[Example, ...], respond: Callable[..., Any]) -> Task:
    """A task of these examples, whose answers are the states that episodes begin with."""
    if not callable(respond):
        raise InputError(
            "grpo: respond must be a function (state, completion) -> (state, tim_jax.Reply), got"
            f" {shown(respond)}"
        )
    if jax.process_count() > 1:
        raise InputError("grpo: respond needs a single process; there are several")
    name = getattr(respond, "__name__", type(respond).__name__)
    for row, example in enumerate(examples):
        try:
            pack(example.data[_ANSWER])
        except InputError as error:
            raise InputError(f"grpo: row {row}: {error}") from error.__cause__
    begun = tuple(replace(x, data={"state": x.data[_ANSWER]}) for x in examples)
    return Task(name, begun, (), lambda *_: [], environment=Here(respond))


def _as_task(examples: tuple[Example, ...], reward: Callable[..., Any] | None) -> Task:
    """A task of these examples, graded by the user's function, which is tried at once.

    It is given the first example's answer as its completion.
    """
    if not callable(reward):
        raise InputError(
            "grpo: reward must be a function (prompts, completions, answers) -> numbers, got"
            f" {shown(reward)}"
        )
    name = getattr(reward, "__name__", type(reward).__name__)
    try:
        grade = custom.as_grader(reward, name, answer=lambda example: example.data[_ANSWER])
        grade(examples[:1], [examples[0].answer])
    except InputError as error:
        hint = f"; is it a function of one completion? reward=tim_jax.per_item({name})"
        lists = isinstance(error.__cause__, TypeError | AttributeError) or "sequence" in str(error)
        single = lists and not hasattr(reward, "__wrapped__")
        raise InputError(f"grpo: {error}{hint if single else ''}") from error.__cause__
    return Task(name, examples, (), grade)


def _read_template(model: Model, task: Task) -> tuple[Any, Mapping[str, Any]]:
    """How prompts go through the chat template, with the tools of an environment."""
    tools = () if task.environment is None else task.environment.tools
    if tools and "tools" in model.template_options:
        raise InputError(
            "grpo: the environment declares tools, and model.template_options has tools too; give"
            " one of them"
        )
    declared = {"tools": [*tools]} if tools else {}
    return model.chat_template, {**model.template_options, **declared}


def _refuse_turns(reward: Any, training: Training | None, max_turns: int | None) -> None:
    """Refuses what only episodes have."""
    if max_turns is not None:
        raise InputError(f"grpo: max_turns = {max_turns!r} is for episodes; give respond too")
    if isinstance(training, Training) and training.turns is not None:
        raise InputError(f"grpo: training has turns = {training.turns}; give respond too")
    if reward is None:
        raise InputError("grpo: give reward, or for episodes of several turns respond")


def _limit_episodes(
    model: Model, task: Task, training: Training | None, max_turns: int | None, tokens: int | None
) -> dict[str, Any]:
    """The run's limits: of an episode's turns, of the tokens of one, and of all its tokens."""
    for name, value in (("max_turns", max_turns), ("max_tokens", tokens)):
        if value is not None:
            check_whole(f"grpo: {name}", value, least=1)
    own = training if isinstance(training, Training) and training.turns else None
    if isinstance(training, Training) and not own:
        said = training.execution.sampling.max_tokens
        if said != model.most_tokens:
            raise InputError(
                f"grpo: training has max_tokens = {said}, of an episode, but no turns; give it"
                " turns too, or give max_tokens, of a turn, to grpo"
            )
    turns = own.turns if own else None
    turns = turns or Turns(max_tokens=max(1, min(256, model.config.most_positions // 32)))
    own_limits = max_turns or turns.max_turns, tokens or turns.max_tokens
    turns = Turns(*own_limits, history=turns.history)
    if own:
        return {"turns": turns, "max_tokens": own.execution.sampling.max_tokens}
    text = text_of(model, task.train, turns.max_tokens, *_read_template(model, task))
    room = model.config.most_positions - text.max_prompt_length
    return {"turns": turns, "max_tokens": min(2 * turns.max_turns * turns.max_tokens, room)}


def settle(
    who: str, model: Model, training: Training | None, given: Mapping[str, Any]
) -> tuple[Model, Training]:
    """The model as the run computes it, and the run by the arguments given beside it.

    All is checked, nothing compiled. Arguments that are None are not given.
    """
    given = {name: value for name, value in given.items() if value is not None}
    _check_values(who, given, training)
    with named(who):
        run = _make_run(who, model, training, given)
    own = run.execution
    stops = tuple(dict.fromkeys((*model.stop_tokens, *own.sampling.stop_tokens)))
    how = {"placement": own.placement, "numerics": own.numerics, "stop_tokens": stops}
    return replace(model, **how), run


def _check_values(who: str, given: Mapping[str, Any], training: Any) -> None:
    for name, kind, right in (
        ("objective", Objective, "one of tim_jax.objectives"),
        ("optimizer", optax.GradientTransformation, "of optax, such as optax.adamw(1e-6)"),
    ):
        if name in given and not isinstance(given[name], kind):
            got = type(given[name]).__name__
            made = ".gradient_transformation()"  # of `optax.MultiSteps`
            hint = f"; give its {made}" if hasattr(given[name], made[1:-2]) else ""
            raise InputError(f"{who}: {name} must be {right}, got {got}{hint}")
    if not isinstance(training, Training | None):
        raise InputError(
            f"{who}: training must be a value such as model.training(micro_batch=4), got"
            f" {shown(training)}"
        )


def _make_run(who: str, model: Model, training: Training | None, given: dict[str, Any]) -> Training:
    for name in ("samples", "prompts_per_step"):
        if name in given:
            given[name] = check_whole(f"{who}: {name}", given[name], least=1)
    run = model.training() if training is None else training
    if run.execution.config != model.config:
        raise InputError(f"{who}: training is of another architecture; take model.training(...)")
    lora = run.execution.lora
    if model.adapter is not None:
        adapters.check(model.adapter.arrays, model.config, model.adapter.lora)
    if model.adapter is not None and lora != model.adapter.lora:
        raise InputError(
            f"{who}: the model has an adapter of {model.adapter.lora}, but training has lora ="
            f" {lora}; take model.training(...)"
        )
    correction = corrections.chain(given.get("correction", run.learning.correction))
    objective = given.get("objective", run.learning.objective)
    weighs = any(block.effect == "weight" for block in correction.blocks)
    twice = "correction" in given and weighs and objective.has_ratio
    mode: Mode = "recompute" if twice else run.learning.mode
    # All at once: each change is checked, and new values may not go with old ones.
    run = run.varied(**{**given, "correction": correction, "objective": objective, "mode": mode})
    longest = run.execution.sampling.max_tokens
    run = run.varied(objective=objective.with_length(longest))
    placement.check_all_used(run.execution.placement)
    if run.execution.sampling.temperature == 0:
        raise InputError(
            f"{who}: temperature must be greater than 0, got 0: greedy responses have no log-probs"
            " to learn from"
        )
    run.check()
    _check_optimizer(who, run)
    return run


def _check_optimizer(who: str, run: Training) -> None:
    """Refuses an optimizer that fails as a step calls it, and Muon for vectors."""
    given = f"gradients, parameters, finite and {', '.join(TOLD)}, but no loss"
    with user_code(f"{who}: optimizer, which is given {given},"):
        first, _ = run.trace_optimizer()
    _check_muon(who, first.out_info)


def _check_muon(who: str, state: Any) -> None:
    """Refuses Muon for vectors: one of every layer, stacked, has two axes as a matrix has."""
    for own in jax.tree.leaves(state, is_leaf=_is_muon):
        found = jax.tree_util.tree_leaves_with_path(own.mu) if _is_muon(own) else []
        for path, leaf in found:
            if len(path) > 1 and leaf.ndim == 2:
                name = jax.tree_util.keystr(path, simple=True, separator=".")
                raise InputError(
                    f"{who}: optimizer: Muon would take {name} {list(leaf.shape)}, a vector of each"
                    " layer, for a matrix; give it muon_weight_dimension_numbers, as"
                    " docs/python.md does"
                )


def _is_muon(state: Any) -> bool:
    return isinstance(state, optax.contrib.MuonState)


@contextmanager
def named(who: str) -> Iterator[None]:
    """A context in which the error of settings that do not go together names the function."""
    try:
        yield
    except rules.RuleError as error:
        raise InputError(f"{who}: {error}") from None


def _train(
    model: Model,
    task: Task,
    text: Text,
    built: Programs,
    *,
    seed: int,
    environment: Environment | None,
    **how: Any,
) -> Iterator[Step]:
    state, started = start(model, built, seed)
    how |= {"programs": built, "reference": started.reference, "base": started.base}
    noted = None if environment is None else Noted(environment)
    for step in loop.train(state, task, text, seed=seed, environment=noted, **how):
        if noted and step.number == 1 and drawing.all_failed(step.metrics, len(step.samples)):
            failure = placement.led(lambda: noted.failure)  # process 0 alone asks it
            raise InputError(
                f"grpo: respond failed in all {len(step.samples)} episodes of step 1, the first"
                f" time by {failure}"
            )
        seen = step.number, step.metrics, step.timing, step.samples
        yield Step(*seen, step.state, step.weights, started)
