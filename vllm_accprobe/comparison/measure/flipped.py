"""What both dumps recorded about the logits that a flipped token was sampled from.

The problem: whether a sampler was wrong depends on what it was given: the model's logits, and what grammars, word lists
or penalties had made of them. The idea: for each flip, the best logits of its row on both sides, what masked them, and
the best that were left, as plain values that a saved comparison keeps. Not here: what follows (judge/flips.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from vllm_accprobe.align.requests import identity
from vllm_accprobe.align.tokens import Flip
from vllm_accprobe.comparison.measure.asked_rows import AskedRows
from vllm_accprobe.comparison.measure.read import Loader, Unread
from vllm_accprobe.comparison.plan.joining import Group, alone
from vllm_accprobe.comparison.plan.unit import MASKED_IDS, MASKED_LOGITS, SAMPLER, TOP_IDS, TOP_LOGITS
from vllm_accprobe.comparison.plan.units import Plan
from vllm_accprobe.dump.dtypes import widen
from vllm_accprobe.dump.schema import LOGITS, MASKS_KNOWN

Lookups = dict[str, "list[Group]"]
"""By role of the sampler: one side's tensors, in order of steps."""


def best_logits(
    plan: Plan, loaders: tuple[Loader, Loader], dumps: tuple[Any, Any], sampled: AskedRows | None = None
) -> list[dict[str, Any]]:
    """For each flipped token {"flip": its fields, "best": [golden's, mine's], each [logits, ids] or None, "masks":
    [golden's, mine's], each [words or None, hash or None, [logits, ids] or None] as judge.flips.Masking, "asked": as
    `AskedRows.of`}."""
    found = []
    groups = [_lookups(plan, side, dump) for side, dump in enumerate(dumps)]
    for flip in plan.tokens.flips:
        best = [_best(plan, side, groups[side], loaders[side], flip.key, TOP_LOGITS, TOP_IDS) for side in (0, 1)]
        masks = [_masks(plan, side, groups[side], loaders[side], flip, dumps[side]) for side in (0, 1)]
        asked = sampled.of(flip.key, (flip.golden, flip.mine)) if sampled is not None else None
        found.append({"flip": asdict(flip), "best": best, "masks": masks, "asked": asked})
    return found


def _lookups(plan: Plan, side: int, dump: Any) -> Lookups:
    """What the plan paired; and what masks left, which one side may have alone."""
    groups: Lookups = {u.key[1]: u.mine if side else u.golden for u in plan.units if u.key[0] == SAMPLER}
    cells = (plan.tokens.golden, plan.tokens.mine)[side].cells
    for r in dump.records:
        if r.tap == SAMPLER and r.role in (MASKED_LOGITS, MASKED_IDS) and r.role not in groups:
            groups[r.role] = [
                alone(x, cells.get(x.rank, 0)) for x in dump.records if (x.tap, x.role) == (SAMPLER, r.role)
            ]
    return groups


def _masks(plan: Plan, side: int, groups: Lookups, loader: Loader, flip: Flip, dump: Any) -> list[Any]:
    """What masked the logits that ``flip`` was sampled from, on one side."""
    known = any(m.tap == SAMPLER and m.attrs.get(MASKS_KNOWN) for ms in dump.modules.values() for m in ms)
    if not known:
        return [None, None, None]
    golden, mine, _ = plan.requests.pairs[flip.pair]
    who = identity(mine if side else golden)
    tokens = (plan.tokens.golden, plan.tokens.mine)[side]
    made = [
        (cell, step)
        for (cell, step, name), rows in tokens.rows.items()
        if name == LOGITS and ((rows.keys == flip.key) & rows.keep).any()
    ]
    for (rank, step, req), mask in dump.masks.items():
        request = dump.requests.get((rank, req))
        if request is None or identity(request) != who or (tokens.cells.get(rank, 0), step) not in made:
            continue
        best = _best(plan, side, groups, loader, flip.key, MASKED_LOGITS, MASKED_IDS)
        left = [] if best is None else [p for p in zip(*best, strict=True) if math.isfinite(p[0])]
        # What may not be taken has no place among the best.
        return [list(mask.by), mask.grammar, [list(column) for column in zip(*left, strict=True)] or None]
    return [[], None, None]


def _best(
    plan: Plan, side: int, groups: Lookups, loader: Loader, key: int, logits: str, ids: str
) -> list[list[Any]] | None:
    rows = [_row(plan, side, groups.get(role, []), loader, key) for role in (logits, ids)]
    return [rows[0].tolist(), rows[1].tolist()] if rows[0] is not None and rows[1] is not None else None


def _row(plan: Plan, side: int, groups: Sequence[Group], loader: Loader, key: int) -> np.ndarray | None:
    """One row's numbers, of the last group that holds it."""
    tokens = (plan.tokens.golden, plan.tokens.mine)[side]
    for group in reversed(groups):
        rows = tokens.rows.get(group.where) if group.where else None
        if rows is None or not group.readable:
            continue
        at = np.flatnonzero((rows.keys == key) & rows.keep)
        if len(at):
            try:
                block = loader.load(group)
            except Unread:
                continue
            return np.asarray(widen(block.data[int(at[0])], block.dtype, as_float=True))
    return None
