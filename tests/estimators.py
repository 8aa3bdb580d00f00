"""Every estimator of advantages in float64, written from its definition, row by row."""

import numpy as np


def per_token(values, mask):
    return np.where(mask, values[:, None] if values.ndim == 1 else values, 0.0)


def group_rows(size, counted):
    """The rows of each group that count."""
    for start in range(0, len(counted), size):
        rows = np.arange(start, start + size)
        yield rows[counted[rows]]


def centre(r, size, counted, weights):
    """r less each group's weighted mean."""
    result = np.zeros_like(r)
    for rows in group_rows(size, counted):
        if len(rows):
            result[rows] = r[rows] - np.average(r[rows], weights=weights[rows])
    return result


def returns(r, of_tokens, mask):
    """f64[B, R], what follows each token as verl adds it up, with the reward at the last one."""
    given = np.where(mask, of_tokens, 0.0)
    for row, length in enumerate(mask.sum(axis=1)):
        if length:
            given[row, length - 1] += r[row]
    running, found = np.zeros(len(r)), np.zeros(mask.shape)
    for t in reversed(range(mask.shape[1])):
        running = given[:, t] + running
        found[:, t] = running
    return found


def whiten(values, mask, tiny):
    """Over tokens, with the constant in the variance, and the `tiny` one in counts, of verl."""
    number = mask.sum()
    tokens = per_token(values, mask)
    mean = tokens.sum() / (number + tiny)
    variance = (np.square(tokens - mean) * mask).sum() / (number + tiny) * number / (number - 1)
    return ((tokens - mean) / np.sqrt(variance + 1e-8)) * mask


def scale(values, r, size, counted, eps=1e-6):
    result = np.zeros_like(r)
    for rows in group_rows(size, counted):
        if len(rows) > 1:
            result[rows] = values[rows] / (r[rows].std(ddof=1) + eps)
    return result


def leave_one_out(r, size, counted):
    result = np.zeros_like(r)
    for rows in group_rows(size, counted):
        for i in rows if len(rows) > 1 else []:
            result[i] = r[i] - r[[j for j in rows if j != i]].mean()
    return result


def best_less_second(r, size, counted):
    result = np.zeros_like(r)
    for rows in group_rows(size, counted):
        if len(rows) > 1:
            order = rows[np.argsort(-r[rows], kind="stable")]
            result[order[0]] = r[order[0]] - r[order[1]]
    return result


def token_baseline(to_go, size, mask, energies, ratios, tiny):
    """As verl writes it, of the returns from each token on."""
    paths = np.cumsum(energies * ratios**2 * mask, axis=1)
    result = np.zeros(mask.shape)
    for start in range(0, len(mask), size):
        rows = slice(start, start + size)
        weights = paths[rows] * mask[rows]
        baseline = (weights * to_go[rows]).sum(axis=0) / np.maximum(
            weights.sum(axis=0) + tiny, 1e-300
        )
        # The longest row beyond the second longest has nothing to be compared with.
        longest = np.sort(mask[rows].sum(axis=1))
        baseline[longest[-2] if size > 1 else 0 :] = 0.0
        result[rows] = (to_go[rows] - baseline) * mask[rows]
    return result


def reference(data, size, estimator, *, tiny=1e-8):
    """f64[B, R], 0 off the mask; `tiny` is what verl adds to numbers that it divides by."""
    r, mask = data["rewards"].astype(np.float64), data["mask"]
    energies, d = data["energies"].astype(np.float64), data["log_ratio"].astype(np.float64)
    lengths = mask.sum(axis=1)
    counted = lengths > 0
    of_tokens = data.get("token_rewards", np.zeros(mask.shape)).astype(np.float64)
    to_go = returns(r, of_tokens, mask)
    r = r + (of_tokens * mask).sum(axis=1)
    centred = centre(r, size, counted, np.ones(len(r)))
    norms = (energies * mask).sum(axis=1) * np.exp((d * mask).sum(axis=1)) ** 2
    values = {
        "grpo": lambda: scale(centred, r, size, counted),
        "dr_grpo": lambda: centred,
        "rloo": lambda: leave_one_out(r, size, counted),
        "reinforce": lambda: to_go,
        "reinforce_batch": lambda: r - r[counted].mean(),
        "reinforce_plus_plus": lambda: whiten(to_go, mask, tiny),
        "reinforce_plus_plus_baseline": lambda: whiten(centred, mask, tiny),
        "opo": lambda: centre(r, size, counted, lengths),
        "remax": lambda: to_go - np.repeat(data["greedy_rewards"], size)[:, None],
        "gpg": lambda: centred * counted.sum() / max((r[counted] != 0).sum(), 1),
        "pass_at_k": lambda: scale(best_less_second(r, size, counted), r, size, counted),
        "optimal_token_baseline": lambda: token_baseline(
            to_go, size, mask, energies, np.exp(d), tiny
        ),
        "off_policy_baseline": lambda: centre(r, size, counted, norms),
    }[estimator]()
    return per_token(values, mask)
