#!/usr/bin/env bash
# Sets up an environment and builds the documentation site from docs/ and the docstrings into .site:
# open .site/index.html. A broken link, a missing anchor, a page outside the navigation or a
# docstring that does not fit its function ends the build with an error. Arguments go to mkdocs:
#   bash scripts/docs.sh serve
set -euo pipefail
source "$(dirname "$0")/setup.sh"
setup "docs"
if [ $# -eq 0 ]; then
  set -- build --strict --clean
fi
command=$1
shift
exec "$VENV/bin/python" -m mkdocs "$command" --config-file docs/site/mkdocs.yml "$@"
