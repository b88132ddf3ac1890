"""How fast `accprobe opcheck` checks, what its processes are worth, and that a killed run ends with the same csv.

    python benchmarks/bench_opcheck.py [--calls 2000] [--width 1024] [--rows 160 | --decode] [--rounds 5] [--dump DUMP]

A dense decoder of transformers (bfloat16, made up, nothing is fetched) is captured with all its module and operator
calls by `Probe(model, ops=True)`; with --decode the modules alone of a decoder's steps of a few rows
(decode_dump.py); with --dump another dump is taken. Then, in turn within each round and each a process
of its own with one thread of torch, start-up included:

- plain: a loop that opens the dump, makes each captured `aten` call again in float64 and takes its largest error,
  relative L2 and cosine, with numbers printed nowhere: what one writes in ten lines;
- aten: `opcheck --ops 'aten.*' -j 1`, the same calls with all measures, floors, verdicts and the csv;
- j1, j2: `opcheck -j 1` and `-j 2`, all calls;
- idle: `opcheck -j 1` of one call: the start alone.

Of a dump without operators the first two are left out.

At last `opcheck -j 2` is killed (SIGKILL, the parent alone) when half of the rows are written, and run again with
--resume. Quoted are medians, and medians of ratios within a round, by the clock and, since the machine may be shared,
by the processor seconds of the process that used most.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

KINDS = ("plain", "aten", "j1", "j2", "idle")
OF_OPERATORS = KINDS[:2]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=160)
    parser.add_argument("--decode", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dump", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plain", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plain is not None:
        plain(options.plain)
        return
    root = Path(tempfile.mkdtemp(prefix="accprobe-bench-"))
    try:
        if options.decode:
            from decode_dump import written

            dump = written(root / "dump", options.calls, options.width)
        else:
            dump = options.dump or captured(root / "dump", options.calls, options.width, options.rows)
        result = measure(root, dump, options.rounds)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    for line in report(result):
        print(line)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


def captured(root: Path, calls: int, width: int, rows: int) -> Path:
    """A dump of about so many calls: as many forwards as that takes, each of ``rows`` tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from vllm_accprobe import Probe
    from vllm_accprobe.formats import open_dump
    from vllm_accprobe.opcheck.calls.records import Calls

    config = LlamaConfig(
        vocab_size=2000, hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=3,
        num_attention_heads=width // 64, num_key_value_heads=width // 128, max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).bfloat16().eval()

    def forwards(place: Path, n: int) -> int:
        with torch.no_grad(), Probe(model, dir=str(place), ops=True, ops_mode="full", max_gb=50):
            for k in range(n):
                model(torch.randint(0, 2000, (1, rows), generator=torch.Generator().manual_seed(k)), use_cache=False)
        found = Calls(open_dump(place), None)
        return sum(len(list(steps)) for steps in (*found.by_tap.values(), *found.ops.values()))

    per = forwards(root / "one", 1)
    shutil.rmtree(root / "one")
    forwards(root / "all", -(-calls // per))
    return root / "all"


def measure(root: Path, dump: Path, rounds: int) -> dict[str, Any]:
    operators = any(b'"event":"op"' in path.read_bytes() for path in dump.glob("rank*/journal.jsonl"))
    times: dict[str, list[tuple[float, float]]] = {k: [] for k in KINDS if operators or k not in OF_OPERATORS}
    for _ in range(rounds):
        for kind in times:
            times[kind].append(run(command(kind, dump, root / kind)))
    rows = (root / "j1" / "opcheck.csv").read_text().splitlines()[1:]
    same = (root / "j1" / "opcheck.csv").read_bytes() == (root / "j2" / "opcheck.csv").read_bytes()
    return {
        "times_s": times, "rows": len(rows), "all_calls": counted(root / "j1"),
        "aten_calls": counted(root / "aten") if operators else 0,
        "j2_same": same, "resumed": killed(root, dump),
    }  # fmt: skip


def counted(out: Path) -> int:
    """Calls that were checked, by the columns of opcheck.csv that tell one call from another."""
    import csv

    with (out / "opcheck.csv").open(newline="", encoding="utf-8") as f:
        return len({(r["tap"], r["rank"], r["step"], r["call"]) for r in csv.DictReader(f) if r["status"] != "skip"})


def command(kind: str, dump: Path, out: Path) -> list[str]:
    if kind == "plain":
        return [sys.executable, __file__, "--plain", str(dump)]
    more = {"aten": ["--ops", "aten.*", "-j", "1"], "j1": ["-j", "1"], "j2": ["-j", "2"],
            "idle": ["--ids", "0.0.0", "-j", "1"]}[kind]  # fmt: skip
    return [sys.executable, "-m", "vllm_accprobe.cli", "opcheck", str(dump), "--out", str(out), *more]


def run(what: list[str]) -> tuple[float, float]:
    """Seconds by the clock, and processor seconds of whichever of its processes used most: what the clock would show if
    each process had a core for itself."""
    start = time.perf_counter()
    process = subprocess.Popen(what, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    used: dict[int, float] = {}
    while process.poll() is None:
        for pid in (process.pid, *children(process.pid)):
            used[pid] = processor_seconds(pid) or used.get(pid, 0.0)
        time.sleep(0.05)
    if process.returncode not in (0, 1, 3):
        said = process.stderr.read()[-500:] if process.stderr else ""
        raise SystemExit(f"{' '.join(what)} ended with {process.returncode}: {said}")
    return time.perf_counter() - start, max(used.values())


def children(pid: int) -> list[int]:
    try:
        return [int(p) for t in Path(f"/proc/{pid}/task").iterdir() for p in (t / "children").read_text().split()]
    except OSError:
        return []


def processor_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def killed(root: Path, dump: Path) -> dict[str, Any]:
    """A run that is killed at half, and resumed."""
    straight = (root / "j2" / "opcheck.csv").read_bytes()
    out = root / "killed"
    process = subprocess.Popen(command("j2", dump, out), env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    part = out / "opcheck.csv.part"
    while process.poll() is None and not (part.exists() and part.stat().st_size > len(straight) // 2):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = part.stat().st_size / len(straight) if part.exists() else 1.0
    seconds, _ = run([*command("j2", dump, out), "--resume"])
    return {"kept": kept, "seconds": seconds, "same": (out / "opcheck.csv").read_bytes() == straight}


def plain(dump: Path) -> None:
    """The loop that opcheck is measured against."""
    import torch

    from vllm_accprobe.dump.reader import open_dump

    torch.set_num_threads(1)
    opened = open_dump(dump)
    records = {(r.step, r.tap, r.call, r.role): r for r in opened.records}
    params = {f"{r.tap}/{r.role}": r for r in opened.records if r.step is None}
    cache: dict[str, Any] = {}

    def tensor(record: Any) -> Any:
        bits = torch.from_numpy(opened.read(record).copy().reshape(-1).view("u1"))
        value = bits.view(getattr(torch, record.dtype)).view(record.shape)
        return value.double() if value.is_floating_point() else value

    def argument(call: Any, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if "list" in value:
            return [argument(call, v) for v in value["list"]]
        if "float" in value:
            return float(value["float"])
        if "tensor" in value:
            t = value["tensor"]
            if t.get("param"):
                name = t["param"]
                if name not in cache:
                    cache[name] = tensor(params[name])
                return cache[name].as_strided(t["shape"], t["stride"]) if "stride" in t else cache[name]
            return tensor(records[call.step, call.tap, call.call, t["role"]])
        if "dtype" in value:
            return torch.float64 if getattr(torch, value["dtype"]).is_floating_point else getattr(torch, value["dtype"])
        raise LookupError(str(value))

    checked = missed = 0
    for call in opened.ops:
        if not call.op.startswith("aten."):
            continue
        _, name, overload = call.op.split(".")
        try:
            args = [argument(call, v) for v in call.args]
            kwargs = {k: argument(call, v) for k, v in call.kwargs.items()}
            result = getattr(getattr(torch.ops.aten, name), overload)(*args, **kwargs)
            for k, exact in enumerate(result if isinstance(result, (tuple, list)) else [result]):
                record = records.get((call.step, call.tap, call.call, f"output.{k}"))
                if record is None or not isinstance(exact, torch.Tensor):
                    continue
                mine = tensor(record).double().reshape(-1)
                exact = exact.double().reshape(-1)
                error = mine - exact
                float(error.abs().max()), float(error.norm() / exact.norm()), float(exact @ mine)
                float(exact.norm() * mine.norm())
            checked += 1
        except (LookupError, RuntimeError, TypeError, AttributeError):
            missed += 1
    print(json.dumps({"checked": checked, "missed": missed}))


def report(result: dict[str, Any]) -> list[str]:
    both = result["times_s"]
    clock, used = ({k: statistics.median(t[i] for t in v) for k, v in both.items()} for i in (0, 1))

    def ratio(a: str, b: str) -> str:
        by = [statistics.median(x[i] / y[i] for x, y in zip(both[a], both[b], strict=True)) for i in (0, 1)]
        return f"{by[0]:.2f} times by the clock, {by[1]:.2f} by the processor"

    def said(kind: str) -> str:
        return f"{clock[kind]:.1f} s (processor {used[kind]:.1f} s)"

    n, again = result["all_calls"], result["resumed"]
    lines = [
        f"{n:,} calls checked, {result['rows']:,} rows; the start alone {said('idle')}",
        f"-j 1: {said('j1')}: {n / used['j1']:.0f} calls a processor second",
        f"-j 2: {said('j2')}: {n / clock['j2']:.0f} calls a second; -j 1 over -j 2: {ratio('j1', 'j2')}; same csv: "
        f"{'yes' if result['j2_same'] else 'NO'}",
    ]
    if "aten" in both:
        lines.append(f"{result['aten_calls']:,} aten calls: opcheck {said('aten')}, plain loop {said('plain')}: "
                     f"{ratio('aten', 'plain')}")  # fmt: skip
    return [
        *lines,
        f"killed when {again['kept']:.0%} was written: --resume took {again['seconds']:.1f} s; same csv: "
        f"{'yes' if again['same'] else 'NO'}",
    ]


if __name__ == "__main__":
    main()
