"""How fast the whole command is: `accprobe compare` of two dumps, from the shell's prompt to the last file written.

The problem: a fast kernel says little about the command around it. The idea: synthetic dumps (big_dumps.py), warm in
the page cache, are compared by the real command in a process of its own; wall time, CPU time and peak memory are the
process's. In the same run: the kernel alone on the same shapes, an identical pair, and, where --msprobe names its
program (pip install mindstudio-probe, into an environment of its own), `msprobe compare` on tensors of the same shapes
and `accprobe compare` on the dumps that it was given.

    python benchmarks/bench_compare.py --dir /some/disk --gb 2 [--msprobe venv/bin/msprobe --msprobe-gb 0.2] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from big_dumps import TAPS, write_pair

from vllm_accprobe.dump.dtypes import widen
from vllm_accprobe.formats import open_dump
from vllm_accprobe.kernels import rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("."))
    parser.add_argument("--gb", type=float, default=2.0, help="of each dump")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--msprobe", type=Path, help="msprobe's program")
    parser.add_argument("--msprobe-gb", type=float, default=0.2, help="of each of its dumps")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="accprobe-bench-", dir=arguments.dir) as name:
        root = Path(name).resolve()
        # As installed: a process that may not keep its compiled modules would compile them each time.
        installed = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(root / "pycache")}
        size = int(arguments.gb * 1e9)
        # In a process of its own: a child's peak memory begins with what its parent has.
        with ProcessPoolExecutor(1) as writer:
            differ = writer.submit(write_pair, root / "differ", size)
            equal = writer.submit(write_pair, root / "equal", size, equal=True)
            pairs = {"differ": differ.result(), "equal": equal.result()}
        report["kernel_gb_per_cpu_s"] = kernel_speed()
        for kind, (golden, mine) in pairs.items():
            touch(root)
            command = [sys.executable, "-m", "vllm_accprobe.cli", "compare", str(golden), str(mine), "--out"]
            rounds = [run([*command, str(root / f"{kind}{i}")], installed) for i in range(arguments.rounds + 1)][1:]
            total = sum(r.payload.nbytes for d in (golden, mine) for r in open_dump(d).records if r.payload) / 1e9
            report[kind] = summed(rounds, total)
        if arguments.msprobe:
            nbytes = int(arguments.msprobe_gb * 1e9)
            report["msprobe"], report["its_dumps"] = peer(
                root / "peer", arguments.msprobe.absolute(), nbytes, installed
            )
            for kind in ("wall", "cpu"):
                key = f"gb_per_{kind}_s"
                report[f"times_msprobe_{kind}"] = report["differ"][key] / report["msprobe"][key]
                report[f"its_dumps_times_msprobe_{kind}"] = report["its_dumps"][key] / report["msprobe"][key]
        report["of_kernel_cpu"] = report["differ"]["gb_per_cpu_s"] / report["kernel_gb_per_cpu_s"]
    if arguments.json:
        print(json.dumps(report, indent=1))
        return
    for key, value in report.items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        print(f"{key:20} " + "  ".join(f"{k} {v:.3g}" for k, v in parts))


def summed(rounds: list[tuple[float, float, float]], gb: float) -> dict[str, float]:
    wall, cpu, rss = (statistics.median(r[i] for r in rounds) for i in range(3))
    return {"gb": gb, "wall_s": wall, "cpu_s": cpu, "gb_per_wall_s": gb / wall, "gb_per_cpu_s": gb / cpu,
            "rss_gb": rss}  # fmt: skip


WAITS = """
import os, sys, time
begin = time.perf_counter()
child = os.posix_spawnp(sys.argv[2], sys.argv[2:], os.environ)
_, status, usage = os.wait4(child, 0)
figures = time.perf_counter() - begin, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1e6
with open(sys.argv[1], "w") as file:
    print(*figures, os.waitstatus_to_exitcode(status), file=file)
"""
"""Linux counts what a process was before it became its program: the parent of what is measured must be small."""


def run(command: list[str], env: dict[str, str], cwd: Path | None = None) -> tuple[float, float, float]:
    """(wall s, CPU s, peak memory in GB) of a process; its exit code must be 0 or 1."""
    with tempfile.TemporaryFile() as said, tempfile.NamedTemporaryFile("r") as figures:
        words = [sys.executable, "-I", "-S", "-c", WAITS, figures.name, *command]
        subprocess.run(words, stdout=said, stderr=said, env={**os.environ, **env}, cwd=cwd, check=True)
        wall, cpu, gb, code = map(float, figures.read().split())
        if code not in (0, 1):
            said.seek(0)
            raise SystemExit(f"{command[0]} failed: {said.read()[-2000:].decode(errors='replace')}")
    return wall, cpu, gb


def kernel_speed() -> float:
    """GB of both sides per CPU second of the kernel alone, tensors of 4 MB as the command hands them over."""
    rng = np.random.default_rng(0)
    g = (rng.standard_normal((2048, 1024)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    m, at = g + (rng.random(g.shape) < 0.5).astype(np.uint16), np.arange(2048)
    times = []
    for _ in range(40):
        begin = time.thread_time()
        rows.rows(g, "bfloat16", at, m, "bfloat16", at, widen)
        times.append(time.thread_time() - begin)
    return 2 * g.nbytes / statistics.median(times) / 1e9


def touch(root: Path) -> None:
    """Into the page cache."""
    for path in root.rglob("*.safetensors"):
        with path.open("rb") as f:
            while f.read(16 << 20):
                pass


def peer(
    root: Path, program: Path, nbytes: int, installed: dict[str, str]
) -> tuple[dict[str, float], dict[str, float]]:
    """`msprobe compare` of dumps with tensors of the same shapes as ours, and `accprobe compare` of the same two."""
    import torch

    torch.manual_seed(0)
    for side in ("golden", "mine"):
        (root / side / "step0" / "proc1" / "dump_tensor_data").mkdir(parents=True)
    data: dict[str, Any] = {}
    written, i = 0, 0
    while written < nbytes:
        tap, cls, factor = TAPS[i % len(TAPS)]
        golden = torch.randn(512, int(1024 * factor))
        op = f"Module.model.layers.{i // len(TAPS)}.{tap}.{cls}.forward.0"
        file = f"{op}.output.0.pt"
        for side, value in (("golden", golden), ("mine", golden * (1 + 2**-9 * torch.randn_like(golden)))):
            torch.save(value.bfloat16(), root / side / "step0" / "proc1" / "dump_tensor_data" / file)
        about = {"type": "torch.Tensor", "dtype": "torch.bfloat16", "shape": list(golden.shape), "Max": 4.0,
                 "Min": -4.0, "Mean": 0.0, "Norm": 700.0, "requires_grad": False, "data_name": file}  # fmt: skip
        data[op] = {"input_args": [], "input_kwargs": {}, "output": [about]}
        written, i = written + golden.numel() * 2, i + 1
    for side in ("golden", "mine"):
        directory = root / side / "step0" / "proc1"
        text = {"task": "tensor", "level": "L0", "framework": "pytorch", "data": data,
                "dump_data_dir": str(directory / "dump_tensor_data")}  # fmt: skip
        (directory / "dump.json").write_text(json.dumps(text))
        (directory / "stack.json").write_text("{}")
        (directory / "construct.json").write_text("{}")
    steps = [str(root / side / "step0") for side in ("mine", "golden")]
    command = [str(program), "compare", "-tp", steps[0], "-gp", steps[1], "-o"]
    # It needs torch, which its own environment may lack.
    env = {"PYTHONPATH": str(Path(torch.__file__).parents[1])}
    theirs = summed([run([*command, str(root / "out")], env)], 2 * written / 1e9)
    if not list((root / "out").rglob("*.csv")):
        raise SystemExit("msprobe wrote no table")
    command = [
        sys.executable,
        "-m",
        "vllm_accprobe.cli",
        "compare",
        str(root / "golden"),
        str(root / "mine"),
        "--no-replay",
    ]
    rounds = [run([*command, "--out", str(root / f"ours{i}")], installed, root) for i in range(4)][1:]
    with (root / "ours1" / "compare.csv").open() as f:
        if sum(1 for _ in f) != i + 1:
            raise SystemExit(f"accprobe's table has not the {i} pairs of msprobe's dumps")
    shutil.rmtree(root)
    return theirs, summed(rounds, 2 * written / 1e9)


if __name__ == "__main__":
    main()
