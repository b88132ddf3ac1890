"""What `opcheck --repeat` and `--rows` say of this machine's own kernels: the figures of docs/opcheck.md.

    .venv/bin/python scripts/repeat_clean.py [--runs 20] [--only GLOB,GLOB]

Operators of aten and of vLLM's CPU build at several shapes and dtypes, and the modules of every family that the tests
have a call of, run through the same code as the command. Prints alarms (there should be none), remarks, and for each
dtype and shape which products are equal to the bit at 1 and N rows. Ends with exit code 1 after an alarm.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(1, str(Path(__file__).parents[1] / "tests" / "opcheck"))

from vllm_accprobe.opcheck.calls.records import Captured
from vllm_accprobe.opcheck.registry import default_references
from vllm_accprobe.opcheck.repeat.by_rows import BatchOptions, batches
from vllm_accprobe.opcheck.repeat.machine_kernels import MachineKernels
from vllm_accprobe.opcheck.repeat.named_operator import NamedOperator, NotLoaded, call_of
from vllm_accprobe.opcheck.repeat.repeated import RepeatOptions, repeat
from vllm_accprobe.opcheck.run.result_row import PASS, SKIP, WARNING, CheckResult

DTYPES = ("float32", "bfloat16", "float16")
MATRICES = ("1x64,64x48", "7x64,64x32", "64x512,512x512", "160x896,896x512", "33x1000,1000x77", "512x128,128x1024")
NAMED: tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...] = (
    ("aten.mm", MATRICES, {}),
    ("aten.addmm", ("48,7x64,64x48", "512,160x896,896x512"), {}),
    ("aten.bmm", ("4x7x16,4x16x8", "14x160x64,14x64x160"), {}),
    ("aten.linear", ("7x64,32x64", "160x896,512x896"), {}),
    *((f"aten.{op}", ("1x8", "7x64", "300x1024", "4099x3"), {}) for op in (
        "silu", "gelu", "sigmoid", "tanh", "exp", "rsqrt", "neg", "relu", "abs", "log1p")),
    *((f"aten.{op}", ("7x64,7x64", "300x1024,1024", "300x1024,300x1"), {}) for op in ("add", "mul", "sub", "div",
                                                                                      "maximum")),
    *((f"aten.{op}", ("7x64", "300x1024", "33x50000"), {"dim": -1, "half_to_float": False}) for op in (
        "_softmax", "_log_softmax")),
    *((f"aten.{op}.dim_IntList", ("7x64", "300x1024"), {"dim": [-1]}) for op in ("sum",)),
    ("aten.sum", ("7x64", "4096x1024"), {}),
    ("aten.mean.dim", ("7x64", "300x1024"), {"dim": [-1]}),
    ("aten.argmax", ("7x64", "33x50000"), {"dim": -1}),
    ("aten.cumsum", ("7x64", "300x1024"), {"dim": -1}),
    ("aten.topk", ("7x64", "33x50000"), {"k": 8}),
    ("aten.sort", ("7x64", "33x5000"), {}),
    ("aten.native_layer_norm", ("7x64,64,64",), {"normalized_shape": [64], "eps": 1e-6}),
    ("aten.native_layer_norm", ("300x1024,1024,1024",), {"normalized_shape": [1024], "eps": 1e-6}),
    ("aten.cat", (), {}),
    ("torch.ops._C.rms_norm", ("out:7x64,7x64,64", "out:160x896,160x896,896"), {"epsilon": 1e-6}),
    ("torch.ops._C.fused_add_rms_norm", ("7x64,7x64,64", "160x896,160x896,896"), {"epsilon": 1e-6}),
    ("torch.ops._C.silu_and_mul", ("out:7x64,7x128", "out:160x4864,160x9728"), {}),
    ("torch.ops._C.gelu_and_mul", ("out:7x64,7x128",), {}),
    ("torch.ops._C.gelu_tanh_and_mul", ("out:7x64,7x128",), {}),
    ("torch.ops._C.gelu_new", ("out:7x64,7x64",), {}),
    ("torch.ops._C.gelu_quick", ("out:7x64,7x64",), {}),
)  # fmt: skip


def named() -> Iterator[Captured]:
    for op, shapes, more in NAMED:
        for dtype in DTYPES:
            for shape in shapes:
                try:
                    call = call_of(NamedOperator(op, (shape,), (dtype,), more), shape, 0)
                except NotLoaded as why:
                    print(f"not here: {why}")
                    continue
                yield Captured(f"{call.name} {dtype}", 0, 0, 0, call, {})


def families() -> Iterator[Captured]:
    """The right calls of tests/opcheck/samples/modules.py."""
    from opcheck.samples import modules  # noqa: F401  # its samples come into the table as it is imported
    from opcheck.samples.sample import SAMPLES

    for name, sample in SAMPLES.items():
        if name.startswith("modules: "):
            for n, (_, made) in enumerate(sample.each()):
                yield Captured(f"{name} {n}", 0, 0, 0, made.call, {})


def told(rows: list[CheckResult], what: str) -> bool:
    counts = Counter(r.status for r in rows)
    calls = len({r.tap for r in rows if r.status != SKIP})
    ops = len({r.cls for r in rows if r.status != SKIP})
    print(f"{what}: {calls} calls of {ops} operators, {counts[PASS]} outputs equal, {counts[WARNING]} remarks, "
          f"{len(rows) - counts[PASS] - counts[WARNING] - counts[SKIP]} alarms")  # fmt: skip
    for why, n in Counter(r.message for r in rows if r.status == SKIP).most_common():
        print(f"  left out {n}: {why}")
    for r in rows:
        if r.status not in (PASS, SKIP):
            print(f"  {r.status}  {r.tap}  {r.role}: {r.message}")
    return any(r.status not in (PASS, SKIP, WARNING) for r in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--only", default="*", help="globs over calls as they are told, with commas between")
    asked = parser.parse_args()
    kernels = MachineKernels(default_references(), "cpu")
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {platform.machine()}, "
          f"{torch.get_num_threads()} threads")  # fmt: skip
    globs = asked.only.split(",")
    calls = [c for c in (*named(), *families()) if any(fnmatchcase(c.tap, glob) for glob in globs)]
    alarm = told([r for c in calls for r in repeat(c, kernels, RepeatOptions(asked.runs))], f"--repeat {asked.runs}")
    alarm |= told([r for c in calls for r in batches(c, kernels, BatchOptions(("1", "8", "N")))], "--rows 1,8,N")
    return int(alarm)


if __name__ == "__main__":
    sys.exit(main())
