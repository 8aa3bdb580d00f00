#!/usr/bin/env bash
# Installs the optional extras beside each other and uses each once: what they bring has to fit the
# JAX that this Python gets. reasoning-gym needs a C compiler (through pycosat).
set -euo pipefail
source "$(dirname "$0")/setup.sh"
setup "math,gym,tensorboard,wandb,mlflow,report,plan"
export JAX_PLATFORMS=cpu WANDB_SILENT=true
exec "$VENV/bin/python" scripts/extras.py
