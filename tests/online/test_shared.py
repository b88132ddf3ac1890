"""Batches in a folder: what is damaged, another run's, or no batch at all."""

import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash
from opcheck.layer_dumps import build

from vllm_accprobe.online.arrivals import ArrivedRanks, FrameError, Have, MirrorError, RankMirror, digest_of
from vllm_accprobe.online.connection import NotSent
from vllm_accprobe.online.keys import Endpoint
from vllm_accprobe.online.sending import RankSender
from vllm_accprobe.online.shared import FolderReceiver


def sender(dump: Path, shared: Path, patience: float = 20) -> RankSender:
    end, stop = Endpoint(shared=shared), threading.Event()
    return RankSender(dump, 0, end, totals=None, follow=False, patience=patience, say=print, stop=stop)


def test_a_damaged_batch_is_sent_again(tmp_path: Path) -> None:
    dump, said = build(tmp_path / "dump"), list[str]()
    shared, received = tmp_path / "shared", tmp_path / "received"
    arrived = ArrivedRanks(received, None, budget=1 << 30, ahead=1 << 30, say=said.append)
    sends = sender(dump, shared)
    thread = threading.Thread(target=sends.run)
    thread.start()
    while not (found := list(shared.rglob("*.batch"))):
        pass
    whole = found[0].read_bytes()
    found[0].write_bytes(whole[:50] + bytes([whole[50] ^ 1]) + whole[51:])
    (shared / "rank0000" / "00009999.batch").symlink_to(dump / "run.json")  # never followed
    receiver = FolderReceiver(shared, arrived, said.append)
    thread.join(60)
    receiver.close()
    assert not thread.is_alive()
    assert any("a damaged batch: its digest is of other bytes" in line for line in said)
    assert (received / "rank0000/journal.jsonl").read_bytes() == (dump / "rank0000/journal.jsonl").read_bytes()
    assert arrived.ended == [0]


def test_a_folder_that_nobody_empties(tmp_path: Path) -> None:
    with pytest.raises(NotSent, match=r"rank 0: .*rank0000 was not taken for 0 s"):
        sender(build(tmp_path / "dump"), tmp_path / "shared", 0.2).run()
    assert len(list(tmp_path.rglob("*.batch"))) == 1  # what waits is bounded


def test_a_full_disk_is_named_and_what_comes_later_fits(tmp_path: Path, largest_file: Callable[[int], None]) -> None:
    dump, shared, received = build(tmp_path / "dump"), tmp_path / "shared", tmp_path / "received"
    largest_file(100)
    with pytest.raises(NotSent, match=r"rank 0: .*00000000\.batch: the file would be larger .* bytes are needed"):
        sender(dump, shared).run()
    assert not [p for p in shared.rglob("*") if p.is_file()]
    largest_file(-1)
    with pytest.raises(NotSent, match="was not taken"):
        sender(dump, shared, 0.2).run()
    largest_file(1000)  # of have.json enough
    receiver = FolderReceiver(shared, ArrivedRanks(received, None, budget=1 << 30, ahead=1 << 30, say=print), print)
    while not (shared / "rank0000/have.json").exists():
        time.sleep(0.01)
    with pytest.raises(NotSent, match=r"the receiver refuses: .*received/rank0000.*: the file would be larger"):
        sender(dump, shared).run()
    receiver.close()
    largest_file(-1)
    arrived = ArrivedRanks(received, None, budget=1 << 30, ahead=1 << 30, say=print)
    receiver = FolderReceiver(shared, arrived, print)
    sender(dump, shared).run()
    receiver.close()
    assert arrived.ended == [0]


@pytest.fixture
def largest_file() -> Iterator[Callable[[int], None]]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda nbytes: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_another_run_s_batches_are_not_taken(tmp_path: Path) -> None:
    shared, received = tmp_path / "shared", tmp_path / "received"
    arrived = ArrivedRanks(received, None, budget=1 << 30, ahead=1 << 30, say=print)
    receiver = FolderReceiver(shared, arrived, print)
    first = build(tmp_path / "one")
    journal = first / "rank0000/journal.jsonl"
    sender(first, shared).run()
    (shared / "rank0000/have.json").unlink()
    second = build(tmp_path / "two")
    lines = (second / "rank0000/journal.jsonl").read_bytes().split(b"\n", 1)
    (second / "rank0000/journal.jsonl").write_bytes(lines[0].replace(b"}", b', "run": 2}', 1) + b"\n" + lines[1])
    with pytest.raises(NotSent, match="holds rank 0 of another run"):
        sender(second, shared).run()
    receiver.close()
    assert (received / "rank0000/journal.jsonl").read_bytes() == journal.read_bytes()


def test_what_was_refused_is_taken_again_but_nothing_is_deleted_through_a_link(tmp_path: Path) -> None:
    shared, elsewhere = tmp_path / "shared", tmp_path / "elsewhere"
    for folder in (elsewhere, shared / "rank0001"):
        folder.mkdir(parents=True)
        (folder / "have.json").write_text('{"refused": "a disk was full"}')
    (shared / "rank0000").symlink_to(elsewhere)
    arrived = ArrivedRanks(tmp_path / "received", None, budget=1 << 30, ahead=1 << 30, say=print)
    FolderReceiver(shared, arrived, print).close()
    assert [(folder / "have.json").exists() for folder in (elsewhere, shared / "rank0001")] == [True, False]


# --- what has arrived, byte by byte ---


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
    assert again.have() == Have(len(LINE), xxhash.xxh3_128_hexdigest(LINE), ((0, 8),))
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
