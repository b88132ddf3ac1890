"""What one output was in N runs: which elements differ, and whether it is chance, memory, or the order of sums.

The problem: that two runs differ is easily seen; whether memory was never written, a race lost an addend, or atomics
only added up in another order decides what is to be done. The idea: bits are compared, with the byte that memory held
before each run known (conditions.py). An element whose bytes are that byte in every run, whichever it was, was never
written. An output that is always the same for one byte and another for another one was computed from memory that
nobody wrote. What differs otherwise is a matter of timing, whose size whoever asks holds against the operator's floor
(repeated.py). Kept are one output for each byte, masks, and the furthest run, however many runs there are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

UNWRITTEN, MEMORY, TIMING, EQUAL = "not written", "memory", "timing", "equal"
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NAMED = 6


def bits(tensor: Any) -> Any:
    """The bits of a tensor as integers of its elements' size, [elements] flattened; complex ones as pairs."""
    t = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return t.contiguous().view(_INTEGERS[t.element_size()]).reshape(-1)


def changed(a: Any, b: Any) -> Any:
    """Which elements, bool [elements] (pairs of complex ones), are not the same to the bit; NaN is NaN whatever its
    sign and payload, which kernels for vectors and for single numbers make differently."""
    found = bits(a) != bits(b)
    if a.is_floating_point() or a.is_complex():
        x, y = ((torch.view_as_real(t) if t.is_complex() else t).reshape(-1).float() for t in (a, b))
        found &= ~(torch.isnan(x) & torch.isnan(y))
    return found


def filled(tensor: Any, byte: int) -> Any:
    """Which elements, bool [elements], are made of nothing but this byte."""
    found = bits(tensor)
    size = found.element_size()
    whole = int.from_bytes(bytes([byte]) * size, "little", signed=size > 1)
    return found == whole


@dataclass
class RunDifferences:
    """Filled by `add`, run by run. runs: how many; differing: runs that are not the first to the bit; first, furthest:
    outputs; at: bool [elements], where any run differs from the first."""

    runs: int = 0
    differing: int = 0
    first: Any = None
    furthest: Any = None
    furthest_run: int = 0
    at: Any = None
    gap: float = 0.0
    _by_byte: dict[int, Any] = field(default_factory=dict)
    _counts: dict[int, int] = field(default_factory=dict)
    _within: Any = None
    _unwritten: Any = None

    def add(self, output: Any, byte: int) -> None:
        """One more run. output: a tensor on the CPU; byte: what memory held before. Raises ValueError where shape or
        dtype are other ones than in the runs before."""
        run, self.runs = self.runs, self.runs + 1
        held = filled(output, byte)
        if self.first is None:
            self.first, self._unwritten = output.clone(), held
            self.at, self._within = torch.zeros_like(held), torch.zeros_like(held)
        else:
            if output.shape != self.first.shape or output.dtype != self.first.dtype:
                raise ValueError(f"run {run} gives {output.dtype} {list(output.shape)}, the first one "
                                 f"{self.first.dtype} {list(self.first.shape)}")  # fmt: skip
            self._unwritten &= held
            other = changed(output, self.first)
            if bool(other.any()):
                self.differing += 1
                self.at |= other
                gap = largest_gap(output, self.first)
                if self.furthest is None or gap > self.gap:
                    self.furthest, self.furthest_run, self.gap = output.clone(), run, gap
        self._counts[byte] = self._counts.get(byte, 0) + 1
        if byte in self._by_byte:
            self._within |= changed(output, self._by_byte[byte])
        else:
            self._by_byte[byte] = output.clone()

    @property
    def unwritten(self) -> Any:
        """bool [elements]: what nobody wrote. None of them where memory held one byte only."""
        return self._unwritten if len(self._by_byte) > 1 else torch.zeros_like(self._unwritten)

    @property
    def kind(self) -> str:
        if bool(self.unwritten.any()):
            return UNWRITTEN
        if not self.differing:
            return EQUAL
        seen_twice = sum(n > 1 for n in self._counts.values()) > 1
        return MEMORY if seen_twice and not bool(self._within.any()) else TIMING


def largest_gap(a: Any, b: Any) -> float:
    """How far two outputs of one shape are apart: the largest difference, inf where one side alone is not finite or
    both are infinite in opposite directions. Equal infinities, and two NaN, are no difference: x - x of them is NaN."""
    x, y = ((torch.view_as_real(t) if t.is_complex() else t).double() for t in (a, b))
    same = (x == y) | (torch.isnan(x) & torch.isnan(y))
    apart = torch.where(same, torch.zeros_like(x), (x - y).abs())
    return float(torch.nan_to_num(apart, nan=float("inf"), posinf=float("inf")).max()) if apart.numel() else 0.0


def gap_words(gap: float) -> str:
    """``largest difference 0.0312``, or what stands for it where that is no number."""
    return f"largest difference {gap:.3g}" if gap != float("inf") else "NaN or infinity on one side alone"


def where(mask: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    """Of a mask [elements] of a tensor of ``shape``: how many, in which rows (of dimension 0) and columns (of all
    others), the first of them named."""
    rows = shape[0] if shape else 1
    width = max(mask.numel() // max(rows, 1), 1)
    grid = mask.reshape(rows, -1) if mask.numel() % max(rows, 1) == 0 and rows else mask.reshape(1, -1)
    at_rows, at_columns = grid.any(1).nonzero().flatten(), grid.any(0).nonzero().flatten()
    return {
        "elements": int(mask.sum()), "of": int(mask.numel()), "rows": len(at_rows), "of_rows": rows,
        "first_rows": at_rows[:_NAMED].tolist(), "columns": len(at_columns), "of_columns": width,
        "first_column": int(at_columns[0]) if len(at_columns) else -1,
        "last_column": int(at_columns[-1]) if len(at_columns) else -1,
    }  # fmt: skip


def place(found: dict[str, Any]) -> str:
    """``12 of 448 elements, rows 0, 3, 5, columns 0 to 63``."""
    rows = ", ".join(map(str, found["first_rows"]))
    more = " ..." if found["rows"] > len(found["first_rows"]) else ""
    first, last = found["first_column"], found["last_column"]
    columns = f"column {first}" if first == last else f"columns {first} to {last}"
    word = "row" if found["rows"] == 1 else "rows"
    return f"{found['elements']:,} of {found['of']:,} elements, {word} {rows}{more}, {columns}"
