"""Which tap and role of golden is which tap and role of mine.

The problem: two engines may call one place by two names, and make one tensor of several. The idea: rules from strict to
loose, and each pair says which one made it: the same name, the same name under a common prefix, the same weights or
place among paired neighbours, and, where counts agree, the order of execution. Before that, rules of a mapping are
matched against the taps that are there (`bridge`): for each place of mine that they make, golden gets a `Derived`
record under mine's name; the first rule that fits a place makes it, what is left keeps its name. Not here: what the
rules are (mapping.py, engines/), the values (derived.py).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_accprobe.align.derived import Derived, View, derive, with_rows
from vllm_accprobe.align.engines import vllm_names
from vllm_accprobe.align.engines.attention_inputs import attention_inputs
from vllm_accprobe.align.engines.transformers_order import in_order
from vllm_accprobe.align.engines.transformers_places import other_places
from vllm_accprobe.align.engines.vllm_names import experts_apart, routed_alone
from vllm_accprobe.align.mapping import ROPE, SUM, RoleRule, Rules, Source, TapRule, fill, match
from vllm_accprobe.align.without_row_maps import meet
from vllm_accprobe.dump.block_code import FORWARD, parsed, reads, same, terms
from vllm_accprobe.dump.decode import object_at
from vllm_accprobe.dump.record_table import first_of_each_site
from vllm_accprobe.dump.schema import Module, Record

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
        lines = [f"names: {n} taps paired by {'name' if rule == EXACT else rule}" for rule, n in rules.items()]
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
            if len(pair.roles) == len(pair.golden.roles) == len(pair.mine.roles):
                continue
            for i, (counts, place) in enumerate(zip(sides.values(), (pair.golden, pair.mine), strict=True)):
                counts.update(r for r in place.roles if r not in {p[i] for p in pair.roles})
        return sides


def enclosing(tap: str) -> Iterator[str]:
    """The paths above a tap, nearest first: ``a.b`` and ``a`` of ``a.b.c``."""
    while "." in tap:
        tap = tap.rpartition(".")[0]
        yield tap


def pair_names(golden: Sequence[TapRoles], mine: Sequence[TapRoles], *, by_order: bool = True) -> NamePlan:
    """Pairs the taps of two dumps, in order of execution. by_order: also by the last resort."""
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
    """Pairs left-over taps with the same roles by order, where there are as many on either side; then those with as
    many inputs and outputs, because tools that do not know the names of arguments number them."""
    pairs: list[tuple[TapRoles, TapRoles]] = []
    left = list(golden), list(mine)
    for key in (lambda roles: tuple(sorted(roles)), _kinds):
        groups: list[dict[tuple[str, ...], list[TapRoles]]] = [defaultdict(list), defaultdict(list)]
        for group, places in zip(groups, left, strict=True):
            for p in places:
                if p.roles:
                    group[key(p.roles)].append(p)
        for roles, gs in groups[0].items():
            ms = groups[1].get(roles, [])
            if len(gs) == len(ms):
                pairs += list(zip(gs, ms, strict=True))
        taken = {g.tap for g, _ in pairs}, {m.tap for _, m in pairs}
        left = [p for p in left[0] if p.tap not in taken[0]], [p for p in left[1] if p.tap not in taken[1]]
    return pairs


def _kinds(roles: Sequence[str]) -> tuple[str, ...]:
    """Inputs, in-place values and outputs without their names; parameters with them."""
    return tuple(sorted(r if r.startswith("param.") else r.partition(".")[0] for r in roles))


def pair_roles(golden: Sequence[str], mine: Sequence[str], *, several: bool = True) -> tuple[tuple[str, str, str], ...]:
    """Pairs equal roles, then left-over inputs, in-place values and outputs by order where their counts agree.

    several: also where more than one of a kind is left; two engines rarely take their arguments in one order.
    Parameters are never paired by order: two weights that only share a place in a list are not the same weight.
    """
    pairs = [(r, r, EXACT) for r in mine if r in golden]
    if len(pairs) == len(golden) == len(mine):
        return tuple(pairs)
    for kind in ("input.", "inplace.", "output.", "grad."):
        gs = [r for r in golden if r.startswith(kind) and r not in mine]
        ms = [r for r in mine if r.startswith(kind) and r not in golden]
        if gs and len(gs) == len(ms) and (several or len(gs) == 1):
            pairs += [(g, m, ORDER) for g, m in zip(gs, ms, strict=True)]
    place = {r: i for i, r in enumerate(mine)}
    return tuple(sorted(pairs, key=lambda p: place[p[1]]))


Place = tuple[str, str]
"""(tap, role)."""
_Moment = tuple[int, "int | None", int]
"""(rank, step, call)."""


@dataclass(frozen=True)
class Bridge:
    """The two dumps under one set of names. lines: what was made by which rule. foreign: two engines are compared,
    whose left-over taps must not be paired by order."""

    golden: Any
    mine: Any
    lines: list[str] = field(default_factory=list)
    foreign: bool = False


def bridge(golden: Any, mine: Any, rules: Rules | None = None) -> Bridge:
    """Applies the user's ``rules`` and, where one dump is of a transformers model and the other of vLLM, the built-in
    ones; and those of two releases of vLLM. Without any the dumps are returned as they are."""
    lines: list[str] = []
    peers = meet(golden, mine, rules)
    if peers is not None:
        found, swapped, lines = peers
        golden, mine, notes = apply(found, golden, mine, swapped)
        return Bridge(golden, mine, lines + notes, foreign=True)
    if rules is not None:
        golden, mine, notes = apply(rules, golden, mine)
        lines += notes or [f"mapping: no rule of {rules.origin} fits any tap"]
    sides = [vllm_names.engine(d.run, [r.tap for r in first_of_each_site(d.records)]) for d in (golden, mine)]
    foreign = set(sides) == {vllm_names.TRANSFORMERS, vllm_names.VLLM}
    if foreign:
        lines.append(f"mapping: golden is a dump of {sides[0]}, mine of {sides[1]}: built-in rules")
        # the rules say how vLLM's places are made, whichever side vLLM is
        swapped = sides[0] == vllm_names.VLLM
        golden, mine = (View(d, with_rows(d.records)) for d in (golden, mine))
        theirs, own = (mine, golden) if swapped else (golden, mine)
        theirs, notes = in_order(theirs, own)
        golden, mine = (own, theirs) if swapped else (theirs, own)
        lines += notes
        attention, changed = attention_inputs(own, theirs)
        stored = {**vllm_names.stored_otherwise(theirs, own), **attention}
        golden, mine, notes = apply(replace(vllm_names.RULES, exact=stored), golden, mine, swapped)
        lines += notes
        apart_from = changed | other_places(theirs, own, *((mine, golden) if swapped else (golden, mine)))
        golden = View(golden, [r for r in golden.records if (r.tap, r.role) not in apart_from])
        lines += [f"mapping: {tap}/{role} is not compared: {why}" for (tap, role), why in apart_from.items()]
    apart = None if foreign else experts_apart(*map(first_of_each_site, (golden.records, mine.records)))
    if apart is not None:
        golden, mine, notes = apply(apart[0], golden, mine, apart[1])
        lines += notes
    alone = None if foreign else routed_alone(*map(first_of_each_site, (golden.records, mine.records)))
    if alone is not None:
        rules, swapped, absent = alone
        golden, mine, notes = apply(rules, golden, mine, swapped)
        golden, mine = (View(d, [r for r in d.records if (r.tap, r.role) not in gone]) for d, gone in (
            (golden, set() if swapped else {(tap, "output.0") for tap in absent}),
            (mine, {(tap, "output.0") for tap in absent} if swapped else set())))  # fmt: skip
        lines += notes
        if absent:
            lines.append(f"the routed experts alone on one side: {len(absent)} outputs not compared")
    return Bridge(golden, mine, lines, foreign)


def apply(rules: Rules, golden: Any, mine: Any, swapped: bool = False) -> tuple[View, View, list[str]]:
    """(golden, mine, lines) with the tensors that ``rules`` make, under mine's names; swapped: the rules say how
    golden's places are built from mine's, and the tensors stand under golden's names."""
    if swapped:
        mine, golden, lines = apply(rules, mine, golden)
        return golden, mine, lines
    work = _Work(rules, golden.records, mine.records, list(mine.modules.values()))
    work.run()
    stay = [r for r in work.golden.records if work.stays(r)] + [r for made in work.made.values() for r in made]
    return View(golden, stay), View(mine, work.mine_records()), work.lines()


class _Records:
    def __init__(self, records: Iterable[Record]):
        self.records = list(records)
        self.places: dict[Place, dict[_Moment, Record]] = defaultdict(dict)
        self.roles: dict[str, list[str]] = {}
        for r in self.records:
            if (r.tap, r.role) not in self.places:
                self.roles.setdefault(r.tap, []).append(r.role)
            self.places[(r.tap, r.role)][_moment(r)] = r


class _Work:
    def __init__(
        self, rules: Rules, golden: Sequence[Record], mine: Sequence[Record], modules: Sequence[Sequence[Module]]
    ):  # fmt: skip
        """modules: mine's, of each rank."""
        self.rules, self.attrs = rules, {m.tap: m.attrs for of in modules for m in of}
        self.mine = _Records(mine)
        self.mine_classes = {r.tap: r.cls for r in mine}
        self.kinds = _known(mine)
        self.called = _called(modules, self.kinds[False])
        self.renamed: Counter[str] = Counter()
        self.golden = _Records(self._rename(golden))
        self.made: dict[Place, list[Record]] = {}
        self.sums: dict[Place, list[Record]] = {}
        self.summed: set[Place] = set()
        self.used: set[str] = set()
        self.taken: set[Place] = set()
        self.replaced: set[str] = set()
        self.problems: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()

    def run(self) -> None:
        for tap in list(self.mine.roles):
            for rule in (*self.rules.exact.get(tap, ()), *self.rules.rules):
                groups = () if tap in self.rules.exact and rule.pattern == tap else match(rule.pattern, tap)
                if groups is None or not self._needed(rule, groups):
                    continue
                before = len(self.made)
                for part in rule.parts:
                    for mine_roles, places in self._expand(part, tap, groups):
                        self._make(rule, part, tap, mine_roles, places, fill(part.equal, groups) or "")
                if rule.alone and len(self.made) > before:
                    self.replaced.add(tap)

    def stays(self, r: Record) -> bool:
        if (r.tap, r.role) in self.made or r.tap in self.replaced:
            return False
        if r.tap in self.used and r.tap not in self.mine.roles:
            return False  # all of it went into something else
        return (r.tap, r.role) not in self.taken or r.role in self.mine.roles.get(r.tap, ())

    def mine_records(self) -> list[Record]:
        parts = [r for r in self.mine.records if (r.tap, r.role) in self.summed]
        covered = {(tap, *_moment(r)) for (tap, _), rs in self.sums.items() for r in rs}
        left = [r for r in self.mine.records if (r.tap, r.role) not in self.summed]
        left += [r for r in parts if (r.tap, *_moment(r)) not in covered]
        return left + [r for rs in self.sums.values() for r in rs]

    def lines(self) -> list[str]:
        lines = [f"mapping: {n} taps of golden renamed by {what}" for what, n in self.renamed.items()]
        lines += [f"mapping: {n} tensors of mine made by {label}" for label, n in self.counts.items()]
        return lines + [f"mapping: {n} tensors not made: {why}" for why, n in self.problems.items()]

    def _rename(self, records: Sequence[Record]) -> list[Record]:
        if not self.rules.renames:
            return list(records)
        names: dict[tuple[str, bool], tuple[str, str]] = {}
        out: list[Record] = []
        for r in records:
            key = (r.tap, r.step is None)
            if key not in names:
                names[key] = self._name(*key)
                if names[key][1]:
                    self.renamed[names[key][1]] += 1
            tap, why = names[key]
            if not why:
                out.append(r)
                continue
            made = derive([r], tap, r.role, rule=f"mapping {why}")
            assert isinstance(made, Derived)
            out.append(made)
        return out

    def _name(self, tap: str, param: bool) -> tuple[str, str]:
        """The tap's name in mine's words, and which renames led there."""
        why = []
        for rename in self.rules.renames:
            groups = match(rename.pattern, tap)
            target = None if groups is None else fill(rename.target, groups)
            if target and target != tap and _fits(tap, target, self.kinds[param]):
                tap = target
                why.append(rename.label or f"{rename.pattern} → {rename.target}")
        path = next((p for p in (tap, *enclosing(tap)) if p in self.called or p in self.kinds[False]), "")
        if not why and not param and path in self.called:
            return self.called[path] + tap[len(path) :], "the name by which mine calls the layer"
        return tap, ", ".join(why)

    def _needed(self, rule: TapRule, groups: Sequence[str]) -> bool:
        tap, _, role = (fill(rule.needs, groups) or "").partition("/")
        return not rule.needs or (tap in self.mine.roles and (not role or role in self.mine.roles[tap]))

    def _expand(self, part: RoleRule, tap: str, groups: Sequence[str]) -> list[tuple[tuple[str, ...], list[Place]]]:
        """(roles of mine, golden places) that ``part`` means at ``tap``."""
        taps = [fill(s.tap, groups) for s in part.sources]
        named = [t for t in taps if t is not None]
        if len(named) < len(taps) or not named:
            return []
        own = self.mine.roles[tap]
        if part.mine is not None:
            places = []
            for t, s in zip(named, part.sources, strict=True):
                role = self._same(s, t, part.mine)
                if role is None:
                    return []
                places.append((t, role))
            return [(tuple(part.mine.split("+")), places)]
        first = self.golden.roles.get(named[0], [])
        out: list[tuple[tuple[str, ...], list[Place]]] = []
        for golden_role, mine_role, _ in pair_roles(first, own):
            whole = len(named) == 1 or mine_role.startswith(("input.", "inplace."))
            out.append(((mine_role,), [(t, golden_role) for t in (named[:1] if whole else named)]))
        if out:
            self.used.update(named)
        return out

    def _same(self, source: Source, tap: str, mine_role: str) -> str | None:
        """The role of a source: as it says, or the golden's role of the same name or kind."""
        if source.role is not None:
            return source.role
        roles = self.golden.roles.get(tap, [])
        if mine_role in roles:
            return mine_role
        kind = mine_role.partition(".")[0]
        alike = [r for r in roles if r.startswith(kind + ".")]
        return alike[0] if len(alike) == 1 and kind != "param" else None

    def _make(self, rule: TapRule, part: RoleRule, tap: str, mine_roles: tuple[str, ...], places: list[Place],
              equal: str) -> None:  # fmt: skip
        role = joined_role(mine_roles)
        if (tap, role) in self.made or any((tap, r) not in self.mine.places for r in mine_roles):
            return
        if any((tap, r) in self.summed for r in mine_roles) or any(p not in self.golden.places for p in places):
            return
        if len(mine_roles) > 1 and self._is_whole(tap, mine_roles):
            return
        if equal and self._changed((tap, role), *equal.split("/")):
            return
        label = f"mapping {rule.label}"
        made = self._derive(self.golden, places, tap, role, part, label)
        if not made:
            return
        if len(mine_roles) > 1:
            own = [(tap, r) for r in mine_roles]
            sums = self._derive(self.mine, own, tap, role, RoleRule(None, (), SUM), label)
            if not sums:
                return
            self.sums[(tap, role)] = sums
            self.summed.update(own)
        self.made[(tap, role)] = made
        self.used.update(t for t, _ in places)
        self.taken.update(p for p in places if p[0] == tap)
        self.counts[rule.label] += 1

    def _is_whole(self, tap: str, roles: tuple[str, ...]) -> bool:
        """Whether by its code the module gives out, as the first of ``roles``, a sum with the others in it, or reads
        the first and none of the others."""
        forward = {role: parsed(text) for role, text in (object_at(self.attrs.get(tap, {}), FORWARD) or {}).items()}
        if roles[0].startswith("input."):
            read = {name for formula in forward.values() for name in reads(formula)}
            first, *others = (role.partition(".")[2] for role in roles)
            return first in read and read.isdisjoint(others)
        whole, *rest = (forward.get(r) for r in roles)
        return all(any(same(term, one) for term in terms(whole)) for one in rest)

    def _changed(self, place: Place, tap: str, begin: str) -> bool:
        """Whether mine's tensor at ``tap`` whose role begins so is another than mine's at ``place``."""
        there = next((role for role in self.mine.roles.get(tap, ()) if role.startswith(begin)), None)
        if there is None:
            return False
        own, other = self.mine.places[place], self.mine.places[tap, there]
        pairs = [(r.hash, other[moment].hash) for moment, r in own.items() if moment in other]
        return any(None not in pair and pair[0] != pair[1] for pair in pairs)

    def _heads(self, tap: str, part: RoleRule) -> tuple[int, ...]:
        """`Derived.heads`: of a rotary embedding those of mine's module, or of the one beside it."""
        if part.join != ROPE or part.heads:
            return part.heads
        beside = self.attrs.get(f"{tap.rpartition('.')[0]}.rotary_emb", {})
        size = self.attrs.get(tap, {}).get("head_size")
        known = isinstance(size, int) and not isinstance(size, bool) and size > 0
        return (int(size or 0), int(beside.get("is_neox_style") is False)) if known else ()

    def _derive(
        self, side: _Records, places: list[Place], tap: str, role: str, part: RoleRule, label: str
    ) -> list[Record]:
        out: list[Record] = []
        heads = self._heads(tap, part)
        for moment in side.places[places[0]]:
            found = []
            for place in places:
                by = side.places[place]
                found.append(by.get(moment) or (by.get((*moment[:2], 0)) if part.join == ROPE else None))
            parts = [p for p in found if p is not None]
            if len(parts) < len(found):
                continue
            # An input is one tensor also where several modules take it; a part of one is not joined with anything.
            transpose = part.transpose if role.startswith("param.") or part.mine is not None else ()
            cls = self.mine_classes.get(tap, "")
            made = derive(parts, tap, role, cls=cls, join=part.join, dim=part.dim, transpose=transpose, heads=heads,
                          rule=label)  # fmt: skip
            if isinstance(made, str):
                self.problems[made] += 1
            else:
                out.append(made)
        return out


def joined_role(roles: Sequence[str]) -> str:
    """``input.x+residual`` for the sum of ``input.x`` and ``input.residual``."""
    kind = roles[0].partition(".")[0]
    rest = [r.partition(".")[2] if r.startswith(kind + ".") else r for r in roles[1:]]
    return "+".join([roles[0], *rest])


def _moment(r: Record) -> _Moment:
    return (r.rank, r.step, r.call)


def _known(records: Iterable[Record]) -> dict[bool, set[str]]:
    """Taps and what encloses them, for tensors (False) and parameters (True)."""
    known: dict[bool, set[str]] = {False: set(), True: set()}
    for tap, param in {(r.tap, r.step is None) for r in records}:
        known[param].update((tap, *enclosing(tap)))
    return known


def _called(modules: Sequence[Sequence[Module]], known: set[str]) -> dict[str, str]:
    """Names of layers that have several, and were captured under one other: by name, that one. (Gemma 3n's are called
    as parts of its two decoders, and loaded as the model's.) Of other modules, golden's of that name may compute
    something else: vLLM's shared expert holds the gate behind it, too."""
    names: dict[tuple[int, int], set[str]] = defaultdict(set)
    for rank, m in ((rank, m) for rank, of in enumerate(modules) for m in of):
        if m.tap.rpartition(".")[2].isdecimal():
            names[rank, m.index].add(m.tap)
    found = [own for own in names.values() if len(own & known) == 1]
    return {name: next(iter(own & known)) for own in found for name in own - known}


def _fits(tap: str, target: str, known: set[str]) -> bool:
    """Mine has the new name; or, for a part of what mine fuses, it has what would enclose the new name, and not the old
    name, and only then: a neighbour of the same parent says nothing."""
    if target in known:
        return True
    inside, outside = target.rpartition(".")[0], tap.rpartition(".")[0]
    return tap not in known and inside != outside and inside in known
