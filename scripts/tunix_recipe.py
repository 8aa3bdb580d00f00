"""A correction and the length-triggered decay in google-tunix's GRPO trainer.

    pip install google-tunix tim-jax            # Python 3.12 or newer
    python scripts/tunix_recipe.py --steps 3    # a random model of two layers, a minute

`CorrectedLearner` and `Optimizer` are what to copy; `main` is a small run that uses them.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.rl import common, rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout import base_rollout

from tim_jax import corrections, metrics, schedules

CORRECTION = corrections.token_mis(cap=2.0)
LENGTH, PROMPT, VOCABULARY = 8, 4, 32


class Optimizer(nnx.Optimizer):
    """Tells optax the mean response length of the step, which tunix does not."""

    def __init__(self, model, transform):
        super().__init__(model, transform, wrt=nnx.Param)
        self.length = nnx.Variable(jnp.float32(0))

    def update(self, model, grads):
        super().update(model, grads, response_length=self.length[...])


class CorrectedLearner(GRPOLearner):
    """GRPO whose losses are multiplied by a correction of the sampler's mismatch."""

    def _generate_and_compute_advantage(self, training_input, mode=rl_cluster.Mode.TRAIN):
        cluster, drawn = self.rl_cluster, []
        generate = cluster.generate

        def recording(*args, **named):
            drawn.append(generate(*args, **named))
            return drawn[0]

        cluster.generate = recording
        try:
            example = super()._generate_and_compute_advantage(training_input, mode)
        finally:
            cluster.generate = generate
        mask = example.completion_mask
        # By the actor itself: `get_actor_per_token_logps` takes weights of the last `sync_weights`,
        # which are those of the start where actor and sampler share them.
        trainer = common.compute_per_token_logps(
            *nnx.split(cluster.actor_trainer.model),
            prompt_tokens=example.prompt_ids,
            completion_tokens=example.completion_ids,
            pad_id=cluster.rollout.pad_id(),
            eos_id=cluster.rollout.eos_id(),
            temperature=self.algo_config.temperature,
        )
        recorded = np.zeros(mask.shape, np.float32)
        for row, log_probs in zip(recorded, drawn[0].logprobs, strict=True):
            row[: len(log_probs)] = log_probs
        corrected = corrections.correct(CORRECTION, log_ratio=trainer - recorded, mask=mask)
        self.seen = metrics.mismatch_metrics(trainer, recorded, mask) | corrected.metrics
        cluster.actor_trainer.optimizer.length[...] = jnp.mean(jnp.sum(mask, 1, jnp.float32))
        print({name: float(self.seen[name]) for name in ("kl_k3", "coefficient_mean")})
        return example.replace(sampler_is_weights=corrected.coefficients)


class Tokenizer:
    """Words are token ids: 0 pads, 1 begins, and nothing ends a response."""

    def encode(self, text, **_):
        return [int(word) for word in text.split()]

    def decode(self, tokens, **_):
        return " ".join(str(int(token)) for token in tokens)

    def pad_id(self):
        return 0

    def bos_id(self):
        return 1

    def eos_id(self):
        return VOCABULARY


def make_cluster():
    sizes = {"num_layers": 2, "embed_dim": 32, "hidden_dim": 64, "num_heads": 2}
    config = qwen3.ModelConfig(
        vocab_size=VOCABULARY,
        num_kv_heads=1,
        head_dim=16,
        rope_theta=10_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        **sizes,
    )
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    roles = rl_cluster.Role
    return rl_cluster.RLCluster(
        actor=qwen3.Qwen3(config, rngs=nnx.Rngs(0)),
        tokenizer=Tokenizer(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys((roles.ACTOR, roles.REFERENCE, roles.ROLLOUT), mesh),
            rollout_engine="vanilla",
            offload_to_cpu=False,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.identity(),  # replaced below
                eval_every_n_steps=10**9,
                max_steps=10**9,
                mini_batch_size=4,
                train_micro_batch_size=4,
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=LENGTH,
                max_prompt_length=PROMPT,
                kv_cache_size=PROMPT + LENGTH,
                temperature=1.0,
                top_p=1.0,
                top_k=None,
                return_logprobs=True,
                eos_tokens=[VOCABULARY],
            ),
        ),
    )


def share_even(prompts, completions, **_):
    return [np.mean([int(word) % 2 == 0 for word in text.split()]) for text in completions]


CHAIN = optax.chain(optax.adamw(1e-3), schedules.length_triggered_decay())


def train(cluster, steps, chain=CHAIN):
    """The learner after this many steps."""
    cluster.actor_trainer.optimizer = Optimizer(cluster.actor_trainer.model, chain)
    config = GRPOConfig(num_generations=4, num_iterations=1, beta=0.0, epsilon=0.2)
    learner = CorrectedLearner(rl_cluster=cluster, algo_config=config, reward_fns=share_even)
    learner.train([{"prompts": np.array(["2 3 4", "5 6", "7", "8 9"])}] * steps)
    return learner


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    learner = train(make_cluster(), parser.parse_args().steps)
    decay = schedules.decay_report(learner.rl_cluster.actor_trainer.optimizer.opt_state)
    print({name: float(value) for name, value in decay.items()})


if __name__ == "__main__":
    main()
