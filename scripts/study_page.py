"""Writes what a study found into its page: sentences, tables and figures between two marks.

    tim-jax study configs/studies/gradient.toml
    JAX_PLATFORMS=cpu python scripts/study_page.py runs/studies/gradient docs/studies/gradient.md

What stands outside the marks is a person's: what was expected, and what it means. Run it on the
machine and with the versions that the study ran with, which it names.
"""

import argparse
from pathlib import Path

import bench_common as common

from tim_jax.study import report

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def page(text: str, measured: str) -> str:
    """The text with `measured` between its marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"the page needs the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{measured}\n{END}{after}"


def figures(folder: Path, path: Path) -> list[str]:
    """Draws the study's figures beside the page; returns them as Markdown."""
    whole = path.with_suffix(".html")
    _, *drawn = report.write([folder], whole)
    whole.unlink()  # the report itself has the runtime of its charts in it
    titles = report.section(folder).figures
    return [f"![{title}]({file.name})" for title, file in zip(titles, drawn, strict=True)]


def measured(folder: Path, path: Path) -> str:
    """Everything between the marks."""
    found = report.section(folder)
    versions = common.versions("jax", "jaxlib")
    machine = common.machine_text(common.load_average(), versions, timed=False)
    parts = [*machine, *found.sentences, *figures(folder, path), report.markdown(found.tables)]
    return "\n\n".join(part for part in parts if part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("page", type=Path)
    arguments = parser.parse_args()
    text = arguments.page.read_text(encoding="utf-8")
    new = page(text, measured(arguments.folder, arguments.page))
    arguments.page.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
