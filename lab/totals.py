"""What a judging adds up to: shares by group and half with their intervals, and whether they are good enough.

The problem: 58 of 60 says little unless one knows what 60 can say, and a share over cases that a rule was chosen by
says nothing about others. The idea: the groups are counted apart, in each the tuned half and the half held out, and
each share stands beside its Wilson interval of 95 %; what must be reached stands here, by group, as a table.
Not here: one pair's judgement (judging.py), what the groups are (generated.py).
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from pathlib import Path

from lab.cases import HELD_OUT, TUNED
from lab.judging import Outcome

Z95 = 1.959963984540054
"""Derived: the 97.5th percentile of the normal distribution."""


@dataclass(frozen=True)
class Needed:
    """Shares that a group must reach: culprit first, verdict fail, both culprits named."""

    first: Fraction = Fraction(0)
    fail: Fraction = Fraction(0)
    both: Fraction = Fraction(0)


def _needed(first: str = "0", fail: str = "0", both: str = "0") -> Needed:
    return Needed(Fraction(first), Fraction(fail), Fraction(both))


NEEDED: dict[str, Needed] = {
    "handwritten": _needed("0.95", "0.975"), "kind/serial": _needed("0.97", "0.98"),
    "kind/float32": _needed("0.92", "0.95"), "trained/float32": _needed("0.88", "0.92"),
    "two/float32": _needed("0.95", both="0.8"), "near/float32": _needed(fail="0.6"),
}  # fmt: skip
"""Chosen: what is asked for, by group and golden; other groups are shown and must reach nothing. No clean pair may
raise an alarm."""


def wilson(hits: int, of: int) -> tuple[float, float]:
    """The interval of 95 % of a share ``hits / of``.

    (p + z²/2n ± z sqrt(p(1 - p)/n + z²/4n²)) / (1 + z²/n): E. B. Wilson, J. Am. Stat. Assoc. 22 (1927) 209.
    """
    if not of:
        return 0.0, 1.0
    p, zz = hits / of, Z95 * Z95
    middle, half_width = p + zz / (2 * of), Z95 * math.sqrt(p * (1 - p) / of + zz / (4 * of * of))
    return (
        0.0 if hits == 0 else (middle - half_width) / (1 + zz / of),
        1.0 if hits == of else (middle + half_width) / (1 + zz / of),
    )


def share(hits: int, of: int) -> str:
    """``58 of 60 (0.89 to 0.99)``"""
    low, high = wilson(hits, of)
    return f"{hits} of {of} ({low:.2f} to {high:.2f})" if of else ""


@dataclass(frozen=True)
class Total:
    """One group in one half. first: fail, and the culprit is the first origin. both: of cases with two culprits, those
    where both are origins. alarms: of clean pairs, those that were not passed, errors counted."""

    group: str
    half: str
    replay: bool
    faults: int = 0
    fail: int = 0
    first: int = 0
    twos: int = 0
    both: int = 0
    clean: int = 0
    alarms: int = 0
    errors: int = 0

    @property
    def missed(self) -> tuple[str, ...]:
        """What is not reached, in words."""
        need = NEEDED.get(self.group, Needed())
        asked = (
            ("first", self.first, self.faults, need.first),
            ("fail", self.fail, self.faults, need.fail),
            ("both named", self.both, self.twos, need.both),
        )
        words = [
            f"{name} {hits} of {of}, needed {float(least):g}" for name, hits, of, least in asked if hits < least * of
        ]
        return (*words, f"{self.alarms} alarms") if self.alarms else tuple(words)


def totals(outcomes: Iterable[Outcome]) -> list[Total]:
    """By group, half and whether there was a replay; halves next to each other, clean pairs last."""
    places: dict[tuple[str, str, bool], list[Outcome]] = {}
    for o in outcomes:
        places.setdefault((o.kind, o.half, o.replay), []).append(o)
    order = list(NEEDED)

    def place(key: tuple[str, str, bool]) -> tuple:
        kind = key[0]
        return (
            kind.startswith("clean"), order.index(kind) if kind in order else len(order), kind, key[1] != TUNED,
            key[2],
        )  # fmt: skip

    return [_total(*key, places[key]) for key in sorted(places, key=place)]


def _total(group: str, half: str, replay: bool, outcomes: Sequence[Outcome]) -> Total:
    faults = [o for o in outcomes if not o.clean]
    clean = [o for o in outcomes if o.clean]
    twos = [o for o in faults if o.group == "two"]
    return Total(
        group, half, replay, faults=len(faults), fail=sum(o.verdict == "fail" for o in faults),
        first=sum(o.first for o in faults), twos=len(twos),
        both=sum(o.verdict == "fail" and o.rank > 0 and o.found for o in twos), clean=len(clean),
        alarms=sum(not o.right for o in clean), errors=sum(o.verdict not in ("pass", "fail") for o in outcomes),
    )  # fmt: skip


HEAD = ("group", "half", "replay", "verdict fail", "culprit first", "both named", "alarms of clean pairs", "missed")


def _cells(t: Total) -> tuple[str, ...]:
    errors = f"; {t.errors} errors" if t.errors else ""
    return (
        t.group, t.half, "yes" if t.replay else "no", share(t.fail, t.faults) + errors, share(t.first, t.faults),
        share(t.both, t.twos), share(t.alarms, t.clean), "; ".join(t.missed),
    )  # fmt: skip


def text(found: Sequence[Total]) -> str:
    """The table for a terminal."""
    rows = [HEAD, *map(_cells, found)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def markdown(found: Sequence[Total]) -> str:
    lines = [HEAD, tuple("---" for _ in HEAD), *map(_cells, found)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


COLUMNS = ("", "case", "model", "golden → mine", "verdict", "culprit named", "rank", "× limit", "shape")


def row(o: Outcome) -> tuple[str, ...]:
    mark = "ok" if o.right else "BAD"
    culprit = o.culprit if o.rank <= 1 else f"{o.culprit} (true: {o.expected[0]})"
    rank = "" if o.clean else f"{o.rank or '-'} of {o.origins}"
    factor = f"{o.factor:.3g}" if o.culprit else ""
    return mark, o.name, o.model, f"{o.golden} → {o.mine}", o.verdict, culprit, rank, factor, o.sentence


def page(outcomes: Sequence[Outcome], *, held_out: bool = False, details: bool = True) -> str:
    """Totals, and a line for each case: of the half that is held out only if asked for, so that nobody tunes on it.

    details: also what the rows around each culprit look like."""
    shown = [o for o in outcomes if held_out or o.half != HELD_OUT]
    lines = [markdown(totals(outcomes))]
    lines += ["| " + " | ".join(COLUMNS) + " |", "| " + " | ".join("---" for _ in COLUMNS) + " |"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row(o)) + " |" for o in shown]
    if details:
        lines += [
            "", "The worst row's error at the planted module (or the one accused), in units of 2^-8; seconds:", "",
        ]  # fmt: skip
        lines += [f"- {'' if o.right else '**BAD** '}{o.name} ({o.golden} → {o.mine}): {_told(o)}" for o in shown]
    return "\n".join([*lines, ""])


def _told(o: Outcome) -> str:
    expected = f"expected {' or '.join(o.expected)}; " if o.expected and not o.right else ""
    return f"{expected}{o.seen}; run {o.run_s:.0f} s, judged in {o.seconds:.1f} s at {o.at}"


def save(root: Path, outcomes: Sequence[Outcome], order: Sequence[str]) -> list[Outcome]:
    """Puts outcomes into root/results.json, over older ones of the same pairs judged the same way, and returns all of
    them in ``order``, without those of cases that are no longer declared."""
    path = root / "results.json"
    kept = json.loads(path.read_text()) if path.exists() else []
    known = {f.name for f in fields(Outcome)}
    old = [Outcome(**{k: v for k, v in o.items() if k in known} | {"expected": tuple(o["expected"])}) for o in kept]
    merged = {o.key: o for o in [*old, *outcomes]}
    place = {name: i for i, name in enumerate(order)}
    every = sorted(merged.values(), key=lambda o: place.get(o.name, len(place)))
    every = [o for o in every if o.clean or o.name in place]
    _replace(path, json.dumps([asdict(o) for o in every], indent=1))
    return every


def _replace(path: Path, content: str) -> None:
    """A judging that is interrupted leaves the results that were there."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(content)
    new.replace(path)
