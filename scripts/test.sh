#!/usr/bin/env bash
# Installs what the tests need and runs every check: ruff, mypy, import contracts, pytest. Arguments go to pytest.
#   --all: also what takes long: engines with AVX2 kernels, a Ray cluster, every page typed in, further planted faults
#          (tests marked extra), and captures of all releases of vLLM (scripts/matrix.sh, an hour or two)
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh" || exit 2
cd "$ROOT" || exit 2

failed=()
check() {  # name, command...
  local name="$1" begin=$SECONDS
  shift
  echo "== $name"
  "$@" || failed+=("$name")
  echo "== $name: $((SECONDS - begin)) s"
}

check ruff "$PYTHON" -m ruff check .
check mypy "$PYTHON" -m mypy
check imports "$VENV/bin/lint-imports" --no-logo
# Hundreds of children import the package; where an image forbids bytecode files, each would compile it anew (1 s).
unset PYTHONDONTWRITEBYTECODE
# Three processes on two cores: tests/conftest.py says who gets what, and why; -n 0 runs all in one.
check pytest "$PYTHON" -m pytest -n 3 --dist loadgroup --durations=25 "$@"

for word in "$@"; do
  if [ "$word" = --all ]; then check releases bash "$ROOT/scripts/matrix.sh"; fi
done

if [ ${#failed[@]} -gt 0 ]; then
  echo "FAILED after $SECONDS s: ${failed[*]}"
  exit 1
fi
echo "all passed in $SECONDS s"
