"""Of which dtype the numbers in a foreign dump's tensors are, where the file's own dtype is wider.

The problem: HDF5 and numpy have no bfloat16, so tools store float32, and what two models may honestly differ by follows
from what they computed in. The idea: of some outputs, each of another tap, a few thousand numbers are looked at; a
random float32 lies on bfloat16's grid with probability 2**-16. Half of the outputs that tell must be of the coarser
dtype: a float32 model of a bfloat16 checkpoint has embeddings on its grid, and nothing else. A dump that has tensors in
the coarser dtype, too, keeps dtypes as they are. Not here: single calls and their tensors (opcheck/calls/grid.py).
"""

from __future__ import annotations

import numpy as np

from vllm_accprobe.dump.reader import Dump, DumpError
from vllm_accprobe.dump.schema import Record
from vllm_accprobe.formats.common.foreign import INDEPENDENT, VALUES, ForeignDump

LOOKS, LARGEST, ENOUGH = 16, 16 << 20, 64
"""Tensors that are looked at, bytes of one, different numbers of one that it takes (chosen)."""
_SEEN = 4096
_CONTAINERS = ("float32", "float64")
_COARSER = {"float32": ("bfloat16", "float16"), "float64": ("bfloat16", "float16", "float32")}


def look(dump: Dump) -> str:
    """The coarser dtype whose numbers the outputs hold, "" where there is none, and for files that belong to no one
    run. Said among the dump's problems and kept in ``dump.run``."""
    if not isinstance(dump, ForeignDump) or VALUES in dump.run or dump.run.get(INDEPENDENT):
        return str(dump.run.get(VALUES, ""))
    found = held(dump)
    if found:
        name, container = found
        dump.run[VALUES] = name
        dump.problem(f"its {container} values are {name} numbers: judged by what {name} can hold")
        return name
    return ""


def held(dump: Dump) -> tuple[str, str] | None:
    """(the coarser dtype, the container's)."""
    declared = {r.dtype for r in dump.records}
    for container in _CONTAINERS:
        told = [s for r in _some(dump, container) if (s := _of(dump, r, container))]
        for name in _COARSER[container]:
            if name not in declared and told and 2 * sum(s == name for s in told) >= len(told):
                return name, container
    return None


def _some(dump: Dump, container: str) -> list[Record]:
    """Outputs of different taps, evenly from the first to the last."""
    by_tap: dict[str, Record] = {}
    for r in dump.records:
        fits = r.dtype == container and r.payload is not None and r.payload.nbytes <= LARGEST
        if fits and r.role.startswith(("output", "value")):
            by_tap.setdefault(r.tap, r)
    found = list(by_tap.values())
    return [found[i * len(found) // LOOKS] for i in range(LOOKS)] if len(found) > LOOKS else found


def _of(dump: Dump, r: Record, container: str) -> str:
    """The coarsest dtype that holds the finite values, the container's own, or "" where they do not tell: too few, or
    all of them multiples of one step as small integers are."""
    try:
        values = dump.read(r).reshape(-1)[:_SEEN]
    except (DumpError, OSError):
        return ""
    with np.errstate(all="ignore"):
        values = np.unique(np.abs(values[np.isfinite(values) & (values != 0)]).astype(np.float64))
        if len(values) < ENOUGH:
            return ""
        for name, bits in (("bfloat16", 8), ("float16", 11), ("float32", 24)):
            if name in _COARSER[container] and _on(values, name):
                return "" if _steps(values) <= bits else name
    return container


def _on(values: np.ndarray, name: str) -> bool:
    wide = values.astype(np.float32)
    if name == "bfloat16":
        return bool((wide == values).all() and not (wide.view(np.uint32) & 0xFFFF).any())
    return bool((wide.astype(np.float16).astype(np.float64) == values).all()) if name == "float16" else bool(
        (wide == values).all())  # fmt: skip


def _steps(values: np.ndarray) -> int:
    """How many bits it takes to count the values in steps of the largest power of two that divides all of them."""
    mantissa, exponent = np.frexp(values)
    whole = np.ldexp(mantissa, 53).astype(np.int64)
    lowest = np.log2((whole & -whole).astype(np.float64)).astype(np.int64) + exponent - 53
    return int(exponent.max() - lowest.min())
