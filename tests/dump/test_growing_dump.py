"""A dump that is read while it grows: each line once, and the same as when it is opened anew."""

import shutil
from pathlib import Path

import pytest
from opcheck.layer_dumps import build

from vllm_accprobe.dump.files import MAX_LINE
from vllm_accprobe.dump.reader import Dump, GrowingDump, open_dump
from vllm_accprobe.dump.repair import repair
from vllm_accprobe.dump.schema import JOURNAL

STEPS = 21
SEGMENT = "seg-00000.safetensors"


@pytest.fixture(autouse=True, params=[False, True], ids=["general", "compiled"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of tensors are read by either way."""
    monkeypatch.setattr("vllm_accprobe.dump.compiled_lines.WORTH", 0 if request.param else 1 << 60)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    spans = [[(0, k, 1)] if k < 14 else [(1, k - 14, 1)] for k in range(STEPS)]
    return build(tmp_path / "whole", "layers.0.norm", spans=tuple(spans))


def copied(whole: Path, root: Path, rank: int = 0) -> tuple[Path, list[bytes]]:
    """A rank with payloads and no journal yet, and the journal's lines."""
    directory = root / f"rank{rank:04}"
    directory.mkdir(parents=True)
    shutil.copy(whole / "run.json", root)
    shutil.copy(whole / "rank0000" / SEGMENT, directory)
    (directory / JOURNAL).touch()
    return directory / JOURNAL, (whole / "rank0000" / JOURNAL).read_bytes().splitlines(keepends=True)


def append(journal: Path, data: bytes) -> None:
    with journal.open("ab") as file:
        file.write(data)


def what(dump: Dump) -> dict[str, object]:
    """All that a dump says."""
    said = {name: value for name, value in vars(dump).items() if not name.startswith("_")}
    data = {key: (d.path, d.start, d.size) for key, d in dump.data.items()}
    lists = {name: list(getattr(dump, name)) for name in ("records", "padding")}
    return {**said, **lists, "lives": vars(dump.lives), "data": data}


def bytes_read() -> int:
    """By this thread so far, whether the disk or memory had them."""
    with open("/proc/thread-self/io") as file:
        return int(next(line for line in file if line.startswith("rchar")).split()[1])


def test_each_look_is_the_dump_opened_anew_and_each_line_is_read_once(tmp_path: Path, whole: Path) -> None:
    journal, lines = copied(whole, tmp_path / "d")
    growing, looks, read = GrowingDump(tmp_path / "d"), 0, 0
    for at in range(0, len(lines), 20):
        part = b"".join(lines[at : at + 20])
        for torn in (part[: len(part) // 3 or 1], part[len(part) // 3 or 1 :]):  # mostly within a line
            append(journal, torn)
            before = bytes_read()
            found = growing.look()
            read, looks = read + bytes_read() - before, looks + 1
            assert what(found) == what(open_dump(tmp_path / "d"))
    size = journal.stat().st_size
    longest = max(map(len, lines))
    rest = (whole / "run.json").stat().st_size + 4 * longest + 4096  # run.json; torn lines; the segment's header
    assert looks * size / 2 > 2 * (size + looks * rest)  # else this proves nothing
    assert size <= read <= size + looks * rest
    record = found.records[0]
    assert (found.read(record) == open_dump(whole).read(record)).all()


def test_what_was_looked_at_is_let_go(tmp_path: Path, whole: Path) -> None:
    journal, lines = copied(whole, tmp_path / "d")
    growing = GrowingDump(tmp_path / "d")
    append(journal, b"".join(lines[: len(lines) // 2]))
    old = [r for r in growing.look().records if r.step is not None]
    last = max(r.step for r in old)
    append(journal, b"".join(lines[len(lines) // 2 :]))
    found, anew = growing.look(last - 1), open_dump(tmp_path / "d")
    assert list(found.records) == [r for r in anew.records if r.step is None or r.step >= last]
    assert any(r.step is None for r in found.records)
    assert (found.steps, found.rows) == (anew.steps, anew.rows)
    assert {r.step for r in growing.look(0, lambda site: site.role == "output.0").records} >= {last}
    kept = growing.look(STEPS, lambda site: site.role == "output.0").records
    assert ({r.role for r in kept}, kept[0].step) == ({"output.0"}, last)  # what was let go does not come back


def test_ranks_come_segments_are_closed_and_a_journal_is_repaired(tmp_path: Path, whole: Path) -> None:
    root = tmp_path / "d"
    journal, lines = copied(whole, root)
    segment = journal.with_name(SEGMENT)
    part = segment.rename(f"{segment}.part")
    half = len(lines) // 2
    append(journal, b"".join(lines[:half]) + lines[half][:30])
    growing = GrowingDump(root)
    data = part.read_bytes()
    part.write_bytes(data[: len(data) // 8])  # payloads that are not there yet
    found = growing.look()
    assert what(found) == what(open_dump(root))
    assert any(r.lost for r in found.records)
    part.write_bytes(data)
    assert not any(r.lost for r in growing.look().records)
    other, _ = copied(whole, root, 1)
    append(other, b"".join(lines))
    assert growing.look().ranks == (0, 1)
    at = growing._readers[0].at
    repair(root)  # cuts the torn line off, closes the segment and adds a line
    assert journal.stat().st_size > at
    found = growing.look()
    assert what(found) == what(open_dump(root))
    assert found.ends[0].reason == "repaired"
    found.read(found.records[0])
    shutil.rmtree(other.parent)
    assert what(growing.look()) == what(open_dump(root))


def test_a_call_that_was_replaced_does_not_come_back(tmp_path: Path, whole: Path) -> None:
    """Both are let go, and with them what says that one took the other's place."""
    journal, lines = copied(whole, tmp_path / "d")
    tensor = '{"event":"tensor","tap":"a","role":"output.0","dtype":"float32","shape":[2],"call":0,"seq":0,"step":%d}\n'
    call = '{"event":"op","op":"x","tap":"a","step":%d,"call":0,"slot":0,"args":[],"kwargs":{},"outputs":[]}\n'
    both = "".join(line % step for step in (0, 1) for line in (tensor, call))
    unplaced = call.replace("%d", "null").replace('"slot":0,', "")  # of no step: never let go
    append(journal, lines[0] + (both + unplaced).encode())
    growing = GrowingDump(tmp_path / "d")
    assert [[r.step for r in growing.look(after, lambda site: True).records] for after in (-1, 1, 1)] == [[1]] * 3
    assert [op.step for op in growing.look(1).ops] == [None]


def test_a_shorter_journal_behind_a_line_that_is_too_long(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, lines = copied(whole, tmp_path / "d")
    monkeypatch.setattr("vllm_accprobe.dump.files.MAX_LINE", 4096)
    append(journal, b"".join(lines) + b"x" * 5000 + b"\n")
    growing = GrowingDump(tmp_path / "d")
    assert growing.look().bad_lines == {0: 1}
    journal.write_bytes(b"".join(lines[:30]))
    assert what(growing.look()) == what(open_dump(tmp_path / "d"))


@pytest.mark.parametrize("how", ["shorter", "other lines", "gone", "a link"])
@pytest.mark.parametrize("end", [b"", b" " * MAX_LINE + b"\n"], ids=["", "behind a line that is too long"])
def test_a_journal_that_is_another_one_is_read_from_its_beginning(
    tmp_path: Path, whole: Path, how: str, end: bytes
) -> None:  # fmt: skip
    journal, lines = copied(whole, tmp_path / "d")
    append(journal, b"".join(lines) + end)
    growing = GrowingDump(tmp_path / "d")
    growing.look()
    if how == "shorter":
        journal.write_bytes(b"".join(lines[:30]))
    elif how == "other lines":
        size = journal.stat().st_size
        journal.write_bytes(b"".join(lines[:1] + lines[40:] + lines[1:40]) + end)
        assert journal.stat().st_size == size
    else:
        journal.unlink()
        if how == "a link":
            journal.symlink_to(whole / "rank0000" / JOURNAL)
    assert what(growing.look()) == what(open_dump(tmp_path / "d"))


def test_lines_that_are_bad_are_counted_once(tmp_path: Path, whole: Path) -> None:
    journal, lines = copied(whole, tmp_path / "d")
    growing = GrowingDump(tmp_path / "d")
    append(journal, b"".join(lines[:3]))
    growing.look()
    for bad in (b"no JSON\n", b'{"event":"smell"}\n', b'{"event":' * 3 + b"\n"):
        append(journal, lines.pop() + bad)
        assert what(growing.look()) == what(open_dump(tmp_path / "d"))
    assert growing.look().bad_lines == {0: 2}
    assert "(first: line 5: " in "\n".join(growing.look().problems)
