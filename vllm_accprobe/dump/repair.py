"""Finishes the dump of a run that was killed.

The problem: a killed run leaves its last segment without a header, as ``.part``, which other tools cannot read, and a
journal that may end in the middle of a line. The idea: everything needed stands in the journal: the header is made from
its lines, the torn end is cut off, and an ``end`` line says that the dump was repaired. Run twice it does nothing the
second time. Not here: reading with what is there, which needs no repair (reader.py).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.files import (
    DumpError,
    HeaderEntry,
    build_header,
    entry_key,
    journal_lines,
    open_regular,
    part_name,
    segment_data,
    write_all,
)
from vllm_accprobe.dump.journal import END
from vllm_accprobe.dump.journal_writer import encode, lock, remove_reserve
from vllm_accprobe.dump.reader import Dump, open_dump
from vllm_accprobe.dump.schema import JOURNAL, End, Record, rank_dir, segment_name

_PART = re.compile(r"seg-(\d{5,9})\.safetensors\.part", re.ASCII)


@dataclass(frozen=True)
class RankRepair:
    """What was done for one rank: ``segments`` finished, ``tensors`` readable, ``cut`` bytes of a torn line removed,
    ``dropped`` segment files without a single whole tensor deleted (not if lines of the journal are damaged, whose
    tensors they may hold); ``needed`` is False for a dump closed in order. ``lost``: a sentence for each reason why
    payloads that the journal lists cannot be read, which no repair brings back."""

    rank: int
    needed: bool
    segments: int = 0
    tensors: int = 0
    cut: int = 0
    dropped: int = 0
    lost: tuple[str, ...] = ()


def repair(path: str | Path) -> list[RankRepair]:
    """Repairs the dump at ``path`` in place, rank by rank. Nothing that the journal lists is lost. Raises DumpError,
    also where a file cannot be written, or while the run is still alive."""
    dump = open_dump(path)
    for rank in dump.ranks:
        _refuse_running(dump.path / rank_dir(rank) / JOURNAL)
    done = [_repair_rank(dump, rank) for rank in dump.ranks]
    dump.close()
    lost = {rank: tuple(p for p in dump.unread if p.startswith(f"rank {rank}: ")) for rank in dump.ranks}
    return [replace(found, lost=lost[found.rank]) for found in done]


def _refuse_running(journal: Path) -> None:
    try:
        fd = open_regular(journal)
    except OSError as e:
        raise DumpError(f"cannot read {journal}: {e.strerror or e}") from None
    try:
        if not lock(fd):
            raise DumpError(f"{journal} is still being written: end the run first, or wait until it has ended")
    finally:
        os.close(fd)


def _repair_rank(dump: Dump, rank: int) -> RankRepair:
    directory = dump.path / rank_dir(rank)
    parts = sorted(int(m[1]) for name in os.listdir(directory) if (m := _PART.fullmatch(name)))
    if rank in dump.ends and not parts:
        return RankRepair(rank, needed=False)
    records = [r for r in (*dump.records, *dump.padding) if r.rank == rank and r.payload is not None]
    try:
        finished = [_finish(directory, index, records) for index in parts]
        dropped = [] if rank in dump.bad_lines else [i for i, done in zip(parts, finished, strict=True) if not done]
        for index in dropped:  # created, but killed before a tensor was whole in it
            (directory / part_name(index)).unlink()
        cut = 0
        if rank not in dump.ends:
            cut = _close_journal(dump, rank, records)
            remove_reserve(directory)
    except OSError as e:
        raise DumpError(f"cannot repair {directory}: {e.strerror or e}") from None
    return RankRepair(rank, True, sum(finished), len(records), cut, len(dropped))


def _finish(directory: Path, index: int, records: list[Record]) -> bool:
    part, target = directory / part_name(index), directory / segment_name(index)
    if target.exists():
        raise DumpError(f"{target} and {part.name} both exist: remove the one that is wrong")
    entries = [_entry(r) for r in records if r.payload is not None and r.payload.seg == index and r.payload.nbytes]
    if not entries:
        return False
    data = segment_data(part)
    end = max(e.off + e.nbytes for e in entries)
    try:
        header = build_header(entries, end, data.start - 8)
    except ValueError as e:
        raise DumpError(f"cannot write the header of {part}: {e}") from None
    _overwrite(part, data.start + end, header, 8)
    os.rename(part, target)
    return True


def _overwrite(path: Path, keep: int, data: bytes, at: int) -> None:
    """Cuts a file to ``keep`` bytes, then writes ``data`` at ``at``."""
    os.close(open_regular(path))  # no link
    fd = os.open(path, os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0))
    try:
        os.ftruncate(fd, keep)
        write_all(fd, data, at)
        os.fsync(fd)
    finally:
        os.close(fd)


def _entry(r: Record) -> HeaderEntry:
    assert r.payload is not None
    key = entry_key(r.step, r.tap, r.role, r.call)
    return HeaderEntry(key, r.dtype if r.dtype in DTYPES else "", r.shape, r.payload.off, r.payload.nbytes)


def _close_journal(dump: Dump, rank: int, records: list[Record]) -> int:
    """Cuts the torn end off, adds the ``end`` line; the number of bytes cut."""
    path = dump.path / rank_dir(rank) / JOURNAL
    whole = cut = 0
    for number, _, length in journal_lines(path, 512):
        if number:
            whole += length
        else:
            cut = length
    skipped: dict[str, int] = {}
    for s in dump.skips:
        skipped[s.reason] = skipped.get(s.reason, 0) + s.count
    steps = sum(1 for r, _ in dump.steps if r == rank)
    tensors = sum(1 for r in (*dump.records, *dump.padding) if r.rank == rank)
    nbytes = whole + sum(n for _, n in {(r.payload, r.payload.nbytes) for r in records if r.payload})
    end = End("repaired", steps, tensors, nbytes, skipped)
    _overwrite(path, whole, encode(END.to_line(end)), whole)
    return cut
