"""Compares sampler and learner over drawn episodes of several turns; writes docs/results/turns.md.

    python scripts/turns_cases.py                    # 200,000 drawn tokens and more
    python scripts/turns_cases.py --interpreted      # 5,000 with each family of Pallas kernels
    python scripts/turns_cases.py --cut              # 20,000 in episodes that are cut

With `--cases FILE` each case is kept there as it ends, and a run that was stopped goes on. The page
has a section for each of the three.

Drawn for every case: prompts and their lengths, weights, a turn's most tokens, how many turns an
episode has, the lengths of replies (many over several pages), the order in which replies come. The
learner scores each episode in one pass, inside a gradient program, rows in another order and longer
padded, or packed in a buffer.
"""

import argparse
import pathlib
import platform
import time
from dataclasses import dataclass, replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from bench_common import RESULTS, cpu_model, keep, put_section, read_rows

from tim_jax.common.types import Prompts, Rollout
from tim_jax.instruments.auditing import PRESETS, Replies, compare, random_params
from tim_jax.model.config import ModelConfig
from tim_jax.model.execution import Batching, Execution, Sampling
from tim_jax.model.fitting import calibrate
from tim_jax.numerics import EXACT_BF16, EXACT_F32, GpuTiles, MatmulTile, Numerics, TpuTiles
from tim_jax.policy import scoring
from tim_jax.rl import episodes
from tim_jax.rl.rules import Turns

OUT = RESULTS / "turns.md"
TITLES = {
    "": "## Sampler against learner, drawn episodes",
    "--interpreted": "## Pallas kernels, interpreted",
    "--cut": "## Episodes that are cut",
}
PROMPTS, SAMPLES, LENGTH, ROOM = 4, 4, 24, 200
MOST, LONGEST, REPLY = 8, 24, 90  # turns, tokens of one, tokens of a reply
WEIGHTS = 3  # sets of random weights
BATCHINGS = {
    "a row each": Batching(),
    "5 slots, 30 pages": Batching(slots=5, pages=30),
}


@dataclass(frozen=True)
class Setting:
    """What is compiled."""

    config: ModelConfig
    numerics: Numerics
    sampling: Sampling
    packed: bool = False  # the learner's sequences in one buffer

    @property
    def execution(self) -> Execution:
        return Execution(self.config, self.numerics, self.sampling)


class Replying:
    """Replies of one case, by the turn's key; an episode has a number of turns of its own.

    Where episodes are cut, a new row begins after half of the turns: without the beginning of the
    turn, as where thinking is dropped, or besides with other tokens ahead of all.
    """

    def __init__(self, seed: int, vocabulary: int, longest: int, *, cut: bool):
        self.seed, self.replies, self.cut = seed, Replies(longest, vocabulary), cut

    def outcomes(self, turns):
        order = np.random.default_rng([self.seed, len(turns)]).permutation(len(turns))
        for index in order.tolist():
            turn = turns[index]
            last = np.random.default_rng([self.seed, turn.prompt, turn.sample]).integers(1, MOST)
            found = replace(self.replies.outcome(turn), done=turn.turn == last)
            yield index, self.rewritten(turn, found) if self.cut else found

    def rewritten(self, turn, found):
        rng = np.random.default_rng([*map(int, turn.key), self.seed])
        before = turn.asked if turn.state is None else turn.state
        how, kept = rng.integers(4), rng.integers(len(turn.completion.tokens) + 1)
        ahead = rng.integers(self.replies.vocabulary, size=rng.integers(1, 9) * (how == 1))
        drawn = turn.completion.tokens[kept if how < 2 else 0 :]
        whole = np.concatenate([ahead, before, drawn, found.tokens]).astype(np.int32)
        if how < 2:
            return replace(found, state=whole, tokens=whole[:0], anew=whole)
        return replace(found, state=whole)


def settings() -> dict[str, Setting]:
    """Tiles: calibrated and not, two dtypes, windows, truncation, packed and padded."""
    awkward, windowed = PRESETS["qwen3-awkward"], PRESETS["windowed-awkward"]
    stops = tuple(range(3, awkward.vocab_size, 24))
    plain = Sampling(ROOM, stop_tokens=stops)
    truncated = Sampling(ROOM, temperature=0.8, top_k=20, top_p=0.9, stop_tokens=stops)
    wide = calibrate(awkward, EXACT_F32, batch=PROMPTS * SAMPLES, longest=LENGTH + ROOM)
    return {
        "float32, calibrated, T 1, packed": Setting(awkward, wide, plain, packed=True),
        "bfloat16, windows, T 1": Setting(windowed, EXACT_BF16, plain),
        "float32, windows, truncated": Setting(windowed, EXACT_F32, truncated),
    }


def interpreted() -> dict[str, Setting]:
    """The Pallas families as XLA operations, on a model that their tiles fit."""
    small = {"matmul": (MatmulTile(16, 16), MatmulTile(32, 16)), "programs": 2, "lanes": 32}
    small |= {"attention_rows": 16, "gradient_own": 16, "gradient_step": 16, "row_tile": 4}
    gpu = Numerics(
        family="pallas_gpu",
        kv_block=16,
        head_rows=16,
        gpu=GpuTiles(block_k=16, experts=MatmulTile(16, 16), **small),
        cache_write="kernel",
        interpret=True,
    )
    few = {"rows": 16, "expert_rows": 16, "attention_rows": 16, "gradient_rows": 16, "row_tile": 16}
    tpu = replace(gpu, family="pallas_tpu", kv_block=128, tpu=TpuTiles(**few, heads=2, lanes=128))
    tpu = replace(tpu, tpu=replace(tpu.tpu, columns=128, block_k=128, attention_blocks=2))
    config = replace(PRESETS["qwen3-blocks"], vocab_size=128, num_heads=8, num_kv_heads=4)
    config = replace(config, head_dim=16)
    plain = Sampling(ROOM, stop_tokens=(3, 27, 51, 75, 99))
    families = {"pallas_gpu, float32": gpu, "pallas_tpu, float32": tpu}
    families["pallas_gpu, bfloat16"] = replace(gpu, compute_dtype="bfloat16")
    return {name: Setting(config, numerics, plain) for name, numerics in families.items()}


@cache
def weights(setting: Setting, index: int):
    params = jax.tree.map(jnp.asarray, random_params(setting.config, index))
    return jax.jit(setting.execution.prepare)(params)


@cache
def compiled(setting: Setting, batching: Batching) -> episodes.Programs:
    turns = Turns(MOST, LONGEST)
    return episodes.build(setting.execution, turns=turns, samples=SAMPLES, batching=batching)


@cache
def learner(setting: Setting):
    """(weights, rollout) -> log-probs as they are inside the gradient program."""
    rows = PROMPTS * SAMPLES
    buffer = rows * (LENGTH + ROOM) if setting.packed else None

    def learn(weights, rollout: Rollout):
        def loss(weights):
            execution = setting.execution
            scores = scoring.score(weights, rollout, execution=execution, buffer=buffer)
            return jnp.sum(jnp.where(rollout.mask, jnp.exp(scores.log_probs), 0.0)), scores

        (_, scores), gradient = jax.value_and_grad(loss, has_aux=True)(weights)
        return scores.log_probs, gradient

    return jax.jit(learn)


def check(setting: Setting, batching: Batching, seed: int, *, cut: bool):
    """What `compare` returns for one case, and the episodes."""
    rng = np.random.default_rng(seed)
    size, own = setting.config.vocab_size, weights(setting, seed % WEIGHTS)
    prompts = Prompts(
        tokens=jnp.asarray(rng.integers(0, size, (PROMPTS, LENGTH)), jnp.int32),
        lengths=jnp.asarray(rng.integers(1, LENGTH + 1, PROMPTS), jnp.int32),
        ids=jnp.asarray(rng.integers(0, 2**31 - 1, PROMPTS), jnp.int32),
    )
    turns = Turns(MOST, int(rng.integers(2, LONGEST + 1)))
    played = episodes.play(
        own,
        prompts,
        jax.random.key(seed),
        programs=compiled(setting, batching)._replace(turns=turns),
        environment=Replying(seed, size, int(rng.integers(0, REPLY + 1)), cut=cut),
        states=[None] * PROMPTS,
        asked=[np.asarray(row[:n]) for row, n in zip(prompts.tokens, prompts.lengths, strict=True)],
        text=lambda tokens: "",
    )
    (some,) = np.nonzero(np.asarray(played.rollout.lengths))  # the other rows of episodes are empty
    order = rng.permutation(some)
    rollout = jax.tree.map(lambda x: np.asarray(x)[order], replace(played.rollout, parts=1))
    log_probs = np.zeros(rollout.log_probs.shape, np.float32)
    for start in range(0, len(order), PROMPTS * SAMPLES):
        rows = np.resize(
            np.arange(len(order))[start : start + PROMPTS * SAMPLES], PROMPTS * SAMPLES
        )
        part = jax.tree.map(lambda x, r=rows: x[r], rollout)
        log_probs[rows] = learner(setting)(own, part)[0]
    return compare(rollout, rollout.responses, rollout.mask, log_probs), played


def run(
    chosen, tokens: int, file: pathlib.Path | None, *, seeds: list[str], cut: bool
) -> list[dict]:
    """At least `tokens` in all, as many of every setting and batching, those in `file` included.

    `seeds`: names of all settings, which their seeds follow from.
    """
    share = -(-tokens // max(1, len(chosen) * len(BATCHINGS)))
    cases = read_rows(file) if file else []
    for name, setting in chosen.items():
        for how, batching in BATCHINGS.items():
            place = 1000 * (seeds.index(name) * len(BATCHINGS) + list(BATCHINGS).index(how))
            own = [case for case in cases if (case["numerics"], case["sampler"]) == (name, how)]
            for seed in range(place + len(own), place + 1000):
                if sum(case["tokens"] for case in own) >= share:
                    break
                start = time.perf_counter()
                (compared, unequal, _, first), played = check(setting, batching, seed, cut=cut)
                case = {"numerics": name, "sampler": how, "seed": seed, "tokens": compared}
                case |= {"unequal": unequal, "turns": played.metrics["turns"]}
                case["rows"] = played.metrics["rows"]
                own.append(case | {"seconds": round(time.perf_counter() - start, 1)})
                cases.append(own[-1])
                print(own[-1], *(() if first is None else ("UNEQUAL:", first)), flush=True)
                if file:
                    keep(file, own[-1])
        jax.clear_caches()
    return cases


def report(cases: list[dict], title: str, command: str) -> str:
    minutes = sum(case["seconds"] for case in cases) / 60
    cut = title == TITLES["--cut"]
    means = "turns and rows" if cut else "turns"
    lines = [
        title,
        "",
        f"Made by `{command}` in {minutes:.0f} minutes (jax {jax.__version__}, Python"
        f" {platform.python_version()}; {jax.default_backend()}: {cpu_model()}).",
        "",
        f"Steps of {PROMPTS} prompts x {SAMPLES} samples, prompts of up to {LENGTH} tokens and",
        f"{ROOM} more; 2 to {MOST} turns of up to {LONGEST} tokens, replies of at most {REPLY}",
        "tokens, pages of 16 or 32 positions (128 for a TPU's). Compared are the raw bits of every",
        "drawn token's log-prob: that recorded by the sampler, and that of one pass over the",
        f"{'row' if cut else 'episode'} inside a gradient program.",
        "",
        f"| numerics | sampler | steps | {means} of an episode | drawn tokens compared | unequal |",
        "|---|---|---:|---:|---:|---:|",
    ]
    kinds = dict.fromkeys((case["numerics"], case["sampler"]) for case in cases)
    for name, how in kinds:
        own = [case for case in cases if (case["numerics"], case["sampler"]) == (name, how)]
        turns = sum(case["turns"] for case in own) / len(own)
        rows = sum(case.get("rows", 1.0) for case in own) / len(own)
        turns = f"{turns:.1f}, {rows:.1f}" if cut else f"{turns:.1f}"
        cells = f"{len(own):,} | {turns} | {_total(own, 'tokens')} | {_total(own, 'unequal')}"
        lines.append(f"| {name} | {how} | {cells} |")
    lines.append(f"| **all** | | | | {_total(cases, 'tokens')} | {_total(cases, 'unequal')} |")
    return "\n".join(lines) + "\n"


def _total(cases: list[dict], key: str) -> str:
    return f"{sum(case[key] for case in cases):,}"


def main():
    parser = argparse.ArgumentParser(description="Episodes: sampler against learner.")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--interpreted", action="store_true", help="the Pallas families")
    parser.add_argument("--cut", action="store_true", help="episodes in several rows")
    parser.add_argument("--only", default="", help="numerics with this in their names")
    parser.add_argument("--cases", type=pathlib.Path, help="a file of cases, to go on from")
    parser.add_argument("--out", type=pathlib.Path, default=OUT)
    args = parser.parse_args()
    chosen = interpreted() if args.interpreted else settings()
    usual = 5_000 * len(chosen) if args.interpreted else 20_000 if args.cut else 200_000
    tokens = args.tokens or usual
    some = {name: setting for name, setting in chosen.items() if args.only in name}
    cases = run(some, tokens, args.cases, seeds=list(chosen), cut=args.cut)
    kind = "--interpreted" if args.interpreted else "--cut" if args.cut else ""
    section = report(cases, TITLES[kind], f"python scripts/turns_cases.py {kind}".strip())
    put_section(args.out, section)
    raise SystemExit(1 if any(case["unequal"] for case in cases) else 0)


if __name__ == "__main__":
    main()
