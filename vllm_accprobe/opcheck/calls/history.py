"""The keys and values that a row of attention looks back at, without a dump of any cache.

The problem: attention reads what earlier steps wrote into a paged cache that nobody stores. The idea: what they wrote
was captured as the inputs of the same module; put by request and position, it is the cache as it should be. A row has
its history if all positions before it were captured, after a prefix hit as rows of the request that computed them
(prefix.py); when capture began late, or the cache had another request's rows, it has not, and that is said. Positions
computed again (preemption, rejected drafts) replace what was there. Where only some calls are replayed, only the
requests of these are written. Not here: the arithmetic (references/attention.py, references/mla.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_accprobe.dump.schema import RowSpace
from vllm_accprobe.opcheck.calls.prefix import Prefix

INCOMPLETE = "its request's earlier rows are not in the dump (prefix hit, or capture began late)"
_MOST = 1 << 22
"""Positions a request may have: a dump may come from a stranger."""


@dataclass
class Past:
    """What one tap of one rank has written so far: per request, tensors [positions, ...] by name, and which are
    real. shared: by request, the beginning that another one computed; only: the requests that are written, None for
    all."""

    names: tuple[str, ...]
    shared: Mapping[int, Prefix] = field(default_factory=dict)
    written: dict[int, dict[str, Any]] = field(default_factory=dict)
    known: dict[int, Any] = field(default_factory=dict)
    only: frozenset[int] | None = None

    def wants(self, space: RowSpace) -> bool:
        """Whether any row of a step is written."""
        return self.only is None or any(s.req in self.only for s in space.segments)

    def look_at(self, requests: Iterable[int]) -> None:
        """From now on only these are written, and those whose beginning they have."""
        wanted, new = set(), set(requests)
        while new:
            wanted |= new
            new = {d for r in new if r in self.shared for d in self.shared[r].donors} - wanted
        self.only = frozenset(wanted)

    def write(self, space: RowSpace, tensors: Mapping[str, Any]) -> None:
        """One step's rows, in the order of the space's segments."""
        start = 0
        for s in space.segments:
            stop = s.pos + s.n
            if s.pos < 0 or stop > _MOST:
                raise ValueError("a row map has positions beyond all contexts")
            if self.only is not None and s.req not in self.only:
                start += s.n
                continue
            held, known = self.written.setdefault(s.req, {}), self.known.get(s.req, torch.zeros(0, dtype=torch.bool))
            if len(known) < stop:
                known = torch.cat((known, torch.zeros(max(stop, 2 * len(known)) - len(known), dtype=torch.bool)))
            for name in self.names:
                rows = tensors[name][start : start + s.n]
                old = held.get(name)
                if old is None or len(old) < len(known):
                    grown = torch.zeros((len(known), *rows.shape[1:]), dtype=rows.dtype)
                    if old is not None:
                        grown[: len(old)] = old
                    held[name] = old = grown
                old[s.pos : stop] = rows
            known[s.pos : stop] = True
            self.known[s.req] = known
            start += s.n

    def forget(self, requests: Iterable[int]) -> None:
        """Lets go of requests that have no further rows, unless another one has their beginning."""
        donors = {d for prefix in self.shared.values() for d in prefix.donors}
        for req in set(requests) - donors:
            self.written.pop(req, None)
            self.known.pop(req, None)

    def inherit(self, req: int) -> None:
        """Gives ``req`` the beginning that others computed. Where several computed the same part and their values
        differ, it cannot be told which ones the cache kept: it gets none."""
        prefix = self.shared.get(req)
        if prefix is None or prefix.why:
            return
        for low, high, donors in prefix.parts():
            if not bool(self.known[req][low:high].any()):
                self._take_over(req, low, high, [d for d in donors if d != req])

    def _take_over(self, req: int, low: int, high: int, donors: Sequence[int]) -> None:
        held = []
        for donor in donors:
            if donor in self.known:
                self.inherit(donor)
                if len(self.known[donor]) >= high and bool(self.known[donor][low:high].all()):
                    held.append(self.written[donor])
        for name in self.names if held else ():
            first = held[0][name][low:high]
            if not all(torch.equal(first, other[name][low:high]) for other in held[1:]):
                return
        for name in self.names if held else ():
            self.written[req][name][low:high] = held[0][name][low:high]
            self.known[req][low:high] = True

    def foreign(self, req: int, step: int) -> str:
        """Why the history of ``req`` is not what its rows of ``step`` demand, or not known to be; "" where it is."""
        prefix = self.shared.get(req)
        return prefix.why if prefix is not None and step >= prefix.since else ""

    def view(self, space: RowSpace, rows: tuple[int, int] | None = None) -> Cache:
        return Cache(self, space, rows or (0, space.n))


class Cache:
    """A step's view of a Past, of the rows from the first of ``rows`` up to the last. why: the reason if some row had
    no history, else ""."""

    def __init__(self, past: Past, space: RowSpace, rows: tuple[int, int]):
        self._past = past
        self._space = space
        self._rows = rows
        self.why = ""

    def requests(self, causal: bool = True) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
        """Per run of rows: their places in the step's tensors (int64 [n]), their positions (int64 [n]), and the rows of
        the request from position 0 to the last of them. causal=False: to the last that is known."""
        start = 0
        low, high = self._rows
        for s in self._space.segments:
            first, last = max(low, start), min(high, start + s.n)
            pos = s.pos + first - start
            start += s.n
            if first >= last:
                continue
            if why := self._past.foreign(s.req, self._space.step):
                self.why = why
                continue
            at = torch.arange(first - low, last - low)
            self._past.inherit(s.req)
            known = self._past.known[s.req]
            stop = pos + last - first
            if not causal:
                stop = int(known.nonzero().max()) + 1
            if not bool(known[:stop].all()):
                self.why = INCOMPLETE
                continue
            positions = torch.arange(pos, pos + last - first)
            yield at, positions, {name: rows[:stop] for name, rows in self._past.written[s.req].items()}
