"""Scripts that no test runs, because they take long, import what there is."""

import ast
import importlib
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[2] / "scripts").rglob("*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_imports_names_that_the_library_has(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("tim_jax"):
            continue
        module = importlib.import_module(str(node.module))
        for name in (one.name for one in node.names):
            if not hasattr(module, name):
                importlib.import_module(f"{node.module}.{name}")
