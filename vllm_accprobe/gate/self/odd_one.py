"""Which path of one server gives other numbers than rounding explains.

The problem: there is no second machine to say what is right, and other batch shapes round in other ways, by an amount
that depends on the model. The idea: the paths measure each other. What must be the same to the bit is compared as bits.
Of the others each has an allowance: a few times what the *other* paths differ in the mean (their median, so that one
odd path does not set it), and not less than a few steps of the logits' own grid. Three questions are asked, each by a
binomial test, with no assumption about the shape of rounding: whether more than half of the prompts lie beyond it in
the mean; of each prompt, whether more than half of its tokens do, because some faults need a long prompt; and whether
first tokens are far beyond, because what is wrong in a prompt's last rows shows there, and little later.
Not here: how a server is asked (salted.py), the grid (logit_grid.py), lines (report/servers).

What no path can show: a fault that is the same in all of them, say from a position on. That takes a second server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from scipy import special

from vllm_accprobe.gate.measure.token_gaps import gaps
from vllm_accprobe.gate.self.logit_grid import step
from vllm_accprobe.gate.self.own_paths import BASE, EQUAL, OwnPath
from vllm_accprobe.gate.sending.client import Reply

TIMES = 4.0
"""Chosen: how many times what the others differ in the mean is still rounding."""
STEPS = 2.0
"""Measured: a tiny Qwen2 in bfloat16 on the CPU, compiled against eager, is 0.67 steps of its logits apart in the mean;
three times that. Its other paths give the same bits."""
FAR = 6.0
"""Measured: of 288 tokens of that pair the worst is 3.6 steps apart; 6 are far beyond."""
FAR_RATE = 0.01
"""Derived: none of 288 honest tokens is so far apart, so with 95% at most 3 / 288 are (the rule of three)."""
RATE = 0.05
"""Chosen: as of two servers."""
NO_HIT = "prompts of which nothing was found in the cache"
NOT_FRESH = "prompts that should have been fresh and were in the cache"

Replies = Mapping[str, Reply]


@dataclass
class Distance:
    """Between two paths: by prompt gap, logits' step and ordinal of each token that both have read alike. unequal:
    prompts whose answers are not the same to the bit; left_out: prompts, by reason."""

    by_prompt: dict[str, np.ndarray] = field(default_factory=dict)
    flips: int = 0
    unequal: list[str] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def all(self) -> np.ndarray:
        """float64 [tokens, 3]: gap, step, ordinal."""
        return np.concatenate([np.zeros((0, 3)), *self.by_prompt.values()])

    @property
    def usual(self) -> tuple[float, float]:
        """The mean gap, and what one in a hundred is beyond."""
        sizes = self.all[:, 0]
        return (float(sizes.mean()), float(np.quantile(sizes, 1 - FAR_RATE))) if len(sizes) else (0.0, 0.0)


@dataclass(frozen=True)
class PathFinding:
    """What one way showed. tokens, prompts: compared; flips: tokens that are not the same; unequal: prompts that are
    not the same to the bit. mean, worst: gaps in nats; allowance: of a token, in the mean; p: that an equal or honestly
    rounding way has so many tokens beyond it, over all prompts or in one of them, times how often it was asked; odd:
    prompts beyond, worst first. ok: None where nothing was compared. why: the reason, for people."""

    way: OwnPath
    ok: bool | None
    why: str
    prompts: int = 0
    tokens: int = 0
    flips: int = 0
    unequal: int = 0
    mean: float = 0.0
    worst: float = 0.0
    allowance: float | None = None
    p: float | None = None
    odd: tuple[str, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class SelfGate:
    """findings: a way each; odd: the names of those that are not ok; agree: whether these agree with one another, so
    that what they were compared with may be the odd one. None of both where fewer than two are odd."""

    findings: tuple[PathFinding, ...]
    odd: tuple[str, ...]
    agree: bool | None
    rate: float
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str | None:
        """None where nothing was compared."""
        known = [f for f in self.findings if f.ok is not None]
        return None if not known else "fail" if self.odd else "pass"


def judge(
    paths: list[OwnPath], answers: Mapping[str, Replies], rate: float = RATE, missing: Mapping[str, str] | None = None,
    notes: tuple[str, ...] = (),
) -> SelfGate:  # fmt: skip
    """answers: by the way's name. missing: why a way has none."""
    asked = [w for w in paths if w.name != BASE]
    distances = {
        w.name: distance(answers[w.against], answers[w.name], w)
        for w in asked
        if w.name in answers and w.against in answers
    }
    noisy = [w.name for w in asked if w.name in distances and w.rule != EQUAL and distances[w.name].by_prompt]
    findings = []
    for w in asked:
        d = distances.get(w.name)
        if d is None or not d.by_prompt:
            why = (missing or {}).get(w.name, "no prompt could be compared")
            findings.append(PathFinding(w, None, why, left_out={} if d is None else dict(d.left_out)))
            continue
        others = np.array([distances[name].usual for name in noisy if name != w.name]).reshape(-1, 2)
        floor = (float(np.median(others[:, 0])), float(np.median(others[:, 1]))) if len(others) else (0.0, 0.0)
        findings.append(_judged(w, d, floor, rate / max(len(distances), 1)))
    odd = tuple(f.way.name for f in findings if f.ok is False)
    return SelfGate(tuple(findings), odd, _agree(odd, answers, findings, rate), rate, notes)


def distance(golden: Replies, mine: Replies, way: OwnPath) -> Distance:
    """Token by token up to the first that is not the same; prompts that did not meet the cache as they should are left
    out, where the server tells."""
    found = Distance()
    for name, reply in golden.items():
        other = mine.get(name)
        if other is None:
            continue
        if way.before and other.cached == 0:
            found.left_out[NO_HIT] += 1
            continue
        if not way.before and not way.scored and other.cached:
            found.left_out[NOT_FRESH] += 1
            continue
        # Decoded, forced and scored tokens are the same text here: which of them they are is what is asked.
        tokens, _, why = gaps(replace(reply, forced=None), replace(other, forced=None))
        rows = [
            (t.gap, step(reply.top[t.ordinal][1]), t.ordinal)
            for t in tokens
            if t.gap is not None and reply.top is not None
        ]
        if why is not None or not rows:
            found.left_out[why or "prompts without log-probabilities of the same tokens"] += 1
            continue
        found.by_prompt[name] = np.array(rows, np.float64)
        found.flips += sum(_other_best(reply, other, t.ordinal) for t in tokens)
        if (reply.token_ids, reply.logprobs, reply.top) != (other.token_ids, other.logprobs, other.top):
            found.unequal.append(name)
    return found


def _other_best(reply: Reply, other: Reply, k: int) -> bool:
    """Whether the other path holds another token than the chosen one for more likely, forced along it or not."""
    ids, values = (other.top or [])[k]
    token = (reply.token_ids or [])[k]
    return ids is None or token not in ids or values[ids.index(token)] < values[0]


def _judged(way: OwnPath, d: Distance, floor: tuple[float, float], rate: float) -> PathFinding:
    rows = d.all
    p, odd = beyond(d, floor)
    allowance = max(TIMES * floor[0], STEPS * float(rows[:, 1].mean()))
    unequal = len(d.unequal)
    if way.rule == EQUAL and unequal and not way.restarts:
        ok, why = False, "the same request in the same batch must give the same bits"
        odd = tuple(d.unequal)
    elif p <= rate:
        ok, why = False, "further apart than rounding explains"
    elif way.scored or unequal:
        ok, why = True, "within rounding"
        if way.rule == EQUAL:
            why = "not the same bits, within rounding: another start may have chosen other kernels"
        elif not rows[:, 0].any():
            why = "the same numbers"
    else:
        ok, why = True, "the same bits"
    return PathFinding(
        way, ok, why, len(d.by_prompt), len(rows), d.flips, unequal, float(rows[:, 0].mean()), float(rows[:, 0].max()),
        None if way.rule == EQUAL and not way.restarts else allowance, p, odd if not ok else (), dict(d.left_out),
    )  # fmt: skip


def beyond(d: Distance, floor: tuple[float, float]) -> tuple[float, tuple[str, ...]]:
    """(p, the prompts that are beyond, worst first). floor: the others' usual distances. p: of three questions, each a
    binomial test [of signs: W. Dixon, A. Mood, J. Am. Stat. Assoc. 41 (1946) 557], the least, times how often was
    asked."""
    means, firsts, tokens_of = [], [], []
    for name, rows in d.by_prompt.items():
        sizes, steps, ordinals = rows.T
        over = sizes > np.maximum(TIMES * floor[0], STEPS * steps)
        means.append(bool(sizes.mean() > max(TIMES * floor[0], STEPS * float(steps.mean()))))
        far = bool((sizes > np.maximum(TIMES * floor[1], FAR * steps))[ordinals == 0].any())
        firsts.append(far)
        p = _tail(int(over.sum()), len(over))
        tokens_of.append((p, -float(sizes.max()), name, means[-1] or far))
    each = min(p for p, *_ in tokens_of) * len(tokens_of)
    least = min(_tail(sum(means), len(means)), each, _tail(sum(firsts), len(firsts), FAR_RATE))
    return min(1.0, 3.0 * least), tuple(name for _, _, name, odd in sorted(tokens_of) if odd)


def _tail(k: int, n: int, q: float = 0.5) -> float:
    """P(at least k of n), each with q."""
    return float(special.bdtrc(k - 1, n, q)) if k > 0 else 1.0


def _agree(
    odd: tuple[str, ...], answers: Mapping[str, Replies], findings: list[PathFinding], rate: float
) -> bool | None:
    """Whether the odd ways give the same as one another, within the widest of their allowances."""
    ways = [f.way for f in findings if f.way.name in odd]
    if len(ways) < 2 or any(w.against != BASE for w in ways):
        return None
    widest = max(f.allowance or 0.0 for f in findings if f.way.name in odd) / TIMES
    pairs = [(a, b) for i, a in enumerate(ways) for b in ways[i + 1 :]]
    for a, b in pairs:
        d = distance(answers[a.name], answers[b.name], OwnPath("", "", before=b.before, scored=b.scored))
        if not d.by_prompt or beyond(d, (widest, widest))[0] <= rate / len(pairs):
            return False
    return True
