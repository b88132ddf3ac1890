"""Which tensor is handed to which: an input whose bytes are those that another tap gave out before in the same step.

The problem: a dump says what went into a tap and nowhere where that came from. The idea: the bytes tell. Of every input
those outputs of earlier taps with the same hash, in each of the first steps that have it: equal by chance (zeros, small
integers) is equal once. Of several that remain the last one gave it out, and inside of that the deepest made it. One
side may hand on unchanged what the other changes on the way, so that each side is asked, and mine's answer holds.
Not here: what these tensors differ by (verdict/neighbours.py), who stands in front where no bytes tell
(judge/origins/in_front.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from vllm_accprobe.align.names import enclosing
from vllm_accprobe.comparison.plan.joining import Group
from vllm_accprobe.comparison.plan.unit import Unit
from vllm_accprobe.judge.flow import Key
from vllm_accprobe.judge.origins.row_errors import INPUT, OUTPUT, kind_of

STEPS = 4
"""Steps in which bytes must be equal; chosen: the prompt's and three of decoding, where chance would have to repeat."""
BOTH, MINE, GOLDEN = "both", "mine", "golden"
Links = dict[Key, "tuple[Key, str]"]
"""An input → (whose output it is, on which side the bytes are equal)."""


def links_of(units: Sequence[Unit]) -> Links:
    """The links of all inputs of a plan that have one; keys are mine's."""
    golden, mine = (_side(units, [getattr(u, side) for u in units]) for side in (GOLDEN, MINE))
    out: Links = {}
    for key in golden.keys() | mine.keys():
        maker = mine.get(key) or golden[key]
        out[key] = maker, MINE if key not in golden else GOLDEN if key not in mine else BOTH
    return dict(sorted(out.items()))


def _side(units: Sequence[Unit], groups: Sequence[Sequence[Group]]) -> dict[Key, Key]:
    order = {u.key: u.order for u in units}
    makers: dict[tuple[int | None, str], list[Key]] = defaultdict(list)
    for unit, own in zip(units, groups, strict=True):
        if kind_of(unit.key[1]) == OUTPUT:
            for record in (g.records[0] for g in own):
                if record.hash is not None:
                    makers[record.step, record.hash].append(unit.key)
    out = {}
    for unit, own in zip(units, groups, strict=True):
        if kind_of(unit.key[1]) != INPUT:
            continue
        seen = [(r.step, r.hash) for r in (g.records[0] for g in own) if r.hash is not None][:STEPS]
        alike = [set(makers.get(place, ())) for place in seen]
        made = [k for k in set.intersection(*alike) if order[k] < unit.order] if alike else []
        if made:
            out[unit.key] = _deepest(max(made, key=lambda k: (order[k], k)), made)
    return out


def _deepest(last: Key, made: Sequence[Key]) -> Key:
    """Of what ``last`` and the taps inside of it gave out alike, the innermost tap's."""
    inside = [k for k in made if k[0] == last[0] or last[0] in enclosing(k[0])]
    return max(inside, key=lambda k: (k[0].count("."), k == last, k))
