"""Which tokens a request had, and what it asked for, when a row of its logits was sampled.

The problem: penalties, word lists and seeds depend on the request's whole past, which a dump has in pieces: the ids of
each step's rows, what the sampler gave where only logits were captured, or, behind a prefix hit, nothing. The idea: a
request's tokens by position from all row maps of a rank, believed where no two differ; a row then has a past, or it is
known that it has none. Not here: the tokens of two runs against one another (tokens.py), what follows from a past
(judge/sampling_rules.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.schema import LOGITS, TOKENS, Request, RowSpace, SamplingParameters

_KINDS = 64
"""Chosen: requests of one step that are tried for a row of which another's parameters may have been taken."""
_SAMPLER, _TOKEN = "sampler", "output.token"


@dataclass(frozen=True, slots=True)
class SampledRow:
    """request: None where the journal does not name it. position: of the token whose row this is; generated: how many
    tokens of the answer are known by then, this one among them. prompt, output: as judge.sampling_rules.LogitsRow.
    drafts: whether its request has guesses in this step."""

    request: Request | None
    position: int
    generated: int
    prompt: np.ndarray | None
    output: np.ndarray | None
    drafts: bool

    @property
    def asks(self) -> SamplingParameters | None:
        return self.request.sampling if self.request is not None else None


def _put(seen: dict[int, list[tuple[np.ndarray, np.ndarray]]], space: RowSpace, ids: np.ndarray, on: int) -> None:
    """The tokens ``ids`` of the rows of a space; on: how far behind its row a token stands."""
    at = 0
    for s in space.segments:
        seen.setdefault(s.req, []).append((np.arange(s.pos + on, s.pos + on + s.n), ids[at : at + s.n]))
        at += s.n


class SampledHistory:
    """Of one rank of ``dump``."""

    def __init__(self, dump: Any, rank: int):
        self._dump, self._rank = dump, rank
        self._tokens: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] | None = None
        self._prompts: dict[int, np.ndarray | None] = {}
        self._asked: dict[int, tuple[tuple[SamplingParameters, np.ndarray | None], ...]] = {}

    def of(self, step: int, n: int) -> list[SampledRow]:
        """The rows of the logits of a step, in their order; [] where these are not ``n``."""
        space = self._dump.rows.get((self._rank, step, LOGITS))
        if space is None or space.n != n:
            return []
        return [found for at in range(n) if (found := self.row(step, at)) is not None]

    def asked(self, step: int) -> tuple[tuple[SamplingParameters, np.ndarray | None], ...]:
        """What the requests of a step ask for, with the distinct tokens of each one's prompt."""
        if step not in self._asked:
            space = self._dump.rows.get((self._rank, step, LOGITS))
            found: list[tuple[SamplingParameters, np.ndarray | None]] = []
            for req in dict.fromkeys(s.req for s in space.segments) if space is not None else ():
                request = self._dump.requests.get((self._rank, req))
                if request is not None and request.sampling is not None and len(found) < _KINDS:
                    found.append((request.sampling, self._prompt(req, request)))
            self._asked = {step: tuple(found)}
        return self._asked[step]

    def row(self, step: int, at: int) -> SampledRow | None:
        """The ``at``-th of them; None where there is none."""
        space = self._dump.rows.get((self._rank, step, LOGITS))
        for s in space.segments if space is not None else ():
            if 0 <= at < s.n:
                alone = s.n == 1 and sum(other.req == s.req for other in space.segments) == 1
                return self._row(s.req, s.pos + at, bool(s.drafts) or not alone)
            at -= s.n
        return None

    def _row(self, req: int, position: int, drafts: bool) -> SampledRow:
        request = self._dump.requests.get((self._rank, req))
        if request is None:
            return SampledRow(None, position, 0, None, None, drafts)
        generated = max(position + 1 - request.prompt_len, 0)
        output = self._between(req, request.prompt_len, position + 1)
        return SampledRow(request, position, generated, self._prompt(req, request), output, drafts)

    def _prompt(self, req: int, request: Request) -> np.ndarray | None:
        if req not in self._prompts:
            asks = request.sampling
            if asks is not None and asks.prompt is not None:
                found: np.ndarray | None = np.array(asks.prompt, np.int64)
            else:
                held = self._between(req, 0, request.prompt_len)
                found = None if held is None else np.unique(held)
            self._prompts[req] = found
        return self._prompts[req]

    def _between(self, req: int, start: int, stop: int) -> np.ndarray | None:
        """The tokens at positions start .. stop - 1; None where one is not known, or not for sure."""
        if stop <= start:
            return np.zeros(0, np.int64)
        if self._tokens is None:
            self._tokens = self._read()
        if req not in self._tokens:
            return None
        positions, tokens, sure = self._tokens[req]
        first = int(np.searchsorted(positions, start))
        held = slice(first, first + stop - start)
        if len(positions) < first + stop - start or positions[first] != start or positions[held][-1] != stop - 1:
            return None
        return tokens[held] if bool(sure[held].all()) else None

    def _read(self) -> dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """By request: sorted distinct positions, their tokens, and whether all rows say the same."""
        seen: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
        for (rank, _, name), space in self._dump.rows.items():
            if rank == self._rank and name == TOKENS and len(space.ids) == space.n:
                _put(seen, space, np.array(space.ids, np.int64), 0)
        for r in self._dump.records:
            if (r.tap, r.role, r.rank) != (_SAMPLER, _TOKEN, self._rank) or r.step is None or r.payload is None:
                continue
            space = self._dump.rows.get((self._rank, r.step, LOGITS))
            if space is not None and (self._rank, r.step, TOKENS) not in self._dump.rows and r.shape == (space.n,):
                try:
                    _put(seen, space, np.asarray(self._dump.read(r), np.int64), 1)
                except (DumpError, OSError):
                    continue  # its tokens are not known
        found = {}
        for req, parts in seen.items():
            positions, tokens = (np.concatenate(column) for column in zip(*parts, strict=True))
            order = np.lexsort((tokens, positions))
            positions, tokens = positions[order], tokens[order]
            first = np.append(True, positions[1:] != positions[:-1])
            last = np.append(positions[1:] != positions[:-1], True)
            sure = (tokens[first] == tokens[last]) & (tokens[first] >= 0)
            found[req] = positions[first], tokens[first], sure
        return found
