"""What runs and studies found: verdicts, and a report of them.

Verdicts follow from runs by the rule that the study stated: outcomes, exact tests, Holm. A report
is one HTML page that opens without a network, and its figures as PNG files.
"""

import html
import importlib
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, combinations, count, product
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from tim_jax.app.config import toml
from tim_jax.app.run.loggers import read_lines
from tim_jax.common import pages
from tim_jax.common.errors import InputError, did_you_mean
from tim_jax.common.pages import Table
from tim_jax.instruments.study import findings, measurement, running
from tim_jax.instruments.study.definition import Outcome, Study, Test
from tim_jax.instruments.study.running import RunLines, Stated, read_runs, values
from tim_jax.model.files import write_bytes, write_text
from tim_jax.schedules import SurgeDetector

_SEEDS = 60  # the most that is asked for: exact tests of more take too long
_ROUNDING = 64 * np.finfo(np.float64).eps  # of a sum, as a share of the sum of its terms' sizes
_SHOWN = 3  # completions of a step
_WIDTH = 620  # of a PNG figure


@dataclass(frozen=True)
class Verdict:
    """What a study says of two arms.

    Attributes:
        first, second: outcomes of the seeds that both arms have finished, in the order of seeds.
        missing: seeds that one of them lacks; with any of them there is no p-value.
        lost: which runs of these have ended without an outcome, and why; "" if none has.
        lead: above 0 if the arm is higher by the test's own statistic, not always a mean.
        p: two-sided, of this comparison alone; None without a test.
        corrected: after Holm's correction over all comparisons of the study, those without a
            p-value so far among them.
        least: the smallest corrected p that a comparison can have with this many seeds.
        note: why nothing is said about mismatch; "" otherwise.
    """

    arm: str
    against: str
    first: tuple[float, ...] = ()
    second: tuple[float, ...] = ()
    missing: tuple[int, ...] = ()
    lost: str = ""
    lead: float = 0.0
    p: float | None = None
    corrected: float | None = None
    least: float = 1.0
    note: str = ""

    @property
    def difference(self) -> float:
        """Mean outcome of the arm less that of the other; NaN without outcomes."""
        return float(np.mean(self.first) - np.mean(self.second)) if self.first else math.nan

    def line(self, test: Test) -> str:
        """The verdict in one sentence."""
        if self.note:
            return f"{self.arm}: no verdict on mismatch: {self.note}"
        pair = f"{self.arm} against {self.against}"
        if self.lost:
            return f"{pair}: no verdict: {self.lost}"
        if self.missing or self.corrected is None:
            seeds = ", ".join(map(str, self.missing)) or "all"
            return f"{pair}: no verdict yet: without an outcome of seeds {seeds}"
        numbers = (
            f"{np.mean(self.first):.4g} against {np.mean(self.second):.4g}, p = {self.p:.3g},"
            f" {self.corrected:.3g} after Holm"
        )
        if self.corrected <= test.level:
            result = "higher" if self.lead > 0 else "lower"
        elif self.least > test.level:
            result = f"cannot be decided: so few seeds give no p after Holm below {self.least:.3g}"
        else:
            result = "no difference shown"
        return f"{pair}: {result} ({numbers}, {_seeds(len(self.first))})"


def outcome(run: RunLines, rule: Outcome) -> float | None:
    """The outcome of a run by the study's rule, which is finite; None if it has none (yet)."""
    if run.note.startswith("ended"):
        return rule.not_finite
    series = values([line for line in run.lines if line.get("step")], rule.metric)
    if not run.finished or not len(series):
        return None
    series = series[-rule.window :] if rule.take == "last" else series
    take = {"last": np.mean, "mean": np.mean, "highest": np.max, "lowest": np.min}
    value = float(take[rule.take](series))
    return value if np.isfinite(value) else rule.not_finite


def _why_lost(run: RunLines, rule: Outcome) -> str:
    """Why a run that has ended has no outcome; "" if it has one, or has not ended."""
    ended = run.note.startswith("ended")
    if outcome(run, rule) is not None or not (ended or run.finished):
        return ""
    if not ended and not len(values(run.lines, rule.metric)):
        known = {name for line in run.lines for name in line}
        return f"no metric {rule.metric!r}{did_you_mean(rule.metric, known)}"
    what = "ended as" if ended else rule.metric
    return f"{what} not finite, for which outcome.not_finite would give an outcome"


def outcomes(stated: Stated, runs: Sequence[RunLines]) -> dict[tuple[str, int], float]:
    """(arm, seed) -> outcome, of the runs that have one."""
    planned = zip(stated.runs, runs, strict=True)
    found = {(one.arm, one.seed): outcome(run, stated.study.outcome) for one, run in planned}
    return {key: value for key, value in found.items() if value is not None}


def verdicts(stated: Stated, runs: Sequence[RunLines] | None = None) -> list[Verdict]:
    """Every divergent arm against its control, and the comparisons that the study names."""
    runs = read_runs(stated.folder) if runs is None else runs
    known = outcomes(stated, runs)
    planned = zip(stated.runs, runs, strict=True)
    lost = {(one.arm, one.seed): _why_lost(run, stated.study.outcome) for one, run in planned}
    compared = [_compare(stated, known, lost, *pair) for pair in _pairs(stated)]
    family = [v for v in compared if not v.note]
    # What is still open counts as if it found nothing: a difference that is shown stays so.
    corrected = iter(holm([1.0 if v.p is None else v.p for v in family]))

    def correct(verdict: Verdict) -> Verdict:
        p, least = next(corrected), min(1.0, len(family) * verdict.least)
        return replace(verdict, corrected=None if verdict.p is None else p, least=least)

    return [v if v.note else correct(v) for v in compared]


def too_few_seeds(stated: Stated) -> str:
    """Why the study as it stands can show no difference, whatever its runs find; "" if it can."""
    test, seeds = stated.study.test, len(stated.seeds)
    count = sum(not uncontrolled for _, _, uncontrolled in _pairs(stated))
    needed = next((n for n in range(1, _SEEDS) if count * least_p(test.kind, n) <= test.level), 0)
    if not count or not needed or needed <= seeds:
        return ""
    least = min(1.0, count * least_p(test.kind, seeds))
    return (
        f"{count} comparisons of {_seeds(seeds)} give no p after Holm's correction below"
        f" {least:.3g}, and the level is {test.level:g}: no difference can be shown; with"
        f" {needed} seeds one could"
    )


def _seeds(count: int) -> str:
    return f"{count} seed{'s' * (count > 1)}"


def _pairs(stated: Stated) -> list[tuple[str, str, str]]:
    """What is compared: an arm, another, and why the arm has no control where it has none."""
    arms = [(arm.name, arm.control, arm.uncontrolled) for arm in stated.arms if arm.divergent]
    named = [(first, second, "") for first, second in stated.study.test.compare]
    pairs: dict[frozenset[str], tuple[str, str, str]] = {}
    for pair in (*arms, *named):  # one counts once, whichever of the two is named first
        pairs.setdefault(frozenset(pair[:2]), pair)
    return list(pairs.values())


def _compare(
    stated: Stated,
    known: Mapping[tuple[str, int], float],
    lost: Mapping[tuple[str, int], str],
    arm: str,
    against: str,
    uncontrolled: str,
) -> Verdict:
    if uncontrolled:
        return Verdict(arm, "", note=f"no matched control: {uncontrolled}")
    study = stated.study
    both = [s for s in stated.seeds if (arm, s) in known and (against, s) in known]
    first, second = (tuple(known[name, s] for s in both) for name in (arm, against))
    missing = tuple(s for s in stated.seeds if s not in both)
    verdict = Verdict(arm, against, first, second, missing)
    if missing:
        return replace(verdict, lost=_say_lost(verdict, lost))
    lead, p = exact_test(first, second, study.test.kind, at_least=study.outcome.at_least)
    return replace(verdict, lead=lead, p=p, least=least_p(study.test.kind, len(both)))


def _say_lost(verdict: Verdict, lost: Mapping[tuple[str, int], str]) -> str:
    """The runs of a comparison that have ended without an outcome, by arm and reason."""
    seeds: dict[tuple[str, str], list[str]] = {}
    for arm, seed in product((verdict.arm, verdict.against), verdict.missing):
        if why := lost[arm, seed]:
            seeds.setdefault((arm, why), []).append(f"{seed}")
    numbered = {key: f"seed{'s' * (len(of) > 1)} {', '.join(of)}" for key, of in seeds.items()}
    return "; ".join(f"{arm}, {of}: {why}" for (arm, why), of in numbered.items())


def exact_test(
    first: Sequence[float], second: Sequence[float], kind: str, *, at_least: float | None = None
) -> tuple[float, float]:
    """How far an arm is ahead by a test of `Test.kind`, and the exact two-sided p-value.

    The lead is above 0 if `first` is higher by the test's own statistic. The outcomes are f64[N];
    the same place in both is the same seed. The permutation tests compare means; `sign` counts
    seeds and leaves equal pairs out; `fisher` counts outcomes of `at_least` or more.
    """
    one, other = np.asarray(first, np.float64), np.asarray(second, np.float64)
    if kind == "fisher":
        assert at_least is not None  # the study's file was refused without
        wins = [int(np.sum(x >= at_least)) for x in (one, other)]
        table = [[count, len(one) - count] for count in wins]
        return float(wins[0] - wins[1]), float(cast(Any, stats.fisher_exact(table)).pvalue)
    if kind == "sign":
        higher, lower = int(np.sum(one > other)), int(np.sum(one < other))
        p = stats.binomtest(higher, higher + lower).pvalue if higher + lower else 1.0
        return float(higher - lower), float(p)
    found = _exchanged(one, other) if kind == "paired_permutation" else _divided(one, other)
    # Equal sums of decimal outcomes differ by rounding, which grows with the outcomes themselves.
    rounding = _ROUNDING * float(np.sum(np.abs(one)) + np.sum(np.abs(other)))
    p = np.mean(np.abs(found) >= abs(np.sum(one - other)) - rounding)
    return float(np.mean(one) - np.mean(other)), float(p)


def _exchanged(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """f64[2^N], sums of one arm less the other's, for all exchanges within pairs."""
    count = len(one)
    signs = 1 - 2 * ((np.arange(2**count)[:, None] >> np.arange(count)) & 1)
    return signs @ (one - other)


def _divided(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The same for all divisions of the outcomes into two arms of N: f64[2 N over N]."""
    values = np.concatenate([one, other])
    values = values - np.mean(values)
    divisions = combinations(range(len(values)), len(one))
    places = np.fromiter(chain.from_iterable(divisions), np.uint8).reshape(-1, len(one))
    sums = np.zeros(len(places))
    for column in places.T:
        sums += values[column]
    return 2.0 * sums - np.sum(values)


def least_p(kind: str, seeds: int) -> float:
    """The smallest p-value that a test can give with `seeds` in each arm."""
    pairs = kind in ("sign", "paired_permutation")
    return min(1.0, 2.0 / (2**seeds if pairs else math.comb(2 * seeds, seeds)))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for several comparisons (Holm 1979): the family's error rate holds."""
    order = np.argsort(p_values, kind="stable")
    corrected, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = highest
    return corrected


class Section(NamedTuple):
    """What a report shows of one folder."""

    title: str
    sentences: list[str]
    tables: list[Table]
    figures: dict[str, Any]  # title -> chart
    completions: list[tuple[str, list[str]]]  # of what, and what
    lines: str = ""  # what lines and bands of the figures are


def section(folder: Path) -> Section:
    """What there is to see of a study or a run, unfinished ones included; refuses other folders."""
    if not (folder / "study.json").is_file():
        return _of_runs(folder.resolve().name, read_runs(folder), [], [], controls=[])
    stated = running.read_stated(folder)
    study = stated.study
    said = [f"Hypothesis, stated before it ran: {study.hypothesis}"]
    if isinstance(study, Study):
        runs = read_runs(folder)
        tables, more = _judged(stated, runs)
        controls = [arm.control for arm in stated.arms if arm.control]
        return _of_runs(study.name, runs, said + more, tables, controls=controls)
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


def _judged(stated: Stated, runs: Sequence[RunLines]) -> tuple[list[Table], list[str]]:
    """The tables of verdicts and outcomes, and the rule in words."""
    study, found = stated.study, outcomes(stated, runs)
    rule, test = study.outcome, study.test
    judged = verdicts(stated, runs)
    numbers = ((v, map(_number, (v.difference, v.p, v.corrected))) for v in judged)
    rows = [[v.arm, v.against or "none", *of] for v, of in numbers]
    head = ["arm", "against", "difference", "p", "after Holm"]
    by_seed = [
        [arm.name, *(_number(found.get((arm.name, seed))) for seed in stated.seeds)]
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
    title: str,
    runs: Sequence[RunLines],
    said: list[str],
    tables: list[Table],
    *,
    controls: list[str],
) -> Section:
    notes = [f"{r.arm}, seed {r.seed}: {r.note}" for r in runs if r.note]
    if notes:
        tables = [*tables, Table("Not finished", ["run"], [[note] for note in notes])]
    figures, lines = {}, ""
    if any(run.lines for run in runs):
        surges = sorted({s for s in map(surge_step, runs) if s})
        table = running.as_table(runs)
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
    config = toml.load(run.folder)
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
        write_text(out, page(sections, command), errors="backslashreplace")
        for one, name in zip(sections, _names(sections), strict=True):
            for title, chart in one.figures.items():
                path = out.with_name(f"{out.stem}-{name}-{_slug(title)}.png")
                image = chart.properties(
                    width=_WIDTH, background="white", title=_signed(title, one.lines, command)
                )
                data = io.BytesIO()
                image.save(data, format="png", scale_factor=2)
                write_bytes(path, data.getvalue())
                written.append(path)
    except OSError as error:
        raise InputError(f"cannot write {error.filename or out}: {error.strerror}") from error
    return written


def _signed(title: str, lines: str, command: str) -> dict[str, Any]:
    """The title of a figure that stands alone: what is drawn how, and what made it."""
    of = {"subtitleFontSize": 8, "subtitleColor": "#777777"}
    return {"text": title, "subtitle": [*filter(None, [lines, pages.made_by(command)])], **of}


def _names(sections: Sequence[Section]) -> list[str]:
    """Names for files, each another one: folders of one name are numbered."""
    taken: list[str] = []
    for one in sections:
        name = _slug(one.title)
        numbered = (f"{name}-{number}" if number > 1 else name for number in count(1))
        taken.append(next(text for text in numbered if text not in taken))
    return taken


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
