"""Whose each pair is: an origin's own, or what its error became further on; and all of them in one sum.

The problem: "968 of 2,760 pairs failed" says how far an error has spread, and not in how many places it is made. The
idea: a failed pair of a tensor that an origin is blamed for is its own, any other one is propagated; with those that
pass and those that are skipped they add up to all. Not here: how an origin is found (judge/).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vllm_accprobe.report.text import count

if TYPE_CHECKING:
    from vllm_accprobe.comparison.result import Comparison, Pair


def own_pairs(comparison: Comparison, found: Mapping[str, Any]) -> list[Pair]:
    """The compared pairs of the tensor that an origin or a divergence names; of its module where that has none."""
    pairs = [p for p in comparison.pairs if p.status != "skip"]
    module, role = found.get("module"), str(found.get("role") or "")
    # A module may be blamed for what another one is given: its role then begins with that one's name.
    exact = [p for p in pairs if (p.tap == module and p.role == role) or f"{p.tap}/{p.role}" == role]
    return exact or [p for p in pairs if p.tap == module]


def of_origins(comparison: Comparison) -> Callable[[Pair], bool]:
    """Whether a pair is one of an origin's own."""
    modules = {str(o.get("module")) for o in comparison.origins if not o.get("gap")}
    others = {role for o in comparison.origins if "/" in (role := str(o.get("role")))}
    return lambda p: p.tap in modules or f"{p.tap}/{p.role}" in others


def outcomes(comparison: Comparison) -> list[tuple[str, int]]:
    """(outcome, pairs), which add up to all pairs: where an origin is, a failed pair is one of its own or is what the
    error became further on."""
    c = comparison.counts
    if comparison.origins:
        is_own = of_origins(comparison)
        own = sum(is_own(p) for p in comparison.pairs if p.status == "fail")
        fails = [(f"fail at {count(len(comparison.origins), 'origin')}", own), ("propagated", c.failed - own)]
    else:
        fails = [("fail", c.failed)]
    return [("pass", c.passed), *fails, ("skipped", c.skipped)]


def one_sum(comparison: Comparison) -> str:
    """``2,763 = 2,100 pass + 24 fail at 2 origins + 636 propagated + 3 skipped``."""
    return f"{comparison.counts.total:,} = " + " + ".join(f"{n:,} {what}" for what, n in outcomes(comparison))
