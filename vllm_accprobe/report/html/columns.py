"""Pairs as compact JSON columns, for the page's script.

The problem: 200,000 pairs with 37 fields each must fit into one HTML file that opens in seconds. The idea: columns
instead of rows; a column of one value is that value, text is a dictionary and indices, numbers have six digits in
failed pairs and three in others (compare.csv has all of them), and the whole is packed. The forms, per column:
``{"c": value}``, ``{"d": [text...], "i": [index...]}`` or ``{"v": [number...]}``, where a number that JSON lacks is
``"NaN"``, ``"Inf"`` or ``"-Inf"`` and a missing one null.
Not here: what the script does with them (table.js).
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from vllm_accprobe.comparison.result import COLUMNS, Pair
from vllm_accprobe.report.text import nonfinite, safe

_FINE = frozenset({"cosine", "worst_row_norm_ratio", "measured"})
"""Columns whose interesting part is their distance from 1."""

_NUMBERS = frozenset(
    {
        "step", "rank", "cosine", "max_abs_err", "mean_abs_err", "rmse", "rel_l2", "max_rel_err", "worst_row_rel_l2",
        "worst_row_norm_ratio", "nonfinite", "nonfinite_mismatch", "call", "order", "rows", "prefill_rel_l2",
        "decode_rel_l2", "max_abs_golden", "max_abs_mine", "limit", "measured", "allowed", "floor", "x_floor",
    }
)  # fmt: skip


def columns_json(pairs: Sequence[Pair]) -> str:
    """``{"n": int, "cols": {field: column}}`` as JSON text that is safe inside a script element."""
    bad = [p.status == "fail" for p in pairs]
    cols = ",".join(f"{json.dumps(name)}:{_column(name, list(map(attrgetter(name), pairs)), bad)}" for name in COLUMNS)
    return f'{{"n":{len(pairs)},"cols":{{{cols}}}}}'


def packed(text: str, level: int = 6) -> str:
    """``text`` for a data block of the page: gzip as base64, which the page's script unpacks; the same every time."""
    return base64.b64encode(gzip.compress(text.encode("utf-8"), compresslevel=level, mtime=0)).decode("ascii")


def script_json(value: Any) -> str:
    """Any JSON value as text that cannot end a script element or start a comment in it."""
    return inert(json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")))


def inert(text: str) -> str:
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _column(name: str, values: list[Any], bad: list[bool]) -> str:
    if len(set(map(id, values))) == 1 and len(set(bad)) == 1:  # written once, as it would be below
        values, bad = values[:1], bad[:1]
    if name in _NUMBERS:
        short, long = (".7g", ".10g") if name in _FINE else (".3g", ".6g")
        cells = [_number(v, long if b else short) for v, b in zip(values, bad, strict=True)]
        if len(set(cells)) <= 1:
            return f'{{"c":{cells[0] if cells else "null"}}}'
        return f'{{"v":[{",".join(cells)}]}}'
    index: dict[Any, int] = {}
    # Keyed by value and type: True, 1 and "1" are three texts.
    where = [index.setdefault((type(v), tuple(v) if type(v) is list else v), len(index)) for v in values]
    texts = [_text(key, " × " if name == "shape" else ", ") for _, key in index]
    if len(texts) <= 1:
        return f'{{"c":{script_json(texts[0] if texts else None)}}}'
    return f'{{"d":{script_json(texts)},"i":[{",".join(map(str, where))}]}}'


def _number(value: Any, digits: str) -> str:
    if value is None:
        return "null"
    if isinstance(value, (bool, int)):
        return str(int(value))
    value = float(value)
    return format(value, digits) if math.isfinite(value) else f'"{nonfinite(value)}"'


def _text(value: Any, between: str) -> Any:
    """What the page shows: None and booleans as they are, a shape as ``8 × 64``, an index as ``3, 37``."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, tuple):
        return between.join(safe(v, 40) for v in value) or "scalar"
    return safe(value, 400)
