"""How fast other tools' dumps are read, against the libraries that wrote them.

    python benchmarks/bench_formats.py [--dir DIR] [--files 1200] [--kb 4 64 1024] [--rounds 5] [--json FILE]

Writes an msprobe dump of FILES tensors of KB kilobytes each with torch.save, and the same tensors into one HDF5 file
with h5py as torch_xray lays it out (float32 for bfloat16). Then reads all tensors of either, warm from the page cache:
ours from opening the dump, indices and names included, to the last payload as an array; against torch.load
(weights_only) of the same 1,200 files alone, and against h5py reading the same datasets alone. MB/s of CPU time and of
wall time, best of the rounds, and the ratio to the library. One thread each.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--files", type=int, default=1200)
    parser.add_argument("--kb", type=int, nargs="+", default=[4, 64, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    for kb in options.kb:
        root = Path(tempfile.mkdtemp(prefix="bench_formats", dir=options.dir))
        try:
            results += measure(root, options.files, kb, options.rounds)
        finally:
            shutil.rmtree(root)
    for r in results:
        print(f"{r['what']:10} {r['kb']:6} kB x {r['files']}: {r['ours']:8.0f} MB/s CPU, {r['library']} alone "
              f"{r['theirs']:8.0f}: ratio {r['ratio']:.2f} (wall {r['wall_ratio']:.2f})")  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def measure(root: Path, files: int, kb: int, rounds: int) -> list[dict[str, Any]]:
    import h5py
    import torch

    from vllm_accprobe.formats import open_dump

    torch.set_num_threads(1)
    msprobe, h5 = root / "msprobe", root / "xray.h5"
    write(msprobe, h5, files, kb)
    paths = sorted(msprobe.glob("step0/rank0/dump_tensor_data/*.pt"))

    def ours(path: Path) -> int:
        dump = open_dump(path)
        return sum(dump.read(r).nbytes for r in dump.records)

    def by_torch() -> int:
        return sum(torch.load(p, weights_only=True).nbytes for p in paths)

    def by_h5py() -> int:
        with h5py.File(h5, "r", track_order=True) as f:
            return sum(d[()].nbytes for group in f.values() for d in group.values())

    pairs: list[tuple[str, str, Callable[[], int], Callable[[], int]]] = [
        ("msprobe", "torch.load", lambda: ours(msprobe), by_torch),
        ("HDF5", "h5py", lambda: ours(h5), by_h5py),
    ]
    results = []
    for what, library, own, other in pairs:
        assert own() == other()
        cpu, wall = [], []
        for _ in range(rounds):  # by turns, so that both meet the same neighbours
            for function in (own, other):
                start = time.process_time(), time.perf_counter()
                nbytes = function()
                cpu.append(time.process_time() - start[0])
                wall.append(time.perf_counter() - start[1])
        a, b = min(cpu[::2]), min(cpu[1::2])
        results.append({
            "what": what, "library": library, "kb": kb, "files": files, "ours": nbytes / a / 1e6,
            "theirs": nbytes / b / 1e6, "ratio": b / a, "wall_ratio": min(wall[1::2]) / min(wall[::2]),
        })  # fmt: skip
    return results


def write(msprobe: Path, h5: Path, files: int, kb: int) -> None:
    import h5py
    import torch

    data_dir = msprobe / "step0" / "rank0" / "dump_tensor_data"
    data_dir.mkdir(parents=True)
    data: dict[str, Any] = {}
    shape = (8, kb * 64)
    with h5py.File(h5, "w", track_order=True) as f:
        group = f.create_group("0", track_order=True)
        for i in range(files // 2):
            key = f"Module.layers.{i}.Linear.forward.0"
            infos = []
            for kind in ("input", "output"):
                value = torch.randn(shape).bfloat16()
                name = f"{key}.{kind}.0.pt"
                torch.save(value, data_dir / name)
                infos.append({"type": "torch.Tensor", "dtype": "torch.bfloat16", "shape": list(shape), "Max": 1.0,
                              "Min": -1.0, "Mean": 0.0, "Norm": 1.0, "data_name": name})  # fmt: skip
                group[f"layers.{i}.Linear.0.forward_{kind}.0"] = value.float().numpy()
            data[key] = {"input_args": infos[:1], "input_kwargs": {}, "output": infos[1:]}
    rank = msprobe / "step0" / "rank0"
    (rank / "dump.json").write_text(json.dumps({"task": "tensor", "level": "L0", "framework": "pytorch", "data": data}))
    (rank / "construct.json").write_text(json.dumps(dict.fromkeys(data)))


if __name__ == "__main__":
    main()
