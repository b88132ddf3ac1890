"""Lines from templates say what the same lines say as events, and their payloads are found like others."""

import dataclasses

import numpy as np
import pytest
import xxhash
from dump.dumps import put_event, tensor_event, writer

from vllm_accprobe.dump.journal import TensorHead
from vllm_accprobe.dump.journal_writer import template_of
from vllm_accprobe.dump.reader import open_dump
from vllm_accprobe.dump.stats import StatsCell, moments_at, tensor_stats

LAYOUT = {"kind": "shard", "group": "tp", "index": 1, "size": 2, "dim": -1, "parts": [[4, 1]]}


def template(tap, array, dtype, **more):
    return template_of(TensorHead(tap, "Linear", "output.0", **more), dtype, array.shape, array.nbytes)


def cell_of(array, dtype):
    return StatsCell(None, xxhash.xxh3_128_hexdigest(array.tobytes()), dtype)


@pytest.mark.parametrize("tap", ["model.layers.0.mlp", 'quo"te\\d', "grün|日本", "half \ud800 pair", ""])
def test_the_same_record_either_way(tmp_path, tap):
    a = np.random.default_rng(0).standard_normal((3, 4)).astype("<f4")
    own = {"event": "tensor", "step": 5, "call": 2, "seq": 7, "tap": tap, "class": "Linear", "role": "output.0"}
    form = {"rows": None, "row_dim": 0, "layout": LAYOUT, "mutated": True, "dtype": "float32", "shape": a.shape}
    records = []
    for way in ("event", "template"):
        w = writer(tmp_path / way)
        if way == "event":
            put_event(w, a, own | form)
        else:
            w.tensor(
                (template(tap, a, "float32", layout=LAYOUT, mutated=True), 5, 2, 7, cell_of(a, "float32")),
                a.ctypes.data,
            )
        w.close("done", {})
        dump = open_dump(tmp_path / way)
        assert dump.problems == []
        assert dump.ends[0].tensors == 1
        assert dump.read(dump.records[0]).tobytes() == a.tobytes()
        records.append(dump.records[0])
    assert dataclasses.asdict(records[0]) == dataclasses.asdict(records[1])


def test_a_later_line_about_the_same_bytes_shares_everything(tmp_path):
    w = writer(tmp_path / "d", block_bytes=4096)
    a = np.arange(5000, dtype="<f4")  # spans blocks: its statistics come in pieces
    cell = cell_of(a, "float32")
    for i in range(3):
        line = (template(f"t{i}", a, "float32"), 0, 0, i, cell)
        w.tensor(line, a.ctypes.data) if i == 0 else w.line(line)
    put_event(w, a, tensor_event("event", a, "float32"))
    w.close("done", {})
    first, second, third, event = open_dump(tmp_path / "d").records
    assert first.payload == second.payload == third.payload != event.payload
    assert first.hash == second.hash == third.hash == event.hash
    assert first.stats == second.stats == third.stats == tensor_stats(a, "float32")
    assert [r.seq for r in (first, second, third)] == [0, 1, 2]


def test_statistics_without_payload(tmp_path):
    w = writer(tmp_path / "d")
    a = np.array([1.0, np.nan, -3.0], "<f4")
    cell = cell_of(a, "float32")
    cell.sums = moments_at(a.ctypes.data, a.nbytes, "float32")
    w.line((template("t", a, "float32"), 0, 0, 0, cell))
    w.close("done", {})
    (record,) = open_dump(tmp_path / "d").records
    assert record.payload is None
    assert record.stats == tensor_stats(a, "float32")
