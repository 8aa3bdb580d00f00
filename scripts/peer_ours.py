"""bench_peer.py's worker for tim_jax: the exact sampler, and whole GRPO steps."""

import time
from dataclasses import replace
from functools import partial

import bench_common as common
import jax
import jax.numpy as jnp
from bench_exactness_cost import calibrated, make_prompts, model_config
from bench_slots import forced

from tim_jax import optimizers
from tim_jax.common.types import Prompts, Rollout
from tim_jax.instruments.auditing.cases import random_params
from tim_jax.model.execution import Batching, Execution, Sampling, jit
from tim_jax.objectives import Objective
from tim_jax.policy import sampler
from tim_jax.rl import loop, programs
from tim_jax.rl.training import Training
from tim_jax.rl.types import Learning

HALVINGS = 2  # where lengths are skewed: the slots of an empty queue are halved twice


class Worker:
    """Holds the compiled programs and the state that steps go on from."""

    def __init__(self, sizes: common.Sizes, batch: int, dtype: str):
        self.sizes, self.batch, self.calls = sizes, batch, 0
        widest = replace(sizes, prompt=sizes.limit or sizes.prompt)
        self.config = model_config(widest)
        numerics = calibrated(self.config, dtype, widest, batch=batch)
        self.execution = Execution(self.config, numerics, Sampling(sizes.response))
        self.params = jax.tree.map(jnp.asarray, random_params(self.config, 0))

    def key(self) -> jax.Array:
        self.calls += 1
        return jax.random.key(self.calls)

    def about(self) -> dict:
        return common.versions("jax", "jaxlib")

    def prepare_sampler(self) -> dict:
        self.weights = jax.jit(self.execution.prepare)(self.params)
        prompts = self.make_prompts(self.batch)
        program = programs.sampling_program(self.execution, samples=1)
        self.draw = partial(program, self.weights, prompts)
        return self.sample()

    def sample(self) -> dict:
        """A batch, down to texts and log-probs on the host, as the peer's call gives them."""
        return timed(self.draw, self.key())

    def prepare_skewed(self) -> dict:
        """Programs by number of slots; every sequence ends at the length it is told."""
        lengths = common.skewed(self.batch, self.sizes.longest)
        stop = (self.config.vocab_size - 1,)
        execution = replace(self.execution, sampling=Sampling(self.sizes.longest, stop_tokens=stop))
        draw = partial(forced, lengths=jnp.asarray(lengths), execution=execution)
        weights = jax.jit(execution.prepare)(self.params)
        prompts = self.make_prompts(self.batch)
        self.skewed = {}
        for slots in common.slots(self.batch):
            program = partial(
                sampler.sample,
                execution=execution,
                samples=1,
                batching=Batching(slots, HALVINGS),
                draw=draw,
            )
            self.skewed[slots] = partial(jit(program, execution.numerics), weights, prompts)
        return [self.sample_skewed(slots) for slots in self.skewed][-1]

    def sample_skewed(self, slots: int) -> dict:
        return timed(self.skewed[slots], self.key())

    def prepare_learner(self) -> dict:
        objective = Objective(aggregation="sequence_mean_token_mean")
        learning = Learning(objective, samples=common.GROUP, micro_batch_tokens=self.tokens())
        optimizer = optimizers.adamw(optimizers.Rate(1e-4), b2=0.999, max_grad_norm=0.0)
        count = self.batch // common.GROUP
        training = Training(self.execution, learning, optimizer, prompts_per_step=count)
        self.programs = programs.build(training)
        self.prompts = self.make_prompts(count)
        self.state = self.programs.init(self.params)
        self.weights = self.programs.prepare(self.params)
        return self.step()

    def tokens(self) -> int | None:
        """Of a micro-batch without padding, in 4 parts of the step's; None where nothing is padded.

        Parts bound the memory of an update.
        """
        if self.sizes.limit is None:
            return None
        rows = max(self.batch // 4, 1)
        return max(rows * (self.sizes.prompt + self.sizes.response), self.longest)

    @property
    def longest(self) -> int:
        return (self.sizes.limit or self.sizes.prompt) + self.sizes.response

    def make_prompts(self, count: int) -> Prompts:
        """Prompts of one length, padded to the limit."""
        prompts = make_prompts(self.config, self.sizes, count)
        padding = (self.sizes.limit or self.sizes.prompt) - self.sizes.prompt
        return replace(prompts, tokens=jnp.pad(prompts.tokens, ((0, 0), (0, padding))))

    def step(self) -> dict:
        """Rollouts, rewards, one update. Raises if a log-prob differs."""
        start = time.perf_counter()
        rollout = self.programs.sample(self.weights, self.prompts, self.key())
        rewards = jnp.asarray([common.share_even(text) for text in texts(rollout)], jnp.float32)
        self.state, self.weights, found, _ = loop.learn(
            self.state, self.weights, rollout, rewards, programs=self.programs
        )
        jax.block_until_ready((self.state, self.weights))
        seconds = time.perf_counter() - start
        loop.check_exact(found, self.calls)
        return {"seconds": seconds, "tokens": int(rollout.lengths.sum())}


def timed(draw, key: jax.Array) -> dict:
    """Seconds until texts and log-probs are on the host."""
    start = time.perf_counter()
    rollout = draw(key)
    texts(rollout)
    log_probs = jax.device_get(rollout.log_probs)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "tokens": int(rollout.lengths.sum()), "of": log_probs.size}


def texts(rollout: Rollout) -> list[str]:
    """Completions as the peer's tokenizer writes them: token ids in words."""
    responses, lengths = jax.device_get((rollout.responses, rollout.lengths))
    return [
        " ".join(map(str, row[:length].tolist()))
        for row, length in zip(responses, lengths, strict=True)
    ]


if __name__ == "__main__":
    common.serve(Worker, __doc__ or "")
