"""Trains on what another engine draws: transformers samples the quickstart's task, `learn` learns.

    JAX_PLATFORMS=cpu python scripts/learn_from_transformers.py     # writes docs/results/learn.md
    JAX_PLATFORMS=cpu python scripts/learn_from_transformers.py --smoke

The engine is `generate` of transformers, in torch: a program that shares no line with this one. It
gets the new weights after every step, by their names.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench_common as common
import numpy as np
import torch
from transformers import AutoModelForCausalLM

import tim_jax
from tim_jax import corrections, objectives, optimizers
from tim_jax.tasks import base
from tim_jax.tasks.builtin import builtin_task

PAGE = common.RESULTS / "learn.md"
CONFIG = Path(__file__).parent.parent / "configs" / "quickstart.toml"
TASK = builtin_task("sorting", {"digits": [4, 6]})
SAMPLES, PROMPTS, LONGEST = 8, 32, 32  # as the quickstart has them
HELD_OUT = 256


class Engine:
    """transformers' `generate`, and the log-probs of what it drew."""

    def __init__(self, model: tim_jax.Model, folder: Path, dtype: str):
        self.tokenizer, self.stops = model.tokenizer, list(model.stop_tokens)
        self.model = AutoModelForCausalLM.from_pretrained(
            tim_jax.save(model, folder), dtype=getattr(torch, dtype)
        )

    def load(self, model: tim_jax.Model) -> None:
        """Takes the new weights."""
        arrays = {name: torch.from_numpy(x) for name, x in tim_jax.named_arrays(model)}
        self.model.load_state_dict(arrays, strict=False)

    def draw(self, prompts: list[str], samples: int, seed: int) -> list[dict[str, Any]]:
        """Rows, the samples of a prompt one after the other."""
        torch.manual_seed(seed)
        ids = [self.tokenizer(prompt).input_ids for prompt in prompts]
        width, pad = max(map(len, ids)), self.tokenizer.pad_token_id
        made = self.model.generate(
            torch.tensor([[pad] * (width - len(x)) + x for x in ids]),
            attention_mask=torch.tensor([[0] * (width - len(x)) + [1] * len(x) for x in ids]),
            do_sample=True,
            **{"top_k": 0, "top_p": 1.0, "temperature": 1.0, "num_return_sequences": samples},
            **{"max_new_tokens": LONGEST, "eos_token_id": self.stops, "pad_token_id": pad},
            **{"return_dict_in_generate": True, "output_logits": True},
        )
        tokens = made.sequences[:, width:]
        logits = torch.stack(made.logits, dim=1).float()
        log_probs = torch.log_softmax(logits, -1).gather(2, tokens[..., None])[..., 0]
        return list(self._rows(ids, samples, tokens.tolist(), log_probs.tolist()))

    def _rows(self, ids, samples, tokens, log_probs) -> Iterator[dict[str, Any]]:
        for number, (drawn, recorded) in enumerate(zip(tokens, log_probs, strict=True)):
            ends = [i for i, token in enumerate(drawn) if token in self.stops]
            count = ends[0] + 1 if ends else len(drawn)
            yield {
                "prompt_token_ids": ids[number // samples],
                "response_token_ids": drawn[:count],
                "logprobs": [min(x, 0.0) for x in recorded[:count]],
                "finish_reason": "stop" if ends else "length",
                **{"temperature": 1.0, "top_k": 0, "top_p": 1.0},
            }

    def rewards(self, rows: list[dict[str, Any]], examples: list[Any]) -> np.ndarray:
        """f64[B], of the task's grader."""
        decode = self.tokenizer.decode
        texts = [decode(row["response_token_ids"], skip_special_tokens=True) for row in rows]
        each = len(rows) // len(examples)
        return base.rewards(TASK.grade([e for e in examples for _ in range(each)], texts))


@dataclass(frozen=True)
class Run:
    """An engine's dtype, and how the learner meets it."""

    name: str
    dtype: str
    mode: str
    correction: Any


RUNS = (
    Run("float32, bypass", "float32", "bypass", corrections.none()),
    Run("bfloat16, recompute, token TIS", "bfloat16", "recompute", corrections.token_tis()),
)


def warmed_up(folder: Path, smoke: bool) -> tim_jax.Model:
    """The quickstart's model after its supervised steps and one of GRPO."""
    changes = ["steps=1", "eval.every=0", f"run.folder={folder}", *(["warmup.steps=5"] * smoke)]
    command = [sys.executable, "-m", "tim_jax.app.cli", "train", str(CONFIG), *changes]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return tim_jax.load(folder)


def train(model: tim_jax.Model, run: Run, steps: int) -> list[dict[str, float]]:
    """The metrics of every step, `held_out` among them where it was measured."""
    rate = optimizers.Rate(1.5e-4)
    how = {"optimizer": optimizers.adamw(rate, b2=0.99, max_grad_norm=1.0), "mode": run.mode}
    objective = objectives.grpo(kl_coefficient=0.0, drop_uninformative=True)
    training = model.training(objective=objective, correction=run.correction, **how)
    step, report = None, []
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(model, Path(folder, "engine"), run.dtype)
        for number in range(1, steps + 1):
            began = time.perf_counter()
            order = base.order(0, number - 1, PROMPTS, len(TASK.train)).tolist()
            examples = [TASK.train[i] for i in order]
            rows = engine.draw([e.prompt for e in examples], SAMPLES, number)
            rewards = engine.rewards(rows, examples)
            drawn = time.perf_counter() - began
            first = {} if step else {"samples": SAMPLES, "training": training}
            step = tim_jax.learn(step or model, rows, rewards, **first)
            engine.load(step.model)
            report.append(step.metrics | step.timing | {"seconds_drawing": drawn})
            if number in (1, steps):
                report[-1]["held_out"], report[-1]["within"] = held_out(engine)
            print(run.name, number, step.metrics["reward"], f"{step.timing['seconds']:.1f} s")
    return report


def held_out(engine: Engine) -> tuple[float, float]:
    """Mean reward of a sample of each held-out problem, drawn by the engine; its 95% interval."""
    examples = list(TASK.evaluation[:HELD_OUT])
    found = engine.rewards(engine.draw([e.prompt for e in examples], 1, 0), examples)
    return float(np.mean(found)), 1.96 * float(np.std(found, ddof=1)) / len(found) ** 0.5


def page(reports: dict[str, list[dict[str, float]]], load: float) -> list[str]:
    steps = len(next(iter(reports.values())))
    lines = [
        "# Learning from what transformers draws",
        "",
        "Written by `python scripts/learn_from_transformers.py`. transformers' `generate` samples"
        f" the quickstart's task, {PROMPTS} prompts with {SAMPLES} samples a step, from the"
        " quickstart's model after its supervised steps; `tim_jax.learn` makes a step in float32 of"
        f" what it recorded, and the engine gets the weights. {steps} steps, seed 0.",
        "",
        *common.machine_text(load, common.versions("jax", "torch", "transformers"), timed=False),
        "| engine | reward of the first ten steps | of the last ten | held-out after step 1 |"
        f" after step {steps} | mean \\|d\\|, first and last | K3, first and last | exact tokens |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, report in reports.items():
        first, last = report[0], report[-1]
        size, k3 = "mismatch/log_ratio_abs_mean", "mismatch/kl_k3"
        rewards = [one["reward"] for one in report]
        begun, ended = np.mean(rewards[:10]), np.mean(rewards[-10:])
        exact = np.mean([one["exact_share"] for one in report])
        held = " | ".join(f"{one['held_out']:.3f} ± {one['within']:.3f}" for one in (first, last))
        lines.append(
            f"| {name} | {begun:.3f} | {ended:.3f} | {held} | {first[size]:.2g}, {last[size]:.2g} |"
            f" {first[k3]:.2g}, {last[k3]:.2g} | {exact:.1%} |"
        )
    lines += [
        "",
        "Held-out reward is of a sample of each of 256 problems, drawn by the engine, with its 95%"
        " interval. d is the engine's log-prob less the learner's exact one.",
    ]
    return lines


def main() -> None:
    """Writes the page, or prints it for a smoke test."""
    parser = common.parser((__doc__ or "").splitlines()[0], PAGE)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--runs", type=int, nargs="+", default=list(range(len(RUNS))))
    options = parser.parse_args()
    load = common.load_average()
    with tempfile.TemporaryDirectory() as folder:
        model = warmed_up(Path(folder, "run"), options.smoke)
        steps = 2 if options.smoke else options.steps
        reports = {}
        for run in (RUNS[i] for i in options.runs):
            reports[run.name] = train(model, run, steps)
            common.publish(page(reports, load), options, PAGE)


if __name__ == "__main__":
    main()
