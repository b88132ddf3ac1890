#!/usr/bin/env bash
# Captures the same tiny models with many releases of vLLM, compares them with 0.32 and with themselves; see docs/development.md.
#   scripts/matrix.sh [RELEASE ...] [--envs DIR] [--keep DIR] [--into docs/compatibility.md] [--cases NAMES] [--again]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh" >&2
exec "$PYTHON" "$ROOT/scripts/matrix.py" "$@"
