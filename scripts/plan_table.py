"""Plans Qwen3-8B with the recipe of Beyond Precision on 16, 64 and 256 chips, and tabulates it.

    python scripts/plan_table.py            # needs pip install -e ".[plan]"; no TPU

Writes docs/results/plan.md. Every figure is read off programs compiled for the slice by
`tim-jax plan`, which this runs once a slice; `--keep FOLDER` keeps (and takes again) its JSON.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import bench_common as common

PAGE = common.RESULTS / "plan.md"
CONFIG = "configs/beyond_precision.toml"
ARCHITECTURE = "configs/architectures/qwen3_8b.json"
FAMILY = "numerics.family=pallas_tpu"
GIB = 2**30
LEFT_OUT = ("pick", "move")  # operations that sum nothing


class Slice(NamedTuple):
    """A slice of a pod, with every device on the fsdp axis and one sequence a device at a time."""

    name: str
    devices: int
    drawn: int | None = None  # sequences decoded at a time, where all of a step do not fit
    quick: bool = False  # without the search for the largest batch

    @property
    def file(self) -> str:
        """Of the plan's JSON."""
        return f"{self.name.replace(':', '_')}.json"

    @property
    def words(self) -> tuple[str, ...]:
        """Of the command: what is changed in the config, and how it is planned."""
        changes = [f"placement.fsdp={self.devices}", f"learner.micro_batch={self.devices}", FAMILY]
        if self.drawn:
            changes.append(f"sampler.slots={self.drawn}")
        quick = ("--quick",) if self.quick else ()
        where = "--architecture", ARCHITECTURE, "--topology", self.name
        return (CONFIG, *where, *quick, *changes)


# Keys and values of the recipe's batch are 1.4 TiB: about all that 16 v5p chips have.
SLICES = (
    Slice("v5p:2x2x4", 16, drawn=512),
    Slice("v5p:4x4x4", 64, quick=True),
    Slice("v5p:4x8x8", 256, quick=True),
)


def page(made: list[tuple[Slice, dict[str, Any]]], load: float) -> list[str]:
    plans = [plan for _, plan in made]
    return [*_intro(load), *_memory(plans), *_work(plans), *_largest(plans), *_audit(plans)]


def _intro(load: float) -> list[str]:
    return [
        "# A plan for a pod",
        "",
        "Written by `python scripts/plan_table.py`, which runs `tim-jax plan` for each slice"
        " ([what it does and counts](../plan.md)). Nothing ran on a TPU: programs were compiled for"
        " these slices on the CPU machine below, and every figure is read off them.",
        "",
        "Qwen3-8B with the recipe of Beyond Precision (arXiv 2602.01826), Table 1:"
        f" `{CONFIG}`, 64 prompts x 16 samples, prompts of up to 2,048 and responses of up to"
        " 8,192 tokens, bfloat16 over float32 masters, kernels `pallas_tpu`. Every response is"
        " taken to be of full length. All devices are on the fsdp axis, one sequence a device at a"
        " time.",
        "",
        *common.machine_text(load, common.versions("jax", "jaxlib", "libtpu"), timed=False),
        "```bash",
        *(f"tim-jax plan {' '.join(one.words)}" for one in SLICES),
        "```",
        "",
    ]


def _memory(plans: list[dict[str, Any]]) -> list[str]:
    lines = [
        "## Memory of a device, GiB",
        "",
        "| slice | chips | devices | program | arguments | outputs | temporaries | aliased"
        " | elsewhere | total | of | |",
        "|---|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for plan in plans:
        for name, stage in plan["stages"].items():
            memory = {key: size / GIB for key, size in stage["memory"].items()}
            lines.append(
                f"| {plan['topology']} | {plan['chips']} | {plan['devices']} | {name}"
                f" | {memory['arguments']:.2f} | {memory['outputs']:.2f}"
                f" | {memory['temporaries'] + memory['together']:.2f} | {memory['aliased']:.2f}"
                f" | {memory['resident']:.2f} | {memory['total']:.2f}"
                f" | {plan['capacity'] / GIB:.2f} | {'fits' if stage['fits'] else '**too much**'} |"
            )
    fitting = [p["topology"] for p in plans if p["fits"]]
    extrapolated = {tuple(p["stages"]["sampler"]["layers_compiled"]) for p in plans}
    return [
        *lines,
        "",
        f"The recipe fits on {', '.join(fitting) or 'none'}; where the commands above say"
        " `sampler.slots`, fewer sequences are decoded at a time, because the keys and values of"
        " all of it do not fit beside the weights. The bits are the same.",
        "",
        "Elsewhere: masters and optimiser while sampling and scoring. The sampler was compiled with"
        f" {' or '.join(' and '.join(map(str, one)) for one in sorted(extrapolated))} layers and"
        " continued to 36; the learner's programs whole.",
        "",
    ]


def _work(plans: list[dict[str, Any]]) -> list[str]:
    lines = [
        "## Work of a device, per step",
        "",
        f"| slice | program | products, TFLOP | over {plans[0]['topology']} | memory traffic, TB"
        " | collectives, GB received | by kind (times, GB) | estimate, s | of it the least work |",
        "|---|---|--:|--:|--:|--:|---|--:|--:|",
    ]
    for plan in plans:
        for name, stage in plan["stages"].items():
            first = plans[0]["stages"][name]["flops"]
            kinds = stage["collectives"]
            received = sum(one["bytes"] for one in kinds.values()) / 1e9
            written = "; ".join(
                f"{kind} {one['count']:,}, {one['bytes'] / 1e9:,.1f}"
                for kind, one in sorted(kinds.items())
            )
            lines.append(
                f"| {plan['topology']} | {name} | {stage['flops'] / 1e12:,.0f}"
                f" | {stage['flops'] / first:.3f} | {stage['bytes_accessed'] / 1e12:,.1f}"
                f" | {received:,.1f} | {written} | {_estimate(stage)} |"
            )
    return [
        *lines,
        "",
        "The estimate divides the work by the device's rates"
        " ([how](../plan.md#how-long-a-program-should-take)); the least work is what no"
        " implementation can avoid.",
        "",
    ]


def _estimate(stage: dict[str, Any]) -> str:
    found = stage["estimate"]
    if found is None:
        return "- | -"
    return f"{found['total']:,.1f} | {found['least'] / found['total']:.0%}"


def _largest(plans: list[dict[str, Any]]) -> list[str]:
    lines = ["## The largest batch that fits", ""]
    for plan in plans:
        for key, found in plan["largest"].items():
            more = "" if found["bounded"] else ", all that there are"
            lines.append(
                f"- {plan['topology']}: `{key} = {found['count']}`{more}"
                f" ({found['total'] / GIB:.1f} of {plan['capacity'] / GIB:.1f} GiB)"
            )
        lines += [f"- {plan['topology']}, what to change: {line}" for line in plan["advice"]]
    return [*lines, ""]


def _audit(plans: list[dict[str, Any]]) -> list[str]:
    lines = [
        "## The sampler's forward against the learner's",
        "",
        "Distinct kernels, products, float sums and sums over devices in the sampler's compiled"
        " program (of the fewer layers), each against its nearest in the learner's forward: code,"
        " operand types, layouts, and what is summed over.",
        "",
        "| slice | operations | with a counterpart | differ | of these in layouts alone |",
        "|---|--:|--:|--:|--:|",
    ]
    for plan in plans:
        compared = [match for match in plan["audit"] if match["kind"] not in LEFT_OUT]
        differing = sum(bool(match["differences"]) for match in compared)
        lines.append(
            f"| {plan['topology']} | {len(compared)} | {len(compared) - differing} | {differing}"
            f" | {sum(match['in_layout_alone'] for match in compared)} |"
        )
    lines += [
        "",
        "Where they differ in layouts alone, the code is the same, and small arrays lie in memory"
        " in tiles of as many rows as they have, fewer than the usual 8: a device decodes few"
        " sequences at a time, and few heads share a key head.",
    ]
    return [*lines, "", *_operations(plans[0]), ""]


def _operations(plan: dict[str, Any]) -> Iterator[str]:
    """The operations on the first slice, one by one."""
    yield f"On {plan['topology']}, one by one:"
    yield ""
    yield "| kind | name | times in the program | rows, sampler and learner | difference |"
    yield "|---|---|--:|---|---|"
    for match in (one for one in plan["audit"] if one["kind"] not in LEFT_OUT):
        differences = "; ".join(match["differences"]).replace("|", "/")
        yield (
            f"| {match['kind']} | {match['name']} | {match['count']}"
            f" | {', '.join(match['row_sizes']) or 'the same'} | {differences or 'none'} |"
        )


if __name__ == "__main__":
    common.publish_plans("Tabulates plans for TPU slices.", PAGE, SLICES, page)
