"""The documentation says what is so: links, commands, configurations, names and Python examples.

Examples are fenced blocks. All Python blocks of a page run, one after the other in one namespace;
a comment above a block says what is different about it:

    <!-- example: slow -->                    the page takes long: not in the quick suite
    <!-- example: run by tests/test_x.py -->  that test runs the block
    <!-- example: configs/x.toml -->          the block is that file
"""

import importlib
import inspect
import json
import pkgutil
import re
import shlex
import tomllib
from pathlib import Path
from types import FunctionType
from typing import NamedTuple
from urllib.parse import unquote

import jax
import pytest
from rooms import ROW

import tim_jax
from tim_jax.app import cli
from tim_jax.app.arguments import RefusedError
from tim_jax.app.config import toml
from tim_jax.instruments.plan import topology

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *ROOT.glob("C*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
FENCE = re.compile(
    r"^(?:<!-- example: (?P<note>[^\n]*) -->\n+)?```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"\]\((?P<path>[^)#\s]*)(?:#(?P<anchor>[^)\s]+))?\)")
ELSEWHERE = ("https://", "http://")
# Modules that need a package which only an extra brings.
OPTIONAL = {"tim_jax.kernels.triton_source"}


class Example(NamedTuple):
    """A fenced block of a page."""

    text: str
    note: str
    line: int  # of the page, counted from 0


def examples(page, language):
    text = read(page)
    return [
        Example(m["text"], m["note"] or "", text.count("\n", 0, m.start("text")))
        for m in FENCE.finditer(text)
        if m["language"] == language
    ]


def read(page):
    return page.read_text(encoding="utf-8")


def without_code(text):
    return CODE.sub("", FENCE.sub("", text))


def anchors(page):
    """The anchors that GitHub gives to a page's headings; the site is set to give the same."""
    found = []
    for line in re.findall(r"^#+ +(.+)$", FENCE.sub("", read(page)), re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line).replace("`", "").strip().lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.append(slug)
    return found


def commands(text):
    """The commands of shell lines as lists of words; a quoted word may go over several lines."""
    open_line = ""
    for line in text.replace("\\\n", " ").splitlines():
        open_line += line + "\n"
        try:
            words = shlex.split(open_line, comments=True)
        except ValueError:  # a quotation that goes on in the next line
            continue
        open_line = ""
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words:
            yield words
    assert not open_line, f"unfinished: {open_line}"


def said_commands(page):
    """The commands of a page's shell examples, and those within its sentences and tables."""
    for example in examples(page, "bash"):
        yield from commands(example.text)
    for code in CODE.findall(FENCE.sub("", read(page))):
        words = code.split()
        if len(words) > 2 and (words[0] == "tim-jax" or "tim-jax" in words[1:2]):
            yield from commands(code)
        elif words[:1] in (["bash"], ["python"]):
            yield words


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page):
    for match in LINK.finditer(without_code(read(page))):
        path, anchor = unquote(match["path"]), match["anchor"]
        if path.startswith(ELSEWHERE):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{match[0]}: no such file"
        if anchor:
            assert anchor in anchors(target), f"{match[0]}: the page has {anchors(target)}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_can_be_pasted_into_any_shell(page):
    """zsh, as macOS starts it, gives a command its comment as arguments."""
    lines = [line for example in examples(page, "bash") for line in example.text.splitlines()]
    assert not [line for line in lines if re.search(r"(^|\s)#\s", line)]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_are_understood(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for words in said_commands(page):
        if words[0] in ("bash", "python") and words[1].startswith(("scripts/", "tests/")):
            assert Path(words[1]).is_file(), words
        if words[0] != "tim-jax" or "..." in words:
            continue
        try:
            arguments = cli._arguments(words[1:])
        except (SystemExit, RefusedError):
            pytest.fail(f"not a command: {shlex.join(words)}")
        config = getattr(arguments, "config", "CONFIG")
        if config != "CONFIG" and not config.startswith("runs/"):  # such a run is not here
            loaded = toml.load(config, arguments.overrides)
            if hasattr(arguments, "topology"):
                topology.check_devices(arguments.topology, loaded.placement.value.devices)
        if getattr(arguments, "sampler", None):
            toml.read_dial(arguments.sampler)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_configurations_are_accepted(page):
    """Each block, as a change to the quickstart's configuration."""
    quickstart = toml.read_toml(ROOT / "configs" / "quickstart.toml")
    for example in examples(page, "toml"):
        if example.note.startswith("configs/"):
            assert example.text == read(ROOT / example.note)
        else:
            toml.build(merged(quickstart, tomllib.loads(example.text)), source=str(page))


def merged(base, change):
    both = dict(base)
    for key, value in change.items():
        # A table that names a kind stands for itself: another kind has other keys.
        joins = isinstance(value, dict) and "kind" not in value
        both[key] = merged(base.get(key, {}), value) if joins else value
    return both


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_names_exist(page):
    """Modules and what is in them, and files, where a page names them as code."""
    for code in CODE.findall(FENCE.sub("", read(page))):
        if re.fullmatch(r"tim_jax(\.\w+)+", code):
            assert resolves(code), f"{code} is not there"
        if re.fullmatch(r"(tim_jax|tests|scripts|configs|docs)/[\w./-]+", code):
            assert (ROOT / code).exists(), f"{code} is not there"


def resolves(name):
    value, parts = tim_jax, name.split(".")[1:]
    for number, part in enumerate(parts, 1):
        if not hasattr(value, part):
            try:
                importlib.import_module(".".join(["tim_jax", *parts[:number]]))
            except ImportError:
                return False
        value = getattr(value, part)
    return True


def test_names_that_moved_are_where_the_page_says():
    """Beside a module written in full, `.name` is its neighbour."""
    rows = re.findall(r"^\| (`.+) \| (.+) \|$", read(ROOT / "docs" / "moves.md"), re.MULTILINE)
    assert rows
    for before, now in rows:
        beside = ""
        for code in CODE.findall(now):
            if re.fullmatch(r"tim_jax(\.\w+)+", code):
                beside = code.rpartition(".")[0]
            elif not (beside and re.fullmatch(r"\.\w+", code)):
                continue
            name = beside + code if code.startswith(".") else code
            assert resolves(name), f"{name} is not there: {before}"
            if "the same names" in now:
                moved = [old.rpartition(".")[2] for old in CODE.findall(before) if "." in old]
                lost = [old for old in moved if not resolves(f"{name}.{old}")]
                assert not lost, f"not in {name}: {lost}"


def test_the_readme_is_read_in_minutes():
    assert len(read(ROOT / "README.md").split()) <= 1300


def test_the_table_of_rooms_is_complete_and_in_order():
    page = read(ROOT / "docs" / "architecture.md")
    table = re.search(r"<!-- rooms: begin -->(.*)<!-- rooms: end -->", page, re.DOTALL)
    assert table is not None
    firsts = re.findall(r"^\| (`[^|]+) \|", table[1], re.MULTILINE)
    rooms = [room for first in firsts for room in CODE.findall(first)]
    assert sorted(rooms) == sorted(ROW)
    rows = [ROW[room] for room in rooms]
    assert rows == sorted(rows)


def test_the_site_leads_to_every_page():
    """Read as text: mkdocs.yml names classes that only mkdocs can load."""
    docs = ROOT / "docs"
    config = read(docs / "site" / "mkdocs.yml")
    nav = re.search(r"^nav:\n((?: .*\n)+)", config, re.MULTILINE)
    assert nav is not None
    listed = re.findall(r"[\w/]+\.md$", nav[1], re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(docs)) for page in docs.rglob("*.md"))


def python_pages():
    for page, name in zip(PAGES, NAMES, strict=True):
        found = examples(page, "python")
        if found:
            slow = any(example.note == "slow" for example in found)
            yield pytest.param(page, id=name, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("page", python_pages())
def test_python_examples_run(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": f"examples_of_{page.stem}"}
    for example in examples(page, "python"):
        elsewhere = re.fullmatch(r"run by (\S+)", example.note)
        if elsewhere:
            assert page.name in read(ROOT / elsewhere[1]), f"{elsewhere[1]} does not read {page}"
            continue
        assert example.note in ("", "slow"), f"unknown note {example.note!r}"
        # Empty lines before it, so that an error names the line of the page.
        code = compile("\n" * example.line + example.text, str(page), "exec")
        # As a reader has JAX set up, not as tests/conftest.py does.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            exec(code, names)


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(notebook, monkeypatch, tmp_path):
    """All code cells, with fewer steps of training than a reader takes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    names = {"__name__": "__main__"}
    cells = [x["source"] for x in json.loads(read(notebook))["cells"] if x["cell_type"] == "code"]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for number, lines in enumerate(cells):
            source = "".join(lines).replace("steps=40", "steps=2")
            exec(compile(source, f"{notebook.name}, cell {number}", "exec"), names)


def test_public_methods_have_docstrings():
    """Their own, or that of the method they override. Ruff looks at classes and functions."""
    found = [module.name for module in pkgutil.walk_packages(tim_jax.__path__, "tim_jax.")]
    classes = {
        cls
        for module in map(importlib.import_module, set(found) - OPTIONAL)
        for cls in vars(module).values()
        if inspect.isclass(cls) and cls.__module__ == module.__name__
    }
    interfaces = [documented_methods(cls) for cls in classes if getattr(cls, "_is_protocol", False)]
    bare = []
    for cls in classes:
        names = {*dir(cls), *getattr(cls, "__dataclass_fields__", ())}
        fulfilled = {name for wanted in interfaces if wanted <= names for name in wanted}
        missing = public_methods(cls) - documented_methods(cls) - fulfilled
        if not cls.__name__.startswith("_"):
            bare += [f"{cls.__module__}.{cls.__name__}.{name}" for name in missing]
    assert not bare


def public_methods(cls):
    kinds = FunctionType | property | staticmethod | classmethod
    own = vars(cls).items()
    return {name for name, value in own if isinstance(value, kinds) and not name.startswith("_")}


def documented_methods(cls):
    return {name for name in public_methods(cls) if inspect.getdoc(getattr(cls, name))}
