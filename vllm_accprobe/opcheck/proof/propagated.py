"""What a blamed module created, and what it only passed on: both from its replay.

The problem: a module that is wrong for its own inputs may also have had wrong inputs, and the two errors should not be
read as one. The idea: three values of the same rows, golden's output G, mine's output M and the reference's output R
from mine's inputs, give created = |M - R| / |G| and propagated = |R - G| / |G|, Euclidean norms over a row. Golden's
rows are found as a comparison finds them, so golden may be another framework, batched in another way or cut over ranks.
Only the modules that are blamed are run again: a handful. Where golden's rows or a reference are missing, or mine's
output is cut over ranks, the split is not known, and None says so.
Not here: who is blamed (decide.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_accprobe.align.mapping import Rules
from vllm_accprobe.align.shards import ONE
from vllm_accprobe.comparison.measure.read import Loader
from vllm_accprobe.comparison.plan.joining import Group
from vllm_accprobe.comparison.plan.row_index import Indices
from vllm_accprobe.comparison.plan.unit import Unit
from vllm_accprobe.comparison.plan.units import Plan, make_plan
from vllm_accprobe.dump.dtypes import widen
from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.schema import DECODE, PREFILL, Record
from vllm_accprobe.opcheck.calls.records import Calls, Captured, Chosen
from vllm_accprobe.opcheck.reference import Declined, Expected
from vllm_accprobe.opcheck.reference_table import References
from vllm_accprobe.opcheck.run.result_row import Checked

MOST = 16
"""Origins whose errors are split; the first in data-flow order matter, and each costs a replay."""
LARGEST = 1 << 25
"""Chosen: elements of an output whose error is split: a dozen float64 of each are held at a time."""


_SPOILT = 0.5
"""Chosen: of the largest error, what another row of the same call must have to be named in that row's place: a fault
that spoils both leaves about as much in each, and an honest row has hundreds of times less."""


@dataclass(frozen=True, slots=True)
class Split:
    """created, propagated: relative to golden's row (float64); request, position, phase: the row of mine where what
    was created is largest; phase is None where it is not known."""

    created: float
    propagated: float
    request: str
    position: int
    phase: str | None = None


def split_errors(
    golden: Dump, mine: Calls, references: References, blamed: Iterable[Checked], mapping: Rules | None = None
) -> dict[str, Split]:
    """tap → its split, for the first MOST of ``blamed`` (wrong outputs of mine, one for each tap) that have one."""
    wanted = {(c.tap, c.role, c.call): c for c in list(blamed)[:MOST]}
    if not wanted:
        return {}
    plan = make_plan(golden, mine.dump, mapping=mapping)
    indices = Indices((plan.tokens.golden, plan.tokens.mine))
    loader = Loader(golden)
    found: dict[str, Split] = {}
    for unit in plan.units:
        c = wanted.get(unit.key)
        if c is None:
            continue
        chosen = Chosen({(c.step, c.call): ()}, lambda cls: False, most=1 << 62)
        large = math.prod(c.shape) > LARGEST
        captured = None if large else next(mine.of(c.rank, c.tap, chosen=chosen), None)
        split = _split(captured, unit, plan, indices, loader, references, c) if captured is not None else None
        if split is not None:
            found[c.tap] = split
        loader.forget()
    return found


def _split(
    captured: Captured, unit: Unit, plan: Plan, indices: Indices, loader: Loader, references: References, c: Checked
) -> Split | None:
    record = captured.records.get(c.role)
    group = next((g for g in unit.mine if record is not None and record in g.records), None)
    expected = references.evaluate(captured.what)
    if record is None or group is None or isinstance(expected, Declined) or c.role not in expected:
        return None
    if group.where is None or group.merge is None or group.merge.kind != ONE:
        return None
    place = {g.where: g for g in unit.golden if g.where is not None and g.readable}
    wheres = tuple(place)
    met = indices.meet(group.where, wheres) if wheres else None
    if met is None:
        return None
    reference, output = _rows(captured, c.role, record, expected[c.role], group)
    keep = np.ones(len(met.row), bool)
    rows = expected[c.role].rows
    if rows is not None:
        keep = np.asarray(rows.numpy(), bool)[met.row]
    best: tuple[float, int, Split] | None = None
    blamed = False
    for number in met.used:
        at = np.flatnonzero(keep & (met.number == number))
        g = _golden(loader, place[wheres[number]])
        if not len(at) or g.shape[1] != reference.shape[1]:
            continue
        blamed |= any(plan.tokens.name(int(key)) == (c.request, c.position) for key in met.rows.keys[at])
        theirs, ours, exact = g[met.other[at]], output[met.row[at]], reference[met.row[at]]
        size = np.linalg.norm(theirs, axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            created = np.linalg.norm(ours - exact, axis=1) / size
            passed = np.linalg.norm(exact - theirs, axis=1) / size
        finite = np.isfinite(created) & np.isfinite(passed)
        if not finite.any():
            continue
        worst = int(np.where(finite, created, -1.0).argmax())
        if best is None or created[worst] > best[0]:
            row = int(at[worst])
            request, position = plan.tokens.name(int(met.rows.keys[row]))
            phase = (DECODE if met.rows.decode[row] else PREFILL) if len(met.rows.decode) else None
            best = created[worst], number, Split(float(created[worst]), float(passed[worst]), request, position, phase)
    if best is not None and not blamed and c.created is not None and best[0] < _SPOILT * c.created:
        return None  # the row in question has no partner (a rejected draft), and those that have are none of it
    return best[2] if best is not None else None


def _rows(
    captured: Captured, role: str, record: Record, expected: Expected, group: Group
) -> tuple[np.ndarray, np.ndarray]:
    """(reference, mine's output), float64 [rows, width]. A reference may know one of the inputs, too: which experts a
    router should have named."""
    outputs: Mapping[str, Any] = captured.what.outputs
    value = outputs[role] if role in outputs else captured.what.inputs[role.removeprefix("input.")]
    wide = [np.moveaxis(t.double().numpy(), group.row_dim, 0) for t in (expected.value.expand(record.shape), value)]
    first, second = (a.reshape(a.shape[0], -1) for a in wide)
    return first, second


def _golden(loader: Loader, group: Group) -> np.ndarray:
    block = loader.load(group)
    return np.asarray(widen(block.data, block.dtype, as_float=True), np.float64)
