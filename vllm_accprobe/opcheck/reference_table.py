"""Which reference, and which device kernel, a call's name finds.

The problem: one operator has many spellings, a class may be meant by a glob, and a user's own reference is to replace
ours. The idea: a `References` table collects the marked functions of modules, so that nothing registers itself behind
anybody's back; the longest name wins, and what a reference raises is a value.
Not here: marking (reference.py), the table of all that are installed (registry.py). Copied into generated tests.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any

from vllm_accprobe.dump.block_code import FORWARD, INSIDE
from vllm_accprobe.opcheck.calls.views import laid_out
from vllm_accprobe.opcheck.reference import (
    BACKWARD,
    BY_ROWS,
    KERNEL,
    MARKS,
    RECEIVED,
    REFERENCE,
    UNROUNDED,
    Call,
    Declined,
    Expected,
    Reference,
    Tensor,
    combined,
    half_a_unit_off,
    only,
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
        found_by_name = self.find(call.cls)
        outputs = _outputs(found_by_name, call)
        if isinstance(outputs, Declined) and not outputs.failed and FORWARD in call.attrs:
            by_code = _outputs(self.find(FORWARD), call)
            if not isinstance(by_code, Declined) or isinstance(found_by_name, Declined):
                outputs = by_code
        if isinstance(outputs, Declined):
            return outputs
        if FORWARD in call.attrs and not call.extra.get(UNROUNDED):
            inner = _outputs(self.find(RECEIVED), call)
            if isinstance(inner, Declined) and inner.failed:
                outputs = {**outputs, **_not_computed(call, inner.reason)}
            elif not isinstance(inner, Declined):
                open_ = all(isinstance(e, Expected) and (e.unseen or e.only_measured) for e in outputs.values())
                outputs = {**(only(inner, unseen=PARTS_ALONE) if open_ else inner), **outputs}
        found = {role: x if isinstance(x, Expected) else Expected(x) for role, x in outputs.items()}
        return self._of_unrounded(call, found) if call.extra.get(UNROUNDED) else found

    def _of_unrounded(self, call: Call, found: dict[str, Expected]) -> dict[str, Expected]:
        """``found`` with what half a unit of each input more or less makes: the operator read its inputs before they
        were rounded. An error that is uniform within half a unit has a standard deviation of that by root three."""
        moved: dict[str, Any] = {}
        for seed in range(_DRAWS):
            drawn = replace(call, inputs=half_a_unit_off(call.inputs, seed))
            for role, other in _values(_outputs(self.find(call.cls), drawn)).items():
                if role in found and other.shape == found[role].value.shape and other.is_floating_point():
                    most = (other - found[role].value).abs()
                    moved[role] = most if role not in moved else moved[role].maximum(most)
        return {role: _widened(e, moved.get(role)) for role, e in found.items()}

    def runs(self, name: str) -> bool:
        """Whether a device has something for this name."""
        return not isinstance(self._kernels.find(name), Declined)

    def run(self, call: Call) -> Mapping[str, Tensor] | Declined:
        """What the device where the tensors of ``call`` lie makes of it, by role, or why nothing, each input in its
        captured layout. Never raises."""
        found = self._kernels.find(call.cls)
        return found if isinstance(found, Declined) else _outputs(lambda c: found(laid_out(c)), call)


PARTS_ALONE = "only what its parts received was checked"
_DRAWS = 4
"""Chosen: signs of the inputs' halves. Most of these operators read one or two numbers for an element, whose four
pairs of signs four draws hit nearly always, and the largest counts."""


def _not_computed(call: Call, why: str) -> dict[str, Expected]:
    """Rows without a verdict for what the block's parts received: its reference failed."""
    return {role: Expected(t, reason=why, failed=True)
            for role, t in call.outputs.items() if role.startswith(INSIDE) and role in call.attrs[FORWARD]}  # fmt: skip


def _values(outputs: Mapping[str, Any] | Declined) -> dict[str, Any]:
    if isinstance(outputs, Declined):
        return {}
    return {role: x.value if isinstance(x, Expected) else x for role, x in outputs.items()}


def _widened(e: Expected, moved: Tensor | None) -> Expected:
    if moved is None:
        return e
    bound = None if e.bound is None else e.bound + 2.0 * moved
    return replace(e, noise=combined(e.noise, moved / 3.0**0.5), bound=bound, groups=None)


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
