"""Makes the models and the four files of rollouts that docs/diagnose.md diagnoses.

    python scripts/diagnose_cases.py runs/diagnose            # the models alone
    python scripts/diagnose_cases.py runs/diagnose --rollouts docs/diagnose

The models are random, from a seed, and small: `model` is the trainer's, `before` that of an earlier
checkpoint. The files are in the shapes of vLLM, SGLang and TRL, and plain lines.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import diagnose_faults
import jax
import numpy as np

from tim_jax import mismatch
from tim_jax.model import hf
from tim_jax.model.execution import Sampling

TOKENS = 400
EARLIER = 0.05  # how far off the earlier weights are, in standard deviations of each matrix


def write_models(folder: Path) -> None:
    for name, params in (
        ("model", diagnose_faults.params()),
        ("before", diagnose_faults.nudged(EARLIER)),
    ):
        hf.save(
            folder / name,
            jax.device_get(params),
            diagnose_faults.CONFIG,
            tokenizer=diagnose_faults.TOKENIZER,
            generation={"eos_token_id": list(diagnose_faults.STOPS)},
        )


def vllm(rows: Sequence[dict[str, Any]], **request: float) -> Iterator[dict[str, Any]]:
    """Completions of an OpenAI-style server, each with its request."""
    for row in rows:
        ids = row["response_token_ids"]
        choice = {
            "index": 0,
            "text": diagnose_faults.TOKENIZER.decode(ids, skip_special_tokens=True),
            "token_ids": ids,
            "logprobs": {
                "tokens": [f"token_id:{token}" for token in ids],
                "token_logprobs": row["logprobs"],
                "top_logprobs": None,
            },
            "finish_reason": "stop" if ids[-1] in diagnose_faults.STOPS else "length",
            "prompt_token_ids": row["prompt_token_ids"],
        }
        response = {"object": "text_completion", "model": "model", "choices": [choice]}
        yield {"request": request, "response": response}


def sglang(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Answers of `/generate`, with the ids that were sent."""
    for row in rows:
        ids = row["response_token_ids"]
        yield {
            "input_ids": row["prompt_token_ids"],
            "text": diagnose_faults.TOKENIZER.decode(ids, skip_special_tokens=True),
            "meta_info": {
                "finish_reason": {"type": "stop" if ids[-1] in diagnose_faults.STOPS else "length"},
                "prompt_tokens": len(row["prompt_token_ids"]),
                "completion_tokens": len(ids),
                "output_token_logprobs": [
                    [x, token, None] for x, token in zip(row["logprobs"], ids, strict=True)
                ],
            },
        }


def trl(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One batch of `trl vllm-serve`."""
    names = {
        "prompt_ids": "prompt_token_ids",
        "completion_ids": "response_token_ids",
        "logprobs": "logprobs",
    }
    yield {name: [row[own] for row in rows] for name, own in names.items()}


def without_end(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The trainer put the pad token where the end token was."""
    for row in rows:
        ids = row["response_token_ids"]
        ended = ids[-1] in diagnose_faults.STOPS
        kept = [*ids[:-1], diagnose_faults.TOKENIZER.pad_token_id] if ended else ids
        yield row | {"response_token_ids": kept}


def files() -> dict[str, list[dict[str, Any]]]:
    plain = diagnose_faults.drawn(TOKENS)
    half = diagnose_faults.changed(
        diagnose_faults.drawn(TOKENS, sampling=Sampling(temperature=0.6)), diagnose_faults.raw
    )
    engine = diagnose_faults.low_precision(mismatch.compute(dtype="bfloat16"))
    coarse = diagnose_faults.changed(plain, diagnose_faults.by_engine(engine))
    return {
        "temperature": list(vllm(half, temperature=0.6, max_tokens=diagnose_faults.RESPONSE)),
        "end_token": list(without_end(plain)),
        "bfloat16": list(sglang(coarse)),
        "checkpoint": list(trl(diagnose_faults.drawn(TOKENS, source=EARLIER))),
    }


def rounded(value: Any) -> Any:
    """Log-probs as float32 prints them."""
    if isinstance(value, float):
        return float(str(np.float32(value)))
    if isinstance(value, dict):
        return {key: rounded(x) for key, x in value.items()}
    return [rounded(x) for x in value] if isinstance(value, list) else value


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rollouts", type=Path)
    arguments = parser.parse_args()
    write_models(arguments.folder)
    if arguments.rollouts is None:
        return
    arguments.rollouts.mkdir(parents=True, exist_ok=True)
    for name, lines in files().items():
        text = "".join(json.dumps(rounded(line)) + "\n" for line in lines)
        (arguments.rollouts / f"{name}.jsonl").write_text(text)


if __name__ == "__main__":
    main()
