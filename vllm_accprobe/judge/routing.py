"""Rows that a router sent to other experts, and whether that is an error.

The problem: choosing the best k of many experts is a jump: where the k-th and the next are nearly equal, the smallest
rounding sends a row elsewhere, and everything after it differs by far more than any limit. The idea: what an operator
chose is in the dump (``topk_ids``). If the router's numbers differ, but within their limits, the choice was a near tie,
and this row and the later ones of its request cannot be judged from here on: they are counted, not condemned. If
the numbers are equal to the bit and the choice is not, the choice is wrong; if they are beyond the limit, an operator
before is.
Not here: flipped tokens, which are the same at the end of the model (flips.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_accprobe.align.tokens import position, subject
from vllm_accprobe.judge.trace import Trace

_CHOICE = re.compile(r"(top_?k|expert)_?(ids|indices|index|idx)$")
_WEIGHT = re.compile(r"(top_?k|expert)_?(weights?|scores|vals?|values)$")


_ROUTER = re.compile(r"Top[kK]Router$")
"""transformers' routers give logits, weights and experts, in this order and without names."""


def is_choice(role: str, cls: str) -> bool:
    """Whether a tensor of this role, of a module of this class, holds the numbers of chosen experts."""
    return bool(_CHOICE.search(role)) or (role == "output.2" and bool(_ROUTER.search(cls)))


def is_weight(role: str, cls: str) -> bool:
    return bool(_WEIGHT.search(role)) or (role == "output.1" and bool(_ROUTER.search(cls)))


def choices_first(units: Iterable[Any]) -> Iterator[Any]:
    """``units`` (measured.MeasuredUnit, in order of the flow), each tap's chosen experts before their weights: a row
    that was sent elsewhere at a near tie has other weights, which need not be near."""
    held: list[Any] = []
    for unit in units:
        if held and held[0].key[0] != unit.key[0]:
            yield from held
            held = []
        if is_weight(unit.key[1], unit.cls):
            held.append(unit)
            continue
        yield unit
        if is_choice(unit.key[1], unit.cls):
            yield from held
            held = []
    yield from held


@dataclass
class Rerouted:
    """first: request's subject → first position that cannot be judged any more. rows: how many rows that concerns."""

    first: dict[int, int] = field(default_factory=dict)
    _seen: set[int] = field(default_factory=set)

    @property
    def rows(self) -> int:
        return len(self._seen)

    def near_ties(self, keys: np.ndarray, unit: Any, traces: Sequence[Trace]) -> np.ndarray:
        """bool [len(keys)]: rows where what the router read differs, but by no more than its limit allows."""
        before = [t for t in traces if t.order < unit.order and not t.role.startswith("param") and not t.vision]
        near = [t for t in before if unit.key[0].startswith(t.tap.rpartition(".")[0] + ".")][-12:]
        worst, limit = np.zeros(len(keys)), 0.0
        for t in near:
            if len(t.keys):
                at = np.minimum(np.searchsorted(t.keys, keys), len(t.keys) - 1)
                np.maximum(worst, np.where(t.keys[at] == keys, t.err[at], 0.0), out=worst)
            limit = max(limit, t.allowed)
        return (worst > 0) & (worst <= limit)

    def add(self, keys: np.ndarray) -> None:
        for who, at in zip(subject(keys).tolist(), position(keys).tolist(), strict=True):
            self.first[who] = min(at, self.first.get(who, at))

    def after(self, keys: np.ndarray) -> np.ndarray:
        """bool [len(keys)]: rows at or after a rerouted row of their request."""
        mask = np.zeros(len(keys), bool)
        for who, first in self.first.items():
            mask |= (subject(keys) == who) & (position(keys) >= first)
        self._seen.update(keys[mask].tolist())
        return mask
