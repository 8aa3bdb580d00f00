"""Trains on what another engine draws: transformers samples the README's task, `learn` learns.

    JAX_PLATFORMS=cpu python scripts/learn_from_transformers.py runs/learn  # docs/results/learn.md
    JAX_PLATFORMS=cpu python scripts/learn_from_transformers.py --smoke

The engine is `generate` of transformers, in torch: a program that shares no line with this one. It
gets the new weights after every step, by their names. What is measured is kept in the folder, a
line for each training, and not measured again.
"""

import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench_common as common
import numpy as np
import optax
import torch
from scipy import stats
from transformers import AutoModelForCausalLM

import tim_jax as tim
from tim_jax.tasks import base

PAGE = common.RESULTS / "learn.md"
PROMPTS, SAMPLES, LONGEST, RATE = 16, 8, 32, 3e-4  # of a step, as the README has them
STEPS, SEEDS = 40, 3
TRAIN = [f"{n:05}" for n in range(0, 100_000, 199)]
HELD_OUT = [f"{n:05}" for n in range(100, 100_000, 199)]
HELD_OUT_SAMPLES = 4
ENDS = 10  # steps whose mean reward is shown, at both ends


class Engine:
    """transformers' `generate`, and the log-probs of what it drew."""

    def __init__(self, model: tim.Model, folder: Path, dtype: str):
        self.tokenizer, self.stops = model.tokenizer, list(model.stop_tokens)
        self.model = AutoModelForCausalLM.from_pretrained(
            tim.save(model, folder), dtype=getattr(torch, dtype)
        )

    def load(self, model: tim.Model) -> None:
        """Takes the new weights."""
        arrays = {name: torch.from_numpy(x) for name, x in tim.named_arrays(model)}
        self.model.load_state_dict(arrays, strict=False)

    def draw(self, numbers: Sequence[str], samples: int, seed: int) -> list[dict[str, Any]]:
        """Rows, the samples of a number one after the other."""
        torch.manual_seed(seed)
        ids = [self.tokenizer(f"{number}>").input_ids for number in numbers]
        pad = self.tokenizer.pad_token_id
        made = self.model.generate(
            torch.tensor(ids),  # all are of one length
            attention_mask=torch.ones(len(ids), len(ids[0]), dtype=torch.long),
            do_sample=True,
            **{"top_k": 0, "top_p": 1.0, "temperature": 1.0, "num_return_sequences": samples},
            **{"max_new_tokens": LONGEST, "eos_token_id": self.stops, "pad_token_id": pad},
            **{"return_dict_in_generate": True, "output_logits": True},
        )
        tokens = made.sequences[:, len(ids[0]) :]
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

    def texts(self, rows: Sequence[dict[str, Any]]) -> list[str]:
        """What was drawn, decoded."""
        ids = [row["response_token_ids"] for row in rows]
        return [self.tokenizer.decode(x, skip_special_tokens=True) for x in ids]


def rewards(numbers: Sequence[str], texts: Sequence[str]) -> np.ndarray:
    """f64[numbers, samples], 1 where the answer is the sorted number."""
    each = len(texts) // len(numbers)
    repeated = [number for number in numbers for _ in range(each)]
    pairs = zip(repeated, texts, strict=True)
    right = [text.endswith("#" + "".join(sorted(number))) for number, text in pairs]
    return np.reshape(np.asarray(right, np.float64), (-1, each))


@dataclass(frozen=True)
class Run:
    """An engine's dtype, None for this library's own sampler, and how the learner meets it."""

    name: str
    dtype: str | None
    mode: str
    correction: Any = None


RUNS = (
    Run("transformers float32, bypass", "float32", "bypass"),
    Run("transformers bfloat16, recompute, token TIS", "bfloat16", "recompute", "token_tis"),
    Run("this library's own, bypass", None, "bypass"),
)


def train(model: tim.Model, run: Run, seed: int, steps: int) -> dict[str, Any]:
    """The rewards of every step, what was compared, and what is right of the held-out numbers."""
    correction = tim.corrections.token_tis() if run.correction else None
    how = {"optimizer": optax.adam(RATE), "correction": correction}
    training = model.training(mode=run.mode)
    began = time.process_time()
    if run.dtype is None:
        made = _by_own_sampler(model, seed, steps, training=training, **how)
    else:
        made = _by_engine(model, run.dtype, seed, steps, training=training, **how)
    return {"run": run.name, "seed": seed, "seconds": time.process_time() - began} | made


def _by_engine(model: tim.Model, dtype: str, seed: int, steps: int, **how: Any) -> dict[str, Any]:
    step, report = None, []
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(model, Path(folder, "engine"), dtype)

        def held_out() -> list[float]:
            rows = engine.draw(HELD_OUT, HELD_OUT_SAMPLES, 1)
            return _interval(rewards(HELD_OUT, engine.texts(rows)))

        before = held_out()
        for number in range(steps):
            numbers = [TRAIN[i] for i in base.order(seed, number, PROMPTS, len(TRAIN)).tolist()]
            rows = engine.draw(numbers, SAMPLES, 1000 * seed + number)
            right = rewards(numbers, engine.texts(rows))
            first = {} if step else {"samples": SAMPLES, **how}
            step = tim.learn(step or model, rows, right.reshape(-1), **first)
            engine.load(step.model)
            report.append(step.metrics)
            print(dtype, seed, step.number, f"{step.metrics['reward']:.3f}", flush=True)
        return _summary(report) | {"before": before, "after": held_out()}


def _by_own_sampler(model: tim.Model, seed: int, steps: int, **how: Any) -> dict[str, Any]:
    def reward(prompts, completions, answers):
        return [text.endswith("#" + x) for text, x in zip(completions, answers, strict=True)]

    def held_out(model: tim.Model) -> list[float]:
        prompts = [f"{number}>" for number in HELD_OUT]
        text = tim.sample(model, prompts, samples=HELD_OUT_SAMPLES, max_tokens=LONGEST, seed=1).text
        return _interval(rewards(HELD_OUT, text))

    pairs = [(f"{number}>", "".join(sorted(number))) for number in TRAIN]
    sizes = {"samples": SAMPLES, "prompts_per_step": PROMPTS, "max_tokens": LONGEST}
    drawn = tim.grpo(model, pairs, reward=reward, steps=steps, seed=seed, **sizes, **how)
    made = list(drawn)
    report = [step.metrics for step in made]
    return _summary(report) | {"before": held_out(model), "after": held_out(made[-1].model)}


def _interval(right: np.ndarray) -> list[float]:
    """The mean over numbers, and half of its 95% interval."""
    each = right.mean(axis=1)
    return [float(each.mean()), 1.96 * float(each.std(ddof=1)) / len(each) ** 0.5]


def _summary(report: Sequence[dict[str, float]]) -> dict[str, Any]:
    names = ("reward", "mismatch/log_ratio_abs_mean", "mismatch/kl_k3", "exact_share")
    return {name: [float(one[name]) for one in report] for name in names}


def page(found: Sequence[dict[str, Any]], load: float) -> list[str]:
    """The page of all trainings."""
    lines = [
        "# Learning from what transformers draws",
        "",
        "Written by `python scripts/learn_from_transformers.py FOLDER`. transformers' `generate`",
        f"samples the README's task, {PROMPTS} prompts with {SAMPLES} samples a step, from the",
        "packaged model. `tim_jax.learn` makes a step in float32 of what it recorded (Adam,",
        f"learning rate {RATE:g}), and the engine gets the weights: {STEPS} times. The last rows",
        "are of this library's own sampler, with `tim_jax.grpo` and the same settings.",
        "",
        *common.machine_text(load, common.versions("jax", "torch", "transformers"), timed=False),
        f"| engine | seed | reward of the first {ENDS} steps | of the last {ENDS} | held-out before"
        " | after | gain | mean \\|d\\|, first and last step | K3, first and last | exact tokens |"
        " CPU s |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for one in sorted(found, key=lambda one: [run.name for run in RUNS].index(one["run"])):
        rewards, exact = one["reward"], np.mean(one["exact_share"])
        ends = [np.mean(rewards[:ENDS]), np.mean(rewards[-ENDS:])]
        held = [one["before"], one["after"]]
        gain = held[1][0] - held[0][0], float(np.hypot(held[0][1], held[1][1]))
        sizes = [
            f"{one[name][0]:.2g}, {one[name][-1]:.2g}"
            for name in ("mismatch/log_ratio_abs_mean", "mismatch/kl_k3")
        ]
        cells = [f"{x:.3f}" for x in ends] + [f"{x:.3f} ± {e:.3f}" for x, e in (*held, gain)]
        cells += [*sizes, f"{exact:.1%}", f"{one['seconds']:.0f}"]
        lines.append(f"| {one['run']} | {one['seed']} | {' | '.join(cells)} |")
    lines += [
        "",
        *gains(found),
        "",
        f"Held-out accuracy is of {HELD_OUT_SAMPLES} samples of each of {len(HELD_OUT)} numbers",
        "that the training does not have, drawn by the engine, with its 95% interval. The",
        "intervals in the list above are between the seeds (Student's t). d is the engine's",
        "log-prob less the learner's exact one.",
    ]
    return lines


def gains(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What each engine gained over its seeds, with the 95% interval between them."""
    for run in RUNS:
        gained = [one["after"][0] - one["before"][0] for one in found if one["run"] == run.name]
        if len(gained) > 1:
            error = stats.t.ppf(0.975, len(gained) - 1) * stats.sem(gained)
            yield f"- {run.name}: a mean gain of {np.mean(gained):.3f} ± {error:.3f}."


def main() -> None:
    """Writes the page, or prints it for a smoke test."""
    parser = common.parser((__doc__ or "").splitlines()[0], PAGE)
    parser.add_argument("folder", type=Path, nargs="?", help="for what is measured")
    options = parser.parse_args()
    steps, seeds = (2, 1) if options.smoke else (STEPS, SEEDS)
    load, model = common.load_average(), tim.load("tiny")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "learn.jsonl"
        found = common.read_rows(path)
        there = {(one["run"], one["seed"]) for one in found}
        for run, seed in itertools.product(RUNS, range(seeds)):
            if (run.name, seed) in there:
                continue
            found.append(train(model, run, seed, steps))
            common.keep(path, found[-1])
        common.publish(page(found, load), options, PAGE)


if __name__ == "__main__":
    main()
