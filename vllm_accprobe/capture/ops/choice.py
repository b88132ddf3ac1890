"""Which operators are captured, and which of their calls keep tensors.

The problem: a step of a model calls thousands of operators, a third of which compute nothing, and not all tensors of a
long run fit on a disk. The idea: per operator, once, a reason why it is left out, or None (denials by default, globs of
the user, which win); per call, what its mode allows: a line, a line with tensors, or only a count. The random sample is
a reservoir that is written as it goes: the k-th call of an operator takes a place among its n with probability n/k, and
the reader leaves out those whose place was taken later; so nothing waits in memory, and a killed run has its sample.
Not here: what a call is (op_values.py), what is stored of it (op_tensors.py).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable
from fnmatch import fnmatchcase

from vllm_accprobe.config import ProbeConfig, matches

TRACE, DEDUP, SAMPLE, FULL = "trace", "dedup", "sample", "full"
DEFAULT_CALLS = 5
"""How many random calls of an operator the mode ``sample`` keeps where no number was given."""
VIEW = "a view, computes nothing"
_DENIED = {
    "allocates memory, computes nothing": (
        "aten.empty*", "aten.new_empty*", "aten._empty*", "aten.resize*", "aten._resize*", "aten.set_.*",
    ),
    "moves a value to the host": ("aten.item.*", "aten._local_scalar_dense.*", "aten.is_nonzero.*", "aten.equal.*"),
    "asks or marks, computes nothing": (
        "prim.*", "profiler.*", "aten.record_stream.*", "aten.is_*", "aten._has_*", "aten.size.*", "aten.stride.*",
        "aten.sym_*", "aten.numel.*", "aten.dim.*", "aten.lift*", "aten.detach*", "aten._pin_memory.*",
        "aten.pin_memory.*", "aten._assert*",
    ),
}  # fmt: skip
FRESH = ("aten.empty", "aten.new_empty", "aten._empty")
"""Beginnings of names of operators that give memory nobody has written to."""


def by_default(op: str) -> str | None:
    """Why operator ``op`` is left out unless asked for by name, or None."""
    for reason, globs in _DENIED.items():
        if any(fnmatchcase(op, glob) for glob in globs):
            return reason
    return None


class Choice:
    """The decisions of one rank. ``seed`` and the operator's name give the random numbers, so that two ranks and two
    runs that make the same calls keep the same ones."""

    def __init__(self, config: ProbeConfig):
        self.mode = config.ops_mode if config.task == "tensor" else TRACE
        self.seed = config.seed
        default = DEFAULT_CALLS if self.mode == SAMPLE else None
        self.calls = config.ops_calls if config.ops_calls is not None else default
        self._names = tuple(glob for glob in config.ops_list if "::" not in glob)
        self._taps = tuple(glob for glob in config.ops_list if "::" in glob)
        self._seen: set[int] = set()
        self._counts: Counter[str] = Counter()
        self._random: dict[str, random.Random] = {}

    def denied(self, op: str) -> str | None:
        """Why no call of ``op`` is captured, or None. ``op``: ``aten.mm.default``; globs may leave ``.default`` out."""
        names = (op, op.rpartition(".")[0])
        if self._names and not matches(self._names, names):
            return "not selected by VLLM_ACCPROBE_OPS_LIST"
        asked = any(not g.startswith("!") and g != "*" and any(fnmatchcase(n, g) for n in names) for g in self._names)
        return None if asked else by_default(op)

    def wanted_at(self, tap: str) -> bool:
        """Whether the globs over taps (those with ``::``) choose calls of tap ``module::op``."""
        return not self._taps or matches(self._taps, (tap, tap.rpartition(".")[0]))

    def seen(self, signature: Hashable) -> bool:
        """Mode ``dedup``: whether a call like this one was written before; remembers it."""
        key = hash(signature)
        if key in self._seen:
            return True
        self._seen.add(key)
        return False

    def keeps(self, op: str) -> tuple[bool, int | None]:
        """Whether this call of ``op``, the next one, keeps its tensors, and its place in the sample if there is one."""
        if self.mode == TRACE:
            return False, None
        if self.calls is None or self.mode == FULL:
            return True, None
        self._counts[op] += 1
        count = self._counts[op]
        if count <= self.calls:
            return True, count - 1
        generator = self._random.get(op)
        if generator is None:
            generator = self._random[op] = random.Random(f"{self.seed} {op}")
        place = generator.randrange(count)
        return (True, place) if place < self.calls else (False, None)
