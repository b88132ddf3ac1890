"""What the page's script draws, as compact JSON.

The problem: 200,000 pairs with 37 fields, histograms and row errors must fit into one file that opens in seconds. The
idea: columns instead of rows: ``{"c": value}``, ``{"d": [text...], "i": [index...]}`` or ``{"v": [number...]}``, six
digits in failed pairs and three in others; "NaN", "Inf", "-Inf" for what JSON lacks. Errors are thousandths of a peak,
heat maps bytes in base64, the whole gzip. Tokens become text by the model's ``tokenizer.json`` where requested. Every
name is `safe`. Not here: drawing (*.js), the values (comparison/, charts.py).
"""

from __future__ import annotations

import base64
import gzip
import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from vllm_accprobe.align.tokens import TokenIds
from vllm_accprobe.comparison.pair import COLUMNS, ByPlace, Pairs
from vllm_accprobe.comparison.result import CompareError
from vllm_accprobe.dump.record_table import alike
from vllm_accprobe.report import facts, verdict_parts
from vllm_accprobe.report.charts import STRETCH, Heat, factors
from vllm_accprobe.report.text import each, nonfinite, once, safe

if TYPE_CHECKING:
    from vllm_accprobe.comparison.result import Comparison
    from vllm_accprobe.comparison.row_table import ValueSpread
    from vllm_accprobe.comparison.verdict.neighbours import Edge


_FINE = frozenset({"cosine", "worst_row_norm_ratio", "measured"})
"""Columns whose interesting part is their distance from 1."""

LONGEST_TEXT = 400
_NUMBERS = frozenset(
    {
        "step", "rank", "cosine", "max_abs_err", "mean_abs_err", "rmse", "rel_l2", "max_rel_err", "worst_row_rel_l2",
        "worst_row_norm_ratio", "nonfinite", "nonfinite_mismatch", "call", "order", "rows", "prefill_rel_l2",
        "decode_rel_l2", "max_abs_golden", "max_abs_mine", "limit", "measured", "allowed", "floor", "x_floor",
    }
)  # fmt: skip


def columns_json(pairs: Pairs) -> str:
    """``{"n": int, "cols": {field: column}}`` as JSON text that is safe inside a script element."""
    columns = {name: pairs.column(name) for name in COLUMNS}
    values = ((name, c.values if isinstance(c, ByPlace) else c) for name, c in columns.items())
    texts = once(
        lambda name, _: _column(name, columns[name], pairs.failed, pairs.places_in_order), values,
        lambda name: (name in _FINE, isinstance(columns[name], ByPlace)),
    )  # fmt: skip
    cols = ",".join(f"{json.dumps(name)}:{text}" for name, text in zip(COLUMNS, texts, strict=True))
    return f'{{"n":{len(pairs)},"cols":{{{cols}}}}}'


def packed(text: str, level: int = 6) -> str:
    """``text`` for a data block of the page: gzip as base64, which the page's script unpacks; the same every time."""
    return base64.b64encode(gzip.compress(text.encode("utf-8"), compresslevel=level, mtime=0)).decode("ascii")


def script_json(value: Any) -> str:
    """Any JSON value as text that cannot end a script element or start a comment in it."""
    return inert(json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")))


def inert(text: str) -> str:
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _column(name: str, values: Sequence[Any], bad: np.ndarray, order: Sequence[int]) -> str:
    """order: places as they come."""
    which: np.ndarray | None = None
    if isinstance(values, ByPlace) and (name not in _NUMBERS or bad.all() or not bad.any()):
        number = np.empty(len(values.values), np.int64)
        number[order] = np.arange(len(order))
        which, bad = number[values.which], bad[: len(order)]
        values = [values.values[i] for i in order]
    values = list(values) if isinstance(values, ByPlace) else values  # of numbers some have three digits, some six
    same = alike(values)
    if name in _NUMBERS:
        if same and len(set(bad.tolist())) == 1:  # written once, as it would be below
            values, bad = values[:1], bad[:1]
        cells = _numbers(values, bad, *((".7g", ".10g") if name in _FINE else (".3g", ".6g")))
        if len(set(cells)) <= 1:
            return f'{{"c":{cells[0] if cells else "null"}}}'
        return f'{{"v":[{",".join(cells if which is None else map(cells.__getitem__, which.tolist()))}]}}'
    values = values[:1] if same else values
    # Keyed by type, too, where there are several: True, 1 and "1" are three texts.
    kinds = set(map(type, values)) - {type(None)}
    one = len(kinds) <= 1 and list not in kinds
    keys = values if one else [(type(v), tuple(v) if type(v) is list else v) for v in values]
    known = dict(zip(dict.fromkeys(keys), range(len(keys)), strict=False))
    plain = _plain_texts(known)
    if plain is None:
        texts = [_text(key if one else key[1], " × " if name == "shape" else ", ") for key in known]
        if len(texts) <= 1:
            return f'{{"c":{script_json(texts[0] if texts else None)}}}'
        plain = script_json(texts)
    numbers = np.fromiter(map(known.__getitem__, keys), np.int64, len(keys))
    numbers = numbers if which is None else numbers[which]
    return f'{{"d":{plain},"i":{orjson.dumps(numbers, option=orjson.OPT_SERIALIZE_NUMPY).decode()}}}'


def _plain_texts(texts: Collection[Any]) -> str | None:
    """`script_json` of `safe` texts, several times as fast; None where there are others."""
    if len(texts) < 2 or set(map(type, texts)) != {str} or max(map(len, texts)) > LONGEST_TEXT:
        return None
    every = "".join(texts)
    return inert(orjson.dumps(list(texts)).decode()) if every.isascii() and every.isprintable() else None


def _numbers(values: Sequence[Any], bad: np.ndarray, short: str, long: str) -> list[str]:
    """All of a kind at once: of 20,000 floats each call of a formatter would take as long as the formatting."""
    kinds = set(map(type, values))
    if kinds <= {int, type(None)}:
        return repr(list(values))[1:-1].replace("None", "null").split(", ") if values else []
    if kinds <= {float} and not bad.any():
        cells, floats = (f"%{short}," * len(values) % tuple(values)).split(",")[:-1], list(range(len(values)))
    else:
        cells = each(values, lambda v: "null" if v is None else str(int(v)) if isinstance(v, (bool, int)) else "")
        floats, which, digits = [i for i, cell in enumerate(cells) if not cell], bad.tolist(), (f"%{short}", f"%{long}")
        for i in floats:
            cells[i] = digits[which[i]] % values[i]
    for i in np.flatnonzero(~np.isfinite(np.array([values[i] for i in floats], np.float64))).tolist():
        cells[floats[i]] = f'"{nonfinite(values[floats[i]])}"'
    return cells


def _text(value: Any, between: str) -> Any:
    """What the page shows: None and booleans as they are, a shape as ``8 × 64``, an index as ``3, 37``."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, tuple):
        return between.join(safe(v, 40) for v in value) or "scalar"
    return safe(value, LONGEST_TEXT)


STEPS = 1000
INFINITE = STEPS + 1


def spread_json(spread: ValueSpread) -> dict[str, Any]:
    """columns and positions: [peak, thousandths of it]; -1 for no rows, 1001 for not finite."""
    return {
        "range": [_plain(spread.low), _plain(spread.high)],
        "golden": spread.golden.tolist(),
        "mine": spread.mine.tolist(),
        "columns": _parts(spread.columns),
        "width": spread.width,
        "positions": _parts(spread.positions),
        "ends": [spread.first, spread.last],
        "read": [spread.read, spread.rows],
    }


def _parts(values: np.ndarray) -> list[Any]:
    finite = np.isfinite(values)
    peak = float(values[finite].max(initial=0.0))
    scaled = np.where(values < 0, -1, np.ceil(np.where(finite, values, 0) / (peak or 1.0) * STEPS))
    return [_plain(peak), np.where(finite, scaled, INFINITE).astype(int).tolist()]


def _plain(value: float) -> Any:
    return nonfinite(value) or float(f"{value:.4g}")


NEIGHBOUR_NAME = 400


def neighbours_json(comparison: Comparison, page_index: Mapping[int, int]) -> list[dict[str, Any]]:
    """An entry for each origin with neighbours. page_index: index in ``Comparison.pairs`` → index on the page."""
    out = []
    for origin, neighbours in zip(comparison.origins, comparison.neighbours, strict=True):
        if neighbours is None:
            continue
        sides = {side: [_edge(e, page_index) for e in getattr(neighbours, side)] for side in ("fed_by", "feeds")}
        place = {"module": safe(facts.tap_of(origin), NEIGHBOUR_NAME), "tap": safe(neighbours.tap, NEIGHBOUR_NAME)}
        text: dict[str, Any] = {"role": safe(neighbours.role, 80), "said": verdict_parts.described(neighbours)}
        text["left_out"] = list(neighbours.left_out)
        out.append(place | text | sides)
    return out


def _edge(edge: Edge, page_index: Mapping[int, int]) -> dict[str, Any]:
    return {
        "tap": safe(edge.tap, NEIGHBOUR_NAME),
        "role": safe(edge.role, 80),
        "in": safe(edge.role_in, 80),
        "by": edge.by,
        "status": edge.status,
        "over": None if edge.over is None else nonfinite(edge.over) or float(f"{edge.over:.4g}"),
        "said": f"{verdict_parts.name(edge)}: {verdict_parts.error(edge)}",
        "pair": None if edge.pair is None else page_index.get(edge.pair),
    }


LONGEST = 40
"""Characters of one token on the page."""
MAX_IN_COLUMN = 8
"""Tokens that are shown of a column of many."""
NO_IDS = (
    "no token ids are recorded in {}, so compare.html shows no tokens' text: only a capture in vLLM (VLLM_ACCPROBE=1) "
    "records them"
)


def tokenizer_at(path: Path) -> Any:
    """The `tokenizers.Tokenizer` of a model's folder, or of its tokenizer.json; local files only. Raises CompareError,
    one line, for what cannot be read."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise CompareError(
            "tokenizers is not installed, which --tokenizer needs: pip install tokenizers (vLLM brings it)"
        ) from None
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise CompareError(
            f"--tokenizer {safe(path)}: there is no {'tokenizer.json in it' if file != path else 'such file'}; "
            "name a model's folder or its tokenizer.json, which transformers' save_pretrained writes"
        )
    try:
        return Tokenizer.from_file(str(file))
    except Exception as e:  # the library has one type for all
        raise CompareError(f"--tokenizer {safe(path)} cannot be read: {safe(e)}") from None


class Vocabulary:
    """A model's tokens. Raises CompareError, one line, for what cannot be read."""

    def __init__(self, path: Path) -> None:
        """path: a model's folder, or its tokenizer.json."""
        self._tokenizer = tokenizer_at(path)

    def text(self, token: int) -> str | None:
        """What one token says, as one printable line; its entry in the vocabulary where it is only a part of a letter;
        None for a number that is no token."""
        if not 0 <= token < 1 << 31:
            return None
        entry: str | None = self._tokenizer.id_to_token(token)
        if entry is None:
            return None
        if "▁" in entry:  # SentencePiece's mark of a space, which decoding one token loses
            return safe(entry.replace("▁", " "), LONGEST)
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return safe(entry if "�" in text or not text else text, LONGEST)


@dataclass(frozen=True)
class TokenTexts:
    """What the page needs. ids: of mine's requests; place: mine's path, for the line that says there are none."""

    vocabulary: Vocabulary
    ids: TokenIds
    place: str
    _texts: dict[int, str | None] = field(default_factory=dict)

    @property
    def missing(self) -> str | None:
        return None if self.ids else NO_IDS.format(safe(self.place))

    def columns(self, label: str, start: np.ndarray, width: int) -> list[list[int]] | None:
        """The ids in each column of a request's map, at most MAX_IN_COLUMN of each; None where none are known. start:
        int [columns], the first position of each; width: positions to a column."""
        known = self.ids.get(label)
        if known is None or not len(start):
            return None
        positions, ids = known
        first = np.searchsorted(positions, start)
        last = np.searchsorted(positions, [*start[1:], int(start[-1]) + width])
        out = [ids[a : min(b, a + MAX_IN_COLUMN)].tolist() for a, b in zip(first.tolist(), last.tolist(), strict=True)]
        for token in {t for column in out for t in column} - self._texts.keys():
            self._texts[token] = self.vocabulary.text(token)
        return out

    @property
    def texts(self) -> Mapping[str, str]:
        return {str(token): text for token, text in self._texts.items() if text is not None}


def token_texts(vocabulary: Vocabulary, mine: str | Path) -> TokenTexts:
    """Reads mine's row maps once more. What cannot be read has no ids."""
    from vllm_accprobe.align.tokens import token_ids
    from vllm_accprobe.dump.files import DumpError
    from vllm_accprobe.formats.common.sniff import open_dump

    try:
        return TokenTexts(vocabulary, token_ids(open_dump(mine)), str(mine))
    except (DumpError, OSError):
        return TokenTexts(vocabulary, {}, str(mine))


NAME, COMMAND = 400, 10_000
MAX_PAIRS = 2_000
MAX_ROWS = 8


def heat_json(heat: Heat, tokens: TokenTexts | None = None) -> dict[str, Any]:
    """The map begins with the first request, which shows most. tokens: what they say, where that was requested."""
    columns = [tokens and tokens.columns(r.label, r.start, r.width) for r in heat.requests]
    return {
        "texts": tokens.texts if tokens else {},
        "taps": [safe(t, NAME) for t in heat.taps],
        "layers": [layer and safe(layer, NAME) for layer in heat.layers],
        "leftOut": heat.left_out,
        "requests": [
            {
                "label": safe(r.label, 120),
                "start": r.start.tolist(),
                "step0": r.step0.tolist(),
                "step1": r.step1.tolist(),
                "decode": r.decode.tolist(),
                "width": r.width,
                "tokens": text,
                "worst": _short_number(r.worst),
                "codes": base64.b64encode(r.codes.tobytes()).decode("ascii"),
            }
            for r, text in zip(heat.requests, columns, strict=True)
        ],
    }


def tree_json(comparison: Comparison) -> dict[str, Any]:
    """One entry per tap: name, class, place in the data flow, worst severity of its outputs, failed and all pairs."""
    table = comparison.table
    names, tap = table.numbered("tap", np.arange(len(table)))
    order, pairs = np.array(table.column("order"), np.int64), np.bincount(tap, minlength=len(names))
    first, worst = np.full(len(names), np.iinfo(np.int64).max), np.full(len(names), -1.0)
    np.minimum.at(first, tap, order)
    shown = table.failed | ~table.those("role", lambda role: role.startswith("input"))
    np.fmax.at(worst, tap[shown], table.severities[shown])
    failed = np.bincount(tap[table.failed], minlength=len(names))
    firsts, classes = np.unique(tap, return_index=True)[1].tolist(), table.column("cls")
    columns = (c.tolist() for c in (first, worst, failed, pairs))
    taps = [[safe(name, NAME), safe(classes[at] or "", 80), *one]
            for name, at, *one in zip(names, firsts, *columns, strict=True)]  # fmt: skip
    rows = sorted(taps, key=lambda e: (e[2], e[0]))
    return {
        "taps": [[*e[:3], _short_number(e[3]), *e[4:]] for e in rows],
        "origins": [safe(facts.tap_of(o), NAME) for o in comparison.origins],
    }


def tensor_details(
    comparison: Comparison, page_index: Mapping[int, int], over: np.ndarray | None = None
) -> dict[str, Any]:
    """page_index: index in ``Comparison.pairs`` → index on the page. over: `factors`, where they are known."""
    return {
        "rows": _worst_rows(comparison, page_index, over),
        "samples": {
            str(page_index[s.pair]): {
                "golden": _values(s.golden),
                "mine": _values(s.mine),
                "worst": s.worst,
                "request": None if s.request is None else safe(s.request, 120),
                "position": s.position,
            }
            for s in comparison.samples
            if s.pair in page_index
        },
        "spreads": {str(page_index[s.pair]): spread_json(s) for s in comparison.spreads if s.pair in page_index},
        "no_spread": [f"{n:,} {safe(why, NAME)}" for why, n in comparison.without_spread.items()],
        "code": {safe(tap, NAME): verdict_parts.code(comparison.sources, tap) for tap in comparison.sources},
        "around": neighbours_json(comparison, page_index),
        "again": _again(comparison),
        "shapes": [
            [*(safe(x or "", NAME) for x in facts.place_of(o)), safe(o["shape"], 300)]
            for o in comparison.origins
            if o.get("shape")
        ],
    }


def _again(comparison: Comparison) -> str:
    """The command that compares these two dumps as it was done, but for which taps."""
    received = list(comparison.options)
    if "--taps" in received:
        at = received.index("--taps")
        del received[at : at + 2]
    return safe(shlex.join(["accprobe", "compare", comparison.golden_path, comparison.mine_path, *received]), COMMAND)


def _worst_rows(comparison: Comparison, page_index: Mapping[int, int], over: np.ndarray | None) -> dict[str, list[Any]]:
    rows = comparison.rows
    if rows is None or not len(rows):
        return {}
    table, over = comparison.table, factors(comparison) if over is None else over
    index = np.array(sorted(page_index), np.int64)
    selected = index[np.lexsort((-table.severities[index], ~table.failed[index]))][:MAX_PAIRS]
    bounds = np.searchsorted(rows.pair, np.arange(len(table) + 1))
    begin, sizes = bounds[selected], np.diff(bounds)[selected]
    out: dict[str, list[Any]] = {}
    labels = [safe(label, 120) for label in rows.requests]
    for here in np.split(np.arange(len(selected)), np.flatnonzero(np.diff(np.cumsum(sizes) // STRETCH)) + 1):
        rows.rest()
        at = np.repeat(begin[here] - (np.cumsum(sizes[here]) - sizes[here]), sizes[here]) + np.arange(sizes[here].sum())
        own = np.repeat(here, sizes[here])
        bad = rows.error[at] != 0  # NaN is not 0 and stays
        at, own = at[bad], own[bad]
        order = np.lexsort((-np.where(np.isnan(rows.error[at]), np.inf, rows.error[at]), own))
        n = np.bincount(own, minlength=len(selected))
        rank = np.arange(len(own)) - (np.cumsum(n) - n)[own]
        at, own = at[order[rank < MAX_ROWS]], own[rank < MAX_ROWS]
        for i in np.unique(own).tolist():
            out[str(page_index[int(selected[i])])] = [int(n[i])]
        columns = (c[at].tolist() for c in (rows.request, rows.position, rows.decode))
        numbers = map(_values, (rows.error[at], over[at]))
        for i, who, place, decode, *both in zip(selected[own].tolist(), *columns, *numbers, strict=True):
            out[str(page_index[i])].append([labels[who], place, "decode" if decode else "prefill", *both])
    return out


def _values(values: np.ndarray) -> list[Any]:
    """`_short_number` of each, all at once."""
    found: list[Any] = list(map(float, ("%.4g," * len(values) % tuple(values.tolist())).split(",")[:-1]))
    for i in np.flatnonzero(~np.isfinite(values)).tolist():
        found[i] = nonfinite(found[i])
    return found


def _short_number(value: float, digits: int = 4) -> Any:
    return nonfinite(value) or float(f"{value:.{digits}g}")
