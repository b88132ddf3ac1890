"""Dumps made up or damaged: one clear line or a named problem, never a wrong number or a large allocation."""

import json
import os
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
from dumps import put, writer
from hypothesis import HealthCheck, given, settings, strategies as st

from vllm_accprobe.dump import files
from vllm_accprobe.dump.reader import DumpError, open_dump
from vllm_accprobe.dump.repair import repair

TENSOR = {
    "event": "tensor", "step": 0, "tap": "t", "class": "C", "role": "output.0", "call": 0, "seq": 0,
    "dtype": "float32", "shape": [2, 3], "seg": 0, "off": 0, "nbytes": 24,
}  # fmt: skip


def make(root: Path, *events: object, data: bytes = bytes(24), header: int = 504) -> Path:
    rank = root / "rank0000"
    rank.mkdir(parents=True)
    (root / "run.json").write_text('{"schema": 1}')
    lines = [e if isinstance(e, str) else json.dumps(e) for e in ({"event": "start", "schema": 1, "rank": 0}, *events)]
    (rank / "journal.jsonl").write_text("".join(line + "\n" for line in lines) + '{"event":"end","reason":"done"}\n')
    (rank / "seg-00000.safetensors").write_bytes(header.to_bytes(8, "little") + b" " * 504 + data)
    return root


def test_the_honest_one_is_read(tmp_path):
    dump = open_dump(make(tmp_path / "d", TENSOR, data=np.arange(6, dtype="<f4").tobytes()))
    assert dump.problems == []
    assert dump.read(dump.records[0]).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"shape": [2, 4]}, "24 bytes are not a float32 tensor of shape [2, 4]"),
        ({"shape": [1 << 52, 1 << 52]}, "shape is [4503599627370496, 4503599627370496]"),
        ({"shape": [0, 1 << 53, 1 << 53], "nbytes": 0}, "shape is"),
        ({"shape": [-2, -3]}, "shape is [-2, -3]"),
        ({"shape": [1] * 40}, "shape is"),
        ({"dtype": "float33"}, "dtype float33 is not known to this release"),
        ({"off": -8}, "off is -8"),
        ({"seg": "../../../etc/passwd"}, "seg is '../../../etc/passwd'"),
        ({"row_dim": 5}, "row_dim is 5"),
        ({"stats": {"count": -1}}, "count is -1"),
        ({"layout": {"kind": "shard", "index": 3, "size": 2}}, "layout is"),
    ],
)
def test_a_line_that_lies_is_ignored_and_named(tmp_path, change, reason):
    dump = open_dump(make(tmp_path / "d", TENSOR, TENSOR | change, TENSOR | {"tap": "u"}))
    assert [r.tap for r in dump.records] == ["t", "u"]
    (problem,) = dump.problems
    assert problem.startswith("rank 0: 1 line could not be understood and is ignored (first: line 3: ")
    assert reason in problem


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"off": 8}, "seg-00000.safetensors ends before them"),
        ({"off": 1 << 50}, "seg-00000.safetensors ends before them"),
        ({"shape": [1 << 40], "nbytes": 4 << 40}, "seg-00000.safetensors ends before them"),
        ({"seg": 7}, "seg-00007.safetensors is missing"),
        ({"seg": 123456789}, "seg-123456789.safetensors is missing"),
    ],
)
def test_a_payload_that_is_not_there_is_lost_and_named(tmp_path, change, reason):
    dump = open_dump(make(tmp_path / "d", TENSOR, TENSOR | change | {"tap": "u"}))
    assert dump.problems == [f"rank 0: 1 tensor lost the payload: {reason}"]
    good, bad = dump.records
    assert good.payload is not None
    assert bad.payload is None
    with pytest.raises(DumpError, match="only its statistics"):
        dump.read(bad)


@pytest.mark.parametrize("header", [505 + 24, 1 << 40, (1 << 64) - 1])
def test_a_header_longer_than_the_file(tmp_path, header):
    dump = open_dump(make(tmp_path / "d", TENSOR, header=header))
    assert dump.problems == ["rank 0: 1 tensor lost the payload: seg-00000.safetensors has a damaged header"]


def test_nothing_outside_the_dump_is_read(tmp_path):
    outside = tmp_path / "secret"
    outside.write_bytes((504).to_bytes(8, "little") + bytes(528))
    root = make(tmp_path / "d", TENSOR)
    segment = root / "rank0000/seg-00000.safetensors"
    segment.unlink()
    segment.symlink_to(outside)
    assert "cannot be opened" in open_dump(root).problems[0]
    shutil.copytree(root, tmp_path / "other")
    (root / "rank0001").symlink_to(tmp_path / "other/rank0000")
    dump = open_dump(root)
    assert dump.ranks == (0,)
    assert "rank0001 is not a directory of the dump itself (a link?): not read" in dump.problems
    (root / "rank0000/journal.jsonl").unlink()
    (root / "rank0000/journal.jsonl").symlink_to(outside)
    assert any("journal.jsonl cannot be read" in p for p in open_dump(root).problems)
    with pytest.raises(DumpError, match="cannot read"):
        repair(root)


def test_a_pipe_in_place_of_a_file_does_not_hang(tmp_path):
    root = make(tmp_path / "d", TENSOR)
    for name in ("rank0000/seg-00000.safetensors", "rank0000/journal.jsonl", "run.json"):
        (root / name).unlink()
        os.mkfifo(root / name)
        if name == "run.json":
            with pytest.raises(DumpError, match="not a plain file"):
                open_dump(root)
        else:
            assert "not a plain file" in " ".join(open_dump(root).problems)


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        '{"event":' * 50_000,
        "9" * 10_000,
        '"text"',
        "null",
        "{}",
        '{"event": 7}',
        "\x00" * 100,
        "\xff\xfe",
        '{"event": "tensor"}',
        '{"event": "request", "req": 0, "id": 5}',
    ],
)
def test_lines_that_are_no_events(tmp_path, line):
    dump = open_dump(make(tmp_path / "d", line, TENSOR))
    assert [r.tap for r in dump.records] == ["t"]
    (problem,) = dump.problems
    assert "1 line could not be understood" in problem
    assert len(problem) < 400


def test_a_line_without_end_is_not_kept_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_LINE", 1000)
    dump = open_dump(make(tmp_path / "d", '{"event":"error","message":"' + "x" * 50_000 + '"}', TENSOR))
    assert [r.tap for r in dump.records] == ["t"]
    assert dump.errors == []
    assert "line 2: 50031 bytes long" in dump.problems[0]


def test_lines_of_any_length_are_read_together(tmp_path, monkeypatch):
    """One that is longer than others takes no other line out of its group; one too long, and a torn one, come alone."""
    monkeypatch.setattr(files, "MAX_LINE", 100)
    monkeypatch.setattr(files, "_PIECE", 10)
    short, long, huge = b"short\n", b"l" * 99 + b"\n", b"h" * 500 + b"\n"
    path = tmp_path / "journal"
    path.write_bytes(b"".join([short, long, short, huge, *[short] * 5, long, b"torn" * 9]))
    found = list(files.journal_lines(path, 4))
    assert [line for _, lines, _ in found for line in lines] == [short, long, short, *[short] * 5, long, b"torn" * 9]
    assert sum(length for *_, length in found) == path.stat().st_size
    numbers = [n + i for n, lines, _ in found for i in range(len(lines) or 1)]
    assert numbers == [*range(1, 11), 0]
    assert (4, [], 501) in found
    assert found[-1] == (0, [b"torn" * 9], 36)
    assert max(len(lines) for _, lines, _ in found) > 1
    assert all(len(lines) < 2 or len(lines) <= 4 for _, lines, _ in found)


def test_a_line_that_is_too_long_costs_later_ones_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_LINE", 1000)
    path = make(tmp_path / "d", "x" * 5000, *[TENSOR] * 3000) / "rank0000/journal.jsonl"
    assert len(list(files.journal_lines(path, 512))) < 12


def test_events_of_a_later_release_are_counted(tmp_path):
    dump = open_dump(make(tmp_path / "d", {"event": "smell"}, TENSOR | {"colour": "blue"}, {"event": "smell"}))
    assert [r.tap for r in dump.records] == ["t"]
    assert dump.problems == ["rank 0: 2 events of unknown kind ignored: smell (2)"]


@pytest.mark.parametrize("where", ["run.json", "journal"])
@pytest.mark.parametrize("schema", [2, "1", None, 0])
def test_another_schema_is_refused(tmp_path, where, schema):
    root = make(tmp_path / "d", TENSOR)
    if where == "run.json":
        (root / "run.json").write_text(json.dumps({"schema": schema}))
    else:
        (root / "rank0000/journal.jsonl").write_text(json.dumps({"event": "start", "schema": schema}) + "\n")
    with pytest.raises(DumpError, match="upgrade it" if isinstance(schema, int) and schema > 1 else "not a number"):
        open_dump(root)


def test_a_row_map_that_does_not_fit_is_dropped(tmp_path):
    rows = {"event": "rows", "step": 0, "space": "tokens", "src_rows": 3, "segments": [{"req": 0, "pos": 0, "n": 3}]}
    dump = open_dump(make(tmp_path / "d", TENSOR | {"rows": "tokens"}, TENSOR | {"rows": "vision/4"}, rows))
    assert [r.rows for r in dump.records] == [None, None]
    assert dump.problems == ["rank 0: 2 tensors without a row map that fits: rows not known"]


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda p: None, "does not exist"),
        (lambda p: p.write_text("x"), "is not a directory"),
        (lambda p: p.mkdir(), "is no dump of accprobe: it has neither run.json nor a rank directory"),
        (lambda p: (p.mkdir(), (p / "run.json").write_text("[1]")), "run.json is damaged"),
        (lambda p: (p.mkdir(), (p / "run.json").write_text("{" * 10_000)), "run.json is damaged"),
        (lambda p: (p.mkdir(), (p / "run.json").mkdir()), "cannot read"),
    ],
)
def test_what_is_no_dump(tmp_path, prepare, message):
    path = tmp_path / "d"
    prepare(path)
    with pytest.raises(DumpError, match=message) as caught:
        open_dump(path)
    assert "\n" not in str(caught.value)


def test_missing_pieces_are_named(tmp_path):
    root = make(tmp_path / "d", TENSOR)
    (root / "run.json").unlink()
    (root / "rank0003").mkdir()
    (root / "rank3").mkdir()
    dump = open_dump(root)
    assert dump.ranks == (0, 3)
    assert dump.problems[0] == "run.json is missing: versions and settings of the run are not known"
    assert dump.problems[1:] == ["rank 3: journal.jsonl cannot be read: No such file or directory"]
    (tmp_path / "e").mkdir()
    (tmp_path / "e/run.json").write_text('{"schema": 1}')
    assert open_dump(tmp_path / "e").problems == ["no rank has written anything"]


def test_a_file_cut_after_opening_is_an_error_and_not_garbage(tmp_path):
    root = make(tmp_path / "d", TENSOR)
    dump = open_dump(root)
    os.truncate(root / "rank0000/seg-00000.safetensors", 512 + 20)
    with pytest.raises(DumpError, match="has become shorter"):
        dump.read(dump.records[0])


def test_repair_refuses_what_makes_no_sense(tmp_path):
    root = make(tmp_path / "d", TENSOR, TENSOR | {"tap": "u", "off": 8, "shape": [4], "nbytes": 16})
    rank = root / "rank0000"
    (rank / "seg-00000.safetensors").rename(rank / "seg-00000.safetensors.part")
    with pytest.raises(DumpError, match="tensors overlap at byte 8"):
        repair(root)


def test_nothing_is_allocated_for_what_is_claimed(tmp_path):
    """With 1 GB of address space more than now, claims of many terabytes are read without trouble."""
    lines = [TENSOR | {"tap": str(i), "shape": [1 << 42], "nbytes": 4 << 42, "off": i} for i in range(50)]
    lines.append(TENSOR)
    root = make(tmp_path / "d", *lines)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), limits[1]))
    try:
        dump = open_dump(root)
        assert dump.read(dump.records[-1]).shape == (2, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert len(dump.records) == 51


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_to_the_journal_is_survived(tmp_path, data):
    """Bytes of a real journal changed, removed or doubled anywhere: opening and reading all that is offered works or
    gives a DumpError, and nothing else."""
    root = tmp_path / "real"
    if not root.exists():
        w = writer(root)
        w.line({"event": "request", "req": 0, "id": "r", "prompt": "p", "prompt_len": 2})
        w.line({"event": "rows", "step": 0, "space": "tokens", "src_rows": 2, "ids": [1, 2],
                "segments": [{"req": 0, "pos": 0, "n": 2, "row": 0, "phase": "prefill"}]})  # fmt: skip
        for i in range(3):
            put(w, f"t{i}", np.full((2, 3), i, "<f4"), "float32", rows="tokens", row_dim=0, layout={"kind": "partial"})
        w.close("done", {})
    journal = root / "rank0000/journal.jsonl"
    original = root / "original"
    if not original.exists():
        original.write_bytes(journal.read_bytes())
    text = bytearray(original.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        kind = data.draw(st.sampled_from(["change", "digit", "remove", "double", "cut"]))
        if kind == "change":
            text[at] = data.draw(st.integers(0, 255))
        elif kind == "digit":
            digits = [i for i, c in enumerate(text) if 48 <= c <= 57]
            if digits:
                text[digits[at % len(digits)]] = data.draw(st.sampled_from(list(b"0123456789-.e[{")))
        elif kind == "remove":
            del text[at : at + data.draw(st.integers(1, 30))]
        elif kind == "double":
            text[at:at] = text[at : at + data.draw(st.integers(1, 300))]
        else:
            del text[at:]
        if not text:
            text = bytearray(b"\n")
    journal.write_bytes(bytes(text))
    try:
        dump = open_dump(root)
    except DumpError:
        return
    for r in dump.records:
        if r.payload is not None:
            assert dump.read(r).nbytes == r.payload.nbytes
    dump.close()
