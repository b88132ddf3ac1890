"""A large pair of dumps of 8 ranks, compared by one process, by ``--jobs`` and by Ray on two nodes of this machine.

The problem: whoever compares dumps of many machines has to know whether memory stays flat, whether time grows with the
bytes alone, and what becomes of a comparison one of whose workers is killed. The idea: two dumps of N / 2 GB and two of
N GB (big_dumps.py, every rank with its columns of every tensor, none equal) are compared by the real command in each
mode, all modes in turn within a round; the ratio of times is a round's own, and the median over rounds is shown. Peak
memory is the sum of what all processes of a comparison have at one time (resident, so that a page of a library counts
once for each), sampled each 50 ms; Ray's own daemons are not in it. Then each mode is killed once, a worker where
there are some, else the command, which is given again; every table has to be the first one's byte for byte.
Without Ray (pip install 'vllm-accprobe[ray]') that mode is left out, and said to be.

    python benchmarks/bench_cluster.py --dir /some/disk [--gb 10] [--rounds 3] [--json]

Needs four times N GB of disk, and Linux (/proc).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_compare import touch
from big_dumps import write_pair

RANKS = 8
JOBS = 2
WORKERS = (b"vllm_accprobe.comparison.worker", b"ray::Station")
ONE, BY_JOBS, BY_RAY = "one process", f"--jobs {JOBS}", "--ray, two nodes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("."))
    parser.add_argument("--gb", type=float, default=1.0, help="of each of the larger dumps")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="accprobe-bench-", dir=asked.dir) as name:
        root = Path(name)
        # As installed: a process that may not keep its compiled modules would compile them each time.
        os.environ.update(PYTHONDONTWRITEBYTECODE="", PYTHONPYCACHEPREFIX=str(root / "pycache"))
        with ProcessPoolExecutor(1) as writer:  # its memory goes with it
            pairs = [
                writer.submit(
                    write_pair, root / f"{k}", int(asked.gb * 1e9 * k / 2), rows=2048, hidden=2048, ranks=RANKS
                )
                for k in (1, 2)
            ]
            half, whole = (p.result() for p in pairs)
        with two_nodes() as address:
            modes: dict[str, list[str]] = {ONE: [], BY_JOBS: ["--jobs", str(JOBS)]}
            if address:
                modes[BY_RAY] = ["--ray", address]
            report = measured(root, half, whole, modes, asked.rounds)
            report["killed"] = {m: killed(root, whole, words, m == ONE) for m, words in modes.items()}
        report["ray"] = bool(address)
    print(json.dumps(report, indent=1) if asked.json else told(report, asked.gb))


@dataclass
class Run:
    """One comparison. wall, cpu: seconds; peak: bytes, of all its processes together; killed: how many workers were."""

    wall: float
    cpu: float
    peak: int
    table: bytes
    killed: int = 0


@dataclass
class Watch:
    """What the processes of a comparison have, until it has ended."""

    root: int
    kill_after: float | None = None
    peak: int = 0
    cpu: dict[int, float] = field(default_factory=dict)
    killed: list[int] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        begin = time.monotonic()
        while not self.over.wait(0.05):
            found = processes()
            workers = [p for p, (_, words) in found.items() if any(w in words for w in WORKERS)]
            ours = {*descendants(self.root, found), *workers}
            self.peak = max(self.peak, sum(map(resident, ours)))
            self.cpu.update({p: seconds for p in ours if (seconds := spent(p)) is not None})
            if self.kill_after is not None and not self.killed and time.monotonic() - begin > self.kill_after:
                for pid in workers[:1]:
                    os.kill(pid, signal.SIGKILL)
                    self.killed.append(pid)


def measured(
    root: Path, half: Sequence[Path], whole: Sequence[Path], modes: dict[str, list[str]], rounds: int
) -> dict[str, Any]:
    runs: dict[tuple[str, str], list[Run]] = {}
    for i in range(rounds + 1):
        for size, pair in (("half", half), ("whole", whole))[: 1 + bool(i)]:
            touch(pair[0].parent)
            for mode, words in modes.items():
                run = compared(pair, words, root / f"{size}-{i}-{len(runs)}-{mode.strip('-').split()[0]}")
                if i:  # the first compiles what is kept
                    runs.setdefault((size, mode), []).append(run)
    for size in ("half", "whole"):
        if len({r.table for mode in modes for r in runs[size, mode]}) > 1:
            raise SystemExit(f"{size}: the modes' tables differ")
    report: dict[str, Any] = {}
    for mode in modes:
        both = list(zip(runs["half", mode], runs["whole", mode], strict=True))
        to_one = [o.wall / w.wall for o, w in zip(runs["whole", ONE], runs["whole", mode], strict=True)]
        report[mode] = {
            "wall_s": statistics.median(r.wall for r in runs["whole", mode]),
            "cpu_s": statistics.median(r.cpu for r in runs["whole", mode]),
            "times_one_process": statistics.median(to_one),
            "whole_to_half": statistics.median(w.wall / h.wall for h, w in both),
            "whole_to_half_cpu": statistics.median(w.cpu / h.cpu for h, w in both),
            "peak_gb_half": max(r.peak for r in runs["half", mode]) / 1e9,
            "peak_gb_whole": max(r.peak for r in runs["whole", mode]) / 1e9,
        }
    return report


def killed(root: Path, pair: Sequence[Path], words: list[str], command: bool) -> dict[str, Any]:
    """One is killed in the middle. command: the command itself, which then goes on where it was."""
    out = root / f"killed-{'-'.join(words).strip('-').replace('/', '_')[:12]}"
    clean = compared(pair, words, root / f"{out.name}-clean")
    if not command:
        run = compared(pair, words, out, kill_after=0.4 * clean.wall)
        return {"workers_killed": run.killed, "same_table": run.table == clean.table, "to_clean": run.wall / clean.wall}
    child = subprocess.Popen(line(pair, words, out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(0.7 * clean.wall)
    child.kill()
    child.wait()
    kept = (out / "measured.part").exists()
    again = compared(pair, words, out)
    return {"workers_killed": 0, "same_table": again.table == clean.table, "went_on": kept,
            "to_clean": again.wall / clean.wall}  # fmt: skip


def line(pair: Sequence[Path], words: Sequence[str], out: Path) -> list[str]:
    return [sys.executable, "-m", "vllm_accprobe", "compare", *map(str, pair), "--no-replay", *words, "--out", str(out)]


def compared(pair: Sequence[Path], words: Sequence[str], out: Path, kill_after: float | None = None) -> Run:
    begin = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(line(pair, words, out), stdout=said, stderr=said)
        watch = Watch(child.pid, kill_after)
        thread = threading.Thread(target=watch.run)
        thread.start()
        code = child.wait()
        wall = time.perf_counter() - begin
        watch.over.set()
        thread.join()
        if code not in (0, 1):
            said.seek(0)
            raise SystemExit(f"{' '.join(words) or ONE} failed: {said.read()[-2000:].decode(errors='replace')}")
    return Run(wall, sum(watch.cpu.values()), watch.peak, (out / "compare.csv").read_bytes(), len(watch.killed))


def processes() -> dict[int, tuple[int, bytes]]:
    """{pid: (parent, command line)} of this machine."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                parent = Path("/proc", entry, "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
                found[int(entry)] = int(parent), Path("/proc", entry, "cmdline").read_bytes()
            except (OSError, IndexError):
                continue
    return {p: one for p, one in found.items() if p in descendants(os.getpid(), found)}


def descendants(root: int, found: dict[int, tuple[int, bytes]]) -> set[int]:
    """With the root."""
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in found.items():
        children.setdefault(parent, []).append(pid)
    out, left = set(), [root]
    while left:
        pid = left.pop()
        if pid not in out:
            out.add(pid)
            left += children.get(pid, [])
    return out


def resident(pid: int) -> int:
    try:
        return int(Path("/proc", str(pid), "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def spent(pid: int) -> float | None:
    """CPU seconds; None where it has gone."""
    try:
        fields = Path("/proc", str(pid), "stat").read_text(errors="replace").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):
        return None


@contextmanager
def two_nodes() -> Iterator[str]:
    """The address of a Ray cluster of two nodes with a processor each; "" without Ray."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        from ray.cluster_utils import Cluster
    except ImportError:
        yield ""
        return
    node = {"num_cpus": 1, "object_store_memory": 100 << 20}
    two = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    two.add_node(**node)
    try:
        yield str(two.address)
    finally:
        two.shutdown()


def told(report: dict[str, Any], gb: float) -> str:
    lines = [f"two dumps of {gb:g} GB each, {RANKS} ranks; tables are alike in all modes"]
    if not report["ray"]:
        lines.append("Ray is not installed: left out")
    for mode, end in report["killed"].items():
        r = report[mode]
        who = "the command was killed and given again" if mode == ONE else f"workers killed: {end['workers_killed']}"
        lines += [
            f"{mode}: {r['wall_s']:.2f} s, CPU {r['cpu_s']:.2f} s; {r['times_one_process']:.2f} times as fast as {ONE}",
            f"    {gb:g} GB take {r['whole_to_half']:.2f} times as long as {gb / 2:g} GB "
            f"(CPU {r['whole_to_half_cpu']:.2f}), memory {r['peak_gb_half']:.2f} GB -> {r['peak_gb_whole']:.2f} GB",
            f"    {who}; the table is {'the same' if end['same_table'] else 'ANOTHER'}, after {end['to_clean']:.2f} "
            "of the time" + ("" if end.get("went_on", True) else " (nothing had been kept yet)"),
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
