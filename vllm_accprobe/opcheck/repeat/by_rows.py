"""The same rows alone, in small batches and in the whole: whose result depends on who else is in the batch?

The problem: a server never gives a request the same company twice, and a kernel that picks another blocking by the
number of its rows gives it other numbers; two correct runs then differ, and nobody knows by whom. The idea: for each
size, the call's rows are run in pieces of that size and held, bit by bit, against the same rows of the whole call. A
difference within the operator's floor is a remark ("not batch-invariant"), beyond it wrong. The whole is run twice
first: what is not equal to itself says nothing of batches. Pieces are narrow, not copied into another layout, because
a server's rows are dense as well; outputs have their rows where their shape follows the piece's.
Not here: where rows lie (row_axes.py), repeated runs (repeated.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from vllm_accprobe.judge.statistic import CHANCE
from vllm_accprobe.opcheck.calls.records import Captured
from vllm_accprobe.opcheck.reference import Declined
from vllm_accprobe.opcheck.repeat.call_floors import CallFloors
from vllm_accprobe.opcheck.repeat.differences import changed, gap_words, largest_gap
from vllm_accprobe.opcheck.repeat.here import MachineKernels
from vllm_accprobe.opcheck.repeat.row_axes import RowAxes, axes_of, cut
from vllm_accprobe.opcheck.run.judged_row import without_verdict
from vllm_accprobe.opcheck.run.result_row import ERROR, FAIL, PASS, SKIP, WARNING, Checked, unchecked

BATCH = "rows"
"""The measure of these rows."""
ALL = "all"
_MOST = 64
"""Chosen: pieces of one size that are run of one call, evenly spread: the first and the last are among them."""


@dataclass(frozen=True)
class BatchOptions:
    """sizes: as they were asked for, numbers, ``N`` for the whole, ALL; strict: any difference fails."""

    sizes: tuple[str, ...]
    strict: bool = False
    chance: float = CHANCE

    def of(self, rows: int) -> list[int]:
        """The sizes for a call of so many rows, ascending, the whole left out."""
        found: set[int] = set()
        for size in self.sizes:
            if size == ALL:
                found |= {n for k in range(31) if (n := 1 << k) < rows} | {rows - 1}
            elif size != "N":
                found.add(int(size))
        return sorted(n for n in found if 0 < n < rows)


@dataclass
class RoleSizes:
    """Of one output. whole: of all rows; made: its rows as the pieces gave them; seen, differing: bool [rows]; by_size:
    size → (rows seen, rows that differ, largest difference); dim: of its rows."""

    whole: Any
    dim: int
    made: Any
    seen: Any
    differing: Any
    by_size: dict[int, tuple[int, int, float]] = field(default_factory=dict)


def batches(captured: Captured, kernels: MachineKernels, options: BatchOptions) -> Iterator[Checked]:
    """A row for each output of a call, or one that says why there is none."""
    try:
        call = kernels.ready(captured.what)
        axes = axes_of(call, kernels.references)
        sizes = options.of(axes.count)
        if not sizes:
            raise Declined(f"{axes.count} {axes.word}s: none of these sizes is smaller")
        whole = _run(kernels, call)
        again = _run(kernels, call)
        found = _pieces(kernels, call, axes, sizes, whole)
    except Declined as why:
        yield without_verdict(captured, "", None, ERROR if why.failed else SKIP, why.reason)
        return
    except (RuntimeError, ValueError) as error:
        said = f"its rows cannot be run alone: {' '.join(str(error).split())[:100]}"
        yield without_verdict(captured, "", None, SKIP, said)
        return
    if not found:
        yield without_verdict(captured, "", None, SKIP, "no output has a row for each of its rows")
        return
    floors = None
    for role, sized in found.items():
        if bool(sized.differing.any()) and floors is None:
            floors = CallFloors.of(
                kernels.references, kernels.here(captured.what), whole, options.chance, "the whole batch"
            )
        unsteady = role not in again or bool(changed(whole[role], again[role]).any())
        yield _row(captured, role, sized, axes, floors, unsteady, options)


def _run(kernels: MachineKernels, call: Any) -> Mapping[str, Any]:
    made = kernels.run(call)
    if isinstance(made, Declined):
        raise made
    return made


def _pieces(
    kernels: MachineKernels, call: Any, axes: RowAxes, sizes: list[int], whole: Mapping[str, Any]
) -> dict[str, RoleSizes]:
    found: dict[str, RoleSizes] = {}
    for size in sizes:
        for start in _starts(axes.count, size):
            piece = cut(call, axes, slice(start, start + size))
            made = _run(kernels, piece)
            for role, part in made.items():
                if role not in whole:
                    continue
                if role not in found:
                    dim = _row_dim(whole[role], part, axes.count, size)
                    if dim is None:
                        continue
                    none = torch.zeros(axes.count, dtype=torch.bool)
                    found[role] = RoleSizes(whole[role], dim, whole[role].clone(), none, none.clone())
                _compare(found[role], part, size, start)
    return found


def _starts(rows: int, size: int) -> list[int]:
    """Where pieces of this size begin; the last one ends with the rows, all of them have the size."""
    starts = sorted({*range(0, rows - size + 1, size), rows - size})
    if len(starts) <= _MOST:
        return starts
    return sorted({starts[round(k * (len(starts) - 1) / (_MOST - 1))] for k in range(_MOST)})


def _row_dim(whole: Any, part: Any, rows: int, size: int) -> int | None:
    """The one dimension in which the output is as long as there are rows, and the piece's as long as the piece."""
    if whole.dim() != part.dim():
        return None
    other = [d for d in range(whole.dim()) if whole.shape[d] != part.shape[d]]
    if len(other) != 1 or whole.shape[other[0]] != rows or part.shape[other[0]] != size:
        return None
    return other[0]


def _compare(sized: RoleSizes, part: Any, size: int, start: int) -> None:
    theirs = sized.whole.narrow(sized.dim, start, size).movedim(sized.dim, 0)
    mine = part.movedim(sized.dim, 0)
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        raise ValueError(f"{size} rows give {mine.dtype} {list(mine.shape)}")
    other = changed(mine, theirs).reshape(size, -1).any(1)
    sized.seen[start : start + size] = True
    seen, differing, gap = sized.by_size.get(size, (0, 0, 0.0))
    if bool(other.any()):
        sized.differing[start : start + size] |= other
        gap = max(gap, largest_gap(mine, theirs))
        at = torch.arange(start, start + size)[other]
        sized.made.movedim(sized.dim, 0)[at] = mine[other]
    sized.by_size[size] = seen + size, differing + int(other.sum()), gap


def _row(
    c: Captured, role: str, sized: RoleSizes, axes: RowAxes, floors: CallFloors | None, unsteady: bool,
    options: BatchOptions,
) -> Checked:  # fmt: skip
    whole = sized.whole
    seq = c.records[role].seq if role in c.records else max((r.seq for r in c.records.values()), default=c.seq)
    row = unchecked(c.tap, c.what.cls, c.rank, c.step, c.call, seq, "", status=PASS, role=role,
                    dtype=str(whole.dtype).removeprefix("torch."), shape=tuple(whole.shape))  # fmt: skip
    seen, differing = int(sized.seen.sum()), int(sized.differing.sum())
    left = "" if seen == axes.count else f"more than {_MOST} pieces of a size"
    row = replace(row, rows=axes.count, checked=seen, unchecked_because=left, measure=BATCH, measured=0.0, allowed=1.0)
    if not differing:
        return row
    first = int(sized.differing.nonzero()[0])
    v, against = floors.judge(role, sized.made) if floors is not None else (None, "")
    sizes = {n: {"rows": s, "differing": d, "largest_difference": g} for n, (s, d, g) in sized.by_size.items()}
    told = {"rows": axes.count, "word": axes.word, "differing": differing, "first": first, "sizes": sizes,
            "against": against, "between_runs": unsteady}  # fmt: skip
    which = ", ".join(f"{n}: {d} of {s}" for n, (s, d, _) in sized.by_size.items() if d)
    message = f"not batch-invariant: {axes.word}s that differ from the batch of {axes.count}, by size: {which}"
    message += f"; first {axes.word} {first}; {gap_words(max(g for _, _, g in sized.by_size.values()))}"
    if v is not None:
        told |= {"floors": v.value, "allowed": v.limit}
        message += f", {v.measure} error {v.value:.3g} of {v.limit:.3g} allowed against {against}"
    if unsteady:
        message += "; two runs of the whole batch differ as well: see --repeat"
    wrong = v is None or not v.passed
    message += "; beyond rounding" if wrong else "; within rounding"
    status = FAIL if wrong or options.strict else WARNING
    measured = float(v.severity) if v is not None else 2.0
    return replace(row, status=status, message=message, evidence=json.dumps(told), position=first,
                   measured=max(measured, 1.0 + 2**-20) if status == FAIL else measured)  # fmt: skip
