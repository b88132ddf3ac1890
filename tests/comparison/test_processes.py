"""Processes of this machine measure what the command compares; one is killed midway, or all are."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from synthetic_model import capture, scaled, write

from vllm_accprobe import cli
from vllm_accprobe.comparison import distributed
from vllm_accprobe.comparison.distributed import LOST
from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.comparison.result import CompareError, Comparison
from vllm_accprobe.formats import open_dump
from vllm_accprobe.report.table import write_csv


@pytest.fixture
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit a task: there is something left to do when one is killed."""
    monkeypatch.setattr(distributed.measure_by, "__defaults__", (1,))


def same(one: Comparison, other: Comparison, root: Path) -> None:
    """To the last digit: the table, and all that programs read."""
    for name, result in (("one", one), ("other", other)):
        write_csv(result, root / f"{name}.csv")
        (root / f"{name}.json").write_text(json.dumps(result.to_json()))
    for kind in ("csv", "json"):
        assert (root / f"one.{kind}").read_bytes() == (root / f"other.{kind}").read_bytes()


def children() -> list[int]:
    """Our worker processes."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:
                continue
            if b"vllm_accprobe.comparison.worker" in words and int(parent) == os.getpid():
                found.append(int(entry.name))
    return found


@contextmanager
def killing(most: int) -> Iterator[list[int]]:
    """Kills our workers as soon as they are there, at most so many."""
    killed: list[int] = []
    over = threading.Event()

    def kill() -> None:
        while not over.is_set() and len(killed) < most:
            for pid in set(children()) - set(killed):
                if len(killed) < most:
                    with suppress(ProcessLookupError):  # it ended by itself since it was seen
                        os.kill(pid, signal.SIGKILL)
                        killed.append(pid)
            time.sleep(0.01)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


@pytest.mark.usefixtures("small_tasks")
def test_a_killed_process_is_made_good(dumps: tuple[Path, Path], tmp_path: Path) -> None:
    with killing(2) as killed:
        spread = compare(*dumps, jobs=2)
    assert len(killed) == 2
    same(compare(*dumps), spread, tmp_path)


@pytest.mark.usefixtures("small_tasks")
def test_who_kills_them_all_is_told_so_in_a_line(dumps: tuple[Path, Path]) -> None:
    said = rf"^processes of --jobs died {LOST + 1} times over one task; the last one was killed by SIGKILL"
    with killing(1 << 30), pytest.raises(CompareError, match=said):
        compare(*dumps, jobs=2)
    assert children() == []


def test_what_cannot_be_read_is_named_as_it_is_by_one_process(dumps: tuple[Path, Path], tmp_path: Path) -> None:
    """What a process finds damaged inside a file has to reach the command."""
    mine = write(capture(chunk=4, faults={"model.layers.1.mlp.down_proj": scaled(1.1)}), tmp_path / "mine")
    opened = [open_dump(mine) for _ in range(2)]
    payloads = [r.payload for r in opened[0].records if r.payload is not None]
    ((key, data),) = opened[0].data.items()
    assert key == (0, 0)
    os.truncate(data.path, data.start + payloads[len(payloads) // 2].off)
    near, far = compare(dumps[0], opened[0]), compare(dumps[0], opened[1], jobs=2)
    assert any("has become shorter" in p for p in opened[1].problems)
    assert opened[0].unread == opened[1].unread
    same(near, far, tmp_path)


def test_another_tools_dumps_are_opened_again(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for side in ("golden", "mine"):
        (tmp_path / side).mkdir()
    for i in range(5):
        value = rng.standard_normal((6, 8)).astype(np.float32)
        np.save(tmp_path / "golden" / f"layer{i}.npy", value)
        np.save(tmp_path / "mine" / f"layer{i}.npy", value * (1.0 if i < 3 else 1.5))
    golden, mine = tmp_path / "golden", tmp_path / "mine"
    spread = compare(golden, mine, jobs=2)
    same(compare(golden, mine), spread, tmp_path)
    assert sum(p.status == "fail" for p in spread.pairs) == 2


def test_another_tools_dump_that_changed_meanwhile_is_refused(tmp_path: Path) -> None:
    for side in ("golden", "mine"):
        (tmp_path / side).mkdir()
        for name in "ab":
            np.save(tmp_path / side / f"{name}.npy", np.ones(4, np.float32))
    opened = open_dump(tmp_path / "mine")
    np.save(tmp_path / "mine" / "a.npy", np.ones(5, np.float32))
    with pytest.raises(CompareError, match=r"mine has changed since it was opened$"):
        compare(tmp_path / "golden", opened, jobs=1)


def test_the_command(dumps: tuple[Path, Path], tmp_path: Path) -> None:
    sheets = []
    for jobs in ("0", "2"):
        words = ["compare", *map(str, dumps), "--no-replay", "--jobs", jobs, "--out", str(tmp_path / jobs)]
        assert cli.main(words) == 1
        sheets.append((tmp_path / jobs / "compare.csv").read_bytes())
    assert sheets[0] == sheets[1]


def test_not_both(dumps: tuple[Path, Path]) -> None:
    with pytest.raises(CompareError, match=r"--ray\) or a number of processes here \(--jobs\), not both$"):
        compare(*dumps, jobs=2, ray="auto")
