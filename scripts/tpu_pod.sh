#!/usr/bin/env bash
# A run over all hosts of a Cloud TPU slice: one process per host, which find each other through
# the slice's own metadata.
#
#   TPU=my-v5p-64 ZONE=us-east5-a bash scripts/tpu_pod.sh setup https://github.com/me/tim_jax
#   TPU=my-v5p-64 ZONE=us-east5-a bash scripts/tpu_pod.sh train configs/x.toml \
#     placement.fsdp=32 run.folder=/mnt/shared/runs/x
#
# The mesh (placement.data x fsdp x expert x tensor) must be of all chips, and run.folder on a file
# system that all hosts mount. After a pre-emption the same command goes on. Hosts need Python 3.11 or
# newer; some images of TPU hosts have 3.10.
set -euo pipefail
: "${TPU:?set TPU to the name of the slice}" "${ZONE:?set ZONE to its zone}"

usage() {
  echo "usage: TPU=name ZONE=zone bash scripts/tpu_pod.sh setup REPOSITORY" >&2
  echo "       TPU=name ZONE=zone bash scripts/tpu_pod.sh train CONFIG [KEY=VALUE ...]" >&2
  exit 2
}

on_all_hosts() {
  gcloud compute tpus tpu-vm ssh "$TPU" --zone "$ZONE" --worker=all --command "$1"
}

[ $# -ge 2 ] || usage
action=$1
shift
case "$action" in
  setup)
    repository=$(printf '%q' "$1")
    on_all_hosts "set -e
      [ -d tim_jax ] || git clone $repository tim_jax
      cd tim_jax && . scripts/setup.sh
      \$(find_python) -m venv .venv
      .venv/bin/python -m pip install --quiet -e '.[math]' 'jax[tpu]'"
    ;;
  train)
    arguments=$(printf ' %q' "$@")
    on_all_hosts "cd tim_jax && .venv/bin/tim-jax train$arguments --distributed"
    ;;
  *) usage ;;
esac
