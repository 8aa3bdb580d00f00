"""Where a computation runs: mesh axes, and what lies where on them."""

from tim_jax.placement.layout import (
    AXES,
    ROWS,
    RULES,
    SINGLE,
    Axes,
    Axis,
    Devices,
    Placement,
    mesh,
    missing,
    put,
    shardings,
    spec,
    specs,
    split,
)

__all__ = [
    "AXES",
    "ROWS",
    "RULES",
    "SINGLE",
    "Axes",
    "Axis",
    "Devices",
    "Placement",
    "mesh",
    "missing",
    "put",
    "shardings",
    "spec",
    "specs",
    "split",
]
