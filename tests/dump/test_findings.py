"""Reports of ranks: written and read, which of them is the first, and what is said of them."""

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from dump.errcheck_reports import FOUND, report

from vllm_accprobe.dump.findings import ErrcheckError, alive, earliest, lines, read, write


def test_a_report_comes_back_as_it_was(tmp_path: Path) -> None:
    for r in (report(0), report(3, None, later=2, places={"a": 2}, parameters=("w: 1 NaN, 0 Inf",))):
        write(tmp_path, r)
    assert read(tmp_path) == [report(0), report(3, None, later=2, places={"a": 2}, parameters=("w: 1 NaN, 0 Inf",))]
    assert {stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()} == {0o600}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["errcheck-rank0000.json", "errcheck-rank0003.json"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": 1}', '{"schema": 1, "rank": "0"}', '{"schema": 1, "rank": 0, "first": 3}',
             '{"schema": 1, "rank": 0, "first": {"step": "x"}}', '{"schema": 1, "rank": 0, "places": {"a": "b"}}',
             '{"schema": true, "rank": 0}', '{"schema": 1, "rank": 0, "pids": 3}', "[" * 100_000],
)  # fmt: skip
def test_a_file_that_is_no_report_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "errcheck-rank0000.json").write_text(text)
    with pytest.raises(ErrcheckError, match=r"errcheck-rank0000\.json: no findings of errcheck"):
        read(tmp_path)


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


def test_who_is_still_writing() -> None:
    mine = replace(report(0, None), state="watching", pid=os.getpid())
    assert alive([mine])
    assert not alive([replace(mine, state="closed"), replace(mine, pid=0)])


def test_a_rank_that_was_not_watched_to_the_end_is_named() -> None:
    off = replace(report(1, None), state="off", why="errcheck failed at x")
    assert lines([report(0, None), off])[-1] == "rank 1: was not watched to the end: errcheck failed at x"
    assert "did not close its report" in lines([replace(report(0, None), state="watching")])[-1]
    assert lines([]) == ["nothing was watched: no vLLM engine with accprobe ran, and no torch module was called"]
