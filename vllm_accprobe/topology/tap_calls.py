"""The calls of one step of one rank, with what tells their tensors apart, and which call stands inside which.

The problem: which tensor feeds which is nowhere written; but a tensor that one module gave and another took has the
same bytes. The idea: a tensor is known by the hash of its bytes: the capture's, or one that is computed here where the
dump has values and no hash; where only statistics were stored, by dtype, shape and these. A call of a module is its
tensors under one tap and call; of an operator, what its line names.
Not here: which call feeds which (data_flow.py), what is computed between calls (align/by_values.py).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from vllm_accprobe.align.by_values import LARGEST
from vllm_accprobe.align.names import enclosing
from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.opcalls import SEPARATOR, inputs, tensors
from vllm_accprobe.dump.reader import Dump, DumpError
from vllm_accprobe.dump.schema import ROOT_TAP, OpCall, Record, Stats

Tick = Callable[[], None]


@dataclass(frozen=True, slots=True)
class CallTensor:
    """A tensor at a call. key: equal for equal bytes, None where nothing tells; record: None where only a line of an
    operator's call names it; note: its statistics."""

    role: str
    key: Hashable | None
    dtype: str
    shape: tuple[int, ...]
    record: Record | None = None
    note: str = ""


@dataclass
class TapCall:
    """One call of a tap. begin, end: places in the step's order; home: the tap that it stands in, ROOT_TAP at last."""

    tap: str
    cls: str
    call: int
    begin: int
    end: int
    takes: list[CallTensor] = field(default_factory=list)
    gives: list[CallTensor] = field(default_factory=list)
    weights: list[CallTensor] = field(default_factory=list)
    home: str = ROOT_TAP
    operator: bool = False

    @property
    def name(self) -> str:
        return f"{self.tap}#{self.call}" if self.call else self.tap


def calls_of(dump: Dump, rank: int, step: int, tick: Tick = lambda: None) -> list[TapCall]:
    """All calls of ``step`` on ``rank``, modules and operators, in the order in which they began."""
    known = _Identities(dump, tick)
    operators = {(op.tap, op.call): op for op in dump.ops if (op.rank, op.step) == (rank, step) and op.inside is None}
    found: dict[tuple[str, int], TapCall] = {}
    own = [r for r in dump.records if r.rank == rank and r.step == step]
    places = {(r.tap, r.call, r.role) for r in own}
    for r in sorted(own, key=lambda r: r.seq):
        kind = r.role.partition(".")[0]
        if kind not in ("input", "output", "value", "inplace"):
            continue
        if SEPARATOR in r.tap and (r.tap, r.call) not in operators:
            continue  # inside another operator's kernel
        call = found.setdefault((r.tap, r.call), TapCall(r.tap, r.cls, r.call, r.seq, r.seq))
        seen = CallTensor(r.role, known.of(r), r.dtype, r.shape, r, _said(r.stats))
        if kind == "input":
            call.takes.append(seen)
            call.begin = min(call.begin, r.seq)
        elif kind == "inplace" and _alone(r, places):  # kept behind the operator only: what it took, as far as told
            call.takes.append(seen)
        elif kind != "inplace" or all(seen.key != g.key for g in call.gives):
            call.gives.append(seen)
            call.end = max(call.end, r.seq)
    for key, op in operators.items():
        _complete(found, key, op)
    for r in dump.records:
        if r.step is None and r.rank == rank and (r.tap, 0) in found:
            found[r.tap, 0].weights.append(CallTensor(r.role, None, r.dtype, r.shape))
    whole = getattr(dump, "family", "") in ("atb", "ge", "fx")
    for c in found.values():
        c.operator = whole or ":" in c.tap.rpartition(".")[2]
    calls = sorted(found.values(), key=lambda c: (c.begin, -c.end))
    taps = {c.tap for c in calls}
    for c in calls:
        c.home = _home(c, taps)
    return calls


def _alone(r: Record, places: set[tuple[str, int, str]]) -> bool:
    return (r.tap, r.call, f"input{r.role.removeprefix('inplace')}") not in places


def _home(c: TapCall, taps: set[str]) -> str:
    if c.tap == ROOT_TAP:
        return ""
    if SEPARATOR in c.tap:
        above = c.tap.partition(SEPARATOR)[0]
        places = [above, *enclosing(above)]
    else:
        places = list(enclosing(c.tap))
    return next((p for p in places if p in taps), ROOT_TAP)


def _complete(found: dict[tuple[str, int], TapCall], key: tuple[str, int], op: OpCall) -> None:
    """Adds the tensors that only the operator's line names."""
    call = found.setdefault(key, TapCall(op.tap, op.op, op.call, op.seq, op.seq))
    call.cls = op.op
    call.begin = min(call.begin, op.seq)
    call.end = max(call.end, op.seq)
    for side, listed in ((call.takes, list(inputs(op))), (call.gives, list(tensors(op.outputs)))):
        roles = {s.role for s in side}
        side += [_named(t) for t in listed if t.get("role") not in roles and "param" not in t]
    call.weights += [_named(t) for t in inputs(op) if "param" in t]
    for t in inputs(op):
        after = t.get("after")
        if isinstance(after, dict) and isinstance(after.get("hash"), str):
            call.gives.append(_named({**t, "role": f"inplace.{t['role']}", "hash": after["hash"]}))


def _named(t: dict[str, Any]) -> CallTensor:
    key = t["hash"] if isinstance(t.get("hash"), str) else None
    return CallTensor(str(t["role"]), key, str(t["dtype"]), tuple(t.get("shape") or ()))


class _Identities:
    """What tells records apart; each tensor is read once."""

    def __init__(self, dump: Dump, tick: Tick):
        self._dump, self._tick = dump, tick

    def of(self, r: Record) -> Hashable | None:
        self._tick()
        if r.hash is not None:
            return r.hash
        if r.payload is not None and 0 < r.payload.nbytes <= LARGEST:
            try:
                bits = self._dump.read(r)
            except (DumpError, OSError):
                return None
            return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(bits).reshape(-1).view(np.uint8).data)
        s = r.stats
        if s is None or not s.l2 or r.dtype not in DTYPES:
            return None
        return (r.dtype, r.shape, s.min, s.max, s.mean, s.l2)


def _said(s: Stats | None) -> str:
    if s is None or s.min is None or s.max is None:
        return ""
    said = f"min {s.min:.4g}, max {s.max:.4g}, mean {s.mean or 0:.4g}"
    return said + (f", {s.nan} NaN" if s.nan else "") + (f", {s.inf} Inf" if s.inf else "")


def fullest(records: Iterable[Record], ops: Iterable[OpCall]) -> tuple[int, int] | None:
    """(rank, step) in which most taps were seen, the first of several; None where nothing has a step."""
    taps: dict[tuple[int, int], set[str]] = {}
    listed: list[Record | OpCall] = [*records, *ops]
    for seen in listed:
        if seen.step is not None:
            taps.setdefault((seen.rank, seen.step), set()).add(seen.tap)
    return max(sorted(taps), key=lambda place: len(taps[place]), default=None)


def cut(calls: Sequence[TapCall], level: int | None) -> list[TapCall]:
    """The calls to draw: those ``level`` deep, and those above that have none inside; None: the innermost of all. The
    model itself is level 0, what it calls 1."""
    homes = {c.home for c in calls}
    depth = depths(calls)
    root = [c for c in calls if c.tap == ROOT_TAP]
    if level == 0 and root:
        return root
    if level is None:
        drawn = [c for c in calls if c.tap != ROOT_TAP and c.tap not in homes]
    else:
        at = max(level, 1)
        drawn = [c for c in calls if depth[c.tap] == at or (0 < depth[c.tap] < at and c.tap not in homes)]
    return drawn or root


def depths(calls: Iterable[TapCall]) -> dict[str, int]:
    """How many called taps stand around each; those with none around them are 1 deep, the model itself 0."""
    home = {c.tap: c.home for c in calls}
    out = {ROOT_TAP: 0}
    for tap in home:
        chain = []
        at = tap
        while at not in out:
            chain.append(at)
            at = home.get(at, ROOT_TAP)
        for own in reversed(chain):
            out[own] = out[at] + 1
            at = own
    return out
