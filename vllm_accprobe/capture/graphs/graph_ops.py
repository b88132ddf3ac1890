"""The tap inside a compiled graph, as an operator: rows are copied into a buffer, or their statistics are.

The problem: a compiled graph runs no Python of ours, and a captured one replays addresses. The idea: an operator
without a result that changes one argument, which no compiler may remove or move; which rows it takes is in a tensor
that is read when the graph RUNS, so that other steps and requests need no other graph. No name and no number enters the
graph: the layers of a model stay copies of one another. A module that is called several times in a forward has an
operator of its own, whose cursor counts calls in memory. Where rows do not fit or are not wanted, an operator of the
same kind keeps one line of numbers. On the host they are bit for bit those of VLLM_ACCPROBE_TASK=stats. A device sums
rows in float32 and totals in float64, without a hash: xxh3 is one long chain of steps and would take the rows to the
host.

Not here: where taps are placed (placement.py), what is done with the buffers (readout.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from vllm_accprobe.capture.core.session import DTYPE_NAMES, LAZY
from vllm_accprobe.dump.journal_writer import digest
from vllm_accprobe.dump.stats import Sums, TensorMoments, moments_at

VERSION = 2
"""Of the operators and of how they are placed: a graph compiled with another one must not be used again."""
_NAMESPACE = "accprobe"
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


def _each_host(take: Callable[..., None], place: int) -> Callable[..., None]:
    """The body of an operator that does as ``take`` into ``buffer[cursor]`` and moves the cursor; calls beyond the last
    are counted and not taken. place: of the number in ``select`` that is 0 where no rows are chosen; then the cursor
    stays. buffer: [calls, ...]; cursor: int64, [1], 0 before the first call."""

    def each(x: torch.Tensor, buffer: torch.Tensor, cursor: torch.Tensor, select: torch.Tensor) -> None:
        if _count_at(select.data_ptr() + 8 * place).value:
            at = _count_at(cursor.data_ptr())
            call = at.value
            at.value = call + 1
            if call < buffer.shape[0]:
                take(x, buffer[call], select)

    return each


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


STATS_VERSION = 1
"""Of the operator: a graph compiled with another one must not be used again."""
_LINE = struct.Struct("=3q7dq16s")
"""A buffer: serial, form, rows; finite elements, min, max, sum, sum of squares, NaN, Inf; whether there is a hash,
and the hash."""
WORDS = _LINE.size // 8
"""int64 numbers in a buffer."""
_NUMBERS = slice(3, 10)
_CHUNK = 1 << 24
"""Elements of which a device makes temporary copies at a time."""
_FORMS = list(DTYPE_NAMES)


class Line(NamedTuple):
    """What one buffer says. rows: how many were chosen; hash: 32 hex digits, None where a device took the numbers."""

    rows: int
    sums: Sums
    hash: str | None


def stats_buffer(device: torch.device, *calls: int) -> torch.Tensor:
    """A buffer that was not written yet: int64, [WORDS] or [calls, WORDS], zeros."""
    return torch.zeros(*calls, WORDS, dtype=torch.int64, device=device)


def stats_selection(rows: int, device: torch.device) -> torch.Tensor:
    """A ``select`` for tensors of at most ``rows`` rows that chooses nothing: int64, [2 * rows + 3], zeros.

    [serial, number of ranges, start, stop, start, stop ..., 0 or 1 for each row]: ranges are read by the host, zeros
    and ones by a device, neither of which has to work them out anew for each tap.
    """
    return torch.zeros(2 * rows + 3, dtype=torch.int64, device=device)


def choose_stats(select: torch.Tensor, serial: int, ranges: Sequence[tuple[int, int]]) -> None:
    """Lets taps measure these [start, stop) rows from now on, and mark their lines with ``serial`` (1 or more).

    ranges: ascending, neither touching nor empty, as a Space has them. () turns the taps off.
    """
    most = _most_rows(select)
    values = torch.zeros(select.shape[0], dtype=torch.int64)
    if ranges:
        values[0], values[1] = serial, len(ranges)
        values[2 : 2 + 2 * len(ranges)] = torch.as_tensor(ranges, dtype=torch.int64).reshape(-1)
        for start, stop in ranges:
            values[3 + most + start : 3 + most + stop] = 1
    select.copy_(values)


def read_line(host: torch.Tensor, serial: int, dtype: torch.dtype, shape: Sequence[int]) -> Line | None:
    """What a buffer in host memory says of the choice ``serial``; None if it was not written for that one, or from a
    tensor of another dtype or of other sizes behind its rows than ``shape``."""
    found, form, rows, n, low, high, total, squares, nan, inf, hashed, hash = _LINE.unpack_from(
        (ctypes.c_char * _LINE.size).from_address(host.data_ptr())
    )
    if found != serial or form != _form(dtype, torch.Size(shape).numel()):
        return None
    if not n:
        low, high, total, squares = math.inf, -math.inf, 0.0, 0.0
    sums = (int(n), low, high, total, squares, int(nan), int(inf))
    return Line(rows, sums, hash.hex() if hashed else None)


def _stats_host(x: torch.Tensor, buffer: torch.Tensor, select: torch.Tensor) -> None:
    """Numbers and hash of the chosen rows of ``x``, as capture/core takes them of the same rows.

    x: [rows, ...]; buffer: int64, [WORDS]; select: see stats_selection. Never raises: what cannot be measured leaves
    the buffer as it is, which is seen by the serial when the buffer is read.
    """
    with contextlib.suppress(Exception):
        serial, count = _two(select.data_ptr())
        if not count:
            return
        flat = _numbers(2 * count).from_address(select.data_ptr() + 16)
        ranges = list(zip(flat[::2], flat[1::2], strict=True))
        if ranges[-1][1] > x.shape[0]:
            return
        dtype = DTYPE_NAMES[x.dtype]
        if dtype in LAZY and (x.is_conj() or x.is_neg()):
            x = x.resolve_conj().resolve_neg()
        if not x.is_contiguous():
            x = torch.cat([x[start:stop] for start, stop in ranges])
            ends = list(itertools.accumulate(stop - start for start, stop in ranges))
            ranges = list(zip([0, *ends], ends, strict=False))  # each summed by itself, as a capture does
        row = x.nbytes // x.shape[0]
        address = x.data_ptr()
        parts = [(address + start * row, (stop - start) * row) for start, stop in ranges]
        sums = moments_at(*parts[0], dtype)
        for part in parts[1:]:
            sums = TensorMoments(*sums) + TensorMoments(*moments_at(*part, dtype))
        line = (ctypes.c_char * _LINE.size).from_address(buffer.data_ptr())
        rows = sum(stop - start for start, stop in ranges)
        form = _form(x.dtype, row // x.element_size())
        _LINE.pack_into(line, 0, serial, form, rows, *sums, 1, bytes.fromhex(digest(parts)))


def _stats_device(x: torch.Tensor, buffer: torch.Tensor, select: torch.Tensor) -> None:
    """The same numbers without a hash, and without asking the device for anything: the rows that are not chosen are
    computed, too, and masked out of the totals. All sizes follow from those of the arguments: it can be captured.

    A row is summed in float32 (float64 in float64), the rows in float64. Measured with torch's CPU kernels, rows of up
    to 70,000 elements: the mean is within 1e-6 of the host's, relative to the mean of the magnitudes, the norm within
    1e-5. A norm above 1.8e19 of a row is missing, one below 1e-22 is 0. Minimum, maximum and counts are exact.
    """
    with contextlib.suppress(Exception):
        most = _most_rows(select)
        rows = min(x.shape[0], most)
        off = select[3 + most : 3 + most + rows] == 0
        flat = x[:rows].reshape(rows, -1)
        step = max(1, _CHUNK // max(flat.shape[1], 1))
        every = torch.stack([_chunk(flat[i : i + step], off[i : i + step]) for i in range(0, rows, step)])
        line = buffer.view(torch.float64)[_NUMBERS]
        line.copy_(every.sum(0))
        line[1].copy_(every[:, 1].amin())
        line[2].copy_(every[:, 2].amax())
        buffer[1].fill_(_form(x.dtype, flat.shape[1]))
        buffer[2].copy_(rows - off.sum())
        buffer[10].fill_(0)
        buffer[0].copy_(select[0])


def _stats_each_device(x: torch.Tensor, buffer: torch.Tensor, cursor: torch.Tensor, select: torch.Tensor) -> None:
    """As _stats_device into ``buffer[cursor]``. A call beyond the last leaves the buffer as it is."""
    calls = buffer.shape[0]
    with contextlib.suppress(Exception):
        line = buffer.new_zeros(WORDS)
        _stats_device(x, line, select)
        at = cursor.clamp(max=calls - 1)
        buffer.index_copy_(0, at, torch.where(cursor < calls, line.unsqueeze(0), buffer.index_select(0, at)))
    cursor.add_(1)


def _chunk(x: torch.Tensor, off: torch.Tensor) -> torch.Tensor:
    """The seven numbers of TensorMoments, float64, of the rows of ``x`` [rows, columns] that are not ``off`` [rows].

    No number of Python's becomes a tensor here: that would be copied to the device, which a capture forbids.
    """
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj()).flatten(1)
    if not x.is_floating_point():
        x = x.double()
    elif x.element_size() == 1:
        x = x.float()
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    n, nan = torch.isfinite(x).sum(1), torch.isnan(x).sum(1)
    clean = torch.nan_to_num(x, 0.0, 0.0, 0.0)
    total = clean.sum(1, dtype=wide).double()
    squares = torch.linalg.vector_norm(clean, dim=1, dtype=wide).double().square()
    low = torch.nan_to_num(x, math.inf, math.inf, math.inf).amin(1).double().masked_fill(off, math.inf).amin()
    high = torch.nan_to_num(x, -math.inf, -math.inf, -math.inf).amax(1).double().masked_fill(off, -math.inf).amax()
    sums = torch.stack((n.double(), total, squares, nan.double(), (x.shape[1] - n - nan).double()))
    n, total, squares, nan, inf = sums.masked_fill(off, 0).sum(1).unbind()
    return torch.stack((n, low, high, total, squares, nan, inf))


def _form(dtype: torch.dtype, width: int) -> int:
    """Dtype and elements of a row in one number, so that what was measured is what was meant."""
    return _FORMS.index(dtype) << 48 | width


def _most_rows(select: torch.Tensor) -> int:
    return (select.shape[0] - 3) // 2


@functools.cache
def _numbers(count: int) -> Any:
    return ctypes.c_int64 * count


def _two(address: int) -> Sequence[int]:
    return _numbers(2).from_address(address)  # type: ignore[no-any-return]


_ONCE = "Tensor x, Tensor(a!) buffer, Tensor select"
_EACH = "Tensor x, Tensor(a!) buffer, Tensor(b!) cursor, Tensor select"
_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")
"""The operators are there as long as this is."""
for _name, _arguments, _host, _device in (
    ("tap", _ONCE, _tap_host, _tap_device),
    ("tap_each", _EACH, _each_host(_tap_host, 0), _each_device),
    ("tap_stats", _ONCE, _stats_host, _stats_device),
    ("tap_stats_each", _EACH, _each_host(_stats_host, 1), _stats_each_device),
):
    _LIBRARY.define(f"{_name}({_arguments}) -> ()")
    _LIBRARY.impl(_name, _host, "CPU")
    _LIBRARY.impl(_name, _device, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_NAMESPACE}::{_name}", lambda *args: None, lib=_LIBRARY)
tap, tap_each = torch.ops.accprobe.tap.default, torch.ops.accprobe.tap_each.default
"""``tap(x, buffer, select)`` and ``tap_each(x, buffer, cursor, select)``; see _tap_host and _each_host."""
tap_stats, tap_stats_each = torch.ops.accprobe.tap_stats.default, torch.ops.accprobe.tap_stats_each.default
"""The same for statistics; see _stats_host."""
