"""Which tensor is handed to which: an input whose bytes are those that another tap gave out before in the same step.

The problem: a dump says what went into a tap and nowhere where that came from. The idea: the bytes tell. Of every input
those outputs of earlier taps with the same hash, in each of the first steps that have it: equal by chance (zeros, small
integers) is equal once. Of several that remain the last one gave it out, and inside of that the deepest made it. One
side may hand on unchanged what the other changes on the way, and one may have no hashes: each is asked, mine's answer
holds, and a link is one side's alone only where the other has both tensors and they differ.
Not here: what these tensors differ by (verdict/neighbours.py), who stands in front where no bytes tell
(judge/upstream.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from vllm_accprobe.align.names import enclosing
from vllm_accprobe.comparison.plan.unit import Unit
from vllm_accprobe.dump.schema import Record
from vllm_accprobe.judge.flow import Key
from vllm_accprobe.judge.tensor_errors import INPUT, OUTPUT, kind_of

STEPS = 4
"""Steps in which bytes must be equal; chosen: the prompt's and three of decoding, where chance would have to repeat."""
BOTH, MINE, GOLDEN = "both", "mine", "golden"
Links = dict[Key, "tuple[Key, str]"]
"""An input → (whose output it is, on which side: both, unless one denies it)."""


def links_of(units: Sequence[Unit]) -> Links:
    """The links of all inputs of a plan that have one; keys are mine's."""
    golden, mine = _Side(units, GOLDEN), _Side(units, MINE)
    out: Links = {}
    for unit in units:
        makers = [side.maker(unit) for side in (golden, mine)]
        maker = makers[1] or makers[0]
        if maker is not None:
            denied = [
                found is None and side.denies(unit, maker) for found, side in zip(makers, (golden, mine), strict=True)
            ]
            out[unit.key] = maker, MINE if denied[0] else GOLDEN if denied[1] else BOTH
    return out


class Makers:
    """Whose output each input is, by bytes. order: of each place in the flow; records: of it, one of each step."""

    def __init__(self, order: Mapping[Key, int], records: Mapping[Key, Sequence[Record]]):
        self._order = order
        self.records = {key: [r for r in found if r.hash is not None] for key, found in records.items()}
        self._makers: dict[tuple[int | None, str | None], list[Key]] = defaultdict(list)
        for key, found in self.records.items():
            for r in found if kind_of(key[1]) == OUTPUT else ():
                self._makers[r.step, r.hash].append(key)

    def maker(self, key: Key) -> Key | None:
        """Whose output a tensor has the bytes of, of what came before it."""
        seen = self.records[key][:STEPS]
        if not seen:
            return None
        alike = set.intersection(*(set(self._makers.get((r.step, r.hash), ())) for r in seen))
        made = [k for k in alike if self._order[k] < self._order[key]]
        return _deepest(max(made, key=lambda k: (self._order[k], k)), made) if made else None


class _Side:
    def __init__(self, units: Sequence[Unit], side: str):
        records = {u.key: [g.records[0] for g in getattr(u, side)] for u in units}
        self._makers = Makers({u.key: u.order for u in units}, records)
        self._records = self._makers.records

    def maker(self, unit: Unit) -> Key | None:
        """Whose output ``unit``, an input, is by its bytes."""
        return self._makers.maker(unit.key) if kind_of(unit.key[1]) == INPUT else None

    def denies(self, unit: Unit, maker: Key) -> bool:
        """Whether both tensors are here in one step, of one dtype and shape, and are not equal."""
        given = {r.step: r for r in self._records[maker]}
        pairs = [(r, given[r.step]) for r in self._records[unit.key][:STEPS] if r.step in given]
        return any((a.dtype, a.shape) == (b.dtype, b.shape) and a.hash != b.hash for a, b in pairs)


def _deepest(last: Key, made: Sequence[Key]) -> Key:
    """Of what ``last`` and the taps inside of it gave out alike, the innermost tap's."""
    inside = [k for k in made if k[0] == last[0] or last[0] in enclosing(k[0])]
    return max(inside, key=lambda k: (k[0].count("."), k == last, k))
