"""Whether a constant that mine has otherwise than golden matters: both values through the reference.

The problem: an epsilon of 1e-5 instead of 1e-6 is a finding where a row is small, and nothing where rows are of size 1.
The idea: the reference computes each of mine's calls twice, with mine's value and with golden's, and the limits of a
replay judge the difference, as if the one were an output and the other its reference. Where the value moves outputs,
and none by more than rounding may move it, the constant does not matter in what was captured. A constant that no
reference computes with, or a call without a reference, leaves the question open: matters is None.
Not here: which constants differ, and what follows (comparison/verdict/constants_differ.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from vllm_accprobe.comparison.verdict.constants_differ import Differs
from vllm_accprobe.opcheck.calls.records import Calls, Captured
from vllm_accprobe.opcheck.floors.output_rows import OutputRows
from vllm_accprobe.opcheck.reference import Declined, Expected
from vllm_accprobe.opcheck.reference_table import References

MOST_TAPS, MOST_CALLS = 64, 64
"""Chosen: what is computed twice; beyond, the question stays open."""


class _Read(dict[str, Any]):
    """Attributes that know which of them were read."""

    def __init__(self, values: Mapping[str, Any]):
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


def effects(mine: Calls, references: References, others: Mapping[str, list[Differs]]) -> dict[str, dict[str, Any]]:
    """Tap → ``matters`` (True, False, or None for not known) and ``times``, how many times what rounding allows an
    output moves at most. others: constants_differ.other_values'."""
    ran: dict[str, list[int]] = {}
    for rank, tap, _ in mine.taps(()):
        ran.setdefault(tap, []).append(rank)
    return {tap: _effect(mine, references, tap, values, ran) for tap, values in list(others.items())[:MOST_TAPS]}


def _effect(
    mine: Calls, references: References, tap: str, values: list[Differs], ran: Mapping[str, list[int]]
) -> dict[str, Any]:  # fmt: skip
    golden = {name: theirs for name, _, theirs in values}
    open_, worst, left = False, 0.0, MOST_CALLS
    seen: set[str] = set()
    for where in (t for t in ran if t == tap or t.rpartition(".")[0] == tap):
        for rank in ran[where]:
            for captured in mine.of(rank, where):
                left -= 1
                if left < 0:
                    open_ = True
                    break
                moved = _moved(references, captured, golden, tap == where)
                if moved is None:
                    open_ = open_ or where == tap
                    continue
                times, read = moved
                worst, seen = max(worst, times), seen | read
    if worst > 1.0:
        return {"matters": True, "times": worst}
    # A reference may read a value and compute with another (config.json's), which moves nothing.
    return {"matters": None if open_ or seen != set(golden) or not worst else False, "times": worst}


def _moved(
    references: References, captured: Captured, golden: Mapping[str, Any], own: bool
) -> tuple[float, set[str]] | None:
    """(how many times what rounding allows an output moves at most, the constants that were read); None where that is
    not known. own: the call's own attributes differ, and not those of the module that holds it."""
    if captured.missing:
        return None
    call = captured.what
    given = _Read({**(call.attrs if own else call.parent), **golden})
    first = references.evaluate(call)
    second = references.evaluate(replace(call, attrs=given) if own else replace(call, parent=given))
    if isinstance(first, Declined) or isinstance(second, Declined):
        return None
    return max((times for times in _outputs(captured, first, second)), default=0.0), given.read & set(golden)


def _outputs(captured: Captured, first: Mapping[str, Expected], second: Mapping[str, Expected]) -> Iterator[float]:
    for role, output in captured.what.outputs.items():
        record = captured.records.get(role)
        if record is None or role not in first or role not in second:
            continue
        shape = tuple(first[role].value.shape)
        if shape != tuple(second[role].value.shape) or shape != tuple(output.shape):
            continue
        row_dim = record.row_dim if record.rows is not None else 0
        rows = OutputRows.of(second[role], first[role].value, row_dim)
        if len(rows.at):
            yield rows.judge(record.dtype).severity
