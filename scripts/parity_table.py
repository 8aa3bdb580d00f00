"""Our float32 against verl's formulas in float64, and writes docs/results/parity.md.

    JAX_PLATFORMS=cpu python scripts/parity_table.py

`verl_formulas` has the formulas and their source. A row's figure is the largest difference of any
token, over the largest value. Whole steps are compared by tests/app/config/test_verl.py.
"""

from typing import Any, NamedTuple

import bench_common as common
import jax.numpy as jnp
import numpy as np
import verl_formulas as formulas

from tim_jax import corrections, metrics
from tim_jax.app.config import toml, verl
from tim_jax.app.config.verl_keys import REJECTIONS
from tim_jax.objectives import Objective, kl_estimate
from tim_jax.objectives.advantages import advantages
from tim_jax.objectives.losses import policy_loss

PAGE = common.RESULTS / "parity.md"
CLOSE = 1e-6
GROUP, ROWS, WIDTH = 4, 32, 24
BOUNDS = {"low": 0.2, "high": 0.28, "dual": 3.0, "tau_pos": 1.0, "tau_neg": 1.05}
LOSS_OPTIONS = {
    "clip": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0},
    "reinforce": {},
    "sapo": {},
    "dppo_tv": {"clip_low": 0.2, "clip_high": 0.28, "ratio_cap": 3.0},
    "dppo_kl": {"clip_low": 0.2, "clip_high": 0.28, "ratio_cap": 3.0},
}
MISMATCH = {
    "kl": "kl_k1",
    "k3_kl": "kl_k3",
    "training_ppl": "ppl_train",
    "rollout_ppl": "ppl_rollout",
    "training_log_ppl": "log_ppl_train",
    "rollout_log_ppl": "log_ppl_rollout",
    "log_ppl_diff": "log_ppl_diff",
    "log_ppl_abs_diff": "log_ppl_abs_diff_mean",
    "log_ppl_diff_max": "log_ppl_diff_max",
    "log_ppl_diff_min": "log_ppl_diff_min",
    "ppl_ratio": "ppl_ratio",
    "chi2_token": "chi2_token",
    "chi2_seq": "chi2_sequence",
}
# Reported by verl alone, and what tells the same here.
ALONE = {
    "rollout_is_ratio_fraction_low": "shares below 1 / cap, which bounds nothing here",
    "rollout_is_seq_fraction_high, _low": "sequence_weight_max, sequence_weight_min",
    "rollout_rs_OPTION_mean, _std, _max, _min": "ratio_*, sequence_log_ratio_*, kl_k3",
}


class Row(NamedTuple):
    part: str
    theirs: str
    ours: str
    difference: float


class Batch(NamedTuple):
    """Log-probs are multiples of 2^-12, so that float32 has their differences exactly."""

    train: np.ndarray
    rollout: np.ndarray
    reference: np.ndarray
    mask: np.ndarray
    rewards: np.ndarray
    greedy: np.ndarray
    energies: np.ndarray


def draw(seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    shape = ROWS, WIDTH
    train = -rng.exponential(size=shape)
    spread = np.repeat([0.0003, 0.01, 0.1, 0.5], ROWS // 4)[:, None]
    rollout = np.minimum(train + spread * rng.standard_normal(shape), 0.0)
    reference = np.minimum(train + 0.3 * rng.standard_normal(shape), 0.0)
    exact = [np.float32(np.round(x * 4096) / 4096) for x in (train, rollout, reference)]
    mask = np.arange(WIDTH)[None, :] < rng.integers(1, WIDTH + 1, (ROWS, 1))
    rewards = np.float32(rng.integers(-8, 9, ROWS) / 4)
    energies = np.float32(rng.uniform(0.1, 1.5, shape))
    return Batch(
        *exact, mask, rewards, np.float32(rng.integers(-4, 5, ROWS // GROUP) / 4), energies
    )


def difference(ours: Any, theirs: Any) -> float:
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return float(np.abs(ours - theirs).max() / max(np.abs(theirs).max(), 1e-300))


def losses(b: Batch) -> list[Row]:
    x, old = b.train.astype(np.float64), b.rollout.astype(np.float64)
    a = formulas.advantages("grpo", b.rewards, b.mask, GROUP, response=b.mask)
    a32 = a.astype(np.float32)
    found = []
    for theirs, ours in verl.LOSSES.items():
        if theirs.endswith("_cov"):
            # They choose tokens by a statistic, and at random: tests/objectives/test_losses.py.
            continue
        options = LOSS_OPTIONS.get(ours, {"clip_low": 0.2, "clip_high": 0.28})
        mask = jnp.asarray(b.mask)
        mine = policy_loss(
            ours, jnp.asarray(b.train), jnp.asarray(b.rollout), jnp.asarray(a32), mask, options
        )
        wanted = formulas.policy_loss(theirs, x, x, old, a32.astype(np.float64), b.mask, BOUNDS)
        found.append(
            Row("loss", theirs, ours, difference(mine.loss, np.where(b.mask, wanted, 0.0)))
        )
    return found


def estimates(b: Batch) -> list[Row]:
    x, reference = b.train.astype(np.float64), b.reference.astype(np.float64)
    found = []
    for theirs, ours in (("kl", "k1"), ("abs", "abs"), ("mse", "k2"), ("low_var_kl", "k3")):
        cap = 10.0 if ours == "k3" else None
        mine = kl_estimate(jnp.asarray(b.train), jnp.asarray(b.reference), estimator=ours, cap=cap)
        found.append(
            Row("KL", theirs, ours, difference(mine, formulas.kl_penalty(theirs, x, reference)))
        )
    return found


def estimators(b: Batch) -> list[Row]:
    names = {n: o for n, o in verl.ESTIMATORS.items() if not n.endswith("_vectorized")}
    names["dr_grpo"] = "dr_grpo"
    found = []
    for theirs, ours in names.items():
        # The tail of the longest response is a choice of verl's own, see docs/objectives.md.
        mask = np.ones_like(b.mask) if theirs == "optimal_token_baseline" else b.mask
        mine = advantages(
            jnp.asarray(b.rewards),
            samples=GROUP,
            estimator=ours,
            mask=jnp.asarray(mask),
            greedy_rewards=jnp.asarray(b.greedy),
            energies=jnp.asarray(b.energies),
        )
        wanted = formulas.advantages(
            theirs,
            b.rewards.astype(np.float64),
            mask,
            GROUP,
            response=mask,
            greedy=b.greedy.astype(np.float64),
            energies=b.energies.astype(np.float64),
        )
        spread = np.asarray(mine)
        spread = spread[:, None] * mask if spread.ndim == 1 else spread
        label = "grpo, norm_adv_by_std_in_grpo = false" if theirs == "dr_grpo" else theirs
        found.append(Row("estimator", label, ours, difference(spread, wanted)))
    return found


def aggregations(b: Batch) -> list[Row]:
    values = formulas.kl_penalty("mse", b.train.astype(np.float64), b.reference.astype(np.float64))
    counts = {"tokens": b.mask.sum(), "sequences": ROWS, "horizon": WIDTH}
    found = []
    for theirs, ours in verl.AGGREGATIONS.items():
        weights = Objective(aggregation=ours, max_length=WIDTH).token_weights(jnp.asarray(b.mask))
        mine = (np.float64(weights) * values).sum()
        wanted = formulas.aggregated(values, b.mask, theirs, **counts)
        found.append(Row("aggregation", theirs, ours, difference(mine, wanted)))
    return found


def translated(section: dict[str, Any]) -> corrections.Correction:
    """What a section `rollout_correction` is here."""
    lengths = {"max_prompt_length": 32, "max_response_length": 64}  # that any model has
    algorithm = {"adv_estimator": "grpo", "rollout_correction": section}
    data = {"algorithm": algorithm, "data": lengths}
    return corrections.build(toml.build(verl.translate(data).config).learner.corrections)


def presets(b: Batch) -> list[Row]:
    d = b.train.astype(np.float64) - b.rollout
    found = []
    for name, section in formulas.PRESETS.items():
        arrays = {"log_ratio": jnp.asarray(b.train - b.rollout), "mask": jnp.asarray(b.mask)}
        mine = corrections.correct(translated(section), **arrays)
        weights, kept, _ = formulas.correction(d, b.mask, section)
        wanted = (1.0 if weights is None else weights) * kept
        assert np.array_equal(np.asarray(mine.kept), kept), name
        ours = ", ".join(block.label for block in translated(section).blocks) or "none"
        found.append(Row("preset", name, ours, difference(mine.coefficients, wanted)))
    return found


def measured(b: Batch) -> list[Row]:
    arrays = [jnp.asarray(x) for x in (b.train, b.rollout, b.mask)]
    mine = metrics.mismatch_metrics(*arrays)
    wanted = formulas.mismatch(*(x.astype(np.float64) for x in b[:2]), b.mask)
    found = [Row("metric", n, o, difference(mine[o], wanted[n])) for n, o in MISMATCH.items()]
    for level in ("token", "sequence"):
        found += of_weights(b, level)
    return found + of_rejections(b)


def of_weights(b: Batch, level: str) -> list[Row]:
    """`compute_is_metrics`, and the factor of the batch."""
    d = b.train.astype(np.float64) - b.rollout
    section = {"rollout_is": level, "rollout_is_threshold": 1.2}
    weights, _, _ = formulas.correction(d, b.mask, section)
    _, _, factor = formulas.correction(d, b.mask, section | {"rollout_is_batch_normalize": True})
    rows, w = formulas.row_mean(weights, b.mask), weights[b.mask]
    raw = np.exp(formulas.held(d if level == "token" else np.where(b.mask, d, 0).sum(axis=1)))
    high = (raw > 1.2)[b.mask] if level == "token" else raw > 1.2
    wanted = {
        ("rollout_is_mean", "coefficient_mean"): w.mean(),
        ("rollout_is_std", "coefficient_std"): w.std(),
        ("rollout_is_eff_sample_size", "ess"): w.mean() ** 2 / (w**2).mean(),
        ("rollout_is_ratio_fraction_high", "above_share/scale_by_truncated_ratio"): high.mean(),
        ("rollout_is_seq_mean", "sequence_weight_mean"): rows.mean(),
        ("rollout_is_seq_std", "sequence_weight_std"): rows.std(ddof=1),
        ("rollout_is_seq_max", "sequence_weight_max"): rows.max(),
        ("rollout_is_seq_min", "sequence_weight_min"): rows.min(),
        ("rollout_is_seq_max_deviation", "sequence_weight_max_deviation"): np.abs(rows - 1).max(),
        ("rollout_is_batch_norm_factor", "normaliser"): factor,
    }
    arrays = {"log_ratio": jnp.asarray(b.train - b.rollout), "mask": jnp.asarray(b.mask)}
    plain = corrections.correct(translated(section), **arrays).metrics
    divided = corrections.correct(
        translated(section | {"rollout_is_batch_normalize": True}), **arrays
    )
    mine = plain | {"normaliser": divided.metrics["normaliser"]}
    return [
        Row("metric", f"{theirs}, {level}", f"correction/{ours}", difference(mine[ours], value))
        for (theirs, ours), value in wanted.items()
    ]


def of_rejections(b: Batch) -> list[Row]:
    """`compute_rs_metrics` of every option, all in one chain."""
    d = b.train.astype(np.float64) - b.rollout
    options = {name: "0.9_1.08" if name.endswith("k1") else "0.004" for name in REJECTIONS}
    section = {
        "rollout_rs": ",".join(options),
        "rollout_rs_threshold": ",".join(options.values()),
    }
    arrays = {"log_ratio": jnp.asarray(b.train - b.rollout), "mask": jnp.asarray(b.mask)}
    mine = corrections.correct(translated(section), **arrays).metrics
    found = []
    for name, value, sides in formulas.rejections(d, b.mask, section):
        over, statistic = name.removeprefix("seq_").rsplit("_", 1)
        label, prefix = f"reject_{statistic}_over_{over}", f"rollout_rs_{name}"
        out = sides["below"] | sides["above"]
        by_row = value.shape[1] == 1
        # Our bounds are on r, and verl's on 1 / r.
        swap = {"below": "above", "above": "below"} if statistic == "k1" else {"above": "above"}
        wanted = {
            ("masked_fraction", f"rejected_tokens/{label}"): out[b.mask].mean(),
            ("seq_masked_fraction", f"rejected_sequences/{label}"): out.any(axis=1).mean(),
        }
        for side, ours in swap.items():
            flag = sides[side].any(axis=1) if by_row else sides[side][b.mask]
            theirs = "fraction_low" if side == "below" else "fraction_high"
            wanted[theirs, f"{ours}_share/{label}"] = flag.mean()
        found += [
            Row("metric", f"{prefix}_{what}", f"correction/{ours}", difference(mine[ours], share))
            for (what, ours), share in wanted.items()
        ]
    return found


def rows(seed: int = 0) -> list[Row]:
    b = draw(seed)
    return [
        row
        for part in (losses, estimates, estimators, aggregations, presets, measured)
        for row in part(b)
    ]


def page(found: list[Row], software: str) -> str:
    lines = [
        "# Parity with verl",
        "",
        "Written by `python scripts/parity_table.py`;"
        " `tests/scripts/test_parity_table.py` holds it.",
        "",
        f"{software}. Our float32 against verl's formulas in float64 (`scripts/verl_formulas.py`,"
        " from verl at commit 1dda039, 2026-08-22): the largest difference of any token over the"
        f" largest value. {len(found)} rows, all at most {CLOSE:g}; the largest is"
        f" {max(row.difference for row in found):.1e}. Log-probs are multiples of 2^-12, so that"
        " float32 has their differences exactly; bounds are such that every rejection rejects some."
        " Whole steps, with KL and entropy terms, mini-batches and every preset, are compared to"
        " 1e-5 by `tests/app/config/test_verl.py`. Not in the table: `clip_cov` and `kl_cov`, which"
        " choose tokens (`tests/objectives/test_losses.py`), and the tail of"
        " `optimal_token_baseline`.",
    ]
    for part in dict.fromkeys(row.part for row in found):
        lines += ["", f"## By {part}", "", "| verl | here | difference |", "|---|---|--:|"]
        lines += [
            f"| `{row.theirs}` | `{row.ours}` | {row.difference:.1e} |"
            for row in found
            if row.part == part
        ]
    lines += ["", "## Metrics of verl alone", "", "| verl | here |", "|---|---|"]
    lines += [f"| `{theirs}` | {ours} |" for theirs, ours in ALONE.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    versions = common.versions("jax", "jaxlib")
    software = ", ".join(f"{name} {number}" for name, number in versions.items())
    PAGE.write_text(page(rows(), f"{common.cpu_model()}; {software}"))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
