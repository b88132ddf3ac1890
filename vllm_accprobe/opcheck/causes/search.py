"""Which cause explains an operator that is wrong, with the proof.

The problem: a guess that sounds right sends a kernel's author to the wrong line; and of many guesses one fits by
accident. The idea: of a few calls, wrong ones and right ones, mine's outputs are judged by the very test that found
them wrong (floors/verdict.py), against what the reference gives for each edited call. A cause holds where every
examined output passes, and the plain reference fails. Where a fault is in some rows alone, the rows that fail by
themselves must be those of the edited call; the others are right as they are, and the sentence says so.

The chance. Let z be mine's error against the plain reference in standard deviations of rounding, over the k different
numbers that the edit moves by more than one of these, and s the part of its length that the edit leaves (rounding
counts as left: s**2 is at least k / |z|**2). An error of any direction in k dimensions leaves as little beside f fitted
numbers and the edit's own direction with probability I_{s**2}((k - f - 1) / 2, (f + 1) / 2), the incomplete beta
function: the F-test of a regression with f + 1 regressors [N. Draper and H. Smith, Applied Regression Analysis, 3rd
ed., section 5.3; R. Fisher, Metron 3 (1924) 90]. This lets the edit's size be free, which it is not. It is multiplied
by all that was tried, each choice among alternatives included [Bonferroni], and what is likelier than RATE is not
reported. The fewest fitted numbers win, then the fewest choices; causes that hold equally are all said.

An error that one factor of the output, one of each row or one of each column explains as well as the edit does has as
many dimensions as it has factors, not as numbers: in one row, many settings give the same factor. Then k counts
factors, z is of these, and a cause that is no factor itself is said only if it gives them.

Not here: the causes, which calls (examine.py).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_accprobe.judge.distributions import incomplete_beta
from vllm_accprobe.judge.statistic import RATE
from vllm_accprobe.opcheck.causes.api import (
    ADDRESS,
    FACTOR,
    PRECISION,
    SETTING,
    CauseRow,
    Guess,
    Trial,
    outputs_of,
)
from vllm_accprobe.opcheck.floors.output_rows import OutputRows
from vllm_accprobe.opcheck.floors.verdict import VARIANCE, Verdict, first_of
from vllm_accprobe.opcheck.reference import Declined, Expected

SECONDS = 10.0
"""That all causes together add to a comparison, of this process: of wall time where nothing else runs."""
_SLOWER = 3.0
"""Chosen: so many times as much wall time where the machine has something else to do, too."""
_MOST_SAID = 3
"""Chosen: causes that hold equally and are reported; the rest is counted."""
_MOST_ROWS = 1024
"""Chosen: rows of a call that are judged one by one, half a millisecond each."""
_ORDER = (SETTING, FACTOR, ADDRESS, PRECISION)
"""Families by how likely they are for what they cost."""
_SLACK = 2.0
"""Chosen: limits of a few rows that a cause may exceed there and still be proved on all: with fewer rows a limit is up
to a tenth lower."""


@dataclass(frozen=True)
class Proof:
    """moved: numbers that the edit moves by more than rounding; before, after: squares of their errors against the
    plain and the edited reference, in variances of rounding; exact: numbers that must be equal, and are only with the
    edit; severity: of what is left, value / limit of the worst output; wrong, rows: rows that are wrong, of how many;
    whole: the right rows are those of the edited call, too."""

    moved: int = 0
    before: float = 0.0
    after: float = 0.0
    exact: int = 0
    severity: float = 0.0
    wrong: int = 0
    rows: int = 0
    whole: bool = True

    def and_(self, other: Proof) -> Proof:
        return Proof(
            self.moved + other.moved, self.before + other.before, self.after + other.after, self.exact + other.exact,
            max(self.severity, other.severity), self.wrong + other.wrong, self.rows + other.rows,
            self.whole and other.whole,
        )  # fmt: skip

    def log_chance(self, guess: Guess, tried: float) -> float:
        """Logarithm of the chance, see above; 0.0 for certain."""
        found = math.log(max(tried, 1.0)) - self.exact * math.log(2.0)
        a = 0.5 * (self.moved - guess.fitted - 1)
        if a > 0 and self.before > 0:
            left = min(1.0, max(self.after, float(self.moved)) / self.before)
            p = incomplete_beta(a, 0.5 * (guess.fitted + 1), left)
            found += math.log(p) if p > 0 else a * math.log(left)
        elif not self.exact:
            return 0.0
        return min(0.0, found)


@dataclass(frozen=True)
class ProvedCause:
    """A cause that holds. what: with its parameter in ``guess``; proof: of the trials together."""

    what: CauseRow
    guess: Guess
    proof: Proof

    @property
    def clause(self) -> str:
        return self.what.clause(self.guess.value)


@dataclass(frozen=True)
class Explanation:
    """What is reported of an operator. found: the causes that hold equally; cls: the operator's class; tried: edits
    that were tried, choices included; calls: that were examined."""

    found: tuple[ProvedCause, ...]
    cls: str
    tried: float
    calls: int

    @property
    def chance(self) -> float:
        logs = [f.proof.log_chance(f.guess, self.tried * f.guess.choices) for f in self.found]
        return math.exp(max(max(logs), -700.0))

    @property
    def text(self) -> str:
        """``mine's output is what this Attention gives without its soft cap of 5``."""
        proof = self.found[0].proof
        clauses = list(dict.fromkeys(f.clause for f in self.found))
        more = f", or in {len(clauses) - _MOST_SAID} more ways" if len(clauses) > _MOST_SAID else ""
        sentence = f"mine's output is what this {self.cls} gives {', or '.join(clauses[:_MOST_SAID])}{more}"
        if proof.whole:
            return sentence
        where = "row" if proof.wrong == 1 else f"{proof.wrong:,} rows"
        return f"in the {where} of {proof.rows:,} examined that {'is' if proof.wrong == 1 else 'are'} wrong, {sentence}"

    def plain(self) -> dict[str, Any]:
        """compare.json's ``origins[].cause``."""
        first = self.found[0]
        value = first.guess.value
        value = list(value) if isinstance(value, tuple) else value
        return {"family": first.what.family, "text": self.text, "parameter": value,
                "residual": first.proof.severity, "chance": self.chance}  # fmt: skip


class Deadline:
    """seconds: of this process from now, so that a busy machine finds the same; None for none."""

    def __init__(self, seconds: float | None = SECONDS):
        own = math.inf if seconds is None else seconds
        self._until = time.process_time() + own, time.monotonic() + _SLOWER * own

    def over(self) -> bool:
        return time.process_time() >= self._until[0] or time.monotonic() >= self._until[1]


class Examined:
    """A trial with what the plain reference says of it: the outputs, the verdicts, and the rows that fail alone."""

    def __init__(self, trial: Trial):
        self.trial = trial
        self.rows: dict[str, OutputRows] = {}
        self.wrong: dict[str, Any] = {}
        self.verdicts: dict[str, Verdict] = {}
        for role in trial.roles():
            rows = trial.rows(role, trial.plain[role])
            if rows is None or not len(rows.at) or trial.plain[role].only_measured:
                continue
            self.rows[role] = rows
            self.verdicts[role] = rows.judge(trial.dtype(role), chance=trial.chance)
        off = {role: self.wrong_rows(role) for role, v in self.verdicts.items() if not v.passed}
        self.trial = replace(trial, wrong=off)

    @property
    def failed(self) -> bool:
        return any(not v.passed for v in self.verdicts.values())

    def wrong_rows(self, role: str) -> Any:
        """bool [rows]: those that fail the plain reference by themselves; all where none does and the output fails."""
        if role not in self.wrong:
            rows, v = self.rows[role], self.verdicts[role]
            n = len(rows.at)
            out = torch.zeros(n, dtype=torch.bool)
            if not v.passed and n <= _MOST_ROWS:
                for k in range(n):
                    one = some_rows(rows, slice(k, k + 1))
                    out[k] = not one.judge(self.trial.dtype(role), chance=self.trial.chance).passed
            self.wrong[role] = out if bool(out.any()) or v.passed else ~out
        return self.wrong[role]

    def proof(self, expected: Mapping[str, Expected], factor: bool = False) -> Proof | None:
        """Whether mine's outputs are the ``expected`` ones; None where they are not. factor: the cause is one, and no
        more."""
        total = Proof()
        for role, plain in self.rows.items():
            e = expected[role]
            if e is self.trial.plain[role]:
                if not self.verdicts[role].passed:
                    return None
                continue
            found = self.trial.rows(role, e)
            if found is None:
                return None
            both = torch.isin(plain.at, found.at)  # an edit may have no reference where two scores are tied
            if 2 * int(both.sum()) < len(plain.at):
                return None
            found = some_rows(found, torch.isin(found.at, plain.at))
            one = self._output(role, some_rows(plain, both), found, self.wrong_rows(role)[both], factor)
            if one is None:
                return None
            total = total.and_(one)
        return total

    def _output(self, role: str, plain: OutputRows, found: OutputRows, wrong: Any, factor: bool) -> Proof | None:
        """wrong: bool, as `wrong_rows` of these rows."""
        dtype, chance = self.trial.dtype(role), self.trial.chance
        v, whole, n = found.judge(dtype, chance=chance), True, len(found.at)
        if not self.verdicts[role].passed and not bool(wrong.any()):
            return None
        if not v.passed and self.verdicts[role].passed:
            return Proof(rows=n, whole=False)
        if not v.passed:
            if bool(wrong.all()):
                return None
            found, plain, whole = some_rows(found, wrong), some_rows(plain, wrong), False
            v = found.judge(dtype, chance=chance)
            if not v.passed:
                return None
        count = 0 if self.verdicts[role].passed else n if whole else int(wrong.sum())
        return replace(_evidence(plain, found, v, factor), severity=v.severity, wrong=count, rows=n, whole=whole)


def some_rows(rows: OutputRows, which: Any) -> OutputRows:
    """Of an output, the rows ``which``, a slice or bool [rows]."""
    cut: dict[str, Any] = {n: None if (t := getattr(rows, n)) is None else t[which]
           for n in ("at", "reference", "mine", "noise", "bound", "exact")}  # fmt: skip
    return replace(rows, **cut)


def _evidence(plain: OutputRows, found: OutputRows, v: Verdict, factor: bool) -> Proof:
    """What one output adds to the proof. v: of ``found``; factor: the cause is one."""
    if v.sums is None:  # integers, and what must be equal
        other = plain.reference != found.reference
        return Proof(exact=int((other & (plain.mine == found.mine) & (found.reference == found.mine)).sum()))
    planes = v.sums.planes
    variance = planes[VARIANCE].clamp(min=1e-300)
    off = (found.reference - plain.reference).square() > variance
    off &= torch.isfinite(plain.reference) & torch.isfinite(plain.mine) & torch.isfinite(found.reference)
    if v.sums.keys is not None:
        off &= first_of(v.sums.keys[None])[0]
    finite = torch.isfinite(plain.reference) & torch.isfinite(plain.mine) & torch.isfinite(found.reference)
    if not factor and bool(finite.all()) and (by_factors := _by_factors(plain, found, variance)) is not None:
        return by_factors
    before = ((plain.mine - plain.reference).square() / variance)[off].sum()
    after = ((found.mine - found.reference).square() / variance)[off].sum()
    return Proof(int(off.sum()), float(before), float(after))


def _by_factors(plain: OutputRows, found: OutputRows, variance: Any) -> Proof | None:
    """The evidence in factors where they explain mine's error as well as the edit does, or within rounding; the fewest
    factors that do; None where none do."""
    y, off, edit = plain.reference, plain.mine - plain.reference, found.reference - plain.reference
    if not bool(plain.mine.any()):  # nothing was written: no factor is as much
        return None
    enough = max(float(((found.mine - found.reference).square() / variance).sum()), float(y.numel()))
    for dims in ((0, 1), (1,), (0,)):
        weight = (y.square() / variance).sum(dims, keepdim=True).clamp(min=1e-300)
        factors, edited = ((x * y / variance).sum(dims, keepdim=True) / weight for x in (off, edit))
        if float(((off - factors * y).square() / variance).sum()) <= enough:
            z, expected = (x * weight.sqrt() for x in (factors, edited))
            moved = expected.square() > 1
            return Proof(int(moved.sum()), float(z[moved].square().sum()), float((z - expected)[moved].square().sum()))
    return None


def search(
    trials: Sequence[Trial], causes: Iterable[CauseRow], ends: Deadline | None = None,
    first: Sequence[ProvedCause] = (), failures: Failures | None = None,
) -> Explanation | None:  # fmt: skip
    """The simplest cause that holds in all ``trials``, the worst of which stands first; None where there is none, or
    where no output of theirs fails the plain reference. first: causes that held elsewhere, which are tried before all
    others, and suffice; failures: gets the causes that raise."""
    examined = [x for x in map(Examined, trials) if x.rows]
    wrong = [x for x in examined if x.failed]
    if not wrong:
        return None
    examined = [*wrong, *(x for x in examined if not x.failed)]
    failures = Failures() if failures is None else failures
    again = [x for f in first if (x := _tried(f.what, f.guess, examined, failures))]
    if again:
        known = Explanation(tuple(again), trials[0].call.cls, float(len(first)), len(examined))
        if known.chance <= RATE:
            return known
    ends, tried = ends or Deadline(None), float(len(first))
    proved: list[tuple[int, ProvedCause]] = []
    screen = Screen(examined[0])
    for place, one in sorted(enumerate(causes), key=lambda x: _ORDER.index(x[1].family)):
        for guess in _guesses(one, examined[0].trial, ends, failures):
            tried += guess.choices
            if screen.lets(one, guess) and (x := _tried(one, guess, examined, failures)) is not None:
                proved.append((place, x))
        if ends.over():
            break
    fits = [x for _, x in sorted(proved, key=lambda p: p[0])]  # as they stand, whatever the order in which they ran
    fits = [x for x in fits if x.proof.log_chance(x.guess, tried * x.guess.choices) <= math.log(RATE)]
    if not fits:
        return None
    first_fit: dict[int, ProvedCause] = {}  # of each cause: of all rows, and of numbers as they are, before others
    for x in fits:
        if x.guess.fitted:
            first_fit.setdefault(id(x.what), x)
    fits = [x for x in fits if not x.guess.fitted or first_fit[id(x.what)] is x]
    best = min(fits, key=_order)
    equal = [x for x in fits if _order(x) == _order(best)]
    return Explanation(tuple(equal), trials[0].call.cls, tried, len(examined))


def reproduced(found: ProvedCause, part: Trial, other: Trial) -> Mapping[str, Expected] | None:
    """What a cause that holds gives for ``other``, a call of the same operator; None where it does not explain
    ``part``, in all its rows."""
    again = _tried(found.what, found.guess, [Examined(part)], Failures())
    if again is None or not again.proof.whole:
        return None
    try:
        return outputs_of(other, found.what.change(other, found.guess.value))
    except (Declined, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
        return None


def _order(x: ProvedCause) -> tuple[bool, int, float]:
    return not x.proof.whole, x.guess.fitted, x.guess.choices


class Screen:
    """A few wrong rows of the worst call: what is wrong there is proved nowhere."""

    def __init__(self, worst: Examined):
        self.trial = worst.trial.few
        self._roles = [role for role, v in worst.verdicts.items() if not v.passed]
        self._used = self.trial is not worst.trial

    def lets(self, one: CauseRow, guess: Guess) -> bool:
        """Whether an edit explains these rows, nearly; True where that cannot be seen in a few rows."""
        if not self._used or one.whole:
            return True
        try:
            found = outputs_of(self.trial, one.change(self.trial, guess.value))
            return all(self._near(role, found[role]) for role in self._roles)
        except Exception:  # it may need the whole call
            return True

    def _near(self, role: str, e: Expected) -> bool:
        rows = None if e is self.trial.plain[role] else self.trial.rows(role, e)
        if rows is None:
            return False
        return rows.judge(self.trial.dtype(role), chance=self.trial.chance).severity <= _SLACK


class Failures:
    """Causes that raised something else than Declined: anybody's code, and ours. They are not said and cost no
    verdict, and each is a problem that somebody can read."""

    def __init__(self) -> None:
        self._count: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def add(self, one: CauseRow, error: Exception, tap: str) -> None:
        name = f"{one.change.__module__}.{one.name}"
        self._count[name] += 1
        text = " ".join(str(error).split())[:120]
        self._first.setdefault(name, f"the cause {name} failed, at first in {tap}: {type(error).__name__}: {text}")

    def lines(self, counted: bool = False) -> list[str]:
        """A sentence for each; counted: with how often."""
        many = {name: f" ({n:,} tries)" for name, n in self._count.items() if counted and n > 1}
        return [text + many.get(name, "") for name, text in self._first.items()]


def _guesses(one: CauseRow, trial: Trial, ends: Deadline, failures: Failures) -> Iterator[Guess]:
    """The parameters of a cause; none where it does not apply."""
    seen: list[Any] = []
    try:
        for value in one.values(trial):
            guess = value if isinstance(value, Guess) else Guess(value)
            if guess.value not in seen:
                seen.append(guess.value)
                yield guess
            if ends.over():
                return
    except Declined:
        return
    except Exception as error:
        failures.add(one, error, trial.call.name)


def _tried(
    one: CauseRow, guess: Guess, examined: Sequence[Examined], failures: Failures
) -> ProvedCause | None:  # fmt: skip
    total = Proof()
    for x in examined:
        try:
            proof = x.proof(outputs_of(x.trial, one.change(x.trial, guess.value)), one.family == FACTOR)
        except Declined:
            return None
        except Exception as error:
            failures.add(one, error, x.trial.call.name)
            return None
        if proof is None:
            return None
        total = total.and_(proof)
    return ProvedCause(one, guess, total) if total.moved or total.exact else None
