"""What a list of tensors passes on, where the next place has the same list and a few more in front of it.

The problem: where nobody knows what feeds what (another tool's dump without a tree of modules), all that came before is
in front of a place, so that to ask each pair takes a minute for 2,000 tensors. The idea: what was worked out for a list
is kept, and a list that begins with it goes on from there; lists are compared by their tensors' identity, which costs
nothing beside the arithmetic.
Not here: errors that explain (origin.py), the lists (in_front.py), which rows count (influence.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from vllm_accprobe.judge.constants import NARROW
from vllm_accprobe.judge.origins.columns import Columns
from vllm_accprobe.judge.origins.influence import Influence, spread
from vllm_accprobe.judge.origins.peer_evidence import kind_of_place
from vllm_accprobe.judge.origins.row_errors import Trace

LONG = 16
"""Shorter lists are not worth it."""
KEPT = 16
"""Lists that are remembered: places come tap by tap, so that few are open at a time."""
S = TypeVar("S")


@dataclass(frozen=True, eq=False)
class PassedOn:
    """What a list of sources passes on to the rows of a place: as Look's before, gain_before, passed and
    columns_before."""

    err: np.ndarray
    gain: np.ndarray
    means: dict[str, float]
    columns: list[Columns]


class Passing:
    """What sources pass on to the rows of a place, by which rows influence which."""

    def __init__(self, influence: Influence):
        self._influence = influence
        self._means: dict[Trace, float] = {}

    def on(self, sink: Trace, sources: list[Trace], mixing: bool, known: PassedOn | None) -> PassedOn:
        """What reaches the rows of ``sink`` from ``sources``, and from those whose share is ``known``."""
        if known is None:
            before, gain, means = np.zeros(len(sink.seen)), np.zeros(len(sink.seen)), {}
        else:
            before, gain, means = known.err.copy(), known.gain.copy(), dict(known.means)
        for source in sources:
            kind = kind_of_place(source.tap, source.role)
            means[kind] = max(self._mean_gain(source), means.get(kind, 0.0), key=abs)
            # What has few elements multiplies whole rows: a gate, the weights of the chosen experts.
            factor = np.maximum(np.abs(source.gain), source.rel) if source.width < NARROW else np.abs(source.gain)
            for what, values, out in (("rel", source.rel, before), ("gain", factor, gain)):
                if len(values) == len(source.keys):
                    found = self._influence.again(source, what, values, sink.vision, sink.seen, mixing)
                    np.maximum(out, found, out=out)
        columns = [s.by_column for s in sources if s.by_column is not None]
        return PassedOn(before, gain, means, columns if known is None else [*known.columns, *columns])

    def _mean_gain(self, source: Trace) -> float:
        """The median of its rows' gains; 0 where there are none."""
        if source not in self._means:
            known = len(source.gain) == len(source.keys) > 0
            mean = float(np.median(spread(source.seen.keys, source.keys, source.gain))) if known else 0.0
            self._means[source] = mean if np.isfinite(mean) else 0.0
        return self._means[source]


class Prefixes(Generic[S]):
    """Remembers a state S, never to be changed in place, for lists of sources."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, tuple[list[Trace], S]] = OrderedDict()

    def begun(self, name: tuple[Hashable, ...], sources: Sequence[Trace], sink: Trace) -> tuple[int, S | None]:
        """(how many of ``sources`` a state is known for, the state). name: what else it depends on. sink: is no source
        of its own, so that nothing is known where it is among them."""
        if len(sources) < LONG or (name, sources[0]) not in self._known:
            return 0, None
        known, state = self._known[name, sources[0]]
        if len(known) > len(sources) or list(sources[: len(known)]) != known or sink in known:
            return 0, None
        return len(known), state

    def keep(self, name: tuple[Hashable, ...], sources: Sequence[Trace], sink: Trace, state: S) -> None:
        if len(sources) < LONG or sink in sources:
            return
        self._known[name, sources[0]] = list(sources), state
        self._known.move_to_end((name, sources[0]))
        while len(self._known) > KEPT:
            self._known.popitem(last=False)
