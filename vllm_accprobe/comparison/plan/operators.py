"""Which tensors of operator calls two dumps can be compared by, and why the others cannot.

The problem: an operator's arguments hold more than values of the model: output buffers with whatever lay in that memory
before, handles and schedules of a library as integers, the engine's own bookkeeping of slots and block tables. Two runs
that are right differ in all of these. And operators know no rows, so only the same call of the same step is comparable.
The idea: such tensors are set apart before pairing, by what the call's own line says of them, each with its reason;
what is left is compared whole, where the step had the same batch on both sides (activations.py). What an operator
computed is judged by ``accprobe opcheck``, which needs no second dump. Not here: capture (capture/ops/dispatch.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from vllm_accprobe.align.derived import View
from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.journal import SEPARATOR, inputs, is_operator
from vllm_accprobe.dump.schema import Record

ONE_SIDE = "operator calls are in one of the dumps only"
ENGINES = "an operator outside any module (the engine's own bookkeeping)"
RANKS = "operators of several ranks"
FRESH = "memory that nobody had written to when the operator was called"
INTEGERS = "integers of a library's operator (handles, schedules)"
BLOCKS = "blocks of a cache, whose numbers and other contents differ from run to run"
SHAPES = "an operator's tensor of another shape"
UNPAIRED = "an operator that the other side did not call there"

Place = tuple["int | None", str, str, int]
"""(step, tap, role, call)."""


def set_apart(golden: Any, mine: Any) -> tuple[Any, Any, Counter[str]]:
    """The two dumps without operators' tensors that say nothing about the model, and how many of mine were left out,
    by reason (of golden, where mine has no operators at all)."""
    sides = _OperatorFacts(golden), _OperatorFacts(mine)
    skipped: Counter[str] = Counter()
    if not sides[0].taps and not sides[1].taps:
        return golden, mine, skipped
    views = []
    for dump, side, other in ((golden, sides[0], sides[1]), (mine, sides[1], sides[0])):
        reason_of = _reasons(side, other)
        kept: list[Record] = []
        counts = skipped if dump is mine or not sides[1].taps else Counter()
        for r in dump.records:
            reason = reason_of(r)
            if reason is None:
                kept.append(r)
            else:
                counts[reason] += 1
        views.append(View(dump, kept))
    return views[0], views[1], skipped


class _OperatorFacts:
    """What the decision needs of one dump."""

    def __init__(self, dump: Any):
        # Another tool's API records (msprobe) are the model's own calls, named by module: nothing of them is set apart.
        ops = [call for call in getattr(dump, "ops", ()) if is_operator(call.tap)]
        self.taps = {call.tap for call in ops}
        self.fresh: set[tuple[int, Place]] = set()
        self.blocks: set[tuple[int, Place]] = set()
        self.shapes: dict[Place, tuple[int, ...]] = {}
        self.modules = False
        self.ranks = len(dump.ranks)
        if not ops:
            return
        for call in ops:
            for tensor in inputs(call):
                if tensor.get("fresh"):
                    self.fresh.add((call.rank, (call.step, call.tap, tensor["role"], call.call)))
                blocks = tensor.get("blocks")
                for role in (tensor["role"], f"inplace.{tensor['role']}", blocks["ids"]) if blocks else ():
                    self.blocks.add((call.rank, (call.step, call.tap, role, call.call)))
        for r in dump.records:
            if r.tap in self.taps:
                self.shapes[r.step, r.tap, r.role, r.call] = r.shape
            elif r.step is not None:
                self.modules = True


def _reasons(side: _OperatorFacts, other: _OperatorFacts) -> Callable[[Record], str | None]:
    """Why a record of ``side`` is left out, or None."""

    def reason(r: Record) -> str | None:
        if r.tap not in side.taps:
            return None
        if not other.taps:
            return ONE_SIDE
        if side.modules and r.tap.startswith(SEPARATOR):
            return ENGINES
        if side.ranks > 1 or other.ranks > 1:
            return RANKS
        place = r.step, r.tap, r.role, r.call
        if (r.rank, place) in side.fresh or (r.rank, place) in other.fresh:
            return FRESH
        if (r.rank, place) in side.blocks:
            return BLOCKS
        if DTYPES[r.dtype].kind == "int" and not r.cls.startswith("aten."):
            return INTEGERS
        there = other.shapes.get(place)
        if there is None:
            return UNPAIRED
        return SHAPES if there != r.shape else None

    return reason
