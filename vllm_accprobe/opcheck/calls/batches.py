"""Calls of one module whose rows do not know of each other, evaluated as one.

The problem: most calls of a dump are decode steps of a few rows, and a reference spends its time on what is the same
for all of them: turning the weight into float64, starting a dozen operations. The idea: where a reference is marked as
working row by row, calls of one module whose tensors differ in the number of rows alone are put one below the other,
evaluated once, and what comes out is cut apart again. Each call keeps a verdict of its own, from the same formula;
its float64 values may differ in the last digit, because a product of more rows is summed in another order. Anything
else, and whatever does not come out as many rows as went in, is evaluated by itself.
Not here: which references work so (``by_rows`` in references/), the verdict (replay.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.opcheck.calls.records import Captured
from vllm_accprobe.opcheck.reference import Call, Declined, Expected
from vllm_accprobe.opcheck.reference_table import References

Outcome = Mapping[str, Expected] | Declined
_MOST = 1 << 21
"""Elements of the tensors of calls that are evaluated together: 16 MiB of float64 for each value that is worked out
from them. Chosen: what is done once per batch is far below that by then."""
_PLAIN = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_EXTRA = {"usual", "epsilon"}
"""What a call may know beside its own tensors: the same for all calls of its module."""


def evaluated(calls: Iterable[Captured], references: References) -> Iterator[tuple[Captured, Outcome]]:
    """The calls of one tap, in their order, each with what its reference gives."""
    waiting: list[Captured] = []
    sizes = 0
    for captured in calls:
        size = _size(captured.what) if _possible(captured, references) else 0
        alike = size and (not waiting or _shape(captured.what) == _shape(waiting[0].what))
        if waiting and (not alike or sizes + size > _MOST):
            yield from _together(waiting, references)
            waiting, sizes = [], 0
        if size:
            waiting, sizes = [*waiting, captured], sizes + size
        else:
            yield captured, _alone(captured, references)
    yield from _together(waiting, references)


def _alone(captured: Captured, references: References) -> Outcome:
    return Declined("") if captured.missing else references.evaluate(captured.what)


def _possible(captured: Captured, references: References) -> bool:
    c = captured.what
    tensors = [*c.inputs.values(), *c.outputs.values()]
    if captured.missing or not tensors or c.args or c.kwargs or set(c.extra) - _EXTRA:
        return False
    if any(t.dim() < 2 or t.shape[0] != tensors[0].shape[0] or t.dtype not in _PLAIN for t in tensors):
        return False
    if any(p.dtype not in _PLAIN for p in c.params.values()):  # a scale may be taken over all rows
        return False
    return references.by_rows(c.cls)


def _size(c: Call) -> int:
    return sum(t.numel() for t in (*c.inputs.values(), *c.outputs.values()))


def _shape(c: Call) -> tuple[Any, ...]:
    """Everything that must be equal."""
    sides = ([(name, t.dtype, t.shape[1:]) for name, t in side.items()] for side in (c.inputs, c.outputs))
    return c.cls, id(c.params), *map(tuple, sides)


def _together(calls: list[Captured], references: References) -> Iterator[tuple[Captured, Outcome]]:
    found = _cut(calls, references) if len(calls) > 1 else None
    for n, captured in enumerate(calls):
        yield captured, found[n] if found is not None else _alone(captured, references)


def _cut(calls: list[Captured], references: References) -> list[dict[str, Expected]] | None:
    """What each of the calls should have given; None where it cannot be told apart."""
    first = calls[0].what
    inputs = {name: torch.cat([c.what.inputs[name] for c in calls]) for name in first.inputs}
    outputs = {name: torch.cat([c.what.outputs[name] for c in calls]) for name in first.outputs}
    whole = references.evaluate(replace(first, inputs=inputs, outputs=outputs))
    if isinstance(whole, Declined):
        return None
    rows = [len(next(iter(c.what.outputs.values()), next(iter(c.what.inputs.values()), ()))) for c in calls]
    found: list[dict[str, Expected]] = [{} for _ in calls]
    for role, e in whole.items():
        if not e.value.dim() or len(e.value) != sum(rows) or e.rows is not None:
            return None
        values = e.value.split(rows)
        noises, bounds = _split(e.noise, e, rows), _split(e.bound, e, rows)
        for n, value in enumerate(values):
            found[n][role] = replace(e, value=value, noise=noises[n], bound=bounds[n])
    return found


def _split(error: Any | None, e: Expected, rows: list[int]) -> Any:
    return [None] * len(rows) if error is None else error.expand(e.value.shape).split(rows)
