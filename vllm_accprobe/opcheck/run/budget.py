"""Which calls of two dumps are replayed, and which of their rows, where there is not the time for all.

The problem: a replay of a large pair takes hours, and a verdict should come in a minute; what is left out cannot be
acquitted, and what is not examined cannot be found. The idea: what a call costs follows from its shapes (elements, rows
times weights, rows times what attention reads) and from how fast this machine is, which is measured in a
hundredth of a second. So the plan is made in advance, in stretches of some rows of a step, of mine with the same rows
of golden, because both are needed: what the comparison suspects and what lies inside it; modules whose constants
differ; the pairs that failed, the worst first; then every tap, in stretches that bring in both phases, ends of chunks,
sizes of batches, late positions and each request; then more. The first three have a share of the time each, so that
every tap is reached. Each tap is checked once, with all rows that were chosen for it, because a weight is read once and
statistics are of all rows together; they are of the rows that were drawn for all taps alike, whatever their errors are.
What a comparison has not said yet is not waited for where everything fits. What is still left when the time is not
over is checked without statistics.
Not here: the check, and the end of the time (pair.py), the words for people (proof/replay_process.py).
"""

from __future__ import annotations

import math
import random
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from vllm_accprobe.align.tokens import distinct, identity, pair_requests
from vllm_accprobe.dump.schema import DECODE, Record, RowSpace
from vllm_accprobe.opcheck.calls.records import Calls, Place, Runs
from vllm_accprobe.opcheck.floors.rounding import judge
from vllm_accprobe.opcheck.run.pair import Task

TOKENS = "tokens"
STRETCH = 128
"""Chosen: rows that are drawn at a time."""
_LEAST = 8
"""Chosen: fewer rows have no verdict of their columns."""
_SHARES = (0.4, 0.55, 0.75)
"""Chosen: of the time, when what is suspected, what has other constants and what failed must leave the rest to all."""
_EASILY = 0.25
"""Chosen: of the time, what may begin without waiting for the comparison."""
_SURE = 0.7
"""Chosen: of the time, what is planned: two processes wait for one another, and files are read."""
_MORE_TIME = 8.0
"""Chosen: so many times what there is time for is planned. A machine that was busy when its speed was measured, and is
idle now, does more than was expected; planning all of a huge dump would take the time itself."""
_PER_CALL = 4e-4
"""Measured: seconds of Python for an output, whatever its size."""
_MORE = 1.8
"""Measured: what an element of a call costs over one that is judged: it is read, widened and computed as well."""
_SIZES = 1.6
"""Measured: float32 sums of sizes compared with a product in float64."""
_ATTENDED = 8.0
"""Measured: multiplications for each key that a query attends to, over those of its score: products and
exponentials."""
_TIMES = 8
"""Chosen: 20 ms in all."""
_PAST = ("Attention", "EncoderOnlyAttention", "MLAAttention")


@dataclass(frozen=True)
class Wishes:
    """What a comparison has found: taps that it suspects; failed pairs of mine, (tap, step, ordinal), the worst first;
    places and taps that are to be explained (opcheck/proof/explained.py)."""

    suspects: tuple[str, ...] = ()
    failed: tuple[tuple[str, int, int], ...] = ()
    places: tuple[str, ...] = ()
    taps: tuple[str, ...] = ()


@dataclass(frozen=True)
class Speed:
    """Seconds, of one processor that has nothing else to do: of an element that is judged, of a multiplication in
    float64. slower: how many times as long it takes while other programs run on this machine."""

    element: float
    product: float
    slower: float = 1.0


def measured_speed() -> Speed:
    x = torch.linspace(-2.0, 2.0, 1 << 15, dtype=torch.float64).view(32, -1)
    mine, a = x.bfloat16().double(), torch.ones(128, 512, dtype=torch.float64)
    b = torch.ones(512, 512, dtype=torch.float64)

    def times(run: Any) -> list[float]:
        run()
        found = []
        for _ in range(_TIMES):
            begun = time.perf_counter()
            run()
            found.append(time.perf_counter() - begun)
        return found

    judged, multiplied = times(lambda: judge(x, mine, "bfloat16", noise=x, bound=x)), times(lambda: a @ b)
    slower = (sum(judged) + sum(multiplied)) / _TIMES / (min(judged) + min(multiplied))
    return Speed(min(judged) / x.numel(), min(multiplied) / (a.numel() * 512), slower)


@dataclass(frozen=True)
class RowStretch:
    """Rows [first, stop) of a step's tokens. golden: the same rows there, by step."""

    step: int
    first: int
    stop: int
    golden: Mapping[int, Runs]
    brings: frozenset[Any]


@dataclass
class ReplayPlan:
    """tasks: what is done, in that order; calls: how many of them there are, of how many; seconds: how long that will
    take; whole: nothing is left out."""

    tasks: list[Task]
    calls: int
    of: int
    seconds: float
    whole: bool


@dataclass
class _Picked:
    """What was chosen of one tap of one side."""

    places: dict[Place, Any] = field(default_factory=dict)
    drawn: set[Place] = field(default_factory=set)
    rank: int = 1 << 60
    begun: bool = False


class Planner:
    """ops: globs, all if empty; processes: that will work."""

    def __init__(self, sides: Sequence[Calls], ops: Sequence[str], processes: int, speed: Speed | None = None):
        self._sides, self._processes = sides, processes
        self._speed = speed or measured_speed()
        self._taps = [[(rank, tap, cls) for rank, tap, cls in side.taps(ops)] for side in sides]
        self._weights: dict[tuple[int, int, str], int] = {}
        self._costs = [[self._of_tap(n, *tap) for tap in taps] for n, taps in enumerate(self._taps)]
        self.seconds = sum(map(sum, self._costs)) / processes

    def _of_tap(self, side: int, rank: int, tap: str, cls: str) -> float:
        places = self._sides[side].places(rank, tap)
        return sum(self.cost(side, rank, tap, cls, place, None) for place in places)

    def cost(self, side: int, rank: int, tap: str, cls: str, place: Place, rows: int | None) -> float:
        """Seconds of a call, or of so many of its rows."""
        calls = self._sides[side]
        records: Mapping[str, Record] = calls.held(rank, tap, place)
        elements = sum(math.prod(r.shape) for r in records.values())
        n = max((r.shape[0] for r in records.values() if r.shape), default=1)
        share = 1.0 if rows is None else min(1.0, rows / max(n, 1))
        key = side, rank, tap
        if key not in self._weights:
            self._weights[key] = 0 if "Embedding" in cls else calls.parameters.largest(rank, tap)
        seconds = self._speed.element * _MORE * elements + self._speed.product * _SIZES * n * self._weights[key]
        if cls in _PAST:
            width = math.prod(records["output.0"].shape[1:]) if "output.0" in records else 0
            seconds += self._speed.product * _ATTENDED * width * self._looked_back(calls, rank, records)
        return seconds * share + _PER_CALL * max(1, sum(r.startswith(("output", "inplace")) for r in records))

    def cost_of_mine(self, tap: str, place: Place) -> float:
        """Seconds of a call of rank 0 while other programs run as now."""
        return self.cost(1, 0, tap, self._sides[1].cls_of(0, tap), place, None) * self._speed.slower

    @staticmethod
    def _looked_back(calls: Calls, rank: int, records: Mapping[str, Record]) -> int:
        record = next((r for r in records.values() if r.rows), None)
        if record is None or record.step is None or record.rows is None:
            return 0
        space = calls.dump.rows.get((rank, record.step, record.rows))
        return 0 if space is None else sum(s.n * (max(s.pos, 0) + s.n) for s in space.segments)

    def fits(self, limit: float | None) -> bool:
        """Whether all of it needs no plan: there is no limit, or it is far away, whatever else runs here."""
        return limit is None or self.seconds <= _EASILY * limit

    def waits(self, limit: float | None) -> bool:
        """Whether the comparison's wishes are needed: not all fits, or not all of it while other programs run as now.
        Then the time may end before the last of the model's modules."""
        return not self.fits(limit) or (limit is not None and self.seconds * self._speed.slower > _SURE * limit)

    def plan(self, limit: float | None, wishes: Wishes = Wishes()) -> ReplayPlan:
        """What is done in ``limit`` seconds, None for all. Of all calls, golden's and mine's in turn."""
        of = sum(len(self._sides[n].places(*t[:2])) for n, taps in enumerate(self._taps) for t in taps)
        slower = self._speed.slower
        whole = limit is None or self.fits(limit) or self.seconds * slower <= _SURE * limit
        if not whole and limit is not None:
            found = _Choice(self, self._sides, self._taps, self._processes, _SURE * limit / slower, wishes).plan(of)
            if found.tasks:  # else it is not known whose rows these are
                return replace(found, seconds=found.seconds * slower)
        tasks = [Task(n, rank, tap) for n, (rank, tap, _) in self._in_turn(self._order(wishes))]
        return ReplayPlan(tasks, of, of, self.seconds * slower, whole)

    def _order(self, wishes: Wishes) -> dict[str, int]:
        inside = [t for of_side in self._taps for _, t, _ in of_side if _within(t, wishes.suspects)]
        first = [*wishes.suspects, *inside, *other_constants(self._sides), *(f[0] for f in wishes.failed)]
        return {tap: k for k, tap in enumerate(dict.fromkeys(first))}

    def _in_turn(self, first: Mapping[str, int]) -> Iterator[tuple[int, tuple[int, str, str]]]:
        """(side, tap): both sides of a tap one after the other, those in ``first`` before the others."""
        place: dict[str, int] = {}
        for taps in self._taps[::-1]:
            for _, tap, _ in taps:
                place.setdefault(tap, len(place))
        found = [(n, t) for n, taps in enumerate(self._taps) for t in taps]
        yield from sorted(found, key=lambda f: (first.get(f[1][1], 1 << 60), place[f[1][1]], f[0], f[1][0]))


class _Choice:
    """The choice where not all fits. most: seconds."""

    def __init__(
        self, planner: Planner, sides: Sequence[Calls], taps: Sequence[Sequence[tuple[int, str, str]]], processes: int,
        most: float, wishes: Wishes,
    ):  # fmt: skip
        self._planner, self._sides, self._wishes = planner, sides, wishes
        self._processes, self._most = processes, most
        self._all = {(n, *t[:2]): t[2] for n, of_side in enumerate(taps) for t in of_side}
        self._by_tap: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
        for key in self._all:
            self._by_tap[key[2]].append(key)
        self._spent = self._planned = 0.0
        self._steps: dict[tuple[int, int, str], dict[int | None, list[Place]]] = {}
        for key in self._all:
            by_step: dict[int | None, list[Place]] = defaultdict(list)
            for place in sides[key[0]].places(*key[1:]):
                by_step[place[0]].append(place)
            self._steps[key] = by_step
        self._picked: dict[tuple[int, int, str], _Picked] = defaultdict(_Picked)
        self._later: list[tuple[tuple[int, int, str], Place, Any]] = []

    def plan(self, of: int) -> ReplayPlan:
        cover, rest = self._stretches()
        inside = [t for t in self._by_tap if _within(t, self._wishes.suspects)]
        other = other_constants(self._sides)
        steps = {s.step for s in (*cover, *rest)}
        failed = [f for f in self._wishes.failed if f[0] in self._by_tap]
        for share, taps, stretches in ((_SHARES[0], inside, (*cover, *rest)), (_SHARES[1], other, (*cover, *rest))):
            for stretch in stretches:
                for tap in taps:
                    self._while(share, tap, stretch)
        by_step: dict[int, list[RowStretch]] = defaultdict(list)
        for s in (*cover, *rest):
            by_step[s.step].append(s)
        for share in (_SHARES[2], 1.0):
            for tap, step, n in failed:
                for stretch in by_step[step] if step in steps else ():
                    self._while(share, tap, stretch, n)
            if share < 1.0:
                self._draw(cover)
        self._draw(rest)
        return self._made(of)

    def _left(self, share: float) -> bool:
        return self._spent < share * self._most * self._processes

    def _while(self, share: float, tap: str, stretch: RowStretch, call: int | None = None) -> None:
        if self._left(share):
            self._take(tap, stretch, call)

    def _draw(self, stretches: Iterable[RowStretch]) -> None:
        """Each for all taps or for none, because their statistics are compared with one another. What there is no time
        for may still be done if there is after all."""
        for stretch in stretches:
            over = not self._left(1.0)
            if over and not self._left(_MORE_TIME):
                return
            for tap in self._by_tap:
                self._take(tap, stretch, None, True, over)

    def _take(
        self, tap: str, stretch: RowStretch, call: int | None = None, drawn: bool = False, over: bool = False
    ) -> None:  # fmt: skip
        """Adds the calls of a tap in a stretch, of both sides."""
        for key in self._by_tap[tap]:
            runs_of = stretch.golden if key[0] == 0 and len(self._sides) > 1 else {
                stretch.step: ((stretch.first, stretch.stop),)
            }
            for step, runs in runs_of.items():
                for place in self._steps[key].get(step, ()):
                    if call is None or place[1] == call:
                        self._add(key, place, runs, drawn, over)

    def _add(self, key: tuple[int, int, str], place: Place, runs: Runs, drawn: bool, over: bool) -> None:
        picked = self._picked[key]
        old = picked.places.get(place, ())
        new = [r for r in runs if r not in old]
        if drawn and not over:
            picked.drawn.add(place)
        if not new:
            return
        rows = sum(b - a for a, b in new)
        seconds = self._planner.cost(*key, self._all[key], place, rows)
        self._spent += seconds
        self._planned += 0.0 if over else seconds
        if over:
            self._later.append((key, place, new))
            return
        picked.places[place] = (*old, *new)
        if not picked.begun:
            picked.begun, picked.rank = True, len(self._picked)

    def _made(self, of: int) -> ReplayPlan:
        order = sorted((k for k, p in self._picked.items() if p.places), key=lambda k: (self._picked[k].rank, k))
        first: dict[str, int] = {}
        for key in order:
            first.setdefault(key[2], len(first))
        order.sort(key=lambda k: (first[k[2]], k))
        tasks = [
            Task(*key, {p: _joined(r) for p, r in sorted(self._picked[key].places.items())},
                 frozenset(self._picked[key].drawn))
            for key in order
        ]  # fmt: skip
        calls = sum(len(t.places or ()) for t in tasks)
        more: dict[tuple[int, int, str], dict[Place, Any]] = defaultdict(dict)
        for key, place, runs in self._later:
            more[key][place] = (*more[key].get(place, ()), *runs)
        for key, places in sorted(more.items(), key=lambda kv: (first.get(kv[0][2], 1 << 60), kv[0])):
            tasks.append(Task(*key, {p: _joined(r) for p, r in sorted(places.items())}, frozenset()))
        return ReplayPlan(tasks, calls, of, self._planned / self._processes, False)

    def _stretches(self) -> tuple[list[RowStretch], list[RowStretch]]:
        """(those that bring in everything, the others) of mine's steps, in the order in which they are drawn."""
        size = STRETCH
        while True:
            found = list(stretches(self._sides, size))
            if size <= _LEAST or not found:
                break
            longest = max(found, key=lambda s: s.stop - s.first)
            spent = sum(
                self._planner.cost(*key, cls, place, longest.stop - longest.first)
                for key, cls in self._all.items() for place in self._steps[key].get(longest.step, ())
            )  # fmt: skip
            if spent <= 0.25 * self._most * self._processes:
                break
            size //= 2
        left = set().union(*(s.brings for s in found)) if found else set()
        cover: list[RowStretch] = []
        while left:
            best = max(found, key=lambda s: (len(s.brings & left), s.step != 0, -(s.stop - s.first)))
            if not best.brings & left:
                break
            cover.append(best)
            found.remove(best)
            left -= best.brings
        random.Random(0).shuffle(found)
        return cover, found


def _within(tap: str, roots: Iterable[str]) -> bool:
    return any(tap == root or tap.startswith(f"{root}.") for root in roots)


def _joined(runs: Iterable[tuple[int, int]]) -> Runs:
    """Sorted, those that touch as one."""
    out: list[tuple[int, int]] = []
    for a, b in sorted(runs):
        if out and a <= out[-1][1]:
            out[-1] = out[-1][0], max(b, out[-1][1])
        else:
            out.append((a, b))
    return tuple(out)


def stretches(sides: Sequence[Calls], size: int) -> Iterator[RowStretch]:
    """The rows of mine (the last side) that have a place in a request, ``size`` at most at a time, with golden's."""
    labels = _labels([side.dump for side in sides])
    there: dict[tuple[int, int], tuple[int, int]] = {}
    if len(sides) > 1:
        for step, space in _spaces(sides[0].dump):
            for row, key in enumerate(_keys(space, labels[0])):
                there[key] = step, row
    for step, space in _spaces(sides[-1].dump):
        keys = list(_keys(space, labels[-1]))
        for a in range(0, len(keys), size):
            b = min(a + size, len(keys))
            golden: dict[int, list[tuple[int, int]]] = defaultdict(list)
            for key in keys[a:b]:
                if key in there:
                    other, row = there[key]
                    golden[other].append((row, row + 1))
            yield RowStretch(step, a, b, {s: _joined(r) for s, r in golden.items()}, _brings(space, a, b))


def _labels(dumps: Sequence[Any]) -> list[dict[tuple[int, int], int]]:
    """For each dump, (rank, its number of a request) → a number that both have for it."""
    ours = [distinct(d.requests) for d in dumps]
    found: list[dict[Any, int]] = [{} for _ in dumps]
    if len(dumps) > 1:
        for k, (g, m, *_) in enumerate(pair_requests(*ours).pairs):
            found[0][identity(g)] = found[1][identity(m)] = k
    for n, requests in enumerate(ours):
        for r in requests:
            found[n].setdefault(identity(r), -1 - len(found[n]) - n * (1 << 30))
    return [{key: found[n][identity(r)] for key, r in d.requests.items()} for n, d in enumerate(dumps)]


def _spaces(dump: Any) -> list[tuple[int, RowSpace]]:
    """Each step's rows of text, of the first rank that has them."""
    found: dict[int, RowSpace] = {}
    for (_, step, name), space in sorted(dump.rows.items(), key=lambda kv: kv[0]):
        if name == TOKENS and not space.padding:
            found.setdefault(step, space)
    return sorted(found.items())


def _keys(space: RowSpace, labels: Mapping[tuple[int, int], int]) -> Iterator[tuple[int, int]]:
    for s in space.segments:
        label = labels.get((0, s.req), s.req)
        yield from ((label, s.pos + k) for k in range(s.n))


def _brings(space: RowSpace, a: int, b: int) -> frozenset[Any]:
    """What a stretch would show that another may not."""
    found: set[Any] = {("rows", space.n.bit_length()), ("requests", len(space.segments).bit_length())}
    for s, at in space.stretches():
        first, stop = max(a, at.start), min(b, at.stop)
        if first < stop:
            last = s.pos + stop - at.start - 1
            found |= {("request", s.req), ("phase", s.phase), ("position", s.phase, last.bit_length())}
            if s.phase != DECODE:
                found |= {("end", stop == at.stop), ("begins late", s.pos > 0)}
    return frozenset(found)


def other_constants(sides: Sequence[Calls]) -> list[str]:
    """Taps whose recorded numbers are others on the two sides, not as nearly all of their class are."""
    if len(sides) < 2:
        return []
    golden, mine = ({m.tap: m for named in side.modules.values() for m in named.values()} for side in sides)
    differ: dict[tuple[str, str], list[str]] = defaultdict(list)
    of: dict[str, int] = defaultdict(int)
    for tap, m in mine.items():
        of[m.cls] += 1
        g = golden.get(tap)
        for name in (m.attrs.keys() & g.attrs.keys()) if g is not None else ():
            x, y = m.attrs[name], g.attrs[name]  # type: ignore[union-attr]
            if isinstance(x, (int, float)) and isinstance(y, (int, float)) and x != y:
                differ[m.cls, name].append(tap)
    few = (taps for (cls, _), taps in differ.items() if 2 * len(taps) <= max(of[cls], 2))
    return list(dict.fromkeys(tap for taps in few for tap in taps))
