#!/usr/bin/env bash
# Reads the wheels and source distributions of vendors and of vLLM, and writes the table of docs/compatibility.md.
#   scripts/vendor_wheels.sh [NAME==VERSION ...] [--keep DIR] [--into docs/compatibility.md]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh" >&2
exec "$PYTHON" "$ROOT/scripts/vendor_wheels.py" "$@"
