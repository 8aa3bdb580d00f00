#!/usr/bin/env bash
# Makes the model that the package brings, `tim_jax.load("tiny")`: supervised steps on sorting digits,
# then its weights in bfloat16 under tim_jax/data/tiny. A minute on two cores.
set -euo pipefail
source "$(dirname "$0")/setup.sh"
setup ""
export JAX_PLATFORMS=cpu
rm -rf runs/tiny tim_jax/data/tiny
"$VENV/bin/tim-jax" train configs/tiny.toml
"$VENV/bin/python" -c '
import tim_jax as tim
tim.save(tim.load("runs/tiny"), "tim_jax/data/tiny", dtype="bfloat16")'
