"""What a ledger of states leaves in the journal: a line per finding, and one with what was looked at.

The problem: whether a cache held what was written is found inside of a run, where bytes are, and is read long after by
people and by `compare`, which must say "the cache, not the kernel" before it blames an operator. The idea: a finding
is one flat line with everything that its sentence needs, so that nobody must look anything up. Not here: how they are
found (capture/states/), the other lines (event_lines.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_accprobe.dump.journal.event_lines import LineKind
from vllm_accprobe.dump.journal.events import MAX_INT, Event, short

FREED, STALE, OTHER, LATE, CHANGED, METADATA, STRANGE, FOREIGN, UNWRITTEN = (
    "freed", "stale", "other", "late", "changed", "metadata", "strange", "foreign", "unwritten",
)  # fmt: skip
KINDS_OF_FINDINGS = {
    FREED: "a block freed while it is still read",
    STALE: "a stale slot",
    OTHER: "the state of another request",
    LATE: "a copy that came late",
    CHANGED: "bytes that nobody wrote",
    METADATA: "stale metadata",
    STRANGE: "a prefix hit of other tokens",
    FOREIGN: "a prefix hit of another context",
    UNWRITTEN: "a state that was not written",
}
"""What a finding is, by its word in the journal."""
HITS = (STRANGE, FOREIGN)
"""Kinds that say all that is known in their own words: who reads what of whom."""
MOST_FINDINGS = 200
"""Lines of one rank; further findings are counted."""


@dataclass(frozen=True, slots=True)
class StateFinding:
    """``{"event": "state"}``: what a kernel read, or was given, is not what the schedule demands.

    kind: of KINDS_OF_FINDINGS; cache: ``kv`` or ``state``. layer: the first in which it was seen, "" where it is
    true of all of a group; layers: in how many. block: of the scheduler, slot: within the cache where a row is meant.
    request: who reads, by its external id; low, high: its positions there, both included, None where not known.
    writer: who wrote last, "" for nobody known; written: in which step; wrote_low, wrote_high: which positions.
    between: what happened to the block since, a sentence each; how: what is known of the bytes or the numbers.
    part: which state of a recurrent layer; first: the first layer of the group, where ``layer`` is "".
    """

    step: int
    kind: str
    cache: str
    group: int
    layer: str
    layers: int
    block: int
    request: str
    how: str
    slot: int | None = None
    low: int | None = None
    high: int | None = None
    writer: str = ""
    written: int | None = None
    wrote_low: int | None = None
    wrote_high: int | None = None
    between: tuple[str, ...] = ()
    part: str = ""
    first: str = ""


@dataclass(frozen=True, slots=True)
class CachedRows:
    """``n`` positions from ``low`` on whose cached rows request ``owner`` (the journal's number) computed; -1: nobody
    knows who, or a request that the capture was not told of."""

    low: int
    n: int
    owner: int


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """``{"event": "cached"}``: request ``req`` begins, or goes on, in ``step`` behind positions that it finds in the
    cache: whose rows they are. why: what is wrong with that, "" for nothing."""

    step: int
    req: int
    runs: tuple[CachedRows, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class StateTotals:
    """``{"event": "states"}``: what a rank's ledger has looked at. mode: owners (no bytes), events, sample or full;
    layers: under watch; steps; hashed: blocks of layers hashed after a write; checked: of those, compared again;
    held: numbers of metadata compared with the schedule; findings: in all, of which those beyond MOST_FINDINGS have no
    line. events: how often what happened; skipped: what is not watched, and how many layers or steps that are."""

    mode: str
    layers: int
    steps: int
    hashed: int
    checked: int
    held: int
    findings: int
    events: Mapping[str, int] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)


def _kind(e: Event, key: str) -> str:
    kind = e.get(key)
    if kind not in KINDS_OF_FINDINGS:
        raise ValueError(f"{key} is {short(kind)}")
    return str(kind)


def _texts(e: Event, key: str) -> tuple[str, ...]:
    value = e.get(key) or []
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise ValueError(f"{key} is {short(value)}")
    return tuple(v[:200] for v in value[:8])


def _counts(e: Event, key: str) -> dict[str, int]:
    value: Any = e.get(key) or {}
    if not isinstance(value, dict) or not all(type(v) is int for v in value.values()):
        raise ValueError(f"{key} is {short(value)}")
    return value


def _owner(e: Event, key: str) -> int:
    value = e.get(key)
    if type(value) is not int or not -1 <= value <= MAX_INT:
        raise ValueError(f"{key} is {short(value)}")
    return value


FINDING = LineKind(
    "state", StateFinding, needs=("step", "kind", "block"), readers={"kind": _kind, "between": _texts},
    left_out=(None, (), ""),
)  # fmt: skip
TOTALS = LineKind("states", StateTotals, needs=("mode",), readers={"events": _counts, "skipped": _counts})
RUN = LineKind("", CachedRows, needs=("low", "n", "owner"), readers={"owner": _owner})


def _runs(e: Event, key: str) -> tuple[CachedRows, ...]:
    value = e.get(key) or []
    if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
        raise ValueError(f"{key} is {short(value)}")
    return tuple(RUN.from_line(v) for v in value)


CACHED = LineKind(
    "cached", CachedPrefix, needs=("step", "req"), left_out=(None, (), ""),
    readers={"runs": _runs}, writers={"runs": lambda runs: [RUN.to_line(run) for run in runs]},
)  # fmt: skip
STATE_KINDS = {kind.event: kind for kind in (FINDING, TOTALS, CACHED)}


def where(found: StateFinding) -> str:
    """``layer model.layers.0.self_attn.attn and 3 more, block 7, slot 229``."""
    slot = "" if found.slot is None else f", slot {found.slot}"
    return f"{_layers(found)}, block {found.block}{slot}"


def _layers(found: StateFinding) -> str:
    layers = f" and {found.layers - 1} more" if found.layers > 1 else ""
    whole = f"all {found.layers} layers" if found.layers != 1 else "the one layer"
    part = f" ({found.part})" if found.part else ""
    return f"layer {found.layer}{part}{layers}" if found.layer else f"{whole} of cache group {found.group}"


def sentence(found: StateFinding) -> str:
    """What a finding says, without "the cache, not the kernel"."""
    reads = f"request '{found.request}'" + _positions(found.low, found.high)
    last = "nobody is known to have written there"
    if found.writer:
        last = f"written last by request '{found.writer}' in step {found.written}"
        last += _positions(found.wrote_low, found.wrote_high)
    between = "; ".join(found.between) if found.between else "nothing"
    what = KINDS_OF_FINDINGS[found.kind]
    if found.kind in HITS:
        return f"{what}: step {found.step}, {_layers(found)}: {found.how}"
    return f"{what}: step {found.step}, {where(found)}, read by {reads}: {found.how}; {last}; since then: {between}"


def _positions(low: int | None, high: int | None) -> str:
    if low is None or high is None:
        return ""
    return f" (position {low})" if low == high else f" (positions {low} to {high})"
