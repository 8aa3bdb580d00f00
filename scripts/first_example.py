"""Runs the README's first example, and scores its model before and after on numbers it never saw.

python scripts/first_example.py     # about a minute on two cores
"""

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import tim_jax as tim

README = Path(__file__).parents[1] / "README.md"
SAMPLES = 4


def main() -> None:
    found = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    example: dict[str, Any] = {}
    os.chdir(tempfile.mkdtemp())  # where it saves its model
    exec(found[1], example)
    held_out = [f"{number:05}" for number in range(100, 100_000, 199)]
    prompts = [f"{number}>" for number in held_out]
    answers = ["".join(sorted(number)) for number in held_out for _ in range(SAMPLES)]
    repeated = [prompt for prompt in prompts for _ in range(SAMPLES)]
    for when, model in (("before", example["model"]), ("after", example["step"].model)):
        text = tim.sample(model, prompts, samples=SAMPLES, seed=1).text
        right = np.reshape(example["reward"](repeated, text, answers), (-1, SAMPLES)).mean(axis=1)
        error = 1.96 * right.std(ddof=1) / len(right) ** 0.5
        print(f"{when}: {right.mean():.3f} ± {error:.3f} right of {len(right)} held-out numbers")


if __name__ == "__main__":
    main()
