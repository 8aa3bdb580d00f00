#!/usr/bin/env bash
# Checks this machine's GPU: exactness, accuracy, kernels, speed, what matters most first.
#   bash scripts/gpu_check.sh --minutes 9            # of all together, after installing; a second
#                                                    # call goes on with the results and compiled
#                                                    # programs, and tries again what failed
#   bash scripts/gpu_check.sh --again                # forgets earlier results: another GPU or tree
#   bash scripts/gpu_check.sh --only kernels,speed   # some parts
#   bash scripts/gpu_check.sh --smoke                # every part on the CPU, small, interpreted
# Needs an NVIDIA driver and Python 3.11 or newer: JAX with CUDA is installed into .venv-cuda. Where
# there is no network, PYTHON names an interpreter that has jax, flax, optax, numpy, rich and
# safetensors; torch and transformers are compared with where they are installed. Writes gpu.md and
# gpu.json to --out, after every case; scripts/gpu_page.py makes docs/results/gpu.md of them.
set -euo pipefail
cd "$(dirname "$0")/.."
extras=cuda
for argument in "$@"; do
  if [ "$argument" = --smoke ]; then
    export JAX_PLATFORMS=cpu
    extras=""
  fi
done
if [ -z "${PYTHON:-}" ]; then
  source scripts/setup.sh
  [ -z "$extras" ] || VENV="${VENV:-.venv-cuda}"
  setup "$extras"
  PYTHON="$VENV/bin/python"
fi
export PYTHONPATH="$PWD:$PWD/scripts${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" scripts/gpu_check "$@"
