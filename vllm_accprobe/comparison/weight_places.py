"""Weights that differ: which rows of which rank, and where mine's rows stand in golden's tensor.

The problem: two checkpoints, two cuts over ranks and two loaders all read as "different weights", which sends a person
to read a loader. The idea: from the values of both dumps where they are stored, else from the fingerprints of the rows
(dump/weight_sums.py), which every capture has, mine's rows of all ranks are laid over golden's whole tensor as the
layouts say. Rows that are not the ones that are due are looked up there, and in all other tensors of their width; what
comes out is reported in the simplest way that explains all of them: blocks exchanged, a shift, one row's copy. Values
say the rest: transposed, a factor, fewer bits. Nothing is said that does not hold for every wrong row that it speaks
of; a 32-bit key finds a wrong place by chance once in 2^32 / rows. Bounded: so many tensors, so many bytes; the rest is
counted. Not here: whether weights differ (judge/weights.py), one dump alone (opcheck/run/own_findings.py).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_accprobe.comparison.measure.measured import MeasuredUnit
from vllm_accprobe.comparison.measure.measurer import is_computed, round_to_bfloat16
from vllm_accprobe.comparison.measure.read import Loader, RowBlock, Unread, cut_shape, find_cut
from vllm_accprobe.comparison.plan.unit import Unit
from vllm_accprobe.dump.dtypes import DTYPES, widen
from vllm_accprobe.dump.journal import NO_LIVES, WeightPrint
from vllm_accprobe.dump.record_table import of_sites
from vllm_accprobe.dump.schema import Layout
from vllm_accprobe.dump.weight_sums import row_keys
from vllm_accprobe.judge.origins import OriginEntry
from vllm_accprobe.judge.weights import DIFFERS, State, WeightHistory, event_words, named, side_of

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
    by accident, None where it was not computed. residual: the largest relative error that is left; rows: how many are
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
    parts = [str(a) if a == b else f"{a}-{b}" for a, b in stretches]
    left = sum(b - a + 1 for a, b in stretches[_LISTED:])
    return ", ".join(parts[:_LISTED]) + (f" and {left} more" if left else "")


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
    answer = _described(bad, at, due, names, whose)
    if (
        answer is not None
        and len(bad) > 1
        and (np.sort(mine[bad]) == np.sort(right[due[bad]])).all()
        and "exchanged" not in answer[1]
    ):
        if (mine[bad] == right[due[bad]][::-1]).all():
            answer = f"{names(bad)} are in reverse order", {}
        elif "block" not in answer[1] and len(_runs(bad, at)) > 2:
            answer = f"{names(bad)} are {whose}'s in another order", {}
    if answer is None:
        return RowsFound(UNKNOWN, f"{names(bad)} differ, and no other place in {whose} has them", {"rows": len(bad)},
                         rows=len(bad))  # fmt: skip
    text, parameter = answer
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


def _described(
    bad: np.ndarray, at: np.ndarray, due: np.ndarray, names: Names, whose: str
) -> tuple[str, dict[str, Any]] | None:
    runs, nowhere = _runs(bad, at), bad[at < 0]
    if not runs:
        return None
    rest = f"; {names(nowhere)} differ and stand nowhere in {whose}" if len(nowhere) else ""
    exchanged = _exchanged(runs, due)
    if exchanged is not None and not len(nowhere):
        return _exchange_text(exchanged, names)
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


def _exchange_text(pairs: list[tuple[Run, Run]], names: Names) -> tuple[str, dict[str, Any]]:
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
    with np.errstate(invalid="ignore"):  # memory that was never written holds any bits
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
    if c and (rest := _rest(y, c * x)) <= _EXACT and abs(c - 1) > rest:
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
    if f is not None and (rest := _rest(y, f[:, None] * x)) <= _EXACT and np.abs(f - 1).max() > rest:
        text = f"{what}are {whose}'s times a factor of each row ({f.min():.4g} to {f.max():.4g})"
        text += ": another row's scale, or none"
        return FACTOR, text, {"least": float(f.min()), "most": float(f.max())}, rest, None
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
    if not off.any():  # the weights are golden's, rounded otherwise
        return None
    which = "each block" if off.all() else f"{int(off.sum())} of {f.size} blocks"
    first = tuple(map(int, np.argwhere(off)[0]))
    size = f"{f[off].min():.4g} to {f[off].max():.4g}"
    text = f"{which} of {rows} x {columns} {'is' if off.all() else 'are'} {whose}'s times a factor of its own ({size})"
    text += f": as dequantised with other scales, first block {first}"
    return FACTOR, text, {"block": [rows, columns], "blocks": int(off.sum()), "first": list(first)}, rest, None


MOST_TENSORS, MOST_BYTES = 64, 1 << 30
"""Tensors that are explained, and bytes of values that are read for it, both sides together."""
NOT_EXPLAINED = "wrong weights beyond the first that were looked for in golden"
Name = tuple[str, str]
"""(tap, name)."""
_FEWEST_ROWS = 4
_PLAIN = re.compile(r"^(rows?|elements?) [\d, -]+(?: and \d+ more)?$")


def due_rows(layout: Layout, shape: Sequence[int]) -> tuple[np.ndarray, int] | None:
    """(the rows of the whole tensor that a rank's rows are, int64 [rows]; how many rows the whole has); None where the
    cut goes through the rows, or is not known. Rows are as `dump.journal.row_count` counts them."""
    lead = tuple(shape[:-1] if len(shape) > 1 else shape)
    count = int(np.prod(lead, dtype=np.int64))
    if layout.kind == "replicated" or layout.size <= 1:
        return np.arange(count), count
    if layout.kind != "shard" or layout.dim is None or not 0 <= layout.index < layout.size:
        return None
    dim = layout.dim + len(shape) if layout.dim < 0 else layout.dim
    if not 0 <= dim < len(lead):
        return None
    parts = layout.parts or ((lead[dim], 1),)
    if sum(n for n, _ in parts) != lead[dim] or any(r <= 0 or layout.size % r for _, r in parts):
        return None
    along, at = [], 0
    for n, replicas in parts:
        along.append(at + layout.index // replicas * n + np.arange(n))
        at += n * layout.size // replicas
    whole = (*lead[:dim], at, *lead[dim + 1 :])
    if int(np.prod(whole, dtype=np.int64)) > 1 << 26:
        return None
    index = np.arange(int(np.prod(whole, dtype=np.int64))).reshape(whole)
    return np.take(index, np.concatenate(along), axis=dim).ravel(), index.size


@dataclass(frozen=True)
class _Piece:
    """One rank's rows. keys: uint32 [rows], None where only values are there; due: of the whole."""

    rank: int
    print: WeightPrint
    keys: np.ndarray
    due: np.ndarray
    of: int


def _layouts(dump: Any) -> dict[tuple[int, str, str], Layout]:
    parameters = of_sites(getattr(dump, "records", ()), lambda s: s.parameter and s.role.startswith("param."))
    return {(r.rank, r.tap, r.role.removeprefix("param.")): r.layout for r in parameters}


def _pieces(states: Mapping[int, State], layouts: Mapping[tuple[int, str, str], Layout]) -> list[_Piece] | None:
    """A parameter's pieces on all ranks; None where one is cut through its rows or has no prints of rows."""
    found = []
    for rank, state in sorted(states.items()):
        p = state.given or state.lies
        keys = None if p is None or p.undone == "unknown" else p.sums()
        if p is None or keys is None or not len(keys):
            return None
        layout = layouts.get((rank, p.tap, p.name))
        due = due_rows(layout, p.shape) if layout is not None else None
        if due is None or len(due[0]) != len(keys):
            return None
        found.append(_Piece(rank, p, keys, *due))
    return found


def _whole(pieces: Iterable[_Piece]) -> np.ndarray | None:
    """uint32 [rows of the whole], of the first rank that has each; None where no rank has a row."""
    pieces = list(pieces)
    rows = max((p.of for p in pieces), default=0)
    if not rows or any(p.of != rows for p in pieces):
        return None
    out, known = np.zeros(rows, np.uint32), np.zeros(rows, bool)
    for p in pieces:
        new = ~known[p.due]
        out[p.due[new]] = p.keys[new]
        known[p.due] = True
    return out if known.all() else None


def _names(pieces: Sequence[tuple[int, WeightPrint | None, int]], ranks: int) -> Any:
    """A function that names rows that are numbered over all pieces. pieces: (rank, print, rows)."""
    ends = np.cumsum([n for _, _, n in pieces])

    def text_of(rows: np.ndarray) -> str:
        out = []
        for i, (rank, p, n) in enumerate(pieces):
            own = rows[(rows >= ends[i] - n) & (rows < ends[i])] - (ends[i] - n)
            if not len(own):
                continue
            if len(own) == n:
                out.append(f"all rows of rank {rank}" if ranks > 1 else "all rows")
                continue
            what = (named(p, own) if p is not None else "") or f"rows {numbers(own)}"
            if (plain := _PLAIN.match(what)) is not None:  # stretches of rows are shorter than a list of them
                what = f"{plain[1]} {numbers(own)}"
            out.append(f"rank {rank}'s {what}" if ranks > 1 else what)
        return " and ".join(out)

    return text_of


def _dtypes(states: Mapping[int, State]) -> set[str]:
    return {p.dtype for s in states.values() if (p := s.given or s.lies) is not None}


class _Prints:
    """Both dumps' lives, and where a parameter's rows stand by them."""

    def __init__(self, dumps: tuple[Any, Any]):
        self.sides = tuple(side_of(getattr(d, "lives", NO_LIVES)) for d in dumps)
        self.layouts = tuple(_layouts(d) for d in dumps)

    def event(self, rank: int, number: int) -> int | None:
        """Golden's event that is mine's ``number``, by what it is called."""
        golden, mine = self.sides
        here = next((e for e in mine.events.get(rank, []) if e.number == number), None)
        if here is None:
            return None
        word, theirs = event_words(here, mine.events[rank]), golden.events.get(rank) or golden.events.get(0, [])
        return next((e.number for e in theirs if event_words(e, theirs) == word), None)

    def _states(self, side: WeightHistory, name: Name, number: int) -> dict[int, State]:
        places = {rank: (rank, name[0], name[1]) for (rank, n) in side.at if n == number}
        return {rank: side.at[rank, number][p] for rank, p in places.items() if p in side.at[rank, number]}

    def explain(self, name: Name, number: int) -> RowsFound | None:
        there = self.event(min(self.sides[1].events, default=0), number)
        if there is None:
            return None
        golden, mine = self._states(self.sides[0], name, there), self._states(self.sides[1], name, number)
        if not golden or not mine or not _dtypes(golden) & _dtypes(mine):  # else no row's fingerprint can be equal
            return None
        if (other := self._another(mine, name, there)) is not None:
            return other
        right, own = _pieces(golden, self.layouts[0]), _pieces(mine, self.layouts[1])
        whole = None if right is None else _whole(right)
        if whole is not None and own:
            return self._over(whole, own, name, there)
        return self._same_cut(golden, mine)

    def _over(self, whole: np.ndarray, own: Sequence[_Piece], name: Name, number: int) -> RowsFound | None:
        keys, due = np.concatenate([p.keys for p in own]), np.concatenate([p.due for p in own])
        if due.max(initial=-1) >= len(whole):  # a vocabulary that is padded otherwise
            return None
        names = _names([(p.rank, p.print, len(p.keys)) for p in own], len(own))
        found = by_keys(whole, keys, due, names)
        if found is None or found.family != UNKNOWN:
            return found
        bad = np.flatnonzero(whole[due] != keys)
        return self._elsewhere(keys[bad], names(bad), own[0].print, name, number) or found

    def _same_cut(self, golden: Mapping[int, State], mine: Mapping[int, State]) -> RowsFound | None:
        """Tensors that are cut through their rows, in both runs alike: rank by rank."""
        for rank in sorted(mine):
            g, m = (s.given or s.lies if (s := side.get(rank)) is not None else None for side in (golden, mine))
            if g is None or m is None or g.order == m.order or g.shape != m.shape or g.dtype != m.dtype:
                continue
            same = [(r, p) for r, s in golden.items() if (p := s.given or s.lies) is not None and p.order == m.order]
            if same:
                text = f"rank {rank}'s part is that of golden's rank {same[0][0]}"
                return RowsFound(ADDRESS, text, {"rank": rank, "of": same[0][0]}, 0.0, 2.0**-64, m.count)
            x, y = g.sums(), m.sums()
            if x is not None and y is not None:
                return by_keys(x, y, np.arange(len(y)), _names([(rank, m, len(y))], len(mine)))
        return None

    def _another(self, mine: Mapping[int, State], name: Name, number: int) -> RowsFound | None:
        """The whole tensor of another place of golden's."""
        for rank, state in sorted(mine.items()):
            p = state.given or state.lies
            keys = None if p is None else p.sums()
            if p is None or keys is None or len(np.unique(keys)) < min(_FEWEST_ROWS, len(keys)):
                continue
            own = self.sides[0].at.get((rank, number), {}).get((rank, name[0], name[1]))
            if own is not None and (q := own.given or own.lies) is not None and q.order == p.order:
                continue
            found = [place for (r, n), at in self.sides[0].at.items() if n == number and r == rank
                     for place, s in at.items() if place[1:] != name
                     and (q := s.given or s.lies) is not None and (q.order, q.shape) == (p.order, p.shape)]  # fmt: skip
            if len(found) == 1:
                of = f"rank {rank}'s " if len(mine) > 1 else ""
                text = f"{of}values are those of golden's {found[0][1]}.{found[0][2]}"
                return RowsFound(ADDRESS, text, {"place": f"{found[0][1]}.{found[0][2]}"}, 0.0, 2.0**-64, p.count)
        return None

    def _elsewhere(self, keys: np.ndarray, prefix: str, p: WeightPrint, name: Name, number: int) -> RowsFound | None:
        """Most of some rows in another tensor of golden's with rows of that width."""
        best: tuple[int, Name, int] = (0, name, 0)
        for (_, n), at in self.sides[0].at.items():
            for place, s in at.items() if n == number else ():
                q = s.given or s.lies
                theirs = None if q is None or place[1:] == name else q.sums()
                if (
                    q is None
                    or theirs is None
                    or q.shape[-1:] != p.shape[-1:]
                    or q.dtype != p.dtype
                    or len(p.shape) < 2
                ):
                    continue
                there = np.isin(keys, theirs)
                if (n_there := int(there.sum())) > best[0]:
                    first = int(np.flatnonzero(theirs == keys[there][0])[0])
                    best = n_there, (place[1], place[2]), first
        if best[0] < max(1, 0.9 * len(keys)):
            return None
        n, (tap, param), first = best
        text = f"{prefix} stand{'s' * (n == 1)} in golden's {tap}.{param}, from row {first} on"
        return RowsFound(ADDRESS, text, {"place": f"{tap}.{param}", "first": first}, 0.0, None, len(keys))


# --- values ----------------------------------------------------------------------------------------------------------


def _float8(name: str) -> Any:
    table = widen(np.arange(256, dtype=np.uint8), name).astype(np.float64)
    codes = np.flatnonzero(np.isfinite(table) & ~((table == 0) & (np.arange(256) > 0)))
    codes = codes[np.argsort(table[codes], kind="stable")]
    steps, even = table[codes], codes % 2 == 0

    def rounded(x: np.ndarray) -> np.ndarray | None:
        if np.abs(x).max(initial=0.0) > steps[-1]:
            return None
        at = np.clip(np.searchsorted(steps, x), 1, len(steps) - 1)
        low, high = x - steps[at - 1], steps[at] - x
        return np.where((low < high) | ((low == high) & even[at - 1]), steps[at - 1], steps[at])

    return rounded


def _through(name: str) -> Any:
    if name == "bfloat16":
        return lambda x: widen(round_to_bfloat16(x.astype(np.float32)), "bfloat16").astype(np.float64)
    return lambda x: x.astype(np.float16).astype(np.float64)


ROUNDS = {n: _float8(n) for n in ("float8_e4m3fn", "float8_e5m2")} | {n: _through(n) for n in ("bfloat16", "float16")}
"""Precision -> what rounds float64 to it."""


def by_payload(unit: Unit, loaders: tuple[Loader, Loader], prints: _Prints, left: list[int]) -> RowsFound | None:
    """A parameter whose values both dumps have. left: [bytes that may be read still]. None where nothing does."""
    g, m = unit.golden[-1], unit.mine[-1]
    if g.merge is None or m.merge is None or not (g.readable and m.readable):
        return None
    cuts = find_cut(g, m)
    shapes = cut_shape(g.merge.shape, cuts[0]), cut_shape(m.merge.shape, cuts[1])
    size = sum(int(np.prod(s, dtype=np.int64)) * DTYPES[x.first.dtype].storage.itemsize
               for s, x in zip(shapes, (g, m), strict=True))  # fmt: skip
    if size > left[0]:
        return None
    left[0] -= size
    try:
        a, b = loaders[0].load(g, cuts[0]), loaders[1].load(m, cuts[1])
    except Unread:
        return None
    finally:
        loaders[0].forget()
        loaders[1].forget()
    pieces = [(r.rank, due_rows(r.layout, r.shape)) for r in (m.records[i] for i in m.merge.use)]
    names = _of_ranks(pieces, int(np.prod(shapes[1][:-1] or shapes[1], dtype=np.int64)), prints, unit)
    if shapes[0] != shapes[1]:
        turned = len(shapes[0]) == 2 and tuple(reversed(shapes[1])) == shapes[0] and a.dtype == b.dtype
        if turned and (b.data == a.data.T).all():
            return RowsFound(
                ADDRESS, "transposed: it is golden's with rows and columns exchanged", {}, 0.0, None, len(b.data)
            )
        return None
    if a.dtype == b.dtype:
        x, y = (_by_last(block, shape) for block, shape in zip((a, b), shapes, strict=True))
        found = by_keys(row_keys(x), row_keys(y), np.arange(len(y)), lambda rows: names(rows) or "all rows")
        if found is not None and found.family == ADDRESS:
            return found
        if found is not None and len(shapes[1]) == 2:
            columns = [row_keys(np.ascontiguousarray(v.T)) for v in (x, y)]
            across = by_keys(columns[0], columns[1], np.arange(x.shape[1]), lambda at: f"columns {numbers(at)}")
            if across is not None and across.family == ADDRESS:
                return across
    else:
        found = None
    right, own = (widen(_by_last(block, shape), block.dtype, as_float=True)
                  for block, shape in zip((a, b), shapes, strict=True))  # fmt: skip
    return by_values(right, own, names, ROUNDS) or found


def _by_last(block: RowBlock, shape: tuple[int, ...]) -> np.ndarray:
    """The bits with rows as fingerprints have them: the last dimension, or each element of a vector."""
    return block.data.reshape(-1, shape[-1]) if len(shape) > 1 else block.data.reshape(-1, 1)


def _of_ranks(pieces: Sequence[tuple[int, Any]], count: int, prints: _Prints, unit: Unit) -> Any:
    """Names of the whole's ``count`` rows: the rank that has each, and its own number there."""
    name = unit.key[0], unit.key[1].removeprefix("param.")
    known = {rank: next((s.given or s.lies for s in prints.sides[1].states.get((rank, *name), ())), None)
             for rank, _ in pieces}  # fmt: skip
    if len(pieces) == 1 or any(due is None for _, due in pieces):
        rank = pieces[0][0]
        p = known[rank] if len(pieces) == 1 else None
        return lambda rows: (
            (named(p, rows) if p is not None and p.count > rows.max(initial=0) else "")
            or ("" if len(rows) == count else f"rows {numbers(rows)}")
        )

    dues = [(rank, found[0]) for rank, found in pieces if found is not None]

    def text_of(rows: np.ndarray) -> str:
        out = []
        for rank, due in dues:
            own = np.flatnonzero(np.isin(due, rows))
            if len(own):
                p = known[rank]
                if len(own) == len(due):
                    out.append(f"all rows of rank {rank}")
                    continue
                what = (named(p, own) if p is not None else "") or f"rows {numbers(own)}"
                out.append(f"rank {rank}'s {what}")
        return " and ".join(out)

    return text_of


# --- all -------------------------------------------------------------------------------------------------------------


def located(
    weights: dict[str, Any], dumps: tuple[Any, Any], units: Sequence[Unit], measured: Sequence[MeasuredUnit],
    loaders: tuple[Loader, Loader],
) -> dict[str, Any]:  # fmt: skip
    """``weights`` (compare.json's) with where the rows of wrong ones stand: ``places``, and the sentences and causes of
    its findings. units: of the plan; measured: the same, compared."""
    wrong = {u.key for u in measured if u.is_param and not is_computed(u.key[1])
             and any(p.equal is False or str(p.skip).startswith("parameters:") for p in u.parts)}  # fmt: skip
    listed = [f for f in weights.get("findings") or [] if f["what"] == DIFFERS]
    if not wrong and not weights.get("findings"):
        return weights
    own = {(f["module"], f["parameter"]) for f in weights.get("findings") or [] if f["what"] != DIFFERS}
    prints = _Prints(dumps)
    found: dict[tuple[str, str, int], RowsFound | None] = {}
    left, more = [MOST_BYTES], 0
    for unit in units:
        if unit.key in wrong and (unit.key[0], unit.key[1].removeprefix("param.")) not in own:
            key = unit.key[0], unit.key[1].removeprefix("param."), 0
            if len(found) >= MOST_TENSORS:
                more += 1
                continue
            found[key] = _best(by_payload(unit, loaders, prints, left), lambda key=key: prints.explain(key[:2], 0))
    for f in listed:
        key = f["module"], f["parameter"], int(f["number"])
        if key not in found:
            if len(found) >= MOST_TENSORS:
                more += 1
                continue
            found[key] = prints.explain(key[:2], key[2])
    known = {key: value for key, value in found.items() if value is not None}
    findings = [
        _with_place(f, known.get((f["module"], f["parameter"], int(f["number"]))))
        for f in weights.get("findings") or []
    ]
    places = [{"module": tap, "parameter": name, "number": n, "cause": one.cause, "rows": one.rows}
              for (tap, name, n), one in known.items()]  # fmt: skip
    places += [{n: f[n] for n in ("module", "parameter", "number", "cause")} | {"rows": 0}
               for f in findings if f["what"] != DIFFERS and f["side"] == "mine"]  # fmt: skip
    if not weights:
        return {"places": places} if places else weights
    return (
        weights | {"findings": findings, "places": places} | ({"not_explained": {NOT_EXPLAINED: more}} if more else {})
    )


def _best(values: RowsFound | None, prints: Any) -> RowsFound | None:
    """Values first; where they say only that rows differ, what fingerprints find in other tensors."""
    if values is not None and values.family != UNKNOWN:
        return values
    return prints() or values


def _with_place(finding: dict[str, Any], found: RowsFound | None) -> dict[str, Any]:
    if finding["what"] != DIFFERS:  # what mine's own life shows
        parameter = {"rank": finding["rank"], "rows": finding["rows"]}
        return finding | {"cause": {"family": LOADING, "text": finding["says"], "parameter": parameter,
                                    "residual": 0.0, "chance": None}}  # fmt: skip
    if found is None:
        return finding
    says = f"{finding['module']}.{finding['parameter']}"
    head = finding["says"].partition(": ")[0]
    before = (
        head[head.find(" is golden's after") :]
        if " is golden's after" in head
        else f" differs from golden's at {finding['event']}"
    )
    return finding | {"says": f"{says}{before}: {found.text}", "cause": found.cause}


def with_causes(origins: Iterable[OriginEntry], weights: Mapping[str, Any]) -> list[OriginEntry]:
    """``origins`` with the causes of those that are parameters."""
    causes = {(p["module"], p["parameter"]): p["cause"] for p in reversed(weights.get("places") or [])}
    out: list[OriginEntry] = []
    for origin in origins:
        tap, _, name = str(origin.get("role")).rpartition("param.")
        cause = causes.get((tap.rstrip("/") or str(origin.get("module")), name)) if name else None
        out.append(origin if cause is None or origin.get("cause") else {**origin, "cause": cause})
    return out


def place_notes(weights: Mapping[str, Any], most: int = 3) -> list[str]:
    """Sentences on wrong weights that no finding of a fingerprint says already."""
    explained = {(f["module"], f["parameter"]) for f in weights.get("findings") or [] if f.get("cause")}
    out: dict[str, list[str]] = defaultdict(list)
    for p in weights.get("places") or []:
        if (p["module"], p["parameter"]) not in explained:
            out[p["cause"]["text"]].append(f"{p['module']}.{p['parameter']}")
    lines = [f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {text}" for text, names in out.items()]
    left = [f"{len(lines) - most} more such sentences: compare.json, weights.places"] if lines[most:] else []
    return lines[:most] + left
