"""Which kernels a process computes with: those of this processor, or those of a lesser one, forced.

The problem: vLLM's CPU wheel carries three kernels (`_C`, `_C_AVX512`, `_C_AVX2`) and takes the best that the processor
has; torch, oneDNN, MKL and OpenBLAS choose theirs likewise, and all round differently. What passes on one processor may
fail on the next. The idea: an environment in which a child process believes that its processor is a lesser one. The
libraries have a variable each; vLLM asks ``torch.cpu``, whose answers ``forced/sitecustomize.py`` changes as it is
imported. ``ACCPROBE_TEST_KERNELS=avx2 bash scripts/test.sh`` forces every process of the suite.
Not here: engines (engine.py). AMX can only be kept away, not forced.
"""

import getpass
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

NAME = "ACCPROBE_TEST_KERNELS"
NATIVE = "native"
FORCED = Path(__file__).resolve().parent / "forced"

_LIBRARIES = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2",
             "OPENBLAS_CORETYPE": "Haswell"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
               "MKL_ENABLE_INSTRUCTIONS": "AVX512", "OPENBLAS_CORETYPE": "SkylakeX"},
}  # fmt: skip
"""By kernel: what makes torch, oneDNN, MKL and OpenBLAS take it. avx512 is without its bfloat16 instructions."""
_NEEDS = {"avx2": {"avx2", "fma"}, "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"}}


def current() -> str:
    """What this process was told to compute with: ``native`` where nobody said."""
    return os.environ.get(NAME) or NATIVE


def possible(kernels: str) -> bool:
    """Whether this processor has them."""
    if kernels == NATIVE:
        return True
    return _NEEDS[kernels] <= _flags()


def best() -> str:
    """The most that vLLM takes on this processor: ``avx2``, ``avx512``, or ``native`` for more than these."""
    if "avx512_bf16" in _flags():
        return NATIVE
    return next((name for name in ("avx512", "avx2") if possible(name)), NATIVE)


def amx() -> bool:
    """Whether an engine that is not forced computes with AMX: another attention for prompts than for decode, and
    products whose sums depend on how many rows there are."""
    return current() == NATIVE and "amx_bf16" in _flags()


def taken(forced: str) -> str:
    """What an engine computes with that is ``forced``: on a lesser processor, or in a suite that is forced as a whole,
    ``native`` is one of the others."""
    return next((kernels for kernels in (forced, current()) if kernels != NATIVE), best())


def environment(kernels: str, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """What to add to a child's environment, over ``base`` (this process's), so that it takes ``kernels``.

    ``native`` adds nothing: a suite that is forced as a whole stays forced. What inductor compiled is kept apart: its
    cache does not ask for which instructions a piece was made, and of the wrong ones it computes wrong numbers (the
    masked ids of an embedding that is cut over ranks). Raises KeyError for an unknown name."""
    if kernels == NATIVE:
        return {}
    before = (os.environ if base is None else base).get("PYTHONPATH")
    path = os.pathsep.join([str(FORCED), *([before] if before else [])])
    compiled = Path(tempfile.gettempdir(), f"accprobe-compiled-{getpass.getuser()}-{kernels}")
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(compiled / "inductor"), "VLLM_CACHE_ROOT": str(compiled / "vllm")}
    return _LIBRARIES[kernels] | caches | {NAME: kernels, "PYTHONPATH": path}


def _flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return set(line.partition(":")[2].split())


if __name__ == "__main__":  # for scripts/test.sh and scripts/faults.sh: lines that a shell can export
    import sys

    wanted = current()
    if wanted not in (NATIVE, *_LIBRARIES):
        sys.exit(f"{NAME}={wanted}: expected one of {', '.join((NATIVE, *_LIBRARIES))}")
    if not possible(wanted):
        sys.exit(f"{NAME}={wanted}: this processor does not have these instructions")
    for key, value in environment(wanted).items():
        print(f"{key}={value}")
