"""What other records of a dump add to a call: ranks, children, earlier keys and values, prefixes, lent inputs.

The problem: some outputs do not follow from a call's own inputs: a sum over ranks, a block's children, logits that
another module made, keys and values of earlier steps. The idea: `Neighbours` gives it all by name, for `Call.extra`;
what is not in the dump is missing there, and the reference says so. Keys and values: what earlier steps wrote was
captured as inputs of the same module; by request and position, that is the cache as it should be (`Past`). After a
prefix hit the first positions are another request's: the capture says whose, or the hash of the prompt proves it
(`prefixes`). Taps in compiled graphs have outputs alone: by equal bytes the other side's dump says whose output each
input is (`lend`).
Elsewhere: the arithmetic (references/), inputs that are slices or sums of outputs, which no bytes show.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from vllm_accprobe.align.data_flow import Key
from vllm_accprobe.align.tokens import SampledHistory
from vllm_accprobe.comparison.plan.relations import STEPS, Makers
from vllm_accprobe.dump.block_code import FORWARD, INSIDE
from vllm_accprobe.dump.decode import object_at, value_at
from vllm_accprobe.dump.journal import CachedPrefix
from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.schema import ADAPTER_ANEW, ROOT_TAP, Module, Record, Request, RowSpace, hash_tokens
from vllm_accprobe.opcheck.calls.module_index import ModuleIndex
from vllm_accprobe.opcheck.calls.parameters import adapter_of
from vllm_accprobe.opcheck.calls.sampler_calls import facts_of
from vllm_accprobe.opcheck.reference import Call
from vllm_accprobe.opcheck.references.linear import PACKED, RowAdapters
from vllm_accprobe.opcheck.references.mixers import CARRIED, KINDS, OtherStates

_LEFT = 8
"""Chosen: finished requests of which the rows are kept: a slot of states is given to another soon."""
_TRIES = 64
"""Different beginnings that are tried for one request."""
_MOST_STATES = 2 << 30
"""Chosen: bytes of recurrent states that are kept for the next call, of one tap."""
_MOST = 1 << 22
"""Positions a request may have: a dump may come from a stranger."""
UNKNOWN = "nobody knows which request wrote the cached rows that its request begins with"
ABSENT = "the cached rows that its request begins with are of a request that is not in the dump"
TEXT = "the cached rows that its request begins with are those of other tokens"


@dataclass(frozen=True)
class Prefix:
    """The first ``n`` positions of a request, which each of ``donors`` (requests of the same rank) has as well; where
    several requests computed them, ``runs`` says who: (first position, end, request). why: for what reason no row of
    the request is checked from step ``since`` on, "" where they are."""

    n: int
    donors: tuple[int, ...] = ()
    runs: tuple[tuple[int, int, int], ...] = ()
    why: str = ""
    since: int = 0

    def parts(self) -> Sequence[tuple[int, int, tuple[int, ...]]]:
        """(first position, end, donors), in order."""
        return [(low, high, (owner,)) for low, high, owner in self.runs] or [(0, self.n, self.donors)]


def prefixes(dump: Dump, rank: int) -> Mapping[int, Prefix]:
    """By request: the beginning that it did not compute itself, where the dump says or proves whose it is."""
    recorded: dict[int, list[CachedPrefix]] = {}
    for on, line in getattr(dump, "cached", ()):
        if on == rank:
            recorded.setdefault(line.req, []).append(line)
    first: dict[int, int] = {}
    for (r, _, name), space in dump.rows.items():
        for s in space.segments if r == rank and name == "tokens" else ():
            first[s.req] = min(s.pos, first.get(s.req, s.pos))
    found: dict[int, Prefix] = {}
    if not any(first.values()) and not recorded:
        return found
    tokens, begun = _tokens(dump, rank)
    whole = {req: [kept[p] for p in range(len(kept))] for req, kept in tokens.items() if _unbroken(kept, 0)}
    for req, lines in recorded.items():
        if (prefix := _recorded(dump, rank, req, lines, tokens)) is not None:
            found[req] = prefix
    for req in sorted(set(tokens) - set(whole), key=lambda r: begun[r]):
        own, request = tokens[req], dump.requests.get((rank, req))
        n = min(own)
        if request is None or not request.prompt or not n < request.prompt_len or not _unbroken(own, n):
            continue
        rest = [own[p] for p in range(n, n + len(own))]
        if req in recorded:
            if (ids_before := _start(found.get(req), tokens)) is not None:
                whole[req] = [*ids_before, *rest]
            continue
        tried: dict[tuple[int, ...], list[int]] = {}
        for other, ids in whole.items():
            fits = len(ids) >= n and begun[other] <= begun[req]
            fits = fits and not _other_context(dump.requests.get((rank, other)), request, n)
            if fits and (tuple(ids[:n]) in tried or len(tried) < _TRIES):
                tried.setdefault(tuple(ids[:n]), []).append(other)
        for start, donors in tried.items():
            if hash_tokens([*start, *rest[: request.prompt_len - n]]) == request.prompt:
                found[req] = Prefix(n, tuple(donors))
                whole[req] = [*start, *rest]
                break
    return found


def _recorded(
    dump: Dump, rank: int, req: int, lines: Sequence[CachedPrefix], tokens: Mapping[int, Mapping[int, int]]
) -> Prefix | None:
    """What the capture says of a request's beginning. A later line is of a request that was preempted: what it found is
    its own text again, unless the capture says that it is not."""
    line = next((one for one in lines if one.why), lines[0])
    runs = tuple((run.low, min(run.low + run.n, _MOST), run.owner) for run in line.runs if 0 <= run.low < _MOST)
    if not runs:
        return None
    n = max(high for _, high, _ in runs)
    if line.why:
        return Prefix(n, why=f"its history is not its own: {line.why}", since=line.step)
    request = dump.requests.get((rank, req))
    for low, high, owner in runs:
        if owner == req:
            continue
        theirs = dump.requests.get((rank, owner))
        if owner < 0 or theirs is None or request is None:
            return Prefix(n, why=UNKNOWN if owner < 0 else ABSENT, since=line.step)
        if other := _other_context(theirs, request, high):
            why = f"its history is not its own: positions {low} to {high - 1} were written by request '{theirs.id}'"
            why += other
            return Prefix(n, why=why, since=line.step)
    prefix = Prefix(n, runs=runs, since=line.step)
    start, own = _start(prefix, tokens), tokens.get(req, {})
    if start is not None and request is not None and request.prompt and min(own, default=-1) == n:
        rest = [own[p] for p in range(n, request.prompt_len) if p in own]
        if n + len(rest) == request.prompt_len and hash_tokens([*start, *rest]) != request.prompt:
            return Prefix(n, why=TEXT, since=line.step)
    return prefix


def _start(prefix: Prefix | None, tokens: Mapping[int, Mapping[int, int]]) -> list[int] | None:
    """The token ids of a recorded beginning; None where the dump has not all of them."""
    if prefix is None or prefix.why:
        return None
    out: list[int] = []
    for low, high, owner in prefix.runs:
        kept = tokens.get(owner, {})
        if low != len(out) or high - low > len(kept) or not all(p in kept for p in range(low, high)):
            return None
        out += [kept[p] for p in range(low, high)]
    return out


def _other_context(theirs: Request | None, request: Request, n: int) -> str:
    """What another request has otherwise than ``request`` in its first ``n`` positions, besides its tokens; "" for
    nothing."""
    if theirs is None:
        return " that is not known"
    if (theirs.adapter or "") != (request.adapter or ""):
        return f" with {f'adapter {theirs.adapter}' if theirs.adapter else 'no adapter'}"
    if theirs.salt != request.salt:
        return " with another cache salt"
    shown = [[(i.hash, i.pos, i.n) for i in r.images if i.pos < n] for r in (theirs, request)]
    return " with another image" if shown[0] != shown[1] else ""


def _tokens(dump: Dump, rank: int) -> tuple[dict[int, dict[int, int]], dict[int, int]]:
    """By request: the token ids by position of all its rows, and its first step."""
    tokens: dict[int, dict[int, int]] = {}
    begun: dict[int, int] = {}
    for (r, step, name), space in sorted(dump.rows.items(), key=lambda kv: kv[0][:2]):
        if r != rank or name != "tokens" or len(space.ids) != space.n:
            continue
        for s, rows in space.stretches():
            if s.pos >= 0 and s.pos + s.n <= _MOST:
                tokens.setdefault(s.req, {}).update(zip(range(s.pos, s.pos + s.n), space.ids[rows], strict=True))
                begun.setdefault(s.req, step)
    return {req: kept for req, kept in tokens.items() if kept}, begun


def _unbroken(kept: Mapping[int, int], first: int) -> bool:
    return min(kept) == first and max(kept) == first + len(kept) - 1


INCOMPLETE = "its request's earlier rows are not in the dump (prefix hit, or capture began late)"


@dataclass
class Past:
    """What one tap of one rank has written so far: per request, tensors [positions, ...] by name, and which are
    real. shared: by request, the beginning that another one computed; only: the requests that are written, None for
    all; carried: by request, states behind so many rows, None where there are none; begins: by request, where its runs
    of rows begin, with the step."""

    names: tuple[str, ...]
    shared: Mapping[int, Prefix] = field(default_factory=dict)
    written: dict[int, dict[str, Any]] = field(default_factory=dict)
    known: dict[int, Any] = field(default_factory=dict)
    only: frozenset[int] | None = None
    carried: dict[int, dict[Any, dict[int, Any]]] | None = None
    begins: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    _done: list[int] = field(default_factory=list)

    def wants(self, space: RowSpace) -> bool:
        """Whether any row of a step is written."""
        return self.only is None or any(s.req in self.only for s in space.segments)

    def look_at(self, requests: Iterable[int]) -> None:
        """From now on only these are written, and those whose beginning they have."""
        lent, new = set(), set(requests)
        if self.carried is not None:  # a state may be any other request's
            return
        while new:
            lent |= new
            new = {d for r in new if r in self.shared for d in self.shared[r].donors} - lent
        self.only = frozenset(lent)

    def write(self, space: RowSpace, tensors: Mapping[str, Any]) -> None:
        """One step's rows, in the order of the space's segments."""
        for s, at in space.stretches():
            stop = s.pos + s.n
            if s.pos < 0 or stop > _MOST:
                raise ValueError("a row map has positions beyond all contexts")
            if self.only is not None and s.req not in self.only:
                continue
            kept, known = self.written.setdefault(s.req, {}), self.known.get(s.req, torch.zeros(0, dtype=torch.bool))
            if len(known) < stop:
                known = torch.cat((known, torch.zeros(max(stop, 2 * len(known)) - len(known), dtype=torch.bool)))
            for name in self.names:
                rows = tensors[name][at]
                old = kept.get(name)
                if old is None or len(old) < len(known):
                    grown = torch.zeros((len(known), *rows.shape[1:]), dtype=rows.dtype)
                    if old is not None:
                        grown[: len(old)] = old
                    kept[name] = old = grown
                old[s.pos : stop] = rows
            known[s.pos : stop] = True
            self.known[s.req] = known
            self.begins.setdefault(s.req, []).append((space.step, s.pos))

    def has_room(self) -> bool:
        """Whether the states of one more request may be kept; the others' are computed again from their beginning."""
        kept = (s for of in (self.carried or {}).values() for by_rows in of.values() for s in by_rows.values())
        return sum(t.nbytes for pair in kept for state in pair if state is not None for t in state) < _MOST_STATES

    def forget(self, requests: Iterable[int]) -> None:
        """Lets go of requests that have no further rows, unless another one has their beginning."""
        donors = {d for prefix in self.shared.values() for d in prefix.donors}
        if self.carried is not None:  # what they left may be read by a later one
            done, self._done = [*self._done, *requests][:-_LEFT], [*self._done, *requests][-_LEFT:]
            requests = done
        for req in set(requests) - donors:
            self.written.pop(req, None)
            self.known.pop(req, None)
            (self.carried or {}).pop(req, None)

    def inherit(self, req: int) -> None:
        """Gives ``req`` the beginning that others computed. Where several computed the same part and their values
        differ, it is not known which ones the cache kept: it gets none."""
        prefix = self.shared.get(req)
        if prefix is None or prefix.why:
            return
        for low, high, donors in prefix.parts():
            if not bool(self.known[req][low:high].any()):
                self._take_over(req, low, high, [d for d in donors if d != req])

    def _take_over(self, req: int, low: int, high: int, donors: Sequence[int]) -> None:
        kept = []
        for donor in donors:
            if donor in self.known:
                self.inherit(donor)
                if len(self.known[donor]) >= high and bool(self.known[donor][low:high].all()):
                    kept.append(self.written[donor])
        for name in self.names if kept else ():
            first = kept[0][name][low:high]
            if not all(torch.equal(first, other[name][low:high]) for other in kept[1:]):
                return
        for name in self.names if kept else ():
            self.written[req][name][low:high] = kept[0][name][low:high]
            self.known[req][low:high] = True

    def so_far(self, req: int) -> dict[str, Any]:
        """The rows of a request up to the first that is missing."""
        known = self.known[req]
        n = len(known) if bool(known.all()) else int((~known).nonzero()[0])
        return {name: rows[:n] for name, rows in self.written[req].items()}

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
        low, high = self._rows
        for s, at in self._space.stretches():
            first, last = max(low, at.start), min(high, at.stop)
            pos = s.pos + first - at.start
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
            past = {name: rows[:stop] for name, rows in self._past.written[s.req].items()}
            if self._past.carried is not None and (s.req in self._past.carried or self._past.has_room()):
                past[CARRIED] = self._past.carried.setdefault(s.req, {})
            yield at, positions, past


_FROM_MEMORY = re.compile(r"Linear|Embedding|Attention|Experts|MoE|LogitsProcessor|LMHead")
"""Classes whose kernels are none of the compiler's own, and read their inputs from memory."""
Links = Mapping[tuple[str, int], Mapping[str, Key]]
"""(tap, call) → input role → whose output it is; calls all of whose inputs are known."""


def lend(giver: ModuleIndex, taker: ModuleIndex) -> int:
    """Adds to ``taker``'s calls the inputs that it did not capture, as far as ``giver`` tells what they are; how many
    calls have got any."""
    blind = [place for place, calls in taker.by_tap.items()
             if not any(role.startswith("input.") for records in calls.values() for role in records)]  # fmt: skip
    if not blind:
        return 0
    links = links_of(giver)
    fused = object_at(taker.dump.run, "engine", "graphs") is not None
    lent = 0
    for rank, tap in blind:
        cls = taker.cls_of(rank, tap)
        for (step, n), records in taker.by_tap[rank, tap].items():
            found = links.get((tap, n), {})
            made = {role: taker.records_of(rank, m[0], step, m[2]).get(m[1]) for role, m in found.items()}
            if not made or any(r is None or r.payload is None for r in made.values()):
                continue
            first = next(iter(records.values()))
            records |= {
                role: replace(r, tap=tap, cls=first.cls, role=role, call=n) for role, r in made.items() if r is not None
            }
            lent += 1
            if fused and not _FROM_MEMORY.search(cls):
                taker.unrounded.add((rank, tap))
    return lent


def links_of(giver: ModuleIndex) -> Links:
    """By the steps of the dump's lowest rank."""
    rank = min((r for r, _ in giver.by_tap), default=0)
    records: dict[Key, list[Record]] = {}
    first: dict[Key, tuple[int, int]] = {}
    for (r, tap), calls in giver.by_tap.items():
        for (step, n), kept in sorted(calls.items()) if r == rank else ():
            for role, record in kept.items():
                records.setdefault((tap, role, n), []).append(record)
                first.setdefault((tap, role, n), (step, record.seq))
    order = {key: i for i, key in enumerate(sorted(first, key=lambda k: first[k]))}
    makers = Makers(order, {key: found[:STEPS] for key, found in records.items()})
    inputs: dict[tuple[str, int], dict[str, Key | None]] = {}
    for tap, role, n in order:
        if role.startswith("input."):
            inputs.setdefault((tap, n), {})[role] = makers.maker((tap, role, n))
    return {
        call: {role: maker for role, maker in makers_of_inputs.items() if maker is not None}
        for call, makers_of_inputs in inputs.items() if all(maker is not None for maker in makers_of_inputs.values())
    }  # fmt: skip


_PAST = {
    "Attention": ("key", "value"),
    "EncoderOnlyAttention": ("key", "value"),
    "MLAAttention": ("kv_c_normed", "k_pe"),
}
_WITH_WEIGHTS = ("conv1d", "conv")
"""Modules inside recurrent ones whose weights the recurrence reads itself."""
_HEADS = ("ParallelLMHead", "VocabParallelEmbedding")
SAMPLER = "sampler"
"""The tap of every engine's sampler, whatever its class."""
_QUIET = (
    "a container, never called", "another name of a captured module", "never called in a captured step",
)  # fmt: skip
"""Why a module has no records that did nothing of its own in the captured steps."""
_NOT = ("not selected by VLLM_ACCPROBE_MODULES",)
_FACTOR = "routed_scaling_factor"
SUMMED = ("RowParallelLinear", "VocabParallelEmbedding")
AVERAGED = ("MiniMaxText01RMSNormTP",)
"""Norms whose mean square is one of all ranks, of which ``tp_world`` says how many there are."""
_OVER_RANKS = tuple(
    f"{name}Operation" for name in ("AllReduce", "AllGather", "ReduceScatter", "Broadcast", "LinearParallel")
)
"""ATB's, which need all ranks' calls."""
_SUMMED_INSIDE = ("MoERunner", "FusedMoE", "SharedFusedMoE")


def _before(tap: str) -> str:
    """What the paths of the taps below ``tap`` begin with."""
    return "" if tap == ROOT_TAP else f"{tap}."


def _last(records: Mapping[str, Record]) -> int:
    return max((r.seq for r in records.values()), default=-1)


class Neighbours:
    """Of the calls of ``index``."""

    def __init__(self, index: ModuleIndex):
        self._index = index
        self._common: dict[tuple[int, str], Mapping[str, Any]] = {}
        self._shared: dict[int, Mapping[int, Prefix]] = {}
        self._sampled: dict[int, SampledHistory] = {}
        self._scaling: dict[int, list[Module]] = {}
        self._below: dict[int, dict[str, frozenset[str]]] = {}
        self._by_step: dict[tuple[int, str], dict[int, list[Mapping[str, Record]]]] = {}
        self._inner_calls: tuple[tuple[int, str], dict[int, list[tuple[str, Mapping[str, Record]]]]] = (-1, ""), {}
        self._by_call: dict[tuple[int, str, str, int], dict[int, list[Mapping[str, Record]]]] = {}

    def past(self, rank: int, cls: str) -> Past | None:
        """An empty cache for the calls of one tap, which come step by step; None for a class that has none."""
        if cls not in _PAST and cls not in KINDS:
            return None
        if rank not in self._shared:
            self._shared[rank] = prefixes(self._index.dump, rank)
        if cls in KINDS:
            return Past(KINDS[cls].reads, self._shared[rank], carried={})
        return Past(_PAST[cls], self._shared[rank])

    def held(
        self, past: Past, rank: int, tap: str, place: tuple[int, int], records: Mapping[str, Record]
    ) -> dict[str, Record]:  # fmt: skip
        """By name of ``past``: the records of what a call writes into it."""
        own = past.carried is None
        found = {n: records.get(f"input.{n}") if own else self._inner(rank, tap, n, place) for n in past.names}
        return {n: r for n, r in found.items() if r is not None and r.payload is not None}

    def _inner(self, rank: int, tap: str, path: str, place: tuple[int, int]) -> Record | None:
        """The output of a module inside, or, of ``path/input``, this input of it."""
        child, _, name = path.partition("/")
        return self._call_inside(rank, tap, child, place).get(f"input.{name}" if name else "output.0")

    def _call_inside(self, rank: int, tap: str, child: str, place: tuple[int, int]) -> Mapping[str, Record]:
        """The records of the one call of a part within a call of ``tap``, {} where there are none or several."""
        calls = self._during(rank, tap, f"{_before(tap)}{child}", place)
        return calls[0] if len(calls) == 1 else {}

    def _during(self, rank: int, tap: str, child: str, place: tuple[int, int]) -> list[Mapping[str, Record]]:
        """The calls of a part within a call of ``tap``: of several calls in a step each has what ran since the one
        before it."""
        inner, own = self._steps(rank, child).get(place[0], []), self._steps(rank, tap).get(place[0], [])
        if len(own) < 2 or not inner:
            return inner
        key = rank, tap, child, place[0]
        if key not in self._by_call:
            ends = sorted(_last(records) for records in own)
            found = self._by_call[key] = {end: [] for end in ends}
            for records in inner:
                for end in ends[(at := bisect_left(ends, _last(records))) : at + 1]:
                    found[end].append(records)
        return self._by_call[key].get(_last(self._index.records_of(rank, tap, *place)), [])

    def _steps(self, rank: int, tap: str) -> Mapping[int, list[Mapping[str, Record]]]:
        """The records of a tap's calls, by step."""
        if (rank, tap) not in self._by_step:
            by = self._by_step[rank, tap] = {}
            for (step, _), by_role in self._index.by_tap.get((rank, tap), {}).items():
                by.setdefault(step, []).append(by_role)
        return self._by_step[rank, tap]

    def made_inside(
        self, what: Call, rank: int, tap: str, place: tuple[int, int], records: Mapping[str, Record]
    ) -> dict[str, Record]:  # fmt: skip
        """By role: what a block's own code made, as modules inside read it: a recurrence's results, or what the block's
        formulas say that its parts receive, where that is computed or is not what was handed on."""
        own, code = KINDS[what.cls].made if what.cls in KINDS else (), what.attrs.get(FORWARD)
        places = dict.fromkeys(own, "")
        if isinstance(code, Mapping):
            places = {r.removeprefix(INSIDE): t for r, t in code.items() if r.startswith(INSIDE)} | places
        made = {p: self._inner(rank, tap, p, place) for p in places}
        return {f"{INSIDE}{p}": replace(r, role=p.replace("/", "/input.")) for p, r in made.items()
                if r is not None and r.payload is not None
                and not (places[p] and self._same(r, rank, tap, places[p], place, records))}  # fmt: skip

    def _same(
        self, r: Record, rank: int, tap: str, text: Any, place: tuple[int, int], records: Mapping[str, Record]
    ) -> bool:  # fmt: skip
        """Whether a part received the very input or output that ``text`` names, or it cannot be determined."""
        if not isinstance(text, str) or not r.dtype.startswith(("bfloat", "float")):
            return True
        child, bracket, k = text.removesuffix("]").partition("[")
        if (not bracket and not text.isidentifier()) or (bracket and not (k.isdigit() and text.endswith("]"))):
            return False
        at = self._call_inside(rank, tap, child, place) if bracket else records
        source = at.get(f"output.{k}" if bracket else f"input.{child}")
        return source is None or source.hash is None or (source.hash, source.dtype) == (r.hash, r.dtype)

    def cache(
        self, past: Past, what: Call, rank: int, place: tuple[int, int], records: Mapping[str, Record]
    ) -> dict[str, Any]:  # fmt: skip
        """``cache``, what this call reads, itself included. Raises DumpError."""
        state = self.held(past, rank, what.name, place, records)
        record = state.get(past.names[0])
        space = self._index.dump.rows.get((rank, place[0], record.rows)) if record is not None and record.rows else None
        if space is None or len(state) < len(past.names):
            return {}
        own = past.carried is None
        tensors = {n: what.inputs[n] if own and n in what.inputs else self._index.read(r) for n, r in state.items()}
        if any(len(t) != space.n for t in tensors.values()):
            return {}
        past.write(space, tensors)
        if own:
            return {"cache": past.view(space)}
        labels = {req: found.id for req in past.written if (found := self._index.dump.requests.get((rank, req)))}
        others = {label: (tuple(past.begins[req]), past.so_far(req)) for req, label in labels.items()}
        return {"cache": past.view(space), "states": OtherStates(others)}

    def extra(self, what: Call, rank: int, tap: str, step: int, n: int) -> dict[str, Any]:
        """All but the cache. Raises DumpError."""
        extra: dict[str, Any] = {"usual": self._usual(rank, what.cls)}
        dump, parameters = self._index.dump, self._index.parameters
        if what.cls in SUMMED and "tp_size" not in what.attrs:  # another tool's dump: is its output a summand?
            extra["apart"] = len(dump.ranks) > 1
        elif what.cls in SUMMED and int(what.attrs["tp_size"]) > 1:
            ranks = self._calls_of_all_ranks(what.cls, tap, step, n)
            extra["ranks"] = sorted(ranks.values(), key=lambda c: int(c.attrs.get("tp_rank", 0)))
        elif what.cls in AVERAGED and int(what.attrs.get("tp_world", 1)) > 1:
            extra["ranks"] = list(self._calls_of_all_ranks(what.cls, tap, step, n).values())
        if what.cls in _OVER_RANKS:
            extra["ranks"] = list(self._calls_of_all_ranks(what.cls, tap, step, n).values())
        if what.cls == "LogitsProcessor":
            head = tap.rpartition("logits_processor")[0] + "lm_head"
            extra |= self._gathered("lm_head", rank, *self._head(rank, head, step, n))
        if tap == SAMPLER:
            for other in ("logits_processor", "language_model.logits_processor"):
                extra |= self._output("logits", rank, other, step, n)
            rows = self._sampled.setdefault(rank, SampledHistory(dump, rank))
            extra |= facts_of(dump, rank, step, replace(what, extra=extra), rows)
        if what.cls == "MLAAttention":
            weight = parameters.of(rank, f"{tap}.kv_b_proj")
            extra |= {"kv_b_proj": weight["weight"]} if weight.get("weight") is not None else {}
        if tap.endswith(".quant_method"):
            block = tap.removesuffix(".quant_method").removesuffix(".routed_experts")
            gates = (f"{block}.gate", f"{block.rpartition('.')[0]}.gate")
            for gate in gates:
                extra |= self._output("router_logits", rank, gate, step, n)
            extra["gate"] = {n: t for g in (*gates, block.rpartition(".")[0]) for n, t in self._bias(rank, g).items()}
            holder = self._index.modules.get(rank, {}).get(block)
            found = (holder.attrs if holder is not None else {}).items()
            extra["router"] = {k.removeprefix("router."): v for k, v in found if k.startswith("router.")}
        if (what.config or {}).get("routed_scaling_factor") or "routed_scaling_factor" in what.attrs:
            extra["factors"] = self._factors(rank, tap)
        if isinstance(own := what.attrs.get("impl.sinks"), list):  # its kernel's object has a copy of the parameter
            sinks = parameters.of(rank, tap.rpartition(".")[0]).get("sinks")
            extra |= {"parent_sinks": sinks.double()} if sinks is not None and sinks.shape == (len(own),) else {}
        if what.cls in KINDS:
            inner = {child: parameters.of(rank, f"{tap}.{child}") for child in _WITH_WEIGHTS}
            extra["inner_params"] = {f"{child}.{n}": t for child, of in inner.items() for n, t in of.items()}
            extra["wide_state"] = value_at(dump.run, "engine", "state_dtype") == "float32"
        if what.cls.endswith("LoRA"):
            extra |= self._adapters(rank, tap, step, n)
        extra |= self._inside(rank, tap, (step, n))
        if what.cls in _SUMMED_INSIDE and len(dump.ranks) > 1:
            extra |= self._parts(what, rank, tap, step, n, extra)
        return extra

    def _head(self, rank: int, usual: str, step: int, n: int) -> tuple[str, int, int]:
        """The tap, step and call of the head, whatever its name: an embedding's product with ``x`` is one, too."""
        if (rank, usual) in self._index.by_tap:
            return usual, step, n
        taps = [m.tap for m in self._index.modules.get(rank, {}).values() if m.cls in _HEADS]
        calls = [(t, s, k) for t in taps for (s, k), r in self._index.by_tap.get((rank, t), {}).items()
                 if s == step and "input.x" in r]  # fmt: skip
        return calls[n] if n < len(calls) and len({t for t, _, _ in calls}) == 1 else (usual, step, n)

    def _inside(self, rank: int, tap: str, place: tuple[int, int]) -> dict[str, Any]:
        children = self._index.children.get((rank, tap))
        read = self._index.read
        if not children:
            return {}
        within = self._within(rank, tap, children, place)
        seen = {path.partition(".")[0] for path, _, _ in within}
        unseen = tuple(sorted(self._parts_of(rank, tap) - seen))
        return {"children": within, "read": read, "unseen": unseen}

    def _parts_of(self, rank: int, tap: str) -> frozenset[str]:
        """Names of the modules right below ``tap`` that run, as far as the dump knows them: it names those that were
        not selected, too."""
        if rank not in self._below:
            quiet = {s.tap for s in self._index.dump.skips if s.reason in _QUIET}
            known = {*self._index.modules.get(rank, {}), *(s.tap for s in self._index.dump.skips if s.reason in _NOT)}
            below: dict[str, set[str]] = {}
            for path in known - quiet - {ROOT_TAP}:
                while path:
                    path, _, name = path.rpartition(".")
                    below.setdefault(path or ROOT_TAP, set()).add(name)
            self._below[rank] = {path: frozenset(names) for path, names in below.items()}
        return self._below[rank].get(tap, frozenset())

    def _factors(self, rank: int, tap: str) -> dict[str, float]:
        """Routed scaling factors of what lies below ``tap``, by its path, each object once."""
        if rank not in self._scaling:
            self._scaling[rank] = [m for m in self._index.modules.get(rank, {}).values() if _FACTOR in m.attrs]
        start = _before(tap)
        inner = {m.index: m for m in self._scaling[rank] if m.tap.startswith(start) and m.tap != tap}
        return {m.tap.removeprefix(start): float(m.attrs[_FACTOR]) for m in inner.values()}

    def _parts(self, what: Call, rank: int, tap: str, step: int, n: int, extra: Mapping[str, Any]) -> dict[str, Any]:
        """The other ranks' calls of a block whose parts each have a share of the sum: how many, and they."""
        mine = self._index.records_of(rank, tap, step, n).get("output.0")
        inner = [r for _, role, r in extra.get("children", ()) if role == "output.0" and r.layout.kind == "partial"]
        if mine is None or mine.layout.kind == "partial" or not inner:
            return {}
        calls = self._calls_of_all_ranks(what.cls, tap, step, n)
        ranks = [replace(part, extra=self._inside(other, tap, (step, n))) for other, part in calls.items()]
        return {"partial": inner[-1].layout.size, "ranks": ranks}

    def _calls_of_all_ranks(self, cls: str, tap: str, step: int, n: int) -> dict[int, Call]:
        """The same call by rank, where the dump has all of it."""
        kept = {rank: self._index.records_of(rank, tap, step, n) for rank in self._index.dump.ranks}
        return {
            rank: self._index.call(rank, tap, cls, records)
            for rank, records in kept.items() if records and all(r.payload is not None for r in records.values())
        }  # fmt: skip

    def _output(self, name: str, rank: int, tap: str, step: int, n: int) -> dict[str, Any]:
        """``output.0`` of another tap in the same step."""
        return self._held(name, self._index.records_of(rank, tap, step, n).get("output.0"))

    def _held(self, name: str, record: Record | None) -> dict[str, Any]:
        return {name: self._index.read(record)} if record is not None and record.payload is not None else {}

    def _gathered(self, name: str, rank: int, tap: str, step: int, n: int) -> dict[str, Any]:
        """`_output`, its ranks' parts one after the other where it is cut along its columns."""
        record = self._index.records_of(rank, tap, step, n).get("output.0")
        if record is None or record.layout.kind != "shard" or record.layout.dim != -1:
            return self._held(name, record)
        parts = [self._index.records_of(r, tap, step, n).get("output.0") for r in self._index.dump.ranks]
        kept = sorted((p for p in parts if p is not None and p.payload is not None), key=lambda p: p.layout.index)
        if [p.layout.index for p in kept] != list(range(record.layout.size)):
            return {}
        return {name: torch.cat([self._index.read(p) for p in kept], -1)}

    def _usual(self, rank: int, cls: str) -> Mapping[str, Any]:
        """The commonest value of each number among the attributes of a class's modules."""
        if (rank, cls) not in self._common:
            values: dict[str, Counter[Any]] = {}
            for m in self._index.modules.get(rank, {}).values():
                for key, value in m.attrs.items() if m.cls == cls else ():
                    if isinstance(value, (int, float)):
                        values.setdefault(key, Counter())[value] += 1
            self._common[rank, cls] = {key: c.most_common(1)[0][0] for key, c in values.items()}
        return self._common[rank, cls]

    def _bias(self, rank: int, gate: str) -> dict[str, Any]:
        """The correction that a router adds before it chooses, where there is one: the one ``*_bias`` of its module."""
        corrects = [t for n, t in self._index.parameters.of(rank, gate).items() if n.endswith("_bias") and t.dim() == 1]
        return {"e_score_correction_bias": corrects[0]} if len(corrects) == 1 else {}

    def _adapters(self, rank: int, tap: str, step: int, n: int) -> dict[str, Any]:
        """The adapter of each row, and what they add to this layer or to the parts that are packed in it."""
        index, dump = self._index, self._index.dump
        kept = index.records_of(rank, tap, step, n)
        space = next((dump.rows.get((rank, step, r.rows)) for r in kept.values() if r.rows), None)
        if space is None:
            return {}
        requests = [(dump.requests.get((rank, s.req)), s.n) for s in space.segments]
        of_row = [None if r is None else r.adapter for r, rows in requests for _ in range(rows)]
        above, _, last = tap.rpartition(".")
        places = {"": tap} | {part: f"{above}.{part}" for part in PACKED.get(last, ())}
        weights: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in index.parameters.adapters(rank)}
        for part, path in places.items():
            found = index.parameters.of(rank, path)
            for role, tensor in found.items():
                if name := adapter_of(role):
                    weights.setdefault(name, {}).setdefault(part, {})[role.rpartition(".")[2]] = tensor
            for role in index.parameters.lacking(rank, path, found):
                weights.pop(adapter_of(role), None)  # fingerprints alone
        again = {adapter_of((s.role or "").removeprefix("param.")) for s in dump.skips if s.reason == ADAPTER_ANEW}
        return {"adapters": RowAdapters(tuple(of_row), weights, frozenset(again))}

    def _within(self, rank: int, tap: str, children: list[str], place: tuple[int, int]) -> Outputs:
        """Of outputs inside, in the order of execution."""
        if len(self._steps(rank, tap).get(place[0], ())) < 2:
            if self._inner_calls[0] != (rank, tap):  # one tap's are kept: calls come tap by tap
                by_step: dict[int, list[tuple[str, Mapping[str, Record]]]] = {}
                for child in children:
                    for step, calls in self._steps(rank, child).items():
                        by_step.setdefault(step, []).extend((child, records) for records in calls)
                self._inner_calls = (rank, tap), by_step
            during = self._inner_calls[1].get(place[0], [])
        else:
            during = [(child, records) for child in children for records in self._during(rank, tap, child, place)]
        start = len(_before(tap))
        found = [(child[start:], role, r) for child, records in during for role, r in records.items()
                 if not role.startswith("input.")]  # fmt: skip
        return sorted(found, key=lambda f: f[2].seq)


Outputs = list[tuple[str, str, Record]]
"""(path below a tap, role, record)."""
