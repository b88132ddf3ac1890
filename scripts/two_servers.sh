#!/usr/bin/env bash
# Captures the same prompts from two servers, compares, and leaves a comment for a pull request: what action.yml runs.
#
#   OUT=out PROMPTS=prompts.jsonl GOLDEN="vllm serve A" MINE="vllm serve B" bash scripts/two_servers.sh
#
# GOLDEN and MINE are commands that serve; each is started, sent the prompts, and ended. GOLDEN may be a folder that an
# earlier run left (OUT of it, with golden and golden-sent): then only mine is started. TOKENS, MODULES and TASK choose what
# is captured (VLLM_ACCPROBE_*), COMPARE is added to `accprobe compare`. Ends as that does: 0 pass, 1 differences, 2 and 3.
set -uo pipefail
: "${OUT:?where the dumps and the report go}" "${GOLDEN:?a command that serves, or the folder of an earlier run}" "${MINE:?a command that serves}"
PROMPTS="${PROMPTS:-default}"
mkdir -p "$OUT" || exit 2
: >"$OUT/comment.md"

capture() {  # side, command, what is sent
  local side="$1" command="$2"
  shift 2
  VLLM_ACCPROBE=1 VLLM_ACCPROBE_DIR="$OUT/$side" VLLM_ACCPROBE_TOKENS="${TOKENS:-0-4}" VLLM_ACCPROBE_TASK="${TASK:-tensor}" \
    VLLM_ACCPROBE_MODULES="${MODULES:-}" accprobe send "$@" --engine "$command" --out "$OUT/$side-sent"
}

stop() {  # what happened, exit code
  printf '### accprobe: %s\n\nNothing was compared; the log of the step says why.\n' "$1" >"$OUT/comment.md"
  exit "$2"
}

if [ -d "$GOLDEN" ]; then
  golden="$GOLDEN/golden" sent="$GOLDEN/golden-sent"
  [ -d "$golden" ] && [ -d "$sent" ] || { echo "error: $GOLDEN has no golden and golden-sent: name what an earlier run left, or a command that serves" >&2; stop "no golden" 2; }
else
  golden="$OUT/golden" sent="$OUT/golden-sent"
  capture golden "$GOLDEN" "$PROMPTS" || stop "golden's server could not be captured" "$?"
fi
capture mine "$MINE" --along "$sent" || stop "mine's server could not be captured" "$?"

# COMPARE is words, not patterns.
set -f
# shellcheck disable=SC2086
accprobe compare "$golden" "$OUT/mine" --out "$OUT/report" --format markdown ${COMPARE:-} >"$OUT/comment.md"
code=$?
cat "$OUT/comment.md"
exit "$code"
