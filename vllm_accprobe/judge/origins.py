"""Which taps introduce an error, rather than pass one on.

The problem: behind the first wrong number everything is wrong; a row of attention depends on all earlier rows of its
request, a linear layer's on one, a text row on all rows of its image. The idea: row by row, what comes out of a tap is
compared with what is in front of it (align/data_flow.py), of each source the largest error that can reach the row
(`Influence`). An error that exceeds the limit by more than errors in front explain is created there. The deepest
visible module is the origin; a parent is one only for what none of its children shows (a residual addition, a reshape).
Errors within the limits are compared with the sibling layers (siblings.py). Also: what each tap creates at most, and
whether a fault is in every layer. Not here: how large an error is (tensor_errors.py), chosen experts and flipped tokens
(near_ties.py).
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Generic, NotRequired, TypedDict, TypeVar

import numpy as np

from vllm_accprobe.align.data_flow import BACKWARD, INPUT, OUTPUT, PARAM, DataFlow, is_fed
from vllm_accprobe.align.names import enclosing
from vllm_accprobe.align.tokens import RowSet, Unions, position, subject
from vllm_accprobe.dump.schema import ROOT_TAP
from vllm_accprobe.judge.constants import AFTER_ANOTHER, COLUMNS_AFTER_ANOTHER, NARROW, REMOVED
from vllm_accprobe.judge.siblings import COLUMNS, Hidden, Siblings, TensorStats, chance_of_size
from vllm_accprobe.judge.statistic import BEHIND_A_ROUTER, BEYOND_CHANCE, PROVED, RATE
from vllm_accprobe.judge.tensor_errors import Columns, TensorErrors, kind_of_place, operator_of, spread
from vllm_accprobe.spill_buffer import SpillBuffer
from vllm_accprobe.standards.limits import Standard

KEPT = 64 << 20
"""Bytes of answers that are kept."""


@dataclass(frozen=True, eq=False)
class PassedOn:
    """What a list of sources passes on to the rows of a place: as TensorStats' before, gain_before, columns_before."""

    err: np.ndarray
    gain: np.ndarray
    columns: list[Columns]


class Influence:
    """images: TokenPlan.images, subject of a vision row → the text places which its image fills."""

    def __init__(self, images: Mapping[int, list[tuple[int, int, int]]], kept: int = KEPT):
        self.images, self._limit = images, kept
        self._found: OrderedDict[tuple[Any, ...], np.ndarray] = OrderedDict()
        self._bytes = 0
        self._whole: dict[tuple[RowSet, RowSet], bool] = {}

    def again(
        self, source: TensorErrors, what: str, values: np.ndarray, vision: bool, rows: RowSet, mixing: bool
    ) -> np.ndarray:
        """`of`, remembered. what: names ``values``, which must be the same for one source."""
        name = source, what, vision, rows, mixing
        if name in self._found:
            self._found.move_to_end(name)
            return self._found[name]
        self._found[name] = found = self.of(source, values, vision, rows, mixing)
        self._bytes += found.nbytes
        while self._bytes > self._limit and len(self._found) > 1:
            self._bytes -= self._found.popitem(last=False)[1].nbytes
        return found

    def of(self, source: TensorErrors, values: np.ndarray, vision: bool, wanted: RowSet, mixing: bool) -> np.ndarray:
        """The largest of ``values`` (of ``source``'s rows with errors) among the rows that can influence each of the
        ``wanted``, which are sorted: float64 [len(wanted)], to be read only. vision: these are rows of images."""
        base, keys = source.everywhere, wanted.keys
        if not len(source.keys) or (vision and not source.vision):
            return np.full(len(keys), base)
        if source.vision and vision:
            found = _same_subject(source.keys, values, keys)
        else:
            rows, seen = source.keys, source.seen
            if source.vision:
                rows, values = self._as_text(source.keys, values)
                seen = RowSet(rows)
            found = self._causal(rows, values, seen, wanted) if mixing else spread(keys, rows, values)
        return np.maximum(base, found)

    def passed_on(
        self, sink: TensorErrors, sources: list[TensorErrors], mixing: bool, known: PassedOn | None
    ) -> PassedOn:
        """What reaches the rows of ``sink`` from ``sources``, and from those whose share is ``known``."""
        if known is None:
            before, gain = np.zeros(len(sink.seen)), np.zeros(len(sink.seen))
        else:
            before, gain = known.err.copy(), known.gain.copy()
        for source in sources:
            # What has few elements multiplies whole rows: a gate, the weights of the chosen experts.
            factor = np.maximum(np.abs(source.gain), source.rel) if source.width < NARROW else np.abs(source.gain)
            for what, values, out in (("rel", source.rel, before), ("gain", factor, gain)):
                if len(values) == len(source.keys):
                    found = self.again(source, what, values, sink.vision, sink.seen, mixing)
                    np.maximum(out, found, out=out)
        columns = [s.by_column for s in sources if s.by_column is not None]
        return PassedOn(before, gain, columns if known is None else [*known.columns, *columns])

    def _as_text(self, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """An image's error, at the text positions which the image fills: (keys, values)."""
        worst: dict[int, float] = {}
        for who, e in zip(subject(keys).tolist(), values.tolist(), strict=True):
            worst[who] = max(worst.get(who, 0.0), e)
        at: dict[int, float] = {}
        for who, e in worst.items():
            for text, first, n in self.images.get(who, ()):
                for p in range(first, first + n):
                    key = (text << 32) | p
                    at[key] = max(at.get(key, 0.0), e)
        rows = np.array(sorted(at), np.int64)
        return rows, np.array([at[k] for k in rows.tolist()])

    def _causal(self, rows: np.ndarray, values: np.ndarray, seen: RowSet, wanted: RowSet) -> np.ndarray:
        """Rows of the same request at positions up to the row's; where such a row was computed for another request (a
        shared prefix in the cache), any request's row at that position."""
        keys = wanted.keys
        if not self._complete(seen, wanted):
            return _causal_anywhere(rows, values, seen.keys, keys)
        most = np.array(values, np.float64)
        edges = [*_edges(rows), len(rows)]
        for start, stop in pairwise(edges):
            np.maximum.accumulate(most[start:stop], out=most[start:stop])
        if rows is keys:
            return most
        first = np.searchsorted(rows, subject(keys) << 32)
        at = np.searchsorted(rows, keys, side="right")
        return np.where(at > first, most[np.maximum(at - 1, 0)], 0.0)

    def _complete(self, seen: RowSet, wanted: RowSet) -> bool:
        """Whether ``seen`` has all rows of each request up to the last one that is ``wanted``."""
        name = seen, wanted
        if name not in self._whole:
            keys = wanted.keys
            starts = _edges(keys)
            last = keys[np.append(starts[1:], len(keys)) - 1] if len(keys) else keys
            have = np.searchsorted(seen.keys, last, side="right") - np.searchsorted(seen.keys, subject(last) << 32)
            self._whole[name] = bool((have > position(last)).all())
            while len(self._whole) > 64:
                self._whole.pop(next(iter(self._whole)))
        return self._whole[name]


def _edges(keys: np.ndarray) -> np.ndarray:
    who = subject(keys)
    return np.flatnonzero(np.append(True, who[1:] != who[:-1])) if len(keys) else np.zeros(0, np.int64)


def _same_subject(rows: np.ndarray, values: np.ndarray, keys: np.ndarray) -> np.ndarray:
    who, owners = subject(keys), subject(rows)
    out = np.zeros(len(keys))
    for one in np.unique(who):
        mask = owners == one
        if mask.any():
            out[who == one] = values[mask].max()
    return out


def _causal_anywhere(rows: np.ndarray, values: np.ndarray, seen: np.ndarray, keys: np.ndarray) -> np.ndarray:
    out = np.zeros(len(keys))
    where = position(keys)
    source_at, seen_at = position(rows), position(seen)
    for one in np.unique(subject(keys)):  # all keys are sorted: a request is a stretch
        mine, own, have = (_stretch(k, int(one)) for k in (keys, rows, seen))
        at, err = source_at[own], values[own]
        top = int(where[mine][-1])
        if np.searchsorted(seen_at[have], top, side="right") <= top:  # rows of this request are missing
            other = ~np.isin(source_at, seen_at[have])
            other[own] = False
            at, err = np.concatenate([at, source_at[other]]), np.concatenate([err, values[other]])
            order = np.argsort(at, kind="stable")
            at, err = at[order], err[order]
        if not len(at):
            continue
        err = np.maximum.accumulate(err)
        i = np.searchsorted(at, where[mine], side="right")
        out[mine] = np.where(i > 0, err[np.maximum(i - 1, 0)], 0.0)
    return out


def _stretch(keys: np.ndarray, who: int) -> slice:
    first, last = np.searchsorted(keys, [who << 32, (who + 1) << 32])
    return slice(int(first), int(last))


LONG = 16
"""Shorter lists are not worth it."""
OPEN = 16
"""Lists that are remembered: places come tap by tap, so that few are open at a time."""
S = TypeVar("S")


class Prefixes(Generic[S]):
    """Remembers a state S, never to be changed in place, for lists of sources."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, tuple[list[TensorErrors], S]] = OrderedDict()

    def begun(
        self, name: tuple[Hashable, ...], sources: Sequence[TensorErrors], sink: TensorErrors
    ) -> tuple[int, S | None]:
        """(how many of ``sources`` a state is known for, the state). name: what else it depends on. sink: is no source
        of its own, so that nothing is known where it is among them."""
        if len(sources) < LONG or (name, sources[0]) not in self._known:
            return 0, None
        known, state = self._known[name, sources[0]]
        if len(known) > len(sources) or list(sources[: len(known)]) != known or sink in known:
            return 0, None
        return len(known), state

    def keep(self, name: tuple[Hashable, ...], sources: Sequence[TensorErrors], sink: TensorErrors, state: S) -> None:
        if len(sources) < LONG or sink in sources:
            return
        self._known[name, sources[0]] = list(sources), state
        self._known.move_to_end((name, sources[0]))
        while len(self._known) > OPEN:
            self._known.popitem(last=False)


_NONE = np.zeros(0, np.int64)


OriginEntry = TypedDict(
    "OriginEntry",
    {
        "module": str, "class": str | None, "role": str, "request": str | None, "position": int | None,
        "phase": str | None, "created": float | None, "propagated": float | None, "floor": float | None,
        "evidence": str, "tier": NotRequired[str | None], "times": NotRequired[float | None],
        "chance": NotRequired[float | None], "layers": NotRequired[dict[str, Any] | None], "rows": int,
        "worst": float | None, "shape": str, "nonfinite": NotRequired[int], "setting": NotRequired[str],
        "cause": NotRequired[Mapping[str, Any] | None], "gap": NotRequired[Mapping[str, Any] | None],
        "graph": NotRequired[Any], "decided_by": NotRequired[str],
    },
)  # fmt: skip
"""An origin as compare.json has it, in its order (docs/compare.md). created, propagated, floor, worst: relative L2
errors; times: worst over the limit; chance: of such an error in a clean run; gap: the taps that it lies between,
where it is at none (comparison/gaps.py); cause: kind or family, sentence, parameter (opcheck/causes)."""
ORIGIN_KEYS = tuple(k for k in OriginEntry.__annotations__ if k not in ("graph", "decided_by"))
"""Of an entry that has all but the rare ones, in their order."""


@dataclass(frozen=True)
class Origin:
    """An origin: rows ``keys`` of ``trace`` (none for a parameter), with what came in front of them.

    hidden: the sign by which an error was found that lies within fixed limits (siblings.py). stats: all rows of the
    trace with what stood upstream of them. steps: keys of the rows where NaN or infinity comes out and none went in.
    chance: the probability that machines that only round show this anywhere in the comparison; None where it is not
    known. unproved: a router that was not captured may have sent the rows elsewhere (near_ties.py). blind: what lies in
    front was compared, but in none of these rows (a pack has the best logits of all rows, the logits of some)."""

    tap: str
    trace: TensorErrors
    keys: np.ndarray
    err: np.ndarray
    explained: np.ndarray
    evidence: str
    hidden: Hidden | None = None
    stats: TensorStats | None = None
    steps: np.ndarray = field(default_factory=lambda: _NONE)
    chance: float | None = 0.0
    unproved: bool = False
    blind: bool = False

    @property
    def tier(self) -> str:
        """What kind of limit is broken (statistic.py): values that must be equal are proved to be wrong."""
        if self.hidden is not None:
            return self.hidden.tier
        if self.evidence == "values":
            return PROVED
        return BEHIND_A_ROUTER if self.unproved else BEYOND_CHANCE


def find_origins(
    flow: DataFlow[TensorErrors], standard: Standard, images: Mapping[int, list[tuple[int, int, int]]],
    rate: float = RATE, created: dict[str, float] | None = None, keeper: SpillBuffer | None = None,
) -> list[Origin]:  # fmt: skip
    """The taps that create errors, in data-flow order. images: TokenPlan.images. rate: of false alarms (statistic.py).
    created: is filled with what each tap's outputs create at most, over what one operator may (`created_over`).
    keeper: of what is known of each row."""
    search = _Search(flow, standard, images, rate, keeper or SpillBuffer())
    found = search.run()
    if created is not None:
        for (tap, sink), here in search.stats.items():
            if sink.kind == OUTPUT and sink.tap == tap:
                created[tap] = max(created.get(tap, 0.0), created_over(here, sink.limit, standard))
            search.keeper.rest()
    return found


class _Search:
    def __init__(
        self, flow: DataFlow[TensorErrors], standard: Standard, images: Mapping[int, Any], rate: float,
        keeper: SpillBuffer,
    ):  # fmt: skip
        self.rate, self.keeper = rate, keeper
        self.tree, self.standard, self.influence = flow.tree, standard, Influence(images)
        self.flow, self.by_tap = flow, flow.by_tap
        self.found: dict[str, list[Origin]] = defaultdict(list)
        self.stats: dict[tuple[str, TensorErrors], TensorStats] = {}
        self.passing: Prefixes[PassedOn] = Prefixes()
        self.explaining: Prefixes[np.ndarray] = Prefixes()
        self.unions = Unions()

    def run(self) -> list[Origin]:
        self._take_stats()
        taps = sorted(self.by_tap, key=lambda t: -len(self.tree.above(t)))
        for tap in taps:  # the deepest first, so that a parent knows what its descendants are blamed for
            for t in self.by_tap[tap][PARAM]:
                if t.everywhere > 0:
                    one = np.array([t.everywhere])
                    self.found[tap].append(Origin(tap, t, _NONE, one, np.zeros(1), "values"))
            below = self._blamed_below(tap)
            for sink, sources in self.flow.places(tap):
                self._check(tap, sink, sources, self.tree.mixing.get(tap, True), below)
                self.keeper.rest()
        self._top()
        found = _sure(sorted((c for cs in self.found.values() for c in cs), key=lambda c: c.trace.order))
        found = [replace(c, stats=self.stats.get((c.tap, c.trace)), chance=self._chance(c)) for c in found]
        return [replace(c, tap=owner(c.tap, c.trace)) for c in found]

    def _chance(self, c: Origin) -> float | None:
        """Of a fixed limit, which is no quantile: how likely a correct place is to make so much, by what all make."""
        if c.hidden is not None:
            return c.hidden.chance
        if c.tier == PROVED:
            return 0.0
        worst = int(np.argmax(c.err - c.explained))
        err, explained = float(c.err[worst]), float(c.explained[worst])
        made = math.sqrt(max(err * err - explained * explained, 0.0))  # ** raises where a square is too large
        return chance_of_size(made, self.siblings.made, self.siblings.chance.places)

    def _take_stats(self) -> None:
        """Of every place with what is upstream of it, before any is an origin: all are each other's measure. Where an
        operator's results are equal in all layers, there is nothing to measure."""
        if any(len(t.keys) for kinds in self.by_tap.values() for t in kinds[OUTPUT] + kinds[INPUT]):
            # Asking for a tap that has no errors adds it.
            places = [(tap, *place) for tap in list(self.by_tap) for place in self.flow.places(tap)]
            # A tensor without rows is one number: taken for all rows of its step it would be as many witnesses.
            unfit = (p[1].weak or p[1].of_tensors or p[1].few for p in places)
            places = [p for p, no in zip(places, unfit, strict=True) if not no and p[1].rounding and len(p[1].seen)
                      and not (len(p[1].doubted) and self._reads_earlier(p[0], p[1]))]  # fmt: skip
            kinds = [kind_of_place(tap, _role(tap, sink)) for tap, sink, _ in places]
            differ = {kind for kind, (_, sink, _) in zip(kinds, places, strict=True) if len(sink.keys)}
            for kind, (tap, sink, sources) in zip(kinds, places, strict=True):
                if kind in differ:
                    self.stats[(tap, sink)] = self._stats_of(tap, sink, sources)
                    self.keeper.rest()
        self.siblings = Siblings(list(self.stats.values()), self.rate, self.keeper)

    def _stats_of(self, tap: str, sink: TensorErrors, sources: list[TensorErrors]) -> TensorStats:
        mixing = self.tree.mixing.get(tap, True)
        name = sink.vision, sink.seen, mixing
        done, known = self.passing.begun(name, sources, sink)
        passed = self.influence.passed_on(sink, [s for s in sources[done:] if s is not sink], mixing, known)
        self.passing.keep(name, sources, sink, passed)
        err, slope = (self._kept(spread(sink.seen.keys, sink.keys, v), v) for v in (sink.rel, sink.gain))
        keys, before, gain = sink.seen.keys, passed.err, passed.gain
        if len(sink.doubted):  # of these only what came in alike says how an operator rounds
            alike = ~np.isin(keys, sink.doubted) | (before <= sink.limit)
            keys, err, slope, before, gain = (values[alike] for values in (keys, err, slope, before, gain))
        rows = keys, err, slope, self.keeper.keep(before), self.keeper.keep(gain)
        return TensorStats(
            tap, _role(tap, sink), sink.rounding, *rows, sink.width, sink.by_column, passed.columns, mixing,
            self._untapped(tap, sink), self._inputs_known(tap, sink, sources), self._unfed(tap, sink),
        )  # fmt: skip

    def _reads_earlier(self, tap: str, sink: TensorErrors) -> bool:
        """Whether earlier rows of a request may reach ``sink`` by something else than its sources' rows: operators in
        front of it that was not captured, or the module itself."""
        return sink.gap > 0 or self.tree.mixes_itself(tap)

    def _untapped(self, tap: str, sink: TensorErrors) -> bool:
        """Whether operators that were not captured lie between ``sink`` and what is in front of it: whole layers, or,
        where inputs were captured elsewhere, those that lead to a leaf without any (inside a compiled graph)."""
        leaf = sink.tap == tap and sink.kind == OUTPUT and not self.tree.children.get(tap)
        return sink.gap > 0 or (leaf and self._takes_inputs and not self.by_tap[tap][INPUT])

    @cached_property
    def _takes_inputs(self) -> bool:
        return any(kinds[INPUT] and kinds[OUTPUT] for kinds in self.by_tap.values())

    def _unfed(self, tap: str, sink: TensorErrors) -> bool:
        leaf = sink.tap == tap and sink.kind == OUTPUT and not self.tree.children.get(tap)
        inputs = self.by_tap[tap][INPUT]
        return leaf and not is_fed([t for t in inputs if t.call == sink.call] or inputs)

    def _inputs_known(self, tap: str, sink: TensorErrors, sources: list[TensorErrors]) -> bool:
        """Whether an error of 0 upstream of a leaf's output means equal inputs, and not that they were not captured: a
        tensor that is no mere factor went into the same call, at all of its rows."""
        if sink.tap != tap or sink.kind != OUTPUT or self.tree.children.get(tap):
            return False
        wide = [s for s in sources if s.tap == tap and s.kind == INPUT and s.width >= NARROW and s.rounding]
        return any(s.vision == sink.vision and bool(np.isin(sink.seen.keys, s.seen.keys).all()) for s in wide)

    def _kept(self, values: np.ndarray, known: np.ndarray) -> np.ndarray:
        return values if values is known else self.keeper.keep(values)

    def _top(self) -> None:
        """What is created in front of the outermost taps, where nobody else can be blamed: their inputs."""
        for tap in self.tree.children.get(None, []):
            for sink in self.by_tap[tap][INPUT]:
                self._check(tap, sink, self.flow.earlier(sink), True, [])

    def _blamed_below(self, tap: str) -> list[TensorErrors]:
        out = []
        todo = list(self.tree.children.get(tap, []))
        while todo:
            child = todo.pop()
            todo += self.tree.children.get(child, [])
            for c in self.found[child]:
                everywhere, err = 0.0 if len(c.keys) else np.inf, np.full(len(c.keys), np.inf)
                broken = np.isin(c.keys, c.trace.broken_keys)
                out.append(replace(c.trace, keys=c.keys, err=err, everywhere=everywhere, broken=broken))
        return out

    def _check(
        self, tap: str, sink: TensorErrors, sources: list[TensorErrors], mixing: bool, below: list[TensorErrors]
    ) -> None:
        bad = sink.err > sink.limit
        if not bad.any():
            self._check_hidden(tap, sink, below)
            return
        rows, err = self.unions.of([RowSet(sink.keys[bad])]).seen, sink.err[bad]  # equal rows are one set
        keys = rows.keys
        name = sink.vision, rows, mixing, tap.startswith(BACKWARD)
        done, known = self.explaining.begun(name, sources, sink)
        explained = np.zeros(len(keys)) if known is None else known.copy()
        self._explain(explained, tap, sink, sources[done:], rows, mixing)
        self.explaining.keep(name, sources, sink, explained.copy())
        self._explain(explained, tap, sink, [b for b in below if b.order < sink.order], rows, mixing)
        explained = sink.largest(keys, explained)
        rules = self.standard
        share = np.where(explained > sink.limit, rules.wild, rules.amplification)
        created = (err > sink.limit + share * explained) & (explained < rules.garbage)
        created &= ~(np.isinf(err) & (explained > max(sink.limit, 0.0)))
        if len(sink.doubted) and self._reads_earlier(tap, sink):
            created &= ~np.isin(keys, sink.doubted) | np.isinf(err)  # no other expert makes NaN of numbers
        # What makes NaN of numbers, however wrong these are, is at fault too; so is a choice against its own logits.
        steps = self._steps(sink, rows, [*sources, *below], mixing)
        created |= steps
        if len(sink.own) == len(bad):
            created |= sink.own[bad]
        blind = _blind(sink, keys, (*sources, *below))
        created &= ~blind | (err > sink.allowed)  # more than one operator's error may have come in there
        if created.any():
            evidence = "values" if np.isinf(err[created]).any() else "jump"
            wrong = keys[created], err[created], explained[created]
            seen = any(source is not sink for source in (*sources, *below))  # else it is not known what went in
            self.found[tap].append(
                Origin(tap, sink, *wrong, evidence, steps=keys[steps] if seen else _NONE, blind=blind[created].all())
            )
        else:
            self._check_hidden(tap, sink, below)

    def _explain(
        self, out: np.ndarray, tap: str, sink: TensorErrors, sources: Sequence[TensorErrors], rows: RowSet, mixing: bool
    ) -> None:
        """Raises ``out`` to the errors that may reach the ``rows`` of ``sink`` from ``sources``."""
        for source in sources:
            if source is not sink:
                found = self.influence.of(source, source.err, sink.vision, rows, mixing)
                # What is known to be wrong may be wrong by any amount; and gradients are sums that cancel.
                if source.weak or tap.startswith(BACKWARD):
                    found = np.where(found > source.limit, np.inf, found * self.standard.amplification)
                np.maximum(out, found, out=out)

    def _steps(self, sink: TensorErrors, rows: RowSet, sources: Sequence[TensorErrors], mixing: bool) -> np.ndarray:
        """bool [len(rows)]: those of ``sink`` that hold NaN or infinity, while nothing that can influence them does."""
        broken = np.isin(rows.keys, sink.broken_keys)
        for source in sources:
            if not broken.any():
                break
            if source is sink or source.order > sink.order:
                continue
            if source.spoilt:
                return np.zeros(len(rows), bool)
            if source.broken.any():
                flags = replace(source, everywhere=0.0)
                broken &= self.influence.of(flags, source.broken.astype(np.float64), sink.vision, rows, mixing) == 0
        return ~sink.largest(rows.keys, ~broken)

    def _check_hidden(self, tap: str, sink: TensorErrors, below: list[TensorErrors]) -> None:
        here = self.stats.get((tap, sink))
        # What a child made that is an origin already shows again between the children, in other parts and proportions.
        if here is None or self.flow.is_part(tap, sink) or any(s.order < sink.order for s in below):
            return
        hidden = self.siblings.judge(here)
        if hidden is not None:
            rows = hidden.rows
            found = here.keys[rows], np.maximum(here.err, np.abs(here.gain))[rows], here.before[rows]
            self.found[tap].append(Origin(tap, sink, *found, "jump", hidden))


def owner(tap: str, sink: TensorErrors) -> str:
    """The module in whose body ``sink`` lies, a place between the children of ``tap``: the nearest one that encloses
    it, also if its tensors were not captured (inside a compiled graph only some modules are tapped), else ``tap``."""
    if sink.kind != INPUT or sink.tap == tap:
        return tap
    # What holds numbered modules is a container: the one above it computes.
    above = zip((sink.tap, *enclosing(sink.tap)), enclosing(sink.tap), strict=False)
    nearest = next((up for path, up in above if not path.rpartition(".")[2].isdecimal()), "")
    inside = nearest.startswith(f"{tap}.") or tap == ROOT_TAP
    return nearest if nearest and inside else tap


def removed(c: Origin, flow: DataFlow[TensorErrors], traces: Sequence[TensorErrors]) -> bool:
    """Whether all that read the origin's rows give what they give with golden's: a scale in front of a norm explains
    nothing behind it. The readers are the inputs with these errors in these rows; of each, all outputs of the rows are
    within what one operator may create, while what came in is many times that; of readers that mix rows, so are those
    of all rows of the requests. What no tap reads (a residual stream) shows behind it: as large an error there may be
    this one."""
    one = c.trace
    if not len(c.keys) or len(one.broken_keys):
        return False
    n, begin = len(one.err), one.err[0]  # which nearly no other has, and there may be many origins
    readers = [t for t in traces if t.kind == INPUT and t.rounding and len(t.err) == n and t.err[0] == begin
               and np.array_equal(t.keys, one.keys) and np.array_equal(t.err, one.err)]  # fmt: skip
    outputs = [[o for o in flow.by_tap[t.tap][OUTPUT] if o.call == t.call] for t in readers]
    mixed = [o for t, of in zip(readers, outputs, strict=True) if flow.tree.mixing.get(t.tap, True) for o in of]
    who = np.unique(subject(c.keys))
    return bool(readers) and all(
        of and all(o.rounding and not o.weak and bool(np.isin(c.keys, o.seen.keys).all())
                   and bool((spread(c.keys, o.keys, o.err) <= np.minimum(o.limit, c.err / REMOVED)).all()) for o in of)
        for of in outputs
    ) and not any(
        bool((np.isin(subject(o.keys), who) & (o.err > o.limit)).any()) for o in mixed
    ) and all(
        bool((spread(c.keys, t.keys, t.err) < c.err / 2.0).all())
        for t in traces if t.order > one.order and t.rounding and t not in readers
    )  # fmt: skip


def _blind(sink: TensorErrors, keys: np.ndarray, sources: Iterable[TensorErrors]) -> np.ndarray:
    """bool [len(keys)]: rows of ``sink`` in which nothing in front was compared, while it was in others."""
    known = [s.seen.keys for s in sources if s is not sink and s.rounding and s.kind != PARAM and len(s.seen)
             and s.vision == sink.vision]  # fmt: skip
    return ~np.isin(keys, np.concatenate(known)) if known else np.zeros(len(keys), bool)


def _sure(created: list[Origin]) -> list[Origin]:
    """Without signs that are weak, and rows that may have been wrong before, where something before has been found: a
    fault's traces are no correct noise."""
    out: list[Origin] = []
    for one in created:
        least = COLUMNS_AFTER_ANOTHER if one.hidden is not None and one.hidden.how == COLUMNS else AFTER_ANOTHER
        if not out or (not one.blind if one.hidden is None else one.hidden.strength > least):
            out.append(one)
    return out


def _role(tap: str, sink: TensorErrors) -> str:
    return sink.role if sink.tap == tap else f"{sink.tap}/{sink.role}"


# --- of all taps ----------------------------------------------------------------------------------------------------


def created_over(here: TensorStats, limit: float, rules: Standard) -> float:
    """The most that a row of ``here`` got there, in units of ``limit``; 0 where nothing did. Rows of which either error
    is NaN or infinite say nothing."""
    known = np.isfinite(here.err) & np.isfinite(here.before)
    if limit <= 0 or not known.any():
        return 0.0
    err, before = here.err[known], here.before[known]
    made = np.sqrt(np.maximum(err**2 - before**2, 0.0))
    share = np.where(before > limit, rules.wild, rules.amplification)
    made = np.where(made > limit, np.maximum(err - share * before, 0.0), made)
    return float(made.max()) / limit


def in_all_layers(named: Sequence[str], taps: Iterable[str]) -> dict[str, dict[str, int]]:
    """Module → {"in": layers that are named, "of": layers that ran}, for those of ``named`` that are named in every
    layer, of two or more. taps: of all modules that were compared, or replayed."""
    ran: dict[str, set[str]] = {}
    for tap in {*taps, *named}:
        ran.setdefault(operator_of(tap), set()).add(tap)
    found: dict[str, set[str]] = {}
    for tap in named:
        found.setdefault(operator_of(tap), set()).add(tap)
    every = {name: len(taps) for name, taps in found.items() if len(taps) == len(ran[name]) > 1}
    return {tap: {"in": n, "of": n} for tap in named if (n := every.get(operator_of(tap))) is not None}
