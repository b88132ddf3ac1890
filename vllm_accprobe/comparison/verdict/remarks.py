"""What is said before the verdict: rows that became NaN, rows that went to other experts, modules with other constants.

The problem: a step from numbers to NaN, or a choice that nobody could check, is lost among thousands of pairs. The
idea: each is counted where it is judged, and said once, in a note, which every report puts first.
Not here: the other notes (messages.py), the counting (judge/origins.py, judge/routing.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from vllm_accprobe.comparison.pair import counted
from vllm_accprobe.judge.routing import Rerouted

_NAMED = 3


def remarks(origins: Sequence[Mapping[str, Any]], rerouted: Rerouted) -> list[str]:
    """The notes. origins: of compare.json."""
    return [*nonfinite_steps(origins), *choices(rerouted)]


def nonfinite_steps(origins: Sequence[Mapping[str, Any]]) -> list[str]:
    """How many operators make NaN or infinity of numbers, and in how many rows."""
    found = [(o["module"], o["nonfinite"]) for o in origins if o.get("nonfinite")]
    if not found:
        return []
    rows = sum(n for _, n in found)
    which = ", ".join(f"{tap} ({n})" for tap, n in found[:_NAMED])
    which += f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    steps = "1 operator turns" if len(found) == 1 else f"{len(found)} operators turn"
    return [f"{steps} finite inputs into NaN or infinity, in {counted(rows, 'row')}: {which}"]


def choices(rerouted: Rerouted) -> list[str]:
    """What must be known of chosen experts: wrong choices, and those that no margin shows to be right or wrong."""
    out = []
    if rerouted.wrong:
        why = "mine leaves an expert to which its own router gives a clearly higher logit"
        out.append(f"wrong experts are chosen in {counted(rerouted.wrong, 'row')}: {why}")
    if rerouted.unruled:
        why = "golden itself does not take its highest logits (groups, a bias), so no margin shows a near tie"
        out.append(f"{counted(rerouted.unruled, 'row')} went to other experts and are not judged from there on: {why}")
    if rerouted.unknown:
        why = "without the router's logits in both dumps nothing shows a near tie; capture the router (gate), too"
        out.append(f"{counted(rerouted.unknown, 'row')} went to other experts, which counts as an error: {why}")
    return out


def unseen_routing(routers: Sequence[str], origins: int) -> list[str]:
    """What must be known of mixtures of experts whose routing is not in both dumps. origins: those it may explain."""
    if not routers or not origins:
        return []
    what = "an origin is" if origins == 1 else f"{origins} origins are"
    which = routers[0] + (f" and {len(routers) - 1} more" if len(routers) > 1 else "")
    return [
        f"{what} no proof: which experts rows went to is not known ({which}), and one that a near tie sends elsewhere "
        "differs as much; capture the router's logits (gate) in both, for compiled graphs without "
        "VLLM_ACCPROBE_GRAPH_MB=0"
    ]


def other_settings(settings: Mapping[str, str], origins: Collection[str]) -> list[str]:
    """Modules that were built with other constants, which nothing that was compared can show. settings:
    constants_differ.differing's; origins: the taps whose constants are origins."""
    left = {tap: said for tap, said in settings.items() if tap not in origins}
    if not left:
        return []
    first, said = next(iter(left.items()))
    which = "1 module was" if len(left) == 1 else f"{len(left)} modules were, each,"
    return [
        f"{which} built with another constant, and what it computes is equal or was not compared: {first}: {said}"
    ]
