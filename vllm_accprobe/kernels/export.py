"""The compiled loops as functions that anything can call by address; importing this module needs numba.

The problem: numba takes a third of a second to be imported and to load what it has compiled, each time. The idea: the
loops need no memory and nothing of Python's, so they are compiled once into plain C functions, whose object code
native.py keeps. Both have one signature, arrays as addresses.
Not here: the loops (loops.py), keeping and loading (native.py).
"""

from __future__ import annotations

from typing import Any

from numba import carray, cfunc, types

from vllm_accprobe.kernels import BLOCK, loops
from vllm_accprobe.kernels.bits import FAST

_BYTES, _WORDS = types.CPointer(types.uint8), types.CPointer(types.uint32)
_INDEX, _NUMBERS = types.CPointer(types.int64), types.CPointer(types.float64)
_SIDE = (_BYTES, types.int64, types.int64, _WORDS, _INDEX)
SIGNATURE = types.void(
    *_SIDE, *_SIDE, types.int64, _NUMBERS, types.int64, types.float64, _NUMBERS, _WORDS, _WORDS, _NUMBERS, _NUMBERS
)
"""Of each side: bytes, how many, kind, table, rows. Then: how many rows, the result, width, eps, elements, buffers."""


def _rows(
    g: Any, gn: Any, gk: Any, gt: Any, gi: Any, m: Any, mn: Any, mk: Any, mt: Any, mi: Any, n: Any, out: Any,
    width: Any, eps: Any, elements: Any, a: Any, b: Any, q: Any, rel: Any,
) -> None:  # fmt: skip
    size = max(width, BLOCK)
    loops.rows(
        carray(g, (gn,)), gk, carray(gt, (256,)), carray(gi, (n,)), carray(m, (mn,)), mk, carray(mt, (256,)),
        carray(mi, (n,)), carray(out, (n, 11)), eps, carray(elements, (10,)), carray(a, (BLOCK,)), carray(b, (BLOCK,)),
        carray(q, (size,)), carray(rel, (size,)),
    )  # fmt: skip


def _structure(
    g: Any, gn: Any, gk: Any, gt: Any, gi: Any, m: Any, mn: Any, mk: Any, mt: Any, mi: Any, n: Any, out: Any,
    width: Any, eps: Any, elements: Any, a: Any, b: Any, q: Any, rel: Any,
) -> None:  # fmt: skip
    loops.structure(
        carray(g, (gn,)), gk, carray(gt, (256,)), carray(gi, (n,)), carray(m, (mn,)), mk, carray(mt, (256,)),
        carray(mi, (n,)), carray(out, (6, width)), carray(a, (width,)), carray(b, (width,)),
    )  # fmt: skip


def objects() -> dict[str, tuple[str, list[str], bytes]]:
    """By name of the loop: (its symbol, the symbols it does not define itself, object code). Takes some seconds."""
    out = {}
    for name, function in (("rows", _rows), ("structure", _structure)):
        made = cfunc(SIGNATURE, error_model="numpy", fastmath=FAST)(function)
        library = made._library
        module = library._final_module
        every = [*module.functions, *module.global_variables]
        foreign = [x.name for x in every if x.is_declaration and not x.name.startswith("llvm.")]
        out[name] = made.native_name, foreign, library.serialize_using_object_code()[2][0]
    return out
