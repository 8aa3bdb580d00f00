"""GRPO in one file, to be copied and changed: every line of the algorithm is here.

A tiny transformer with random weights learns to copy a digit behind a `#`: `7=` -> `#7`. Each step
also counts the tokens whose log-probs by the learner are not the same bits as those that the
sampler recorded: none.

    python scripts/minimal_grpo.py --steps 60
"""

import argparse
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tim_jax.instruments.auditing import PRESETS
from tim_jax.model.execution import Execution, Sampling, jit
from tim_jax.model.parameters import init_params
from tim_jax.numerics import Numerics
from tim_jax.policy import sampler, scoring
from tim_jax.rl.drawing import Text
from tim_jax.tasks import builtin
from tim_jax.tasks.text import character_tokenizer

PROMPTS, SAMPLES, CLIP = 32, 16, 0.2  # prompts a step, responses a prompt, bound on the ratio

tokenizer = character_tokenizer(builtin.ALPHABET)
task = builtin.running_sums(digits=(1, 1), format_reward=0.1, eval_size=1)
text = Text(tokenizer, max_prompt_length=2)
# For a checkpoint: model = tim_jax.load(folder), which has a config, params and tokenizer.
config = replace(PRESETS["qwen3"], vocab_size=len(tokenizer))
# One value says what is computed and how. Sampler and learner share it: hence the same bits.
sampling = Sampling(2, temperature=1.0, stop_tokens=(tokenizer.eos_token_id,))
execution = Execution(config, Numerics(kv_block=16), sampling)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


def draw(params, prompts, key):
    """PROMPTS x SAMPLES responses, with the log-prob of every token that was drawn."""
    weights = execution.prepare(params)
    return sampler.sample(weights, prompts, key, execution=execution, samples=SAMPLES)


def advantages_of_groups(rewards):
    """Rewards of the responses to one prompt, less their mean, over their standard deviation."""
    groups = rewards.reshape(-1, SAMPLES)
    centred = groups - groups.mean(axis=1, keepdims=True)
    return (centred / (groups.std(axis=1, keepdims=True) + 1e-6)).reshape(-1)


def loss_of_tokens(log_probs, rollout, advantages):
    """PPO's clipped loss, [rows, tokens]. The ratio is to the log-probs that the sampler used."""
    ratio = jnp.exp(log_probs - rollout.log_probs)
    gain = advantages[:, None]
    return -jnp.minimum(ratio * gain, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * gain)


def update(params, state, rollout, advantages):
    """One optimiser step; also how many tokens were compared, and how many were not equal."""

    def loss(params):
        scores = scoring.score(execution.prepare(params), rollout, execution=execution)
        losses = loss_of_tokens(scores.log_probs, rollout, advantages)
        return jnp.mean(losses, where=rollout.mask), scores.log_probs

    gradient, log_probs = jax.grad(loss, has_aux=True)(params)
    changes, state = optimizer.update(gradient, state, params)
    different = log_probs.view(jnp.int32) != rollout.log_probs.view(jnp.int32)
    compared, unequal = jnp.sum(rollout.mask), jnp.sum(different & rollout.mask)
    return optax.apply_updates(params, changes), state, compared, unequal


def train(steps, seed=0):
    """Returns each step's (mean reward, tokens compared, tokens unequal)."""
    params = init_params(config, seed)
    state, history = optimizer.init(params), []
    drawing, updating = jit(draw, execution.numerics), jit(update, execution.numerics)
    for step in range(steps):
        rows = range(step * PROMPTS, (step + 1) * PROMPTS)
        examples = [task.train[row % len(task.train)] for row in rows]
        key = jax.random.fold_in(jax.random.key(seed), step)
        rollout = drawing(params, text.prompts(examples, rows), key)
        repeated = [example for example in examples for _ in range(SAMPLES)]
        grades = task.grade(repeated, text.completions(rollout))
        rewards = np.array([grade.reward for grade in grades], np.float32)
        found = updating(params, state, rollout, advantages_of_groups(rewards))
        params, state, compared, unequal = found
        print(f"step {step + 1}  reward {rewards.mean():.3f}  tokens {compared}  unequal {unequal}")
        assert compared > 0, "nothing was compared"
        assert unequal == 0, "sampler and learner differ"
        history.append((float(rewards.mean()), int(compared), int(unequal)))
    return history


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--steps", type=int, default=60)
    train(arguments.parse_args().steps)
