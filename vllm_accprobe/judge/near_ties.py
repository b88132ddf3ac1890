"""Rows that may have gone to other experts, told by the router's logits alone.

The problem: inside a compiled graph nobody sees which experts were taken, only the logits that they were taken by; and
a row at a near tie differs behind it by far more than any limit. The idea: where experts are taken by their highest
logits (of softmax or sigmoid, no groups, no bias), logits say which: rows whose k highest are others on the two sides,
or whose k-th and next are equal, may have gone elsewhere. If the logits themselves are within their limit, that is
rounding, as in routing.py, and these rows are left out from there on. A wrong choice by right logits stays an error of
the experts; a wrong router one of its logits. Where not even logits are in both dumps, nothing is excused: the origins
behind such a router are said to be no proof.
Not here: chosen experts that both dumps have (routing.py), what is done with such rows (comparison/verdict).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from vllm_accprobe.dump.schema import ROOT_TAP
from vllm_accprobe.judge.routing import in_front_of, margins

_MONOTONE = ("softmax", "sigmoid")
_NUMBER = re.compile(r"\.(\d+)(?=\.|$)")


def taken(attrs: Mapping[str, Any]) -> int:
    """How many experts a row takes, by its highest logits: ``top_k`` of a module that holds experts; 0 where that is
    not known, or where groups or another score decide. attrs: `Module.attrs`."""
    k, experts = attrs.get("top_k"), attrs.get("global_num_experts")
    if not isinstance(k, int) or not isinstance(experts, int) or not 0 < k < experts:
        return 0
    plain = (attrs.get("num_expert_group") or 1) == 1 and attrs.get("scoring_func", "softmax") in _MONOTONE
    return k if plain else 0


def undecided(golden: np.ndarray, mine: np.ndarray, k: int) -> np.ndarray:
    """How far each side was from taking other experts: float64 [rows, 3], as `routing.margins`.

    golden, mine: float [rows, experts], the logits. NaN where both take the same k highest and neither side's k-th
    equals the next, where the two sides' logits are equal, and where one is not finite.
    """
    rows, experts = golden.shape
    out = np.full((rows, 3), np.nan)
    if not 0 < k < experts or golden.shape != mine.shape:
        return out
    at = np.flatnonzero((golden != mine).any(axis=1) & np.isfinite(golden).all(axis=1) & np.isfinite(mine).all(axis=1))
    g, m = golden[at].astype(np.float64), mine[at].astype(np.float64)
    # Of equals each side takes what the other one prefers.
    orders = np.lexsort((-m, -g), axis=1), np.lexsort((-g, -m), axis=1)
    out[at] = margins(orders[0][:, :k], orders[1][:, :k], g, m)
    gaps, largest = [], np.zeros(len(at))
    for logits, order in zip((g, m), orders, strict=True):
        last, following = (np.take_along_axis(logits, order[:, i : i + 1], axis=1)[:, 0] for i in (k - 1, k))
        gaps.append(last - following)
        np.maximum(largest, np.abs(last), out=largest)
    same = np.isnan(out[at, 0]) & ((gaps[0] == 0) | (gaps[1] == 0))
    out[at[same]] = np.stack([*gaps, largest], axis=1)[same]
    return out


def unknown_routers(attrs: Mapping[str, Mapping[str, Any]], known: Iterable[str]) -> list[str]:
    """Modules that hold experts, whose choices nobody can check. attrs: by tap; known: taps whose router's logits or
    chosen experts both dumps have."""
    seen = list(known)
    holders = [tap for tap, has in attrs.items() if has.get("top_k") and has.get("global_num_experts")]
    return [tap for tap in holders if not any(in_front_of(k, tap) or k.startswith(tap + ".") for k in seen)]


def behind(tap: str, routers: Iterable[str]) -> bool:
    """Whether rows may have gone elsewhere before ``tap``, or inside it, by one of ``routers``."""
    found, own = [_NUMBER.search(router) for router in routers], _NUMBER.search(tap)
    if own is None or tap == ROOT_TAP:
        return bool(found) and "embed" not in tap
    inside = any(router.startswith(tap + ".") for router in routers)
    return inside or any(r is not None and int(r[1]) < int(own[1]) for r in found)
