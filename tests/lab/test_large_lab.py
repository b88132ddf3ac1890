"""The large laboratory's declarations are sound, its command judges what it should, and memory is measured."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from accprobe_fault_rows import Rows
from accprobe_faults import parse

from lab import large, large_judge, large_runs, watched
from lab.cases import HELD_OUT, TUNED
from lab.large_cases import CLEAN, KERNELS, PAIRS, WAYS, Pair, Run
from lab.large_judge import Outcome, Verdict
from lab.large_models import MODELS
from lab.large_runs import Runs

torch = pytest.importorskip("torch")
FAULTS = [pair for pair in PAIRS if not pair.clean]


def test_as_many_faults_and_clean_pairs_as_promised() -> None:
    assert len(FAULTS) >= 60
    assert sum(pair.half == HELD_OUT for pair in FAULTS) >= len(FAULTS) / 2
    assert len(CLEAN) >= 20
    assert {(pair.mine.kernels, pair.golden.way) for pair in FAULTS if pair.group != "real"} == {
        (kernels, golden) for kernels in KERNELS for golden in ("float32", "serial")
    }
    assert {pair.mine.model for pair in FAULTS} == set(MODELS)
    assert len({pair.name for pair in PAIRS}) == len(PAIRS)


def test_each_fault_can_be_planted_and_its_golden_is_clean() -> None:
    for pair in FAULTS:
        for fault in parse(json.dumps(pair.mine.faults)):
            Rows(torch.nn.Identity(), fault.rows)
        assert pair.golden.faults == (), pair.name
        assert (pair.golden.model, pair.golden.kernels) == (pair.mine.model, pair.mine.kernels), pair.name
        assert {pair.golden.way, pair.mine.way} <= set(WAYS), pair.name


# --- the command -----------------------------------------------------------------------------------------------------

FAULT = next(pair for pair in FAULTS if pair.half == TUNED)
SECRET = next(pair for pair in FAULTS if pair.half == HELD_OUT)
CLEAN_PAIR = next(pair for pair in CLEAN if pair.half == TUNED)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs of a fault of each half and of a clean pair, judged right."""
    monkeypatch.setattr(Runs, "make", _made)
    monkeypatch.setattr(large_judge, "judge", _judged)
    monkeypatch.setattr(large, "possible", lambda kernels: True)
    for pair in (FAULT, SECRET, CLEAN_PAIR):
        Runs(tmp_path).make(pair.golden)
        Runs(tmp_path).make(pair.mine)
    return tmp_path


def _made(runs: Runs, run: Run) -> bool:
    if runs.there(run):
        return False
    runs.at(run).mkdir(parents=True)
    runs._done(run).write_text(large_runs._text(run))
    return True


def _judged(pair: Pair, golden: Path, mine: Path, *_: object, replay: bool = False, **__: object) -> Outcome:
    assert golden.exists()
    assert mine.exists()
    verdict = Verdict("pass") if pair.clean else Verdict("fail", pair.expected[0], 1, 1)
    return Outcome(pair.name, pair.group, pair.half, pair.expected, verdict, verdict if replay else None)


def test_only_what_is_there_is_judged_and_held_out_pairs_stay_unnamed(kept, capsys):
    assert large.main(["--judge-only", str(kept)]) == 0
    printed = capsys.readouterr().out
    assert f"{len(PAIRS) - 3} of {len(PAIRS)} pairs are not there" in printed
    assert FAULT.name in printed
    assert SECRET.name not in printed
    assert "culprit first: 1 of 1" in printed
    assert {o["name"] for o in json.loads((kept / "results.json").read_text())} == {
        FAULT.name, SECRET.name, CLEAN_PAIR.name
    }  # fmt: skip


# --- judging ---------------------------------------------------------------------------------------------------------


def _outcome(verdict: str = "fail", rank: int = 1, replay: str = "fail", clean: bool = False, **more: float) -> Outcome:
    found = Verdict(verdict, "a", rank, 1, **more)
    return Outcome("x", "drawn", TUNED, () if clean else ("a",), found, replace(found, verdict=replay))


def test_what_is_not_reached_is_named() -> None:
    good = [_outcome() for _ in range(59)] + [_outcome("pass", 0, "pass", clean=True)]
    assert large_judge.total("all", good).missed == []
    assert large_judge.total("all", [*good[:59], _outcome("pass", 0, "pass")]).missed == []  # 59 of 60
    assert large_judge.total("all", [_outcome(rank=2)]).missed == ["first 0 of 1, needed 0.95"]
    assert large_judge.total("all", [_outcome(replay="pass")]).missed == ["the same verdict 0 of 1, needed 0.98"]
    assert large_judge.total("all", [_outcome(clean=True)]).missed == ["1 alarms"]
    assert "1 alarms" in large_judge.total("all", [_outcome("error: exit 2: no torch", 0, clean=True)]).missed
    assert not _outcome("error: exit 2: no torch", 1).first
    assert large_judge.total("all", [_outcome(wall_s=61.0)]).missed == ["1 later than 60 s (group real: 120)"]
    assert large_judge.total("all", [_outcome(own_mb=2000.0)]).missed == ["2000 MiB, allowed 1907"]


def test_outcomes_come_back_as_they_were(tmp_path: Path) -> None:
    outcomes = {"x": _outcome(wall_s=3.0)}
    large_judge.save(tmp_path / "r.json", outcomes)
    assert large_judge.load(tmp_path / "r.json") == outcomes
    assert large_judge.load(tmp_path / "absent.json") == {}


def test_a_comparison_is_read_back(tmp_path: Path) -> None:
    (tmp_path / "c.csv").write_text("tap,role,worst_row_rel_l2\na,output,0.5\na,input.x,1\nb,output,2\na,output,\n")
    assert large_judge._seen(tmp_path / "c.csv", ("a",)) == 128.0
    result = {"verdict": "fail", "origins": [{"module": "b"}, {"module": "a", "shape": "one column"}]}
    read = large_judge._read(result, ("a",))
    assert (read["culprit"], read["rank"], read["origins"], read["sentence"]) == ("b", 2, 2, "one column")


# --- measuring -------------------------------------------------------------------------------------------------------

_HOLDS = """
import os, sys, time, mmap
block = bytearray(os.urandom(1 << 20)) * 48
if os.fork() == 0:
    more = bytearray(os.urandom(1 << 20)) * 32
    time.sleep(0.6)
    os._exit(0)
file = open(sys.argv[1], "rb")
mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
sum(mapped[::4096])
os.wait()
sys.exit(3)
"""


def test_memory_of_its_own_is_that_of_all_processes_counted_once_and_without_mapped_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(200 << 20))
    command = [sys.executable, "-S", "-c", _HOLDS, str(tmp_path / "file")]
    took = watched.run(command, env=os.environ, cwd=tmp_path, cores=2, timeout_s=60)
    assert took.code == 3
    assert 80 < took.own_mb < 130  # 48 shared by both, 32 of the child
    assert took.rss_mb > took.own_mb + 30
    assert 80 < took.largest_mb < 120
    assert took.wall_s >= 0.6
    assert took.cpu_s > 0


def test_what_takes_too_long_is_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-c", "import time; time.sleep(30)"]
    assert watched.run(command, env=os.environ, cwd=tmp_path, cores=1, timeout_s=0.2).code == -9
