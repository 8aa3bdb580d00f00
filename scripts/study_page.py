"""Writes what a study found into its page: sentences, tables and figures between two marks.

    tim-jax study configs/studies/gradient.toml
    JAX_PLATFORMS=cpu python scripts/study_page.py runs/studies/gradient docs/studies/gradient.md

--figures names those of the report's figures that the page shows, by the beginnings of their
titles; all of them if it is left out.

What stands outside the marks is a person's: what was expected, and what it means. Run it on the
machine and with the versions that the study ran with, which it names.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import bench_common as common

from tim_jax.instruments.study import report


def figures(folder: Path, path: Path, wanted: Sequence[str]) -> list[str]:
    """Draws the study's figures beside the page; returns them as Markdown."""
    whole = path.with_suffix(".html")
    _, *drawn = report.write([folder], whole)
    whole.unlink()  # the report itself has the runtime of its charts in it
    titled = dict(zip(report.section(folder).figures, drawn, strict=True))
    for begins in wanted:
        if not any(_begins(title, [begins]) for title in titled):
            raise SystemExit(f"--figures: no title begins with {begins!r}: {', '.join(titled)}")
    shown = {t: f for t, f in titled.items() if not wanted or _begins(t, wanted)}
    for title in titled.keys() - shown.keys():
        titled[title].unlink()
    return [f"![{title}]({file.name})" for title, file in shown.items()]


def _begins(title: str, wanted: Sequence[str]) -> bool:
    return any(title.lower().startswith(begins.lower()) for begins in wanted)


def measured(folder: Path, path: Path, wanted: Sequence[str]) -> str:
    """Everything between the marks."""
    found = report.section(folder)
    versions = common.versions("jax", "jaxlib")
    machine = common.machine_text(common.load_average(), versions, timed=False)
    parts = [
        *machine,
        *found.sentences,
        *figures(folder, path, wanted),
        report.markdown(found.tables),
    ]
    return "\n\n".join(part for part in parts if part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("page", type=Path)
    parser.add_argument("--figures", nargs="+", default=(), metavar="TITLE")
    arguments = parser.parse_args()
    text = arguments.page.read_text(encoding="utf-8")
    new = common.between_marks(text, measured(arguments.folder, arguments.page, arguments.figures))
    arguments.page.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
