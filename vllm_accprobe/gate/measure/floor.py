"""Whether two servers differ by more than one server differs from itself under other batching.

The problem: log-probabilities differ between two runs of one server, because batches differ; a fixed limit is too wide
for one model and too narrow for the next. The idea: both folders have two passes, of different arrival. If it were
of no consequence which of the two servers answered a pass, then for every prompt golden's and mine's second pass could
change places. That exchanges the distance between the servers (golden's first from mine's second, mine's first from
golden's second) with the distance of each from itself. So the sign of their difference is a coin for each prompt, and
the sign-flip test has a probability without any assumption about the size of rounding.
Not here: the sign-flip test (samples/paired.py), distances (token_gaps.py).

What it tells is "not the same server": honest hardware that rounds in another way differs by more than batching, too.
How much more is told beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from vllm_accprobe.gate.measure.token_gaps import TokenGap, gaps
from vllm_accprobe.gate.samples import paired
from vllm_accprobe.gate.sending.client import Reply
from vllm_accprobe.gate.sending.replies import Sent

LEAST = 6
"""Derived: with fewer prompts no pattern of signs is rarer than 0.05 (2 / 2^5 = 0.06)."""
RATE = 0.05
"""Chosen: as of evaluations (samples/contrast.py)."""
PHASES = ("prefill", "decode")
ONLY = "prompts that only {} has"


class GateError(Exception):
    """One line: two folders that cannot be compared. Exit code 3."""


@dataclass
class Gaps:
    """All compared tokens of one kind of pairs. after: tokens after flips; skipped: prompts, by reason."""

    by_prompt: dict[str, list[TokenGap]] = field(default_factory=dict)
    after: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def tokens(self) -> list[TokenGap]:
        return [t for tokens in self.by_prompt.values() for t in tokens]


@dataclass(frozen=True)
class Cell:
    """Tokens under one condition. n: compared; flips; median, p99, worst, mean: of the gaps; kl: mean, nats;
    golden_self, mine_self: the mean gap of each server against itself there, None where there are no tokens."""

    condition: str
    n: int
    flips: int
    median: float
    p99: float
    worst: float
    kl: float | None
    mean: float
    golden_self: float | None
    mine_self: float | None


@dataclass(frozen=True)
class Gate:
    """What two folders say. across: between the servers; golden_self, mine_self: each against itself. p: of the
    sign-flip test over ``prompts`` prompts, None without a floor;
    times: the mean distance between by the mean distance within; only: the phase that differs where the other does not,
    each at half the rate."""

    across: Gaps
    golden_self: Gaps
    mine_self: Gaps
    cells: tuple[Cell, ...]
    prompts: int
    p: float | None
    times: float | None
    rate: float
    why: str | None
    only: str | None
    notes: tuple[str, ...]

    @property
    def verdict(self) -> str | None:
        """None without a floor."""
        if self.p is None:
            return None
        return "fail" if self.p <= self.rate and (self.times is None or self.times > 1) else "pass"


def compare(golden: Sent, mine: Sent, rate: float = RATE) -> Gate:
    """Raises GateError where no prompt is on both sides."""
    across, golden_self, mine_self = Gaps(), Gaps(), Gaps()
    crossed = _crossed(golden, mine)
    for first, second in crossed or _straight(golden, mine):
        _add(across, first, second)
    if crossed:
        for to, sent in ((golden_self, golden), (mine_self, mine)):
            _add(to, sent.passes[0], sent.passes[1])
    if not across.by_prompt:
        left = ", ".join(f"{n:,} {what}" for what, n in across.skipped.items()) or "a folder has no answers"
        raise GateError(f"nothing could be compared: {left}")
    distances = _distances(across, golden_self, mine_self)
    p: float | None = None
    why: str | None = None
    if not crossed:
        why = "each side needs two passes of the same two arrivals (accprobe send --arrive one --arrive all)"
    elif len(distances) < LEAST:
        why = f"a floor needs {LEAST} prompts, there are {len(distances)}"
    else:
        p = paired.sign_flip(distances[:, 0] - distances[:, 1])
    between, itself = (float(distances[:, i].mean()) for i in (0, 1)) if len(distances) else (0.0, 0.0)
    times = between / itself if itself else None if between else 1.0
    only = None if p is None else _only_phase(across, golden_self, mine_self, rate)
    cells = _cells(across, golden_self, mine_self)
    return Gate(across, golden_self, mine_self, cells, len(distances), p, times, rate, why, only, _notes(golden, mine))


def _crossed(golden: Sent, mine: Sent) -> list[tuple[dict[str, Reply], dict[str, Reply]]]:
    """Golden's first pass with mine's second and the other way round; empty where they have no such passes."""
    words = [[p.get("arrive") for p in side.about["passes"][:2]] for side in (golden, mine)]
    if words[0] != words[1] or len(words[0]) < 2:
        return []
    return [(golden.passes[0], mine.passes[1]), (golden.passes[1], mine.passes[0])]


def _straight(golden: Sent, mine: Sent) -> list[tuple[dict[str, Reply], dict[str, Reply]]]:
    return list(zip(golden.passes, mine.passes, strict=False))


def _add(to: Gaps, golden: dict[str, Reply], mine: dict[str, Reply]) -> None:
    for name, reply in golden.items():
        other = mine.get(name)
        if other is None:
            to.skipped[ONLY.format("golden")] += 1
            continue
        found, after, why = gaps(reply, other)
        to.after += after
        if why is not None:
            to.skipped[why] += 1
        else:
            to.by_prompt.setdefault(name, []).extend(found)
    if alone := len(mine.keys() - golden.keys()):
        to.skipped[ONLY.format("mine")] += alone


def _mean(tokens: list[TokenGap]) -> float | None:
    known = [t.gap for t in tokens if t.gap is not None]
    return sum(known) / len(known) if known else None


def _distances(across: Gaps, golden: Gaps, mine: Gaps) -> np.ndarray:
    """float64 [prompts, 2]: mean gap between the servers and of each with itself, of prompts that have both."""
    each = [(name, golden.by_prompt.get(name, []) + mine.by_prompt.get(name, [])) for name in across.by_prompt]
    both = [(_mean(across.by_prompt[name]), _mean(themselves)) for name, themselves in each]
    return np.array([(a, b) for a, b in both if a is not None and b is not None], np.float64).reshape(-1, 2)


def _only_phase(across: Gaps, golden: Gaps, mine: Gaps, rate: float) -> str | None:
    seen = {}
    for phase in PHASES:
        parts = [_of_phase(gaps_, phase) for gaps_ in (across, golden, mine)]
        distances = _distances(*parts)
        if len(distances) < LEAST:
            return None
        off = distances[:, 0] - distances[:, 1]
        seen[phase] = paired.sign_flip(off) <= rate / len(PHASES) and float(off.mean()) > 0
    found = [phase for phase in PHASES if seen[phase]]
    return found[0] if len(found) == 1 else None


def _of_phase(gaps_: Gaps, phase: str) -> Gaps:
    return Gaps({name: [t for t in tokens if t.phase == phase] for name, tokens in gaps_.by_prompt.items()})


def _cells(across: Gaps, golden: Gaps, mine: Gaps) -> tuple[Cell, ...]:
    """By phase, prompt length, position and prefix hit; conditions that hold for all tokens are not told twice."""
    axes: list[Callable[[TokenGap], str]] = [
        lambda t: "all tokens",
        lambda t: t.phase,
        lambda t: f"prompts of {_power(t.length)} tokens",
        lambda t: f"positions {_power(t.position)}",
        lambda t: "prefix hit" if t.cached else "no prefix hit",
    ]
    tokens, selves = across.tokens, (golden.tokens, mine.tokens)
    cells: list[Cell] = []
    for axis in axes:
        groups: dict[str, list[TokenGap]] = {}
        for t in sorted(tokens, key=lambda t: (t.length, t.ordinal)):
            groups.setdefault(axis(t), []).append(t)
        if cells and len(groups) == 1:
            continue
        for name, of in groups.items():
            cells.append(_cell(name, of, [_mean([t for t in side if axis(t) == name]) for side in selves]))
    return tuple(cells)


def _power(n: int) -> str:
    """``64-127``."""
    low = 1 << max(n.bit_length() - 1, 0)
    return f"{low:,}-{2 * low - 1:,}"


def _cell(name: str, tokens: list[TokenGap], selves: list[float | None]) -> Cell:
    sizes = np.array([t.gap for t in tokens if t.gap is not None] or [np.nan])
    kls = [t.kl for t in tokens if t.kl is not None]
    quantiles = (float(np.median(sizes)), float(np.quantile(sizes, 0.99)), float(sizes.max()))
    kl = sum(kls) / len(kls) if kls else None
    return Cell(name, len(tokens), sum(t.flipped for t in tokens), *quantiles, kl, float(sizes.mean()), *selves)


def _notes(golden: Sent, mine: Sent) -> tuple[str, ...]:
    notes = []
    for name, side in (("golden", golden), ("mine", mine)):
        if not side.about.get("complete"):
            notes.append(f"{name}'s folder is not complete: the same send would go on")
        if resumed := sum(p.get("resumed", 0) for p in side.about["passes"]):
            notes.append(f"{name}'s passes were gone on with {resumed} times: their batches were others then")
    if golden.about.get("prompts") != mine.about.get("prompts"):
        notes.append("the two folders were not sent the same prompts")
    return tuple(notes)
