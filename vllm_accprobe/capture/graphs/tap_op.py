"""The tap as an operator: rows of a tensor are copied into a buffer whose address never changes.

The problem: a compiled graph runs no Python of ours, and a captured one replays addresses. The idea: an operator
without a result that changes one argument, so that no compiler may drop or move it; what it copies is said by a tensor
that is read when the graph RUNS: other steps, requests and rows need no other graph. Nothing else enters the graph, no
name and no number, so that the layers of a model stay copies of one another. Not here: where taps stand (placement.py),
what is done with the buffers (drain.py).
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence

import torch

VERSION = 1
"""Of the operator and of how it is placed: a graph compiled with another one must not be used again."""
_NAMESPACE, _SCHEMA = "accprobe", "tap(Tensor x, Tensor(a!) buffer, Tensor select) -> ()"
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


def _define() -> torch.library.Library:
    library = torch.library.Library(_NAMESPACE, "FRAGMENT")
    library.define(_SCHEMA)
    library.impl("tap", _tap_host, "CPU")
    library.impl("tap", _tap_device, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::tap", lambda x, buffer, select: None, lib=library)
    return library


_LIBRARY = _define()
tap = torch.ops.accprobe.tap.default
"""``tap(x, buffer, select)``; see _tap_host."""
