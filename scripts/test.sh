#!/usr/bin/env bash
# Sets up an environment and runs the checks and the tests, but for those marked slow, which CI adds
# with `-m slow`. Arguments go to pytest in place of these defaults, such as:
#   bash scripts/test.sh tests/policy/test_sampler.py
# TORCH=0 leaves PyTorch out, and with it the comparisons with transformers' models. EXTRAS adds to
# what is installed: EXTRAS=plan brings the TPU's compiler, which some slow tests need.
set -euo pipefail
source "$(dirname "$0")/setup.sh"
extras="test,math"
[ "${TORCH:-1}" = 0 ] || extras="$extras,reference"
[ -z "${EXTRAS:-}" ] || extras="$extras,$EXTRAS"
setup "$extras"
# reasoning-gym needs a C compiler (through pycosat); its tests are left out where there is none.
"$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".[gym]" \
  >/dev/null 2>&1 || echo "reasoning-gym could not be installed: its tests are skipped"
export JAX_PLATFORMS=cpu
if [ $# -eq 0 ]; then
  "$VENV/bin/ruff" check .
  "$VENV/bin/ruff" format --check .
  "$VENV/bin/pyright" --threads 2 --pythonpath "$VENV/bin/python"
  set -- -m "not slow"
fi
# A worker takes a core and up to 5 GB.
cores=$("$VENV/bin/python" -c 'import os; print(max(2, min(4, os.cpu_count() or 2)))')
# In two parts, which tests/conftest.py has compiled in different ways; both are run to their end.
# With --optimised and from JAX 0.12 on there is one way: PARTS=rest saves starting the other.
status=0
for part in ${PARTS:-plain rest}; do
  "$VENV/bin/python" -m pytest -n "${WORKERS:-$cores}" --dist worksteal --part "$part" "$@" ||
    status=$?
done
exit "$status"
