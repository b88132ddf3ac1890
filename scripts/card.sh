#!/usr/bin/env bash
# What a machine's card makes of our taps: one page and one small archive to send us.
#
#   bash scripts/card.sh --torch [--out DIR] [--device cpu|cuda|npu]
#
# --torch needs torch and nothing else of a server: a tiny transformer runs eager, compiled and, where CUDA is, captured
# in a graph, each clean and with one planted fault. (With the machine's own vLLM: to come.) PYTHON chooses the Python.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
if [ "${1:-}" != "--torch" ]; then
    echo "usage: bash scripts/card.sh --torch [--out DIR] [--device NAME]" >&2
    exit 2
fi
shift
PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python3}" "$here/scripts/card_torch.py" "$@"
