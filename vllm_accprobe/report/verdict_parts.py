"""Parts of a report that every output words alike: gaps, coverage, machines, an origin's neighbours.

The problem: the same fact stands on terminal, page and in markdown, and names come from dumps. The idea: one phrase for
each, here: a gap is named by its two ends; below the verdict stands whether operators were checked or only compared,
and a row per class; habits of one operator on both sides are one line, differences first; an edge is one phrase with
its error. Every string returned is `safe`. Not here: the figures (comparison/coverage.py, comparison/gaps.py,
comparison/verdict/), layout.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_accprobe.comparison.gaps import splitting
from vllm_accprobe.comparison.plan.relations import GOLDEN
from vllm_accprobe.comparison.verdict.neighbours import IDENTICAL, ORDER, OWN, Edge, OriginNeighbours
from vllm_accprobe.judge.origins import OriginEntry
from vllm_accprobe.report.text import MISSING, count, factor, num, safe

if TYPE_CHECKING:
    from vllm_accprobe.comparison.plan.relations import Sources
    from vllm_accprobe.comparison.result import Comparison


SHOWN_MODULES = 4
"""Modules that a line names."""


def gap_of(origin: OriginEntry) -> Mapping[str, Any] | None:
    gap = origin.get("gap")
    return gap if isinstance(gap, Mapping) and gap.get("before") else None


def tap_of(origin: OriginEntry) -> str:
    """The tap whose tensor shows an origin's error: its module, or the end of its gap."""
    gap = gap_of(origin)
    return str(gap["before"] if gap else origin.get("module", "?"))


def where(gap: Mapping[str, Any]) -> str:
    """``between A and B``."""
    before = safe(gap["before"])
    return f"between {safe(gap['after'])} and {before}" if gap.get("after") else f"in front of {before}"


def inside(comparison: Comparison, origin: OriginEntry) -> str | None:
    """What lies in an origin's gap and how to see it, as one line; None where there is no gap."""
    gap = gap_of(origin)
    if gap is None:
        return None
    before = str(gap["before"])
    ends = [str(gap.get("after") or "").partition("/")[0], before]
    modules = [str(m) for m in gap.get("contains") or () if m != before]
    code = [m for m in modules if any(end.startswith(f"{m}.") for end in ends)]
    operators = [m for m in modules if m not in code]
    sentence = [safe(m) for m in operators[:SHOWN_MODULES]]
    sentence += [count(len(operators) - SHOWN_MODULES, "more module")] if len(operators) > SHOWN_MODULES else []
    if code:
        more = f" and {len(code) - SHOWN_MODULES} more" if code[SHOWN_MODULES:] else ""
        what = ", ".join(safe(m) for m in code[:SHOWN_MODULES]) + more
        sentence.append(f"code of {what}")
    if before in gap["contains"]:
        sentence.append(f"{safe(before)} itself, whose input was not compared")
    text = f"not seen there: {'; '.join(sentence)}" if sentence else "no module lies there: the code between the two"
    split = next(filter(None, (splitting(gap, run) for run in (comparison.mine_run, comparison.golden_run))), None)
    if split is None:
        return text
    words = " ".join(f"VLLM_ACCPROBE_{name}={shlex.quote(value)}" for name, value in split.items()
                     if name != "GRAPHS" or len(split) == 1)  # fmt: skip
    return f"{text}. {safe(words, 400)} would split it"


HEAD = ("calls", "rows", "checked", "compared only", "unseen", "all rows", "one column", "one row", "class")
COVERS_TITLE = "what this verdict covers, by class of operator; the smallest error that would have been named"
_SIZES = ("row", "column", "one_row")


def head(comparison: Comparison) -> list[str]:
    """What stands directly below the verdict where not everything was checked: a sentence, and the commands that would
    check the rest, unless the report names them further down anyway."""
    missing = comparison.not_checked
    if missing is None:
        return []
    checked, rows = (sum(int(e.get(k) or 0) for e in entries(comparison)) for k in ("checked", "rows"))
    how = f"checked in part: {checked:,} of {count(rows, 'row')}" if comparison.replayed else "compared, not checked"
    text = f"{how}: {safe(missing['why'], 400)}"
    named = [step["command"] for step in (*comparison.would_decide, *comparison.next_steps)]
    elsewhere = {line.partition(" --out ")[0] for command in named for line in command.splitlines()}
    lines = [line for line in missing["command"].splitlines() if line not in elsewhere]
    return [f"{text}; this would check:", *(f"  {safe(line, 1000)}" for line in lines)] if lines else [text]


def entries(comparison: Comparison) -> list[Mapping[str, Any]]:
    """coverage.by_class; empty where a comparison does not say it."""
    found = comparison.coverage.get("by_class")
    return [e for e in found if isinstance(e, Mapping)] if isinstance(found, list) else []


def totals(comparison: Comparison) -> str | None:
    found = entries(comparison)
    if not found:
        return None
    rows, checked, compared, unseen = (
        sum(int(e.get(k) or 0) for e in found) for k in ("rows", "checked", "compared", "unseen")
    )
    text = f"{checked:,} of {count(rows, 'row')} of operators checked, {compared:,} compared only"
    left = rows - checked - compared
    text += f", {left:,} neither" if left > 0 else ""
    return text + (f"; {count(unseen, 'module')} not seen" if unseen else "")


def table(comparison: Comparison, n: int | None = None) -> list[tuple[str, ...]]:
    """A row for each of the first ``n`` classes, in the columns of HEAD."""
    return [_row(e) for e in entries(comparison)[:n]]


def _row(e: Mapping[str, Any]) -> tuple[str, ...]:
    numbers = [f"{int(e.get(k) or 0):,}" for k in ("calls", "rows", "checked", "compared", "unseen")]
    sizes = e.get("smallest")
    least = [size(sizes.get(k)) if isinstance(sizes, Mapping) else MISSING for k in _SIZES]
    return (*numbers, *least, safe(e.get("class") or MISSING, 80))


def size(found: object) -> str:
    """``0.34%``; ``any`` of what must be equal to the bit."""
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        return MISSING
    return f"{num(100.0 * found, 2)}%" if found else "any"


Habit = Mapping[str, Any]
FUNCTION = "function"
"""The kind of a habit whose words are no deed: ``exponential right to 2^-20 or better``."""
MACHINES_TITLE = "how these machines compute"
MAX_PLACES = 4
"""chosen: names of operators on a line of what is alike; the rest is counted."""
_BOUND = re.compile(r"(.+ right to 2\^)(-\d+) or better")
_FREE = 0.005
"""chosen: what would be shown as 0.00 units is not called a cost."""


class HabitWords(NamedTuple):
    """A habit in words, each `safe`. dtype, price: "" where there is none; deed: with what separates it from a side."""

    words: str
    operator: str
    dtype: str
    price: str
    deed: str

    @classmethod
    def of(cls, habit: Habit) -> HabitWords:
        words = safe(habit.get("words") or habit.get("kind") or "?", 120)
        cost = habit.get("price")
        known = isinstance(cost, (int, float)) and not isinstance(cost, bool) and cost >= _FREE
        units = num(float(cost), 2) if known and cost is not None else ""
        # Words are what an operator does, but those of a function, which say how well it is computed.
        deed = f"{':' * (habit.get('kind') == FUNCTION)} {words}"
        dtype = f" ({safe(habit['dtype'], 40)})" if habit.get("dtype") else ""
        price = f"up to {units} unit{'s' * (units != '1')}" if known else ""
        return cls(words, safe(habit.get("operator") or "?", 80), dtype, price, deed)

    def alone(self, side: str, other: str = "") -> str:
        """other: the side that was examined and does not show it."""
        out = f"{side}{self.deed} in {self.operator}{self.dtype}" + (f": costs {self.price}" if self.price else "")
        return out + (f"; not seen in {other}" if other else "")


def machine_lines(machines: Mapping[str, Sequence[Habit]]) -> list[str]:
    """The section without its heading, differences first; empty where nothing is known."""
    differ, alike = _differ_and_alike(machines)
    return differ + alike


def differing(machines: Mapping[str, Sequence[Habit]]) -> list[str]:
    """Of the lines those on which the two sides differ; none where only one side is known."""
    return _differ_and_alike(machines)[0] if machines.get("golden") and machines.get("mine") else []


def _differ_and_alike(machines: Mapping[str, Sequence[Habit]]) -> tuple[list[str], list[str]]:
    golden, mine = (_by_place(machines.get(side) or ()) for side in ("golden", "mine"))
    both = bool(golden and mine)
    differ: list[str] = []
    alike: dict[tuple[str, str, str], list[str]] = {}
    for place in dict.fromkeys([*mine, *golden]):
        g, m = _weaker_bounds(golden.get(place, {}), mine.get(place, {}))
        for words in [w for w in m if w in g]:
            alike.setdefault((words, m[words].dtype, m[words].price), []).append(m[words].operator)
        left = [[h for w, h in side.items() if w not in other] for side, other in ((g, m), (m, g))]
        if len(left[0]) == len(left[1]) == 1:
            theirs = left[0][0]
            cost = f", which costs {theirs.price}" if theirs.price else ""
            differ.append(f"{left[1][0].alone('mine')}; golden{theirs.deed}{cost}")
        else:  # several answers to one question, of which it is not known which belongs to which
            differ += [h.alone("mine", "golden" if both else "") for h in left[1]]
            differ += [h.alone("golden", "mine" if both else "") for h in left[0]]
    priced = sorted(alike.items(), key=lambda kv: not kv[0][2])  # stable: in the order of the habits otherwise
    return differ, [
        f"both: {words} in {_some(operators)}{dtype}" + (f": costs {price}" if price else "")
        for (words, dtype, price), operators in priced
    ]


def _weaker_bounds(*sides: dict[str, HabitWords]) -> Iterator[dict[str, HabitWords]]:
    """Of two bounds for one function the weaker on both sides: how far it can be seen depends on the inputs."""
    bounds = [{b[1]: (int(b[2]), words) for words in side if (b := _BOUND.fullmatch(words))} for side in sides]
    weaker = {found[1]: max(b[what] for b in bounds if what in b)[1] for b in bounds for what, found in b.items()}
    for side in sides:
        yield {(new := weaker.get(w, w)): h._replace(words=new, deed=h.deed.replace(w, new)) for w, h in side.items()}


def _by_place(habits: Sequence[Habit]) -> dict[tuple[str, ...], dict[str, HabitWords]]:
    found: dict[tuple[str, ...], dict[str, HabitWords]] = {}
    for h in habits:
        place, text = tuple(str(h.get(name)) for name in ("operator", "dtype", "kind")), HabitWords.of(h)
        found.setdefault(place, {})[text.words] = text
    return found


def rows(machines: Mapping[str, Sequence[Habit]]) -> list[tuple[str, ...]]:
    """(side, operator, habit, price, outputs) of each habit, mine's first, for a table with all details."""
    out: list[tuple[str, ...]] = []
    for side, habit in ((name, h) for name in ("mine", "golden") for h in machines.get(name) or ()):
        text, (seen, of, layers) = HabitWords.of(habit), (habit.get(k) for k in ("outputs", "of", "layers"))
        outputs = f"{num(seen)} of {num(of)}" if seen is not None and of is not None else ""
        outputs += f" in {count(layers, 'module')}" if outputs and isinstance(layers, int) else ""
        out.append((side, text.operator + text.dtype, text.words, text.price, outputs))
    return out


def _some(operators: Sequence[str]) -> str:
    shown = ", ".join(operators[:MAX_PLACES])
    return shown + (f" and {len(operators) - MAX_PLACES:,} more" if len(operators) > MAX_PLACES else "")


SHOWN_EDGES = 3
"""Edges of a line."""


def error(edge: Edge) -> str:
    """``identical``, ``0.21x its limit``, ``not compared``; of equal statistics ``no error seen``."""
    if edge.status == IDENTICAL:
        return IDENTICAL
    if edge.over is None or edge.over < 0:
        return "not compared"
    if math.isinf(edge.over):
        return "beyond any limit"
    return f"{factor(edge.over)}x its limit" if edge.over else "no error seen"


def name(edge: Edge) -> str:
    """The tensor and, where that is not plain, how it got there."""
    if edge.by == OWN:
        return f"its {safe(edge.role, 80)}"
    text = f"{safe(edge.tap)}/{safe(edge.role, 80)}"
    if edge.by == ORDER and edge.role_in:
        return f"its {safe(edge.role_in, 80)}, made after {text}"
    return f"{text}, which only golden hands on as it is" if edge.by == GOLDEN else text


def neighbour_lines(comparison: Comparison) -> list[str]:
    """The culprit's neighbours in at most two lines; none where nothing of them was compared."""
    neighbours = next(iter(comparison.neighbours), None)
    if neighbours is None or all(e.over is None for e in (*neighbours.fed_by, *neighbours.feeds)):
        return []
    sides = zip(("fed by", "feeds"), (neighbours.fed_by, neighbours.feeds), neighbours.left_out, strict=True)
    return [f"{what}: {text}" for what, edges, left in sides if (text := _grouped(edges, left))]


def described(neighbours: OriginNeighbours) -> str:
    """All of it as one sentence, which a screen reader says."""
    sides = ("fed by", neighbours.fed_by), ("feeds", neighbours.feeds)
    text = [f"{what} {', '.join(f'{name(e)} ({error(e)})' for e in edges)}" for what, edges in sides if edges]
    return f"{safe(neighbours.tap)}/{safe(neighbours.role, 80)}: {'; '.join(text)}"


def code(sources: Sources, tap: object) -> str | None:
    """Where a module's code is: one place, or both sides' where they differ; None where neither is known."""
    golden, mine = sources.get(str(tap), (None, None))
    if golden is None or mine is None or golden == mine:
        known = mine or golden
        return None if known is None else safe(known, 300) + (" (golden)" if mine is None else "")
    return f"{safe(mine, 300)} (golden: {safe(golden, 300)})"


def _grouped(edges: Sequence[Edge], left_out: int) -> str:
    """The first `SHOWN`; those that stand together and have one error say it once."""
    text: list[tuple[list[str], str]] = []
    for edge in edges[:SHOWN_EDGES]:
        own = edge.by == OWN or (edge.by == ORDER and edge.role_in)
        what, much = f"its {safe(edge.role_in or edge.role, 80)}" if own else name(edge), error(edge)
        if not text or text[-1][1] != much:
            text.append(([], much))
        text[-1][0].append(what)
    more = max(len(edges) - SHOWN_EDGES, 0) + left_out
    groups = [f"{', '.join(names)} ({much})" for names, much in text] + (
        [f"{more} more in compare.json"] if more else []
    )
    return "; ".join(groups)
