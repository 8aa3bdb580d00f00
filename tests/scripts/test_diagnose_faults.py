"""The rollouts with faults that docs/results/diagnose.md is made of."""

import importlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def listed():
    """The explanations of the page's table, but low precision."""
    page = (ROOT / "docs" / "diagnose.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \|", page[page.index("| explanation |") :], re.MULTILINE)
    return set(re.findall(r"`([^`]+)`", " ".join(rows))) - {"_ignored"}


def test_every_explanation_of_the_page_has_a_rollout(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    made = importlib.import_module("diagnose_faults")
    names = {name for fault in made.faults() for name in fault.right}
    names |= {name.replace("checkpoint", "NAME").replace("(int4)", "(...)") for name in names}
    assert len(listed()) > 30
    assert listed() - names == set()
