"""The forms of decoding attention on a CPU, by version of JAX, and writes docs/results/decode.md.

    JAX_PLATFORMS=cpu python scripts/bench_decode.py --python OLDER_PYTHON --python NEWER_PYTHON

Each interpreter has the project installed, one with the oldest JAX and one with the newest, and
works in a process of its own, one after the other. Within it calls are timed in turns.
"""

import json
import statistics
import subprocess
import sys
from dataclasses import replace
from functools import partial

import bench_common as common
import bench_exactness_cost as exactness_cost
import jax
import jax.numpy as jnp

from tim_jax.app.run.assembly import fixed_numerics
from tim_jax.instruments.auditing.cases import random_params
from tim_jax.model.execution import Execution, Sampling
from tim_jax.rl import programs

PAGE = common.RESULTS / "decode.md"
BATCH = 16
SIZES = common.Sizes(
    layers=4,
    hidden=512,
    intermediate=1536,
    head_dim=64,
    vocabulary=32_768,
    prompt=128,
    response=256,
    longest=256,
)
FORMS = {
    "native": "plain XLA, not exact",
    "whole": "exact, one product over all keys, where a calibration finds that it keeps the bits",
    "blocks": "exact, a product for every block of 32 keys, all of them in one batched product",
}


def work(options) -> None:
    """One interpreter's part: a JSON object on the last line of stdout."""
    sizes = common.SMOKE if options.smoke else SIZES
    rows = []
    for dtype in common.DTYPES:
        config = exactness_cost.model_config(sizes)
        exact = exactness_cost.calibrated(config, dtype, sizes, batch=BATCH)
        sides = {
            "native": fixed_numerics("native", dtype, length=config.max_positions),
            "whole": exact if exact.whole_kv else None,
            "blocks": replace(exact, whole_kv=False),
        }
        params = jax.tree.map(jnp.asarray, random_params(config, 0))
        prompts = exactness_cost.make_prompts(config, sizes, BATCH)
        calls = {}
        for form, numerics in sides.items():
            if numerics is not None:
                execution = Execution(config, numerics, Sampling(sizes.response))
                weights = jax.jit(execution.prepare)(params)
                sample = programs.sampling_program(execution, samples=1)
                call = partial(sample, weights, prompts, jax.random.key(0))
                calls[form] = partial(exactness_cost.seconds, call)
                calls[form]()
        times = common.interleaved(calls, options.repeats)
        rows.append({"dtype": dtype, "times": times})
    print(json.dumps({"versions": common.versions("jax", "jaxlib"), "rows": rows}))


def measure(python: str, options) -> dict:
    command = [python, __file__, "--worker", "--repeats", str(options.repeats)]
    command += ["--smoke"] * options.smoke
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(found.stdout.splitlines()[-1])


def lines(parts: list[dict], load: float, sizes: common.Sizes) -> list[str]:
    tokens = BATCH * sizes.response
    text = [
        "# Decoding on a CPU, by form of attention and version of JAX",
        "",
        "Written by `python scripts/bench_decode.py`. Tokens per second of the sampler, medians;"
        " within a version calls take turns.",
        "",
        *(f"- {form}: {about}." for form, about in FORMS.items()),
        "",
        f"{sizes.text()} {BATCH} prompts.",
        "",
        *common.machine_text(load, common.versions()),
        "| jax | dtype | native | whole | blocks | time blocks / whole |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for part in parts:
        for row in part["rows"]:
            speeds, times = [], row["times"]
            for form in FORMS:
                found = times.get(form)
                speeds.append(f"{tokens / statistics.median(found):,.0f}" if found else "-")
            ratio = "-"
            if "whole" in times:
                ratio = f"{common.ratios(times['blocks'], times['whole'])[0]:.2f}"
            cells = [part["versions"]["jax"], row["dtype"], *speeds, ratio]
            text.append(f"| {' | '.join(cells)} |")
    return text


def main() -> None:
    parser = common.parser(__doc__ or "", PAGE)
    parser.add_argument("--python", action="append", help="an interpreter (default: this one)")
    parser.add_argument("--worker", action="store_true", help="measure a part, and print it")
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    load = common.load_average()
    parts = [measure(python, options) for python in options.python or [sys.executable]]
    sizes = common.SMOKE if options.smoke else SIZES
    common.publish(lines(parts, load, sizes), options, PAGE)


if __name__ == "__main__":
    main()
