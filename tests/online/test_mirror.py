"""What has arrived, byte by byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash

from vllm_accprobe.online.arrivals import FrameError, MirrorError, RankMirror, digest_of

LINE = b'{"event":"start","schema":1}\n'


def test_it_grows_once_and_only_in_order(tmp_path: Path) -> None:
    mirror = RankMirror(tmp_path, 3, 1 << 20)
    mirror.data(0, 0, memoryview(b"abcdef"))
    mirror.data(0, 4, memoryview(b"efgh"))  # twice, and on
    mirror.data(0, 0, memoryview(b"abc"))
    mirror.journal(0, memoryview(LINE))
    with pytest.raises(FrameError, match="segment 0 goes on at byte 9, where 8 are here"):
        mirror.data(0, 9, memoryview(b"x"))
    with pytest.raises(FrameError, match="the journal goes on at byte 99"):
        mirror.journal(99, memoryview(b"x"))
    assert (tmp_path / "rank0003/journal.jsonl").read_bytes() == b""  # not before the payloads are on the disk
    assert mirror.sync() == len(LINE)
    mirror.journal(len(LINE), memoryview(b"{}\n"))
    mirror.close()  # as a kill: what waited comes again
    again = RankMirror(tmp_path, 3, 1 << 20)
    assert again.have() == {
        "journal": len(LINE), "digest": xxhash.xxh3_128_hexdigest(LINE), "segments": [[0, 8]],
    }  # fmt: skip
    again.data(0, 8, memoryview(b"ij"))
    again.journal(again.written, memoryview(b"{}\n"))
    again.sync()
    again.close()
    assert (tmp_path / "rank0003/journal.jsonl").read_bytes() == LINE + b"{}\n"
    data = (tmp_path / "rank0003/seg-00000.safetensors.part").read_bytes()
    assert data[8 + int.from_bytes(data[:8], "little") :] == b"abcdefghij"


def test_its_room_is_limited(tmp_path: Path) -> None:
    mirror = RankMirror(tmp_path, 0, 100)
    mirror.data(1, 0, memoryview(b"x" * 90))
    with pytest.raises(MirrorError, match="budget"):
        mirror.journal(0, memoryview(b"x" * 11))
    with pytest.raises(FrameError, match="beyond all that a rank may have"):
        mirror.data(1 << 14, 0, memoryview(b"x"))
    assert sorted(p.name for p in (tmp_path / "rank0000").iterdir()) == ["journal.jsonl", "seg-00001.safetensors.part"]
    mirror.close()


def test_a_digest_is_of_the_beginning(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    assert digest_of(tmp_path / "f", 2) == xxhash.xxh3_128_hexdigest(b"ab")
    assert digest_of(tmp_path / "f", 4) is None
