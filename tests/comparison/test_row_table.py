"""Errors by row and sampled values that a comparison keeps, counts of pairs and rows, arrays that spill to disk."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from synthetic_model import capture, scaled

from vllm_accprobe import spill_buffer
from vllm_accprobe.align.tokens import POSITION_BITS, POSITION_MASK, RowSet
from vllm_accprobe.comparison import engine, row_table, store
from vllm_accprobe.comparison.coverage import UNKNOWN, finished
from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.comparison.pair import Counts, Pair, Pairs
from vllm_accprobe.comparison.plan.unit import family
from vllm_accprobe.comparison.row_table import RowLog
from vllm_accprobe.judge.near_ties import ROWS_AFTER, Routing
from vllm_accprobe.report.html import page
from vllm_accprobe.spill_buffer import SpillBuffer

TAP = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def result():
    one = {"prompts": {"a": [3, 14, 15, 9, 2], "b": [7, 7, 1]}, "tokens": 3}
    return compare(capture(**one), capture(faults={TAP: scaled(1.25)}, **one))


def test_every_output_row_has_its_error(result):
    rows = result.rows
    sizes = {len(x) for x in (rows.pair, rows.request, rows.position, rows.decode, rows.error, rows.ratio)}
    assert sizes == {len(rows)}
    assert sorted(rows.requests) == ["a", "b"]
    per_pair = np.bincount(rows.pair, minlength=len(result.pairs))
    for i, p in enumerate(result.pairs):
        if p.role.startswith("output") and p.rows and p.status != "skip":
            assert per_pair[i] == p.rows, p.mine


def test_errors_are_those_of_the_pair(result):
    rows, i = result.rows, next(i for i, p in enumerate(result.pairs) if p.tap == TAP and p.status == "fail")
    p, mine = result.pairs[i], result.rows.pair == i
    # A scale of 1.25 is a relative error of 0.25 in every row; the norm ratio may count for more in the row's measure.
    assert rows.error[mine].min() >= 0.24
    assert np.allclose(rows.ratio[mine], rows.error[mine] / np.float32(p.limit))
    worst = np.flatnonzero(mine)[rows.error[mine].argmax()]
    assert (rows.requests[rows.request[worst]], rows.position[worst]) == (p.worst_request, p.worst_position)
    before = [j for j, q in enumerate(result.pairs) if q.tap == "model.layers.0.mlp" and q.role == "output.0"]
    assert not rows.error[np.isin(rows.pair, before)].any()


def test_samples_show_the_scale(result):
    sample = next(s for s in result.samples if result.pairs[s.pair].tap == TAP)
    assert 0 < sample.worst < len(sample.golden) == len(sample.mine)
    seen = np.abs(sample.golden) > 1e-6
    assert np.allclose(sample.mine[seen] / sample.golden[seen], 1.25, rtol=2**-7)
    p = result.pairs[sample.pair]
    assert (sample.request, sample.position) == (p.worst_request, p.worst_position)


def test_what_passes_is_not_sampled():
    one = {"prompts": {"a": [3, 14, 15]}, "tokens": 2}
    result = compare(capture(**one), capture(chunk=2, **one))
    assert result.verdict == "pass"
    assert result.samples == ()
    assert len(result.rows) == 0  # all agrees to the bit: no row has anything to tell
    noisy = compare(capture(**one), capture(noise=0.001, **one))
    assert len(noisy.rows)
    assert noisy.verdict == "pass"
    assert noisy.samples == ()
    assert not np.nan_to_num(noisy.rows.ratio).max() > 1


def test_a_table_has_the_rows_of_each_pair_in_turn(monkeypatch):
    monkeypatch.setattr(row_table, "OFTEN", 3)
    sets = [RowSet((i << POSITION_BITS) + np.arange(n) + 10 * i, np.arange(n) > 0) for i, n in enumerate((3, 1, 0, 2))]
    log, each = RowLog(_differs=True), [(0, 0.5), (3, np.array([1.0, 2.0], np.float32)), (2, 0.0), (1, 0.0), (0, 0.25)]
    for which, error in each:
        log.add((sets[which], error))
    log.reorder(np.arange(5)[::-1])
    found = log.table(np.full(5, 2.0), {})
    expected = []
    for i, (which, error) in enumerate(each[::-1]):
        rows = sets[which]
        for k, d, e in zip(rows.keys, rows.decode, np.broadcast_to(error, len(rows)), strict=True):
            expected.append((i, str(k >> POSITION_BITS), k & POSITION_MASK, d, e))
    owners = [found.requests[i] for i in found.request]
    assert list(zip(found.pair, owners, found.position, found.decode, found.error, strict=True)) == expected
    assert found.ratio.tolist() == [e / 2 for *_, e in expected]


def test_families():
    found = [family(s) for s in ("tokens", "logits", "vision/4", "vision/4#1", "")]
    assert found == ["text", "text", "vision/4", "vision/4", "text"]


def test_what_judging_adds():
    measured = {"rows_compared": 7, "skipped": {"why": 1}}
    assert finished(measured, Routing(), Pairs()) == measured
    found = finished(measured, Routing(unknown=2, left=defaultdict(set, {ROWS_AFTER: {5, 6, 7}})), Pairs())
    assert found == {"rows_compared": 7, "skipped": {"why": 1, ROWS_AFTER: 3, UNKNOWN: 2}}
    assert measured["skipped"] == {"why": 1}


def pair(status, **more):
    return Pair("g", "m", 0, 0, "float32", "float32", (1,), status=status, **more)


def test_each_kind():
    pairs = [pair("pass"), pair("pass", identical=True, bit_identical=True), pair("fail", identical=True),
             pair("skip", message="why", identical=True), pair("skip", message="why")]  # fmt: skip
    found = Pairs(pairs).counts
    assert found == Counts(2, 1, 2, 2, 1, {"why": 2})
    assert (found.compared, found.total) == (3, 5)


def test_arrays_beyond_the_bound_go_to_disk_and_stay_what_they_were(tmp_path, monkeypatch):
    monkeypatch.setattr(spill_buffer, "CHUNK", 1 << 16)
    shelf = SpillBuffer(tmp_path, bound=1000)
    made = [np.random.default_rng(i).standard_normal((i * 37 % 50, 11)) for i in range(60)]
    kept = [shelf.keep(a) for a in made]
    shelf.rest()
    for a, b in zip(made, kept, strict=True):
        np.testing.assert_array_equal(a, b)
    assert shelf.in_memory <= 1000
    assert shelf.in_memory + shelf.on_disk == sum(a.nbytes for a in made)
    assert list(tmp_path.iterdir()) == []  # the files have no names: nothing stays behind a crash


def test_a_table_larger_than_a_chunk_and_a_directory_that_cannot_be_written(tmp_path):
    large = np.arange(float(spill_buffer.CHUNK // 8 + 5))
    np.testing.assert_array_equal(SpillBuffer(tmp_path, bound=0).keep(large), large)
    nowhere = SpillBuffer(tmp_path / "none", bound=0)
    assert nowhere.keep(large[:10]) is not None
    assert (nowhere.on_disk, nowhere.in_memory) == (0, 80)


@pytest.mark.skipif(not os.path.exists("/proc/self/mounts") or os.geteuid() != 0, reason="needs root and Linux")
def test_on_a_full_disk_arrays_stay_in_memory(tmp_path):
    """A tmpfs of 1 MB, in a process of its own: what maps a hole there is killed as soon as it writes."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    code = (
        "import sys, numpy as np\nfrom pathlib import Path\n"
        "from vllm_accprobe.spill_buffer import SpillBuffer\n"
        "shelf, made = SpillBuffer(Path(sys.argv[1]), bound=0), np.arange(1 << 19)\n"
        "assert (shelf.keep(made) == made).all()\nprint(shelf.in_memory, shelf.on_disk)"
    )
    try:
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
    assert (done.returncode, done.stdout) == (0, "4194304 0\n"), done.stderr


def test_room_to_be_filled_lies_where_its_size_says(tmp_path):
    shelf = SpillBuffer(tmp_path, bound=100).another(bound=16)
    small, large = shelf.empty(4, np.float32), shelf.empty(5, np.int64)
    small[:], large[:] = 1.5, range(5)
    shelf.rest()
    assert (small.tolist(), large.tolist()) == ([1.5] * 4, [0, 1, 2, 3, 4])
    assert (shelf.in_memory, shelf.on_disk) == (16, 40)


@pytest.mark.parametrize("bound", [0, 5000])
def test_the_result_is_the_same(tmp_path, monkeypatch, bound):
    golden, mine = capture(), capture(faults={"model.layers.1.mlp.down_proj": scaled(1.1)})
    plain = engine.compare(golden, mine)
    monkeypatch.setattr(engine, "SpillBuffer", lambda *_: SpillBuffer(tmp_path, bound))
    judged = []
    another = lambda self, _: judged.append(SpillBuffer(tmp_path, bound)) or judged[-1]  # noqa: E731
    monkeypatch.setattr(SpillBuffer, "another", another)
    spilled = engine.compare(golden, mine)
    assert spilled.measured.shelf.on_disk > 0
    assert all(shelf.on_disk > 0 for shelf in judged)
    assert spilled.rows.shelf.on_disk > 0
    assert json.dumps(spilled.to_json()) == json.dumps(plain.to_json())
    assert page(spilled) == page(plain)
    assert spilled.pairs == plain.pairs
    for name in ("pair", "request", "position", "error", "ratio"):
        np.testing.assert_array_equal(getattr(spilled.rows, name), getattr(plain.rows, name))
    a, b = tmp_path / "a", tmp_path / "b"
    for directory, result in ((a, plain), (b, spilled)):
        directory.mkdir()
        store.save(result.measured, directory)
    again = [replace(engine.rejudge(store.load(d)), measured=None) for d in (a, b)]
    assert again[0].pairs == again[1].pairs == plain.pairs
