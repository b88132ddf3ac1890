"""Calls of one module whose rows are independent, evaluated as one.

The problem: most calls of a dump are decode steps of a few rows, and a reference spends its time on what is the same
for all of them. The idea: where a reference works row by row, calls of one module whose tensors differ in the number of
rows alone are put one below the other, evaluated once, and the results are cut apart again. Where the values themselves
are shown (`to_the_bit`), they must not depend on the batch: a product of more rows may be summed in another order. So
the first call of each number of rows is evaluated by itself, too, and where one bit of it differs, calls of as many
rows are not put together; rows are repeated up to a whole block, and the last call is compared as well.
Elsewhere: which references work so (``by_rows`` in references/).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.opcheck.calls.records import Captured
from vllm_accprobe.opcheck.calls.views import same_bits
from vllm_accprobe.opcheck.reference import Call, Declined, Expected, changed
from vllm_accprobe.opcheck.reference_table import References

Outcome = Mapping[str, Expected] | Declined
_MOST = 1 << 22
"""Elements of the tensors of calls that are evaluated together: 32 MiB of float64 for each value that is worked out
from them. Chosen: what is done once per batch is far below that by then."""
_LANES = 16
"""Numbers of a row that torch's float64 loops take at once, two registers of 512 bits: the rest of a row that is no
multiple of them goes through other functions, whose last bit may be another."""
_BLOCK = 16
"""Rows: products take some at a time (4 by MKL on AVX-512, 6 to 14 elsewhere), and add up the rest in another order;
chosen: a power of two, as most of them."""
_PLAIN = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_EXTRA = {"usual", "epsilon"}
"""What a call may have besides its own tensors: the same for all calls of its module."""


def evaluated(calls: Iterable[Captured], references: References) -> Iterator[tuple[Captured, Outcome]]:
    """The calls of one tap, in their order, each with what its reference gives."""
    for captured, found in _grouped(calls, references, None):
        yield captured, _alone(captured, references) if found is None else found


def to_the_bit(
    calls: Iterable[Captured], references: References, begins: Callable[[], object] = lambda: None
) -> Iterator[tuple[Captured, Outcome | None]]:
    """The calls of one tap, in their order, each with what its reference gives, to the bit what it gives for this call
    alone; None where it is to be evaluated alone. begins: called before several are evaluated as one."""
    return _grouped(calls, references, EqualRows(references, begins))


class EqualRows:
    """Of one tap's calls: which numbers of rows may be put together, because what comes out is the same to the bit."""

    def __init__(self, references: References, begins: Callable[[], object]):
        self._references, self.begins = references, begins
        self._known: dict[int, bool] = {}

    def may(self, c: Call) -> bool:
        tensors = (*c.inputs.values(), *c.outputs.values())
        return all(t[0].numel() % _LANES == 0 for t in tensors if len(t)) and self._known.get(len(tensors[0]), True)

    def checked(self, calls: list[Captured], found: list[dict[str, Expected]]) -> list[dict[str, Expected] | None]:
        """``found`` without those of calls whose like gives something else alone."""
        for captured, together in zip(calls, found, strict=True):
            n = _rows(captured.what)
            if n not in self._known or (self._known[n] and captured is calls[-1]):
                self._known[n] = _equal(self._references.evaluate(captured.what), together)
        return [together if self._known[_rows(c.what)] else None for c, together in zip(calls, found, strict=True)]


def _equal(alone: Outcome, together: Mapping[str, Expected]) -> bool:
    if isinstance(alone, Declined) or list(alone) != list(together):
        return False
    tensors = ("value", "noise", "bound")
    for role, e in alone.items():
        other = together[role]
        rest = [replace(x, value=None, noise=None, bound=None) for x in (e, other)]
        # what has further tensors is never put together
        if any(t is not None for x in rest for t in (x.rows, x.exact)) or rest[0] != rest[1]:
            return False
        for name in tensors:
            mine, theirs = getattr(e, name), getattr(other, name)
            if (mine is None) != (theirs is None):
                return False
            mine = None if mine is None else mine.expand(e.value.shape)
            if mine is not None and ((mine.shape, mine.dtype) != (theirs.shape, theirs.dtype)
                                     or not same_bits(mine, theirs)):  # fmt: skip
                return False
    return True


def _grouped(
    calls: Iterable[Captured], references: References, rows: EqualRows | None
) -> Iterator[tuple[Captured, Outcome | None]]:
    waiting: list[Captured] = []
    sizes, shape = 0, None
    for captured in calls:
        possible = _possible(captured, references) and (rows is None or rows.may(captured.what))
        size = _size(captured.what) if possible else 0
        own = _shape(captured.what) if size else None
        if waiting and (own != shape or sizes + size > _MOST):
            yield from _together(waiting, references, rows)
            waiting, sizes = [], 0
        if size:
            shape, sizes = own, sizes + size
            waiting.append(captured)
        else:
            yield captured, None
    yield from _together(waiting, references, rows)


def _alone(captured: Captured, references: References) -> Outcome:
    return Declined("") if captured.missing else references.evaluate(captured.what)


def _possible(captured: Captured, references: References) -> bool:
    c = captured.what
    if captured.missing or c.args or c.kwargs or c.extra.keys() - _EXTRA or not references.by_rows(c.cls):
        return False
    tensors = [*c.inputs.values(), *c.outputs.values()]
    if not tensors:
        return False
    if any(t.dim() < 2 or t.shape[0] != tensors[0].shape[0] or t.dtype not in _PLAIN for t in tensors):
        return False
    return all(p.dtype in _PLAIN for p in c.params.values())  # a scale may be taken over all rows


def _size(c: Call) -> int:
    return sum(t.numel() for t in (*c.inputs.values(), *c.outputs.values()))


def _shape(c: Call) -> tuple[Any, ...]:
    """Everything that must be equal."""
    sides = ([(name, t.dtype, t.shape[1:]) for name, t in side.items()] for side in (c.inputs, c.outputs))
    return c.cls, id(c.params), *map(tuple, sides)


def _together(
    calls: list[Captured], references: References, rows: EqualRows | None
) -> Iterator[tuple[Captured, Outcome | None]]:
    found: Sequence[Outcome | None] | None = None
    if len(calls) > 1:
        if rows is not None:
            rows.begins()
        cut = _cut(calls, references, 1 if rows is None else _BLOCK)
        found = rows.checked(calls, cut) if rows is not None and cut is not None else cut
    yield from zip(calls, found if found is not None else [None] * len(calls), strict=True)


def _rows(c: Call) -> int:
    return len(next(iter(c.outputs.values()), next(iter(c.inputs.values()), ())))


def _cut(calls: list[Captured], references: References, block: int) -> list[dict[str, Expected]] | None:
    """The results of each of the calls; None where they cannot be separated. block: rows are filled up to it."""
    first = calls[0].what
    rows = [_rows(c.what) for c in calls]
    rows.append(-sum(rows) % block)
    again = torch.arange(rows[-1]) % sum(rows[:-1])

    def below(tensors: list[Any]) -> Any:
        whole = torch.cat(tensors)
        return torch.cat((whole, whole[again]))

    inputs = {name: below([c.what.inputs[name] for c in calls]) for name in first.inputs}
    outputs = {name: below([c.what.outputs[name] for c in calls]) for name in first.outputs}
    whole = references.evaluate(replace(first, inputs=inputs, outputs=outputs))
    if isinstance(whole, Declined):
        return None
    found: list[dict[str, Expected]] = [{} for _ in calls]
    for role, e in whole.items():
        if not e.value.dim() or len(e.value) != sum(rows) or e.rows is not None:
            return None
        values = e.value.split(rows)
        noises, bounds = _split(e.noise, e, rows), _split(e.bound, e, rows)
        for n, value in enumerate(values[:-1]):
            found[n][role] = changed(e, value=value, noise=noises[n], bound=bounds[n])
    return found


def _split(error: Any | None, e: Expected, rows: list[int]) -> Any:
    return [None] * len(rows) if error is None else error.expand(e.value.shape).split(rows)
