"""Whole programs at real sizes: what is compiled, and with what arguments it is called."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from setting import Setting, device_params, normal

from tim_jax import objectives
from tim_jax.common.types import Prompts, Rollout
from tim_jax.instruments.plan import workload
from tim_jax.instruments.plan.workload import Program, Workload
from tim_jax.model.config import ModelConfig
from tim_jax.model.execution import Execution, Sampling
from tim_jax.rl import programs
from tim_jax.rl.training import Training
from tim_jax.rl.types import Experience, Learning, TrainState


@dataclass(frozen=True)
class Amount:
    """Sequences of one call, and tokens of each: prompt and response."""

    prompts: int
    prompt: int
    new: int
    samples: int = 1  # of a prompt
    micro_batch: int | None = None

    @property
    def rows(self) -> int:
        return self.prompts * self.samples


@dataclass(frozen=True)
class Whole:
    """One side of one model: exact or native numerics, and the programs of a step."""

    setting: Setting
    model: str
    side: str
    amount: Amount

    @property
    def config(self) -> ModelConfig:
        return self.setting.model(self.model)

    @property
    def workload(self) -> Workload:
        numerics = {
            "exact": partial(self.setting.exact, "bfloat16", tuned=True),
            "exact, one tile": partial(self.setting.exact, "bfloat16"),
            "exact, Mosaic's products": partial(self.setting.mosaic, tuned=True),
            "native": partial(self.setting.native, "bfloat16"),
        }[self.side]()
        amount = self.amount
        objective = objectives.grpo(kl_coefficient=0.0)
        if amount.samples == 1:  # of which only samples are drawn: there is no group
            objective = replace(objective, estimator="reinforce")
        training = Training(
            Execution(
                self.config, self.setting.fitted(self.config, numerics), Sampling(amount.new)
            ),
            Learning(objective, amount.samples, micro_batch=amount.micro_batch),
            optax.adamw(1e-6),
            prompts_per_step=amount.prompts,
        )
        return Workload(training, prompt_length=amount.prompt)

    @property
    def sampling(self) -> Program:
        return workload.sampling(self.workload, _devices())

    @property
    def updating(self) -> Program:
        return workload.updating(self.workload, _devices())

    @property
    def scoring(self) -> Program:
        return workload.scoring(self.workload, _devices())

    @property
    def step(self) -> tuple[Program, Program, Program]:
        """All programs of a GRPO step."""
        return self.sampling, self.scoring, self.updating

    def build(self) -> programs.Programs:
        """The programs of a run, which are the same."""
        return programs.build(self.workload.training)

    def weights(self) -> Any:
        """Random compute weights; the masters are let go."""
        return programs.weights_program(self.workload.execution)(self._params())

    def state(self, built: programs.Programs) -> TrainState:
        return built.init(self._params())

    def _params(self) -> Any:
        return device_params(jax.random.key(0), self.config)

    def prompts(self) -> Prompts:
        count, length = self.amount.prompts, self.amount.prompt
        return Prompts(
            tokens=jax.random.randint(
                jax.random.key(1), (count, length), 0, self.config.vocab_size
            ),
            lengths=jnp.full((count,), length, jnp.int32),
            ids=jnp.arange(count, dtype=jnp.int32),
        )

    def experience(self) -> Experience:
        """Random tokens of full length, with random advantages."""
        rows, prompt, new = self.amount.rows, self.amount.prompt, self.amount.new
        draw = partial(jax.random.randint, minval=0, maxval=self.config.vocab_size)
        rollout = Rollout(
            prompts=draw(jax.random.key(3), (rows, prompt)),
            prompt_lengths=jnp.full((rows,), prompt, jnp.int32),
            responses=draw(jax.random.key(4), (rows, new)),
            lengths=jnp.full((rows,), new, jnp.int32),
            log_probs=jnp.full((rows, new), -10.0, jnp.float32),
            finished=jnp.ones((rows,), bool),
        )
        return Experience(
            rollout=rollout,
            advantages=normal(5, rows),
            mask=rollout.mask,
            old_log_probs=rollout.log_probs,
            coefficients=jnp.ones((rows, new), jnp.float32),
            kept=rollout.mask,
        )


def placed(values: Any, like: Any) -> Any:
    """Arrays where a program was compiled to have them: the same program is then found again."""
    return jax.tree.map(lambda x, shape: jax.device_put(x, shape.sharding), values, like)


def _devices():
    return tuple(jax.devices()[:1])
