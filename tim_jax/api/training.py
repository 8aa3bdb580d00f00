"""Training as a generator of steps: the caller logs, stops and keeps what it wants."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tim_jax import corrections, optimizers
from tim_jax.api import data
from tim_jax.api.model import Model, check_jax, check_model
from tim_jax.api.rollouts import text_of
from tim_jax.api.steps import Step, start
from tim_jax.common.errors import InputError
from tim_jax.common.inputs import check_whole, refuse_all_but, shown
from tim_jax.corrections import Correction, Mode
from tim_jax.model import adapters
from tim_jax.objectives import Objective
from tim_jax.placement import processes
from tim_jax.rl import drawing, loop, programs, rules
from tim_jax.rl.drawing import Text
from tim_jax.rl.programs import Programs
from tim_jax.rl.rules import Turns
from tim_jax.rl.training import FIELDS, Training
from tim_jax.tasks.base import Task
from tim_jax.tasks.custom import user_code
from tim_jax.tasks.episodes import Environment, Noted

IN_TRAINING = {
    **{
        one.name: f"objective=tim_jax.objectives.Objective({one.name}=...)"
        for one in fields(Objective)
    },
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
    itself stays as it is. The steps are a function of the arguments and the seed alone, unless the
    chat template prints the date: then prompts have the date of the call. Templates of Llama, and
    some others, take it as an option: `dataclasses.replace(model, template_options={"date_string":
    "26 Jul 2024"})`. Under several processes all call this with the same arguments, and share the
    grading.

    Args:
      model: to start from.
      prompts_and_answers: (prompt, answer) pairs or rows with these keys, from any iterable, which
        is read once, at once. A prompt is text or a list of chat messages, an answer any value.
        They are visited in an order of the seed, as often as the steps need.
      reward: (prompts, completions, answers) -> one finite number for each completion, all in
        lists; `tim_jax.per_item` makes one of a function of one completion. Called in this process,
        without a time limit; and once at the start, to try it, with an answer as the completion.
      respond: in place of a reward, an environment that takes turns with the policy: (state,
        completion) -> (state, `tim_jax.Reply`), with the turn's key u32[2] as a third argument if
        it takes one. `completion` has `text`, `tokens` and `ended`. The answers of the rows are the
        states that episodes begin with, a copy for each sample. It is called in this process, one
        turn after another, from a thread of its own. An episode's reward is the sum over its turns.
      steps: how many.
      samples: responses per prompt, the group whose mean reward is the baseline; 8 if None.
      prompts_per_step: groups of a step; 8 if None.
      max_tokens: of a response, with `respond` of one turn; if None, 256, or half of the model's
        positions (with `respond`, a 32nd) if that is less.
      max_turns: of an episode, after which it ends as it is; 8 if None. All its turns and replies
        have at most twice `max_turns` times `max_tokens` tokens, or as many as the model has room
        for. If `training` has turns, they have its `max_tokens`, which is 256 unless
        `model.training(max_tokens=...)` says more. An episode ends before a reply that does not
        fit. What is done about a chat template that rewrites earlier turns is in the training's
        turns: `tim_jax.Turns(8, 64, history="cut")`.
      optimizer: of optax; AdamW with a learning rate of 1e-6 if None. A model in float16 scales the
        loss, so that small gradients are not lost: as `optimizers.dynamic_loss_scale(optimizer)`
        does, unless it is one already. Arrays of the layers are stacked on a leading axis: a norm
        has the shape [layers, n], a matrix [layers, in, out]. So choose masks by name, not by the
        number of axes, and give Muon its `muon_weight_dimension_numbers`, as docs/python.md does.
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
    check_whole("grpo: steps", steps, least=1)
    check_whole("grpo: seed", seed, least=0, most=2**32 - 1)
    given = {
        "samples": samples,
        "prompts_per_step": prompts_per_step,
        "max_tokens": max_tokens,
        "turns": None,
        "optimizer": optimizer,
        "objective": objective,
        "correction": correction,
    }
    examples = data.as_examples(prompts_and_answers)
    if respond is None:
        _refuse_turns(reward, training, max_turns)
        task = drawing.shared(data.as_task(examples, reward))
    elif reward is not None:
        raise InputError("grpo: give reward or respond, not both: respond gives the rewards")
    else:
        task = data.as_episodes(examples, respond)
        given |= _episodes(model, task, training, max_turns, max_tokens)
    model, run = settle("grpo", model, training, given)
    most = run.execution.sampling.max_tokens
    text = text_of(model, examples, most, *_template(model, task))
    check_longest(run, text.max_prompt_length + most)
    environment = None
    if task.environment is not None:
        assert run.turns is not None  # of `_episodes`
        stops, history = run.execution.sampling.stop_tokens, run.turns.history
        environment = text.bridged(task.environment, stops, history)
    built = programs.build(run)
    # An optimizer is functions, which have no text.
    settings = [getattr(run, one.name) for one in fields(run) if one.name != "optimizer"]
    data.agree(examples, repr((steps, seed, settings)))
    how = {"seed": seed, "steps": steps, "environment": environment}
    return _steps(model, task, text, built, **how)


def _template(model: Model, task: Task) -> tuple[Any, Mapping[str, Any]]:
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


def _episodes(
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
    text = text_of(model, task.train, turns.max_tokens, *_template(model, task))
    room = model.config.most_positions - text.max_prompt_length
    return {"turns": turns, "max_tokens": min(2 * turns.max_turns * turns.max_tokens, room)}


def settle(
    who: str, model: Model, training: Training | None, given: Mapping[str, Any]
) -> tuple[Model, Training]:
    """A run by the arguments that are given beside it, and the model as the run computes it.

    Everything is checked; nothing is compiled. Arguments that are None are not given.
    """
    given = {name: value for name, value in given.items() if value is not None}
    _check_values(who, given.get("objective"), given.get("optimizer"), training)
    with named(who):
        run = _run(who, model, training, given)
    where = run.execution.placement
    return replace(model, placement=where, numerics=run.execution.numerics), run


def check_longest(run: Training, longest: int) -> None:
    """Refuses a micro-batch that does not hold a prompt and its response of `longest` tokens."""
    tokens, where = run.learning.micro_batch_tokens, run.execution.placement
    if tokens is not None:
        rules.check_micro_batch_tokens(tokens, longest=longest, placement=where)


def _check_values(who: str, objective: Any, optimizer: Any, training: Any) -> None:
    if not isinstance(objective, Objective | None):
        raise InputError(
            f"{who}: objective must be one of tim_jax.objectives, got {type(objective).__name__}"
        )
    if not isinstance(optimizer, optax.GradientTransformation | None):
        raise InputError(
            f"{who}: optimizer must be of optax, such as optax.adamw(1e-6), got"
            f" {type(optimizer).__name__}"
        )
    if not isinstance(training, Training | None):
        raise InputError(
            f"{who}: training must be a value such as model.training(micro_batch=4), got"
            f" {shown(training)}"
        )


def _run(who: str, model: Model, training: Training | None, given: dict[str, Any]) -> Training:
    for name in ("samples", "prompts_per_step"):
        if name in given:
            check_whole(f"{who}: {name}", given[name], least=1)
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
    processes.check_all_used(run.execution.placement)
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
    trained = adapters.trained_shapes(run.execution.config, run.execution.lora)
    told = ("response_length", "gradient_norm", "effective_sample_size")
    extra = {name: jax.ShapeDtypeStruct((), jnp.float32) for name in told}
    extra["finite"] = jax.ShapeDtypeStruct((), jnp.bool_)
    step = partial(optimizers.guarded_step, optax.with_extra_args_support(run.optimizer))
    given = f"gradients, parameters, finite and {', '.join(told)}, but no loss"
    with user_code(f"{who}: optimizer, which is given {given},"):
        state = jax.eval_shape(partial(optimizers.first_state, run.optimizer), trained)
        jax.eval_shape(step, trained, state, trained, **extra)
    _check_muon(who, state)


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


def _steps(
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
            failure = processes.led(lambda: noted.failure)  # process 0 alone asks it
            raise InputError(
                f"grpo: respond failed in all {len(step.samples)} episodes of step 1, the first"
                f" time by {failure}"
            )
        seen = step.number, step.metrics, step.timing, step.samples
        yield Step(*seen, step.state, step.weights, started)
