"""The shape of the library: rooms in their order, short functions, no hidden inputs."""

import ast
from functools import cache
from pathlib import Path
from typing import TypeGuard

import pytest
from rooms import ROW, WINGS

import tim_jax

PACKAGE = Path(tim_jax.__file__).parent
NAME = PACKAGE.name

# Functions of arrays: they know no model, so that any trainer can use them.
ARITHMETIC = {"objectives", "corrections", "schedules", "optimizers", "metrics"}
# Workers are given the environment of their parent, and changes to it.
READS_ENVIRONMENT = ("app.cli", "tasks.guard")
LONGEST_FUNCTION = 70  # lines, docstring not counted
LONGEST_MODULE = 600


def module_name(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def tree(name):
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def own_imports(node):
    """Modules of the package that the import statement `node` names."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
        renamed = [alias.asname for alias in node.names if alias.name.split(".")[0] == NAME]
        assert not any(renamed), f"another name for {NAME} in line {node.lineno}"
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"relative import in line {node.lineno}"
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        return []
    inside = []
    for name in names:
        top, _, rest = name.partition(".")
        while top == NAME and rest not in MODULES:  # a name inside the module
            rest = rest.rpartition(".")[0]
        inside += [rest] if top == NAME and rest else []
    return inside


def looked_up(node):
    """The module that `tim_jax.name` imports when it is first used, after a bare `import tim_jax`.

    So a module has another room's functions without loading it before they are called.
    """
    if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
        return []
    if node.value.id != NAME or node.attr.startswith("__"):
        return []
    home = tim_jax._HOMES.get(node.attr, node.attr)
    assert home in MODULES, f"{NAME}.{node.attr} in line {node.lineno}"
    return [home]


@cache
def imports(name):
    nodes = list(ast.walk(tree(name)))
    return frozenset(other for node in nodes for other in own_imports(node) + looked_up(node))


def functions(name):
    """Every function of a module, methods and nested ones included."""
    nodes = ast.walk(tree(name))
    return [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def room(name):
    """The room of a module: its first name, or the first two in a wing."""
    return ".".join(name.split(".")[: 2 if name.split(".")[0] in WINGS else 1])


def reachable(name, seen=frozenset()):
    """All modules that `name` imports, and that those import."""
    for other in imports(name) - seen:
        seen = reachable(other, seen | {other})
    return seen


def test_imports_go_from_room_to_room_in_order():
    inside = [name for name in MODULES if name and name not in WINGS]
    assert {room(name) for name in inside} == ROW.keys()
    for name in inside:
        for other in imports(name):
            assert room(other) == room(name) or ROW[room(other)] < ROW[room(name)], (name, other)
        assert name not in reachable(name), f"{name} imports itself, through others"


def test_the_order_sees_rooms_that_are_looked_up_in_the_package():
    def seen(text):
        return [home for node in ast.walk(ast.parse(text)) for home in looked_up(node)]

    assert "mismatch" in imports("app.config.sections")
    assert seen("import tim_jax\ntim_jax.mismatch.build(tim_jax.load)") == ["api", "mismatch"]
    with pytest.raises(AssertionError, match=r"tim_jax\.nothing in line 1"):
        seen("tim_jax.nothing")


def test_the_arithmetic_of_learning_knows_no_model():
    known = {*ARITHMETIC, "common.errors", "common.inputs", "numerics", "common.types"}
    for name in (name for name in MODULES if room(name) in ARITHMETIC):
        assert {room(other) for other in imports(name)} <= known, name


def test_sampler_and_learner_do_not_know_each_other():
    sampler, learner = reachable("policy.sampler"), reachable("rl.learner")
    assert "model.transformer" in sampler & learner
    assert "rl.learner" not in sampler
    assert "policy.sampler" not in learner


def test_own_modules_are_imported_at_the_top():
    """But by the command line, and by the names of the package, which are found when asked for."""
    for name in MODULES.keys() - {"", "app.cli"}:
        for function in functions(name):
            inside = [other for node in ast.walk(function) for other in own_imports(node)]
            assert not inside, f"{name}.{function.name} imports {inside}"


def reads_environment(node) -> TypeGuard[ast.Attribute | ast.Name]:
    names = ("environ", "getenv", "putenv")
    return (isinstance(node, ast.Attribute) and node.attr in names) or (
        isinstance(node, ast.Name) and node.id in names
    )


def test_the_environment_is_read_at_the_edge_alone():
    for name in MODULES:
        uses = {node.lineno for node in ast.walk(tree(name)) if reads_environment(node)}
        assert name in READS_ENVIRONMENT or not uses, f"{name}, lines {uses}"
        inside = {
            node.lineno
            for function in functions(name)
            for node in ast.walk(function)
            if isinstance(node, ast.expr | ast.stmt)
        }
        assert uses <= inside, f"{name} reads it when imported"


def body_lines(function):
    """Lines of a function without its decorators and docstring."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        text = function.body[0]
        lines -= text.end_lineno - text.lineno + 1
    return lines


def test_functions_and_modules_are_short_and_change_no_globals():
    for name, path in MODULES.items():
        long = [f.name for f in functions(name) if body_lines(f) > LONGEST_FUNCTION]
        assert not long, name
        assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST_MODULE, name
        assert not [node for node in ast.walk(tree(name)) if isinstance(node, ast.Global)], name
