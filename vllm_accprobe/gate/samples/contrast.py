"""Whether two runs of an evaluation differ beyond chance, metric by metric, and on which questions.

The problem: an evaluation has many tasks, filters and metrics, and the more of them are looked at, the surer one
differs by chance. The idea: each is tested for itself (paired.py), and the rate of false alarms, which is that of the
whole comparison, is divided over them by Holm's rule. Questions that flipped are told whatever the verdict is: equally
many lost and won are no drop, and still not the same numbers.
Not here: sentences (report/evaluation.py).
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_accprobe.gate.samples import paired
from vllm_accprobe.gate.samples.answers import Answer, Prompts
from vllm_accprobe.gate.samples.match import Matched

RATE = 0.05
"""Chosen: of false alarms in a whole comparison, the habit of the field [R. Fisher, Statistical Methods for Research
Workers, 1925, sec. 12]."""
_TOGETHER = re.compile(r"all \d+ tasks")
WORST = 50
"""Chosen: questions that are given as prompts where a metric knows no right or wrong."""
Known = dict[tuple[str, str, str], tuple[np.ndarray, int]]
"""By (task, filter, metric): float64 [n, 2] of golden and mine, and how many pairs have no number."""
NO_NUMBER = "values that are no finite numbers"


@dataclass(frozen=True)
class Contrast:
    """One metric of one task under one filter, over n pairs.

    binary: all values are 0 or 1. golden, mine: means. lost, won: flips, of scores how many are lower and higher.
    difference: mine - golden, in low .. high with paired.LEVEL. beyond: differs beyond chance. needed: pairs that would
    show this difference; smallest: the least that n pairs show, each with paired.POWER; None where there is none.
    left_out: pairs without a number on either side.
    """

    task: str
    way: str
    metric: str
    binary: bool
    n: int
    golden: float
    mine: float
    lost: int
    won: int
    difference: float
    low: float
    high: float
    p: float
    beyond: bool
    needed: int | None
    smallest: float | None
    left_out: int

    @property
    def together(self) -> bool:
        """Whether it is of several tasks."""
        return _TOGETHER.fullmatch(self.task) is not None


@dataclass(frozen=True)
class FlippedAnswer:
    """A question whose answer is not worth the same on both sides. lost, won: the metrics (with their filter) by
    which. size: the largest difference of a score."""

    golden: Answer
    mine: Answer
    lost: tuple[str, ...]
    won: tuple[str, ...]
    size: float


@dataclass(frozen=True)
class Evaluation:
    """What two runs say together. matched: the pairs and what is none; flips: by task, as golden has them."""

    matched: Matched
    contrasts: tuple[Contrast, ...]
    flips: tuple[FlippedAnswer, ...]
    no_numbers: tuple[tuple[str, int], ...]
    rate: float

    @property
    def verdict(self) -> str:
        return "fail" if any(c.beyond for c in self.contrasts) else "pass"


def evaluate(matched: Matched, rate: float = RATE) -> Evaluation:
    """Tests every metric that both sides have. No contrasts where nothing is paired, or no metric has numbers."""
    values: dict[tuple[str, str, str], list[tuple[float | None, float | None]]] = defaultdict(list)
    for a, b in matched.pairs:
        for metric in a.scores.keys() & b.scores.keys():
            values[a.task, a.way, metric].append((a.scores[metric], b.scores[metric]))
    known: Known = {}
    without = Counter[str]()
    for where, several in sorted(values.items()):
        numbers = [(x, y) for x, y in several if x is not None and y is not None]
        if numbers:
            known[where] = (np.array(numbers, np.float64), len(several) - len(numbers))
        else:
            without[label(*where)] += len(several)
    known |= _together(known)
    level = rate / max(len(known), 1)
    found = [_contrast(where, scores, left, level) for where, (scores, left) in known.items()]
    beyond = paired.holm([c["p"] for c in found], rate)
    contrasts = tuple(Contrast(**c, beyond=b) for c, b in zip(found, beyond, strict=True))
    binary = {(c.task, c.way, c.metric) for c in contrasts if c.binary}
    return Evaluation(matched, contrasts, tuple(_flips(matched.pairs, binary)), tuple(without.items()), rate)


def _together(known: Known) -> Known:
    """A metric of right or wrong over all tasks that have it, where there are several: a drop that is spread over the
    57 tasks of MMLU shows in none of them."""
    groups: dict[tuple[str, str], list[tuple[np.ndarray, int]]] = defaultdict(list)
    for (_, way, metric), found in known.items():
        if _binary(found[0]):
            groups[way, metric].append(found)
    several = {where: found for where, found in groups.items() if len(found) > 1}
    return {
        (f"all {len(found)} tasks", *where): (np.concatenate([s for s, _ in found]), sum(n for _, n in found))
        for where, found in several.items()
    }


def _binary(scores: np.ndarray) -> bool:
    return bool(np.isin(scores, (0.0, 1.0)).all())


def label(task: str, way: str, metric: str) -> str:
    """``gsm8k exact_match (strict-match)``."""
    return " ".join(filter(None, (task, metric))) + (f" ({way})" if way else "")


def _contrast(where: tuple[str, str, str], scores: np.ndarray, left: int, level: float) -> dict[str, Any]:
    """Of float64 [n, 2]: golden, mine."""
    n, d = len(scores), scores[:, 1] - scores[:, 0]
    lost, won = int((d < 0).sum()), int((d > 0).sum())
    binary = _binary(scores)
    if binary:
        difference, flipping = (won - lost) / n, (won + lost) / n
        p, (low, high) = paired.mcnemar(lost, won), paired.tango(lost, won, n)
        needed, smallest = paired.needed(flipping, difference, level), paired.smallest(flipping, n, level)
    else:
        difference = float(d.mean())
        p, (low, high) = paired.sign_flip(d), paired.mean_interval(d)
        needed, smallest = paired.needed_mean(d, level), None
    golden, mine = (float(scores[:, i].mean()) for i in (0, 1))
    task, way, metric = where
    return {"task": task, "way": way, "metric": metric, "binary": binary, "n": n, "golden": golden, "mine": mine,
            "lost": lost, "won": won, "difference": difference, "low": low, "high": high, "p": p, "needed": needed,
            "smallest": smallest, "left_out": left}  # fmt: skip


def _flips(pairs: Iterable[tuple[Answer, Answer]], binary: set[tuple[str, str, str]]) -> list[FlippedAnswer]:
    """One for each pair that flipped by a metric of right or wrong; of tasks that have none, the WORST by any score."""
    tasks = {task for task, _, _ in binary}
    found: list[FlippedAnswer] = []
    scored: list[FlippedAnswer] = []
    for a, b in pairs:
        off = {}
        for metric in a.scores.keys() & b.scores.keys():
            x, y = a.scores[metric], b.scores[metric]
            if x is not None and y is not None and x != y:
                off[metric] = y - x
        counted = {m: v for m, v in off.items() if (a.task, a.way, m) in binary or a.task not in tasks}
        if not counted:
            continue
        names = {m: f"{m} ({a.way})" if a.way else m for m in sorted(counted)}
        lost, won = (tuple(names[m] for m in names if (counted[m] < 0) == down) for down in (True, False))
        flip = FlippedAnswer(a, b, lost, won, max(map(abs, counted.values())))
        (found if a.task in tasks else scored).append(flip)
    scored.sort(key=lambda flip: -flip.size)
    return found + scored[:WORST]


def prompts(flips: Iterable[FlippedAnswer], of: Prompts) -> tuple[list[dict[str, Any]], int]:
    """(lines for `accprobe send`, how many questions have no prompt in the files). A question that flipped under
    several filters is one. ids are printable ASCII: they become the requests' ids."""
    lines: dict[str, dict[str, Any]] = {}
    without, seen = 0, set()
    for flip in flips:
        a = flip.golden
        if (a.task, a.key, a.name) in seen:
            continue
        seen.add((a.task, a.key, a.name))
        asked = of(a.place)
        without += not asked
        for k, line in enumerate(asked):
            base = "-".join(filter(None, (a.task, a.name, str(k) if len(asked) > 1 else "")))
            name = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in base)[:120]
            unique, again = name, 1
            while unique in lines:
                again += 1
                unique = f"{name}.{again}"
            lines[unique] = {"id": unique, **line}
    return list(lines.values()), without


def to_json(e: Evaluation) -> dict[str, Any]:
    """For programs; infinite ends of intervals are null."""
    m = e.matched

    def sides(count: Counter[tuple[str, str]]) -> list[dict[str, Any]]:
        return [{"task": t, "filter": w, "questions": n} for (t, w), n in sorted(count.items())]

    def plain(c: Contrast) -> dict[str, Any]:
        fields = {k: v for k, v in vars(c).items() if k != "way"}
        fields = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
        return {"task": c.task, "filter": c.way, **fields}

    return {
        "schema": 1,
        "verdict": e.verdict,
        "false_alarm_rate": e.rate,
        "pairs": len(m.pairs),
        "contrasts": [plain(c) for c in e.contrasts],
        "only_golden": sides(m.only_golden),
        "only_mine": sides(m.only_mine),
        "left_out": {**m.left_out, **{f"{NO_NUMBER}: {name}": n for name, n in e.no_numbers}},
        "other_prompts": m.other_prompts,
        "other_responses": m.other_responses,
        "notes": m.notes,
        "flipped": [
            {"task": f.golden.task, "question": f.golden.name, "lost": list(f.lost), "won": list(f.won)}
            for f in e.flips
        ],
    }
