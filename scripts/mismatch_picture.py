"""Draws the picture of the README: the same weights, two programs, and the ratio of every token.

    python scripts/mismatch_picture.py     # half a minute on two cores, to docs/tim.svg

Left: sampled in bfloat16 and scored in float32, as when an engine and a trainer differ. Right: both
in bfloat16, by this library's exact forward.
"""

import random
from pathlib import Path

import matplotlib as mpl
import numpy as np

import tim_jax as tim
from tim_jax.app.run import charts

mpl.use("agg")
from matplotlib import pyplot as plt

PATH = Path(__file__).parents[1] / "docs" / "tim.svg"
BLUE, ORANGE = "#1f77b4", "#d95f02"


def ratios(sampler, learner, prompts):
    """f32[N] probabilities of the tokens that were drawn, and f32[N] their ratios."""
    rollout = tim.sample(sampler, prompts, samples=8)
    log_probs = tim.score(learner, rollout)[rollout.mask]
    recorded = rollout.log_probs[rollout.mask]
    return np.exp(log_probs), np.exp(log_probs - recorded)


def draw(axes, probabilities, ratio, title, colour):
    unequal = np.count_nonzero(ratio != 1)
    # Thousands of dots as one picture within the SVG: 30 kB in place of 2 MB.
    axes.scatter(probabilities, ratio, s=5, lw=0, alpha=0.5, color=colour, rasterized=True)
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel("probability of a token")
    low, high = ratio.min(), ratio.max()
    span = "every ratio is 1" if low == high else f"ratios from {low:.2f} to {high:.2f}"
    axes.text(
        0.97,
        0.06,
        f"{unequal:,} of {ratio.size:,} tokens differ\n{span}",
        transform=axes.transAxes,
        ha="right",
        fontsize=9.5,
        color="#333333",
    )


def main():
    rng = random.Random(0)
    prompts = ["".join(rng.choices("0123456789", k=5)) + ">" for _ in range(64)]
    fine, coarse = tim.load("tiny"), tim.load("tiny", dtype="bfloat16")
    mpl.rcParams |= {"svg.hashsalt": "tim", "axes.spines.top": False, "axes.spines.right": False}
    figure, (left, right) = plt.subplots(1, 2, figsize=(5.9, 3.3), sharey=True)
    title = "Two programs:\nsampler bfloat16, trainer float32"
    draw(left, *ratios(coarse, fine, prompts), title, ORANGE)
    draw(right, *ratios(coarse, coarse, prompts), "tim_jax:\none forward for both, bfloat16", BLUE)
    left.set_ylabel("ratio: trainer's / sampler's")
    charts.sign(figure, "python scripts/mismatch_picture.py", size=5.5)
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    figure.savefig(PATH, dpi=200, metadata={"Date": None})
    print(PATH)


if __name__ == "__main__":
    main()
