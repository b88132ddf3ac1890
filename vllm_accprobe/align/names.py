"""Which tap of the golden is which tap of mine, and which role is which.

The problem: two engines may call one place by two names: a model inside a wrapper has a prefix, a vendor's layer class
names its arguments differently. The idea: rules from strict to loose, each pair says which one made it: the same name,
the same name under a common prefix, and, only where the counts agree, the order of execution. Nothing is paired twice,
and what is left over is listed.
Not here: rows (tokens.py) and ranks (shards.py).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

EXACT, OTHER_CLASS, PREFIX, ORDER = "exact", "exact, other class", "prefix", "order"


@dataclass(frozen=True, slots=True)
class Place:
    """A tap with its class and the roles recorded there, in order of execution; parameters are roles too."""

    tap: str
    cls: str
    roles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TapPair:
    """roles: (golden's, mine's, rule) for each pair of roles."""

    golden: Place
    mine: Place
    rule: str
    roles: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class NamePlan:
    pairs: list[TapPair]
    only_golden: list[str]
    only_mine: list[str]

    def lines(self) -> list[str]:
        rules = Counter(p.rule for p in self.pairs)
        lines = [f"names: {n} taps paired by {rule}" for rule, n in rules.items()]
        lines += [f"names: {p.golden.tap} is {p.mine.tap} by {p.rule}" for p in self.pairs if p.rule in (PREFIX, ORDER)]
        classes = Counter((p.golden.cls, p.mine.cls) for p in self.pairs if p.rule == OTHER_CLASS)
        lines += [f"names: class {g} is {m} in mine, {n} taps" for (g, m), n in classes.items()]
        if self.only_golden:
            lines.append(f"names: {len(self.only_golden)} taps only in golden")
        if self.only_mine:
            lines.append(f"names: {len(self.only_mine)} taps only in mine")
        return lines


def pair_names(golden: Sequence[Place], mine: Sequence[Place]) -> NamePlan:
    """Pairs the taps of two dumps, given in order of execution."""
    by_name = {p.tap: p for p in golden}
    found: dict[str, tuple[Place, str]] = {}
    for m in mine:
        if m.tap in by_name:
            g = by_name[m.tap]
            found[m.tap] = (g, EXACT if g.cls == m.cls or not (g.cls and m.cls) else OTHER_CLASS)

    def left() -> tuple[list[Place], list[Place]]:
        taken = {g.tap for g, _ in found.values()}
        return [g for g in golden if g.tap not in taken], [m for m in mine if m.tap not in found]

    rest_golden, rest_mine = left()
    for g, m in _by_prefix(rest_golden, rest_mine):
        found[m.tap] = (g, PREFIX)
    rest_golden, rest_mine = left()
    for g, m in _by_order(rest_golden, rest_mine):
        found[m.tap] = (g, ORDER)
    rest_golden, rest_mine = left()
    pairs = []
    for m in mine:
        if m.tap in found:
            g, rule = found[m.tap]
            pairs.append(TapPair(g, m, rule, pair_roles(g.roles, m.roles)))
    return NamePlan(pairs, [p.tap for p in rest_golden], [p.tap for p in rest_mine])


def _by_prefix(golden: Iterable[Place], mine: Iterable[Place]) -> list[tuple[Place, Place]]:
    """Pairs ``x`` with ``prefix.x`` for the one prefix that joins most of what is left (at least two)."""
    golden_by = {p.tap: p for p in golden}
    mine_by = {p.tap: p for p in mine}
    votes: Counter[tuple[str, str]] = Counter()
    for outer, inner, side in ((mine_by, golden_by, "mine"), (golden_by, mine_by, "golden")):
        for name in outer:
            for cut in (i for i, c in enumerate(name) if c == "."):
                if name[cut + 1 :] in inner:
                    votes[(side, name[: cut + 1])] += 1
    if not votes:
        return []
    (side, prefix), count = votes.most_common(1)[0]
    if count < 2:
        return []
    if side == "mine":
        return [(g, mine_by[prefix + n]) for n, g in golden_by.items() if prefix + n in mine_by]
    return [(golden_by[prefix + n], m) for n, m in mine_by.items() if prefix + n in golden_by]


def _by_order(golden: Iterable[Place], mine: Iterable[Place]) -> list[tuple[Place, Place]]:
    """Pairs left-over taps with the same roles by order, where there are as many on either side."""
    groups: list[dict[tuple[str, ...], list[Place]]] = [defaultdict(list), defaultdict(list)]
    for group, places in zip(groups, (golden, mine), strict=True):
        for p in places:
            if p.roles:
                group[tuple(sorted(p.roles))].append(p)
    pairs = []
    for roles, gs in groups[0].items():
        ms = groups[1].get(roles, [])
        if len(gs) == len(ms):
            pairs += list(zip(gs, ms, strict=True))
    return pairs


def pair_roles(golden: Sequence[str], mine: Sequence[str]) -> tuple[tuple[str, str, str], ...]:
    """Pairs equal roles, then left-over inputs, in-place values and outputs by order where their counts agree.

    Parameters are never paired by order: two weights that only share a place in a list are not the same weight.
    """
    pairs = [(r, r, EXACT) for r in mine if r in golden]
    for kind in ("input.", "inplace.", "output."):
        gs = [r for r in golden if r.startswith(kind) and r not in mine]
        ms = [r for r in mine if r.startswith(kind) and r not in golden]
        if gs and len(gs) == len(ms):
            pairs += [(g, m, ORDER) for g, m in zip(gs, ms, strict=True)]
    place = {r: i for i, r in enumerate(mine)}
    return tuple(sorted(pairs, key=lambda p: place[p[1]]))
