"""What goes into RankWriter comes out of open_dump, and out of the safetensors library."""

import json
import os
import stat
import time

import numpy as np
import pytest
import xxhash
from dumps import bits, put, put_event, tensor_event, writer

from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.journal import TensorHead
from vllm_accprobe.dump.journal_writer import template_of
from vllm_accprobe.dump.reader import open_dump
from vllm_accprobe.dump.schema import Stats
from vllm_accprobe.dump.stats import StatsCell, tensor_stats
from vllm_accprobe.dump.writer import RankWriter


def lines(root, rank=0):
    return [json.loads(line) for line in (root / f"rank{rank:04d}/journal.jsonl").read_text().splitlines()]


def test_every_dtype_bit_exact_with_hash_and_statistics(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    root, rng, arrays = tmp_path / "d", np.random.default_rng(0), {}
    w = writer(root)
    for dtype, info in DTYPES.items():
        for shape in [(3, 5), (), (0, 4), (7001,)]:
            raw = bits(rng, int(np.prod(shape)) * info.itemsize)
            raw = raw % 2 if dtype == "bool" else raw
            array = raw.view(info.storage).reshape(shape)
            name = f"{dtype}.{'x'.join(map(str, shape))}"
            arrays[name] = array
            assert put(w, name, array, dtype).nbytes == array.nbytes
    w.close("done", {})

    dump = open_dump(root)
    assert dump.problems == []
    assert [r.tap for r in dump.records] == list(arrays)
    for r in dump.records:
        array = arrays[r.tap]
        got = dump.read(r)
        assert got.dtype == DTYPES[r.dtype].storage
        assert got.shape == array.shape
        assert got.tobytes() == array.tobytes()
        assert r.hash == xxhash.xxh3_128(array.tobytes()).hexdigest()
        expected = tensor_stats(array, r.dtype)
        for field in ("count", "min", "max", "nan", "inf"):
            assert getattr(r.stats, field) == getattr(expected, field)
        assert r.payload.off % 64 == 0
    names = set()
    for file in sorted((root / "rank0000").glob("seg-*.safetensors")):
        with safetensors.safe_open(file, "np") as f:
            names |= {k.split("|")[1] for k in f.keys() if not k.startswith("__pad")}  # noqa: SIM118
    assert names >= {n for n in arrays if arrays[n].size}


def test_stock_safetensors_gives_torch_the_tensors(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    root = tmp_path / "d"
    w = writer(root, segment_bytes=1 << 18)
    rng, kept = np.random.default_rng(1), {}
    for i in range(60):
        a = rng.standard_normal((i + 1, 77)).astype("<f4")
        b = (a.view("<u4") >> 16).astype("<u2")
        kept[f"0|f{i}|output.0|0"], kept[f"3|b{i}|input.x|1"] = a, b
        put(w, f"f{i}", a, "float32")
        put(w, f"b{i}", b, "bfloat16", step=3, role="input.x", call=1)
    w.close("done", {})
    files = sorted((root / "rank0000").glob("*.safetensors"))
    assert len(files) > 1
    loaded = {}
    for file in files:
        loaded |= {k: v for k, v in load_file(file).items() if not k.startswith("__pad")}
    assert set(loaded) == set(kept)
    for name, tensor in loaded.items():
        assert tensor.dtype == (torch.float32 if "|f" in name else torch.bfloat16)
        assert tensor.contiguous().view(torch.uint8).numpy().tobytes() == kept[name].tobytes()


def test_large_payloads_span_blocks(tmp_path):
    root, rng = tmp_path / "d", np.random.default_rng(2)
    w = writer(root, block_bytes=4096, blocks=2)
    whole = bits(rng, 3 * 4096 + 50_004)
    cell = StatsCell(None, xxhash.xxh3_128_hexdigest(whole.tobytes()), "bfloat16")
    event = tensor_event("t", whole, "bfloat16", shape=(whole.size // 2,))
    p = put_event(w, whole, event, cell)
    template = template_of(TensorHead("same", "Linear", "output.0"), "bfloat16", (2, whole.size // 4), whole.nbytes)
    w.line((template, 0, 0, 0, cell))
    w.close("done", {})
    dump = open_dump(root)
    first, same = dump.records
    assert dump.read(first).tobytes() == dump.read(same).tobytes() == whole.tobytes()
    expected = tensor_stats(whole.view("<u2"), "bfloat16")
    assert (first.stats.min, first.stats.max, first.stats.nan) == (expected.min, expected.max, expected.nan)
    assert same.stats == first.stats == cell.value
    assert same.hash == first.hash == xxhash.xxh3_128(whole.tobytes()).hexdigest()
    assert first.payload == same.payload == p


def test_rows_and_reused_memory(tmp_path):
    root = tmp_path / "d"
    w = writer(root)
    a = np.arange(60, dtype="<i4").reshape(10, 6)
    put(w, "t", a, "int32")
    w.close("done", {})
    dump = open_dump(root)
    (r,) = dump.records
    assert dump.read_rows(r, slice(3, 5)).tolist() == a[3:5].tolist()
    assert dump.read_rows(r, slice(8, 99)).tolist() == a[8:].tolist()
    assert dump.read_rows(r, slice(4, 4)).shape == (0, 6)
    with pytest.raises(ValueError, match="without a step"):
        dump.read_rows(r, slice(0, 9, 2))
    memory = np.empty(1000, np.uint8)
    got = dump.read(r, memory)
    assert np.shares_memory(got, memory)
    assert got.tolist() == a.tolist()
    with pytest.raises(ValueError, match="240"):
        dump.read(r, np.empty(239, np.uint8))
    dump.close()
    assert dump.read(r).tolist() == a.tolist()


def test_events_given_statistics_keep_them(tmp_path):
    root = tmp_path / "d"
    w = writer(root)
    a = np.arange(4, dtype="<f4")
    made_on_device = Stats(4, -9.0, 9.0, 0.0, 1.0, 0, 0)
    put(w, "own", a, "float32", stats=made_on_device, hash="0" * 32)
    put(w, "none", a, "float32", stats=None)
    w.line(tensor_event("stats-only", a, "float32", stats=made_on_device, hash=None, seg=None))
    w.close("done", {"steps": 3, "skipped": {"why": 2}})
    own, none, only = open_dump(root).records
    assert own.stats == only.stats == made_on_device
    assert own.hash == "0" * 32
    assert none.stats is None
    assert only.payload is None
    end = open_dump(root).ends[0]
    assert (end.reason, end.steps, end.tensors, end.skipped) == ("done", 3, 3, {"why": 2})


def test_lines_keep_their_order_and_callables_run_in_it(tmp_path):
    root = tmp_path / "d"
    w = writer(root)
    seen = []
    a = bits(np.random.default_rng(0), 100)
    put(w, "before", a, "uint8")
    w.line(lambda: seen.append(len(seen)) or {"event": "skip", "tap": "x", "reason": "later"})
    w.line(lambda: None)
    w.line(lambda: 1 / 0)
    put(w, "after", a, "uint8")
    w.close("done", {})
    kinds = [(e["event"], e.get("tap") or e.get("message")) for e in lines(root)[1:-1]]
    assert kinds == [
        ("tensor", "before"), ("skip", "x"), ("error", "ZeroDivisionError: division by zero"), ("tensor", "after"),
    ]  # fmt: skip


def test_an_idle_writer_leaves_nothing_in_memory(tmp_path):
    """No close, no flush: what was put is on disk soon after, so a kill between two requests loses nothing."""
    root = tmp_path / "d"
    w = writer(root)
    a = bits(np.random.default_rng(0), 5000)
    put(w, "t", a, "uint8")
    w.line({"event": "skip", "tap": "x", "reason": "y"})
    deadline = time.monotonic() + 20
    while len(lines(root)) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    dump = open_dump(root)
    assert dump.read(dump.records[0]).tobytes() == a.tobytes()
    assert [s.reason for s in dump.skips] == ["y"]
    put(w, "again", a[:77], "uint8")
    assert w.flush()
    dump = open_dump(root)
    assert dump.read(dump.records[1]).tobytes() == a[:77].tobytes()
    w.close("done", {})
    dump = open_dump(root)  # finished and renamed now
    assert [dump.read(r).tobytes() for r in dump.records] == [a.tobytes(), a[:77].tobytes()]


def test_many_small_tensors_roll_the_segment_when_its_header_is_full(tmp_path):
    root = tmp_path / "d"
    w = writer(root)
    a = np.arange(3, dtype="<i2")
    name = "n" * 700
    for i in range(2500):
        put(w, f"{name}{i}", a, "int16")
    w.close("done", {})
    files = sorted(os.listdir(root / "rank0000"))
    assert files == ["journal.jsonl", *(f"seg-{i:05d}.safetensors" for i in range(3))]
    dump = open_dump(root)
    assert len(dump.records) == 2500
    assert all(dump.read(r).tolist() == [0, 1, 2] for r in dump.records[::97])
    assert {r.payload.seg for r in dump.records} == {0, 1, 2}


def test_names_that_need_care(tmp_path):
    from safetensors import safe_open

    root = tmp_path / "d"
    w = writer(root)
    a = np.arange(3, dtype="<i2")
    names = ['quote"d', "back\\slash", "new\nline", "ünïcode", "\ud800 alone", "__metadata__", "same", "same", "\x00"]
    for i, name in enumerate(names):
        put(w, name, a + i, "int16")
    w.close("done", {})
    dump = open_dump(root)
    assert dump.problems == []
    assert [r.tap for r in dump.records] == names
    assert [int(dump.read(r)[0]) for r in dump.records] == list(range(len(names)))
    with safe_open(next((root / "rank0000").glob("*.safetensors")), "np") as f:
        assert {k for k in f.keys() if "same" in k} == {"0|same|output.0|0", "0|same|output.0|0~2"}  # noqa: SIM118


def test_private_files(tmp_path):
    old = os.umask(0)
    try:
        root = tmp_path / "d"
        w = writer(root)
        put(w, "t", np.arange(3, dtype="<i2"), "int16")
        w.close("done", {})
    finally:
        os.umask(old)
    modes = {p: stat.S_IMODE(p.stat().st_mode) for p in [root, *root.rglob("*")]}
    assert {m for p, m in modes.items() if p.is_dir()} == {0o700}
    assert {m for p, m in modes.items() if p.is_file()} == {0o600}
    assert len(modes) == 5


def test_gaps_hold_zeros_and_not_what_lay_there_before(tmp_path):
    root = tmp_path / "d"
    w = writer(root, block_bytes=4096, blocks=2)
    put(w, "secret", np.full(3 * 4096, 0xAA, np.uint8), "uint8")
    for i in range(5):
        put(w, f"short{i}", np.full(65, 0xBB, np.uint8), "uint8")
        w.flush()
    w.close("done", {})
    data = next((root / "rank0000").glob("*.safetensors")).read_bytes()[1 << 20 :]
    rest = data[3 * 4096 :]
    assert rest.count(0xAA) == 0
    assert rest.count(0xBB) == 5 * 65
    assert set(rest) == {0, 0xBB}


def test_a_dump_is_never_written_over(tmp_path):
    root, told = tmp_path / "d", []
    w = writer(root)
    put(w, "t", np.arange(3, dtype="<i2"), "int16")
    w.close("done", {})
    before = (root / "rank0000/journal.jsonl").read_bytes()
    second = RankWriter(root, 0, {}, budget_bytes=1 << 20, on_stop=told.append)
    assert put(second, "u", np.arange(3, dtype="<i2"), "int16") is None
    second.line({"event": "skip"})
    second.close("done", {})
    assert told == [second.stopped]
    assert "choose a new directory" in second.stopped
    assert (root / "rank0000/journal.jsonl").read_bytes() == before


def test_back_pressure_keeps_everything(tmp_path):
    """Two small blocks and much data: the producer waits instead of losing or growing."""
    root, rng = tmp_path / "d", np.random.default_rng(3)
    w = writer(root, block_bytes=4096, blocks=2)
    kept = [bits(rng, int(n)) for n in rng.integers(1, 9000, 150)]
    for i, a in enumerate(kept):
        assert put(w, str(i), a, "uint8") is not None
    w.close("done", {})
    dump = open_dump(root)
    assert all(dump.read(r).tobytes() == a.tobytes() for r, a in zip(dump.records, kept, strict=True))
    last = (root / "rank0000/journal.jsonl").read_bytes().splitlines(keepends=True)[-1]
    assert dump.ends[0].bytes == w.bytes_written - len(last)
