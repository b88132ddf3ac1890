"""The part `disk` of scripts/soak.py: what breaks around the probe while a server answers.

The problem: a disk that fills up, turns read-only, has no inodes left or is slow, a tap that raises, numbers that are
all NaN, a clock that is set back: the probe may lose its capture, a request may not fail, and somebody must be able to
read why. The idea: a row of a table for each, with a file system of its own (a tmpfs, or ext4 in a file); the same
requests, one at a time, go to a server without the probe, and the answers must be the same.

The slow disk is the kernel's throttle of a control group on the loop device. A read-only disk is ext4 after
``mount -o remount,abort``, what the kernel does itself after an error. What happens inside the server (a tap that
raises, a clock) is planted by tests/support/forced, in time.time and time.time_ns alone. Needs root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file, save_file
from soak import ONE_THREAD, Ask, Bounds, Load, Row, plan, probed, read_back, size_of, vllm
from support.kernels import FORCED
from tiny_model import make
from vllm_server import Server

from vllm_accprobe.dump.reader import open_dump
from vllm_accprobe.gate.sending.client import NotServed

ASKS = 40
ALONE = ("--enforce-eager", "--max-num-seqs=1", "--no-enable-prefix-caching")
"""Each step computes one request, from its first token on: its numbers depend on nothing else."""
CGROUP = Path("/sys/fs/cgroup/blkio")
MINE = ("capture stopped", "the probe failed", "errcheck: NaN in", "(the disk did not take the rest")
"""What a line of ours that reports one of these has in it."""


def run(*words: object) -> str:
    """What a command prints. Raises CalledProcessError."""
    return subprocess.run([str(w) for w in words], check=True, capture_output=True, text=True).stdout.strip()


@dataclass
class Disk:
    """Where a dump goes. loop: the device below it, where there is one."""

    root: Path
    loop: str = ""


Place = Callable[[Path], "Iterator[Disk]"]


def tmpfs(options: str) -> Callable[[Path], Iterator[Disk]]:
    def mounted(root: Path) -> Iterator[Disk]:
        run("mount", "-t", "tmpfs", "-o", options, "tmpfs", root)
        try:
            yield Disk(root)
        finally:
            run("umount", "-l", root)

    return mounted


def ext4(root: Path) -> Iterator[Disk]:
    image = root.with_suffix(".ext4")
    with image.open("wb") as file:
        file.truncate(128 << 20)
    run("mkfs.ext4", "-q", image)
    loop = run("losetup", "-f", "--show", image)
    try:
        run("mount", loop, root)
        try:
            yield Disk(root, loop)
        finally:
            run("umount", "-l", root)
    finally:
        run("losetup", "-d", loop)
        image.unlink()


def plain(root: Path) -> Iterator[Disk]:
    yield Disk(root)


@contextmanager
def on(place: Callable[[Path], Iterator[Disk]], root: Path) -> Iterator[Disk]:
    root.mkdir()
    yield from place(root)


def fill_inodes(disk: Disk, server: Server) -> None:
    for number in range(10_000):
        try:
            (disk.root / f"fill-{number}").touch()
        except OSError:
            return
    raise RuntimeError("the inodes have no end")


def abort(disk: Disk, server: Server) -> None:
    run("mount", "-o", "remount,abort", disk.root)


def remove(disk: Disk, server: Server) -> None:
    shutil.rmtree(disk.root / "dump")


def set_back(disk: Disk, server: Server) -> None:
    (disk.root / "clock").touch()


def throttled(rate: int) -> Callable[[Disk, Server], None]:
    """The processes that this script has started write ``rate`` bytes a second to the disk."""

    def throttle(disk: Disk, server: Server) -> None:
        group, device = CGROUP / f"soak-{os.getpid()}", os.stat(disk.loop).st_rdev
        group.mkdir(exist_ok=True)
        (group / "blkio.throttle.write_bps_device").write_text(f"{os.major(device)}:{os.minor(device)} {rate}")
        for process in psutil.Process().children(recursive=True):
            (group / "cgroup.procs").write_text(str(process.pid))

    return throttle


@dataclass(frozen=True)
class Case:
    """What breaks. before: once the server answers; middle: after a third of the requests. line: what one line of the
    log must contain, "": there is none. stop: what the dump says of its early end, None: it is complete. gone: the disk
    took no last line, and all that the journal has is read nevertheless; size: the budget in bytes. refused: the server
    does not start, with this line. nan: the model's weights. planted: for tests/support/forced."""

    name: str
    place: Callable[[Path], Iterator[Disk]] = plain
    env: Mapping[str, str] = field(default_factory=dict)
    before: Callable[[Disk, Server], None] | None = None
    middle: Callable[[Disk, Server], None] | None = None
    line: str = ""
    stop: str | None = None
    gone: bool = False
    size: int = 0
    refused: str = ""
    nan: bool = False
    planted: str = ""


PATHS = os.pathsep.join([str(FORCED), *filter(None, [os.environ.get("PYTHONPATH")])])
CASES = (
    Case("disk full", tmpfs("size=5m"), line="disk full", stop="disk full"),
    Case("disk full before the first request", tmpfs("size=1200k"), line="disk full", stop="disk full"),
    Case("no inodes", tmpfs("nr_inodes=64"), before=fill_inodes, line="disk full at segment 0", stop="disk full"),
    Case("read-only at the start", tmpfs("size=5m,ro"), refused="Read-only file system"),
    Case("read-only while it serves", ext4, middle=abort, line="Read-only file system", gone=True),
    Case("slow disk, 2 MB a second", ext4, before=throttled(2_000_000)),
    Case("slow disk, 0.3 MB a second", ext4, before=throttled(300_000), line="the disk did not take the rest",
         gone=True),
    Case("dump removed while it serves", middle=remove, gone=True),
    Case("budget spent", env={"VLLM_ACCPROBE_MAX_GB": "0.004"}, line="budget of 4000000 bytes spent",
         stop="budget of 4000000 bytes spent", size=4_000_000),
    Case("a tap that raises", planted="ACCPROBE_TEST_RAISES=3000", line="planted in the probe",
         stop="planted in the probe"),
    Case("storm of NaN", nan=True),
    Case("storm of NaN under errcheck", env={"VLLM_ACCPROBE": "0", "VLLM_ACCPROBE_ERRCHECK": "overflow,nan"},
         line="errcheck: NaN in model.embed_tokens", nan=True, gone=True),
    Case("clock set back a day", planted="ACCPROBE_TEST_CLOCK={root}/clock", middle=set_back),
)  # fmt: skip


def rows(bounds: Bounds) -> list[Row]:
    """A row for each case; one that time was too short for is not in the table."""
    found = []
    models = {nan: make("qwen2", bounds.work / f"model-{nan}") for nan in (False, True)}
    weights = load_file(models[True] / "model.safetensors")
    weights["model.embed_tokens.weight"] = torch.full_like(weights["model.embed_tokens.weight"], float("nan"))
    save_file(weights, models[True] / "model.safetensors", metadata={"format": "pt"})
    with vllm(bounds) as program:
        bare = {nan: _bare(bounds, model, program, nan) for nan, model in models.items()}
        for case in CASES:
            if time.monotonic() > bounds.until or not fnmatchcase(case.name, bounds.only):
                continue
            try:
                found.append(_row(bounds, case, models[case.nan], program, bare[case.nan]))
            except Exception as error:
                found.append(Row("disk", case.name, "", 1, f"{type(error).__name__}: {error}"))
            bounds.say(f"{case.name}: {found[-1].failures} failures; {found[-1].note}")
    for group in CGROUP.glob(f"soak-{os.getpid()}"):
        group.rmdir()
    return found


def _bare(bounds: Bounds, model: Path, program: Path, nan: bool) -> Load:
    load = Load()
    with Server(model, log=bounds.work / f"bare-{nan}.log", env=ONE_THREAD, args=ALONE, vllm=program) as server:
        load.send(server, _asks(bounds, nan))
    if load.failed:
        raise RuntimeError(f"without the probe: {load.failed[0]}")
    return load


def _asks(bounds: Bounds, nan: bool) -> list[Ask]:
    """Without log-probabilities where they are NaN, which vLLM's JSON cannot say."""
    return [replace(ask, top=0 if nan else ask.top) for ask in plan(bounds.seed, 0, ASKS, aborted=False)]


def _row(bounds: Bounds, case: Case, model: Path, program: Path, bare: Load) -> Row:
    name = case.name.replace(" ", "-")
    log, load, wrong, notes = bounds.work / f"{name}.log", Load(), list[str](), list[str]()
    with ExitStack() as stack:
        disk = stack.enter_context(on(case.place, bounds.work / name))
        dump = disk.root / "dump"
        env = probed(dump, PARTS="input,output") | ONE_THREAD | case.env
        if case.planted:
            variable, _, value = case.planted.format(root=disk.root).partition("=")
            env[variable] = value
            program = stack.enter_context(vllm(bounds, f"vllm-{variable}", {"PYTHONPATH": PATHS, variable: value}))
        try:
            with Server(model, log=log, env=env, args=ALONE, vllm=program) as server:
                if case.before is not None:
                    case.before(disk, server)
                asks = _asks(bounds, case.nan)
                load.send(server, asks[: ASKS // 3])
                if case.middle is not None:
                    case.middle(disk, server)
                load.send(server, asks[ASKS // 3 :])
        except NotServed as error:
            if not case.refused:
                raise
            if case.refused not in str(error):
                wrong.append(f"refused otherwise: {error}")
        said = [line.partition("accprobe: ")[2] for line in log.read_text(errors="replace").splitlines()]
        wrong += load.failed
        wrong += [f"{key} has another answer" for key, text in load.answers.items() if bare.answers.get(key) != text]
        if not case.refused and len(load.answers) != ASKS:
            wrong.append(f"{len(load.answers)} of {ASKS} requests have an answer")
        if "/vllm_accprobe/" in log.read_text(errors="replace"):  # vLLM's own end has tracebacks
            wrong.append(f"a traceback through the probe in {log}")
        lines = [line for line in said if any(word in line for word in MINE)]
        if (len(lines) != 1 or case.line not in lines[0]) if case.line else (lines and not case.gone):
            wrong.append(f"lines in the log: {lines or 'none'}")
        notes += lines[:1]
        if case.refused:
            notes.append(case.refused)
        elif not case.gone or (dump / "rank0000").is_dir():
            wrong += _dump(case, dump, notes)
    return Row("disk", case.name, f"{len(load.answers)} requests", len(wrong), "; ".join(notes + wrong[:2]))


def _dump(case: Case, dump: Path, notes: list[str]) -> list[str]:
    tensors, problems, _ = read_back(dump)
    stops = [stop.reason for stop in open_dump(dump).stops.values()]
    notes.append(f"{tensors} tensors read")
    allowed = ("stopped early", "not closed", "torn") if case.gone else ("stopped early",)
    wrong = [p for p in problems if not any(word in p for word in allowed)]
    if not case.gone and (any(case.stop not in stop for stop in stops) or len(stops) != 1 if case.stop else stops):
        wrong.append(f"the dump says {stops}")
    if case.size and size_of(dump) > case.size + (2 << 20):
        wrong.append(f"the dump has {size_of(dump)} bytes")
    return wrong
