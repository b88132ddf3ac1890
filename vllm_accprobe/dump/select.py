"""Which records of a dump somebody asks for.

The problem: summary, show and convert all let the user choose by name, step, request and rank, and must agree on what
that means. The idea: one frozen description of the choice, applied to the records in their order; a request chooses the
tensors that hold at least one of its rows. Not here: the command line's spelling of it (cli/common/options.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

import numpy as np

from vllm_accprobe.dump.face import row_space as row_space
from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.schema import Record, Request

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Selection:
    """Empty means all. names: globs over the tap, ``tap/role`` or the record's whole name, ``!`` excludes and the last
    that matches decides; steps, ranks, calls: ranges with both ends in; requests: globs over a request's id, or the
    beginning of its prompt's hash; roles: globs; in both ``!`` as with names. Parameters have no step: where steps are
    given they are chosen only if ``parameters`` is set."""

    names: tuple[str, ...] = ()
    steps: Ranges = ()
    ranks: Ranges = ()
    requests: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    calls: Ranges = ()
    parameters: bool = False

    def apply(self, dump: Dump, padding: bool = False) -> list[tuple[int, Record]]:
        """The chosen records with their index in ``dump.records``; behind them those of ``dump.padding``."""
        wanted = self._requests(dump) if self.requests else None
        known: dict[tuple[str, str, int], bool] = {}
        found = []
        for i, r in enumerate([*dump.records, *dump.padding] if padding else dump.records):
            key = (r.tap, r.role, r.call)
            if key not in known:
                known[key] = (
                    matches(self.names, (r.tap, f"{r.tap}/{r.role}", r.name))
                    and matches(self.roles, (r.role,))
                    and within(self.calls, r.call)
                )
            if not known[key] or not within(self.ranks, r.rank):
                continue
            if self.steps and not (self.parameters if r.step is None else within(self.steps, r.step)):
                continue
            if wanted is not None and not holds(dump, r, wanted):
                continue
            found.append((i, r))
        return found

    def _requests(self, dump: Dump) -> set[tuple[int, int]]:
        return {key for key, request in dump.requests.items() if names_request(self.requests, request)}


def names_request(globs: Sequence[str], request: Request) -> bool:
    """Whether ``globs`` choose ``request``: one matches an id of it, or is the beginning (6 digits or more) of its
    prompt's hash; ``!`` and several as in `matches`."""
    begun = [p for g in globs if len(p := g.lstrip("!")) >= 6 and request.prompt.startswith(p)]
    return matches(globs, (request.id, request.internal_id, *begun))


def holds(dump: Dump, record: Record, requests: set[tuple[int, int]]) -> bool:
    """Whether one of the record's rows belongs to one of ``requests``, given as (rank, req)."""
    space = row_space(dump, record)
    return space is not None and any((record.rank, s.req) in requests for s in space.segments)


def rows_of(dump: Dump, record: Record, requests: Sequence[str], positions: Ranges = ()) -> np.ndarray:
    """Indices (int64, ascending) of the record's rows that belong to a request named by ``requests`` (all if empty) and
    lie at one of ``positions``."""
    space = row_space(dump, record)
    found, start = [], 0
    for s in space.segments if space else ():
        request = dump.requests.get((record.rank, s.req))
        if not requests or (request is not None and names_request(requests, request)):
            pos = np.arange(s.pos, s.pos + s.n)
            keep = np.zeros(s.n, bool) if positions else np.ones(s.n, bool)
            for low, high in positions:
                keep |= (pos >= low) & (pos <= high)
            found.append(start + np.flatnonzero(keep))
        start += s.n
    return np.concatenate(found) if found else np.empty(0, np.int64)


def matches(globs: Sequence[str], names: Sequence[str]) -> bool:
    """Whether one of ``names`` is chosen: the last glob that matches decides; exclusions alone choose the rest."""
    chosen = all(g.startswith("!") for g in globs)
    for g in globs:
        if any(fnmatchcase(name, g.lstrip("!")) for name in names):
            chosen = not g.startswith("!")
    return chosen


def nearest(globs: Sequence[str], names: Iterable[str], most: int = 3) -> list[str]:
    """Of ``names``, those that globs which match none of them may have meant, names that hold one's letters first; some
    of all where none is near."""
    known = sorted(set(names))[:_COMPARED]
    found: list[str] = []
    for glob in globs:
        word = "".join(c for c in glob.strip() if c not in "!*?[]")
        if word:
            found += [n for n in known if word in n or word.lower() in n.lower()][:most]
            found += get_close_matches(word, known, n=most, cutoff=0.3)
    return list(dict.fromkeys(found))[:most] or known[:most]


_COMPARED = 4096
"""Chosen: names that a mistyped one is compared with, a second's work."""


def within(ranges: Ranges, value: int) -> bool:
    """Whether ``value`` lies in one of the closed ``ranges``; in none at all everything does."""
    return not ranges or any(low <= value <= high for low, high in ranges)
