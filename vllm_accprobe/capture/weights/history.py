"""A model's weights over its life: after each event, one pass over all of them and a line for each.

The problem: a sync that leaves one scale behind, a reload that loses a shard or a packed copy that stays old change no
shape and raise nothing; a parameter with the same bytes after a sync may have been written with equal ones, or not at
all. The idea: whoever sees vLLM's call opens an event; each layer is examined just before it is packed, and all of them
when the event is over, outside of any forward. While weights are written, a dispatch mode notes where in its storage
each operator writes, and reads no data; other threads' writes are not seen. Ranges of rows have names (q, k, v, gate,
up) from the sizes that a parallel layer carries. Only fingerprints are kept. A failure ends the history and nothing
else.

Not here: fingerprints (fingerprint.py), the lines (dump/journal.py), what they mean (judge/weights.py).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_accprobe.capture.core import layout
from vllm_accprobe.capture.core.session import DTYPE_NAMES, address, is_plain
from vllm_accprobe.capture.taps.params import own_tensors
from vllm_accprobe.capture.weights.fingerprint import LoadedTensor, RowSums, raw_bytes, sums_of
from vllm_accprobe.dump.journal import (
    LIFE,
    LOAD,
    LOADED,
    MAX_WEIGHT_ROWS as MAX_ROWS,
    PACKED,
    WEIGHT,
    Range,
    WeightEvent,
    WeightPrint,
    pack_rows,
    row_count,
)
from vllm_accprobe.dump.schema import ROOT_TAP

_GATED = ("gate", "up")


def named_rows(module: Any, path: str, name: str, shape: tuple[int, ...]) -> tuple[int, tuple[Range, ...]]:
    """(rows of a block, 0 without blocks; names of the rows in a block)."""
    try:
        if name.startswith(("w13_", "w2_")) and hasattr(module, "local_num_experts") and shape:
            return _expert(name, shape)
        return 0, _linear(module, path, row_count(shape))
    except (TypeError, ValueError, AttributeError):  # a vendor's layer that says it otherwise
        return 0, ()


def _expert(name: str, shape: tuple[int, ...]) -> tuple[int, tuple[Range, ...]]:
    block = row_count(shape) // shape[0] if shape[0] else 0
    if name.startswith("w13_") and block > 1 and block % 2 == 0:
        return block, _ranges(_GATED, (block // 2, block // 2))
    return block, ()


def _linear(module: Any, path: str, rows: int) -> tuple[Range, ...]:
    sizes: Sequence[int]
    if hasattr(module, "num_kv_head_replicas"):
        names: Sequence[str] = ("q", "k", "v")
        sizes = layout.qkv_sizes(module)
    else:
        sizes = [int(n) for n in getattr(module, "output_partition_sizes", None) or ()]
        gated = len(sizes) == 2 and "gate" in path.rpartition(".")[2]
        names = _GATED if gated else [f"part {i}" for i in range(len(sizes))]
    if len(sizes) < 2:
        return ()
    if rows == sum(sizes):
        return _ranges(names, sizes)
    return _ranges(names, [1] * len(sizes)) if rows == len(sizes) else ()  # a scale for each


def _ranges(names: Sequence[str], sizes: Sequence[int]) -> tuple[Range, ...]:
    found, first = [], 0
    for name, size in zip(names, sizes, strict=True):
        found.append((name, first, first + size))
        first += size
    return tuple(found)


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
    """Observes writes of weights; may be entered again and again, and remembers until `forget`. on: whether it observes
    at all."""

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
        as_loaded = {p for a in (*args, *kwargs.values()) for t in _tensors(a) if (p := address(t))}
        empty = func.__name__.startswith(("empty", "new_empty"))
        for tensor in _tensors(result):
            pointer = address(tensor)
            if pointer and pointer not in as_loaded:
                self._storages[pointer] = _Storage(empty)

    def _write(self, tensor: torch.Tensor) -> None:
        pointer = address(tensor)
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
        None where it was not observed. A row of which a part was written counts as written."""
        if self.failed is not None or not self.on or not tensor.is_contiguous() or not tensor.numel():
            return None, False
        rows = row_count(tuple(tensor.shape))
        storage = self._storages.get(address(tensor))
        if rows > MAX_ROWS:
            rows = 1  # as a whole
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


Key = tuple[str, str]
Line = Callable[[dict[str, Any]], None]


FULL, OFF = "full", "off"
TRANSPOSED = "transposed"
"""How a packed tensor was turned before its print was made: its last two dimensions."""


class WeightLife:
    """The events and prints of one rank.

    line: writes a journal line. chosen: whether a module (path, class) is examined. step: the number of the next step.
    failed: called once, when something here has failed. how: FULL; ``prints``, without watching writes; or OFF.
    """

    def __init__(
        self,
        line: Line,
        chosen: Callable[[str, str], bool],
        step: Callable[[], int],
        failed: Callable[[BaseException], None],
        rank: int = 0,
        how: str = FULL,
    ):
        self.watch = WriteWatch(how == FULL)
        self.off = how == OFF
        self.open: str | None = None
        self._line, self._chosen, self._step, self._failed = line, chosen, step, failed
        self._rank = rank
        self._number = -1
        self._loaded: dict[Key, LoadedTensor] = {}
        self._reordered: set[Key] = set()
        self._written: dict[Key, str] = {}
        self._examined: set[Key] = set()
        self._about: dict[str, Any] = {}
        self._seconds, self._bytes = 0.0, 0

    @contextlib.contextmanager
    def safely(self) -> Iterator[None]:
        """What fails inside ends the history, and reaches nobody."""
        try:
            yield
        except Exception as error:
            self.off = True
            with contextlib.suppress(Exception):
                self._failed(error)

    def begin(self, kind: str, **about: Any) -> None:
        """An event begins; the one that is open ends nothing. about: fields of WeightEvent."""
        if self.off:
            return
        self.open = kind
        self._number += 1
        self._examined.clear()
        self._about = about
        self._seconds, self._bytes = 0.0, 0
        if kind != LOAD:  # loading began before anybody could call this
            self.watch.forget()

    def examine(self, path: str, module: torch.nn.Module) -> None:
        """``module`` has its tensors as they were loaded; they are packed next."""
        if self.off or self.open is None or not self._chosen(path, type(module).__name__):
            return
        with self.safely():
            for name, tensor in own_tensors(module):
                self._loaded_tensor(path, module, name, tensor)

    def finish(self, model: torch.nn.Module, *, as_loaded: bool) -> None:
        """The event is over: all tensors as they lie now. as_loaded: what was not examined is as it was loaded."""
        kind, self.open = self.open, None
        if self.off or kind is None:
            return
        with self.safely():
            for path, module in model.named_modules():
                if hasattr(module, "base_layer"):  # an adapter's layer shows its base's tensors as its own
                    continue
                path = tap_path(path)
                if not self._chosen(path, type(module).__name__):
                    continue
                for name, tensor in own_tensors(module):
                    self._packed_tensor(path, module, name, tensor, as_loaded)
            self._event(kind)

    def adapter(self, prints: Callable[[Callable[..., None]], None], **about: Any) -> None:
        """An event of its own: an adapter's slot. prints: calls its argument with (path, class, name, form,
        tensor)."""
        if self.off or self.open is not None:
            return
        with self.safely():
            self._number += 1
            self._about, self._seconds, self._bytes = about, 0.0, 0
            prints(self._slot)
            self._event("lora")

    def _event(self, kind: str) -> None:
        detail = [self._about.pop("detail", "")]
        if self.watch.failed is not None:
            detail.append(f"writes were not watched to the end: {self.watch.failed}")
        self._line(LIFE.to_line(WeightEvent(
            self._rank, self._number, kind, self._step(), seconds=self._seconds, nbytes=self._bytes,
            detail="; ".join(filter(None, detail)), **self._about,
        )))  # fmt: skip

    def _loaded_tensor(self, path: str, module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
        key = (path, name)
        if key in self._examined or not is_plain(tensor):
            return
        self._examined.add(key)
        before, raw = self._loaded.get(key), raw_bytes(tensor)
        if before is not None and before.same(tensor, raw):
            sums = before.sums
        else:
            sums = self._sums(tensor)
            self._loaded[key] = LoadedTensor(sums, tensor.dtype, raw)
        self._print(path, module, name, LOADED, tensor.dtype, sums, seen=tensor)

    def _packed_tensor(
        self, path: str, module: torch.nn.Module, name: str, tensor: torch.Tensor, as_loaded: bool
    ) -> None:
        key = (path, name)
        if not is_plain(tensor) or not tensor.numel():
            return
        if as_loaded and key not in self._examined:
            self._loaded_tensor(path, module, name, tensor)
            return
        loaded = self._loaded.get(key)
        raw = raw_bytes(tensor) if loaded is not None else None
        if key in self._examined and loaded is not None and loaded.same(tensor, raw):
            return  # unchanged since it was loaded
        before = loaded if loaded is not None and loaded.dtype == tensor.dtype else None
        view, how = tensor, ""
        if before is not None and (turned := transposed(tensor, before.sums.shape)) is not None:
            view, how = turned, TRANSPOSED
        sums = self._sums(view)
        if key in self._examined:
            reordered = before is not None and not how and sums.whole != before.sums.whole
            (self._reordered.add if reordered else self._reordered.discard)(key)
            if before is not None and not how and not reordered:
                return  # unchanged since it was loaded
        if key in self._reordered:
            how = "unknown"  # an order that is not undone
        seen = tensor if key not in self._examined else None
        self._print(path, module, name, PACKED, tensor.dtype, sums, undone=how, seen=seen)

    def _slot(self, path: str, cls: str, name: str, form: str, tensor: torch.Tensor) -> None:
        sums = self._sums(tensor)
        self._line(WEIGHT.to_line(_made(self._rank, self._number, path, cls, name, form, tensor.dtype, sums)))

    def _sums(self, tensor: torch.Tensor) -> RowSums:
        start = time.perf_counter()
        sums = sums_of(tensor)
        self._seconds += time.perf_counter() - start
        self._bytes += tensor.numel() * tensor.element_size()
        return sums

    def _print(
        self,
        path: str,
        module: torch.nn.Module,
        name: str,
        form: str,
        dtype: torch.dtype,
        sums: RowSums,
        *,
        undone: str = "",
        seen: torch.Tensor | None = None,
    ) -> None:
        block, parts = named_rows(module, path, name, sums.shape)
        written, raw = (None, False) if seen is None else self.watch.of(seen)
        more = {"undone": undone, "block": block, "parts": parts, "written": written, "raw": raw}
        cls = type(module).__name__
        made = _made(self._rank, self._number, path, cls, name, form, dtype, sums, **more)
        rows = None
        if len(sums.order) <= MAX_ROWS and self._written.get((path, f"{name} {form}")) != made.order:
            rows = pack_rows(sums.short)
            self._written[path, f"{name} {form}"] = made.order
        self._line(WEIGHT.to_line(made if rows is None else replace(made, rows=rows)))


def tap_path(path: str) -> str:
    """A module's path as it was before an adapter's layer wrapped it."""
    return path.replace(".base_layer", "")


def transposed(packed: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor | None:
    """``packed`` with its last two dimensions turned, where that is what the loaded one's ``shape`` says."""
    if packed.ndim < 2 or len(shape) != packed.ndim or packed.shape[-1] == packed.shape[-2]:
        return None
    turned = packed.transpose(-1, -2)
    return turned if tuple(turned.shape) == shape else None


def _made(
    rank: int, number: int, path: str, cls: str, name: str, form: str, dtype: torch.dtype, sums: RowSums, **more: Any
) -> WeightPrint:
    order, bag = sums.whole
    return WeightPrint(
        rank, number, path or ROOT_TAP, cls, name, form, DTYPE_NAMES[dtype], sums.shape, order, bag, sums.zeros,
        sums.nan, **more,
    )  # fmt: skip
