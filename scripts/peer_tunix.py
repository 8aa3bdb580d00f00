"""bench_peer.py's worker for google-tunix: its vanilla sampler, and its GRPO learner's steps.

Runs in an interpreter that has google-tunix, and needs nothing of tim_jax.
"""

import time
from functools import partial

import bench_common as common
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.generate import sampler
from tunix.models.qwen3 import model as qwen3
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout

_PAD, _START, _END = 0, 1, 2


class Tokenizer:
    """Words are token ids. The end token is one that nothing can draw, see `Worker.settings`."""

    def encode(self, text: str, **_) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, tokens, **_) -> str:
        return " ".join(str(int(token)) for token in tokens)

    def pad_id(self) -> int:
        return _PAD

    def bos_id(self) -> int:
        return _START

    def eos_id(self) -> int:
        return _END


class Feed:
    """The learner's data: hands out the next batch when told to, and so marks where steps end.

    The learner asks for a batch when it is done with the one before.
    """

    def __init__(self, prompts: np.ndarray, model: nnx.Module, gate: common.Gate):
        self.prompts, self.model, self.gate = prompts, model, gate

    def __iter__(self):
        return self

    def __next__(self) -> dict:
        jax.block_until_ready(nnx.state(self.model))
        self.gate.hold()
        return {"prompts": self.prompts}


class Worker:
    """Builds what is timed, and times it."""

    def __init__(self, sizes: common.Sizes, batch: int, dtype: str):
        self.sizes, self.batch, self.calls, self.gate = sizes, batch, 0, common.Gate()
        self.config = qwen3.ModelConfig(
            num_layers=sizes.layers,
            vocab_size=sizes.vocabulary,
            embed_dim=sizes.hidden,
            hidden_dim=sizes.intermediate,
            num_heads=sizes.heads,
            num_kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            rope_theta=10_000,
            norm_eps=1e-6,
            use_tied_embedding=True,
            dtype=jnp.dtype(dtype),
            param_dtype=jnp.float32,
        )

    def about(self) -> dict:
        return common.versions("google-tunix", "jax", "jaxlib")

    def prompts(self, count: int) -> list[str]:
        """Texts of `prompt` tokens, the start token that the sampler puts before them included."""
        shape = count, self.sizes.prompt - 1
        rng = np.random.default_rng(0)
        tokens = rng.integers(_END + 1, self.sizes.vocabulary, shape)
        return [" ".join(map(str, row)) for row in tokens]

    def prepare_sampler(self) -> dict:
        self.make_sampler(self.sizes.response)
        return self.sample()

    def make_sampler(self, longest: int) -> None:
        cache = sampler.CacheConfig(
            cache_size=self.sizes.prompt + longest,
            num_layers=self.sizes.layers,
            num_kv_heads=self.sizes.kv_heads,
            head_dim=self.sizes.head_dim,
        )
        model = qwen3.Qwen3(self.config, rngs=nnx.Rngs(0))
        self.sampler = sampler.Sampler(model, Tokenizer(), cache)

    def sample(self) -> dict:
        self.calls += 1
        start = time.perf_counter()
        drawn = self.draw(self.prompts(self.batch), self.sizes.response)
        seconds = time.perf_counter() - start
        count = sum(len(tokens) for tokens in drawn.tokens)
        return {"seconds": seconds, "tokens": count, "of": sum(map(len, drawn.logprobs or []))}

    def draw(self, prompts: list[str], response: int):
        return self.sampler(
            prompts,
            max_generation_steps=response,
            max_prompt_length=self.sizes.prompt,
            temperature=1.0,
            top_p=1.0,
            top_k=None,
            seed=self.calls,
            return_logprobs=True,
            # One past the vocabulary: nothing draws it.
            eos_tokens=[self.sizes.vocabulary],
        )

    def prepare_skewed(self) -> dict:
        self.make_sampler(self.sizes.longest)
        return [self.sample_skewed(slots) for slots in common.slots(self.batch)][-1]

    def sample_skewed(self, slots: int) -> dict:
        """Batches of `slots` sequences, each drawn until its longest has ended.

        The peer's loop stops when every row of its batch has ended. Told the longest length, it
        works exactly as long; tokens past the end of a row are not counted.
        """
        self.calls += 1
        lengths = common.skewed(self.batch, self.sizes.longest)
        prompts = self.prompts(self.batch)
        start = time.perf_counter()
        count = 0
        for first in range(0, self.batch, slots):
            longest = int(lengths[first : first + slots].max())
            drawn = self.draw(prompts[first : first + slots], longest)
            count += sum(len(log_probs) for log_probs in drawn.logprobs or [])
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "tokens": int(lengths.sum()), "of": count}

    def prepare_learner(self) -> dict:
        model = qwen3.Qwen3(self.config, rngs=nnx.Rngs(0))
        prompts = np.array(self.prompts(self.batch // common.GROUP))
        learner = self.make_learner(model, len(prompts))
        feed = Feed(prompts, learner.rl_cluster.actor_trainer.model, self.gate)
        self.gate.begin(partial(learner.train, feed))
        return self.step()

    def step(self) -> dict:
        """One step of the learner: from its receiving a batch to its asking for the next."""
        return {"seconds": self.gate.step(), "tokens": self.batch * self.sizes.response}

    def make_learner(self, model: nnx.Module, prompts: int) -> grpo_learner.GRPOLearner:
        """GRPO on one device, no KL term, one update a step."""
        mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        roles = rl_cluster.Role
        cluster = rl_cluster.RLCluster(
            actor=model,
            tokenizer=Tokenizer(),
            cluster_config=rl_cluster.ClusterConfig(
                role_to_mesh=dict.fromkeys((roles.ACTOR, roles.REFERENCE, roles.ROLLOUT), mesh),
                rollout_engine="vanilla",
                offload_to_cpu=False,
                training_config=rl_cluster.RLTrainingConfig(
                    actor_optimizer=optax.adamw(1e-4),
                    eval_every_n_steps=10**9,
                    max_steps=10**9,
                    mini_batch_size=prompts,
                    train_micro_batch_size=prompts,
                ),
                rollout_config=base_rollout.RolloutConfig(
                    max_tokens_to_generate=self.sizes.response,
                    max_prompt_length=self.sizes.prompt,
                    kv_cache_size=self.sizes.prompt + self.sizes.response,
                    temperature=1.0,
                    top_p=1.0,
                    top_k=None,
                    return_logprobs=True,
                    eos_tokens=[self.sizes.vocabulary],
                ),
            ),
        )
        algorithm = grpo_learner.GRPOConfig(
            num_generations=common.GROUP, num_iterations=1, beta=0.0, epsilon=0.2
        )
        return grpo_learner.GRPOLearner(
            rl_cluster=cluster, algo_config=algorithm, reward_fns=rewards
        )


def rewards(prompts, completions, **_) -> list[float]:
    del prompts
    return [common.share_even(completion) for completion in completions]


if __name__ == "__main__":
    common.serve(Worker, __doc__ or "")
