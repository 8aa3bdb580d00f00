"""verl's formulas in float64, in our own words: what its step computes, for tests and tables.

Written from verl at commit 1dda039 (2026-08-22): `verl/trainer/ppo/core_algos.py` (estimators,
losses, `agg_loss`, `kl_penalty`), `verl/trainer/ppo/rollout_corr_helper.py` (weights, rejections,
metrics), `verl/trainer/ppo/ray_trainer.py` and `verl/workers/utils/losses.py` (their order). NumPy
alone. B sequences stand in groups of G neighbours; R is the longest response.
"""

import numpy as np

# Parts of the presets below.
TOKEN, SEQUENCE = {"rollout_is": "token"}, {"rollout_is": "sequence"}
ICEPOP = TOKEN | {"rollout_is_threshold": "0.5_5.0"}
GEO_RS = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
K3_RS = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
BYPASS = {"bypass_mode": True}
BYPASS_PG = BYPASS | {"loss_type": "reinforce"}
# `RolloutCorrectionConfig`'s factories (verl/trainer/config/algorithm.py) with their defaults.
PRESETS = {
    "disabled": {},
    "decoupled_token_is": TOKEN,
    "decoupled_token_icepop": ICEPOP,
    "decoupled_seq_is": SEQUENCE,
    "decoupled_seq_is_rs": SEQUENCE
    | {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
    "decoupled_geo_rs": GEO_RS,
    "decoupled_geo_rs_seq_tis": SEQUENCE | GEO_RS,
    "decoupled_geo_rs_token_tis": TOKEN | GEO_RS,
    "decoupled_k3_rs": K3_RS,
    "decoupled_k3_rs_seq_tis": SEQUENCE | K3_RS,
    "decoupled_k3_rs_token_tis": TOKEN | K3_RS,
    "bypass_ppo_clip": BYPASS,
    "bypass_ppo_clip_geo_rs": BYPASS | GEO_RS,
    "bypass_ppo_clip_k3_rs": BYPASS | K3_RS,
    "bypass_pg_is": BYPASS_PG | SEQUENCE,
    "bypass_pg_token_icepop": BYPASS_PG | ICEPOP,
    "bypass_pg_geo_rs": BYPASS_PG | GEO_RS,
    "bypass_pg_geo_rs_seq_tis": BYPASS_PG | SEQUENCE | GEO_RS,
    "bypass_pg_geo_rs_token_tis": BYPASS_PG | TOKEN | GEO_RS,
}


def held(x):
    return np.clip(x, -20.0, 20.0)


def mean(x, mask):
    return np.where(mask, x, 0.0).sum() / (mask.sum() + 1e-8)


def row_mean(x, mask):
    return np.where(mask, x, 0.0).sum(axis=1) / (mask.sum(axis=1) + 1e-8)


# core_algos.py: estimators. (rewards [B], mask [B, R], group size, ...) -> [B, R]


def _groups(rewards, size):
    return rewards.reshape(-1, size)


def _spread(values, mask):
    return values.reshape(-1, 1) * mask


def _whitened(x, mask):
    centre = mean(x, mask)
    number = mask.sum()
    variance = mean(np.square(x - centre), mask) * number / (number - 1)
    return (x - centre) / np.sqrt(variance + 1e-8) * mask


def at_end(rewards, mask):
    """The reward at each response's last token, from where returns are added up."""
    found = np.zeros(mask.shape)
    ends = np.maximum(mask.sum(axis=1) - 1, 0)
    found[np.arange(len(rewards)), ends] = rewards
    return found


def advantages(name, rewards, mask, size, *, response, greedy=None, energies=None, weights=None):
    """`response` is the mask before rejections: where the rewards stand."""
    groups = _groups(rewards, size)
    centred = groups - groups.mean(axis=1, keepdims=True)
    deviation = groups.std(axis=1, ddof=1, keepdims=True) + 1e-6
    if name == "grpo":
        return _spread(centred / deviation, mask)
    if name == "dr_grpo":
        return _spread(centred, mask)
    if name == "rloo":
        return _spread(centred * size / (size - 1), mask)
    if name == "grpo_passk":
        best = np.zeros(groups.shape)
        order = np.argsort(-groups, axis=1, kind="stable")
        for row, (first, second) in enumerate(order[:, :2]):
            best[row, first] = (groups[row, first] - groups[row, second]) / deviation[row, 0]
        return _spread(best, mask)
    if name == "gpg":
        return _spread(centred * rewards.size / max(np.count_nonzero(rewards), 1), mask)
    if name == "opo":
        lengths = _groups(mask.sum(axis=1), size)
        baseline = (lengths * groups).sum(axis=1) / lengths.sum(axis=1)
        return _spread(groups - baseline[:, None], mask)
    if name == "reinforce_plus_plus_baseline":
        return _whitened(_spread(centred, mask), mask)
    token_rewards = at_end(rewards, response)
    if name == "reinforce_plus_plus":
        return _whitened(_to_go_past_the_masked(token_rewards, mask), mask)
    to_go = np.cumsum((token_rewards * mask)[:, ::-1], axis=1)[:, ::-1]
    if name == "remax":
        return (to_go - np.repeat(greedy, size)[:, None]) * mask
    assert name == "optimal_token_baseline"
    energies = energies if weights is None else energies * weights**2
    paths = np.cumsum(energies * mask, axis=1)
    baseline = np.zeros(mask.shape)
    for start in range(0, len(rewards), size):
        rows = slice(start, start + size)
        over = (paths[rows] * mask[rows]).sum(axis=0) + 1e-8
        baseline[rows] = (to_go[rows] * paths[rows] * mask[rows]).sum(axis=0) / over
        lengths = np.sort(mask[rows].sum(axis=1))
        if lengths[-1] > lengths[-2]:
            longest = start + int(np.argmax(mask[rows].sum(axis=1)))
            baseline[longest, lengths[-2] :] = 0.0
    return (to_go - baseline) * mask


def _to_go_past_the_masked(token_rewards, mask):
    found, running = np.zeros(mask.shape), np.zeros(len(mask))
    for t in reversed(range(mask.shape[1])):
        now = token_rewards[:, t] + running
        found[:, t] = now * mask[:, t]
        running = np.where(mask[:, t], now, running)
    return found


# core_algos.py: policy losses. x are the log-probs that move, `at` the same without a gradient.


def _pessimistic(ratio, a, o):
    loss = np.maximum(-a * ratio, -a * np.clip(ratio, 1 - o["low"], 1 + o["high"]))
    return np.where(a < 0, np.minimum(loss, -a * o["dual"]), loss) if o.get("dual") else loss


def policy_loss(name, x, at, old, a, mask, o):
    ratio, frozen = np.exp(held(x - old)), np.exp(held(at - old))
    if name == "vanilla":
        return _pessimistic(ratio, a, o)
    if name in ("gpg", "reinforce"):
        return -a * x
    if name == "gspo":
        sequence = row_mean(at - old, mask)[:, None] + x - at
        return _pessimistic(np.exp(np.minimum(sequence, 10.0)), a, {**o, "dual": None})
    if name == "sapo":
        tau = np.where(a > 0, o["tau_pos"], o["tau_neg"])
        return -a * 4 / tau / (1 + np.exp(-tau * (ratio - 1)))
    if name == "cispo":
        return -np.clip(frozen, 1 - o["low"], 1 + o["high"]) * a * x
    if name == "geo_mean":
        sign = np.sign(a)

        def clipped(d):
            return sign * np.minimum(sign * d, sign * np.clip(d, -o["low"], o["high"]))

        # Of a row; spread over its tokens as its mean, with each token's own gradient.
        there = np.exp(row_mean(clipped(at - old), mask))[:, None]
        return -a * there * np.exp(clipped(x - old) - clipped(at - old))
    assert name.startswith("dppo")
    p, q = np.exp(at), np.exp(old)
    far = np.abs(p - q)
    if name == "dppo_kl":
        far = q * (old - at) + (1 - q) * np.log((1 - q + 1e-8) / (1 - p + 1e-8))
    inside = np.where(a > 0, (far <= o["high"]) | (p <= q), (far <= o["low"]) | (p >= q))
    return -a * np.minimum(frozen, o["dual"]) * x * inside


def aggregated(losses, mask, mode, *, tokens, sequences, horizon):
    """`agg_loss`, with a mini-batch's number of tokens and sequences."""
    losses = np.where(mask, losses, 0.0)
    if mode == "token-mean":
        return losses.sum() / tokens
    if mode == "token-sum":
        return losses.sum()
    if mode == "seq-mean-token-mean":
        return (losses.sum(axis=1) / (mask.sum(axis=1) + 1e-8)).sum() / sequences
    total = losses.sum() / sequences
    return total / horizon if mode == "seq-mean-token-sum-norm" else total


def kl_penalty(kind, x, reference):
    d = x - reference
    if kind in ("low_var_kl", "k3"):
        return np.clip(np.exp(held(-d)) - 1 + held(d), -10.0, 10.0)
    return {"kl": d, "abs": np.abs(d), "mse": 0.5 * d**2}[kind]


# rollout_corr_helper.py


def _bounds(text):
    low, _, high = str(text).rpartition("_")
    return (float(low) if low else None), float(high)


def correction(d, mask, options):
    """(weights or None, mask after rejections, factor of the batch or None) of log-ratios d."""
    weights, factor = None, None
    level = options.get("rollout_is")
    if level is not None:
        sums = np.where(mask, d, 0.0).sum(axis=1, keepdims=True)
        weights = np.exp(held(d if level == "token" else sums)) * mask
        low, high = _bounds(options.get("rollout_is_threshold", 2.0))
        if low is None:
            weights = np.minimum(weights, high)
        else:
            weights = np.where((weights >= low) & (weights <= high), weights, 0.0)
        if options.get("rollout_is_batch_normalize"):
            by_row = row_mean(weights, mask)[mask.any(axis=1)]
            factor = mean(weights, mask) if level == "token" else by_row.mean()
            weights = weights / factor
    keep = np.ones(mask.shape, bool)
    for name, _, out in rejections(d, mask, options):
        del name
        keep &= ~(out["below"] | out["above"])
    return weights, mask & keep, factor


def rejections(d, mask, options):
    """(option, statistic, {side: bool[B, R]}) of each option of `rollout_rs`."""
    if options.get("rollout_rs") is None:
        return
    names = options["rollout_rs"].split(",")
    bounds = str(options["rollout_rs_threshold"]).split(",")
    bounds = bounds * len(names) if len(bounds) == 1 else bounds
    k1 = -held(d)
    tokens = {"k1": k1, "k2": 0.5 * k1**2, "k3": np.exp(-k1) - 1 + k1}
    for name, text in zip(names, bounds, strict=True):
        value = np.where(mask, tokens[name[-2:]], 0.0)
        if name.startswith("seq_sum"):
            value = value.sum(axis=1, keepdims=True)
        elif name.startswith("seq_mean"):
            value = row_mean(value, mask)[:, None]
        elif name.startswith("seq_max"):
            value = value.max(axis=1, keepdims=True)
        low, high = _bounds(text)
        below = np.zeros(value.shape, bool)
        if name.endswith("k1"):
            below = value < np.log(1 / high if low is None else low)
            high = np.log(high)
        sides = {"below": below, "above": value > high}
        yield name, value, {k: v & mask for k, v in sides.items()}


def mismatch(train, rollout, mask):
    """`compute_offpolicy_metrics`, of sequences that have a token."""
    train, rollout, mask = (x[mask.any(axis=1)] for x in (train, rollout, mask))
    ours, theirs = row_mean(train, mask), row_mean(rollout, mask)
    d = train - rollout
    sums = np.where(mask, d, 0.0).sum(axis=1)
    return {
        "kl": mean(-d, mask),
        "k3_kl": mean(np.exp(np.where(mask, d, 0.0)) - d - 1, mask),
        "training_ppl": np.exp(-ours).mean(),
        "rollout_ppl": np.exp(-theirs).mean(),
        "training_log_ppl": (-ours).mean(),
        "rollout_log_ppl": (-theirs).mean(),
        "log_ppl_diff": (theirs - ours).mean(),
        "log_ppl_abs_diff": np.abs(theirs - ours).mean(),
        "log_ppl_diff_max": (theirs - ours).max(),
        "log_ppl_diff_min": (theirs - ours).min(),
        "ppl_ratio": np.exp(theirs - ours).mean(),
        "chi2_token": mean(np.exp(2 * held(d)), mask) - 1,
        "chi2_seq": np.exp(2 * held(sums)).mean() - 1,
    }


# ray_trainer.py and workers/utils/losses.py: one step.


def loss_of_update(x, at, ready, o):
    """The loss of a mini-batch in float64, where x are the log-probs that move.

    `ready` has the arrays of its rows: old, rollout, advantages, mask, response (before
    rejections), weights, reference, entropy (of x).
    """
    mask, weights, rejected = ready["mask"], ready["weights"], ready["mask"]
    name = o["loss"]
    if o["bypass"]:
        weights, rejected, _ = correction(at - ready["rollout"], mask, o["correction"])
        name = (
            "vanilla" if o["correction"].get("loss_type", "ppo_clip") == "ppo_clip" else "reinforce"
        )
        weights = None if name == "vanilla" else weights
    counted = ready["response"] if o["v1"] else mask
    counts = {"tokens": counted.sum(), "sequences": len(mask), "horizon": mask.shape[1]}
    mode = "seq-mean-token-mean" if name in ("gspo", "sapo", "geo_mean") else o["aggregation"]
    losses = policy_loss(name, x, at, ready["old"], ready["advantages"], rejected, o)
    losses = losses if weights is None else losses * weights
    total = aggregated(losses, rejected, mode, **counts)
    if o.get("entropy"):
        total -= o["entropy"] * aggregated(ready["entropy"], mask, o["aggregation"], **counts)
    if o.get("kl"):
        estimates = kl_penalty("low_var_kl", x, ready["reference"])
        total += o["kl"] * aggregated(estimates, mask, o["aggregation"], **counts)
    return total
