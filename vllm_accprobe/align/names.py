"""Which tap of the golden is which tap of mine, and which role is which.

The problem: two engines may call one place by two names: a model inside a wrapper has a prefix, a vendor's layer class
names its arguments differently. The idea: rules from strict to loose, each pair says which one made it: the same name,
the same name under a common prefix, the same weights or the same place among neighbours that are paired already, and,
only where the counts agree, the order of execution. Nothing is paired twice, and what is left over is listed.
Not here: rows (tokens.py) and ranks (shards.py).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

EXACT, OTHER_CLASS, PREFIX, ORDER = "exact", "exact, other class", "prefix", "order"
STRUCTURE = "structure"


@dataclass(frozen=True, slots=True)
class TapRoles:
    """A tap with its class and the roles recorded there, in order of execution; parameters are roles too.

    params: (role, hash) of parameters whose hash is known, sorted."""

    tap: str
    cls: str
    roles: tuple[str, ...]
    params: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class TapPair:
    """roles: (golden's, mine's, rule) for each pair of roles."""

    golden: TapRoles
    mine: TapRoles
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
        lines += [
            f"names: {p.golden.tap} is {p.mine.tap} by {p.rule}"
            for p in self.pairs
            if p.rule in (PREFIX, STRUCTURE, ORDER)
        ]
        classes = Counter((p.golden.cls, p.mine.cls) for p in self.pairs if p.rule == OTHER_CLASS)
        lines += [f"names: class {g} is {m} in mine, {n} taps" for (g, m), n in classes.items()]
        for side, left in (("golden", self.only_golden), ("mine", self.only_mine)):
            lines += [f"names: {len(left)} taps only in {side}"] if left else []
        for side, roles in self.roles_only.items():
            if roles:
                what = ", ".join(f"{role} ({n})" for role, n in roles.most_common(5))
                what += ", ..." if len(roles) > 5 else ""
                lines.append(f"names: {sum(roles.values())} tensors of paired taps only in {side}: {what}")
        return lines

    def skips(self) -> Counter[str]:
        """What the coverage must count: tensors of paired taps that have no partner."""
        return +Counter({f"tensor of a paired tap only in {s}": sum(n.values()) for s, n in self.roles_only.items()})

    @property
    def roles_only(self) -> dict[str, Counter[str]]:
        """Of each side: roles without a partner at taps that have one, with how many taps have them."""
        sides: dict[str, Counter[str]] = {"golden": Counter(), "mine": Counter()}
        for pair in self.pairs:
            for i, (counts, place) in enumerate(zip(sides.values(), (pair.golden, pair.mine), strict=True)):
                counts.update(r for r in place.roles if r not in {p[i] for p in pair.roles})
        return sides


def enclosing(tap: str) -> Iterator[str]:
    """The paths above a tap, nearest first: ``a.b`` and ``a`` of ``a.b.c``."""
    while "." in tap:
        tap = tap.rpartition(".")[0]
        yield tap


def pair_names(golden: Sequence[TapRoles], mine: Sequence[TapRoles], *, by_order: bool = True) -> NamePlan:
    """Pairs the taps of two dumps, given in order of execution. by_order: also by the last resort."""
    by_name = {p.tap: p for p in golden}
    found: dict[str, tuple[TapRoles, str]] = {}
    for m in mine:
        if m.tap in by_name:
            g = by_name[m.tap]
            found[m.tap] = (g, EXACT if g.cls == m.cls or not (g.cls and m.cls) else OTHER_CLASS)

    def left() -> tuple[list[TapRoles], list[TapRoles]]:
        taken = {g.tap for g, _ in found.values()}
        return [g for g in golden if g.tap not in taken], [m for m in mine if m.tap not in found]

    def structure(golden: Sequence[TapRoles], mine_left: Sequence[TapRoles]) -> list[tuple[TapRoles, TapRoles]]:
        return by_structure(golden, mine_left, [(found[m.tap][0], m) for m in mine if m.tap in found])

    loose = [(PREFIX, _by_prefix), (STRUCTURE, structure), *([(ORDER, _by_order)] if by_order else [])]
    for rule, pairing in loose:
        for g, m in pairing(*left()):
            found[m.tap] = (g, rule)
    rest_golden, rest_mine = left()
    pairs = []
    for m in mine:
        if m.tap in found:
            g, rule = found[m.tap]
            pairs.append(TapPair(g, m, rule, pair_roles(g.roles, m.roles, several=by_order)))
    return NamePlan(pairs, [p.tap for p in rest_golden], [p.tap for p in rest_mine])


def _by_prefix(golden: Iterable[TapRoles], mine: Iterable[TapRoles]) -> list[tuple[TapRoles, TapRoles]]:
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


def by_structure(
    golden: Sequence[TapRoles], mine: Sequence[TapRoles], known: Sequence[tuple[TapRoles, TapRoles]]
) -> list[tuple[TapRoles, TapRoles]]:
    """Pairs left-over taps with the same weights, then those that stand at the same place of the tree: what encloses a
    pair on either side, and the children of a pair that are alone with their roles.

    known: the pairs that other rules made. Weights that several taps share (norms of ones) tell nothing."""
    rest: tuple[dict[str, TapRoles], dict[str, TapRoles]] = ({p.tap: p for p in golden}, {p.tap: p for p in mine})
    pairs: list[tuple[TapRoles, TapRoles]] = []

    def add(g: TapRoles, m: TapRoles) -> None:
        del rest[0][g.tap], rest[1][m.tap]
        pairs.append((g, m))

    weights = [Counter(p.params for p in side.values() if p.params) for side in rest]
    golden_by = {p.params: p for p in golden if weights[0][p.params] == 1}
    for m in mine:
        if weights[1][m.params] == 1 and m.params in golden_by:
            add(golden_by[m.params], m)
    before = -1
    while len(pairs) != before:
        before = len(pairs)
        taps = [(g.tap, m.tap) for g, m in (*known, *pairs)]
        for g_tap, m_tap in taps:
            g_up, m_up = g_tap.rpartition(".")[0], m_tap.rpartition(".")[0]
            if g_up in rest[0] and m_up in rest[1] and _alike(rest[0][g_up], rest[1][m_up]):
                add(rest[0][g_up], rest[1][m_up])
        lonely = [_only_children(side) for side in rest]
        for g_tap, m_tap in taps:
            for roles, child in lonely[0].get(g_tap, {}).items():
                partner = lonely[1].get(m_tap, {}).get(roles)
                if child and partner and child.tap in rest[0] and partner.tap in rest[1]:
                    add(child, partner)
    return pairs


def _alike(golden: TapRoles, mine: TapRoles) -> bool:
    """Both run, or neither does."""
    runs = [any(not r.startswith("param.") for r in p.roles) for p in (golden, mine)]
    return runs[0] == runs[1]


def _only_children(places: dict[str, TapRoles]) -> dict[str, dict[tuple[str, ...], TapRoles | None]]:
    """Parent → kinds of roles → its one child with them; None where it has several."""
    out: dict[str, dict[tuple[str, ...], TapRoles | None]] = {}
    for tap, place in places.items():
        if place.roles and "." in tap:
            own = out.setdefault(tap.rpartition(".")[0], {})
            roles = tuple(sorted(place.roles))
            own[roles] = None if roles in own else place
    return out


def _by_order(golden: Iterable[TapRoles], mine: Iterable[TapRoles]) -> list[tuple[TapRoles, TapRoles]]:
    """Pairs left-over taps with the same roles by order, where there are as many on either side."""
    groups: list[dict[tuple[str, ...], list[TapRoles]]] = [defaultdict(list), defaultdict(list)]
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


def pair_roles(golden: Sequence[str], mine: Sequence[str], *, several: bool = True) -> tuple[tuple[str, str, str], ...]:
    """Pairs equal roles, then left-over inputs, in-place values and outputs by order where their counts agree.

    several: also where more than one of a kind is left; two engines rarely take their arguments in one order.
    Parameters are never paired by order: two weights that only share a place in a list are not the same weight.
    """
    pairs = [(r, r, EXACT) for r in mine if r in golden]
    for kind in ("input.", "inplace.", "output.", "grad."):
        gs = [r for r in golden if r.startswith(kind) and r not in mine]
        ms = [r for r in mine if r.startswith(kind) and r not in golden]
        if gs and len(gs) == len(ms) and (several or len(gs) == 1):
            pairs += [(g, m, ORDER) for g, m in zip(gs, ms, strict=True)]
    place = {r: i for i, r in enumerate(mine)}
    return tuple(sorted(pairs, key=lambda p: place[p[1]]))
