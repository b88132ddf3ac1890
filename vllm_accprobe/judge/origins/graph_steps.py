"""Where in compiled and captured graphs an error is: which piece, which captured size, which padding.

The problem: "o_proj is wrong" does not tell whether its kernel is, or the graph that replays it: a buffer that is not
filled, rows of padding that are read, one captured size. The idea: mine's steps say which graph computed them; of the
kinds of steps (replayed or not, a size, with padding) the one that separates wrong from right is said, and only where
steps of both kinds were compared and chance, which deals wrong steps out to all alike, would hardly do the same. The
unit is the step: rows of one step share their graph. Beside it stands the piece of the graph that the tap lies in.
Attention carries an error from one step into the next by keys and values; what follows such a row in its own request
is no evidence against a kind. Not here: other conditions (shape.py), what a batch was (comparison/).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_accprobe.judge import constants as c

NO_GRAPH = 0
"""Size of a step that no captured graph computed."""


@dataclass(frozen=True)
class GraphRows:
    """Rows of one place, arrays of one length. step: of mine; size: of the graph that computed it, NO_GRAPH, or -1
    where nobody knows; padding: rows of it that are nobody's; request, position: as RowFacts'; bad: whether wrong."""

    step: np.ndarray
    size: np.ndarray
    padding: np.ndarray
    request: np.ndarray
    position: np.ndarray
    bad: np.ndarray


@dataclass(frozen=True)
class Condition:
    """kind: ``size``, ``padding``, ``size and padding``, ``replayed``, ``plain`` (without a graph) or ``alike``.
    sizes: captured sizes that are meant; padded: (rows that are nobody's, rows) of its wrong steps."""

    kind: str
    sentence: str
    sizes: tuple[int, ...] = ()
    padded: tuple[tuple[int, int], ...] = ()


def of_steps(rows: GraphRows, mixing: bool) -> Condition | None:
    """The kind of step that an error is bound to; None where steps of one kind only were compared, or none fits.

    mixing: whether the place reads other rows of a request, which may be wrong since an earlier step."""
    known = rows.size >= 0
    rows = _only(rows, known)
    if not rows.bad.any():
        return None
    judged = ((_fit(rows, mask, alike, mixing), condition) for mask, alike, condition in _candidates(rows))
    found = [(fit, condition) for fit, condition in judged if fit is not None]
    if not found:
        return _alike(rows)
    best = max(fit for fit, _ in found)
    # Of kinds that fit as well, the first is the simplest.
    return next(condition for fit, condition in found if fit >= best - c.SIMPLER)


def _only(rows: GraphRows, mask: np.ndarray) -> GraphRows:
    return GraphRows(*(values[mask] for values in vars(rows).values()))


def _candidates(rows: GraphRows) -> Iterator[tuple[np.ndarray, int, Condition]]:
    """(its rows, how many kinds like it there are, what is said), the simplest first."""
    replayed = rows.size > NO_GRAPH
    padded = rows.padding > 0
    sizes = np.unique(rows.size[replayed])
    yield replayed, 1, Condition("replayed", "only in replayed steps, not in those that ran without a graph")
    yield ~replayed, 1, Condition("plain", "only in steps that ran without a graph")
    which = tuple(int(s) for s in sizes if _share(rows, rows.size == s) >= c.HALF_OF_STEPS)
    some = 0 < len(which) < len(sizes)
    at = np.isin(rows.size, which)
    if some:
        said = f"only in steps replayed at {_sizes(which)}"
        yield at, math.comb(len(sizes), len(which)), Condition("size", said, which)
    found = _paddings(rows, padded & rows.bad)
    yield padded, 1, Condition("padding", f"only in steps with padding{_nobodys(found)}", (), found)
    for size in sizes:
        here = padded & (rows.size == size)
        if (here & rows.bad).any():
            found = _paddings(rows, here & rows.bad)
            said = f"only in steps replayed at size {size} with padding{_nobodys(found)}"
            yield here, len(sizes), Condition("size and padding", said, (int(size),), found)


def _fit(rows: GraphRows, mask: np.ndarray, alike: int, mixing: bool) -> float | None:
    """How well the steps of ``mask`` are the wrong ones, to 1; None where they are not, or chance would do."""
    counted = ~_carried(rows, mask) if mixing else np.ones(len(mask), bool)
    inside, outside = np.unique(rows.step[mask & counted]), np.unique(rows.step[~mask & counted])
    wrong = np.unique(rows.step[rows.bad & counted])
    if not len(inside) or not len(outside) or not len(wrong):
        return None
    hits = int(np.isin(wrong, inside).sum())
    of_wrong = min(hits / len(wrong), float((rows.bad & counted & mask).sum() / (rows.bad & counted).sum()))
    score = min(of_wrong, hits / len(inside))
    if of_wrong < c.AGREE or score < c.AGREE_MOSTLY:
        return None
    chance = _chance(len(np.unique(rows.step[counted])), len(inside), len(wrong), hits) * alike * c.GRAPH_KINDS
    return score if chance < c.GRAPH_CHANCE else None


def _carried(rows: GraphRows, mask: np.ndarray) -> np.ndarray:
    """bool [n]: wrong rows outside of ``mask`` behind a wrong row of the same request inside it."""
    out = np.zeros(len(mask), bool)
    for request in np.unique(rows.request[rows.bad]):
        own = (rows.request == request) & rows.bad
        if (own & mask).any():
            out |= own & ~mask & (rows.position > rows.position[own & mask].min())
    return out


def _chance(steps: int, inside: int, wrong: int, hits: int) -> float:
    """The probability that of ``wrong`` steps, dealt out at random among ``steps``, so many or more are of the
    ``inside`` ones: the upper tail of a hypergeometric distribution."""
    ways = sum(math.comb(inside, k) * math.comb(steps - inside, wrong - k) for k in range(hits, min(inside, wrong) + 1))
    return ways / math.comb(steps, wrong)


def _alike(rows: GraphRows) -> Condition | None:
    """Said where steps with and without a graph were compared, several of each, and nearly all of both are wrong."""
    replayed = rows.size > NO_GRAPH
    for mask in (replayed, ~replayed):
        if len(np.unique(rows.step[mask])) < c.FEWEST_KIN or _share(rows, mask) < c.MOST_ROWS:
            return None
    return Condition("alike", "in replayed steps and in those that ran without a graph alike")


def _share(rows: GraphRows, mask: np.ndarray) -> float:
    """The part of the steps of these rows that has a wrong one."""
    steps = np.unique(rows.step[mask])
    return len(np.unique(rows.step[mask & rows.bad])) / len(steps) if len(steps) else 0.0


def _paddings(rows: GraphRows, mask: np.ndarray) -> tuple[tuple[int, int], ...]:
    found = {(int(p), int(s)) for p, s in zip(rows.padding[mask], rows.size[mask], strict=True)}
    return tuple(sorted(found, key=lambda pair: (pair[1], pair[0])))


def _nobodys(found: Sequence[tuple[int, int]]) -> str:
    """`` (3 of 8 rows are nobody's)``."""
    if not found:
        return ""
    if len(found) <= c.FEW_LISTED:
        said = [f"{p} of {s}" for p, s in found]
    else:
        said = [f"{min(p for p, _ in found)} to {max(p for p, _ in found)} of up to {max(s for _, s in found)}"]
    return f" ({_and(said)} rows are nobody's)"


def _sizes(sizes: Sequence[int]) -> str:
    return f"size {sizes[0]}" if len(sizes) == 1 else f"sizes {_and([str(s) for s in sizes])}"


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


# --- pieces ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InPiece:
    """piece: a number, the one in front of ``tap`` where that runs between two; taps: first and last of its modules
    that are tapped; sentence: without a verb."""

    piece: int
    taps: tuple[str, ...]
    sentence: str


def piece_of(tap: str, graphs: Mapping[str, Any]) -> InPiece | None:
    """Where ``tap`` stands in the pieces that run.json's ``engine.graphs`` tells; None where it does not."""
    pieces = graphs.get("pieces")
    if not isinstance(pieces, list):
        return None
    known = [[str(path) for path in piece] if isinstance(piece, list) else [] for piece in pieces]
    for number, paths in enumerate(known):
        if tap in paths:
            which = f"piece {number}" if len(known) > 1 else "the only piece"
            return InPiece(number, _ends(paths), f"{which}{_span(paths)}")
    between = graphs.get("between")
    if not isinstance(between, list) or tap not in between:
        return None
    # Splitting operators and pieces alternate: the first one runs behind piece 0.
    number = min(between.index(tap), len(known) - 1)
    if number < 0:
        return None
    return InPiece(number, _ends(known[number]), f"it runs between the pieces, and reads what piece {number} wrote"
                   f"{_span(known[number])}")  # fmt: skip


def _ends(paths: Sequence[str]) -> tuple[str, ...]:
    return (paths[0], paths[-1]) if len(paths) > 1 else tuple(paths)


def _span(paths: Sequence[str]) -> str:
    ends = _ends(paths)
    return f": {' … '.join(ends)}" if ends else ""


# --- both ------------------------------------------------------------------------------------------------------


def entry(condition: Condition | None, place: InPiece | None, padding: str = "") -> dict[str, Any] | None:
    """compare.json's ``graph`` of an origin; None where neither is known. padding: what stood in the rows that are
    nobody's, where it is known."""
    if condition is None and place is None:
        return None
    said = condition.sentence if condition is not None else ""
    if place is not None:
        said = f"{said} ({place.sentence})" if said else f"in {place.sentence}".replace("in it", "it")
    if padding and condition is not None and condition.padded:
        said += f"; {padding}"
    else:
        padding = ""
    return {
        "sentence": said,
        "condition": condition.kind if condition is not None else None,
        "sizes": list(condition.sizes) if condition is not None else [],
        "padding": [list(pair) for pair in condition.padded] if condition is not None else [],
        "piece": place.piece if place is not None else None,
        "taps": list(place.taps) if place is not None else [],
        "in_padding": padding,
    }
