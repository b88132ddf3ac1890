"""What a dig found, as lines: what was captured, whether the fault showed, the culprit, and what to type next.

Not here: the facts (gate/dig/culprit.py), sentences about an origin that compare's reports share (report/tiers.py).
"""

from __future__ import annotations

import re

from vllm_accprobe.gate.dig.choose import DigPlan
from vllm_accprobe.gate.dig.culprit import Dug
from vllm_accprobe.report import facts, tiers
from vllm_accprobe.report.text import count, num, safe

_SHOWN = 4
"""Modules of a gap that a line names."""


def planned(plan: DigPlan) -> list[str]:
    """What is captured."""
    t = plan.target
    word = plan.words[-1]
    found = [
        f"dig: token {t.ordinal} of {safe(t.name)} (position {t.position:,}, pass {t.pass_index}, {safe(word)}), "
        f"{num(t.gap)} nats apart"
    ]
    for window in plan.windows:
        tokens = f"{window.first}-{window.last}" if window.last > window.first else str(window.first)
        names = ", ".join(safe(name) for name in window.requests)
        found.append(f"  captured: {names}; tokens {tokens}, at most {count(window.rows, 'row')}, every module")
    return [*found, *(f"  not captured: {what}" for what in plan.left)]


def lines(dug: Dug) -> list[str]:
    """The end of a dig."""
    target = dug.plan.target
    found = []
    if dug.gap is not None:
        found.append(f"  the token's gap: {num(target.gap)} nats in the gate, {num(dug.gap)} while captured")
    if dug.shows is False:
        found.append(f"  THE DIFFERENCE DID NOT SHOW while captured{why(dug)}")
    if dug.origin is None:
        found.append("no culprit: " + nothing(dug))
    else:
        found += culprit(dug)
    return [*found, "look further:", *(f"  {line}" for line in dug.look)]


def why(dug: Dug) -> str:
    if dug.eager:
        return (": the engine was made eager for it; where the fault is one of compiled code or captured graphs, put "
                "VLLM_ACCPROBE_GRAPHS=1 in front of both commands")  # fmt: skip
    return ": it needs a batch or a moment that did not come again"


def nothing(dug: Dug) -> str:
    if dug.verdict == "pass":
        return "in the captured rows every module is the same within rounding"
    return "the captured rows differ, and no module is beyond its floor by itself (compare's report says where)"


def culprit(dug: Dug) -> list[str]:
    """The module, its layer, the token, and how much it is above rounding."""
    assert dug.origin is not None
    origin = dug.origin
    module = facts.tap_of(origin)
    layer = re.search(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.|$)", module)
    at = [f"layer {layer[1]}"] if layer else []
    if dug.token is not None:
        name, index, ordinal = dug.token
        at.append(f"token {ordinal} of {safe(name)} (position {origin['position']}, pass {index})")
    elif origin.get("position") is not None:
        at.append(f"position {origin['position']}")
    found = [f"culprit: {facts.origin_title(origin)}{''.join(f', {x}' for x in at)}"]
    above = tiers.sentence(origin)
    sizes = f"created error {num(tiers.origin_size(origin))}, honest rounding {num(origin.get('floor'))}"
    found.append("  " + "; ".join(x for x in (above, sizes, tiers.layers(origin), facts.shape(origin)) if x))
    if gap := facts.gap_of(origin):
        found.append(f"  not seen there: {', '.join(safe(m) for m in gap['contains'][:_SHOWN])}")
    if dug.others:
        found.append(f"  {count(dug.others, 'other independent origin')}, in the comparison's report")
    return found
