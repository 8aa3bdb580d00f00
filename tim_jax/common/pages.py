"""Tables and pages: what the reports of the instruments share, as Markdown, HTML and JSON."""

import html
import json
import math
from collections.abc import Mapping, Sequence
from datetime import date
from importlib import metadata
from typing import Any, NamedTuple


class Table(NamedTuple):
    """A table of text."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool) -> list[str]:
    """The lines of a Markdown table; with `numbers` all columns but the first stand right."""
    rule = "---:" if numbers else "---"
    return [
        f"| {' | '.join(head)} |",
        f"|{'|'.join(['---', *[rule] * (len(head) - 1)])}|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def html_table(table: Table) -> str:
    """A table under its title, which scrolls by itself where a page is narrow."""

    def line(cells: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

    lines = line(table.head, "th") + "".join(line(row, "td") for row in table.rows)
    title = f"<h2>{html.escape(table.title)}</h2>" if table.title else ""
    return f'{title}<div class="wide"><table>{lines}</table></div>'


def made_by(command: str, *, jax: str | None = None) -> str:
    """What a figure or a page says at its foot: versions, the date, and the command.

    Args:
      jax: the version that measured; None: the one at hand.
    """
    with_jax = metadata.version("jax") if jax is None else jax
    return f"tim_jax {metadata.version('tim-jax')}, jax {with_jax}, {date.today()}; {command}"


def paragraphs(lines: Sequence[str]) -> str:
    """Lines of text, each a paragraph."""
    return "".join(f"<p>{html.escape(line)}</p>" for line in lines)


def page(title: str, body: str, *, style: str = "") -> str:
    """An HTML page that needs no other file; `style` is added to the common one."""
    return _PAGE.format(title=html.escape(title), style=_STYLE + style, body=body)


def finite(node: Any) -> Any:
    """Plain values for JSON: a number that is not finite becomes None, a tuple a list."""
    if isinstance(node, Mapping):
        return {key: finite(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [finite(value) for value in node]
    return None if isinstance(node, float) and not math.isfinite(node) else node


def as_json(record: Any, *, indent: int = 2) -> str:
    """Plain values as JSON; what is not finite is null."""
    return json.dumps(finite(record), indent=indent, allow_nan=False)


_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #ffffff; --faint: #d4d4d4; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --paper: #16181c; --faint: #3c4047; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; color: var(--ink);
  background: var(--paper); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
th, td { text-align: left; padding: .3rem .7rem; border-bottom: 1px solid var(--faint);
  vertical-align: top; }
pre { overflow-x: auto; padding: .7rem; border: 1px solid var(--faint); border-radius: 6px; }
"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body>
{body}
</body></html>
"""
