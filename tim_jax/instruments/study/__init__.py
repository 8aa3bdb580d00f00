"""Studies: arms with matched controls, stated before they run, and what they show.

from tim_jax.instruments import study
table = study.load("runs/studies/smoke")     # columns, for pandas.DataFrame or polars.DataFrame
"""

from tim_jax.instruments.study.definition import Study
from tim_jax.instruments.study.running import load

__all__ = ["Study", "load"]
