"""Which rows, columns, heads, batches and graphs an error is in, in one sentence.

The problem: "relative L2 0.03 at o_proj" does not tell a kernel team where to search; "only positions ≥ 1024", "head 3
of 4" or "only in steps replayed at size 8" does. The idea: rows are split into bad and good by what was created in
them, and the simplest condition that separates the two is named; so are columns, heads, and the factor where the error
is one. For compiled and captured graphs the unit is the step: the kind of step (replayed, size, padding) is named that
separates wrong from right and that chance would hardly give; rows that attention spoils from an earlier step are no
evidence. Numbers count from 0. Not here: which tap it is (origins.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_accprobe.judge import constants as c
from vllm_accprobe.judge.tensor_errors import column_signs


@dataclass(frozen=True)
class RowFacts:
    """Facts about rows, arrays of one length; -1 where unknown.

    made: error created in the row; gain: slope of mine over the golden, minus 1. position, request (a number); decode:
    bool; batch: requests in the step that computed it, tokens: rows in that step, chunk: of its prompt, from 1,
    0 in decode. experts: [n, k], chosen for the row; names: of the requests.
    """

    made: np.ndarray
    gain: np.ndarray
    position: np.ndarray
    request: np.ndarray
    decode: np.ndarray
    batch: np.ndarray
    tokens: np.ndarray
    chunk: np.ndarray
    experts: np.ndarray | None = None
    names: Mapping[int, str] = field(default_factory=dict)


def sentence(rows: RowFacts | None, columns: np.ndarray | None, attrs: Mapping[str, Any], *, tail: str = "") -> str:
    """E.g. "column 17 of 128, all rows, scale 1.06"; empty where nothing is known.

    columns: kernels.structure's sums; attrs: of the module (head_size, num_heads ...); tail: what the last columns are.
    """
    parts = []
    factor = None
    if columns is not None and columns.shape[1] > 1:
        text, slope = _columns(columns, attrs, tail)
        parts.append(text)
        factor = slope if text else None
    if rows is not None and len(rows.made):
        narrow = bool(parts and parts[0])
        bad = bad_rows(rows.made, c.BAD_PART_NARROW if narrow else c.BAD_PART)
        parts.append(_where(rows, bad, "" if narrow else _count(rows, bad)))
        if np.isinf(rows.made[bad]).any():
            parts.append("NaN or infinity on one side")
        elif not narrow:
            factor = _factor(rows, bad)
    if factor is not None:
        parts.append("zero in mine" if abs(factor) < c.ZERO else f"scale {factor:.3g}")
    return ", ".join(p for p in parts if p)


# --- rows ------------------------------------------------------------------------------------------------------


def bad_rows(made: np.ndarray, part: float = c.BAD_PART) -> np.ndarray:
    """bool [n]: rows that have at least 1 / part of what the typical bad row has (those with a third of the worst or
    more). An error in few columns is as large as the row's values there happen to be: part is then larger.

    made: float64 [n], n >= 1, RowFacts.made."""
    if np.isinf(made).any():
        return np.isinf(made)
    high = float(np.median(made[made >= made.max() / c.HIGH_PART]))
    return made >= high / part


def _factor(rows: RowFacts, bad: np.ndarray) -> float | None:
    """mine / golden, where that is nearly all of the error."""
    gain, made = rows.gain[bad], rows.made[bad]
    middle = float(np.median(gain))
    if not np.isfinite(made).all() or abs(middle) < c.FACTOR_LEAST:
        return None
    alike = np.median(np.abs(gain - middle)) < c.FACTOR_ALIKE * abs(middle)
    return 1.0 + middle if alike and abs(middle) > c.FACTOR_SHARE * float(np.median(made)) else None


def _where(rows: RowFacts, bad: np.ndarray, otherwise: str) -> str:
    if bad.mean() > c.AGREE:
        return "all rows"
    # What holds for nearly all rows separates nothing.
    narrow = [(text, mask) for text, mask in _conditions(rows, bad) if mask.mean() < c.NEARLY_ALL]
    scored = [(_agreement(mask, bad), -i, text) for i, (text, mask) in enumerate(narrow)]
    best = max(scored, default=(0.0, 0, ""))
    if best[0] >= c.AGREE:
        # Of several that fit, the first is the simplest.
        return next(text for score, _, text in scored if score >= max(c.AGREE, best[0] - c.SIMPLER))
    expert = _expert(rows, bad)
    if expert:
        return expert
    if bad.mean() > c.MOST_ROWS:
        return "most rows"
    if best[0] >= c.AGREE_MOSTLY:
        return f"mostly {best[2].removeprefix('only ')}"
    return otherwise


def _expert(rows: RowFacts, bad: np.ndarray) -> str:
    """One expert that all bad rows were sent to, "" where there is none. Not all of its rows are bad: what an expert
    gives is weighted, and a small weight hides its error. So it must be no chance that it has all of the bad ones."""
    if rows.experts is None:
        return ""
    masks = {e: (rows.experts == e).any(axis=1) for e in np.unique(rows.experts[bad]).tolist() if e >= 0}
    shares = sorted(((float((m & bad).sum()) / bad.sum(), e) for e, m in masks.items()), reverse=True)
    if not shares:
        return ""
    share, expert = shares[0]
    here = float(masks[expert].mean())
    inside = int((masks[expert] & bad).sum())
    sure = here**inside < c.EXPERT_CHANCE and all(
        other < c.EXPERT_OTHER * share or other < c.EXPERT_RARE * masks[e].mean() for other, e in shares[1:]
    )
    if not sure or share < c.EXPERT_SHARE:
        return ""
    word = "only" if share >= c.EXPERT_ONLY else "mostly"
    return f"{word} rows of expert {expert} ({inside} of {int(masks[expert].sum())})"


def _count(rows: RowFacts, bad: np.ndarray) -> str:
    at = np.unique(rows.position[bad])
    few = f" (positions {', '.join(map(str, at))})" if len(at) <= c.FEW_LISTED else ""
    return f"{int(bad.sum())} of {len(bad)} rows{few}"


def _agreement(mask: np.ndarray, bad: np.ndarray) -> float:
    """The smaller of: how much of the bad is within the condition, how much within it is bad."""
    both = float((mask & bad).sum())
    return min(both / max(bad.sum(), 1), both / max(mask.sum(), 1)) if not mask.all() else 0.0


def _conditions(rows: RowFacts, bad: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The simplest first."""
    at = rows.position[bad]
    if len(np.unique(at)) == 1:
        yield f"only position {at[0]}", rows.position == at[0]
    if rows.experts is not None:
        for expert in np.unique(rows.experts[bad]):
            yield f"only rows of expert {expert}", (rows.experts == expert).any(axis=1)
    yield "only decode", rows.decode
    yield "only prefill", ~rows.decode
    yield from _from(rows.batch, bad, "only rows of batch size")
    first = _split(rows.position, bad)
    if first is not None:
        yield f"only positions ≥ {first}", rows.position >= first
    last = _split(-rows.position, bad)
    if last is not None:
        yield f"only positions ≤ {-last}", rows.position <= -last
    chunk = rows.chunk
    if (chunk > 1).any():
        if len(np.unique(chunk[bad])) == 1:
            yield f"only the {_ordinal(chunk[bad][0])} chunk of a prompt", chunk == chunk[bad][0]
        first = _split(chunk, bad)
        if (first is not None and first > 2) or (first == 2 and chunk.max() > 2):
            yield f"only from the {_ordinal(first)} chunk of a prompt on", chunk >= first
    yield from _from(rows.tokens, bad, "only steps with a number of rows")
    who = np.unique(rows.request[bad])
    if len(who) == 1:
        name = rows.names.get(int(who[0]), str(who[0]))
        yield f"only request {name!r}", rows.request == who[0]


def _ordinal(n: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(int(n), f"{int(n)}th")


def _from(values: np.ndarray, bad: np.ndarray, what: str) -> Iterator[tuple[str, np.ndarray]]:
    if (values < 0).all() or len(np.unique(values)) < 2:
        return
    if len(np.unique(values[bad])) == 1:
        yield f"{what} {values[bad][0]}", values == values[bad][0]
    for sign, text in ((1, "≥"), (-1, "≤")):
        first = _split(sign * values, bad)
        if first is not None:
            yield f"{what} {text} {sign * first}", sign * values >= first


def _split(values: np.ndarray, bad: np.ndarray) -> int | None:
    """The bound from which on rows are bad that agrees best; None where it would be all."""
    known = np.unique(values)
    if len(known) < 2:
        return None
    bounds = (
        known if len(known) <= c.BOUNDS_TRIED else known[np.linspace(0, len(known) - 1, c.BOUNDS_TRIED).astype(int)]
    )
    scores = [_agreement(values >= b, bad) for b in bounds[1:]]
    return int(bounds[1:][int(np.argmax(scores))]) if scores else None


# --- columns ---------------------------------------------------------------------------------------------------


def _columns(sums: np.ndarray, attrs: Mapping[str, Any], tail: str) -> tuple[str, float | None]:
    """(words, mine / golden in the bad columns where it is one factor)."""
    err, slope, _ = column_signs(sums)
    width = len(err)
    if not err.max() > 0:
        return "", None
    high = float(np.median(err[err >= err.max() / c.HIGH_PART]))
    bad = err >= high / c.HIGH_PART
    if bad.sum() > c.COLUMNS_MOST * width or float(np.median(err[~bad])) > high / c.COLUMNS_CLEAR:
        return "", None
    words = _heads(bad, sums, attrs) or _range(bad, tail)
    factor = float(np.median(slope[bad]))
    alike = np.median(np.abs(slope[bad] - factor)) < c.COLUMN_ALIKE * abs(factor)
    return words, 1.0 + factor if sums[2].any() and alike and abs(factor) > c.COLUMN_SHARE * high else None


def _heads(bad: np.ndarray, sums: np.ndarray, attrs: Mapping[str, Any]) -> str:
    size = next((int(attrs[k]) for k in ("head_size", "head_dim", "v_head_dim") if attrs.get(k)), 0)
    width = len(bad)
    if size < c.HEAD_LEAST or width % size or width == size:
        return ""
    share = bad.reshape(-1, size).mean(axis=1)
    hit = np.flatnonzero(share > c.HEAD_BAD)
    if not len(hit) or share[share <= c.HEAD_BAD].max(initial=0.0) > c.HEAD_GOOD:
        return ""
    total = width // size
    q, kv = int(attrs.get("num_heads") or 0), int(attrs.get("num_kv_heads") or 0)
    if q and kv and total == q + 2 * kv:  # a fused projection: q, k and v one after the other
        names = [("q", h, q) if h < q else ("k", h - q, kv) if h < q + kv else ("v", h - q - kv, kv) for h in hit]
        kinds = {n[0] for n in names}
        if len(kinds) == 1:
            kind, count = names[0][0], names[0][2]
            if len(names) == count:
                return f"all of {kind} (columns {hit[0] * size}–{(hit[-1] + 1) * size - 1} of {width})"
            return f"{kind} {_number([n[1] for n in names], 'head')} of {count}"
        return ""
    return f"{_number(hit.tolist(), 'head')} of {total}"


def _range(bad: np.ndarray, tail: str) -> str:
    width, at = len(bad), np.flatnonzero(bad)
    first, last = int(at[0]), int(at[-1])
    if first == last:
        return f"column {first} of {width}"
    if len(at) >= c.RANGE_FULL * (last - first + 1):
        end = f" ({tail})" if tail and last >= width - 1 - width // c.TAIL_PART else ""
        return f"columns {first}–{last} of {width}{end}"
    return f"{_number(at.tolist(), 'column')} of {width}"


def _number(at: list[int], what: str) -> str:
    if len(at) == 1:
        return f"{what} {at[0]}"
    if len(at) <= c.FEW_LISTED:
        return f"{what}s {', '.join(map(str, at))}"
    return f"{len(at)} {what}s, first {at[0]},"


NO_GRAPH = 0
"""Size of a step that no captured graph computed."""


@dataclass(frozen=True)
class GraphRows:
    """Rows of one place, arrays of one length. step: of mine; size: of the graph that computed it, NO_GRAPH, or -1
    where it is not known; padding: rows of no request; request, position: as RowFacts'; bad: whether
    wrong."""

    step: np.ndarray
    size: np.ndarray
    padding: np.ndarray
    request: np.ndarray
    position: np.ndarray
    bad: np.ndarray


@dataclass(frozen=True)
class Condition:
    """kind: ``size``, ``padding``, ``size and padding``, ``replayed``, ``plain`` (without a graph) or ``alike``.
    sizes: captured sizes that are meant; padded: (rows of no request, rows) of its wrong steps."""

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
    """(its rows, how many kinds like it there are, what is reported), the simplest first."""
    replayed = rows.size > NO_GRAPH
    padded = rows.padding > 0
    sizes = np.unique(rows.size[replayed])
    yield replayed, 1, Condition("replayed", "only in replayed steps, not in those that ran without a graph")
    yield ~replayed, 1, Condition("plain", "only in steps that ran without a graph")
    which = tuple(int(s) for s in sizes if _share(rows, rows.size == s) >= c.HALF_OF_STEPS)
    some = 0 < len(which) < len(sizes)
    at = np.isin(rows.size, which)
    if some:
        text = f"only in steps replayed at {_sizes(which)}"
        yield at, math.comb(len(sizes), len(which)), Condition("size", text, which)
    found = _paddings(rows, padded & rows.bad)
    yield padded, 1, Condition("padding", f"only in steps with padding{_nobodys(found)}", (), found)
    for size in sizes:
        here = padded & (rows.size == size)
        if (here & rows.bad).any():
            found = _paddings(rows, here & rows.bad)
            text = f"only in steps replayed at size {size} with padding{_nobodys(found)}"
            yield here, len(sizes), Condition("size and padding", text, (int(size),), found)


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
    """Reported where steps with and without a graph were compared, several of each, and nearly all of both are
    wrong."""
    replayed = rows.size > NO_GRAPH
    for mask in (replayed, ~replayed):
        if len(np.unique(rows.step[mask])) < c.FEWEST_STEPS or _share(rows, mask) < c.MOST_ROWS:
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
    """`` (3 of 8 rows are padding)``."""
    if not found:
        return ""
    if len(found) <= c.FEW_LISTED:
        parts = [f"{p} of {s}" for p, s in found]
    else:
        parts = [f"{min(p for p, _ in found)} to {max(p for p, _ in found)} of up to {max(s for _, s in found)}"]
    return f" ({_and(parts)} rows are padding)"


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
    """compare.json's ``graph`` of an origin; None where neither is known. padding: what stood in the rows of no
    request, where it is known."""
    if condition is None and place is None:
        return None
    text = condition.sentence if condition is not None else ""
    if place is not None:
        text = f"{text} ({place.sentence})" if text else f"in {place.sentence}".replace("in it", "it")
    if padding and condition is not None and condition.padded:
        text += f"; {padding}"
    else:
        padding = ""
    return {
        "sentence": text,
        "condition": condition.kind if condition is not None else None,
        "sizes": list(condition.sizes) if condition is not None else [],
        "padding": [list(pair) for pair in condition.padded] if condition is not None else [],
        "piece": place.piece if place is not None else None,
        "taps": list(place.taps) if place is not None else [],
        "in_padding": padding,
    }
