"""Causes that mine's own tensors show without a reference: what was passed over, which rows a pooler took.

The problem: a decoder layer that one path leaves out, or a pooler that takes the row before the last one, has no
reference to be edited (opcheck/causes/), and its output alone does not say what happened. The idea: compare it with
what stood before it. A module whose outputs are its inputs to the bit in calls where golden's are not was passed over.
Of a pooler, golden's outputs are one function of a request's rows (the last, the first or the mean, normalised or not);
mine's are another one of these. A cause holds for all outputs of a call, and golden's for all calls that are read.
Not here: causes of operators with a reference, weights (weight_places.py), the runner's inputs (runner_inputs.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vllm_accprobe.align.names import enclosing
from vllm_accprobe.comparison.plan.unit import loose, unsummed_taps
from vllm_accprobe.dump.dtypes import widen
from vllm_accprobe.dump.schema import TOKENS, Record

MOST_BYTES = 64 << 20
"""Chosen: of hidden states that are read for poolers, of both dumps together."""
_NEAR = 1e-3
"""Chosen: relative L2. Of a mean in float32 1e-6 is left, of a row in bfloat16 2**-9; two rows differ by about 1."""



def record_causes(dumps: tuple[Any, Any]) -> dict[str, dict[str, Any]]:
    """Tap -> compare.json's ``cause`` of an error there."""
    return {**unsummed(dumps), **passed_over(dumps), **pooled(dumps)}


def _cause(text: str) -> dict[str, Any]:
    return {"family": "address", "text": text, "parameter": None, "residual": 0.0, "chance": None}


def unsummed(dumps: tuple[Any, Any]) -> dict[str, dict[str, Any]]:
    """Modules whose partial sums nobody adds up in mine, as is done in golden."""
    theirs, own = (unsummed_taps(dump, loose(dump)) for dump in dumps)
    text = "the ranks' partial sums are not added up: each rank goes on with its own share"
    return {tap: _cause(text) for tap in own if tap not in theirs}


# --- passed over -----------------------------------------------------------------------------------------------------


def passed_over(dumps: tuple[Any, Any]) -> dict[str, dict[str, Any]]:
    """Modules with others in them that return their inputs in mine, and never do so in golden."""
    theirs, own = (_calls(dump) for dump in dumps)
    found = {}
    for tap, (same, calls) in own.items():
        if same and tap in theirs and not theirs[tap][0]:
            text = f"in {same:,} of {calls:,} calls its outputs are its inputs to the bit: it was passed over"
            found[tap] = _cause(text)
    return found


def _calls(dump: Any) -> dict[str, tuple[int, int]]:
    """Of each module with others in it: (calls whose outputs are all among their inputs, calls)."""
    outer = {t for named in dump.modules.values() for m in named for t in enclosing(m.tap) if t != m.tap}
    calls: dict[tuple[str, int, int | None, int], tuple[set[str], list[str]]] = defaultdict(lambda: (set(), []))
    for r in dump.records:
        if r.tap in outer and r.hash is not None and r.rows is not None:
            inputs, outputs = calls[r.tap, r.rank, r.step, r.call]
            if r.role.startswith("input."):
                inputs.add(r.hash)
            elif r.role.startswith("output."):
                outputs.append(r.hash)
    found: dict[str, tuple[int, int]] = {}
    for (tap, *_), (inputs, outputs) in calls.items():
        if inputs and outputs:
            same, n = found.get(tap, (0, 0))
            found[tap] = same + inputs.issuperset(outputs), n + 1
    return found


# --- poolers ---------------------------------------------------------------------------------------------------------

_ROWS = ("its request's last row", "its request's row before the last", "its request's first row",
         "the mean of its request's rows", "another request's last row")  # fmt: skip


def pooled(dumps: tuple[Any, Any]) -> dict[str, dict[str, Any]]:
    """Poolers that make another function of a request's rows in mine than in golden."""
    left = [MOST_BYTES]
    theirs, own = (_forms(dump, left) for dump in dumps)
    found = {}
    for tap, forms in own.items():
        wrong = [form for form in forms if form is not None and form not in theirs.get(tap, ())]
        known = set(theirs.get(tap, ()))
        right = known.pop() if len(known) == 1 else None
        if wrong and right is not None:
            many = f"{len(wrong):,} of {len(forms):,} outputs are" if len(wrong) < len(forms) else "each output is"
            found[tap] = _cause(f"{many} made of {_words(wrong[0])}; golden's of {_words(right)}")
    return found


def _words(form: tuple[int, bool]) -> str:
    return f"{_ROWS[form[0]]} ({'normalised' if form[1] else 'not normalised'})"


def _forms(dump: Any, left: list[int]) -> dict[str, list[tuple[int, bool] | None]]:
    """Of each pooler: which function of its request's rows each output is; None for none of those that are known."""
    poolers = {m.tap for named in dump.modules.values() for m in named if m.cls.endswith("Pooler")}
    calls: dict[tuple[str, int, int | None], dict[str, Record]] = defaultdict(dict)
    for r in dump.records if poolers else ():
        if r.tap in poolers and not r.call and r.payload is not None:
            calls[r.tap, r.rank, r.step][r.role] = r
    found: dict[str, list[tuple[int, bool] | None]] = defaultdict(list)
    for (tap, rank, step), records in calls.items():
        rows, hidden = dump.rows.get((rank, step, TOKENS)), records.get("input.hidden_states")
        outputs = [records[role] for k in range(len(records)) if (role := f"output.{k}") in records]
        if rows is None or hidden is None or len(hidden.shape) != 2 or len(outputs) != len(rows.segments):
            continue
        left[0] -= hidden.payload.nbytes if hidden.payload is not None else 0
        if left[0] < 0:
            break
        states = _values(dump, hidden)
        parts = [(s.pos, states[at]) for s, at in rows.stretches()]
        found[tap] += [_form(_values(dump, o), k, parts) for k, o in enumerate(outputs) if len(o.shape) == 1]
    return found


def _values(dump: Any, record: Record) -> np.ndarray:
    return np.asarray(widen(dump.read(record), record.dtype, as_float=True), np.float64).reshape(record.shape)


def _form(output: np.ndarray, number: int, parts: Sequence[tuple[int, np.ndarray]]) -> tuple[int, bool] | None:
    for kind, row in _candidates(number, parts):
        row = row[: len(output)]
        for normalised, value in ((True, row / max(float(np.linalg.norm(row)), 1e-12)), (False, row)):
            if np.linalg.norm(output - value) <= _NEAR * np.linalg.norm(value):
                return kind, normalised
    return None


def _candidates(number: int, parts: Sequence[tuple[int, np.ndarray]]) -> Iterator[tuple[int, np.ndarray]]:
    first, rows = parts[number]
    yield 0, rows[-1]
    if len(rows) > 1:
        yield 1, rows[-2]
    if first == 0:
        yield 2, rows[0]
        yield 3, rows.mean(0)
    yield from ((4, other[-1]) for k, (_, other) in enumerate(parts) if k != number)
