#!/usr/bin/env bash
# Checks this machine's GPU: exactness, accuracy, kernels, speed. Under 10 minutes, no network.
#   bash scripts/gpu_check.sh                        # all parts; a second call goes on where it
#                                                    # ended, and tries again what failed
#   bash scripts/gpu_check.sh --again                # forgets earlier results: another GPU or tree
#   bash scripts/gpu_check.sh --only kernels,speed   # some parts
#   bash scripts/gpu_check.sh --smoke                # every part on the CPU, small, interpreted
# PYTHON names the interpreter (default python3). It needs jax, flax, optax, numpy and rich; torch
# and transformers are compared with where they are installed. Writes gpu.md and gpu.json to --out.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
for argument in "$@"; do
  [ "$argument" != --smoke ] || export JAX_PLATFORMS=cpu
done
exec "${PYTHON:-python3}" scripts/gpu_check "$@"
