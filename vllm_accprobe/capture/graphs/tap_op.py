"""The tap as an operator: rows of a tensor are copied into a buffer whose address never changes.

The problem: a compiled graph runs no Python of ours, and a captured one replays addresses. The idea: an operator
without a result that changes one argument, so that no compiler may drop or move it; what it copies is said by a tensor
that is read when the graph RUNS: other steps, requests and rows need no other graph. Nothing else enters the graph, no
name and no number, so that the layers of a model stay copies of one another. A module that is called several times in
a forward has an operator of its own, whose cursor says in memory which call it is: the plain one pays nothing for it.
Not here: where taps stand (placement.py), what is done with the buffers (drain.py).
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence

import torch

VERSION = 2
"""Of the operators and of how they are placed: a graph compiled with another one must not be used again."""
_NAMESPACE = "accprobe"
_SCHEMAS = (
    "tap(Tensor x, Tensor(a!) buffer, Tensor select) -> ()",
    "tap_each(Tensor x, Tensor(a!) buffer, Tensor(b!) cursor, Tensor select) -> ()",
)
_count_at = ctypes.c_int64.from_address


def selection(rows: int, device: torch.device) -> torch.Tensor:
    """A ``select`` for buffers of ``rows`` rows that chooses nothing: int64, [1 + rows], zeros."""
    return torch.zeros(1 + rows, dtype=torch.int64, device=device)


def choose(select: torch.Tensor, rows: Sequence[int]) -> None:
    """Lets taps copy these rows (numbers of rows of their tensors), in this order, from now on; () turns them off."""
    values = torch.zeros(select.shape[0], dtype=torch.int64)
    values[0] = len(rows)
    if rows:
        values[1 : 1 + len(rows)] = torch.as_tensor(rows, dtype=torch.int64)
    select.copy_(values)


def _tap_host(x: torch.Tensor, buffer: torch.Tensor, select: torch.Tensor) -> None:
    """``select[0]`` rows of ``x``, those numbered ``select[1:]``, become the first rows of ``buffer``.

    x: [rows, ...]; buffer: [most rows, ...], of the dtype and the other sizes of x; select: int64, [1 + most rows].
    Never raises: what does not fit is left unwritten, which is seen when the buffer is read.
    """
    count = _count_at(select.data_ptr()).value
    if count and x.shape[1:] == buffer.shape[1:]:  # torch would make the buffer fit, somewhere else in memory
        with contextlib.suppress(Exception):
            torch.index_select(x, 0, select[1 : 1 + count], out=buffer[:count])


def _tap_device(x: torch.Tensor, buffer: torch.Tensor, select: torch.Tensor) -> None:
    """The same without asking the device how many rows: all of the buffer is written, what lies behind the chosen rows
    with row 0. One kernel, no memory of its own, and nothing that waits: it can be captured."""
    if x.shape[1:] == buffer.shape[1:]:
        with contextlib.suppress(Exception):
            torch.index_select(x, 0, select[1:], out=buffer)


def _each_host(x: torch.Tensor, buffer: torch.Tensor, cursor: torch.Tensor, select: torch.Tensor) -> None:
    """As _tap_host into ``buffer[cursor]``, and the cursor moves on; calls beyond the last are counted and not copied.

    buffer: [calls, most rows, ...]; cursor: int64, [1], 0 before the first call. Without rows to copy it stays.
    """
    if _count_at(select.data_ptr()).value:
        at = _count_at(cursor.data_ptr())
        call = at.value
        at.value = call + 1
        if call < buffer.shape[0]:
            _tap_host(x, buffer[call], select)


def _each_device(x: torch.Tensor, buffer: torch.Tensor, cursor: torch.Tensor, select: torch.Tensor) -> None:
    """The same without asking the device anything. A call beyond the last leaves the buffer as it is."""
    calls = buffer.shape[0]
    if x.shape[1:] == buffer.shape[2:]:
        with contextlib.suppress(Exception):
            at = cursor.clamp(max=calls - 1)
            rows = x.index_select(0, select[1:]).unsqueeze(0)
            within = (cursor < calls).view([1] * rows.dim())
            buffer.index_copy_(0, at, torch.where(within, rows, buffer.index_select(0, at)))
    cursor.add_(1)


def define(schemas: Sequence[str], *bodies: tuple[Callable[..., None], Callable[..., None]]) -> torch.library.Library:
    """Registers operators that give nothing back, each with its (host's, device's) body; they are there as long as what
    is returned."""
    library = torch.library.Library(_NAMESPACE, "FRAGMENT")
    for schema, (host, device) in zip(schemas, bodies, strict=True):
        name = schema.partition("(")[0]
        library.define(schema)
        library.impl(name, host, "CPU")
        library.impl(name, device, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{_NAMESPACE}::{name}", lambda *args: None, lib=library)
    return library


_LIBRARY = define(_SCHEMAS, (_tap_host, _tap_device), (_each_host, _each_device))
tap = torch.ops.accprobe.tap.default
"""``tap(x, buffer, select)``; see _tap_host."""
tap_each = torch.ops.accprobe.tap_each.default
"""``tap_each(x, buffer, cursor, select)``; see _each_host."""
