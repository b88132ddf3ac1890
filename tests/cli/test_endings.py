"""Ctrl-C in real processes: one line with what was kept and the words that go on, exit code 130, no process left."""

import csv
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.test_killed_commands import marked, names, until
from cli_dumps import make
from opcheck.layer_dumps import build
from opcheck.proof.test_replay_process import GAIN, dump
from support.interrupts import in_the_foreground

from vllm_accprobe.cli import endings, main
from vllm_accprobe.cli.endings import insisting

RUN = "import sys, time\nfrom vllm_accprobe.cli import main\n{}\nsys.exit(main())\n"
SLOW = {
    "compare": """
from vllm_accprobe.comparison.measure import measurer as workers
from vllm_accprobe.comparison import store as resume
workers._MOST, resume.PATIENCE = 2, 0.0
real = workers.UnitMeasurer.measure
def slow(self, units):
    time.sleep(0.2 * len(units))
    return real(self, units)
workers.UnitMeasurer.measure = slow
""",
    "opcheck": """
from vllm_accprobe.opcheck.run import process_pool
real = process_pool.Team.check
def slow(self, taps):
    for rows in real(self, taps):
        yield rows
        time.sleep(1.0)
process_pool.Team.check = slow
""",
    "convert": """
from vllm_accprobe.formats.io import containers
real = containers.write_npz
def slow(dump, records, path, tick):
    if records[0].rank:
        time.sleep(600)
    return real(dump, records, path, tick)
containers.write_npz = slow
""",
    "gentest": """
from vllm_accprobe.opcheck.kit import testgen
real = testgen.write_case
def slow(captured, references, directory, number, *more):
    if number:
        time.sleep(600)
    return real(captured, references, directory, number, *more)
testgen.write_case = slow
""",
}


def stopped(words: list[str], ready: Callable[[], object], cwd: Path, whole_group: bool = True) -> list[str]:
    """Lines on stderr of a command that is sent SIGINT, as a terminal does to the whole group, when it is ``ready``."""
    mark = f"kept-{words[0]}-{os.getpid()}-{time.monotonic_ns()}"
    process = subprocess.Popen(
        [sys.executable, "-c", RUN.format(SLOW[words[0]]), *words], env={**os.environ, "ACCPROBE_TEST_MARK": mark},
        cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=in_the_foreground,
    )  # fmt: skip
    try:
        assert until(ready, 120)
        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 130, said
        assert until(lambda: not marked(mark), 10), names(marked(mark))
    finally:
        process.kill()
        process.wait()
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)
    return said.splitlines()


def again(line: str, before: str) -> list[str]:
    """The words that the line says to go on with, behind ``accprobe``."""
    _, found, command = line.partition(before)
    assert found, line
    words = shlex.split(command)
    assert words[0] == "accprobe"
    return words[1:]


@pytest.mark.parametrize("group", [True, False], ids=["terminal", "kill -INT"])
def test_compare(tmp_path: Path, group: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    dump(tmp_path / "golden", noise=0)
    dump(tmp_path / "mine", GAIN)
    words = ["compare", "golden", "mine", "--no-replay", "--out", "my report"]
    part = tmp_path / "my report/measured.part"
    (line,) = stopped(words, lambda: part.exists() and part.stat().st_size > 500, tmp_path, group)
    assert line.startswith("accprobe: interrupted; what was measured is kept in my report/measured.part; go on: ")
    assert part.exists()
    monkeypatch.chdir(tmp_path)
    assert again(line, "go on: ") == words
    code = main(again(line, "go on: "))
    assert code in (0, 1)
    assert not part.exists()
    assert main([*words[:-1], "whole"]) == code
    made = [(tmp_path / place / "compare.csv").read_bytes() for place in ("my report", "whole")]
    assert made[0] == made[1]


def test_opcheck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path / "d", "layers.0.norm")
    part = tmp_path / "o/opcheck.csv.part"
    (line,) = stopped(["opcheck", "d", "-j", "2", "--out", "o"], lambda: part.exists() and part.stat().st_size > 900,
                      tmp_path)  # fmt: skip
    assert line.startswith("accprobe: interrupted; the calls that were checked are kept in o/opcheck.csv.part; go on: ")
    words = again(line, "go on: ")
    assert words == ["opcheck", "d", "-j", "2", "--out", "o", "--resume"]
    monkeypatch.chdir(tmp_path)
    assert main(["0" if word == "2" else word for word in words]) == 1  # in this process, which is the same and faster
    assert main(["opcheck", "d", "-j", "0", "--out", "whole"]) == 1
    rows = [list(csv.reader((tmp_path / place / "opcheck.csv").open())) for place in ("o", "whole")]
    assert rows[0] == rows[1]


def test_convert_keeps_the_ranks_that_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "d", ranks=2)
    words = ["convert", "d", "out", "--to", "npz", "--rank", "0-1"]
    (line,) = stopped(words, lambda: list((tmp_path / "out").glob("*.npz")), tmp_path)
    assert "interrupted; the ranks up to 0 are kept in out/" in line
    assert again(line, "go on: ") == ["convert", "d", "out", "--to", "npz", "--ranks", "1"]
    monkeypatch.chdir(tmp_path)
    assert main(again(line, "go on: ")) == 0
    assert main(["convert", "d", "whole", "--to", "npz"]) == 0
    made = [sorted(p.name for p in (tmp_path / place).iterdir()) for place in ("out", "whole")]
    assert made[0] == made[1]
    assert len(made[0]) == 2


def test_gentest_leaves_no_half_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path / "d")
    words = ["gentest", "d", "--ops", "*", "--out", "t"]
    (line,) = stopped(words, lambda: list((tmp_path / "t").rglob("*.json")), tmp_path)
    assert line == f"accprobe: interrupted; nothing was kept; begin again: {shlex.join(['accprobe', *words])}"
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    ("what", "words", "line"),
    [
        (None, ["inspect", "a b"], "interrupted; nothing was kept; begin again: accprobe inspect 'a b'"),
        (("x is", "no-such"), ["x"], "interrupted; nothing was kept; begin again: accprobe x"),
        (("x is", None), ["x"], "interrupted; x is kept; go on: accprobe x"),
        (("x is", ".", ["--resume"]), ["x", "--", "y"], "interrupted; x is kept in .; go on: accprobe x --resume -- y"),
        (("x is", ".", ["--resume"]), ["x", "--resume"], "interrupted; x is kept in .; go on: accprobe x --resume"),
        (("x is", ".", ["--n", "2"], ["--n"]), ["x", "--n=1"], "interrupted; x is kept in .; go on: accprobe x --n 2"),
    ],
)
def test_the_line(what: tuple[object, ...] | None, words: list[str], line: str) -> None:
    endings.begin()
    if what is not None:
        said, place, *more = what
        endings.going_on(said, None if place is None else Path(str(place)), *more)  # type: ignore[arg-type]
    assert endings.interrupted(words) == line
    endings.begin()


# --- a Ctrl-C that rises in a finalizer ends the command all the same ---


class Finalized:
    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __del__(self) -> None:
        raise self.error


def finalize(error: type[BaseException], until: float = 0.0) -> None:
    Finalized(error)
    while time.monotonic() < until:
        time.sleep(0.01)


def test_an_interrupt_that_was_dropped_comes_again(capfd: pytest.CaptureFixture[str]) -> None:
    begun = time.monotonic()
    # A shell starts what stands before `&` with SIGINT ignored, and then Python raises no KeyboardInterrupt at all.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with insisting(), pytest.raises(KeyboardInterrupt):
            finalize(KeyboardInterrupt, begun + 20)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() < begun + 10
    assert "Exception ignored" not in capfd.readouterr().err


def test_anything_else_is_said_as_ever() -> None:
    seen = []
    before, sys.unraisablehook = sys.unraisablehook, seen.append
    try:
        with insisting():
            finalize(ValueError)
        assert sys.unraisablehook == seen.append
    finally:
        sys.unraisablehook = before
    assert [lost.exc_type for lost in seen] == [ValueError]


@pytest.mark.parametrize(("seconds", "removed"), [(60.0, ["what is temporary"]), (0.0, [])])
def test_two_signals_of_one_end_do_not_cut_short_what_the_first_unwinds(seconds, removed, monkeypatch):
    """No SIGHUP: where the suite runs under nohup it stays ignored."""
    monkeypatch.setattr(endings, "_TOGETHER_S", seconds)
    done: list[str] = []

    def ended_twice() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            done.append("what is temporary")

    with endings.unwinding(), pytest.raises(endings.CommandTerminated) as end:
        ended_twice()
    assert (end.value.code, done) == (143, removed)
