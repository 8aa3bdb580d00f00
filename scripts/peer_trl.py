"""bench_peer.py's worker for TRL: steps of its GRPO trainer, with transformers' own generation.

Runs in an interpreter that has trl and PyTorch, and needs nothing of tim_jax but bench_common.
"""

import tempfile
from typing import Any

import bench_common as common
import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

_ROWS = 16  # sequences that are learnt from at a time


class AtGate(TrainerCallback):
    """Holds the trainer before each step."""

    def __init__(self, gate: common.Gate):
        self.gate = gate

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.gate.hold()


class Worker:
    """Builds what is timed, and times it."""

    def __init__(self, sizes: common.Sizes, batch: int, dtype: str):
        self.sizes, self.batch, self.dtype, self.gate = sizes, batch, dtype, common.Gate()

    def about(self) -> dict:
        return common.versions("trl", "transformers", "torch")

    def prepare_learner(self) -> dict:
        self.gate.begin(self.make_trainer().train)
        return self.step()

    def step(self) -> dict:
        """Rollouts, rewards, one update."""
        return {"seconds": self.gate.step(), "tokens": self.batch * self.sizes.response}

    def make_trainer(self) -> GRPOTrainer:
        """GRPO on the CPU, no KL term, one update a step, float32 master weights."""
        rows = min(_ROWS, self.batch)
        algorithm = GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            use_cpu=True,
            bf16=self.dtype == "bfloat16",
            fp16=False,
            max_steps=10**6,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=self.batch // rows,
            num_generations=common.GROUP,
            max_completion_length=self.sizes.response,
            temperature=1.0,
            loss_type="grpo",
            beta=0.0,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            gradient_checkpointing=False,
            save_strategy="no",
            logging_steps=10**6,
            report_to="none",
            disable_tqdm=True,
        )
        rng = np.random.default_rng(0)
        shape = self.batch // common.GROUP, self.sizes.prompt
        tokens = rng.integers(3, self.sizes.vocabulary, shape)
        texts = [" ".join(map(str, row)) for row in tokens]
        return GRPOTrainer(
            model=Qwen3ForCausalLM(self.config()),
            reward_funcs=rewards,
            args=algorithm,
            train_dataset=Dataset.from_dict({"prompt": texts}),
            processing_class=tokenizer(self.sizes.vocabulary),
            callbacks=[AtGate(self.gate)],
        )

    def config(self) -> Qwen3Config:
        sizes = self.sizes
        torch.manual_seed(0)
        return Qwen3Config(
            vocab_size=sizes.vocabulary,
            hidden_size=sizes.hidden,
            intermediate_size=sizes.intermediate,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            tie_word_embeddings=True,
        )


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Words are token ids. The end token is one past the vocabulary: nothing draws it."""
    words = {str(index): index for index in range(vocabulary + 1)}
    plain = Tokenizer(models.WordLevel(words, unk_token="0"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="0", eos_token=str(vocabulary), padding_side="left"
    )


def rewards(completions, **_) -> list[float]:
    return [common.share_even(completion) for completion in completions]


if __name__ == "__main__":
    common.serve(Worker, __doc__ or "")
