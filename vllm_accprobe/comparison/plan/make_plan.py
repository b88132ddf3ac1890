"""What will be compared with what, before any tensor is read.

The problem: a comparison that goes wrong silently pairs the wrong things. The idea: everything that names, row maps,
layouts and shapes decide is decided here, as plain values that print as lines. Tensors of operator calls that say
nothing about the model (unwritten buffers, handles, block tables) are set apart first, each with its reason. An index
from row key to (tensor, row) is made once per set of row maps and serves all taps of these steps (`Indices`). Not here:
how rows get keys (align/tokens.py), joining ranks (unit.py), the rules (align/).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from operator import itemgetter
from typing import Any

import numpy as np

from vllm_accprobe.align.data_flow import Key, Layers, Tree, add_parameters, flow_order, gaps, unseen_taps
from vllm_accprobe.align.derived import Derived, View
from vllm_accprobe.align.mapping import Rules
from vllm_accprobe.align.names import NamePlan, TapRoles, bridge, pair_names
from vllm_accprobe.align.tokens import (
    RequestPlan,
    RowSet,
    SideRows,
    Space,
    TokenPlan,
    align_rows,
    distinct,
    own_cell,
    pair_requests,
)
from vllm_accprobe.align.without_row_maps import plan_steps
from vllm_accprobe.comparison.gaps import NOTHING, Untapped, untapped_of
from vllm_accprobe.comparison.plan.groups import Groups, Joining, PlacedRecords, merged
from vllm_accprobe.comparison.plan.relations import OTHER_FACTOR, scaled_elsewhere, with_routers
from vllm_accprobe.comparison.plan.unit import SAMPLER, TOKEN, WHOLE, Loose, Unit, loose, unsummed_taps, widths_of
from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.journal import SEPARATOR, inputs, is_operator
from vllm_accprobe.dump.reader import matches
from vllm_accprobe.dump.record_table import ListedRecords, first_of_each_site, of_new_places, of_sites, table_of
from vllm_accprobe.dump.schema import OWN, Module, Record

ONE_SIDE = "operator calls are in one of the dumps only"
ENGINES = "an operator outside any module (the engine's own bookkeeping)"
RANKS = "operators of several ranks"
FRESH = "memory that nobody had written to when the operator or the module was called"
_WRITTEN = ("inplace.output", "inplace.out")
"""Arguments of vLLM's layers that these write their result into and do not read, after the call."""
INTEGERS = "integers of a library's operator (handles, schedules)"
BLOCKS = "blocks of a cache, whose numbers and other contents differ from run to run"
SHAPES = "an operator's tensor of another shape"
UNPAIRED = "an operator that the other side did not call there"

Place = tuple["int | None", str, str, int]
"""(step, tap, role, call)."""


def set_apart(golden: Any, mine: Any) -> tuple[Any, Any, Counter[str]]:
    """The two dumps without tensors of operators and buffers that say nothing about the model, and how many of mine
    were left out, by reason (of golden, where mine has none of them at all)."""
    sides = _OperatorFacts(golden), _OperatorFacts(mine)
    skipped: Counter[str] = Counter()
    if not any(side.taps or side.buffers for side in sides):
        return golden, mine, skipped
    views = []
    for dump, side, other in ((golden, sides[0], sides[1]), (mine, sides[1], sides[0])):
        reason_of = _reasons(side, other)
        kept: list[Record] = []
        counts = skipped if dump is mine or not (sides[1].taps or sides[1].buffers) else Counter()
        for r in dump.records:
            reason = reason_of(r)
            if reason is None:
                kept.append(r)
            else:
                counts[reason] += 1
        views.append(View(dump, kept))
    return views[0], views[1], skipped


class _OperatorFacts:
    def __init__(self, dump: Any):
        # Another tool's API records (msprobe) are the model's own calls, named by module: nothing of them is set apart.
        ops = [call for call in getattr(dump, "ops", ()) if is_operator(call.tap)]
        self.taps = {call.tap for call in ops}
        self.fresh: set[tuple[int, Place]] = set()
        self.blocks: set[tuple[int, Place]] = set()
        self.shapes: dict[Place, tuple[int, ...]] = {}
        self.modules = False
        self.ranks = len(dump.ranks)
        firsts = first_of_each_site(dump.records)
        written = {(r.tap, r.role) for r in firsts if r.role in _WRITTEN}
        self.buffers = {(tap, role.replace("inplace.", "input.")) for tap, role in written}
        if not ops:
            return
        for call in ops:
            for tensor in inputs(call):
                if tensor.get("fresh"):
                    self.fresh.add((call.rank, (call.step, call.tap, tensor["role"], call.call)))
                blocks = tensor.get("blocks")
                for role in (tensor["role"], f"inplace.{tensor['role']}", blocks["ids"]) if blocks else ():
                    self.blocks.add((call.rank, (call.step, call.tap, role, call.call)))
        for r in dump.records:
            if r.tap in self.taps:
                self.shapes[r.step, r.tap, r.role, r.call] = r.shape
            elif r.step is not None:
                self.modules = True


def _reasons(side: _OperatorFacts, other: _OperatorFacts) -> Callable[[Record], str | None]:
    buffers = side.buffers | other.buffers

    def reason(r: Record) -> str | None:
        if r.tap not in side.taps:
            return FRESH if (r.tap, r.role) in buffers else None
        if not other.taps:
            return ONE_SIDE
        if side.modules and r.tap.startswith(SEPARATOR):
            return ENGINES
        if side.ranks > 1 or other.ranks > 1:
            return RANKS
        place = r.step, r.tap, r.role, r.call
        if (r.rank, place) in side.fresh or (r.rank, place) in other.fresh:
            return FRESH
        if (r.rank, place) in side.blocks:
            return BLOCKS
        if DTYPES[r.dtype].kind == "int" and not r.cls.startswith("aten."):
            return INTEGERS
        there = other.shapes.get(place)
        if there is None:
            return UNPAIRED
        return SHAPES if there != r.shape else None

    return reason


_EMPTY = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Index:
    """Row keys of several golden tensors: sorted ``keys``, with the tensor's number and the row in it."""

    keys: np.ndarray
    group: np.ndarray
    row: np.ndarray


@dataclass(frozen=True)
class Meeting:
    """The rows of one tensor of mine that lie among some golden tensors; arrays of one length, in mine's order.

    used: numbers of the golden tensors that hold one. row: of mine; number, other: golden's tensor and its row. rows:
    the rows themselves. places: for each tensor in ``used``, where its rows stand in these arrays. aligned: one golden
    tensor, and each row meets the row of the same place. complete: all rows of mine's tensor are here; both: and all
    of the golden's.
    """

    used: tuple[int, ...]
    row: np.ndarray
    number: np.ndarray
    other: np.ndarray
    rows: RowSet
    aligned: bool
    complete: bool
    both: bool
    places: tuple[np.ndarray, ...] = ()


class Indices:
    """What follows from the row maps alone. May be shared by threads: two of them may make the same, to no harm."""

    def __init__(self, sides: tuple[SideRows, SideRows]):
        self.sides = sides
        self.batches = [_batches(s) for s in sides]
        self.left_out = frozenset((w[0], w[1]) for s in sides[1:] for w, rows in s.rows.items() if not rows.keep.all())
        """Mine's moments with rows that are not compared: (cell, step)."""
        self.kept = frozenset(w for w, rows in sides[1].rows.items() if rows.keep.any())
        """Mine's spaces that have a row to compare. Asked for every tensor, hence asked of numpy once."""
        self._known: dict[tuple[Space, ...], Index] = {}
        self._met: dict[tuple[Space, ...], Callable[[Space], Meeting | None]] = {}

    def meet(self, where: Space, wheres: tuple[Space, ...]) -> Meeting | None:
        """How the rows of mine's ``where`` that are kept lie among the golden's ``wheres``; None if none does."""
        return self.meetings(wheres)(where)

    def meetings(self, wheres: tuple[Space, ...]) -> Callable[[Space], Meeting | None]:
        """`meet` for many spaces of mine: ``wheres`` may be long, and are looked up once."""
        if wheres not in self._met:
            self._met[wheres] = cache(partial(self._meet, wheres))
        return self._met[wheres]

    def _meet(self, wheres: tuple[Space, ...], where: Space) -> Meeting | None:
        index, rows = self.index(wheres), self.sides[1].rows[where]
        kept = np.flatnonzero(rows.keep)
        keys = rows.keys[kept]
        at = np.minimum(np.searchsorted(index.keys, keys), max(len(index.keys) - 1, 0))
        hit = index.keys[at] == keys if len(index.keys) else np.zeros(len(keys), bool)
        if not hit.any():
            return None
        kept, at = kept[hit], at[hit]
        number, other = index.group[at], index.row[at]
        used = tuple(np.unique(number).tolist())
        aligned = len(used) == 1 and np.array_equal(other, kept)
        complete = len(kept) == len(rows.keys)
        both = aligned and complete and len(self.sides[0].rows[wheres[used[0]]].keys) == len(kept)
        places = tuple(np.flatnonzero(number == i) for i in used)
        met = RowSet(rows.keys[kept], rows.decode[kept])
        return Meeting(used, kept, number, other, met, aligned, complete, both, places)

    def index(self, wheres: tuple[Space, ...]) -> Index:
        """Where each kept row lies among ``wheres``; the last one counts where a row lies in several."""
        if wheres not in self._known:
            keys, number, row = [], [], []
            for i, where in enumerate(wheres):
                rows = self.sides[0].rows[where]
                kept = np.flatnonzero(rows.keep)
                keys.append(rows.keys[kept])
                number.append(np.full(len(kept), i))
                row.append(kept)
            k, n, r = (np.concatenate(x) if x else _EMPTY for x in (keys, number, row))
            order = np.argsort(k, kind="stable")
            k, n, r = k[order], n[order], r[order]
            last = np.append(k[1:] != k[:-1], True) if len(k) else np.zeros(0, bool)
            self._known[wheres] = Index(k[last], n[last], r[last])
        return self._known[wheres]


def _batches(side: SideRows) -> dict[tuple[int, int | None], Any]:
    out: dict[tuple[int, int | None], Any] = {}
    for where in sorted(side.rows, key=lambda w: (w[0], w[1], w[2])):
        if where[2] != "logits":
            moment = (where[0], where[1])
            out[moment] = (*out.get(moment, ()), where[2], side.rows[where].keys.tobytes())
    return out


@dataclass(frozen=True)
class Plan:
    requests: RequestPlan
    tokens: TokenPlan
    names: NamePlan
    units: list[Unit]
    tree: Tree
    layers: int
    skipped: Counter[str] = field(default_factory=Counter)
    ranks: tuple[int, int] = (1, 1)
    mapped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    untapped: Untapped = NOTHING

    def unequal_copies(self) -> int:
        """Tensors of golden that several ranks should hold alike and, by their hashes, do not; those of mine are
        measured, because they can be errors."""
        return sum(int(Groups.of(u.golden).unequal_copies().sum()) for u in self.units)

    def lines(self) -> list[str]:
        lines = self.requests.lines() + self.tokens.lines() + self.mapped + self.names.lines()
        lines.append(f"ranks: {self.ranks[0]} in golden, {self.ranks[1]} in mine")
        kinds: Counter[str] = Counter()
        for unit in self.units:
            for groups in map(Groups.of, filter(len, (unit.golden, unit.mine))):
                if groups.size[0] > 1 and (merge := groups[0].merge) is not None:
                    kinds[f"{groups[0].first.layout.kind} ({merge.note or merge.kind})"] += 1
        lines += [f"ranks: {n} tensors merged as {kind}" for kind, n in kinds.items()]
        return lines + [f"skipped: {n} {reason}" for reason, n in self.skipped.items()]


def make_plan(golden: Any, mine: Any, *, taps: str | None = None, mapping: Rules | None = None) -> Plan:
    """The plan for two open dumps. taps: globs over tap names, separated by commas, ``!`` excludes; None compares all.
    mapping: the user's rules for names (align.mapping.load_mapping)."""
    golden, mine, apart = set_apart(golden, mine)
    stepwise = plan_steps(golden, mine)
    if stepwise is not None:
        golden, mine = stepwise.golden, stepwise.mine
    bridged = bridge(golden, mine, mapping)
    golden, mine = bridged.golden, bridged.mine
    shares = loose(golden), loose(mine)
    tokens: TokenPlan
    if stepwise is not None:
        requests, tokens = stepwise.requests, stepwise.tokens
        cell = stepwise.cell
        sides = [
            PlacedRecords(t := table_of(_wholes(d, s)), np.fromiter(map(cell, t), np.int64, len(t)))
            for d, s in zip((golden, mine), shares, strict=True)
        ]
    else:
        requests = pair_requests(distinct(golden.requests), distinct(mine.requests))
        tokens = align_rows(golden, mine, requests, (_sampled(golden), _sampled(mine)))
        cells = tokens.golden.cells, tokens.mine.cells
        sides = [_placed(d, c, s) for d, c, s in zip((golden, mine), cells, shares, strict=True)]
    orders = [_order(golden, sides[0]), _order(mine, sides[1])]
    places = _places(golden, orders[0], taps), _places(mine, orders[1], taps)
    names = pair_names(*places, by_order=not bridged.foreign)
    place = {key: i for i, key in enumerate(orders[1])}
    layers = [Layers(o, _modules(d), unseen_taps(d)) for d, o in zip((golden, mine), orders, strict=True)]
    skipped = names.skips() + apart + (stepwise.skipped if stepwise is not None else Counter())
    notes = list(stepwise.notes) if stepwise is not None else []
    notes += _unsummed_notes("golden", golden, shares[0]) + _unsummed_notes("mine", mine, shares[1])
    partners = None
    if stepwise is not None:
        partners = dict(stepwise.pairs), {m: g for g, m in stepwise.pairs}
    joining = Joining((widths_of(golden), widths_of(mine)), partners)
    paired: list[tuple[Any, ...]] = []
    for pair in names.pairs:
        for golden_role, mine_role, role_rule in pair.roles:
            for call in sides[1].calls(pair.mine.tap, mine_role):
                key = (pair.mine.tap, mine_role, call)
                found = sides[0].find((pair.golden.tap, golden_role, call), sides[1].vision(key))
                if not len(found):
                    skipped["golden has no such call"] += len(sides[1].keys[key])
                    continue
                rule = pair.rule if role_rule == "exact" else f"{pair.rule}, roles by {role_rule}"
                rule = _rule(sides[0], found) or rule
                groups = merged((sides[0], sides[1]), (found, sides[1].keys[key]), joining)
                golden_key = (pair.golden.tap, golden_role, call)
                at = place[key] if key in place else place[(*key[:2], 0)]  # a weight of a later step
                paired.append((key, golden_key, pair.mine.cls, rule, at, groups))
    paired.sort(key=itemgetter(4))
    depths = _depths([p[0] for p in paired], [p[1] for p in paired], layers)
    units = [
        Unit(key, other, cls, rule, at, depth, own[0], own[1], gap=gap, vision=own[1].vision)
        for (key, other, cls, rule, at, own), (depth, gap) in zip(paired, depths, strict=True)
    ]
    units = with_routers(units, [*_modules(golden), *_modules(mine)])
    if unscaled := scaled_elsewhere(units, _modules(golden), _modules(mine)):
        skipped[OTHER_FACTOR] += sum(len(units[i].mine) for i in unscaled)
        units = [u for i, u in enumerate(units) if i not in unscaled]
    classes = {p.mine.tap: p.mine.cls for p in names.pairs}
    tree = Tree.of(list(dict.fromkeys(u.key[0] for u in units)), classes, _spans(units))
    ranks, layers_passed = (len(golden.ranks), len(mine.ranks)), max((u.depth for u in units), default=0)
    untapped = _untapped(units, sides, orders, names, (golden, mine))
    return Plan(requests, tokens, names, units, tree, layers_passed, skipped, ranks, bridged.lines, notes, untapped)


def _untapped(
    units: Sequence[Unit], sides: Sequence[PlacedRecords], orders: Sequence[Sequence[Key]], names: NamePlan,
    dumps: tuple[Any, Any],
) -> Untapped:  # fmt: skip
    ran = [u for u in units if not u.is_param]
    compared = {u.golden_key: u.key for u in ran}, {u.key: u.key for u in ran}
    taps = {p.golden.tap: p.mine.tap for p in names.pairs}
    return untapped_of([s.of_one_rank for s in sides], orders, compared, taps, dumps)


def _wholes(dump: Any, shares: Loose) -> Sequence[Record]:
    """The records; partial sums that count as wholes (unit.py), as such."""
    if not shares:
        records: Sequence[Record] = dump.records
        return records
    loose = (r.layout.kind == "partial" and (r.rank, r.step, r.hash) in shares for r in dump.records)
    return [replace(r, layout=WHOLE) if alone else r for r, alone in zip(dump.records, loose, strict=True)]


def _placed(dump: Any, cells: Mapping[int, int], shares: Loose) -> PlacedRecords:
    """Parameters of all cells are one."""
    table = table_of(_wholes(dump, shares))
    ranks, at = np.unique(table.columns["rank"], return_inverse=True)
    of_rank = np.array([(cells.get(r, 0), own_cell(r)) for r in ranks.tolist()], np.int64).reshape(-1, 2)[at]
    cell = np.where(table.of_sites(lambda site: site.layout.kind == OWN), of_rank[:, 1], of_rank[:, 0])
    return PlacedRecords(table, np.where(table.ran, cell, 0))


def _rule(side: PlacedRecords, groups: np.ndarray) -> str | None:
    """By which rule the first of these records was made of others, if any was."""
    if not isinstance(side.records, ListedRecords):
        return None
    at = np.concatenate([side.order[side.start[g] : side.start[g + 1]] for g in groups.tolist()])
    return next((r.rule for r in side.records.made(at) if isinstance(r, Derived)), None)


def _unsummed_notes(side: str, dump: Any, shares: Loose) -> list[str]:
    taps = unsummed_taps(dump, shares) if shares else []
    if not taps:
        return []
    more = f" and of {len(taps) - 1} more" if len(taps) > 1 else ""
    what = f"nobody adds up the ranks' partial sums of {taps[0]}{more} in {side}"
    return [f"{what}: each rank goes on with its own share"]


def _order(dump: Any, side: PlacedRecords) -> list[Key]:
    ran = ((r.step, r.rank, r.seq, (r.tap, r.role, r.call)) for r in of_new_places(dump.records) if r.step is not None)
    ordered = flow_order(ran)
    known = set(ordered)
    params = [(tap, role) for tap, role, _ in side.keys if (tap, role, 0) not in known]
    return add_parameters(ordered, params, _modules(dump))


def _modules(dump: Any) -> list[Module]:
    return max(dump.modules.values(), key=len, default=[])


def _places(dump: Any, ordered: Iterable[Key], taps: str | None) -> list[TapRoles]:
    roles: dict[str, list[str]] = {}
    for tap, role, _ in ordered:
        if _wanted(tap, taps):
            roles.setdefault(tap, [])
            if role not in roles[tap]:
                roles[tap].append(role)
    classes = {r.tap: r.cls for r in first_of_each_site(dump.records)}
    params: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for r in of_sites(dump.records, lambda site: site.parameter and site.tap in roles):
        if r.hash is not None:
            params[r.tap].append((r.role, f"{r.rank} {r.hash}"))
    return [TapRoles(tap, classes.get(tap, ""), tuple(rs), tuple(sorted(params[tap]))) for tap, rs in roles.items()]


def _depths(mine: Sequence[Key], golden: Sequence[Key], layers: Sequence[Layers]) -> list[tuple[int, int]]:
    """For each place (layers passed, those of them since the place before), by the dump that shows more of it."""
    counts = [not role.startswith("param.") for _, role, _ in mine]
    passed, between = [], []
    for keys, known in zip((golden, mine), layers, strict=True):
        passed.append([known.passed(key) for key in keys])
        between.append(gaps(passed[-1], [tap for tap, _, _ in keys], counts))
    return [(max(len(g), len(m)), max(gap)) for g, m, *gap in zip(*passed, *between, strict=True)]


def _spans(units: Iterable[Unit]) -> dict[str, tuple[int, int]]:
    """The first call's stretch of the data flow, of taps that were seen going in and coming out."""
    seen: dict[str, list[tuple[int, bool]]] = defaultdict(list)
    for u in units:
        if not u.is_param and u.key[2] == 0:
            seen[u.key[0]].append((u.order, u.key[1].startswith("input")))
    both = {tap: orders for tap, orders in seen.items() if len({going_in for _, going_in in orders}) == 2}
    return {tap: (min(orders)[0], max(orders)[0]) for tap, orders in both.items()}


def _wanted(tap: str, taps: str | None) -> bool:
    return taps is None or matches([glob.strip() for glob in taps.split(",")], (tap,))


def _sampled(dump: Any) -> Any:
    """(rank, step) → sampled tokens of the logits rows, read from the dump when requested."""
    tokens = of_sites(dump.records, lambda site: (site.tap, site.role) == (SAMPLER, TOKEN))
    records = {(r.rank, r.step): r for r in tokens}

    def sampled(rank: int, step: int) -> Any:
        r = records.get((rank, step))
        if r is None or r.payload is None or r.rows is None:
            return None
        try:
            tokens = dump.read(r).reshape(-1)
        except DumpError:  # reported where the tensor itself is compared
            return None
        return tokens if r.shape and len(tokens) == r.shape[0] else None

    return sampled
