"""A comparison that was killed goes on where it stopped, and gives the same table."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from measured_units import unit

from vllm_accprobe.comparison import store
from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.comparison.measure import measurer as workers
from vllm_accprobe.comparison.store import UNFINISHED as NAME, Finished, forget, identity
from vllm_accprobe.formats import open_dump
from vllm_accprobe.report.table import write_csv


def test_other_code_begins_anew_and_so_does_another_release_of_equal_times_and_sizes(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_CODE", tmp_path)
    (tmp_path / "a.py").write_text("1")
    before = identity([])
    (tmp_path / "a.pyc").write_text("compiled")
    assert identity([]) == before
    monkeypatch.setattr(store, "__version__", "0.0.0")
    assert identity([]) != before
    monkeypatch.undo()
    monkeypatch.setattr(store, "_CODE", tmp_path)
    (tmp_path / "a.py").write_text("1.0")
    assert identity([]) != before


def test_a_file_of_another_comparison_begins_anew(tmp_path):
    first = Finished(tmp_path, "one")
    first.add([unit("a")])
    first.close()
    again = Finished(tmp_path, "one")
    assert list(again.done) == [("a", "output.0", 0)]
    again.close()
    other = Finished(tmp_path, "two")
    assert other.done == {}
    other.close()
    assert Finished(tmp_path, "one").done == {}
    forget(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_torn_end_is_cut_off(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "PATIENCE", 0.0)
    first = Finished(tmp_path, "one")
    first.add([unit("a")])
    first.add([unit("b")])
    first.close()
    path = tmp_path / NAME
    os.truncate(path, path.stat().st_size - 3)
    second = Finished(tmp_path, "one")
    assert [k[0] for k in second.done] == ["a"]
    second.add([unit("c")])
    second.close()
    assert [k[0] for k in Finished(tmp_path, "one").done] == ["a", "c"]


def test_what_waited_is_written_by_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "PIECE", 1)
    first = Finished(tmp_path, "one")
    first.add([unit("a"), unit("b"), unit("c")])
    first.close()
    assert len(list(store.frames((tmp_path / NAME).read_bytes()))) == 1 + 3  # the identity, and a frame each
    assert [k[0] for k in Finished(tmp_path, "one").done] == ["a", "b", "c"]


def test_where_nothing_can_be_written_the_comparison_goes_on(tmp_path, dumps):
    (tmp_path / NAME).mkdir()
    assert "begin anew" in Finished(tmp_path, "one").problem
    assert compare(*dumps, resume=tmp_path).verdict == "fail"


def test_the_identity_follows_the_dumps_and_the_choices(dumps, tmp_path):
    opened = [open_dump(d) for d in dumps]
    first = identity(opened, None)
    assert identity([open_dump(d) for d in dumps], None) == first
    assert identity(opened, "model.*") != first
    assert identity(opened[::-1], None) != first
    journal = next((dumps[1]).rglob("journal.jsonl"))
    os.utime(journal, (1, 1))
    assert identity(opened, None) != first


def test_what_is_measured_is_not_measured_again(dumps, tmp_path, monkeypatch):
    fresh = compare(*dumps)
    monkeypatch.setattr(store, "PATIENCE", 0.0)
    compare(*dumps, resume=tmp_path)

    real, measured = workers.UnitMeasurer.measure, []

    def watched(self, units):
        found = real(self, units)
        measured.extend(found)
        return found

    monkeypatch.setattr(workers.UnitMeasurer, "measure", watched)
    again = compare(*dumps, resume=tmp_path)
    # What agrees by its hashes is not remembered, because nothing is read for it.
    assert not any(p.table is not None for unit in measured for p in unit.parts)
    assert len(measured) < len(fresh.measured.units) / 2
    assert json.dumps(again.to_json()) == json.dumps(fresh.to_json())


def test_what_took_no_time_is_written_only_where_it_ended_early(dumps, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "PATIENCE", 3600.0)
    compare(*dumps, resume=tmp_path)
    opened = [open_dump(d) for d in dumps]
    assert Finished(tmp_path, identity(opened, None, None, False)).done == {}

    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("vllm_accprobe.comparison.engine.judge", stopped)
    with pytest.raises(KeyboardInterrupt):
        compare(*dumps, resume=tmp_path)
    assert len(Finished(tmp_path, identity(opened, None, None, False)).done) > 20


SLOW = """
import sys, time
from vllm_accprobe.comparison.measure import measurer as workers
from vllm_accprobe.comparison import store as resume
from vllm_accprobe.cli import main
workers._MOST = 2
resume.PATIENCE = 0.0
real = workers.UnitMeasurer.measure
def slow(self, units):
    time.sleep(0.05 * len(units))
    return real(self, units)
workers.UnitMeasurer.measure = slow
sys.argv = ["accprobe", "compare", *sys.argv[1:]]
main()
"""


def test_killed_midway_and_run_again_gives_the_same_csv(dumps, tmp_path):
    out = tmp_path / "out"
    child = subprocess.Popen([sys.executable, "-c", SLOW, *map(str, dumps), "--out", str(out)])
    path, deadline = out / NAME, time.monotonic() + 60
    while not (path.exists() and path.stat().st_size > 20_000) and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not (out / "compare.csv").exists()
    finished = Finished(out, identity([open_dump(d) for d in dumps], None, None, False))
    assert finished.done
    finished.close()
    subprocess.run([sys.executable, "-m", "vllm_accprobe.cli", "compare", *map(str, dumps), "--out", str(out)],
                   stdout=subprocess.DEVNULL, check=False)  # fmt: skip
    write_csv(compare(*dumps), tmp_path / "fresh.csv")
    assert (out / "compare.csv").read_bytes() == (tmp_path / "fresh.csv").read_bytes()
    assert not path.exists()
