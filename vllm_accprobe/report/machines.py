"""How the two machines compute: a line for each habit, golden against mine where they differ.

The problem: whoever ports an engine wants to know first how the new machine rounds, flushes and sums, and which of it
is merely another honest way. The idea: habits of one operator, dtype and kind on both sides are one line; what differs
comes first and says its price, what is alike is collapsed by what it says. A habit is a mapping: kind (the question),
operator, dtype, words (the answer: "rounds toward zero"), price (units of the dtype's rounding that it can cost),
outputs and of (how many of the operator's outputs show it), layers (modules that do). Not here: finding them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_accprobe.report.text import count, num, safe

Habit = Mapping[str, Any]
FUNCTION = "function"
"""The kind of a habit whose words are no deed: ``exponential right to 2^-20 or better``."""
TITLE = "how these machines compute"
MAX_PLACES = 4
"""chosen: names of operators on a line of what is alike; the rest is counted."""
_FREE = 0.005
"""chosen: what would be shown as 0.00 units is not called a cost."""


def lines(machines: Mapping[str, Sequence[Habit]]) -> list[str]:
    """The section without its heading, differences first; empty where nothing is known."""
    differ, alike = _told(machines)
    return differ + alike


def differing(machines: Mapping[str, Sequence[Habit]]) -> list[str]:
    """Of the lines those on which the two sides differ; none where only one side is known."""
    return _told(machines)[0] if machines.get("golden") and machines.get("mine") else []


def _told(machines: Mapping[str, Sequence[Habit]]) -> tuple[list[str], list[str]]:
    """(the lines on which the sides differ, those on which they are alike)."""
    golden, mine = (_by_place(machines.get(side) or ()) for side in ("golden", "mine"))
    both = bool(golden and mine)
    differ: list[str] = []
    alike: dict[tuple[str, str, str], list[str]] = {}
    for place in dict.fromkeys([*mine, *golden]):
        g, m = golden.get(place, {}), mine.get(place, {})
        for words in [w for w in m if w in g]:
            alike.setdefault((words, _dtype(m[words]), _price(m[words])), []).append(_operator(m[words]))
        left = [[h for w, h in side.items() if w not in other] for side, other in ((g, m), (m, g))]
        if len(left[0]) == len(left[1]) == 1:
            differ.append(_against(left[0][0], left[1][0]))
        else:  # several answers to one question, of which nobody knows which belongs to which
            differ += [_alone("mine", h, "golden" if both else "") for h in left[1]]
            differ += [_alone("golden", h, "mine" if both else "") for h in left[0]]
    priced = sorted(alike.items(), key=lambda kv: not kv[0][2])  # stable: in the order of the habits otherwise
    return differ, [
        f"both: {words} in {_some(operators)}{dtype}" + (f": costs {price}" if price else "")
        for (words, dtype, price), operators in priced
    ]


def rows(machines: Mapping[str, Sequence[Habit]]) -> list[tuple[str, ...]]:
    """(side, operator, habit, price, outputs) of each habit, mine's first, for a table with all details."""
    return [
        (side, _where(h), _words(h), _price(h), _outputs(h))
        for side in ("mine", "golden")
        for h in machines.get(side) or ()
    ]


def _by_place(habits: Sequence[Habit]) -> dict[tuple[str, str, str], dict[str, Habit]]:
    """(operator, dtype, kind) → words → habit."""
    found: dict[tuple[str, str, str], dict[str, Habit]] = {}
    for h in habits:
        found.setdefault((str(h.get("operator")), str(h.get("dtype")), str(h.get("kind"))), {})[_words(h)] = h
    return found


def _against(golden: Habit, mine: Habit) -> str:
    """``mine rounds toward zero in Attention (bfloat16): costs up to 1 unit; golden rounds to nearest``."""
    return f"{_alone('mine', mine)}; {_does('golden', golden)}" + (
        f", which costs {p}" if (p := _price(golden)) else ""
    )


def _alone(name: str, habit: Habit, other: str = "") -> str:
    """other: the side that was looked at and does not show it."""
    out = f"{_does(name, habit)} in {_where(habit)}" + (f": costs {price}" if (price := _price(habit)) else "")
    return out + (f"; not seen in {other}" if other else "")


def _does(name: str, habit: Habit) -> str:
    """Words are what an operator does, but those of a function, which say how well it is computed."""
    return f"{name}{':' * (habit.get('kind') == FUNCTION)} {_words(habit)}"


def _words(habit: Habit) -> str:
    return safe(habit.get("words") or habit.get("kind") or "?", 120)


def _where(habit: Habit) -> str:
    return _operator(habit) + _dtype(habit)


def _operator(habit: Habit) -> str:
    return safe(habit.get("operator") or "?", 80)


def _dtype(habit: Habit) -> str:
    return f" ({safe(habit['dtype'], 40)})" if habit.get("dtype") else ""


def _price(habit: Habit) -> str:
    price = habit.get("price")
    if not isinstance(price, (int, float)) or isinstance(price, bool) or not price >= _FREE:
        return ""
    said = num(float(price), 2)
    return f"up to {said} unit{'s' * (said != '1')}"


def _outputs(habit: Habit) -> str:
    seen, of, layers = (habit.get(k) for k in ("outputs", "of", "layers"))
    out = f"{num(seen)} of {num(of)}" if seen is not None and of is not None else ""
    return out + (f" in {count(layers, 'module')}" if out and isinstance(layers, int) else "")


def _some(operators: Sequence[str]) -> str:
    shown = ", ".join(operators[:MAX_PLACES])
    return shown + (f" and {len(operators) - MAX_PLACES:,} more" if len(operators) > MAX_PLACES else "")
