"""Beside them: torch and transformers on a model of the same shape, where they are installed.

Same architecture, random weights: the time of a step does not depend on their values.
"""

import importlib.util
import time
from collections.abc import Iterator
from functools import partial

from records import Case
from setting import Setting

_NEW = 256  # transformers' generate is slow; rates are per token


def installed() -> bool:
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def cases(setting: Setting) -> Iterator[Case]:
    if not installed():
        yield Case("torch and transformers", lambda: {"found": "not installed"})
        return
    for name in ("1.7B",) if setting.smoke else ("1.7B", "0.6B"):
        for batch in (2,) if setting.smoke else (64, 16, 256, 1):
            label = f"transformers generate {name}, batch {batch}, {_new(setting)} new tokens"
            yield Case(label, partial(_generate, setting, name, batch))
        rows, length = (2, 12) if setting.smoke else (4, 4096)
        label = f"transformers forward and backward {name}, {rows} x {length:,} tokens"
        yield Case(label, partial(_forward_backward, setting, name, rows, length))


def _new(setting: Setting) -> int:
    return 6 if setting.smoke else _NEW


def _model(setting: Setting, name: str):
    import torch
    import transformers

    config = setting.model(name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                tie_word_embeddings=True,
            )
        )
    return model.to(torch.bfloat16), device, torch


def _timed(call, device: str, torch) -> float:
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _generate(setting: Setting, name: str, batch: int):
    model, device, torch = _model(setting, name)
    new = _new(setting)
    tokens = torch.randint(0, model.config.vocab_size, (batch, 64 // (16 if setting.smoke else 1)))
    tokens = tokens.to(device)
    call = partial(
        model.generate,
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=True,
        max_new_tokens=new,
        min_new_tokens=new,
        pad_token_id=0,
    )
    with torch.inference_mode():
        model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=4)
        took = _timed(call, device, torch)
    return {"tokens/s": batch * new / took, "ms/step": took / new * 1e3}


def _forward_backward(setting: Setting, name: str, rows: int, length: int):
    """One sequence at a time, gradients summed; no optimiser."""
    model, device, torch = _model(setting, name)
    model.gradient_checkpointing_disable()
    tokens = torch.randint(0, model.config.vocab_size, (rows, length)).to(device)

    def step():
        for row in tokens:
            model(input_ids=row[None], labels=row[None]).loss.backward()

    _timed(step, device, torch)
    took = _timed(step, device, torch)
    return {"tokens/s": rows * length / took}
