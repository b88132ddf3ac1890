"""How far the policy that trains is from the policy that serves, in the words of reinforcement learning.

The problem: the trainer takes a rollout's tokens for its own samples, and what differs between the two programs
enters every gradient as if it were learning. The idea: the measures that the field reads, over the tokens that the
model chose: p is the trainer's probability of a token, q the server's, r = p / q the importance ratio.

- k1 = -log r and k3 = (r - 1) - log r, means over tokens drawn from q, estimate KL(q || p); k1 without bias and with
  more variance, k3 without bias too and never negative [J. Schulman, Approximating KL divergence, 2020]
- effective sample size (sum r)^2 / sum r^2, as a share of n [L. Kish, Survey Sampling, 1965; A. Kong, 1992]
- PPO's clip range is 1 - 0.2 to 1 + 0.2 [J. Schulman et al., arXiv 1707.06347]
- a sequence's ratio is the product over its tokens; its geometric mean over tokens is GSPO's [C. Zheng et al.,
  arXiv 2507.18071]
- mean exp|log r| is NeMo-RL's token_mult_prob_error; mean and largest |p - q| are verl's rollout_probs_diff
Not here: where the numbers come from (trainer_lines.py, rollout.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from vllm_accprobe.gate.trainer.trainer_lines import Trained, finite

LIMIT = 1.05
"""Chosen, by NeMo-RL: it plots each step whose token_mult_prob_error is above it."""
CLIP = (0.8, 1.2)
HALF = (0.5, 2.0)
QUANTILES = (0.001, 0.01, 0.5, 0.99, 0.999)
WORST = 10


class RatioError(Exception):
    """One line: nothing could be compared. Exit code 3."""


@dataclass(frozen=True)
class Scored:
    """What a server says of one sequence. ids: the whole; logprobs: of each, None where it says nothing."""

    ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]


@dataclass(frozen=True)
class Span:
    """Tokens of one kind. n; mean, worst: of |log r|; k1, k3; ess: share of n; beyond: share outside [1/2, 2]; clipped:
    share outside PPO's range."""

    where: str
    n: int
    mean: float
    worst: float
    k1: float
    k3: float
    ess: float
    beyond: float
    clipped: float


@dataclass(frozen=True)
class Ratios:
    """spans: all tokens, then by how many tokens of the answer stand before. quantiles: of r. sequences: how many;
    product, geometric: quantiles of their ratios' logarithms and of their geometric means; sequence_ess: share.
    mult: mean exp|log r|; prob_mean, prob_worst: of |p - q|. worst: (sequence, token of the answer, log p, log q).
    nonfinite: tokens of which a side has no finite number. left_out: by reason."""

    spans: tuple[Span, ...]
    quantiles: tuple[float, ...]
    sequences: int
    product: tuple[float, ...]
    geometric: tuple[float, ...]
    sequence_ess: float
    mult: float
    prob_mean: float
    prob_worst: float
    worst: tuple[tuple[str, int, float, float], ...]
    nonfinite: int
    how: str
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        return "fail" if self.nonfinite or self.mult > LIMIT else "pass"


def compare(golden: Trained, mine: Mapping[str, Scored], how: str = "", left_out: Counter[str] | None = None) -> Ratios:
    """golden: the trainer's; mine: the server's, by name. Raises RatioError."""
    left = Counter(golden.left_out) + (left_out or Counter())
    rows: list[tuple[int, int, float, float]] = []
    names = [line.name for line in golden.lines]
    nonfinite = 0
    for k, line in enumerate(golden.lines):
        scored = mine.get(line.name)
        if scored is None:
            left["sequences that the server did not answer"] += not left_out
            continue
        same = min(len(line.ids), len(scored.ids))
        same = next((i for i in range(same) if line.ids[i] != scored.ids[i]), same)
        if same <= line.start:
            left["sequences whose prompt the server read as other tokens"] += 1
            continue
        wanted = [i for i, v in enumerate(line.logprobs) if v is not None]
        left["tokens after the first that the server did not write"] += sum(i >= same for i in wanted)
        for i in wanted:
            if i >= same:
                break
            ours, theirs = line.logprobs[i], scored.logprobs[i]
            if theirs is None:
                left["tokens of which the server said nothing"] += 1
            elif finite(ours) and finite(theirs):
                rows.append((k, i - line.start, float(ours or 0.0), theirs))
            else:
                nonfinite += 1
    if not rows and not nonfinite:
        said = ", ".join(f"{n:,} {what}" for what, n in left.items() if n) or "no token is on both sides"
        raise RatioError(f"nothing could be compared: {said}")
    return _measured(rows, names, nonfinite, how, +left)


def _measured(
    rows: list[tuple[int, int, float, float]], names: list[str], nonfinite: int, how: str, left: Counter[str]
) -> Ratios:
    table = np.array(rows, np.float64).reshape(-1, 4)
    sequence, ordinal, p, q = table.T
    log_r = p - q
    spans = [_span("all tokens", log_r)] if len(rows) else []
    powers = np.frexp(np.maximum(ordinal, 0))[1]  # 0 for the first token, then 1, 2-3, 4-7, ...
    for power in np.unique(powers):
        low, high = (0, 0) if power == 0 else (2 ** (int(power) - 1), 2 ** int(power) - 1)
        where = f"answer's token {low:,}" if low == high else f"answer's tokens {low:,}-{high:,}"
        spans.append(_span(where, log_r[powers == power]))
    each = [log_r[sequence == k] for k in np.unique(sequence)]
    sums = np.array([v.sum() for v in each])
    far = np.argsort(-np.abs(log_r), kind="stable")[:WORST]
    worst = tuple((names[int(sequence[i])], int(ordinal[i]), float(p[i]), float(q[i])) for i in far)
    gap = np.abs(np.exp(p) - np.exp(q))
    return Ratios(
        tuple(spans), _quantiles(np.exp(log_r)), len(each), _quantiles(sums),
        _quantiles(np.exp(np.array([v.mean() for v in each]))), effective(sums),
        float(np.exp(np.abs(log_r)).mean()) if len(rows) else 1.0, float(gap.mean()) if len(rows) else 0.0,
        float(gap.max(initial=0.0)), worst, nonfinite, how, dict(left),
    )  # fmt: skip


def _quantiles(values: np.ndarray) -> tuple[float, ...]:
    return tuple(float(v) for v in np.quantile(values, QUANTILES)) if len(values) else ()


def _span(where: str, log_r: np.ndarray) -> Span:
    r = np.exp(log_r)
    size = np.abs(log_r)
    return Span(
        where, len(r), float(size.mean()), float(size.max()), float(-log_r.mean()) + 0.0,
        float((np.expm1(log_r) - log_r).mean()), effective(log_r),
        float(((r < HALF[0]) | (r > HALF[1])).mean()), float(((r < CLIP[0]) | (r > CLIP[1])).mean()),
    )  # fmt: skip


def effective(log_w: np.ndarray) -> float:
    """(sum w)^2 / (n sum w^2) of weights given by their logarithms, which are shifted so that nothing overflows; 1.0
    for equal weights, 1/n where one has all."""
    if not len(log_w):
        return 1.0
    w = np.exp(log_w - log_w.max())
    return float(w.sum() ** 2 / (len(w) * (w * w).sum()))
