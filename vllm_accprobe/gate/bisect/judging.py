"""Whether one trial shows the difference that is looked for.

The problem: settings change rounding, so that nearly any two of them differ by a little, and the gate, which is sharp
enough for that, fails; a search would then end at the first setting that rounds in another way. The idea: a trial fails
where the gate fails and its distance from golden is a good part of what the command's own is: the same failure, not any
other, which is what delta debugging asks for [Zeller and Hildebrandt, 3.1].
Not here: the gate's verdict (measure/gating.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_accprobe.gate.measure import floor, gating
from vllm_accprobe.gate.sending.replies import Sent

RATE = gating.RATE
SHARE = 0.5
"""Chosen: of the command's distance. Of three equal faults that add up like noise each has 1 / sqrt(3) of it; other
rounding of a tiny bfloat16 model (block size, operators) had a quarter of a fault's (measured, docs/gate.md)."""
DRAWN = 2.0 / (floor.DRAWS + 1)
"""Derived: the least p that the gate's drawn patterns of signs can give, of one of two passes."""


@dataclass(frozen=True)
class TrialGate:
    """size: root mean square of the gaps of chosen tokens, nats, of the pair of passes where it is largest; a token
    that a side does not list counts as the largest that is listed, at least 1. p: of the gate, 1 without one. n:
    prompts. why: there is no judgement, None where there is."""

    size: float
    p: float
    n: int
    why: str | None = None

    def fails(self, rate: float, least: float) -> bool:
        """Beyond golden's floor, and not less than ``least``."""
        return self.why is None and self.p <= rate and self.size > 0 and self.size >= least


def rate_each(trials: int, prompts: int, rate: float = RATE) -> float:
    """Of one trial, where ``trials`` are expected; not less than the least p that so many prompts can have."""
    return min(rate, max(rate / max(trials, 1), 2.0 * 0.5**prompts, DRAWN))


def judge(golden: Sent, mine: Sent, floors: Sequence[Sent] = ()) -> TrialGate:
    """Two folders of the same two arrivals. floors: servers that are known to be right."""
    try:
        gate = gating.compare(golden, mine, floors, power=False)
    except gating.GateError as e:
        return TrialGate(0.0, 1.0, 0, str(e))
    if gate.p is None:
        return TrialGate(0.0, 1.0, gate.prompts, gate.why)
    return TrialGate(_size(golden, mine), gate.p, gate.prompts)


def _size(golden: Sent, mine: Sent) -> float:
    from vllm_accprobe.gate.measure.token_gaps import gaps

    sizes = []
    for a, b in ((0, 1), (1, 0)):
        known: list[float] = []
        unlisted = 0
        for name, reply in golden.passes[a].items():
            if (other := mine.passes[b].get(name)) is not None:
                found, _, _ = gaps(reply, other)
                known += [t.gap for t in found if t.gap is not None]
                unlisted += sum(t.gap is None for t in found)
        if known or unlisted:
            known += [max([*known, 1.0])] * unlisted
            sizes.append(math.sqrt(sum(g * g for g in known) / len(known)))
    return max(sizes, default=0.0)
