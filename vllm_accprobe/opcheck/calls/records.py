"""From a dump's records to calls that can be run again.

The problem: a call is scattered over a dump: its inputs and outputs are records of a step, its parameters lie
elsewhere, what it read from a cache was written by earlier steps, what its ranks added up by other ranks; and other
tools record tensors and no numbers of modules. The idea: `Calls` builds one `Captured` at a time, tap by tap in the
order of the model and within a tap step by step, so that a cache can be filled on the way. Attributes that were not
recorded come from the command line (``--attribute eps=1e-6``); a norm's epsilon from config.json, or from a fit to its
inputs and outputs (`fit`). A recorded backward run becomes the call of its forward, with the gradients in
``extra["up"]``; its class begins with ``backward.``.
Elsewhere: where a record is found (module_index.py), what other records add to a call (neighbours.py), tensors whose
numbers are of a coarser dtype (grid.py), what is done with a call (run/check_calls.py).
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.journal import SEPARATOR, inputs, is_operator
from vllm_accprobe.dump.reader import Dump, matches
from vllm_accprobe.dump.record_table import first_of_each_site
from vllm_accprobe.dump.schema import Module, OpCall, Record, RowSpace
from vllm_accprobe.formats.atb import AtbDump
from vllm_accprobe.judge.statistic import RATE, Budget
from vllm_accprobe.opcheck.calls import grid
from vllm_accprobe.opcheck.calls.module_index import ModuleIndex
from vllm_accprobe.opcheck.calls.neighbours import SUMMED, Neighbours, Past
from vllm_accprobe.opcheck.calls.operator_calls import LOST, STATISTICS, NotKept, op_call
from vllm_accprobe.opcheck.compat.ait import globs_of
from vllm_accprobe.opcheck.reference import BACKWARD, UNROUNDED, Call, Params, changed
from vllm_accprobe.opcheck.references.norms import EPSILONS, NormParts, configured, is_norm, parts_of
from vllm_accprobe.opcheck.roundings import ROUNDED

_NAME = re.compile(r"(.+?)\.(?:forward|backward)\b(?:\.\d+)?")


def is_gradient(tap: str) -> bool:
    return tap.startswith(BACKWARD)


class GradientCalls:
    """Backward runs of the records of ``index``, and the forward calls that they are of."""

    def __init__(self, index: ModuleIndex):
        self._index = index
        self._forward: dict[tuple[int, int | None, str], OpCall] | None = None

    def operator(self, records: Mapping[str, Record]) -> OpCall | None:
        """The forward call of an operator's backward records; None where there is none."""
        if self._forward is None:
            self._forward = dict(self._named())
        match = next((m for r in records.values() if (m := _NAME.match(r.name))), None)
        first = next(iter(records.values()))
        return self._forward.get((first.rank, first.step, match[1])) if match else None

    def _named(self) -> Any:
        for (rank, tap), ops in self._index.ops.items():
            for op in ops:
                records = self._index.op_records.get((rank, tap), {}).get((op.step, op.call), {})
                for record in records.values():
                    if match := _NAME.match(record.name):
                        yield (rank, op.step, match[1]), op
                        break

    def call(self, tap: str, cls: str, records: Mapping[str, Record], forward: Call | None) -> Call:
        """forward: the call that these gradients are of, None where it was not captured."""
        read = self._index.read
        outputs = {role: read(r) for role, r in records.items() if role.startswith("output.")}
        if forward is None:
            return Call(tap, cls, outputs=outputs)
        came = {role.removeprefix("input."): r for role, r in records.items() if role.startswith("input.")}
        ups = {f"output.{place}": read(r) for place, r in came.items()}
        extra = {**forward.extra, "up": ups, "saved": forward.outputs}
        return replace(forward, name=tap, cls=cls, outputs=outputs, extra=extra)


USUAL = (1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
"""Chosen: the epsilons that models' configurations have (1e-12 BERT's, 1e-6 Qwen's, 1e-5 Llama's), and between."""
SIGMAS = 4.0
"""Standard errors that a fit may lie away from the truth (chosen: one norm in sixteen thousand lies further)."""
_NAME_IT = "name it with --attribute eps=VALUE"
_LARGEST = 1 << 24
"""Elements of a norm that is fitted: some dozens are read for one class."""


@dataclass(frozen=True)
class EpsilonFit:
    """value, error: of one module's call, its standard error; smallest: of q, the mean square or variance of a row;
    unit: one rounding of the output; agree: whether the rows give one number."""

    value: float
    error: float
    smallest: float
    unit: float
    agree: bool

    def allows(self, epsilon: float) -> bool:
        return self.agree and abs(self.value - epsilon) <= SIGMAS * self.error


def fit(call: Call) -> EpsilonFit | None:
    """None where the call is no norm, lacks a tensor, or has no finite row."""
    out, parts = call.outputs.get("output.0"), parts_of(call)
    if out is None or parts is None or out.numel() > _LARGEST or out.numel() != parts.scaled.numel():
        return None
    return _fitted(parts, out.double().reshape(parts.scaled.shape), call.unit)


def _fitted(parts: NormParts, y: Any, unit: float) -> EpsilonFit | None:
    a, q = parts.scaled, parts.power
    d = y - parts.bias
    variance = unit * unit * (y * y + d * d) / 3.0
    floor = (unit * 1e-2) ** 2 * d.square().mean(-1, keepdim=True)
    weight = 1.0 / (variance + floor).clamp(min=1e-300)
    size = (weight * a * a).sum(-1)
    slope = (weight * a * d).sum(-1) / size
    error = (1.0 / size + (0.5 * ROUNDED * unit * slope).square()).sqrt()
    epsilon = slope**-2 - q.squeeze(-1)
    sigma = 2.0 * error / slope.abs() ** 3
    good = torch.isfinite(epsilon) & torch.isfinite(sigma) & (slope > 0) & (sigma > 0)
    if not bool(good.any()):
        return None
    epsilon, sigma = epsilon[good], sigma[good]
    shares = sigma**-2
    mean = float((epsilon * shares).sum() / shares.sum())
    square, n = float(((epsilon - mean) / sigma).square().sum()), len(epsilon)
    agree = square <= n + SIGMAS * (2.0 * n) ** 0.5 + SIGMAS
    return EpsilonFit(mean, float(shares.sum() ** -0.5), float(q.min()), unit, agree)


@dataclass(frozen=True)
class ChosenEpsilon:
    """value: None where none was chosen; slack: relative error of y that the choice leaves; source: where it is from,
    or why there is none."""

    value: float | None
    slack: float
    source: str


def choose(fits: Sequence[EpsilonFit]) -> ChosenEpsilon:
    """The usual epsilon that most modules of a class fit."""
    if not fits:
        return ChosenEpsilon(None, 0.0, "its epsilon was not recorded, and no call has what a fit needs")
    best = min(fits, key=lambda f: f.error)
    number = f"{best.value:.3g} ± {best.error:.1g}"

    def rank(epsilon: float) -> tuple[int, float]:
        return -sum(f.allows(epsilon) for f in fits), abs(best.value - epsilon)

    chosen = min(USUAL, key=rank)
    votes = -rank(chosen)[0]
    if 2 * votes <= len(fits):
        fitted = f"fit {number}, which is no usual one" if best.agree else "fit no epsilon: rows give different ones"
        why = f"its epsilon was not recorded; input and output {fitted}"
        return ChosenEpsilon(None, 0.0, f"{why}: {_NAME_IT}")
    others = [e for e in USUAL if e != chosen and all(f.allows(e) for f in fits if f.allows(chosen))]
    slack = max((0.5 * abs(e - chosen) / (f.smallest + min(e, chosen)) for e in others for f in fits), default=0.0)
    between = f"{min((*others, chosen)):g} to {max((*others, chosen)):g}"
    if slack > best.unit:
        why = f"its epsilon was not recorded; input and output fit all from {between}"
        return ChosenEpsilon(None, 0.0, f"{why}: {_NAME_IT}")
    if others:
        why = f"epsilon {chosen:g}, fitted to input and output; {between} fit as well"
        return ChosenEpsilon(chosen, slack, f"{why}, and differ by less than a rounding")
    modules = f"{votes} of {len(fits)} modules" if len(fits) > 1 else "one module"
    return ChosenEpsilon(chosen, slack, f"epsilon {chosen:g}, fitted to input and output of {modules} ({number})")


_FITTED = 64
"""Modules of one class that are read for a fit (chosen: enough for a majority, and a second's work)."""
_VISION = ("visual", "vision", "model.visual")


def parsed_attributes(texts: Iterable[str]) -> tuple[tuple[str, str, Any], ...]:
    """(glob, name, value) of ``NAME=VALUE`` and ``GLOB:NAME=VALUE``. Raises ValueError with a sentence."""
    found = []
    for text in texts:
        place, equals, value = text.partition("=")
        glob, colon, name = place.rpartition(":")
        if not equals or not name.isidentifier():
            raise ValueError(f"{text!r} is not NAME=VALUE or GLOB:NAME=VALUE, e.g. eps=1e-6")
        try:
            plain = json.loads(value)
        except ValueError:
            plain = value
        found.append((glob if colon else "*", name, plain))
    return tuple(found)


class MissingAttributes:
    """Of the modules of ``index``. settled: a call with the dtypes that its numbers have; named_by_user: (glob, name,
    value)."""

    def __init__(
        self, index: ModuleIndex, settled: Callable[[Call], Call], named_by_user: Iterable[tuple[str, str, Any]] = ()
    ):
        self._index, self._settled, self._named_by_user = index, settled, tuple(named_by_user)
        self._chosen: dict[tuple[int, str], ChosenEpsilon] = {}
        self._known: dict[tuple[int, str, str], tuple[Mapping[str, Any], Call]] = {}

    def filled(self, rank: int, call: Call) -> Call:
        """``call`` with the attributes that were not recorded and are known."""
        key = rank, call.name, call.cls
        if key not in self._known or self._known[key][0] is not call.attrs:
            known = self._filled(rank, replace(call, inputs={}, outputs={}, params={}, views={}))
            self._known[key] = call.attrs, known
        known = self._known[key][1]
        return changed(call, attrs=known.attrs, extra=known.extra)

    def _filled(self, rank: int, call: Call) -> Call:
        named = {
            name: value for glob, name, value in self._named_by_user
            if name not in call.attrs and (fnmatchcase(call.cls, glob) or fnmatchcase(call.name, glob))
        }  # fmt: skip
        call = replace(call, attrs={**call.attrs, **named}) if named else call
        if not is_norm(call.cls) or any(n in call.attrs and n not in named for n in EPSILONS):
            return call
        if (own := next((n for n in EPSILONS if n in named), None)) is not None:
            return _with_epsilon(call, ChosenEpsilon(float(named[own]), 0.0, f"epsilon {named[own]:g}, of --attribute"))
        in_config = self._configured(call)
        if in_config is not None:
            return _with_epsilon(call, ChosenEpsilon(in_config, 0.0, f"epsilon {in_config:g}, of config.json"))
        return _with_epsilon(call, self._of_class(rank, call.cls))

    def _configured(self, call: Call) -> float | None:
        """A vision tower's norms are not those of the language model, whose config.json stands around theirs."""
        config: Mapping[str, Any] = call.config
        if call.name.startswith(_VISION):
            inner = self._index.config.get("vision_config")
            config = inner if isinstance(inner, dict) else {}
        found = configured(config, call.cls)
        return None if found is None else float(found)

    def _of_class(self, rank: int, cls: str) -> ChosenEpsilon:
        if (rank, cls) not in self._chosen:
            taps = [tap for r, tap in self._index.by_tap if r == rank and self._index.cls_of(r, tap) == cls]
            fits = [f for f in (self._fit(rank, tap, cls) for tap in taps[:_FITTED]) if f is not None]
            chosen = self._chosen[rank, cls] = choose(fits)
            self._index.problems.append(f"{cls}: {chosen.source}")
        return self._chosen[rank, cls]

    def _fit(self, rank: int, tap: str, cls: str) -> Any:
        (_, records) = min(self._index.by_tap[rank, tap].items(), key=lambda c: c[0])
        if any(r.payload is None for r in records.values()):
            return None
        try:
            return fit(self._settled(self._index.call(rank, tap, cls, records)))
        except (DumpError, ValueError):
            return None


def _with_epsilon(call: Call, chosen: ChosenEpsilon) -> Call:
    attrs = dict(call.attrs) if chosen.value is None else {**call.attrs, EPSILONS[0]: chosen.value}
    return replace(call, attrs=attrs, extra={**call.extra, "epsilon": {"slack": chosen.slack, "said": chosen.source}})


@dataclass(frozen=True)
class Captured:
    """One call: where it stands in the dump, the call itself, and its records by role. missing: why it cannot be
    run; seq: its place in the order of execution where it has no record; crashed: missing tells of a crash. Of a part
    of a call, tensors and records are those of its rows; first: the row of the whole with which it begins; whole: how
    many rows that has, None where this is all of it."""

    tap: str
    rank: int
    step: int | None
    call: int
    what: Call
    records: Mapping[str, Record]
    missing: str = ""
    seq: int = 0
    crashed: bool = False
    first: int = 0
    whole: int | None = None


Place = tuple["int | None", int]
"""(step, ordinal) of a call of a tap."""
Runs = tuple[tuple[int, int], ...]
"""Runs of rows, (first, one behind the last), in their order; () for all rows."""


@dataclass(frozen=True)
class Chosen:
    """Which calls of a tap are taken, and which rows of them. places: the others are left out; by_rows: whether a class
    works row by row, so that a call may be cut; most: elements of a part."""

    places: Mapping[Place, Runs]
    by_rows: Callable[[str], bool]
    most: int


_TOKENS = "tokens"
"""The rows that `Runs` are of; calls of others are taken whole."""
_FEWEST = 16
"""Chosen: rows of a part, however wide they are: a weight is read once for them."""
_NO_MODULE = Module("", "", 0)
OPERATION, GRAPH = "Operation", "a graph of operators: those inside are checked by themselves"
"""ATB's types of operators end so; other nodes may have the name of one of a model's classes, and are none."""
UNREAD = "a payload of it cannot be read"


def wanted(globs: Iterable[str], tap: str, cls: str) -> bool:
    """Whether a tap is selected: globs over classes, operators (``.default`` may be left out) and paths; ``!``
    excludes, and the last that matches decides; all if there are none."""
    return matches(tuple(globs), (cls, tap, cls.removesuffix(".default"), tap.removesuffix(".default")))


class Calls(ModuleIndex):
    """The module and operator calls of a dump."""

    def __init__(self, dump: Dump, model: Path | None, attributes: Iterable[tuple[str, str, Any]] = ()):
        super().__init__(dump, model)
        self._missing_attributes = MissingAttributes(self, lambda call: grid.settled(call, self.keeps), attributes)
        self._neighbours = Neighbours(self)
        self._gradients = GradientCalls(self)
        self._keeps: Mapping[str, str] | None = None

    def budget(self, rate: float = RATE) -> Budget:
        """The rate divided over what the dump holds: outputs of calls, and of taps."""
        outputs, taps = self._made_by
        return Budget(rate, max(outputs, 1), max(taps, 1))

    @cached_property
    def _made_by(self) -> tuple[int, int]:
        found = [(r.rank, r.tap, r.role) for r in self.dump.records
                 if r.step is not None and r.role.startswith(("output", "inplace"))]  # fmt: skip
        return len(found), len(set(found))

    def taps(self, ops: Iterable[str] = ()) -> list[tuple[int, str, str]]:
        """(rank, tap, class) of everything that was called and is `wanted`, ranks after one another, in the order of
        the model. Of ATB's dumps a plain word stands for all types that begin with it, as ait has it."""
        order = {(rank, tap): m.index for rank, named in self.modules.items() for tap, m in named.items()}
        found = [(rank, tap, self.cls_of(rank, tap)) for rank, tap in self.by_tap]
        found += [(rank, tap, ops[0].op) for (rank, tap), ops in self.ops.items()]

        def place(f: tuple[int, str, str]) -> tuple[int, int, int]:
            module, _, op = f[1].partition(SEPARATOR)
            return f[0], order.get((f[0], module), 1 << 40), len(op) > 0

        globs = globs_of(ops) if isinstance(self.dump, AtbDump) else tuple(ops)
        return sorted((f for f in found if wanted(globs, *f[1:])), key=place)

    def of(
        self, rank: int, tap: str, *, begins: Callable[[int | None, int], object] = lambda step, call: None,
        crashed: Mapping[tuple[int | None, int], str] = MappingProxyType({}), chosen: Chosen | None = None,
    ) -> Iterator[Captured]:  # fmt: skip
        """The calls of one tap, step by step. Records without payload make a call that says what it misses.

        begins: called with step and ordinal before anything of a call is read; crashed: calls that are not to be
        touched, with the reason; chosen: only these, and large ones cut into parts."""
        if (rank, tap) in self.ops:
            yield from self._of_operator(rank, tap, begins, crashed, chosen)
            return
        cls = self.cls_of(rank, tap)
        past = self._neighbours.past(rank, cls)
        self.parameters.forget()

        def without(why: str, crash: bool = False) -> Captured:
            return Captured(tap, rank, step, n, Call(tap, cls), records, why, crashed=crash)

        calls = sorted(self.by_tap[rank, tap].items())
        last = len(calls) if chosen is None else self._up_to_last(calls, chosen, past, rank)
        done: Mapping[Place, Iterable[int]] = {}
        if past is not None and chosen is not None:
            done = self._last_rows(calls[:last], rank)
        before: Iterable[int] = ()
        for (step, n), records in calls[:last]:
            if past is not None and before:  # what read them has been used by now
                past.forget(before)
            before = done.get((step, n), ())
            if chosen is not None and (step, n) not in chosen.places:
                self._remembered(past, rank, tap, (step, n), records)
                continue
            begins(step, n)
            if (step, n) in crashed:
                yield without(crashed[step, n], crash=True)
                continue
            if any(r.payload is None for r in records.values()):
                yield without(LOST if any(r.lost for r in records.values()) else STATISTICS)
                continue
            if isinstance(self.dump, AtbDump) and not cls.endswith(OPERATION):
                yield without(GRAPH if (rank, tap) in self.children else f"no reference for {cls}")
                continue
            if is_gradient(tap):
                yield self._gradient(rank, tap, step, n)
                continue
            if why_not := self.parameters.why_not(rank, tap, step):
                yield without(why_not)
                continue
            parts = [] if chosen is None else self._parts(rank, cls, step, records, chosen, chosen.places[step, n])
            if parts:
                yield from self._in_parts(rank, tap, cls, step, n, records, past, parts)
                continue
            try:
                what, extra = self._with_extra(rank, tap, cls, step, n, records)
                extra |= {UNROUNDED: True} if (rank, tap) in self.unrounded else {}
            except DumpError as why:  # one payload of it, or of what it needs, cannot be read
                yield without(f"{UNREAD} ({why})")
                continue
            made = self._neighbours.made_inside(what, rank, tap, (step, n), records)
            try:
                if past is not None:
                    extra |= self._neighbours.cache(past, what, rank, (step, n), records)
                outputs = {**what.outputs, **{role: self.read(r) for role, r in made.items()}}
            except DumpError as why:
                yield without(f"{UNREAD} ({why})")
                continue
            what = grid.settled(changed(what, extra=extra, outputs=outputs), self.keeps)
            yield Captured(tap, rank, step, n, what, {**records, **made})

    def _with_extra(
        self, rank: int, tap: str, cls: str, step: int, n: int, records: Mapping[str, Record], read: Any = None
    ) -> tuple[Call, dict[str, Any]]:
        """A module's call, and what other records add to it. Raises DumpError."""
        what = self._missing_attributes.filled(rank, self.call(rank, tap, cls, records, read))
        return what, {**what.extra, **self._neighbours.extra(what, rank, tap, step, n)}

    def _up_to_last(
        self, calls: list[tuple[tuple[int, int], dict[str, Record]]], chosen: Chosen, past: Past | None, rank: int
    ) -> int:  # fmt: skip
        """How many of the ``calls`` there are to the last that is chosen; ``past`` will hold the requests of those
        alone."""
        last = max((k for k, (place, _) in enumerate(calls) if place in chosen.places), default=-1)
        if past is not None:
            spaces = (self._space(rank, step, records) for (step, n), records in calls if (step, n) in chosen.places)
            past.look_at({s.req for space in spaces if space is not None for s in space.segments})
        return last + 1

    def _last_rows(
        self, calls: Iterable[tuple[tuple[int, int], Mapping[str, Record]]], rank: int
    ) -> dict[Place, list[int]]:  # fmt: skip
        """By call: the requests that have no rows in a later one."""
        last: dict[int, Place] = {}
        for (step, n), records in calls:
            space = self._space(rank, step, records)
            last |= {s.req: (step, n) for s in space.segments} if space is not None else {}
        found: dict[Place, list[int]] = {}
        for req, place in last.items():
            found.setdefault(place, []).append(req)
        return found

    def _space(self, rank: int, step: int, records: Mapping[str, Record]) -> RowSpace | None:
        name = next((r.rows for r in records.values() if r.rows), None)
        return self.dump.rows.get((rank, step, name)) if name else None

    def _remembered(
        self, past: Past | None, rank: int, tap: str, place: tuple[int, int], records: Mapping[str, Record]
    ) -> None:  # fmt: skip
        """Of a call that is not taken, what later ones look back at."""
        space = self._space(rank, place[0], records)
        if past is None or space is None or not past.wants(space):
            return
        kept = self._neighbours.held(past, rank, tap, place, records)
        if len(kept) == len(past.names) and all(r.shape[:1] == (space.n,) for r in kept.values()):
            with contextlib.suppress(DumpError):  # then later rows have no history, and say so
                past.write(space, {n: self.read(r) for n, r in kept.items()})

    def _parts(
        self, rank: int, cls: str, step: int, records: Mapping[str, Record], chosen: Chosen, runs: Runs
    ) -> list[tuple[int, int]]:  # fmt: skip
        """The runs of rows in which a call is taken; [] where it is taken whole."""
        elements = sum(math.prod(r.shape) for r in records.values())
        if not runs and elements <= chosen.most:
            return []
        cuttable = chosen.by_rows(cls) or cls == "Attention" or cls.endswith("RotaryEmbedding")
        if not records or not cuttable or cls.endswith("LoRA"):  # an adapter's rows are known by their places
            return []
        first = next(iter(records.values()))
        n = first.shape[0] if first.shape else 0
        alike = all((r.rows, r.row_dim, r.shape[:1]) == (first.rows, 0, (n,)) for r in records.values())
        space = self._space(rank, step, records)
        if not alike or space is None or space.n != n or space.padding:
            return []
        if int(self.modules.get(rank, {}).get(first.tap, _NO_MODULE).attrs.get("tp_size", 1)) > 1 and cls in SUMMED:
            return []  # what other ranks gave is read whole
        size = max(_FEWEST, chosen.most * n // max(1, elements))
        if first.rows != _TOKENS:
            runs = ()
        if not runs and size >= n:
            return []
        spans = runs or ((0, n),)
        return [(a, min(a + size, stop)) for start, stop in spans for a in range(start, min(stop, n), size)]

    def _in_parts(
        self, rank: int, tap: str, cls: str, step: int, n: int, records: Mapping[str, Record], past: Past | None,
        parts: Iterable[tuple[int, int]],
    ) -> Iterator[Captured]:  # fmt: skip
        space = self._space(rank, step, records)
        assert space is not None
        self._remembered(past, rank, tap, (step, n), records)
        for a, b in parts:
            part = {role: replace(r, shape=(b - a, *r.shape[1:])) for role, r in records.items()}

            def read(record: Record, rows: slice = slice(a, b)) -> Any:
                whole = replace(record, shape=(space.n, *record.shape[1:]))
                return self.read_rows(whole, rows)

            try:
                what, extra = self._with_extra(rank, tap, cls, step, n, part, read)
            except DumpError as why:
                missing = f"{UNREAD} ({why})"
                yield Captured(tap, rank, step, n, Call(tap, cls), part, missing, first=a, whole=space.n)
                continue
            if past is not None:
                extra["cache"] = past.view(space, (a, b))
            what = grid.settled(replace(what, extra=extra), self.keeps)
            yield Captured(tap, rank, step, n, what, part, first=a, whole=space.n)

    def _gradient(self, rank: int, tap: str, step: int, n: int) -> Captured:
        """A backward run that was recorded, with its forward's call."""
        records, cls = self.by_tap[rank, tap][step, n], self.cls_of(rank, tap)
        try:
            what = self._gradients.call(tap, cls, records, self._forward(rank, tap, cls, step, n))
        except (NotKept, DumpError) as why:
            return Captured(tap, rank, step, n, Call(tap, cls), records, f"of its forward call: {why}")
        return Captured(tap, rank, step, n, grid.settled(what, self.keeps), records)

    def _forward(self, rank: int, tap: str, cls: str, step: int, n: int) -> Call | None:
        """The call that a backward run is of. Raises NotKept, DumpError."""
        if "." in cls.removeprefix(BACKWARD):
            op = self.forward_operator(self.by_tap[rank, tap][step, n])
            if op is None:
                return None
            records = self.op_records.get((rank, op.tap), {}).get((op.step, op.call), {})
            return self.op_call(op, records)
        path = tap.removeprefix(BACKWARD)
        records = dict(self.records_of(rank, path, step, n))
        if not records or any(r.payload is None for r in records.values()):
            return None
        return self._missing_attributes.filled(rank, self.call(rank, path, cls.removeprefix(BACKWARD), records))

    def _of_operator(
        self, rank: int, tap: str, begins: Callable[[int | None, int], object],
        crashed: Mapping[tuple[int | None, int], str], chosen: Chosen | None = None,
    ) -> Iterator[Captured]:  # fmt: skip
        self.parameters.forget()
        by_role, params = self.op_records.get((rank, tap), {}), Params()
        for op in self.ops[rank, tap]:
            if chosen is not None and (op.step, op.call) not in chosen.places:
                continue
            records = by_role.get((op.step, op.call), {})
            begins(op.step, op.call)
            if (op.step, op.call) in crashed:
                why = crashed[op.step, op.call]
                yield Captured(tap, rank, op.step, op.call, Call(tap, op.op), records, why, op.seq, True)
                continue
            try:
                what = self.op_call(op, records, shared=params)
                inner = self._made_inside(op)
            except (NotKept, DumpError) as why:
                missing = f"{UNREAD} ({why})" if isinstance(why, DumpError) else str(why)
                yield Captured(tap, rank, op.step, op.call, Call(tap, op.op), records, missing, op.seq)
                continue
            if is_operator(op.tap) and not op.op.startswith("aten.") and op.module is not None:
                what = replace(what, params=self.parameters.of(rank, op.module))
            if inner:
                what = replace(what, extra={"inner": inner})
            missing = "" if what.outputs else "nothing came out of it that was captured"
            yield Captured(tap, rank, op.step, op.call, grid.settled(what, self.keeps), records, missing, op.seq)

    def _made_inside(self, op: OpCall) -> list[tuple[str, Any]]:
        """What the operators gave that an opaque operator (``vllm.*``) ran: each one's name and first result that is no
        cache (None where there is none), in the order of execution. Raises DumpError."""
        found: list[tuple[int, str, Any]] = []
        if not op.op.startswith("vllm.") or op.module is None:
            return []
        for other in self.inside.get((op.rank, op.step, op.op, op.module, op.module_call), ()):
            records = self.op_records.get((op.rank, other.tap), {}).get((other.step, other.call), {})
            caches = {f"inplace.{t['role']}" for t in inputs(other) if t.get("blocks")}
            roles = [r for r in records if r.startswith(("output.", "inplace.")) and r not in caches]
            roles.sort(key=lambda r: (r.startswith("inplace."), len(r), r))
            kept = bool(roles) and records[roles[0]].payload is not None
            found.append((other.seq, other.op, self.read(records[roles[0]]) if kept else None))
        return [(name, t) for _, name, t in sorted(found, key=lambda f: f[0])]

    def op_call(self, op: OpCall, records: Mapping[str, Record], **more: Any) -> Call:
        """An operator's call from its records by role. Raises NotKept, DumpError."""
        return op_call(op, records, self.read, partial(self.parameters.record, op.rank, op.step), **more)

    def forward_operator(self, records: Mapping[str, Record]) -> OpCall | None:
        """The forward call of an operator's backward records; None where there is none."""
        return self._gradients.operator(records)

    def places(self, rank: int, tap: str) -> dict[Place, Runs]:
        """All calls of a tap, whole."""
        if (rank, tap) in self.ops:
            return {(op.step, op.call): () for op in self.ops[rank, tap]}
        return dict.fromkeys(sorted(self.by_tap[rank, tap]), ())

    def held(self, rank: int, tap: str, place: Place) -> Mapping[str, Record]:
        """The records of a call by role; {} where it has none."""
        calls: Mapping[Any, Any] = self.op_records if (rank, tap) in self.ops else self.by_tap
        found: Mapping[str, Record] = calls.get((rank, tap), {}).get(place, {})
        return found

    def operator(self, captured: Captured) -> OpCall | None:
        """The journal's line of an operator's call; None for a module's."""
        ops = self.ops.get((captured.rank, captured.tap), ())
        return next((o for o in ops if (o.step, o.call) == (captured.step, captured.call)), None)

    def keeps(self) -> Mapping[str, str]:
        """Container → the coarser dtype whose numbers this dump keeps in it (grid.kept); reads some calls once."""
        if self._keeps is None:
            self._keeps = grid.kept(self._sampled_calls(), {r.dtype for r in first_of_each_site(self.dump.records)})
        return self._keeps

    def _sampled_calls(self) -> Iterator[grid.Sight]:
        for rank, tap, cls in grid.spread(self.taps()):
            try:
                yield from grid.sights(tap, self._bare(rank, tap, cls))
            except (NotKept, ValueError, DumpError):
                continue

    def _bare(self, rank: int, tap: str, cls: str) -> Call:
        """The first call of a tap, what goes in and what comes out. Raises NotKept, ValueError, DumpError."""
        if is_gradient(tap):
            raise NotKept("not read")
        if (rank, tap) in self.ops:
            op = self.ops[rank, tap][0]
            records = self.op_records.get((rank, tap), {}).get((op.step, op.call), {})
        else:
            op, (_, records) = None, min(self.by_tap[rank, tap].items(), key=lambda c: c[0])
        if any(r.payload is None or math.prod(r.shape) > grid.LARGEST for r in records.values()):
            raise NotKept("not read")
        if op is not None:
            return self.op_call(op, records)
        read = {role: self.read(r) for role, r in records.items()}
        inputs = {role: t for role, t in read.items() if role.startswith("input.")}
        return Call(tap, cls, inputs, outputs={role: t for role, t in read.items() if role not in inputs})
