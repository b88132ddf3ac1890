"""Partial sums that the model used as they were.

The problem: a row-parallel layer that was told to leave its all-reduce to somebody else, who does not do it either, has
outputs that are written down as partial sums; added up they are right, and the model went on with one rank's share. The
idea: the bytes tell. A norm reads whole hidden states; where what a norm read is, bit for bit, what was to be added up,
nobody added it up, and each rank's share is compared as the value that it was taken for.
Not here: how partial sums are added (align/shards.py), copies that differ (replicas.py).
"""

from __future__ import annotations

from typing import Any

from vllm_accprobe.dump.schema import Layout, Record

WHOLE = Layout("replicated")
Loose = frozenset[tuple[int, "int | None", str]]
"""(rank, step, hash) of partial sums that were used as they were."""


def loose(dump: Any) -> Loose:
    """Those of ``dump``; none where it has no hashes or one rank."""
    if len(dump.ranks) < 2:
        return frozenset()
    shares = {_at(r) for r in dump.records if r.layout.kind == "partial" and r.layout.size > 1 and r.hash}
    if not shares:
        return frozenset()
    return frozenset(_at(r) for r in dump.records if _reads_whole(r) and _at(r) in shares)


def unsummed_taps(dump: Any, found: Loose) -> list[str]:
    """The taps whose shares were used, innermost first of those that give out the same bytes."""
    last: dict[tuple[int, int | None, str], str] = {}
    for r in dump.records:
        if r.layout.kind == "partial" and r.hash and _at(r) in found:
            last.setdefault(_at(r), r.tap)
    return list(dict.fromkeys(last.values()))


def _reads_whole(r: Record) -> bool:
    return r.role.startswith("input") and r.layout.kind == "replicated" and "norm" in r.cls.lower() and bool(r.hash)


def _at(r: Record) -> tuple[int, int | None, str]:
    return r.rank, r.step, r.hash or ""
