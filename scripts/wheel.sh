#!/usr/bin/env bash
# Builds the source package, and from it the wheel. Installs the wheel into an empty environment, and
# tries it in an empty folder: the first step of the quickstart, an audit, the shipped studies, the model
# that comes along, and the corrections in a trainer of one's own. Both are left in dist/.
set -euo pipefail
source "$(dirname "$0")/setup.sh"
here="$PWD" python=$(find_python)
empty=$(mktemp -d)
trap 'rm -rf "$empty"' EXIT
"$python" -m venv "$empty/build"
"$empty/build/bin/python" -m pip install --quiet build
"$empty/build/bin/python" -m build --outdir dist . >/dev/null
"$python" -m venv "$empty/venv"
"$empty/venv/bin/python" -m pip install --quiet --no-compile "$(ls -t dist/tim_jax-*.whl | head -1)"
export JAX_PLATFORMS=cpu PATH="$empty/venv/bin:$PATH"
cd "$empty"
tim-jax --version
tim-jax train configs/quickstart.toml steps=1 warmup.steps=1 eval.every=0
# Three programs in place of an audit's dozens, which the tests run: the equality, and a control.
tim-jax audit tiny --prompts 4 --samples 4 --sampler '[{name = "native_kernels"}]'
tim-jax generate tiny "40312>"
tim-jax study --list >studies.txt
grep -q configs/studies/smoke.toml studies.txt
python - "$here/docs/correct.md" <<'PYTHON'
import re, sys
import tim_jax as tim

print(tim.__version__, tim.load("tiny"))
text = open(sys.argv[1], encoding="utf-8").read()
exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1])
PYTHON
echo "the wheel works in an empty environment: $(ls -t "$here"/dist/*.whl | head -1)"
