"""The loops as machine code, with their buffers.

The problem: a wide row needs room for three numbers per element, and threads call at the same time. The idea: each
thread has buffers of its own, which grow. Not here: the loops (loops.py), where their code is kept (machine_code.py),
when they serve (rows.py).
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from vllm_accprobe import machine_code
from vllm_accprobe.kernels import BLOCK, ROWS_AT_ONCE
from vllm_accprobe.machine_code import Unusable, address

__all__ = ["Loops", "Unusable", "loops"]

SOURCES = tuple(f"kernels/{name}.py" for name in ("__init__", "bits", "vectors", "loops"))
_LINE = 64
"""Bytes of a line of the cache."""


class Loops:
    """The arguments are those of loops.py without the buffers: arrays that are contiguous and of the right types."""

    def __init__(self, code: machine_code.CompiledLoops):
        self._code = code
        self._own = threading.local()

    def rows(self, *args: Any) -> None:
        *sides, out, eps, elements = args
        q, rel = self._buffers(int(out[0, 0]), np.float64)
        self._code.call["rows"](*_sides(*sides), *_array(out), eps, *_array(elements), *q, *rel)

    def structure(self, *args: Any) -> None:
        *sides, sums = args
        g, m = self._buffers(max(sums.shape[1], ROWS_AT_ONCE), np.uint32)
        self._code.call["structure"](*_sides(*sides), *_array(sums), *g, *m)

    def _buffers(self, width: int, kind: Any) -> tuple[tuple[int, int], ...]:
        """Two."""
        own = self._own.__dict__
        if own.get(kind, (0, ()))[0] < width:
            arrays = buffers(max(width, BLOCK), kind)
            own[kind] = max(width, BLOCK), tuple(map(_array, arrays)), arrays
        return own[kind][1]  # type: ignore[no-any-return]


def _sides(g: np.ndarray, gk: int, gt: np.ndarray, gi: np.ndarray, m: np.ndarray, mk: int, mt: Any, mi: Any) -> Any:
    side = address(g), g.size, gk, address(gt), gt.size, address(gi), gi.size
    return *side, address(m), m.size, mk, address(mt), mt.size, address(mi), mi.size


def _array(array: np.ndarray) -> tuple[int, int]:
    return address(array), array.size


def buffers(width: int, kind: Any) -> list[np.ndarray]:
    """Two buffers. Each begins with a cache line, because vectors that lie across two of them cost twice as much, and
    not at the same place of a page as the other, which processors take for the same place until they know."""
    out, nbytes = [], width * np.dtype(kind).itemsize
    room = np.empty(2 * (nbytes + 2048) + _LINE, np.uint8)
    at = -room.ctypes.data % _LINE
    for _ in range(2):
        out.append(room[at : at + nbytes].view(kind))
        at += -(-nbytes // _LINE) * _LINE + 1024
    return out


def code() -> machine_code.CompiledLoops:
    """Raises Unusable."""
    return machine_code.loops("vllm_accprobe.kernels.loops", SOURCES)


def loops() -> Loops:
    """Raises Unusable."""
    return Loops(code())
