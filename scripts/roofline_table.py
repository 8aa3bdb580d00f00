"""Tabulates estimates of decoding and learning on devices that are not here, by `tim-jax plan`.

    JAX_PLATFORMS=cpu python scripts/roofline_table.py      # needs pip install -e ".[plan,cuda]"

Writes docs/results/roofline.md. Every figure follows from programs compiled for the device and from
its rates (`tim_jax.instruments.plan.roofline`); `--keep FOLDER` keeps (and takes again) the
plans' JSON.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import bench_common as common

PAGE = common.RESULTS / "roofline.md"
CONFIG = "configs/gsm8k_qwen3_0.6b.toml"
SAMPLES = 8
LEARNT = 16_384  # tokens of a micro-batch


class Case(NamedTuple):
    """A step of one device: a batch of sequences, half prompt and half response."""

    device: str
    model: str
    batch: int
    context: int
    several: bool = False  # with `numerics.several_tiles`
    family: str = "auto"

    @property
    def changes(self) -> tuple[str, ...]:
        """What is changed in the config."""
        return (
            f"model.path={self.model}",
            f"learner.prompts_per_step={self.batch // SAMPLES}",
            f"learner.micro_batch={LEARNT // self.context}",
            f"sampling.samples={SAMPLES}",
            f"sampling.max_prompt_length={self.context // 2}",
            f"sampling.max_tokens={self.context // 2}",
            "learner.length_buckets=1",
            f"learner.remat={'true' if self.model == LARGE else 'false'}",
            *(["numerics.several_tiles=true"] if self.several else []),
            *([f"numerics.family={self.family}"] if self.family != "auto" else []),
        )

    @property
    def label(self) -> str:
        """The device, and which kernels and tiles."""
        family = [] if self.family == "auto" else [self.family]
        return ", ".join([self.device, *family, *(["several tiles"] if self.several else [])])

    @property
    def file(self) -> str:
        """Of the plan's JSON."""
        name = self.model.rpartition("/")[2]
        tiles = "-several" if self.several else ""
        family = "" if self.family == "auto" else f"-{self.family}"
        size = f"{self.batch}-{self.context}"
        return f"{self.device.replace(':', '_')}-{name}-{size}{tiles}{family}.json"

    @property
    def words(self) -> tuple[str, ...]:
        """Of the command."""
        return (CONFIG, "--quick", "--topology", self.device, *self.changes)


SMALL, LARGE = "Qwen/Qwen3-1.7B", "Qwen/Qwen3-8B"
CASES = (
    *(
        Case("h200:1", model, batch, context, several)
        for model in (SMALL, LARGE)
        for context in (1024, 4096)
        for batch in (64, 256)
        for several in (False, True)
    ),
    *(Case("h200:1", SMALL, 64, 1024, several, "pallas_mosaic_gpu") for several in (False, True)),
    *(
        Case(device, SMALL, 64, context, several)
        for device, context in (
            *(("v5e:1x1", 1024), ("v6e:1x1", 1024)),
            *(("v5p:2x2x1", 1024), ("v5p:2x2x1", 4096)),
        )
        for several in (False, True)
    ),
    Case("v5p:2x2x1", SMALL, 256, 1024),
    *(Case("v5p:2x2x1", LARGE, batch, 1024) for batch in (64, 256)),
)


def page(plans: list[tuple[Case, dict[str, Any]]], load: float) -> list[str]:
    return [*_intro(load), *_totals(plans), *_kernels(plans)]


def _intro(load: float) -> list[str]:
    return [
        "# How near the limit kernels should be",
        "",
        "Written by `python scripts/roofline_table.py`. **Estimates: nothing of this"
        " table ran on a device.** Those for an H200 are [calibrated](calibration.md)."
        " Programs were compiled for the device on the CPU machine below, and their products,"
        " memory traffic and launches were divided by the device's rates, as [the"
        " guide](../plan.md#how-long-a-program-should-take) says in full. The least work is what no"
        " implementation can avoid. One device, bfloat16; half of the context is prompt, every"
        " response is of full"
        f" length; a micro-batch has {LEARNT:,} tokens, and activations are recomputed for"
        f" {LARGE.rpartition('/')[2]} alone. Several tiles are those of `numerics.several_tiles`.",
        "",
        *common.machine_text(load, common.versions("jax", "jaxlib", "libtpu"), timed=False),
        "A case by hand:",
        "",
        "```bash",
        f"tim-jax plan {' '.join(CASES[0].words)}",
        "```",
        "",
    ]


def _totals(plans: list[tuple[Case, dict[str, Any]]]) -> list[str]:
    lines = [
        "| device | model | batch | context | sampler, s | share of the least work | update, s"
        " | share of the least work | fits |",
        "|---|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for case, plan in plans:
        cells = [case.label, case.model, case.batch, f"{case.context:,}"]
        for stage in ("sampler", "update"):
            found = plan["stages"][stage]["estimate"]
            if found is None:
                cells += ["refused: too large", ""]
            else:
                cells += [f"{found['total']:.2f}", f"{found['least'] / found['total']:.0%}"]
        cells.append("yes" if plan["fits"] else "no")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return [*lines, ""]


def _kernels(plans: list[tuple[Case, dict[str, Any]]]) -> list[str]:
    return [
        "## Where the time goes",
        "",
        "Seconds of kernels by name, and of what most of them is; then XLA's other work, links and"
        " launches.",
        "",
        "| case | program | kernels | other work | links | launches |",
        "|---|---|---|--:|--:|--:|",
        *(line for case, plan in plans for line in _of_case(case, plan)),
        "",
    ]


def _of_case(case: Case, plan: dict[str, Any]) -> Iterator[str]:
    for stage in ("sampler", "update"):
        found = plan["stages"][stage]["estimate"]
        if found is None:
            continue
        slowest = list(found["kernels"].items())[:5]
        kernels = "; ".join(
            f"{name} {one['seconds']:.2f} ({one['bound']})" for name, one in slowest
        )
        yield (
            f"| {case.label}, {case.model.rpartition('/')[2]}, {case.batch} x {case.context:,}"
            f" | {stage} | {kernels} | {found['others']:.2f} | {found['links']:.2f}"
            f" | {found['launches']:.2f} |"
        )


if __name__ == "__main__":
    common.publish_plans("Tabulates estimates of single devices.", PAGE, CASES, page)
