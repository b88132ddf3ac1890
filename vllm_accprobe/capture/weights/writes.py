"""Which elements were written while weights are loaded: told from torch's own calls.

The problem: a parameter that holds the same bytes after a sync may have been written with equal ones, or not at all,
and memory that nobody wrote holds whatever was there. The idea: while somebody loads, a dispatch mode looks at each
operator that changes an argument, and notes where in its storage; memory that an operator made anew is whole unless it
was made empty. Nothing of the data is read. What other threads and a device's own transports write is not seen: then a
parameter that loading itself did not seem to write is not judged (judge/weights/). Not here: fingerprints (prints.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_accprobe.dump.weights.weight_life import MAX_ROWS, row_count

_MOST = 1 << 16
"""Writes into one storage that are kept apart; more of them are one write of everything between."""


class _Storage:
    __slots__ = ("empty", "writes")

    def __init__(self, empty: bool):
        self.empty = empty
        self.writes: list[tuple[int, int]] = []

    def add(self, first: int, end: int) -> None:
        """Bytes from first to end."""
        if len(self.writes) >= _MOST:
            first, end = min(first, min(w[0] for w in self.writes)), max(end, max(w[1] for w in self.writes))
            self.writes = []
        self.writes.append((first, end))


class WriteWatch(TorchDispatchMode):
    """Looks on while weights are written; may be entered again and again, and remembers until `forget`. on: whether it
    looks at all."""

    def __init__(self, on: bool = True) -> None:
        super().__init__()
        self.on = on
        self._storages: dict[int, _Storage] = {}
        self._effects: dict[Any, tuple[int, tuple[tuple[int, str], ...]]] = {}
        self.failed: str | None = None

    def __enter__(self) -> WriteWatch:
        if self.on:
            super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.on:
            super().__exit__(*error)

    def forget(self) -> None:
        """As if nothing had been written."""
        self._storages.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.failed is None:
            try:
                self._note(func, args, kwargs or {}, result)
            except Exception as error:
                self.failed = f"{type(error).__name__}: {error}"
        return result

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        known = self._effects.get(func)
        if known is None:
            known = self._effects[func] = _effect(func)
        kind, changes = known
        if kind == _VIEWS:  # four of five operators while a model is loaded
            return
        if kind == _WRITES:
            for place, name in changes:
                value = args[place] if place < len(args) else kwargs.get(name)
                for tensor in _tensors(value):
                    self._write(tensor)
            return
        given = {p for a in (*args, *kwargs.values()) for t in _tensors(a) if (p := _pointer(t))}
        empty = func.__name__.startswith(("empty", "new_empty"))
        for tensor in _tensors(result):
            pointer = _pointer(tensor)
            if pointer and pointer not in given:
                self._storages[pointer] = _Storage(empty)

    def _write(self, tensor: torch.Tensor) -> None:
        pointer = _pointer(tensor)
        if not pointer or not tensor.numel():
            return
        storage = self._storages.get(pointer)
        if storage is None:
            storage = self._storages[pointer] = _Storage(False)
        size = tensor.element_size()
        first = tensor.storage_offset() * size
        extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        storage.add(first, first + extent * size)

    def of(self, tensor: torch.Tensor) -> tuple[tuple[tuple[int, int, int], ...] | None, bool]:
        """((first row, end, times) of the rows of ``tensor`` that were written, whether its memory was empty before);
        None where nobody could look. A row of which a part was written counts as written."""
        if self.failed is not None or not self.on or not tensor.is_contiguous() or not tensor.numel():
            return None, False
        rows = row_count(tuple(tensor.shape))
        storage = self._storages.get(_pointer(tensor))
        if rows > MAX_ROWS:
            rows = 1  # told as a whole
        if storage is None:
            return (), False
        width = tensor.numel() * tensor.element_size() / rows
        begin = tensor.storage_offset() * tensor.element_size()
        change = np.zeros(rows + 1, np.int64)
        for first, end in storage.writes:
            low, high = int((first - begin) // width), int(-(-(end - begin) // width))
            if high > 0 and low < rows:
                change[max(low, 0)] += 1
                change[min(high, rows)] -= 1
        times = np.cumsum(change[:-1])
        return tuple(_runs(times)), storage.empty


def _runs(times: np.ndarray) -> Iterator[tuple[int, int, int]]:
    edges = np.flatnonzero(np.diff(times)) + 1
    for first, end in zip([0, *edges.tolist()], [*edges.tolist(), len(times)], strict=True):
        if times[first]:
            yield first, end, int(times[first])


def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """(place, name) of the arguments that an operator writes."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return ()
    found = [(i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    return tuple(found)


_MAKES, _WRITES, _VIEWS = range(3)


def _effect(func: Any) -> tuple[int, tuple[tuple[int, str], ...]]:
    """What an operator does: writes arguments, gives views of them and nothing else, or makes something new."""
    if changes := _written(func):
        return _WRITES, changes
    schema = getattr(func, "_schema", None)
    views = schema is not None and schema.returns and all(r.alias_info is not None for r in schema.returns)
    # What is made of other operators (reshape, contiguous, to) may copy for all that its schema says.
    made_of_others = views and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return (_VIEWS if views and not made_of_others else _MAKES), ()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            if isinstance(one, torch.Tensor):
                yield one


def _pointer(tensor: torch.Tensor) -> int:
    """Where its storage begins; 0 for no memory, or none that is addressed in bytes."""
    try:
        at = tensor.data_ptr()
    except (RuntimeError, ValueError, NotImplementedError):  # memory that is not there yet, another layout
        return 0
    return at - tensor.storage_offset() * tensor.element_size() if at else 0
