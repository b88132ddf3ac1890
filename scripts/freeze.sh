#!/usr/bin/env bash
# Compares every output of the code of a git commit with the checkout's, on this machine, byte for byte.
#
#   scripts/freeze.sh [REF]     REF: a commit, HEAD by default. Exit code 0: nothing differs, 1: something does and is
#                               listed with the first line that differs, 2: it could not be done.
#   scripts/freeze.sh --write   makes tests/freeze/expected anew from the checkout. Only for a change of an output that is
#                               meant, in a commit that says what changed and why.
#
# Both run on one corpus, built once by the checkout's builders: REF may be older than they are, and a change of a builder
# is no change of an output. Cases and runner are the checkout's, too. ACCPROBE_PYTHON: the interpreter, else the one on PATH.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${ACCPROBE_PYTHON:-python}"
export OMP_NUM_THREADS=1 PYTHONHASHSEED=0 PYTHONDONTWRITEBYTECODE=1

_fail() { echo "freeze: $*" >&2; exit 2; }

_run() {  # a checkout's root: HOME/out by its package
  PYTHONPATH="$1" "$python" "$root/tests/freeze/freeze_run.py" run "$home" "$1/vllm_accprobe" || _fail "the cases did not run with $1"
}

home="$(mktemp -d)"
tree="$home/tree"
_clean() {
  [ ! -e "$tree" ] || git -C "$root" worktree remove --force "$tree" || true
  rm -rf "$home"
}
trap _clean EXIT

[ $# -le 1 ] || _fail "one argument at most: a commit, or --write"
ref="${1:-HEAD}"
if [ "$ref" != --write ]; then
  git -C "$root" rev-parse --verify --quiet "$ref^{commit}" >/dev/null || _fail "no commit $ref"
  git -C "$root" worktree add --quiet --detach "$tree" "$ref" || _fail "no worktree of $ref"
fi
PYTHONPATH="$root" "$python" "$root/tests/freeze/freeze_corpus.py" "$home" || _fail "the corpus was not made"
_run "$root"
if [ "$ref" = --write ]; then
  "$python" "$root/tests/freeze/freeze_run.py" write "$home" || _fail "expected was not written"
  exit 0
fi
mv "$home/out" "$home/checkout"
_run "$tree"
mv "$home/out" "$home/$(git -C "$tree" rev-parse --short HEAD)"
code=0
"$python" "$root/tests/freeze/freeze_run.py" diff "$home/$(git -C "$tree" rev-parse --short HEAD)" "$home/checkout" || code=$?
exit "$code"
