# Sourced by the other scripts: makes a virtual environment in .venv and installs the project.
# Use: setup "extra,extra". Needs Python 3.11 or newer (PYTHON names one) and a package index. Its
# status is 2 if no environment can be made.
cd "$(dirname "${BASH_SOURCE[0]}")/.."

find_python() {
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  echo "tim_jax needs Python 3.11 or newer; set PYTHON to one" >&2
  return 1
}

setup() {
  VENV="${VENV:-.venv}"
  # One whose making was interrupted, or without python3-venv, has a Python but no pip.
  if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    # Spelt out, because "set -e" is off in what is called as "setup ... ||".
    python=$(find_python) || return 2
    "$python" -m venv "$VENV" || return 2
  fi
  echo "installing into $VENV (a few minutes the first time) ..."
  # Most modules are never imported: Python compiles those that are, when they are.
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --editable \
    ".${1:+[$1]}"
}
