"""The smallest set of settings that makes a command fail, searched over real servers.

The problem: n settings have 2^n combinations, each is a server's start; a fault may need two of them together, there
may be two faults, some combinations do not start, and an outcome may change by itself. The idea: the command and the
plain configuration are tried, then `ddmin` over what differs; a setting of many parts is divided where it is found; the
decisive outcomes are tried twice. Without the set the command must pass, else another set is searched in the rest.

A configuration is the set of axes that are as in the command; all others are plain. An axis that was divided is as in
the command where all of its parts are. Not here: what a trial is and what failing is (trials.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from vllm_accprobe.gate.bisect.edits import ServerSetting

PASS, FAIL, UNRESOLVED = "pass", "fail", "unresolved"


def ddmin(items: Sequence[str], test: Callable[[tuple[str, ...]], str]) -> tuple[str, ...]:
    """The members of ``items``, in their order, of a 1-minimal failing set: no set with one member less fails
    [A. Zeller, R. Hildebrandt, IEEE Transactions on Software Engineering 28 (2002) 183, fig. 5]. test: PASS, FAIL or
    UNRESOLVED (does not start: neither) for a set. All ``items`` are taken to fail and none of them to pass; neither is
    tested. One culprit of n takes about 2 log2 n trials, n^2 + 3 n are the most (proposition 12)."""
    current, n = tuple(items), 2
    while len(current) >= 2:
        pieces = split(current, n)
        found = next((piece for piece in pieces if test(piece) == FAIL), None)
        if found is not None:
            current, n = found, 2
            continue
        others = (tuple(i for i in current if i not in piece) for piece in pieces) if n > 2 else ()
        found = next((other for other in others if test(other) == FAIL), None)
        if found is not None:
            current, n = found, max(n - 1, 2)
        elif n >= len(current):
            break
        else:
            n = min(2 * n, len(current))
    return current


def split(items: tuple[str, ...], n: int) -> list[tuple[str, ...]]:
    """n pieces, as equal as can be; 1 <= n <= len(items)."""
    ends = [len(items) * i // n for i in range(n + 1)]
    return [items[a:b] for a, b in itertools.pairwise(ends)]


def usual(n: int) -> int:
    """Trials for one culprit of n."""
    return 2 * math.ceil(math.log2(n)) if n > 1 else 0


def most(n: int) -> int:
    """Trials at most."""
    return n * n + 3 * n


HOLD = ("tensor parallel", "KV cache dtype", "speculation")
"""Held first where the plain configuration does not start: these decide whether a model fits."""
MAX_CAUSES = 4
"""Chosen: sets that are searched one after another; who has more has another problem."""


@dataclass(frozen=True)
class Configuration:
    """bad: axes, and parts of those in ``apart``, that are as in the command. values: by axis, a number on its scale,
    in place of the command's."""

    bad: frozenset[str]
    apart: frozenset[str] = frozenset()
    values: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class TrialOutcome:
    """kind: PASS, FAIL or UNRESOLVED; size: nats; p; why: of an unresolved one; smaller: differs beyond chance, but by
    much less than the command does."""

    kind: str
    size: float = 0.0
    p: float = 1.0
    why: str = ""
    smaller: bool = False


Try = Callable[[Configuration, int], TrialOutcome]
"""(configuration, how often it was tried before): repetitions are runs of their own."""


@dataclass
class Cause:
    """A set. settings: its axes; alone: what the set alone does; before: members of the sets that were found before;
    without: what the command does without it and them; each: the same with all but one of it, by name, where there are
    several. limits: of an axis with a scale, the last number that fails and the first that passes."""

    settings: tuple[ServerSetting, ...]
    alone: TrialOutcome
    without: TrialOutcome
    each: dict[str, TrialOutcome] = field(default_factory=dict)
    flaky: list[str] = field(default_factory=list)
    limits: dict[str, tuple[int, int]] = field(default_factory=dict)
    apart: frozenset[str] = frozenset()
    before: tuple[str, ...] = ()
    gone: frozenset[str] = frozenset()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(a.name for a in self.settings)


@dataclass
class Found:
    """verdict: same, found, inconsistent (an outcome changed when it was repeated), elsewhere (the plain configuration
    fails, too) or None: nothing could be tried, and ``why``. axes: those that were searched; equal: left plain, because
    two logs tell them alike; held: left as in the command, because without them nothing starts."""

    verdict: str | None
    axes: tuple[ServerSetting, ...]
    equal: tuple[str, ...] = ()
    held: tuple[str, ...] = ()
    causes: list[Cause] = field(default_factory=list)
    bad: TrialOutcome | None = None
    plain: TrialOutcome | None = None
    why: str = ""
    rest: TrialOutcome | None = None


class Search:
    """axes: all; golden: there is one, so that plain is tried against it and is not it. again: how often a passing
    trial is repeated before it counts; narrow: scales, too. equal: asks, once both were tried, which axes their logs
    tell alike; parts: an axis's parts that the model has; lengths: the model's."""

    def __init__(
        self, axes: Sequence[ServerSetting], attempt: Try, *, golden: bool, again: int = 0, narrow: bool = False,
        equal: Callable[[Configuration, Configuration], frozenset[str]] = lambda bad, plain: frozenset(),
        parts: Callable[[ServerSetting], tuple[ServerSetting, ...]] = lambda axis: axis.parts,
        lengths: Callable[[], int | None] = lambda: None,
        say: Callable[[str], None] = lambda line: None,
    ):  # fmt: skip
        self._axes, self._attempt, self._golden, self._again = list(axes), attempt, golden, again
        self._narrow, self._equal, self._parts, self._length, self._say = narrow, equal, parts, lengths, say
        self.outcomes: dict[Configuration, list[TrialOutcome]] = {}
        self._settled: frozenset[str] = frozenset()

    def find(self) -> Found:
        """Everything, from the first trial on. Raises what trials raise."""
        names = [a.name for a in self._axes]
        bad = Configuration(frozenset(names))
        found = Found(None, tuple(self._axes), bad=self.test(bad) if self._golden else None)
        if found.bad is not None and found.bad.kind == UNRESOLVED:
            found.why = f"the command itself: {found.bad.why}"
            return found
        base, found.plain = self._base(names)
        found.held = tuple(base)
        if found.plain.kind == UNRESOLVED:
            found.why = f"no plain configuration: {found.plain.why}"
            return found
        found.bad = found.bad or self.test(bad)
        if found.bad.kind == UNRESOLVED:
            found.why = f"the command itself: {found.bad.why}"
        elif found.bad.kind == PASS:
            found.verdict = "same"
        elif found.plain.kind == FAIL:
            found.verdict = "elsewhere"
        else:
            self._search(found, names, base, self._equal(bad, Configuration(base)))
        return found

    def _search(self, found: Found, names: list[str], base: frozenset[str], equal: frozenset[str]) -> None:
        """One set after another, until the command passes without them."""
        found.equal = tuple(sorted(equal))
        left = [n for n in names if n not in base and n not in equal]
        # Plain from here on: as in the command, a default may follow another setting (custom operators of eager ones).
        self._settled = equal - base
        while left and len(found.causes) < MAX_CAUSES:
            cause = self._cause(left, base, found.causes)
            found.causes.append(cause)
            if cause.without.kind != FAIL:
                found.rest = cause.without
                break
            tops = {self._top(n) for n in cause.names}
            left = [n for n in left if n not in tops]
            self._say(f"without {', '.join(tops)} it still fails: another set is searched in the rest")
        flaky = any(cause.flaky for cause in found.causes)
        found.verdict = "inconsistent" if flaky else "found" if found.causes else "elsewhere"

    def test(self, configuration: Configuration) -> TrialOutcome:
        """Once; from memory where it was requested before."""
        known = self.outcomes.setdefault(configuration, [])
        if not known:
            known.append(self._attempt(configuration, 0))
            for i in range(self._again):
                if known[-1].kind == PASS:
                    known.append(self._attempt(configuration, i + 1))
        return known[-1]

    def repeat(self, configuration: Configuration) -> TrialOutcome:
        """Once more."""
        self.test(configuration)
        known = self.outcomes[configuration]
        known.append(self._attempt(configuration, len(known)))
        return known[-1]

    def _base(self, names: list[str]) -> tuple[frozenset[str], TrialOutcome]:
        """What must stay as in the command so that the plain configuration starts, and that one's outcome."""
        base: frozenset[str] = frozenset()
        plain = self.test(Configuration(base))
        order = [n for n in HOLD if n in names] + [n for n in names if n not in HOLD]
        for name in order:
            if plain.kind != UNRESOLVED:
                break
            self._say(f"the plain configuration does not start; tried with {name} as in the command")
            plain = self.test(Configuration(frozenset({name})))
            base = frozenset({name})
        if plain.kind == UNRESOLVED:
            return frozenset(), plain
        return base, plain

    def _cause(self, left: list[str], base: frozenset[str], found: Sequence[Cause]) -> Cause:
        chosen = ddmin(left, lambda some: self.test(Configuration(base | set(some))).kind)
        apart: frozenset[str] = frozenset()
        for name in chosen:
            chosen, apart = self._divided(name, chosen, apart, base)
        alone = Configuration(base | set(chosen), apart)
        before = tuple(n for c in found for n in c.names)
        gone = apart.union(*(c.apart for c in found))
        rest = self._rest((*before, *chosen), gone)
        settings = tuple(self._axis(n) for n in chosen)
        cause = Cause(settings, self.test(alone), self.test(rest), apart=apart, before=before, gone=gone)
        for configuration, what in ((alone, "the set alone"), (rest, "the command without it")):
            first, second = self.test(configuration), self.repeat(configuration)
            if first.kind != second.kind:
                cause.flaky.append(f"{what}: {first.kind}, then {second.kind}")
        if len(chosen) > 1 and cause.without.kind == PASS:
            cause.each = {n: self.test(self._rest((*before, n), gone)) for n in chosen}
        if self._narrow:
            for axis in cause.settings:
                if (limit := self._limit(axis, alone)) is not None:
                    cause.limits[axis.name] = limit
        return cause

    def _divided(
        self, name: str, chosen: tuple[str, ...], apart: frozenset[str], base: frozenset[str]
    ) -> tuple[tuple[str, ...], frozenset[str]]:
        """With ``name`` replaced by those of its parts that it takes."""
        parts = [p.name for p in self._parts(self._axis(name))]
        if not parts:
            return chosen, apart
        others = tuple(n for n in chosen if n != name)
        inside = apart | {name}
        self._say(f"{name} has {len(parts)} parts, which are searched")
        if self.test(Configuration(base | set(others), inside)).kind == FAIL:
            return chosen, apart  # all its parts are plain, and it fails: it is none of them
        found = ddmin(parts, lambda some: self.test(Configuration(base | set(others) | set(some), inside)).kind)
        if self.test(Configuration(base | set(others) | set(found), inside)).kind != FAIL:
            return chosen, apart
        return (*others, *found), inside

    def _limit(self, axis: ServerSetting, alone: Configuration) -> tuple[int, int] | None:
        """Binary search between the command's number, which fails, and the plain one's: over powers of two."""
        if axis.scale is None:
            return None
        _, fails, passes = axis.scale
        passes = passes if passes is not None else self._length()
        if passes is None or passes == fails:
            return None
        low, high = sorted((fails, passes))
        between = [n for n in (1 << i for i in range(32)) if low < n < high]
        numbers = [low, *between, high] if fails < passes else [high, *reversed(between), low]
        a, b = 0, len(numbers) - 1
        while b - a > 1:
            middle = (a + b) // 2
            tried = self.test(Configuration(alone.bad, alone.apart, ((axis.name, numbers[middle]),)))
            if tried.kind == FAIL:
                a = middle
            else:
                b = middle
        return numbers[a], numbers[b]

    def _rest(self, chosen: Sequence[str], apart: frozenset[str]) -> Configuration:
        settled = [*chosen, *self._settled]
        return without(settled, apart, self._axes, {a.name: self._parts(a) for a in self._axes})

    def _axis(self, name: str) -> ServerSetting:
        each = [*self._axes, *(p for a in self._axes for p in a.parts)]
        return next(a for a in each if a.name == name)

    def _top(self, name: str) -> str:
        return next(a.name for a in self._axes if a.name == name or any(p.name == name for p in a.parts))


def expected(axes: Sequence[ServerSetting], golden: bool) -> tuple[int, int]:
    """(trials for one culprit, the most) of a plan, parts left away: the command, plain, ddmin, the command without the
    set, and the two that are repeated."""
    first = 2 + golden
    return first + usual(len(axes)) + 3, first + most(len(axes)) + 3


def without(
    chosen: Sequence[str],
    apart: frozenset[str],
    axes: Sequence[ServerSetting],
    parts: Mapping[str, tuple[ServerSetting, ...]],
) -> Configuration:
    """The command with ``chosen`` made plain. Of an axis that is apart, the parts that are not chosen stay."""
    inside = frozenset(a.name for a in axes if a.name in apart and {p.name for p in parts[a.name]} & set(chosen))
    kept = {p.name for name in inside for p in parts[name]}
    return Configuration((frozenset(a.name for a in axes) - inside | kept) - set(chosen), inside)


def edits_of(
    configuration: Configuration, axes: Sequence[ServerSetting], parts: Mapping[str, tuple[ServerSetting, ...]]
) -> list[ServerSetting]:
    """The axes and parts that are made plain in ``configuration``, whose edits make its command."""
    made: list[ServerSetting] = []
    for axis in axes:
        if axis.name in configuration.apart:
            made += [p for p in parts.get(axis.name, axis.parts) if p.name not in configuration.bad]
        elif axis.name not in configuration.bad:
            made.append(axis)
    return made
