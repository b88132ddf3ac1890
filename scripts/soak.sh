#!/usr/bin/env bash
# Long runs of real servers: thousands of requests, kills, failing disks, an online check under attack; see docs/steady.md.
#   scripts/soak.sh [requests|kills|disk|online|all] [--requests 10000] [--kills 200] [--minutes 60] [--seed 0] ..., see --help
# Exit code 1: something failed. The part `disk` mounts small file systems, and needs root.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh" >&2
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
PYTHONPATH="$ROOT:$ROOT/tests${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" "$ROOT/scripts/soak.py" "$@"
