"""The shape of an error in one sentence: which rows, which columns, and whether it is a scale.

The problem: "relative L2 0.03 at o_proj" does not tell a kernel team where to look; "only positions ≥ 1024" or "head 3
of 4" does. The idea: rows are split into bad and good by what was created in them, and the simplest condition that
separates them is said: a phase, one position, positions from some number on, a batch size, a chunk, a request, an
expert. Columns likewise: one, a range, whole heads. Where the error is a multiple of the values, the factor is said.
Numbers count from 0. Not here: who is to blame (origin.py), what a batch was (comparison/).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_accprobe.judge import constants as c
from vllm_accprobe.judge.origins.columns import column_signs


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
        said, slope = _columns(columns, attrs, tail)
        parts.append(said)
        factor = slope if said else None
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
