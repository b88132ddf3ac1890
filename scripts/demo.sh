#!/usr/bin/env bash
# Serves a tiny model twice through `vllm serve`, once clean and once with a planted fault, and lets accprobe find it.
# Ends 0 when the planted module is named first. Argument: where the results go (default: demo-out in the checkout).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
exec "$PYTHON" "$ROOT/scripts/demo.py" "${1:-$ROOT/demo-out}"
