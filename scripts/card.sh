#!/usr/bin/env bash
# What accprobe does on this machine's card, with this machine's own vLLM: one page and one small archive to send us.
#
#   bash scripts/card.sh [--quick] [--out DIR] [--engine JSON] [--only PARTS] [--again [PARTS]] [--limit S]
#   bash scripts/card.sh --torch [--out DIR] [--device NAME]
#   bash scripts/card.sh --models [--out DIR] [--device NAME] [--models NAMES] [--parts PARTS]
#
# Engines run eager, compiled and captured, each clean and with a planted fault; see docs/compatibility.md. The same command goes
# on where it was interrupted. --torch needs torch alone, --models also transformers. PYTHON chooses the Python (python3).
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
script=card.py
if [ "${1:-}" = "--torch" ]; then
    script=card_torch.py
    shift
elif [ "${1:-}" = "--models" ]; then
    script=card_models.py
    shift
fi
PYTHONPATH="$here:$here/scripts${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python3}" "$here/scripts/$script" "$@"
