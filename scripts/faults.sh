#!/usr/bin/env bash
# The fault laboratory: plants each fault in a real vLLM, compares it with a golden, prints what was named; see docs/laboratory.md.
#   scripts/faults.sh [--only GLOB] [--group GLOB] [--half tuned] [--jobs 1] [--keep DIR] [--judge-only DIR] [--list] ..., see --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh" >&2
PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" -m lab.faults "$@"
