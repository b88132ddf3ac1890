"""Batches in a folder: what is damaged, another run's, or no batch at all."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from opcheck.layer_dumps import build

from vllm_accprobe.online.arrivals import ArrivedRanks
from vllm_accprobe.online.line import NotSent
from vllm_accprobe.online.shared import FolderReceiver, FolderSender


def sender(dump: Path, shared: Path) -> FolderSender:
    return FolderSender(dump, 0, shared, totals=None, follow=False, patience=20, say=print, stop=threading.Event())


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
