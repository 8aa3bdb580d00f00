#!/usr/bin/env bash
# Sets up an environment and trains a tiny model by GRPO on this machine's CPU: no download of
# models or data. Arguments are changes to the config, such as: bash scripts/quickstart.sh steps=200
set -euo pipefail
source "$(dirname "$0")/setup.sh"
setup ""
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
exec "$VENV/bin/tim-jax" train configs/quickstart.toml "$@"
