"""The shape of the library: which layer may import which, short functions, no hidden inputs."""

import ast
from functools import cache
from pathlib import Path

import pytest

import tim_jax

PACKAGE = Path(tim_jax.__file__).parent
NAME = PACKAGE.name

# From the values that know nothing to the command line that knows all. A unit (a module, or a
# package as a whole) imports from rows above its own, never from its own row.
LAYERS = (
    ("errors", "types", "sums", "strict", "preemption", "last_words"),
    ("tile_sizes", "placement", "schedules", "processes", "rounds"),
    ("masked", "aggregation", "losses", "advantages"),
    ("shaping",),
    ("objectives",),
    ("numerics",),
    ("corrections", "optimizers", "compiled"),
    ("metrics", "kernels"),
    ("collectives",),
    ("model",),
    ("policy", "calibration", "kernel_choice"),
    ("calibrated",),
    ("sampler", "scoring"),
    ("mismatch",),
    ("learning",),
    ("experience",),
    ("learner",),
    ("sharded",),
    ("programs", "audit"),
    ("plan",),
    ("tasks",),
    ("tokenizers",),
    ("drawing",),
    ("train",),
    ("warm_start", "evaluation"),
    ("sinks", "checkpoints"),
    ("runs", "charts", "source_charts", "progress"),
    ("config_sections",),
    ("config_placement", "config_model", "config_optimizer"),
    ("config",),
    ("config_io",),
    ("assembly",),
    ("jobs", "audit_job", "ablation_job", "plan_job"),
    ("train_job",),
    ("cli",),
)
RANK = {unit: rank for rank, row in enumerate(LAYERS) for unit in row}

# Workers are given the environment of their parent, and changes to it.
READS_ENVIRONMENT = ("cli", "tasks.guard")
LONGEST_FUNCTION = 70  # lines, docstring not counted
LONGEST_MODULE = 400


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
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"relative import in line {node.lineno}"
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        return []
    found = []
    for name in names:
        top, _, rest = name.partition(".")
        if top != NAME:
            continue
        while rest not in MODULES:  # a name inside the module
            rest = rest.rpartition(".")[0]
        if rest:
            found.append(rest)
    return found


@cache
def imports(name):
    return frozenset(found for node in ast.walk(tree(name)) for found in own_imports(node))


def functions(name):
    """Every function of a module, methods and nested ones included."""
    nodes = ast.walk(tree(name))
    return [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def unit(name):
    return name.partition(".")[0]


def test_the_modules_were_found():
    assert len(MODULES) > 40
    assert {"train", "model.transformer", "kernels.tiles", "cli"} <= MODULES.keys()
    assert imports("sampler") >= {"model.transformer", "numerics", "policy"}


@pytest.mark.parametrize("name", [name for name in MODULES if name])
def test_imports_point_one_way(name):
    assert unit(name) in RANK, f"give {unit(name)} its place in LAYERS"
    for found in imports(name):
        if unit(found) != unit(name):
            assert RANK[unit(found)] < RANK[unit(name)], f"{name} imports {found}"


def test_no_unit_of_the_order_is_gone():
    assert RANK.keys() == {unit(name) for name in MODULES if name}


def test_sampler_and_learner_do_not_know_each_other():
    def reachable(name, seen):
        for found in imports(name) - seen:
            seen |= {found}
            seen |= reachable(found, seen)
        return seen

    assert "model.transformer" in reachable("sampler", set()) & reachable("learner", set())
    assert "learner" not in reachable("sampler", set())
    assert "sampler" not in reachable("learner", set())


ARITHMETIC = (
    "aggregation",
    "advantages",
    "corrections",
    "losses",
    "masked",
    "objectives",
    "schedules",
    "shaping",
)


@pytest.mark.parametrize("name", [name for name in MODULES if unit(name) in ARITHMETIC])
def test_the_arithmetic_of_learning_knows_no_model(name):
    """Log-probs and rewards in, numbers out: they are functions of arrays, for any model."""
    known = {*ARITHMETIC, "errors", "strict", "sums", "types"}
    assert {unit(found) for found in imports(name)} <= known


def test_there_are_no_cycles():
    done: set[str] = set()

    def visit(name, path):
        assert name not in path, " -> ".join((*path, name))
        if name not in done:
            for found in sorted(imports(name)):
                visit(found, (*path, name))
            done.add(name)

    for name in MODULES:
        visit(name, ())
    assert done >= MODULES.keys()


@pytest.mark.parametrize("name", [name for name in MODULES if name not in ("", "cli")])
def test_own_modules_are_imported_at_the_top(name):
    for function in functions(name):
        inside = [found for node in ast.walk(function) for found in own_imports(node)]
        assert not inside, f"{name}.{function.name} imports {inside}"


@pytest.mark.parametrize("name", MODULES)
def test_the_environment_is_read_at_the_edge_alone(name):
    uses = [
        node.lineno
        for node in ast.walk(tree(name))
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"))
        or (isinstance(node, ast.Name) and node.id in ("environ", "getenv"))
    ]
    if name not in READS_ENVIRONMENT:
        assert not uses, f"{name}, lines {uses}"
    in_functions = {
        node.lineno
        for function in functions(name)
        for node in ast.walk(function)
        if isinstance(node, ast.expr | ast.stmt)
    }
    assert set(uses) <= in_functions, "read when imported"


def body_lines(function):
    """Lines of a function without its decorators and docstring."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        text = function.body[0]
        lines -= text.end_lineno - text.lineno + 1
    return lines


@pytest.mark.parametrize("name", MODULES)
def test_functions_and_modules_are_short(name):
    long = [f.name for f in functions(name) if body_lines(f) > LONGEST_FUNCTION]
    assert not long
    assert len(MODULES[name].read_text(encoding="utf-8").splitlines()) <= LONGEST_MODULE


@pytest.mark.parametrize("name", MODULES)
def test_nothing_is_changed_from_inside_a_function(name):
    """No `global` statement anywhere: a module's names are constants."""
    assert not [node.lineno for node in ast.walk(tree(name)) if isinstance(node, ast.Global)]
