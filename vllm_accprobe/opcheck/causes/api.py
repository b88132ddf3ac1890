"""What a cause is, how one is written, and the table of all.

The problem: "Attention of layer 0 is wrong" starts a discussion; "mine's output is what this attention gives without
its soft cap of 5" ends it. The idea: a cause is a row of a table: an edit of a call (another setting, another tensor)
or of an output, the sentence that names it, and the parameters to try: what the dump names (golden's attribute,
config.json), small lists, or a fit (`fits`). search.py runs the reference on each edited call; a row needs no threshold
and no proof. A wrong call is first cut to a few of its wrong rows (`few_of`), on which nearly all causes fail at once.

Ours are the tables ``CAUSES`` of this folder's modules; packages add theirs, marked with ``@cause``, by the entry point
group ``vllm_accprobe.causes`` (extensions.py), each a module or a function. Elsewhere: the proof (search.py), which
calls are examined (examine.py).
"""

from __future__ import annotations

import functools
import importlib
import math
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any, NoReturn

import torch

from vllm_accprobe import extensions
from vllm_accprobe.judge.rounding_unit import unit
from vllm_accprobe.judge.statistic import CHANCE
from vllm_accprobe.opcheck import causes
from vllm_accprobe.opcheck.calls import grid
from vllm_accprobe.opcheck.calls.case import CachedRun, StoredCache
from vllm_accprobe.opcheck.calls.records import Captured
from vllm_accprobe.opcheck.floors.output_rows import OutputRows
from vllm_accprobe.opcheck.floors.rounding import direction, middles
from vllm_accprobe.opcheck.reference import Call, Declined, Expected, combined, decline_if, required
from vllm_accprobe.opcheck.reference_table import References
from vllm_accprobe.opcheck.references.norms import known_as
from vllm_accprobe.opcheck.roundings import ROUNDED

SETTING, ADDRESS, PRECISION, FACTOR = "setting", "address", "precision", "factor"
FAMILIES = (SETTING, ADDRESS, PRECISION, FACTOR)
MARK = "__accprobe_cause__"
Tensor = Any


class Outputs(dict[str, Expected]):
    """What a reference gives, by role; another role is declined, as a cause that needs it does not apply."""

    def __missing__(self, role: str) -> Expected:
        raise Declined(f"{role} has no reference")


@dataclass(frozen=True)
class Guess:
    """A parameter and what it cost to find. value: a number, a string, or a tuple; fitted: how many real numbers were
    fitted to mine's output; choices: among how many equally simple ones it was picked by that output."""

    value: Any
    fitted: int = 0
    choices: float = 1.0


@dataclass(frozen=True)
class Trial:
    """One call of the operator, as it is examined. plain: what its reference gives; golden: attributes of golden's
    module, as far as they differ from mine's; chance: that a correct output fails (the replay's); wrong: by role, bool
    [rows], the rows that fail by themselves."""

    captured: Captured
    references: References
    plain: Mapping[str, Expected]
    golden: Mapping[str, Any] = field(default_factory=dict)
    chance: float = CHANCE
    wrong: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def call(self) -> Call:
        return self.captured.what

    @functools.cached_property
    def few(self) -> Trial:
        """The trial on a few of its wrong rows; itself where it cannot be cut."""
        return few_of(self)

    def mine(self, role: str = "output.0") -> Tensor:
        """The captured tensor of an output, its own dtype. Raises Declined."""
        call = self.call
        return call.outputs[role] if role in call.outputs else call.tensor(role.removeprefix("input."))

    def extra(self, name: str) -> Any:
        """What other records add to the call. Raises Declined."""
        if self.call.extra.get(name) is None:
            raise Declined(f"{name} was not captured")
        return self.call.extra[name]

    def evaluate(self, call: Call) -> Mapping[str, Expected]:
        """The reference's outputs of another call. Raises Declined."""
        found = self.references.evaluate(call)
        if isinstance(found, Declined):
            raise found
        return Outputs(found)

    def rows(self, role: str, expected: Expected) -> OutputRows | None:
        """An expected output and mine's, row by row; None where their shapes differ."""
        record, mine = self.captured.records[role], self.mine(role)
        shape, e = tuple(mine.shape), expected
        if math.prod(e.value.shape) != math.prod(shape):
            return None
        if tuple(e.value.shape) != shape:
            noise, bound = (None if x is None else x.expand(e.value.shape).reshape(shape) for x in (e.noise, e.bound))
            e = replace(e, value=e.value.reshape(shape), noise=noise, bound=bound)
        return OutputRows.of(e, mine, record.row_dim if record.rows is not None else 0)

    def weight(self, role: str) -> Tensor:
        """1.0 in the rows that fail by themselves, 0.0 elsewhere, broadcastable to the output; 1.0 where none does."""
        record, mine = self.captured.records[role], self.mine(role)
        wrong, dim = self.wrong.get(role), record.row_dim if record.rows is not None else 0
        if wrong is None or not mine.dim() or len(wrong) != mine.shape[dim] or not bool(wrong.any()):
            return torch.ones((1,) * mine.dim(), dtype=torch.float64)
        return wrong.double().reshape([-1 if d == dim else 1 for d in range(mine.dim())])

    def targets(self, role: str = "output.0") -> tuple[Tensor, Tensor]:
        """What a fit goes for, float64: mine's numbers as they are, and as truncated ones."""
        mine = self.mine(role).double()
        return mine, middles(mine, self.dtype(role))

    def dtype(self, role: str) -> str:
        return grid.name_of(self.mine(role))

    def roles(self) -> list[str]:
        """The outputs that were captured and have a reference."""
        return [role for role in self.plain if role in self.captured.records]


Change = Callable[[Trial, Any], Any]
"""(trial, parameter) → an edited Call, the value of output.0 (float64), an `Expected`, or these by role. Raises
Declined where it does not apply."""
Values = Callable[[Trial], Iterable[Any]]
"""Trial (the worst one) → parameters, bare or as `Guess`. Raises Declined where it does not apply."""


def once(trial: Trial) -> Iterable[Any]:
    return (None,)


@dataclass(frozen=True)
class CauseRow:
    """name: unique; family: of FAMILIES; classes: globs; text: the clause that follows "what this Attention gives",
    with ``{0}`` for the parameter; change, values: as above; whole: a row of the edited output rests on other rows, or
    on its place, so that it cannot be tried on a few rows."""

    name: str
    family: str
    classes: tuple[str, ...]
    text: str
    change: Change
    values: Values = once
    whole: bool = False

    def fits(self, call: Call) -> bool:
        return any(fnmatchcase(known_as(call), glob) for glob in self.classes)

    def clause(self, value: Any) -> str:
        """The text with its parameter."""
        return self.text.format(*(value if isinstance(value, tuple) else (value,)))


def cause(
    family: str, *classes: str, text: str, values: Values = once, whole: bool = False
) -> Callable[[Change], Change]:  # fmt: skip
    """Marks a function (trial, parameter) as a cause of operators of ``classes`` (globs over class names). Without
    ``values`` it has no parameter: it is tried once, with None. The same function may be marked several times. whole:
    see `CauseRow`; without it a cause that fails on a few wrong rows is tried no further."""
    if family not in FAMILIES:
        raise ValueError(f"a cause is of one of {FAMILIES}, not {family!r}")

    def mark(function: Change) -> Change:
        known: tuple[CauseRow, ...] = getattr(function, MARK, ())
        name = function.__name__ if not known else f"{function.__name__}_{len(known)}"
        setattr(function, MARK, (*known, CauseRow(name, family, classes, text, function, values, whole)))
        return function

    return mark


def marked(source: ModuleType | Change) -> list[CauseRow]:
    """The causes of a module's own functions and in its table ``CAUSES``, or of the one function."""
    if not isinstance(source, ModuleType):
        return list(getattr(source, MARK, ()))
    own = [f for f in vars(source).values() if callable(f) and getattr(f, "__module__", "") == source.__name__]
    return [*(c for f in own for c in getattr(f, MARK, ())), *getattr(source, "CAUSES", ())]


@functools.cache
def default_causes() -> tuple[list[CauseRow], list[str]]:
    """Ours in the order of modules' names, then those of installed packages; a sentence for each entry point that
    cannot be used."""
    names = [m.name for m in pkgutil.iter_modules(causes.__path__, f"{causes.__name__}.")]
    table, problems = [c for name in names for c in marked(importlib.import_module(name))], list[str]()
    for extension in extensions.added(extensions.CAUSES, problems):
        found = marked(extension.what)
        if not found:
            why = ValueError("it has no function marked with @cause")
            problems.append(extensions.unusable("causes", extension.name, why))
        table += found
    return table, problems


def among(values: Iterable[Any], choices: float = 0.0) -> list[Guess]:
    """Parameters of which each is one choice among all of them, or among ``choices``."""
    found = list(values)
    return [Guess(value, choices=choices or float(len(found))) for value in found]


def others(own: Any, known: Iterable[Any], usual: Sequence[Any] = (), choices: float = 0.0) -> Iterator[Guess]:
    """Parameters other than ``own``: those that are named somewhere, then usual ones."""
    named_ones = [x for x in dict.fromkeys(known) if x and x != own]
    yield from map(Guess, named_ones)
    yield from (Guess(x, choices=choices or float(len(usual))) for x in usual if x != own and x not in named_ones)


def decline(reason: str) -> NoReturn:
    raise Declined(reason)


def with_value(trial: Trial, value: Tensor, role: str = "output.0") -> Expected:
    """The plain output with another value."""
    plain = trial.plain[role]
    same = value.numel() == plain.value.numel()
    return replace(plain, value=value.reshape(plain.value.shape) if same else value, exact=None)


def edited(call: Call, *, without: Sequence[str] = (), **parts: Mapping[str, Any]) -> Call:
    """``call`` with other entries. parts: ``inputs``, ``params``, ``attrs``, ``parent``, ``config``, ``extra``, each
    with the entries that change; without: names that are taken out of all of them."""
    changes: dict[str, Any] = {}
    for name in ("inputs", "params", "attrs", "parent", "config", "extra"):
        old: Mapping[str, Any] = getattr(call, name)
        if parts.get(name) or any(n in old for n in without):
            changes[name] = {k: v for k, v in {**old, **parts.get(name, {})}.items() if k not in without}
    found = replace(call, **changes)
    if not changes or "ranks" not in found.extra or "ranks" in parts.get("extra", {}):
        return found
    own = {n: changes[n] for n in ("inputs", "params", "attrs") if n in changes}
    rank = call.attrs.get("tp_rank", 0)
    ranks = [replace(r, **own) if r.attrs.get("tp_rank", 0) == rank else r for r in found.extra["ranks"]]
    return replace(found, extra={**found.extra, "ranks": ranks})


def scaled(e: Expected, factor: Tensor | float, value: Tensor | None = None) -> Expected:
    """An output times ``factor`` (broadcastable), with its errors. value: instead of the product."""
    size = factor.abs() if isinstance(factor, torch.Tensor) else abs(factor)
    noise, bound = (None if x is None else x * size for x in (e.noise, e.bound))
    return replace(e, value=e.value * factor if value is None else value, noise=noise, bound=bound, exact=None)


def rounded_once(trial: Trial, role: str) -> Expected:
    """The plain output, rounded to its dtype: what an edit of the finished output reads."""
    plain, step = trial.plain[role], unit(trial.dtype(role))
    size = step * plain.value.abs()
    bound = None if plain.bound is None else plain.bound + size
    return replace(plain, noise=combined(plain.noise, ROUNDED * size), bound=bound, exact=None)


def moved(e: Expected, at: Callable[[Tensor], Tensor]) -> Expected:
    """An output whose elements stand elsewhere. at: what ``at`` does to a tensor of its shape, errors included."""
    noise, bound = (None if x is None else at(x.expand(e.value.shape)) for x in (e.noise, e.bound))
    return replace(e, value=at(e.value), noise=noise, bound=bound, exact=None)


_STEPS = 6
"""Chosen: steps of Gauss and Newton; each squares the error near the end."""
_NEAR = 1e-3
"""Chosen: relative change of a parameter for a difference quotient."""
_ENOUGH = 1e-6
"""Chosen: a relative step that changes no output of 16 bits, nor much of float32's."""
_LEAST = 2.0**-12
"""Chosen: of an average variance, the least that an element of a fit is given."""
_ROUNDING = 2.0
"""Chosen: variances of rounding in each number, as a fit leaves them; a wrong one leaves tens and more."""
_FARTHEST = 16.0
"""Chosen: factor by which a fit may leave its start; what is further off has another cause."""
_LEFT = 0.97
"""Chosen: part of a few rows' error that a fit may leave there to be made on all; one that explains nothing takes its
share of a number off, 1 of hundreds."""


def outputs_of(trial: Trial, found: Any) -> dict[str, Expected]:
    """What a change gave, by role, with the plain outputs of the other roles. Raises Declined."""
    if isinstance(found, Call):
        found = trial.evaluate(found)
    if isinstance(found, (Expected, torch.Tensor)):
        found = {"output.0": found}
    new = {role: x if isinstance(x, Expected) else with_value(trial, x.double(), role)
           for role, x in found.items() if role in trial.plain}  # fmt: skip
    return {**trial.plain, **new}


def precision(trial: Trial, role: str) -> Tensor:
    """What an element counts for in a fit: one over the variance of its rounding, float64, mine's shape; an element
    near 0 is known best."""
    mine, noise = trial.mine(role).double(), trial.plain[role].noise
    variance = (unit(trial.dtype(role)) * mine).square()
    variance = variance + _LEAST * variance.mean()
    if noise is not None:
        variance = variance + noise.expand(trial.plain[role].value.shape).reshape(mine.shape).square()
    return 1.0 / variance.clamp(min=1e-300)


def fits(change: Change, trial: Trial, starts: Iterable[float], role: str = "output.0") -> Iterator[Guess]:
    """A positive parameter fitted by least squares over the logarithm, from the best of ``starts``: over all rows and
    over the wrong ones, of mine's numbers as they are and as truncated ones. Nothing where the output does not depend
    on it, and where it explains nothing of the error in a few wrong rows."""
    begun = list(starts)
    start = _start(change, trial.few, begun, role)
    if not math.isfinite(start):
        return
    mine, seen, of = trial.mine(role).double(), list[float](), _of(change, trial, role)
    everywhere = precision(trial, role)
    some = everywhere * trial.weight(role)
    ways = [(everywhere, mine), (everywhere, middles(mine, trial.dtype(role)))]
    if not bool((some > 0).all()):
        ways += [(some, mine), (some, ways[1][1])]
    for weight, target in ways:
        value = _best(of, target, weight, [start, *begun])
        if math.isfinite(value) and all(not math.isclose(value, s, rel_tol=1e-9) for s in seen):
            cut = target is not mine and direction(of(value), mine, trial.dtype(role)).toward_zero
            seen.insert(0 if cut else len(seen), value)  # the first that holds is said
    yield from (Guess(value, fitted=1) for value in seen)


def _of(change: Change, trial: Trial, role: str) -> Callable[[float], Tensor]:
    """Parameter → the edited call's output, mine's shape; rows without a reference are mine's own."""
    mine = trial.mine(role).double()

    def of(parameter: float) -> Tensor:
        return known(outputs_of(trial, change(trial, parameter))[role], mine)

    return of


def known(e: Expected, mine: Tensor) -> Tensor:
    """The value of an output, ``mine``'s shape, and ``mine`` in rows that have no reference."""
    value = e.value.reshape(mine.shape)
    return value if e.rows is None else torch.where(e.rows.reshape(-1, *[1] * (mine.dim() - 1)), value, mine)


def _start(change: Change, few: Trial, starts: Sequence[float], role: str) -> float:
    """The parameter that fits a few rows best; nan where it explains nothing of their error."""
    mine, weight, of = few.mine(role).double(), precision(few, role), _of(change, few, role)

    def left(value: Tensor) -> float:
        return float((weight * (value - mine).square()).sum())

    begun = [(left(of(s)), s) for s in starts]
    value = _least(of, mine, weight, min(begun)[1]) if begun else math.nan
    return value if math.isfinite(value) and left(of(value)) <= _LEFT * left(known(few.plain[role], mine)) else math.nan


def _best(of: Callable[[float], Tensor], target: Tensor, weight: Tensor, starts: Iterable[float]) -> float:
    """The fit from the first start that leaves about what rounding does, else the one that leaves least: few rows may
    lead elsewhere where a reference rounds as mine does (8-bit caches), which is no smooth function."""
    found, least = math.nan, math.inf
    for start in starts:
        value = _least(of, target, weight, start)
        left = float((weight * (of(value) - target).square()).sum()) if math.isfinite(value) else math.inf
        if left < least:
            found, least = value, left
        if least <= _ROUNDING * target.numel():
            break
    return found


def _least(of: Callable[[float], Tensor], target: Tensor, weight: Tensor, start: float) -> float:
    """Gauss and Newton's steps over the logarithm; nan where they lead nowhere."""
    value = start
    for _ in range(_STEPS):
        now = of(value)
        slope = (of(value * (1.0 + _NEAR)) - now) / _NEAR
        power = float((weight * slope.square()).sum())
        step = float((weight * (target - now) * slope).sum()) / power if power else math.nan
        if not math.isfinite(step):
            return math.nan
        value *= math.exp(max(-1.0, min(1.0, step)))
        if not start / _FARTHEST < value < start * _FARTHEST:
            return math.nan
        if abs(step) < _ENOUGH:
            break
    return value


def fit_of(change: Change, *starts: float | Callable[[Trial], float]) -> Values:
    """``values`` of a cause whose parameter is fitted. starts: numbers, or what gives them from a trial."""

    def values(trial: Trial) -> Iterator[Guess]:
        return fits(change, trial, [s(trial) if callable(s) else s for s in starts])

    return values


def named(trial: Trial, *names: str) -> list[Any]:
    """What golden's module has for these attributes, where it differs from mine's."""
    return [trial.golden[n] for n in names if n in trial.golden]


_FEW = 8
"""Chosen: rows that a wrong call is cut to; half of them are the worst ones, the others lie between them."""
_CACHED = ("Attention", "MLAAttention")
_BY_ROWS = ("UnquantizedFusedMoEMethod",)
"""Classes whose rows are independent, but for what their references say of noise."""


def few_of(trial: Trial) -> Trial:
    """``trial`` on a few of its wrong rows, the same where its rows are few, or not independent. Of attention the rows
    stay in place, and the cache gives only these."""
    call = trial.call
    try:
        if call.cls in _CACHED and call.extra.get("cache") is not None:
            few = replace(call, extra={**call.extra, "cache": _of_worst_request(trial)})
        elif trial.references.by_rows(call.cls) or call.cls.endswith("RotaryEmbedding") or call.cls in _BY_ROWS:
            off = _errors(trial)
            few = call if off is None or len(off) <= _FEW else _cut(trial, _picked(off))
        else:
            few = call
        if few is call:
            return trial
        return replace(trial, captured=replace(trial.captured, what=few), plain=trial.evaluate(few), wrong={})
    except (Declined, RuntimeError):
        return trial


def _errors(trial: Trial) -> Any:
    """float64 [rows]: of all outputs, the relative error's square, 0 in right rows; None where they have other rows."""
    total = None
    for role in trial.roles():
        record, mine, plain = trial.captured.records[role], trial.mine(role), trial.plain[role].value
        if not mine.is_floating_point() or not mine.dim() or plain.numel() != mine.numel() or record.row_dim:
            return None
        off = ((mine.double() - plain.reshape(mine.shape)) * trial.weight(role)).reshape(len(mine), -1)
        off = off.nan_to_num().square().sum(1) / plain.reshape(len(mine), -1).square().sum(1).clamp(min=1e-300)
        if total is not None and len(off) != len(total):
            return None
        total = off if total is None else total + off
    return total


def _picked(off: Any) -> Any:
    wrong = (off > 0).nonzero().flatten()
    wrong = wrong if len(wrong) else torch.arange(len(off))
    worst = wrong[off[wrong].topk(min(_FEW // 2, len(wrong))).indices]
    return torch.cat((worst, wrong[torch.linspace(0, len(wrong) - 1, _FEW // 2).long()])).unique()


def _cut(trial: Trial, some: Any) -> Call:
    n = len(trial.mine(trial.roles()[0]))

    def part(name: str, t: Any) -> Any:
        record = trial.captured.records.get(name)
        dim = record.row_dim if record is not None else 0
        return t.index_select(dim, some) if t.dim() > dim and t.shape[dim] == n else t

    def of(call: Call) -> Call:
        extra = {k: part(k, v) if isinstance(v, torch.Tensor) else [of(c) for c in v] if k == "ranks" else v
                 for k, v in call.extra.items()}  # fmt: skip
        return replace(call, inputs={k: part(f"input.{k}", t) for k, t in call.inputs.items()},
                       outputs={k: part(k, t) for k, t in call.outputs.items()}, extra=extra)  # fmt: skip

    return of(trial.call)


def _of_worst_request(trial: Trial) -> StoredCache:
    off = required(_errors(trial), "its output has no rows")
    found = [(float(off[at].amax()), -k, x) for k, x in enumerate(trial.call.extra["cache"].requests(True))
             for at in (x[0],) if len(at)]  # fmt: skip
    decline_if(not found, "no row has its whole history")
    at, positions, past = max(found, key=lambda x: x[:2])[2]
    some = _picked(off[at])
    return StoredCache([CachedRun(at[some], positions[some], past)], "")
