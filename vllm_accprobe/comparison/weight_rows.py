"""Where the rows of a wrong weight stand in the right one, and what else its values are: pure functions of arrays.

The problem: "gate_up_proj differs" sends a person to read a loader; the rows themselves say what it did. The idea: each
row has a key (dump/weight_sums.py); a row of mine that is not the one that is due is looked up among all rows of the
right tensor, and what comes out is said in the simplest way that explains all of them: two blocks exchanged, one block
that stands elsewhere, a shift, an interleaving, one row's copy, else how many stand where. Values, where both are
there, say the rest: transposed, one number, a factor of all, of rows or of blocks, one added, fewer bits.
Nothing is said that does not hold for every wrong row that it speaks of; a 32-bit key finds a wrong place by chance
once in 2^32 / rows. Not here: which rows are due (comparison/weight_places.py), the sums themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ADDRESS, PRECISION, FACTOR, LOADING, UNKNOWN = "address", "precision", "factor", "loading", "unknown"
"""Families of a cause."""
_LISTED = 3
_EXACT = 2.0**-7
"""chosen: relative; how far a bfloat16 number may lie from a product of two that was rounded once or twice."""
_BLOCKS = ((128, 128), (1, 128), (128, 1), (64, 64), (32, 32), (16, 16), (1, 64), (1, 32), (1, 16), (8, 8))
"""chosen: blocks of a quantised weight that are tried, the usual ones first."""
_MOST_VALUES = 1 << 24
"""Elements that formulas are tried on."""
_LEAST_ROWS, _LEAST_CONSTANT = 2, 4
_NEARLY_ALL = 0.995
"""chosen: of a tensor's numbers, how many must lie on the grid of integers that it went through: ties go either way."""
Names = Callable[[np.ndarray], str]
"""Mine's rows in words: ``rank 1's rows 0-63 (k)``."""


@dataclass(frozen=True)
class RowsFound:
    """family: one of the above. text: a sentence without its subject. parameter: its numbers. chance: of the finding
    by accident, None where nobody worked it out. residual: the largest relative error that is left; rows: how many are
    wrong."""

    family: str
    text: str
    parameter: Mapping[str, Any] = field(default_factory=dict)
    residual: float = 0.0
    chance: float | None = None
    rows: int = 0

    @property
    def cause(self) -> dict[str, Any]:
        """As compare.json's ``origins[].cause``."""
        return {"family": self.family, "text": self.text, "parameter": dict(self.parameter), "residual": self.residual,
                "chance": self.chance}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """Rows ``first`` to ``last`` of mine, which are rows ``at`` and on of the right tensor."""

    first: int
    last: int
    at: int

    @property
    def n(self) -> int:
        return self.last - self.first + 1


def numbers(rows: Sequence[int] | np.ndarray) -> str:
    """``3``, ``4, 17``, ``0-63``, ``1, 5, 9 and 20 more``; stretches are written as such."""
    found = sorted(map(int, rows))
    stretches: list[list[int]] = []
    for n in found:
        if stretches and stretches[-1][1] == n - 1:
            stretches[-1][1] = n
        else:
            stretches.append([n, n])
    said = [str(a) if a == b else f"{a}-{b}" for a, b in stretches]
    left = sum(b - a + 1 for a, b in stretches[_LISTED:])
    return ", ".join(said[:_LISTED]) + (f" and {left} more" if left else "")


def by_keys(
    right: np.ndarray, mine: np.ndarray, due: np.ndarray, names: Names, whose: str = "golden"
) -> RowsFound | None:
    """Explains mine's rows by the keys of the right tensor's. right: uint32 [R]; mine: uint32 [M]; due: int64 [M], the
    row of ``right`` that each row of mine is to be. None where no row is wrong."""
    bad = np.flatnonzero(right[due] != mine)
    if not len(bad):
        return None
    if len(mine) >= _LEAST_CONSTANT and (mine == mine[0]).all() and 2 * len(bad) > len(mine):
        return RowsFound(
            LOADING, "never written: as initialised, all its rows are the same", {"rows": len(bad)}, rows=len(bad)
        )
    at = _places(right, mine, due, bad)
    found = at >= 0
    chance = min(1.0, float(len(right)) * 2.0**-32) ** max(min(int(found.sum()), 30), 1) if found.any() else None
    said = _said(bad, at, due, names, whose)
    if (
        said is not None
        and len(bad) > 1
        and (np.sort(mine[bad]) == np.sort(right[due[bad]])).all()
        and "exchanged" not in said[1]
    ):
        if (mine[bad] == right[due[bad]][::-1]).all():
            said = f"{names(bad)} are in reverse order", {}
        elif "block" not in said[1] and len(_runs(bad, at)) > 2:
            said = f"{names(bad)} are {whose}'s in another order", {}
    if said is None:
        return RowsFound(UNKNOWN, f"{names(bad)} differ, and no other place in {whose} has them", {"rows": len(bad)},
                         rows=len(bad))  # fmt: skip
    text, parameter = said
    return RowsFound(
        ADDRESS, text, {"rows": len(bad), "elsewhere": int(found.sum()), **parameter}, 0.0, chance, len(bad)
    )


def _places(right: np.ndarray, mine: np.ndarray, due: np.ndarray, bad: np.ndarray) -> np.ndarray:
    """int64 [len(bad)]: where each bad row stands in ``right``, -1 for nowhere. Of several places (equal rows) the one
    that goes on where the row before it stands."""
    order = np.argsort(right, kind="stable")
    keys = right[order]
    low, high = np.searchsorted(keys, mine[bad], "left"), np.searchsorted(keys, mine[bad], "right")
    out = np.full(len(bad), -1, np.int64)
    before = -2
    for i, (a, b) in enumerate(zip(low.tolist(), high.tolist(), strict=True)):
        if a < b:
            choices = order[a : min(b, a + 64)]
            goes_on = bad[i] and i and bad[i - 1] == bad[i] - 1 and before >= 0
            out[i] = before + 1 if goes_on and (choices == before + 1).any() else int(choices[0])
        before = int(out[i])
    return out


def _runs(bad: np.ndarray, at: np.ndarray) -> list[Run]:
    """Stretches of consecutive rows that stand consecutively elsewhere."""
    out: list[Run] = []
    for row, place in zip(bad.tolist(), at.tolist(), strict=True):
        if place < 0:
            continue
        if out and row == out[-1].last + 1 and place == out[-1].at + out[-1].n:
            out[-1] = Run(out[-1].first, row, out[-1].at)
        else:
            out.append(Run(row, row, place))
    return out


def _said(
    bad: np.ndarray, at: np.ndarray, due: np.ndarray, names: Names, whose: str
) -> tuple[str, dict[str, Any]] | None:
    runs, nowhere = _runs(bad, at), bad[at < 0]
    if not runs:
        return None
    rest = f"; {names(nowhere)} differ and stand nowhere in {whose}" if len(nowhere) else ""
    exchanged = _exchanged(runs, due)
    if exchanged is not None and not len(nowhere):
        return _exchange_said(exchanged, names)
    if not len(nowhere) and (half := _interleaved(bad, at, due)) is not None:
        return half
    places = np.unique(at[at >= 0])
    if len(places) == 1 and len(bad) - len(nowhere) > 1:
        what = f"{names(bad[at >= 0])} are all copies of row {int(places[0])} of {whose}'s tensor"
        return what + rest, {"place": int(places[0])}
    turn = np.unique((at - due[bad]) % len(due))
    whole = len(bad) == len(due) and (np.sort(due) == np.arange(len(due))).all()
    if whole and len(turn) == 1 and at.max() < len(due) and not len(nowhere) and len(runs) > 1:
        k = int(turn[0]) if 2 * int(turn[0]) <= len(due) else int(turn[0]) - len(due)
        text = f"{names(bad)} are {whose}'s rows {abs(k)} {'further on' if k > 0 else 'before'}, in a circle"
        return text, {"shift": k}
    if len(runs) == 1:
        run = runs[0]
        rows = np.arange(run.first, run.last + 1)
        place = f"{run.at}-{run.at + run.n - 1}" if run.n > 1 else str(run.at)
        expected = due[rows]
        own = f"{expected[0]}-{expected[-1]}" if run.n > 1 else str(expected[0])
        verb = "stand" if run.n > 1 else "stands"
        shift = int(run.at - expected[0])
        text = f"{names(rows)} {verb} at {place} of {whose}'s tensor, where {own} {'are' if run.n > 1 else 'is'} due"
        return text + rest, {"place": run.at, "shift": shift}
    shifts = Counter((at[at >= 0] - due[bad[at >= 0]]).tolist())
    (shift, n), *_ = shifts.most_common(1)
    if n == int((at >= 0).sum()):
        text = f"{names(bad[at >= 0])} are {whose}'s rows {abs(shift)} {'further on' if shift > 0 else 'before'}"
        return text + rest, {"shift": int(shift)}
    first = max(runs, key=lambda r: (r.n, -r.first))
    rows = np.arange(first.first, first.last + 1)
    place = f"{first.at}-{first.at + first.n - 1}" if first.n > 1 else str(first.at)
    example = f"{names(rows)} stand{'s' * (first.n == 1)} at {place}"
    text = f"{names(bad[at >= 0])} stand elsewhere in {whose}'s tensor: {example}"
    return text + rest, {"place": first.at, "runs": len(runs)}


def _exchanged(runs: list[Run], due: np.ndarray) -> list[tuple[Run, Run]] | None:
    """Pairs of stretches of which each stands where the other is due; None where any is without a partner."""
    merged = {(int(due[r.first]), r.n, r.at): r for r in runs}
    out, seen = [], set()
    for r in runs:
        if id(r) in seen:
            continue
        other = merged.get((r.at, r.n, int(due[r.first])))
        if other is None or other is r:
            return None
        seen |= {id(r), id(other)}
        out.append((r, other))
    # Two sets of rows are exchanged where each row of the one has the same partner in the other.
    return out if len({b.first - a.first for a, b in out}) == 1 else None


def _exchange_said(pairs: list[tuple[Run, Run]], names: Names) -> tuple[str, dict[str, Any]]:
    a, b = (np.concatenate([np.arange(p[i].first, p[i].last + 1) for p in pairs]) for i in (0, 1))
    first, second = names(a), names(b)
    head, _, of = first.partition(" of ")
    other, _, of_other = second.partition(" of ")
    both = f"{head} and {other} of {of}" if of and of == of_other else f"{first} and {second}"
    return f"{both} are exchanged", {"exchanged": [[p[0].first, p[1].first, p[0].n] for p in pairs[:8]]}


def _interleaved(bad: np.ndarray, at: np.ndarray, due: np.ndarray) -> tuple[str, dict[str, Any]] | None:
    """Blocks in which the halves stand row by row in turn, or the even rows and then the odd ones."""
    place = due.copy()
    place[bad] = at
    if len(np.unique(due)) != len(due) or (np.sort(due) != np.arange(due.min(), due.min() + len(due))).any():
        return None
    order = np.argsort(due)
    place, base = place[order] - due.min(), 0
    reach = np.maximum.accumulate(place)
    ends = np.flatnonzero(reach == np.arange(len(place)))
    sizes: Counter[int] = Counter()
    ways: set[str] = set()
    for end in ends.tolist():
        n, own = end + 1 - base, place[base : end + 1] - base
        if n > 2:
            size = next((k for k in (n, n + 1, n + 2) if k % 2 == 0 and _way(_padded(own, n, k), k)), None)
            if size is None:
                return None
            sizes[size] += 1
            ways.add(_way(_padded(own, n, size), size))
        base = end + 1
    if len(sizes) != 1 or len(ways) != 1:
        return None
    (size, n), (way,) = next(iter(sizes.items())), ways
    what = f"of each {size} rows" if n > 1 else f"of {size} rows"
    return f"{what} {way}", {"block": size, "blocks": n}


def _padded(own: np.ndarray, n: int, size: int) -> np.ndarray:
    """An interleaving leaves its first and its last row where they are: with them."""
    if size == n:
        return own
    if size == n + 2:
        return np.concatenate([[0], own + 1, [size - 1]])
    return np.concatenate([[0], own + 1])


def _way(own: np.ndarray, n: int) -> str:
    half = n // 2
    if len(own) != n:
        return ""
    turns = np.arange(n).reshape(2, half).T.ravel()
    if (own == turns).all():
        return "the two halves are interleaved (neighbours, where halves are due)"
    if (own == np.argsort(turns)).all():
        return "the even rows come first, then the odd ones (halves, where neighbours are due)"
    return ""


# --- values ----------------------------------------------------------------------------------------------------------


def by_values(
    right: np.ndarray, mine: np.ndarray, names: Names, dtype_round: Mapping[str, Any], whose: str = "golden"
) -> RowsFound | None:
    """Explains numbers by a formula that holds for all of them, or for all rows that are wrong. right, mine: floats
    [n, width] of one shape. dtype_round: name of a precision -> function that rounds to it. None where none holds."""
    if right.size > _MOST_VALUES or right.shape != mine.shape:
        return None
    with np.errstate(invalid="ignore"):  # memory that nobody wrote holds any bits
        a, b = right.astype(np.float64), mine.astype(np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return None
    bad = np.flatnonzero((a != b).any(1))
    if not len(bad):
        return None
    rows = names(bad)
    what = f"{rows} " if rows else ""
    x, y = a[bad], b[bad]
    if y.size > 1 and (y == y.flat[0]).all() and not (x == x.flat[0]).all():
        n = float(y.flat[0])
        text = f"{what}never written: as initialised, every element is {n:g}"
        return RowsFound(LOADING, text, {"value": n, "rows": len(bad)}, 0.0, None, len(bad))
    for found in (_transposed(a, b, whose), _formula(x, y, what, whose), _coarser(x, y, what, dtype_round, whose),
                  _row_factors(x, y, what, whose), _block_factors(a, b, whose)):  # fmt: skip
        if found is not None:
            return RowsFound(*found, rows=len(bad))
    return None


_Found = tuple[str, str, dict[str, Any], float, "float | None"]


def _transposed(a: np.ndarray, b: np.ndarray, whose: str) -> _Found | None:
    n = a.shape[0]
    if n == a.shape[1] and n > 1 and np.array_equal(a.T, b):
        return ADDRESS, f"transposed: it is {whose}'s with rows and columns exchanged", {}, 0.0, None
    return None


def _rest(y: np.ndarray, of: np.ndarray) -> float:
    """The largest error, relative to each number's own size."""
    with np.errstate(divide="ignore", invalid="ignore"):
        r = np.abs(y - of) / np.maximum(np.maximum(np.abs(y), np.abs(of)), 1e-300)
    return float(np.where(y == of, 0.0, r).max())


def _formula(x: np.ndarray, y: np.ndarray, what: str, whose: str) -> _Found | None:
    """One number added to all, or a factor of all."""
    for c in (1.0, -1.0):
        if (rest := float(np.abs(y - (x + c)).max())) <= _EXACT and float(np.abs(x).max()) > 4 * _EXACT:
            return (
                FACTOR,
                f"{what}{'is' if not what else 'are'} {whose}'s {'plus' if c > 0 else 'minus'} one",
                {"added": c},
                rest,
                None,
            )
    size = np.abs(x) > 0
    if int(size.sum()) < 8:
        return None
    ratio = y[size] / x[size]
    c = float(np.median(ratio))
    if c and (rest := _rest(y, c * x)) <= _EXACT:
        nice = round(c) if abs(c - round(c)) < 1e-3 and round(c) else c
        return FACTOR, f"{what}{'is' if not what else 'are'} {whose}'s times {nice:.6g}", {"factor": c}, rest, None
    return None


def _coarser(x: np.ndarray, y: np.ndarray, what: str, rounds: Mapping[str, Any], whose: str) -> _Found | None:
    for name, rounded in rounds.items():
        of = rounded(x)
        if of is not None and (of == y).all():
            return PRECISION, f"{what}went through {name}: it is {whose}'s rounded to it", {"dtype": name}, 0.0, None
    peak = np.abs(x).max(1, keepdims=True)
    for bits, top in (("8 bits with a scale of each row", 127.0), ("4 bits with a scale of each row", 7.0)):
        step = np.where(peak > 0, peak / top, 1.0)
        near = np.rint(x / step) * step
        on_grid = np.abs(near - y) <= 0.1 * step + 2.0**-8 * np.abs(near)
        far = float((np.abs(x - y) / step).max())
        if on_grid.mean() >= _NEARLY_ALL and 0.2 < far < 1.2:
            return PRECISION, f"{what}went through integers of {bits}", {"bits": bits}, far, None
    return None


def _row_factors(x: np.ndarray, y: np.ndarray, what: str, whose: str) -> _Found | None:
    """A factor of each row."""
    if x.shape[1] < 8 or len(x) < _LEAST_ROWS:
        return None
    f = _factors(x, y)
    if f is not None and (rest := _rest(y, f[:, None] * x)) <= _EXACT:
        said = f"{what}are {whose}'s times a factor of each row ({f.min():.4g} to {f.max():.4g})"
        said += ": another row's scale, or none"
        return FACTOR, said, {"least": float(f.min()), "most": float(f.max())}, rest, None
    return None


def _factors(x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    """The factor of each row, float64 [rows], by least squares; None where a row is zero."""
    power = (x * x).sum(1)
    return None if not power.all() else (x * y).sum(1) / power


def block_factors(a: np.ndarray, b: np.ndarray) -> tuple[tuple[int, int], np.ndarray, float] | None:
    """(block, factors [rows of blocks, columns of blocks], what is left) where each block of ``b`` is ``a``'s times one
    number of its own; None where no block size makes it so."""
    for rows, columns in _BLOCKS:
        n, m = -(-a.shape[0] // rows), -(-a.shape[1] // columns)
        if n * m < 2 or rows * columns < 8 or n * m > a.size // 8:
            continue
        pad = ((0, n * rows - a.shape[0]), (0, m * columns - a.shape[1]))
        x, y = (np.pad(v, pad).reshape(n, rows, m, columns).transpose(0, 2, 1, 3).reshape(n * m, -1) for v in (a, b))
        f = _factors(x, y)
        if f is not None and (rest := _rest(y, f[:, None] * x)) <= _EXACT:
            return (rows, columns), f.reshape(n, m), rest
    return None


def _block_factors(a: np.ndarray, b: np.ndarray, whose: str) -> _Found | None:
    found = block_factors(a, b)
    if found is None:
        return None
    (rows, columns), f, rest = found
    off = np.abs(f - 1) > _EXACT
    which = "each block" if off.all() else f"{int(off.sum())} of {f.size} blocks"
    first = tuple(map(int, np.argwhere(off)[0]))
    size = f"{f[off].min():.4g} to {f[off].max():.4g}"
    text = f"{which} of {rows} x {columns} {'is' if off.all() else 'are'} {whose}'s times a factor of its own ({size})"
    text += f": as dequantised with other scales, first block {first}"
    return FACTOR, text, {"block": [rows, columns], "blocks": int(off.sum()), "first": list(first)}, rest, None
