"""Diagnoses sound rollouts of CTranslate2, which shares no code with torch or JAX.

    pip install ctranslate2
    python scripts/diagnose_ctranslate2.py runs/diagnose_table float32
    CT2_USE_MKL=1 python scripts/diagnose_ctranslate2.py runs/diagnose_table int8

Folder and model are those of diagnose_table.py, whose page gets a line for each engine.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import ctranslate2
import diagnose_table as table
from ctranslate2.converters import TransformersConverter

SAMPLES = 4  # of each prompt


def engine(folder: Path, kind: str) -> Any:
    """The table's model, converted from what `tim.save` writes of it."""
    converted = folder / "ctranslate2"
    if not converted.exists():
        TransformersConverter(str(table.exported(folder))).convert(str(converted))
    return ctranslate2.Generator(str(converted), compute_type=kind, intra_threads=1)


def rows(generator: Any, seed: int) -> table.Rows:
    """What it draws, token by token, with the log-probs that it says."""
    ctranslate2.set_random_seed(seed + 1)
    return [drawn(generator, prompt) for prompt in table.prompt_lists(100 * seed) * SAMPLES]


def drawn(generator: Any, prompt: list[int]) -> table.Row:
    steps = generator.generate_tokens(
        table.TOKENIZER.convert_ids_to_tokens(prompt),
        max_length=table.RESPONSE,
        sampling_topk=0,  # all tokens
        end_token=list(table.STOPS),
        return_log_prob=True,
    )
    found = [(step.token_id, step.log_prob) for step in steps]
    ids, log_probs = zip(*found, strict=True)
    return {"prompt_token_ids": prompt, "response_token_ids": ids, "logprobs": log_probs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("kind", choices=("float32", "int8"))
    parser.add_argument("--rollouts", type=int, default=table.ROLLOUTS)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    generator = engine(given.folder, given.kind)
    library = "MKL" if os.environ.get("CT2_USE_MKL") == "1" else "oneDNN"
    name = f"CTranslate2 {ctranslate2.__version__}, {given.kind}, {library}"
    for seed in range(given.rollouts):
        found = table.said_of(name, seed, rows(generator, seed))
        table.append(given.folder / "sound.jsonl", found)
    table.write_page(given.folder)


if __name__ == "__main__":
    main()
