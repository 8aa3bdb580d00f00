"""The decoder in NumPy float64, written from the definitions; what every other forward is held to.

It shares nothing with the package but the values of ModelConfig and the layout of the parameters.
One sequence, no batch, no cache, no tricks. Sources: RMSNorm, arXiv:1910.07467; rotary positions,
arXiv:2104.09864; grouped queries, arXiv:2305.13245; SwiGLU, arXiv:2002.05202; YaRN,
arXiv:2309.00071; mixtures of experts, arXiv:1701.06538; latent attention, arXiv:2405.04434, in its
plain form, with a key for every head; the Llama 3.1, Qwen2, Qwen3 and DeepSeek-V3 reports.
"""

from typing import Any

import numpy as np


def reference_logits(params, tokens, config, *, inv_freq=None):
    """Logits f64[T, V] of tokens i[T] at positions 0..T-1.

    `inv_freq` (f[D / 2]) replaces the exact frequencies, so that a test of the forward's rounding
    can leave out that of the frequencies.
    """
    p = _float64(params)
    cos, sin = _cos_sin(len(tokens), config, inv_freq)
    x = p["embed"][np.asarray(tokens)]
    attention = _latent_attention if config.latent else _attention
    for index in range(config.num_layers):
        w = _layer(p, index, config)
        window = config.sliding_window if index in _windowed(config) else len(tokens)
        x = x + attention(_rms_norm(x, w["attn_norm"], config), w, cos, sin, window, config)
        mlp = _mixture if "router" in w else _swiglu
        x = x + mlp(_rms_norm(x, w["mlp_norm"], config), w, config)
    head = p["embed"].T if config.tied_embeddings else p["head"]
    return _rms_norm(x, p["final_norm"], config) @ head


def reference_log_probs(params, tokens, config, *, temperature=1.0, inv_freq=None):
    """f64[T - 1]: log-prob of tokens[t + 1] given tokens[..t], logits divided by `temperature`."""
    logits = reference_logits(params, tokens, config, inv_freq=inv_freq)[:-1] / temperature
    logits = logits - logits.max(axis=-1, keepdims=True)
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return log_probs[np.arange(len(tokens) - 1), np.asarray(tokens)[1:]]


def reference_frequencies(rope, head_dim):
    """(frequencies f64[D / 2], factor on cos and sin), exact but for float64 rounding."""
    pairs = np.arange(head_dim // 2)
    plain = rope.theta ** (-2.0 * pairs / head_dim)
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        # turns over the original context: many -> keep, few -> stretch, blend in between
        turns = rope.original_max_positions * plain / (2 * np.pi)
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = np.clip(keep, 0, 1)
        return plain * (keep + (1 - keep) / rope.factor), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, plain, head_dim)
    return plain, 1.0


def _yarn(rope, plain, head_dim):
    def pair_of(turns):
        # solves original * theta^(-2 pair / D) / (2 pi) = turns
        ratio = rope.original_max_positions / (2 * np.pi * turns)
        return head_dim / 2 * np.log(ratio) / np.log(rope.theta)

    first, last = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        first, last = np.floor(first), np.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    last = last + 0.001 if last == first else last
    stretch = np.clip((np.arange(head_dim // 2) - first) / (last - first), 0, 1)
    scale = rope.attention_factor
    if scale is None:
        scale = 0.1 * np.log(rope.factor) + 1
        if rope.mscale and rope.mscale_all_dim:
            scale = 0.1 * rope.mscale * np.log(rope.factor) + 1
            scale /= 0.1 * rope.mscale_all_dim * np.log(rope.factor) + 1
    return plain * (1 - stretch) + plain / rope.factor * stretch, scale


def _cos_sin(length, config, inv_freq):
    exact, scale = reference_frequencies(config.rope, config.head_dim)
    frequencies = exact if inv_freq is None else np.asarray(inv_freq, np.float64)
    angles = np.arange(length)[:, None] * frequencies[None, :]
    return np.cos(angles) * scale, np.sin(angles) * scale


def _layer(params, index, config):
    """The weights of a layer; the first ones may lie apart."""
    first = config.first_dense_layers
    stack = params["dense_layers"] if index < first else params["layers"]
    return {name: leaf[index - (0 if index < first else first)] for name, leaf in stack.items()}


def _windowed(config):
    """Indices of the layers with a window."""
    return [index for index, own in enumerate(config.window_layers) if own]


def _attention(x, w, cos, sin, window, config):
    heads, groups, size = config.num_heads, config.num_kv_heads, config.head_dim
    q = _linear(x, w, "q").reshape(-1, heads, size)
    k = _linear(x, w, "k").reshape(-1, groups, size)
    v = _linear(x, w, "v").reshape(-1, groups, size)
    if config.qk_norm:
        q, k = _rms_norm(q, w["q_norm"], config), _rms_norm(k, w["k_norm"], config)
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    ages = np.arange(len(x))[:, None] - np.arange(len(x))[None, :]
    hidden = (ages < 0) | (ages >= window)
    outputs = []
    for head in range(heads):
        group = head // (heads // groups)
        scores = np.where(hidden, -np.inf, q[:, head] @ k[:, group].T / np.sqrt(size))
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        outputs.append(weights / weights.sum(axis=-1, keepdims=True) @ v[:, group])
    return _linear(np.concatenate(outputs, axis=-1), w, "o")


def _latent_attention(x, w, cos, sin, window, config):
    """Every head's keys and values multiplied out of the compressed states."""
    del window
    own, heads = config.latent, config.num_heads
    if "q" in w:
        query = x @ w["q"]
    else:
        query = _rms_norm_of_state(x @ w["q_down"], w["q_down_norm"]) @ w["q_up"]
    q, turned_q = np.split(query.reshape(len(x), heads, -1), [own.qk_nope_head_dim], axis=-1)
    state, turned_k = np.split(x @ w["kv_down"], [own.kv_lora_rank], axis=-1)
    of_heads = (_rms_norm_of_state(state, w["kv_norm"]) @ w["kv_up"]).reshape(len(x), heads, -1)
    k, v = np.split(of_heads, [own.qk_nope_head_dim], axis=-1)
    turned_q, turned_k = (
        _rotate(_in_halves(part, own.rope_interleave), cos, sin)
        for part in (turned_q, turned_k[:, None])
    )
    scale = own.qk_head_dim**-0.5
    if config.rope.kind == "yarn" and config.rope.mscale_all_dim:
        scale *= (0.1 * config.rope.mscale_all_dim * np.log(config.rope.factor) + 1) ** 2
    outputs = []
    for head in range(heads):
        scores = (q[:, head] @ k[:, head].T + turned_q[:, head] @ turned_k[:, 0].T) * scale
        scores = np.where(np.tril(np.ones_like(scores)) > 0, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        outputs.append(weights / weights.sum(axis=-1, keepdims=True) @ v[:, head])
    return np.concatenate(outputs, axis=-1) @ w["o"]


def _in_halves(x, interleaved):
    """Neighbours (2 i, 2 i + 1) as the pairs (i, i + D / 2)."""
    return np.concatenate([x[..., ::2], x[..., 1::2]], axis=-1) if interleaved else x


def _rotate(x, cos, sin):
    """Turns the pair (i, i + D / 2) of every head by its position's angle."""
    first, second = np.split(x, 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _mixture(x, w, config):
    """Each token through its most probable experts, the first ones of equal probability."""
    sigmoid = "router_bias" in w
    logits = x @ w["router"]
    scores = 1 / (1 + np.exp(-logits)) if sigmoid else np.exp(logits)
    chosen = _in_best_groups(scores + w["router_bias"], config) if sigmoid else scores
    chosen = np.argsort(-chosen, axis=-1, kind="stable")[:, : config.num_experts_per_tok]
    y = np.zeros_like(x)
    for row, experts in enumerate(chosen):
        whole = scores[row, experts] if config.norm_topk_prob else scores[row]
        whole = 1.0 if sigmoid and not config.norm_topk_prob else whole.sum()
        for expert in experts:
            own = {name: w[f"expert_{name}"][expert] for name in ("gate", "up", "down")}
            weight = scores[row, expert] / whole * config.routed_scaling_factor
            y[row] += weight * _swiglu(x[row], own, config)
    if "shared_gate" in w:
        own = {name: w[f"shared_{name}"] for name in ("gate", "up", "down")}
        gate = x @ w["shared_scale"] if "shared_scale" in w else np.inf
        y = y + _swiglu(x, own, config) / (1 + np.exp(-gate))
    return y


def _in_best_groups(scores, config):
    """The scores, minus infinity outside the groups whose two best have the largest sums."""
    of_groups = scores.reshape(len(scores), config.router_groups, -1)
    best = np.sort(of_groups, axis=-1)[..., -2:].sum(axis=-1)
    taken = np.argsort(-best, axis=-1, kind="stable")[:, : config.router_groups_per_tok]
    inside = np.zeros_like(best, dtype=bool)
    np.put_along_axis(inside, taken, True, axis=-1)
    return np.where(inside[..., None], of_groups, -np.inf).reshape(scores.shape)


def _swiglu(x, w, config):
    del config
    gate = _linear(x, w, "gate")
    return _linear(gate / (1 + np.exp(-gate)) * _linear(x, w, "up"), w, "down")


def _linear(x, w, name):
    return x @ w[name] + w.get(f"{name}_bias", 0.0)


def _rms_norm(x, weight, config):
    return _normed(x, weight, config.rms_norm_eps)


def _rms_norm_of_state(x, weight):
    """Of latent attention's compressed states, for which DeepSeek-V3 has an epsilon of its own."""
    return _normed(x, weight, 1e-6)


def _normed(x, weight, eps):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def _float64(tree) -> Any:
    if isinstance(tree, dict):
        return {name: _float64(leaf) for name, leaf in tree.items()}
    return np.asarray(tree).astype(np.float64)
