"""What numpy's arrays and torch's tensors spell differently, of what measuring needs.

The problem: numpy is faster on the few rows of a decode step, and a generated test has torch alone. The idea: one code
over what both libraries have under one name (``xp``), and this little for the rest.
Not here: measuring (measures.py), beside which this file is copied into the tests that gentest writes.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any


class NumpyArrays:
    """xp: the functions that both libraries have under one name."""

    def __init__(self) -> None:
        self.xp: Any = importlib.import_module("numpy")
        self.double, self.single, self.half = self.xp.float64, self.xp.float32, self.xp.float16

    def quiet(self) -> contextlib.AbstractContextManager[Any]:
        return self.xp.errstate(all="ignore")

    def flat(self, array: Any) -> Any:
        array = self.xp.ascontiguousarray(array).reshape(-1)
        if array.dtype.kind == "c":
            array = array.view(self.double if array.dtype.itemsize == 16 else self.single)
        if array.dtype.kind not in "fiub":
            raise ValueError(f"numbers of dtype {array.dtype} cannot be measured")
        return array

    def to(self, array: Any, dtype: Any) -> Any:
        return array.astype(dtype)

    def exact(self, array: Any) -> bool:
        """Whether these are integers."""
        return array.dtype.kind in "iub"

    def apart(self, g: Any, m: Any) -> Any:
        """m - g of integers, exact and rounded once, where float64 may not hold them; else None."""
        if g.dtype.kind not in "iu" or m.dtype.kind not in "iu" or 8 not in (g.dtype.itemsize, m.dtype.itemsize):
            return None
        less, a, b = m < g, self.to(m, self.xp.uint64), self.to(g, self.xp.uint64)
        return self.xp.where(less, -self.to(b - a, self.double), self.to(a - b, self.double))


class TorchArrays:
    """As `NumpyArrays`, where there is nothing but torch."""

    def __init__(self) -> None:
        self.xp: Any = importlib.import_module("torch")
        self.double, self.single, self.half = self.xp.float64, self.xp.float32, self.xp.float16

    def quiet(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def flat(self, array: Any) -> Any:
        array = (self.xp.view_as_real(array) if array.is_complex() else array).reshape(-1)
        return array if array.is_floating_point() else array.long()

    def to(self, array: Any, dtype: Any) -> Any:
        return array.to(dtype)

    def exact(self, array: Any) -> bool:
        return not array.is_floating_point()

    def apart(self, g: Any, m: Any) -> Any:
        return (m - g).to(self.double) if self.exact(g) and self.exact(m) else None


def arrays_of(array: Any) -> NumpyArrays | TorchArrays:
    """The library of an array or a tensor."""
    return TorchArrays() if type(array).__module__.startswith("torch") else NumpyArrays()
