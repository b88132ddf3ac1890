"""Reports of ranks, which of them is the first, and the command that starts, watches and reads."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_accprobe.cli import main
from vllm_accprobe.config import ConfigError, ProbeConfig
from vllm_accprobe.dump.findings import (
    BAD_BAD,
    GOOD_BAD,
    ErrcheckError,
    FirstBad,
    RankReport,
    alive,
    earliest,
    lines,
    read,
    sentence,
    write,
)

ROW = {"request": "r1", "position": 45, "phase": "decode", "row": 3}
FOUND = FirstBad(
    step=7, order=12, time=100.0, tap="model.layers.3.mlp", cls="MLP", role="output.0", call=0, kind="NaN", nan=2,
    inf=0, saturated=0, verdict=GOOD_BAD, rows=(ROW,), bad_rows=1, all_rows=8,
    inputs=({"role": "input.x", "state": "good", "nan": 0, "inf": 0, "saturated": 0},), tensors="kept in d",
)  # fmt: skip


def report(rank: int, first: FirstBad | None = FOUND, **more: object) -> RankReport:
    return RankReport(rank=rank, state="closed", kinds=("nan",), taps=50, steps=20, first=first, **more)  # type: ignore[arg-type]


def test_a_report_comes_back_as_it_was(tmp_path: Path) -> None:
    for r in (report(0), report(3, None, later=2, places={"a": 2}, parameters=("w: 1 NaN, 0 Inf",))):
        write(tmp_path, r)
    assert read(tmp_path) == [report(0), report(3, None, later=2, places={"a": 2}, parameters=("w: 1 NaN, 0 Inf",))]
    assert {stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()} == {0o600}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["errcheck-rank0000.json", "errcheck-rank0003.json"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": 1}', '{"schema": 1, "rank": "0"}', '{"schema": 1, "rank": 0, "first": 3}',
             '{"schema": 1, "rank": 0, "first": {"step": "x"}}', "[" * 100_000],
)  # fmt: skip
def test_a_file_that_is_no_report_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "errcheck-rank0000.json").write_text(text)
    with pytest.raises(ErrcheckError, match=r"errcheck-rank0000\.json: no findings of errcheck"):
        read(tmp_path)


def _mutated(value: object, path: tuple[object, ...], new: object) -> object:
    if not path:
        return new
    if isinstance(value, dict):
        return {k: _mutated(v, path[1:], new) if k == path[0] else v for k, v in value.items()}
    assert isinstance(value, list)
    return [_mutated(v, path[1:], new) if k == path[0] else v for k, v in enumerate(value)]


def _paths(value: object, here: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here, *(p for k, v in items for p in _paths(v, (*here, k)))]


WHOLE = json.loads(json.dumps({"schema": 1, **asdict(report(0))}))


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(_paths(WHOLE)),
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.lists(st.integers(), max_size=2)
    | st.just({}) | st.just({"a": None}),
)  # fmt: skip
def test_a_spoilt_report_is_read_or_refused(path: tuple[object, ...], new: object) -> None:
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "errcheck-rank0000.json").write_text(json.dumps(_mutated(WHOLE, path, new)))
        try:
            found = read(Path(place))
        except ErrcheckError:
            return
        assert all(isinstance(line, str) for line in lines(found))


def test_the_earliest_of_all_ranks() -> None:
    later_step = report(0, replace(FOUND, step=8, order=1))
    later_order = report(1, replace(FOUND, order=13, tap="model.layers.3.norm"))
    first = report(2)
    assert [r.rank for r in earliest([later_step, later_order, first, report(3, None)])] == [2]
    # Pipeline stages compute one after another: order counts from 0 in each.
    stage = report(4, replace(FOUND, order=1, tap="model.layers.9.norm"), pp=1)
    assert [r.rank for r in earliest([stage, first])] == [2]
    # One place on several ranks is one place.
    assert [r.rank for r in earliest([report(0), report(1), later_order])] == [0, 1]
    # Steps of data-parallel engines are counted apart: the clock decides.
    ours, theirs = report(0, replace(FOUND, step=90, time=5.0), dp=1), report(1, replace(FOUND, step=2, time=6.0), dp=2)
    assert [r.rank for r in earliest([theirs, ours])] == [0]
    assert earliest([report(0, None)]) == []


def test_what_is_said() -> None:
    assert sentence(FOUND) == (
        "NaN in model.layers.3.mlp output.0 [MLP], step 7, request r1 position 45 (decode): good in, bad out (2 NaN)"
    )
    between = replace(FOUND, verdict=BAD_BAD, before="model.layers.3.norm", bad_rows=3, call=2)
    assert lines([report(0, between), report(1, replace(FOUND, step=9), later=4), report(2, None)]) == [
        "first: NaN in model.layers.3.mlp output.0 (call 2) [MLP], step 7, request r1 position 45 (decode) and 2 more "
        "rows: bad in, bad out (2 NaN), rank 0",
        "  input input.x: good",
        "  made outside of modules: the last good output before it is that of model.layers.3.norm",
        "  tensors: kept in d",
        "rank 1: NaN in model.layers.3.mlp output.0 [MLP], step 9, request r1 position 45 (decode): good in, bad out "
        "(2 NaN)",
        "bad values came in 4 more steps (over all ranks)",
    ]
    assert lines([report(0, None)]) == ["nothing bad in 20 steps of 1 rank(s), 50 modules"]
    assert lines([]) == ["nothing was watched: no vLLM engine with accprobe ran"]
    off = replace(report(1, None), state="off", why="errcheck failed at x")
    assert lines([report(0, None), off])[-1] == "rank 1: was not watched to the end: errcheck failed at x"
    assert "did not close its report" in lines([replace(report(0, None), state="watching")])[-1]


def test_who_is_still_writing() -> None:
    mine = replace(report(0, None), state="watching", pid=os.getpid())
    assert alive([mine])
    assert not alive([replace(mine, state="closed"), replace(mine, pid=0)])


def test_the_setting() -> None:
    def kinds(text: str) -> tuple[str, ...]:
        return ProbeConfig.from_env({"VLLM_ACCPROBE_ERRCHECK": text}).errcheck

    assert kinds("overflow,nan") == ("overflow", "nan")
    assert kinds("1") == ("overflow", "nan")
    assert kinds("NaN, exit") == ("nan", "exit")
    assert kinds("0") == kinds("off") == kinds("") == ()
    for bad, why in (("nans", "did you mean nan"), ("exit", "name overflow, nan or both besides exit")):
        with pytest.raises(ConfigError, match=why):
            kinds(bad)


SCRIPT = """
import os, sys
from pathlib import Path
from capture.test_errcheck_files import report
from vllm_accprobe.dump.findings import write
root = Path(os.environ["VLLM_ACCPROBE_DIR"])
assert os.environ["VLLM_ACCPROBE_ERRCHECK"] == sys.argv[3]
assert "VLLM_ACCPROBE" not in os.environ
root.mkdir(parents=True, exist_ok=True)
if sys.argv[1] != "nothing":
    write(root, report(0) if sys.argv[1] == "bad" else report(0, None))
if sys.argv[1] == "bad" and "exit" in sys.argv[3]:
    import time
    time.sleep(60)
sys.exit(int(sys.argv[2]))
"""


def under(tmp_path: Path, *script: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    (tmp_path / "engine.py").write_text(SCRIPT)
    accprobe = [sys.executable, "-m", "vllm_accprobe.cli", "errcheck", "--dir", str(tmp_path / "d"), *options]
    env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_ACCPROBE")}
    env["PYTHONPATH"] = str(Path(__file__).parents[1])
    return subprocess.run(
        [*accprobe, "--", sys.executable, str(tmp_path / "engine.py"), *script],
        env=env, capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        (("bad", "0"), 1, "errcheck: first: NaN in model.layers.3.mlp output.0 [MLP], step 7"),
        (("good", "0"), 0, "errcheck: nothing bad in 20 steps of 1 rank(s), 50 modules"),
        (("good", "7"), 7, "errcheck: nothing bad in 20 steps"),
        (("nothing", "0"), 3, "errcheck: nothing was watched"),
    ],
)
def test_the_command_and_its_exit_code(tmp_path: Path, script: tuple[str, str], code: int, said: str) -> None:
    done = under(tmp_path, *script, "overflow,nan")
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout.startswith(said)


def test_exit_ends_a_command_that_does_not_end_itself(tmp_path: Path) -> None:
    program = tmp_path / "short.py"
    program.write_text(
        "import sys\nfrom vllm_accprobe.cli import errcheck, main\nerrcheck._GRACE_S = 0.5\n"
        "sys.exit(main(['errcheck', '--dir', sys.argv[1], '--exit', '--kinds', 'nan', '--', *sys.argv[2:]]))\n"
    )
    (tmp_path / "engine.py").write_text(SCRIPT)
    env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_ACCPROBE")}
    env["PYTHONPATH"] = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "d"), sys.executable, str(tmp_path / "engine.py"), "bad", "0",
         "nan,exit"], env=env, capture_output=True, text=True, timeout=50, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("errcheck: first: NaN")


def test_reading_afterwards_and_bad_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, report(0))
    assert main(["errcheck", "--read", str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith("errcheck: first: NaN")
    assert main(["errcheck", "--dir", str(tmp_path), "--", "true"]) == 2
    assert "already holds a dump or findings" in capsys.readouterr().err
    assert main(["errcheck"]) == 2
    assert "no command is given" in capsys.readouterr().err
    assert main(["errcheck", "--kinds", "nans", "--", "true"]) == 2
    assert "did you mean nan" in capsys.readouterr().err
    assert main(["errcheck", "--read", str(tmp_path / "none")]) == 2
    (tmp_path / "errcheck-rank0001.json").write_text(json.dumps({"schema": 9}))
    assert main(["errcheck", "--read", str(tmp_path)]) == 2
