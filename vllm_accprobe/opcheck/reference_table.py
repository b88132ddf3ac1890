"""Which reference, and which device kernel, a call's name finds.

The problem: one operator has many spellings, a class may be meant by a glob, and a user's own reference is to replace
ours. The idea: a `References` table collects the marked functions of modules, so that nothing registers itself behind
anybody's back; the longest name wins, and what a reference raises is a value.
Not here: marking (reference.py), the table of all that are installed (registry.py). Copied into generated tests.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any

from vllm_accprobe.opcheck.reference import (
    BACKWARD,
    BY_ROWS,
    KERNEL,
    MARKS,
    REFERENCE,
    Call,
    Declined,
    Expected,
    Reference,
    Tensor,
)


def marked(source: ModuleType | Reference) -> list[Reference]:
    """The functions of a module, or the one, that are marked with ``@reference`` or ``@device_kernel``."""
    found = list(vars(source).values()) if isinstance(source, ModuleType) else [source]
    return [f for f in found if callable(f) and any(hasattr(f, mark) for mark in MARKS)]


class _Named:
    """Functions by the names that one mark gives them."""

    def __init__(self, mark: str):
        self._mark = mark
        self._by_name: dict[str, Reference] = {}
        self._globs: dict[str, Reference] = {}
        self.find = functools.cache(self._find)

    def add(self, function: Reference) -> None:
        for name in getattr(function, self._mark, ()):
            (self._globs if any(c in name for c in "*?[") else self._by_name)[name] = function
        self.find.cache_clear()

    def names(self) -> list[str]:
        return sorted({*self._by_name, *self._globs})

    def _find(self, name: str) -> Reference | Declined:
        # a gradient is no operator's output, whatever name stands behind the word
        spellings = (name,) if name.startswith(BACKWARD) else _spellings(name)
        for spelling in spellings:
            if spelling in self._by_name:
                return self._by_name[spelling]
        fits = [g for g in self._globs if any(fnmatchcase(s, g) for s in spellings)]
        if not fits:
            return Declined(f"no reference for {name}")
        return self._globs[max(fits, key=lambda g: sum(c not in "*?" for c in g.removeprefix("torch.ops.")))]


class References:
    """A table of references by name, and one of device kernels. The one whose name has most letters besides ``*`` and
    ``?`` wins; a later source beats an earlier one, so that a user's own replaces ours."""

    def __init__(self, sources: Iterable[ModuleType | Reference] = ()):
        self._references, self._kernels = _Named(REFERENCE), _Named(KERNEL)
        self.problems: list[str] = []
        for source in sources:
            self.add(source)

    def add(self, source: ModuleType | Reference) -> None:
        """All marked functions of a module, or one. Raises ValueError where there is none."""
        found = marked(source)
        if not found:
            raise ValueError(f"{getattr(source, '__name__', source)} has no function marked with @reference")
        for function in found:
            self._references.add(function)
            self._kernels.add(function)

    def names(self) -> list[str]:
        """What there are references for."""
        return self._references.names()

    def find(self, name: str) -> Reference | Declined:
        """The reference for a class or operator, or why there is none. (Cached.)"""
        return self._references.find(name)

    def by_rows(self, name: str) -> bool:
        """Whether there is a reference for a class that works row by row."""
        return bool(getattr(self.find(name), BY_ROWS, False))

    def evaluate(self, call: Call) -> dict[str, Expected] | Declined:
        """The exact outputs of ``call`` by role, or why there are none. Never raises for what a reference does."""
        outputs = _outputs(self.find(call.cls), call)
        if isinstance(outputs, Declined):
            return outputs
        return {role: x if isinstance(x, Expected) else Expected(x) for role, x in outputs.items()}

    def runs(self, name: str) -> bool:
        """Whether a device has something for this name."""
        return not isinstance(self._kernels.find(name), Declined)

    def run(self, call: Call) -> Mapping[str, Tensor] | Declined:
        """What the device where the tensors of ``call`` lie makes of it, by role, or why nothing. Never raises."""
        return _outputs(self._kernels.find(call.cls), call)


def _outputs(found: Reference | Declined, call: Call) -> Mapping[str, Any] | Declined:
    if isinstance(found, Declined):
        return found
    try:
        result = found(call)
    except Declined as why:
        return why
    except Exception as error:  # a reference may be anybody's: its crash is a row of the table, not the end
        text = " ".join(str(error).split())[:120]
        return Declined(f"the reference failed: {type(error).__name__}: {text}", failed=True)
    return result if isinstance(result, Mapping) else {"output.0": result}


def _spellings(name: str) -> tuple[str, ...]:
    """A class's name alone; an operator's with and without ``torch.ops.`` and its overload, the longest first."""
    if "." not in name and "::" not in name:
        return (name,)
    short = name.replace("::", ".").removeprefix("torch.ops.")
    bare = ".".join(short.split(".")[:2])
    return tuple(dict.fromkeys((f"torch.ops.{short}", short, f"torch.ops.{bare}", bare)))
