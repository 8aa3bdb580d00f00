"""A report: one HTML page that opens without a network, and its figures as PNG files."""

import html
import importlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tim_jax.app.config import toml
from tim_jax.app.run.loggers import read_lines
from tim_jax.common import pages
from tim_jax.common.errors import InputError
from tim_jax.common.pages import Table
from tim_jax.instruments.study import findings, measurement, running, verdicts
from tim_jax.instruments.study.definition import Study
from tim_jax.instruments.study.running import RunLines, Stated, load, read_runs, values
from tim_jax.schedules import SurgeDetector

_SHOWN = 3  # completions of a step
_WIDTH = 620  # of a PNG figure


class Section(NamedTuple):
    """What a report shows of one folder."""

    title: str
    sentences: list[str]
    tables: list[Table]
    figures: dict[str, Any]  # title -> chart
    completions: list[tuple[str, list[str]]]  # of what, and what
    lines: str = ""  # what lines and bands of the figures are


def section(folder: Path) -> Section:
    """What there is to see of a study or a run, unfinished ones included.

    Raises:
        InputError: the folder holds neither.
    """
    if not (folder / "study.json").is_file():
        return _of_runs(folder.resolve().name, folder, [], [], controls=[])
    stated = running.read_stated(folder)
    study = stated.study
    said = [f"Hypothesis, stated before it ran: {study.hypothesis}"]
    if isinstance(study, Study):
        tables, more = _judged(stated)
        controls = [arm.control for arm in stated.arms if arm.control]
        return _of_runs(study.name, folder, said + more, tables, controls=controls)
    records = measurement.records(folder)
    wanted = len(study.source) * max(1, len(study.horizon))
    if len(records) < wanted:
        said.append(f"Unfinished: {len(records)} of {wanted} measurements are there.")
    try:
        seen = findings.of_records(study, records)
    except KeyError as error:
        path = folder / "measured.jsonl"
        raise InputError(f"{path} is of another version: a line has no {error}") from error
    return Section(study.name, said + seen.sentences, seen.tables, seen.figures, [])


def _judged(stated: Stated) -> tuple[list[Table], list[str]]:
    """The tables of verdicts and outcomes, and the rule in words."""
    study, runs = stated.study, read_runs(stated.folder)
    outcomes = verdicts.outcomes(stated, runs)
    rule, test = study.outcome, study.test
    judged = verdicts.verdicts(stated, runs)
    numbers = ((v, map(_number, (v.difference, v.p, v.corrected))) for v in judged)
    rows = [[v.arm, v.against or "none", *of] for v, of in numbers]
    head = ["arm", "against", "difference", "p", "after Holm"]
    by_seed = [
        [arm.name, *(_number(outcomes.get((arm.name, seed))) for seed in stated.seeds)]
        for arm in stated.arms
    ]
    window = f" of the last {rule.window}" if rule.window > 1 else ""
    judging = study.controls != "none" or any(v.against for v in judged)
    words = [f"Outcome of a run: {rule.take}{window} {rule.metric}."]
    if judging:
        words[0] += (
            f" Test: {test.kind}, exact and two-sided, level {test.level} after Holm's correction"
            f" of {sum(not v.note for v in judged)} comparisons."
        )
        words += [f"{v.line(test)}." for v in judged]
    if not any(v.against for v in judged):
        words.append(
            "No arm has a matched control, so nothing here is said of what mismatch does to a run."
        )
    seeds = [f"seed {seed}" for seed in stated.seeds]
    tables = [Table("Every outcome", ["arm", *seeds], by_seed)]
    return ([Table("Verdicts", head, rows)] if judging else []) + tables, words


def _of_runs(
    title: str, folder: Path, said: list[str], tables: list[Table], *, controls: list[str]
) -> Section:
    runs = read_runs(folder)
    notes = [f"{r.arm}, seed {r.seed}: {r.note}" for r in runs if r.note]
    if notes:
        tables = [*tables, Table("Not finished", ["run"], [[note] for note in notes])]
    figures, lines = {}, ""
    if any(run.lines for run in runs):
        surges = sorted({s for s in map(surge_step, runs) if s})
        table = load(folder)
        figures = findings.training_panels(table, controls=controls, surges=surges)
        lines = _lines_in_words(runs, controls)
        said = [*said, f"{lines}."]
        tables = [*tables, *findings.dynamics(table)]
    shown = [pair for run in runs[:1] for pair in _completions(run)]
    return Section(title, said, tables, figures, shown, lines)


def _lines_in_words(runs: Sequence[RunLines], controls: Sequence[str]) -> str:
    """What lines and bands of the figures are."""
    seeds = len({run.seed for run in runs if run.lines})
    lines = "Lines are runs of one seed"
    if seeds > 1:
        lines = (
            f"Thick lines are means over {seeds} seeds, thin ones the seeds, and bands a standard"
            " deviation of the seeds to both sides"
        )
    dashed = "; controls are dashed, in the colour of their arm" if controls else ""
    return f"{lines}{dashed}"


def surge_step(run: RunLines) -> int:
    """The step of the first surge of a run's response lengths, 0 if there is none.

    It is the one that the run's own decay has found, if it looks for one.
    """
    lengths = values(run.lines, "response_length").astype(np.float32)
    if not len(lengths):
        return 0
    config = toml.load(run.folder / "config.toml")
    logged = values(run.lines, "surge_step")  # in updates
    if len(logged):
        return math.ceil(logged[-1] / config.updates_per_step)
    return int(_scan(jnp.asarray(lengths), SurgeDetector(max_length=config.sampling.longest)))


@partial(jax.jit, static_argnames="detector")
def _scan(lengths: jax.Array, detector: SurgeDetector) -> jax.Array:
    """The surge's step in f32[N] lengths; compiled once for all such runs of N steps."""

    def take(state, length):
        return detector.update(state, length), None

    return jax.lax.scan(take, detector.init(), lengths)[0].surge_step


def _completions(run: RunLines) -> list[tuple[str, list[str]]]:
    """The first completions of a run's first and last step that has any."""
    path = run.folder / "samples.jsonl"
    try:
        lines = [x for x in read_lines(path) if _is_sample(x)] if path.exists() else []
    except InputError:
        return []
    steps = sorted({line["step"] for line in lines})
    return [
        (
            f"{run.arm}, seed {run.seed}, step {step}",
            [
                f"{line['prompt']}{line['completion']}   (reward {line['reward']:g})"
                for line in lines
                if line["step"] == step
            ][:_SHOWN],
        )
        for step in dict.fromkeys([*steps[:1], *steps[-1:]])
    ]


def _is_sample(line: dict[str, Any]) -> bool:
    """Whether a line has what is shown of it; another program may have written it."""
    step, reward = line.get("step"), line.get("reward")
    words = all(isinstance(line.get(key), str) for key in ("prompt", "completion"))
    return words and isinstance(step, int) and isinstance(reward, int | float)


def write(folders: Sequence[Path], out: Path) -> list[Path]:
    """Writes the page, and every figure as PNG beside it; returns all paths, the page first.

    Raises:
        InputError: a folder holds neither a study nor a run, a package is missing, or a file cannot
            be written.
    """
    findings.altair()
    sections = [section(folder) for folder in folders]
    written = [out]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # What a tokenizer or another program left of a character is no text by itself.
        command = f"tim-jax report {' '.join(map(str, folders))}"
        out.write_text(page(sections, command), encoding="utf-8", errors="backslashreplace")
        for one, name in zip(sections, _names(sections), strict=True):
            for title, chart in one.figures.items():
                path = out.with_name(f"{out.stem}-{name}-{_slug(title)}.png")
                image = chart.properties(
                    width=_WIDTH, background="white", title=_signed(title, one.lines, command)
                )
                image.save(str(path), format="png", scale_factor=2)
                written.append(path)
    except OSError as error:
        raise InputError(f"cannot write {error.filename or out}: {error.strerror}") from error
    return written


def _signed(title: str, lines: str, command: str) -> dict[str, Any]:
    """The title of a figure that stands alone: what is drawn how, and what made it."""
    of = {"subtitleFontSize": 8, "subtitleColor": "#777777"}
    return {"text": title, "subtitle": [*filter(None, [lines, pages.made_by(command)])], **of}


def _names(sections: Sequence[Section]) -> Iterator[str]:
    """Names for files, each another one: folders of one name are numbered."""
    taken: set[str] = set()
    for one in sections:
        name = _slug(one.title)
        numbered = (f"{name}-{number}" for number in count(2))
        free = next(text for text in chain([name], numbered) if text not in taken)
        taken.add(free)
        yield free


def page(sections: Sequence[Section], command: str) -> str:
    """The page as text, with the charts' runtime in it, made by a command."""
    runtime = importlib.import_module("vl_convert").javascript_bundle()
    specs = [chart.to_dict() for one in sections for chart in one.figures.values()]
    # In a script, `</` would end it.
    data = json.dumps(specs, separators=(",", ":")).replace("</", "<\\/")
    body, first = [], 0
    for one in sections:
        body.append(_section(one, first))
        first += len(one.figures)
    scripts = _SCRIPTS.format(runtime=runtime, data=data)
    body.append(f"<footer>{html.escape(pages.made_by(command))}</footer>")
    return pages.page(
        ", ".join(one.title for one in sections), "\n".join([*body, scripts]), style=_STYLE
    )


def _section(one: Section, first: int) -> str:
    parts = [f"<h1>{html.escape(one.title)}</h1>", pages.paragraphs(one.sentences)]
    parts += map(pages.html_table, one.tables)
    figures = "".join(
        f'<figure><div class="chart" id="chart{first + i}" role="img"'
        f' aria-label="{html.escape(title)}"></div></figure>'
        for i, title in enumerate(one.figures)
    )
    parts.append(f'<div class="figures">{figures}</div>')
    for title, lines in one.completions:
        text = html.escape("\n".join(lines))
        parts.append(f"<h2>Completions: {html.escape(title)}</h2><pre>{text}</pre>")
    return "\n".join(parts)


def _number(value: float | None) -> str:
    return "" if value is None or not np.isfinite(value) else f"{value:.4g}"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def markdown(tables: Sequence[Table]) -> str:
    """Tables as Markdown, each under its title."""
    blocks = (
        "\n".join([f"### {one.title}", "", *pages.markdown(one.head, one.rows, numbers=False)])
        for one in tables
    )
    return "\n\n".join(blocks) + "\n"


_STYLE = """
footer { margin-top: 2rem; font-size: .8rem; opacity: .7; }
.figures { display: grid; gap: 1.5rem; margin-top: 2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
figure { margin: 0; min-width: 0; } .chart { width: 100%; min-height: 14rem; }
.chart svg text { fill: var(--ink); } .chart svg .role-axis-grid line { stroke: var(--faint); }
.chart svg .role-axis-domain line, .chart svg .role-axis-tick line { stroke: var(--ink); }
"""
_SCRIPTS = """<script>{runtime}</script>
<script>
const specs = {data};
specs.forEach((spec, i) => vegaEmbed(
  "#chart" + i, spec, {{renderer: "svg", actions: false}}
).catch(error => {{ document.getElementById("chart" + i).textContent = String(error); }}));
</script>"""
