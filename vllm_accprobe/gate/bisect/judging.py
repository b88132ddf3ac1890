"""Whether one trial shows the difference that is looked for.

The problem: settings change rounding, so that nearly any two of them differ by a little, and a test that is sharp
enough finds that; and a fault that only prefix hits or full batches show lies in one pass of a folder, where a
server's distance from itself is as large as its distance from golden. The idea: a trial fails where golden's and its
answers differ beyond what golden differs from itself (each pass is held against golden's other pass, and each against
its own), and where that is a good part of what the bad command differs by: the same failure, not any other [Zeller
and Hildebrandt ask the same]. Not here: distances of tokens (measure/token_gaps.py), the test for two servers of
which neither is bad (measure/floor.py).

The test: had mine's pass come from golden, golden's own pass of that arrival and mine's could change places, prompt by
prompt; that exchanges d(g0, m1) and d(g0, g1). The signs of their differences are coins. One-sided: mine must be the
farther. Both crossings are tested, at half the rate each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from vllm_accprobe.gate.measure.token_gaps import TokenGap, gaps
from vllm_accprobe.gate.samples import paired
from vllm_accprobe.gate.sending.replies import Sent

RATE = 0.05
"""Chosen: as of evaluations (samples/contrast.py), of a whole bisection: `rate_each` divides it."""
SHARE = 0.5
"""Chosen: of the bad command's distance. Of three equal faults that add up like noise each has 1 / sqrt(3) of it; other
rounding of a tiny bfloat16 model (block size, operators) had a quarter of a fault's (measured, docs/bisect.md)."""
LEAST = 6
"""Derived: with fewer prompts no pattern of signs is rarer than 1/32, and two crossings share 0.05."""


@dataclass(frozen=True)
class Judged:
    """size: root mean square of the gaps of chosen tokens, nats, of the pass where it is largest; a token that golden
    chose and mine does not list counts as the largest that is listed. p: of the sharper crossing, 1 where nothing
    differs. n: prompts. why: there is no judgement, None where there is."""

    size: float
    p: float
    n: int
    why: str | None = None

    def fails(self, rate: float, least: float) -> bool:
        """Beyond golden's floor, and not less than ``least``."""
        return self.why is None and self.p <= rate and self.size > 0 and self.size >= least


def rate_each(trials: int, prompts: int, rate: float = RATE) -> float:
    """Of one trial, where ``trials`` are expected; not less than the least p that so many prompts can have."""
    return max(rate / max(trials, 1), 2.0 * 0.5**prompts)


def judge(golden: Sent, mine: Sent) -> Judged:
    """Two folders of the same two arrivals."""
    if len(golden.passes) < 2 or len(mine.passes) < 2:
        return Judged(0.0, 1.0, 0, "each side needs two passes (accprobe send --arrive one --arrive all)")
    ps: list[float] = []
    sizes: list[float] = []
    count, why = 0, "a side has no answers"
    for a, b in ((0, 1), (1, 0)):
        off: list[float] = []
        squares: list[float] = []
        for name, reply in golden.passes[a].items():
            other, itself = mine.passes[b].get(name), golden.passes[b].get(name)
            if other is None or itself is None:
                continue
            found, _, reason = gaps(reply, other)
            own, _, _ = gaps(reply, itself)
            if not found or not own:
                why = reason or why
                continue
            across, floor = _squares(found), _squares(own)
            squares += across
            off.append(math.sqrt(sum(across) / len(across)) - math.sqrt(sum(floor) / len(floor)))
        if len(off) < LEAST:
            continue
        count = max(count, len(off))
        sizes.append(math.sqrt(sum(squares) / len(squares)))
        ps.append(_greater(np.array(off)))
    if not ps:
        return Judged(0.0, 1.0, count, f"fewer than {LEAST} prompts could be compared: {why}")
    return Judged(max(sizes), min(1.0, 2.0 * min(ps)), count)


def _squares(tokens: list[TokenGap]) -> list[float]:
    known = [t.gap for t in tokens if t.gap is not None]
    far = max([*known, 1.0])
    return [(far if t.gap is None else t.gap) ** 2 for t in tokens]


def _greater(off: np.ndarray) -> float:
    """One-sided p of the sign-flip test: that the mean is above 0."""
    if not np.any(off):
        return 1.0
    two = paired.sign_flip(off)
    return two / 2 if float(off.mean()) > 0 else 1.0 - two / 2
