"""Studies: arms with matched controls, stated before they run, and what they show.

from tim_jax import study
table = study.load("runs/studies/smoke")     # columns, for pandas.DataFrame or polars.DataFrame
"""

from tim_jax.study.definition import Study
from tim_jax.study.table import load

__all__ = ["Study", "load"]
