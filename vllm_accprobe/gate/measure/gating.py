"""Two servers, by their folders: the verdict, and the smallest distance that the prompts could have shown.

The problem: "not the same numbers" is true of any two right cards, "the same within 0.05" of many broken ones, and two
servers that "do not differ" on eight prompts may differ by six times the floor. The idea: mine fails where it is
further from golden than golden's own batching and right servers explain (conditions.py). The same test judges distances
that are enlarged until it fails, under each condition; prompts that would not have shown ENOUGH times the floor are no
pass. A floor that rounding does not explain (ROUNDED) excuses nothing.

Not here: the test (conditions.py), columns (token_gaps.py), sentences (report/servers.py), folders (gate/sides.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vllm_accprobe.gate.measure import conditions
from vllm_accprobe.gate.measure.conditions import LEAST, RATE as RATE, GateCondition, Sizes
from vllm_accprobe.gate.measure.token_gaps import Features, Gaps, Steps, Table, TokenGap, build, pairs, spread
from vllm_accprobe.gate.sending import rendering, replies as steps_log
from vllm_accprobe.gate.sending.rendering import Rendering
from vllm_accprobe.gate.sending.replies import Sent

ENOUGH = 4.0
"""Chosen: times the floor that a pass excludes. A decode-only fault of 6.4 times passed eight prompts in one of two
runs; the faults of the gate's laboratory lie above 6."""
ROUNDED = 0.25
"""Of golden's spread: how far a floor of rounding alone may be from golden at most. Measured: servers of one model of
four layers in two dtypes are at most 0.009 of it apart; of 61 other tiny models, float32 and bfloat16, the logits are
0.007 of their size apart in the middle one, 0.06 in all but two (0.23 with experts at near ties, 0.35 where
cancellation enlarges rounding). Another model's answers are 1 away. Chosen: four times 0.06; what is beyond has no
limit of use."""
ALL = "all tokens"
_MOST = 64.0
_STEPS = 3
"""Halvings of the logarithm between 1 and ENOUGH, or from there to _MOST: the figure is right to a factor of 4^(1/8),
1.19, where it is enough."""
_TIMES = (2, 4, 8, 16)


@dataclass(frozen=True)
class ShownDistance:
    """condition: of a cell, all tokens or a phase; times: the smallest distance, in units of the floor,
    that would have failed; None where none up to _MOST would have; 0 where any difference fails."""

    condition: str
    times: float | None

    @property
    def enough(self) -> bool:
        return self.times is not None and self.times <= ENOUGH


@dataclass(frozen=True)
class Power:
    """shown: of each condition; needed: prompts with which ENOUGH would be shown, None where these do or where not even
    sixteen times as many would."""

    shown: tuple[ShownDistance, ...]
    needed: int | None

    @property
    def enough(self) -> bool:
        return all(one.enough for one in self.shown)


def power_of(table: Table, sizes: Sizes, masks: Sequence[np.ndarray], rate: float) -> Power:
    """masks: as given to conditions.judge, with which the verdict was made."""
    test = EnlargedTest(table, sizes, masks, rate)
    wheres = _conditions(table, sizes)
    shown = tuple(ShownDistance(name, test.smallest(where)) for name, where in wheres.items())
    found = Power(shown, None)
    if found.enough:
        return found
    short = [wheres[one.condition] for one in shown if not one.enough]
    prompts = int((~np.isnan(conditions.by_prompt(table, sizes, np.ones(len(table.tokens), bool)))).sum())
    for k in _TIMES:
        more = test.repeated(k)
        if all(more.fails(np.tile(where, k), ENOUGH) for where in short):
            return Power(shown, k * prompts)
    return found


def _conditions(table: Table, sizes: Sizes) -> dict[str, np.ndarray]:
    limited = ~np.isnan(conditions.limits(sizes))
    phases = np.array([t.phase for t in table.tokens])
    found = {ALL: limited}
    if len(set(phases[limited].tolist())) > 1:
        found |= {name: limited & (phases == name) for name in dict.fromkeys(phases[limited].tolist())}
    return found


@dataclass(frozen=True)
class EnlargedTest:
    """The verdict's test, of distances that are enlarged where a mask ``where`` says so."""

    table: Table
    sizes: Sizes
    masks: Sequence[np.ndarray]
    rate: float

    def fails(self, where: np.ndarray, times: float) -> bool:
        """Whether the verdict would be a fail with the distances in ``where`` enlarged to ``times`` that of right
        ones. Of a mine that is nearer than right servers are, what it lacks is added first, as variance: the right
        ones' distances, of other tokens."""
        mine, right = self.sizes.mine.copy(), _right(self.sizes)[where]
        base, typical = mine[where], _rms(right)
        if not typical:
            return False
        if (size := _rms(base)) < typical:  # tokens equal to the bit would stay so, however far the others are enlarged
            missing = math.sqrt(1.0 - (size / typical) ** 2)
            base = np.hypot(base, missing * np.roll(right, len(right) // 2))
        mine[where] = base * (times * typical / _rms(base))
        tested = conditions.judge(self.table, replace(self.sizes, mine=mine), self.masks)
        return tested is not None and tested.p <= self.rate

    def smallest(self, where: np.ndarray) -> float | None:
        """The smallest distance that fails, by halving: the test's p falls as the distance grows."""
        if not _rms(_right(self.sizes)[where]):
            return 0.0
        low, high = 0.0, math.log(ENOUGH)
        if not self.fails(where, ENOUGH):
            low, high = high, math.log(_MOST)
            if not self.fails(where, _MOST):
                return None
        for _ in range(_STEPS):
            middle = (low + high) / 2
            low, high = (low, middle) if self.fails(where, math.exp(middle)) else (middle, high)
        return math.exp(high)

    def repeated(self, k: int) -> EnlargedTest:
        """As if each prompt had been sent ``k`` times under other names, with the same distances."""
        table, n = self.table, len(self.table.names)
        wide = replace(
            table, names=tuple(f"{name}#{i}" for i in range(k) for name in table.names),
            prompt=np.concatenate([table.prompt + i * n for i in range(k)]),
            pass_index=np.tile(table.pass_index, k), tokens=table.tokens * k, features=table.features * k,
            across=np.tile(table.across, k), itself=np.tile(table.itself, k), floors=np.tile(table.floors, k),
            others=np.tile(table.others, k),
        )  # fmt: skip
        mine, itself, rounding = (np.tile(x, k) for x in (self.sizes.mine, self.sizes.itself, self.sizes.rounding))
        sizes = Sizes(mine, self.sizes.nearest, itself, rounding)
        return EnlargedTest(wide, sizes, [np.tile(m, k) for m in self.masks], self.rate)


def _right(sizes: Sizes) -> np.ndarray:
    return np.fmax(sizes.itself, sizes.rounding)


def _rms(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(np.sqrt(np.square(known).mean())) if len(known) else 0.0


WORST = 64
"""Chosen: tokens for dig, of which it takes a few."""
Slot = tuple[TokenGap, Features]


class GateError(Exception):
    """One line: two folders that cannot be compared. Exit code 3."""


@dataclass(frozen=True)
class Cell:
    """Tokens under one condition. n: compared; flips; median, p99, worst, mean: of the gaps; kl: mean, nats;
    golden_self, mine_self: the mean gap of each server against itself there; away, floor: root mean square of mine's
    distance to the nearest right server and of the right ones from one another; None where there are no tokens."""

    condition: str
    n: int
    flips: int
    median: float
    p99: float
    worst: float
    kl: float | None
    mean: float
    golden_self: float | None
    mine_self: float | None
    away: float | None
    floor: float | None


@dataclass(frozen=True)
class WorstToken:
    """A token that is far beyond its floor. name: the prompt's id; ordinal: 0 for the one that is computed with the
    prompt, k for the forward of the k-th generated; of a scored one 0, and position says which row of the prompt.
    gap: mine's distance, floor: what it is compared with, root mean squares over the listed tokens, in nats."""

    name: str
    ordinal: int
    position: int
    gap: float
    floor: float
    pass_index: int


@dataclass(frozen=True)
class Gate:
    """What two folders say. across: between the servers; golden_self, mine_self: each against itself.

    p: of mine being within its limits, batching and rounding; p_batching: within golden's batching alone; None where
    there is nothing to hold it to, which ``why`` says. times: mine's distance by that of the right servers, of the
    tokens that have the condition;
    condition: of a fail; differs: of what is beyond golden's batching, where rounding may explain it; floors: each
    one's distance from golden; nearest: to which right server mine is nearest, 0 for golden. power: of what is no fail,
    the smallest distance that these prompts could have shown, None where it was not computed. rendering: the chats'
    token ids on both sides, None without chats. kept: which of the floors that were named ``floors`` are."""

    across: Gaps
    golden_self: Gaps
    mine_self: Gaps
    cells: tuple[Cell, ...]
    prompts: int
    p: float | None
    p_batching: float | None
    times: float | None
    rate: float
    why: str | None
    condition: GateCondition | None
    differs: GateCondition | None
    worst: tuple[WorstToken, ...]
    floors: tuple[float, ...]
    nearest: int
    forced: str | None
    notes: tuple[str, ...]
    power: Power | None = None
    rendering: Rendering | None = None
    kept: tuple[int, ...] = ()

    @property
    def verdict(self) -> str | None:
        """Of all: other token ids of a chat are a fail, whatever the numbers are."""
        return "fail" if self.rendering is not None and self.rendering.different else self.numbers

    @property
    def numbers(self) -> str | None:
        """None without a floor, and where these prompts could not have shown a difference that is worth a name."""
        if self.p is None:
            return None
        if self.p <= self.rate:
            return "fail"
        return "pass" if self.power is None or self.power.enough else None


def compare(
    golden: Sent, mine: Sent, floors: Sequence[Sent] = (), rate: float = RATE, steps: Steps | None = None,
    power: bool = True, names: Sequence[str] = (),
) -> Gate:  # fmt: skip
    """floors: servers known to be right, forced along the same tokens; names: theirs. steps: of mine's engine, mine's
    folder's own where not given. power: work out what the prompts of a pass could have shown. Raises GateError where no
    prompt is on both sides, FolderError.

    A floor that is further from golden than rounding explains is left out; of such floors alone, mine fails beyond the
    farthest, passes within golden's own batching, and cannot be judged between. One without numbers is none."""
    named = [*names, *(f"floor {i}" for i in range(len(names), len(floors)))]
    wrong = {i: why for i, one in enumerate(floors) if (why := beyond_rounding(golden, one, named[i]))}
    good = [i for i in range(len(floors)) if i not in wrong]
    if not wrong or any(has_numbers(golden, floors[i]) for i in good):
        found = _compared(golden, mine, [floors[i] for i in good], rate, steps, power, [named[i] for i in good])
        left_out = (f"left out: {why}" for why in wrong.values())
        return replace(found, notes=(*left_out, *found.notes), kept=tuple(good[i] for i in found.kept))
    whole = _compared(golden, mine, floors, rate, steps, power, named)
    if whole.numbers == "fail":
        return replace(whole, notes=(*wrong.values(), *whole.notes))
    alone = _compared(golden, mine, (), rate, steps, power)
    if alone.numbers == "pass":
        return replace(alone, notes=(*(f"left out: {why}" for why in wrong.values()), *alone.notes))
    doubt = "; ".join((*wrong.values(), "what differs by less cannot be judged"))
    return replace(whole, p=None, times=None, why=doubt, condition=None, differs=None, power=None)


def _compared(
    golden: Sent, mine: Sent, floors: Sequence[Sent], rate: float, steps: Steps | None, power: bool,
    names: Sequence[str] = (),
) -> Gate:  # fmt: skip
    chats = rendering.compare(golden, mine)
    rows = steps_log.read_steps(mine.path).rows if steps is None else steps
    bad = [i for i, one in enumerate(floors) if not has_numbers(golden, one)]
    kept = tuple(i for i in range(len(floors)) if i not in bad)
    floors = [floors[i] for i in kept]
    table, across, golden_self, mine_self = build(golden, mine, floors, rows)
    if not across.by_prompt:
        left = ", ".join(f"{n:,} {what}" for what, n in across.skipped.items()) or "a folder has no answers"
        first = f"{chats.different[0].sentence}; " if chats is not None and chats.different else ""
        raise GateError(f"{first}nothing could be compared: {left}")
    sizes = conditions.rounding(table)
    masks = conditions.cells(table)
    tested = conditions.judge(table, sizes, masks)
    alone = conditions.judge(table, conditions.batching(table), masks) if len(floors) else tested
    p = None if tested is None else tested.p
    beyond = p is not None and p <= rate
    cause = conditions.explain(table, sizes, rate) if beyond else None
    differs = None
    if not beyond and alone is not None and alone.p <= rate:
        differs = conditions.explain(table, conditions.batching(table), rate)
    reach = power_of(table, sizes, masks, rate) if power and p is not None and not beyond else None
    return Gate(
        across, golden_self, mine_self, _cells(table, sizes, across, golden_self, mine_self),
        len(table.names) if tested is None else tested.prompts, p, None if alone is None else alone.p,
        _times(table, sizes, cause and cause[1]), rate, _why(table, floors) if tested is None else _too_few(reach),
        cause and cause[0], differs and differs[0], _worst(table, sizes),
        tuple(_known_rms(row) or 0.0 for row in table.floors), sizes.nearest, _forced(mine),
        (*(f"{names[i]} is left out: it has no numbers for some tokens" for i in bad),
         *_notes(golden, mine, table, sizes), *(chats.notes if chats is not None else ())), reach, chats, kept,
    )  # fmt: skip


def has_numbers(golden: Sent, one: Sent) -> bool:
    """Whether a floor can be one: NaN and infinity, as of a float16 that overflows, would be a limit without end."""
    found = Gaps()
    for i, j in pairs(golden, one):
        found.add(golden.passes[i], one.passes[j])
    return bool(found.by_prompt) and all(np.isfinite(t.distance) for t in found.tokens)


def apart(golden: Sent, one: Sent) -> tuple[float, float]:
    """(distance of the two in nats, golden's spread: what listed tokens are above the last one), root mean squares."""
    far: list[float] = []
    wide: list[float | None] = []
    for i, j in pairs(golden, one):
        for (prompt, k), token in Gaps().add(golden.passes[i], one.passes[j]).items():
            far.append(token.distance)
            wide.append(spread(golden.passes[i][prompt], k))
    return _rms(np.array(far)), _rms(np.array(wide, np.float64))


def beyond_rounding(golden: Sent, one: Sent, name: str) -> str | None:
    """Why ``one`` is no floor of rounding alone. None where it may be, and where too few tokens are listed."""
    distance, whole = apart(golden, one)
    if not whole or distance <= ROUNDED * whole:
        return None
    return (
        f"golden and {name} differ by {distance:.3g} nats, {distance / whole:.2g} of golden's spread (rounding alone: "
        f"less than {ROUNDED:g}): one of them is wrong, or the model enlarges rounding"
    )


def _why(table: Table, floors: Sequence[Sent]) -> str:
    with_limit = ~np.isnan(conditions.limits(conditions.rounding(table)))
    if not with_limit.any():
        return (
            "golden needs two passes (accprobe send --arrive one --arrive all), "
            + ("or a floor that has answers to the same prompts" if floors else "or give a --floor")
        )  # fmt: skip
    return f"a floor needs {LEAST} prompts, there are {len(np.unique(table.prompt[with_limit]))}"


def _too_few(power: Power | None) -> str | None:
    """Why what is no fail is no pass either."""
    if power is None or power.enough:
        return None
    blind = [one for one in power.shown if not one.enough]
    listed = ", ".join(
        f"{one.condition} (only one of {one.times:.2g} times)" if one.times is not None else f"{one.condition} (none)"
        for one in blind
    )
    more = f"send {power.needed:,} such prompts" if power.needed else "send more, and other, prompts"
    return f"these prompts would not have shown a difference of {ENOUGH:g} times the floor in {listed}: {more}"


def _known_rms(values: np.ndarray) -> float | None:
    known = values[~np.isnan(values)]
    return float(np.sqrt(np.square(known).mean())) if len(known) else None


def _times(table: Table, sizes: conditions.Sizes, mask: np.ndarray | None) -> float | None:
    """None where the right servers are equal and mine is not."""
    limited = ~np.isnan(conditions.limits(sizes)) & (mask if mask is not None else np.ones(len(table.tokens), bool))
    mine, right = (
        _known_rms(sizes.mine[limited]),
        _known_rms(np.fmax(sizes.itself, sizes.rounding)[limited]),
    )
    if mine is None or right is None or not np.isfinite(mine):
        return None
    return mine / right if right else None if mine else 1.0


def _cells(table: Table, sizes: conditions.Sizes, *of: Gaps) -> tuple[Cell, ...]:
    """By phase, chunk, batch, prefix hit, prompt length and position; what holds for all tokens is not reported
    twice."""
    axes: list[Callable[[Slot], str | None]] = [
        lambda s: "all tokens",
        lambda s: "prompt, read at once" if s[0].scored else s[0].phase,
        lambda s: None if s[1].chunk is None else f"chunk {_power(s[1].chunk)}",
        lambda s: None if s[1].batch is None else f"largest batch {_power(s[1].batch)}",
        lambda s: None if s[1].hit is None else "prefix hit" if s[1].hit else "no prefix hit",
        lambda s: f"prompts of {_power(s[0].length)} tokens",
        lambda s: f"positions {_power(s[0].position)}",
    ]
    slots = list(zip(table.tokens, table.features, strict=True))
    order = sorted(range(len(slots)), key=lambda i: (slots[i][0].length, slots[i][0].ordinal))
    right = np.fmax(sizes.itself, sizes.rounding)
    found: list[Cell] = []
    for at, axis in enumerate(axes):
        groups: dict[str, list[int]] = {}
        for i in order:
            if (name := axis(slots[i])) is not None:
                groups.setdefault(name, []).append(i)
        if found and len(groups) == 1:
            continue
        for name, members in sorted(groups.items(), key=_order):
            chosen = np.array(members)
            selves = [_self(side, at, name) for side in of[1:]]
            away = (_known_rms(sizes.mine[chosen]), _known_rms(right[chosen]))
            found.append(_cell(name, [slots[i][0] for i in members], selves, away))
    return tuple(found)


def _order(group: tuple[str, list[int]]) -> int:
    """By the number in a condition's name; what has none stays where it is."""
    number = re.search(r"\d[\d,]*", group[0])
    return int(number[0].replace(",", "")) if number else 0


def _self(side: Gaps, axis: int, name: str) -> float | None:
    """The mean gap of a server against itself: of axes that a token tells without knowing its step."""
    keys: dict[int, Callable[[TokenGap], str]] = {
        0: lambda t: "all tokens",
        1: lambda t: t.phase,
        5: lambda t: f"prompts of {_power(t.length)} tokens",
        6: lambda t: f"positions {_power(t.position)}",
    }
    known = [t.gap for t in side.tokens if axis in keys and keys[axis](t) == name and t.gap is not None]
    return sum(known) / len(known) if known else None


def _power(n: int) -> str:
    """``64-127``."""
    low = 1 << max(n.bit_length() - 1, 0)
    return f"{low:,}-{2 * low - 1:,}" if low > 1 else f"{low}"


def _cell(name: str, tokens: list[TokenGap], selves: list[float | None], away: tuple[float | None, ...]) -> Cell:
    sizes = np.array([t.gap for t in tokens if t.gap is not None] or [np.nan])
    kls = [t.kl for t in tokens if t.kl is not None]
    quantiles = (float(np.median(sizes)), float(np.quantile(sizes, 0.99)), float(sizes.max()))
    kl = sum(kls) / len(kls) if kls else None
    flips = sum(t.flipped for t in tokens)
    return Cell(name, len(tokens), flips, *quantiles, kl, float(sizes.mean()), *selves, *away)


def _worst(table: Table, sizes: conditions.Sizes) -> tuple[WorstToken, ...]:
    """Tokens beyond their limit: of each prompt the one that is furthest beyond first, then the others."""
    limit = np.nan_to_num(conditions.limits(sizes))
    over = sizes.mine - limit
    order = [int(i) for i in np.argsort(-over, kind="stable") if over[i] > 0]
    first: dict[int, int] = {}
    for i in order:
        first.setdefault(int(table.prompt[i]), i)
    leading = list(first.values())
    rest = [i for i in order[: 10 * WORST] if i not in set(leading)]
    return tuple(
        WorstToken(
            table.names[table.prompt[i]], 0 if table.tokens[i].scored else table.tokens[i].ordinal,
            table.tokens[i].position, float(sizes.mine[i]), float(limit[i]), int(table.pass_index[i]),
        )
        for i in (leading + rest)[:WORST]
    )  # fmt: skip


def _forced(mine: Sent) -> str | None:
    ways = {r.forced for replies in mine.passes for r in replies.values()} - {None}
    return ", ".join(sorted(str(way) for way in ways)) or None


def _notes(golden: Sent, mine: Sent, table: Table, sizes: conditions.Sizes) -> tuple[str, ...]:
    notes = []
    if nothing := int(conditions.no_numbers(sizes).sum()):
        notes.append(f"{nothing:,} tokens have no numbers on mine's side alone, which never passes")
    for name, side in (("golden", golden), ("mine", mine)):
        if not side.about.get("complete"):
            notes.append(f"{name}'s folder is not complete: the same send would go on")
        if resumed := sum(p.get("resumed", 0) for p in side.about["passes"]):
            notes.append(f"{name}'s passes were gone on with {resumed} times: their batches were others then")
    if not mine.about.get("along") and golden.about.get("prompts") != mine.about.get("prompts"):
        notes.append("the two folders were not sent the same prompts")
    if table.estimated:
        notes.append(
            "mine's steps are not known: batches are estimated from the requests' times, prefix hits are what the "
            "server reported, and chunks are left out (accprobe send --engine writes the steps)"
        )
    return tuple(notes)
