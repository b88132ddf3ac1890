#!/usr/bin/env bash
# What accprobe does on this machine's card, with this machine's own vLLM: one page and one small archive to send us.
#
#   bash scripts/card.sh [--quick] [--out DIR] [--engine JSON] [--only PARTS] [--again [PARTS]] [--limit S]
#   bash scripts/card.sh --torch [--out DIR] [--device NAME]
#
# Engines run eager, compiled and captured, each clean and with a planted fault; see docs/compatibility.md. The same command goes
# on where it was interrupted. --torch needs torch and nothing of a server. PYTHON chooses the Python (python3).
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
script=card.py
if [ "${1:-}" = "--torch" ]; then
    script=card_torch.py
    shift
fi
PYTHONPATH="$here:$here/scripts${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python3}" "$here/scripts/$script" "$@"
