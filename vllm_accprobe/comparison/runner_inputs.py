"""What the runner hands to the model, checked by the dump alone: positions and token ids of each row.

The problem: wrong positions or ids go through a model that computes rightly, and the report names the model. The idea:
the row map says which position of which request a row is, the request's line has a hash of its prompt, and the
sampler's token is the next row's id; so each row's position and id are known without a golden. Logits are computed of
rows of the model's output that the runner chooses, and an image's rows of the embeddings are copies of the encoder's
output: a row that is another one's to the bit was chosen wrongly.
Positions of several sections (M-RoPE) follow from the prompt's layout: text counts on, an image of H x W placeholders
is a grid, and text goes on behind its longer side [Qwen2-VL, arXiv 2409.12191, section 2.1]; H x W is the pair that
explains most rows. A rule is only used where it explains rows of this dump: a model that counts otherwise is unchecked,
and is counted as that. What the ledger of states finds in the runner's own tensors (slot mapping, block tables,
lengths) is the runner's, too; what else the runs' ledgers of states have found becomes ``states`` of a comparison
(`states_of`), and a cache that was wrong its first origin.
Not here: how a ledger checks (capture/states/), what is compared with golden's (comparison/verdict/).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, cast

import numpy as np

from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.journal import METADATA, STALE, StateFinding, sentence
from vllm_accprobe.dump.record_table import of_sites
from vllm_accprobe.dump.schema import (
    DECODE,
    LOGITS,
    NAMED_TOKENS,
    REPLICATED,
    ROOT_TAP,
    TOKENS,
    Record,
    Request,
    hash_token_bytes,
)
from vllm_accprobe.judge.origins import ORIGIN_KEYS, OriginEntry

RUNNER = "runner"
"""The cache of a finding of compare.json's ``states`` that is the runner's, and the class of its origin."""
POSITIONS, IDS, LOGITS_ROWS, EMBEDDINGS = "positions", "token ids", "rows of logits", "embeddings of images"
NOT_THE_MODEL = "the runner, not the model"
MOST_ROWS = 1 << 22
"""Rows of a dump whose inputs are read; further ones are counted as unchecked."""
MOST_LOGITS_ROWS = 1 << 16
"""Rows that logits are computed of, which are compared with the model's output; further ones are counted."""
MOST_IMAGES = 256
"""Images of a rank whose embeddings are compared with the encoder's output; further ones are counted."""
MOST_FAULTS = 50
_ROLES = {"input.positions": POSITIONS, "input.position_ids": POSITIONS, "input.input_ids": IDS}
_EMBEDS = "input.inputs_embeds"
_LEAST = 4
"""chosen: rows of one kind that a rule must explain before it is believed: two could agree by chance."""
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
_WRITTEN = "its row is written"
"""How the ledger begins what it says of a slot that the runner computed (capture/states/checks.py)."""


@dataclass(frozen=True)
class RunnerFault:
    """One request's rows that got other inputs than are theirs. kind: POSITIONS or IDS; low, high: first and last of
    these rows, by position; rows: how many; step: of the first; chunk: in words; says: the sentence."""

    kind: str
    rank: int
    tap: str
    role: str
    request: str
    low: int
    high: int
    rows: int
    step: int
    phase: str
    chunk: str
    says: str

    @property
    def cause(self) -> dict[str, Any]:
        """As compare.json's ``origins[].cause``."""
        where = {"request": self.request, "first": self.low, "last": self.high, "rows": self.rows, "step": self.step}
        return {"family": "input", "text": f"the runner: {self.says}", "parameter": where, "residual": 0.0,
                "chance": None}  # fmt: skip

    def finding(self) -> dict[str, Any]:
        """As an entry of compare.json's ``states``, where the runner's findings stand with the caches'."""
        return {"step": self.step, "kind": self.kind, "cache": RUNNER, "group": 0, "layer": self.tap, "layers": 1,
                "request": self.request, "low": self.low, "high": self.high, "role": self.role, "rank": self.rank,
                "phase": self.phase, "rows": self.rows, "sentence": self.says, "both": False,
                "cause": self.cause}  # fmt: skip


@dataclass
class RunnerCheck:
    """faults: the first of each request and kind; checked, unchecked: rows by kind, and why not."""

    faults: list[RunnerFault] = field(default_factory=list)
    checked: Counter[str] = field(default_factory=Counter)
    unchecked: Counter[str] = field(default_factory=Counter)
    fed: bool = False
    """Whether this dump shows that a drawn token is the next row's id."""


def check(dump: Any, fed: bool = False) -> RunnerCheck:
    """All that a dump's own rows say of the runner's inputs. Of another tool's dump, which has no row map, nothing.
    fed: the other dump of a comparison shows that a drawn token is the next row's id."""
    out = RunnerCheck()
    maps = getattr(dump, "rows", None)
    if not isinstance(maps, dict) or not maps:
        return out
    steps = _Steps(dump)
    for rank in sorted({rank for rank, _, _ in maps}):
        out.faults += _positions(dump, rank, steps, out)
        out.faults += _ids(dump, rank, steps, out, fed)
        out.faults += _logits_rows(dump, rank, steps, out)
        out.faults += _embeddings(dump, rank, steps, out)
    out.faults = _once(out.faults)[:MOST_FAULTS]
    return out


def check_both(dumps: tuple[Any, Any]) -> tuple[RunnerCheck, RunnerCheck]:
    """Both sides of a comparison. What one shows of a drawn token holds for the other, whose runner may have fed other
    tokens in most rows."""
    golden, mine = (check(dump) for dump in dumps)
    if golden.fed and not mine.fed:
        mine = check(dumps[1], fed=True)
    elif mine.fed and not golden.fed:
        golden = check(dumps[0], fed=True)
    return golden, mine


def _once(faults: Iterable[RunnerFault]) -> list[RunnerFault]:
    """Each fault of the first rank that shows it: ranks of one replica get the same inputs. The earliest first."""
    seen: dict[tuple[Any, ...], RunnerFault] = {}
    for f in faults:
        seen.setdefault((f.kind, f.request, f.low, f.rows, f.says), f)
    return sorted(seen.values(), key=lambda f: (f.step, f.kind != IDS, f.low))


def chunk_words(number: int, of: int) -> str:
    """``the second chunk``; number: from 0."""
    if of == 1:
        return "the prompt's only chunk"
    return f"the {_ORDINALS[number] if number < len(_ORDINALS) else f'{number + 1}th'} chunk"


def _is_read(r: Any) -> bool:
    """Whether tensors of this site, or this record, are read here."""
    if r.role == "output.0":
        return bool(r.tap == ROOT_TAP or r.rows in (_MERGED, _IMAGES))
    if r.role == "input.hidden_states":
        return bool(r.rows == LOGITS and r.tap.endswith("logits_processor"))
    return r.role in _ROLES or r.role in (_EMBEDS, "output.token")


class _Steps:
    """In which steps each request's rows were computed, by (rank, request)."""

    def __init__(self, dump: Any):
        self._of: dict[tuple[int, int], list[tuple[int, int, int, str]]] = defaultdict(list)
        self.drafts: set[tuple[int, int]] = set()
        self.records: dict[int, list[Record]] = defaultdict(list)
        """By rank, those that are read here: a dump of many ranks is gone through once."""
        for r in of_sites(getattr(dump, "records", ()), _is_read):
            self.records[r.rank].append(r)
        self.embedded = any(r.tap == ROOT_TAP and r.role == _EMBEDS for own in self.records.values() for r in own)
        for (rank, step, space), rows in sorted(dump.rows.items()):
            if space == TOKENS:
                for s in rows.segments:
                    self._of[rank, s.req].append((step, s.pos, s.pos + s.n, s.phase))
                    if s.drafts:
                        self.drafts.add((rank, s.req))

    def place(self, rank: int, req: int, position: int, wanted: int | None = None) -> tuple[int, str, str]:
        """(step, phase, chunk in words) of a row; wanted: the step, the last one by default."""
        runs = self._of[rank, req]
        chunks = [run for run in runs if run[3] != DECODE]
        for step, low, high, phase in reversed(runs):
            if low <= position < high and (wanted is None or wanted == step):
                if phase == DECODE:
                    return step, phase, "in decoding"
                known = sorted({run[0] for run in chunks})
                return step, phase, chunk_words(known.index(step), len(known))
        return -1, "", ""


def _first_records(steps: _Steps, rank: int, kind: str) -> Iterator[Record]:
    """Of each step the record that the model got first, of token rows, whole numbers and with values."""
    first: dict[int, Record] = {}
    for r in steps.records[rank]:
        fits = _ROLES.get(r.role) == kind and r.rows == TOKENS and r.payload is not None
        if fits and r.step is not None and DTYPES[r.dtype].kind in ("int", "uint"):
            best = first.get(r.step)
            if best is None or (r.tap != ROOT_TAP, r.seq) < (best.tap != ROOT_TAP, best.seq):
                first[r.step] = r
    for step in sorted(first):
        yield first[step]


@dataclass
class _Got:
    """One request's rows as the model got them, in the order of the steps. at: positions, int64 [n]; step: int64 [n];
    values: int64 [n, sections]; record: of the first."""

    at: np.ndarray
    step: np.ndarray
    values: np.ndarray
    record: Record


def _got(dump: Any, rank: int, kind: str, steps: _Steps, out: RunnerCheck) -> dict[int, _Got]:
    """By request's number."""
    parts: dict[int, list[tuple[np.ndarray, np.ndarray, np.ndarray, Record]]] = defaultdict(list)
    read = 0
    for record in _first_records(steps, rank, kind):
        space = dump.rows.get((rank, record.step, TOKENS))
        if space is None or len(record.shape) not in (1, 2) or record.row_dim >= len(record.shape):
            continue
        if record.shape[record.row_dim] != space.n or (len(record.shape) == 2 and record.shape[1 - record.row_dim] > 4):
            out.unchecked[f"{kind} of another form"] += space.n
            continue
        read += space.n
        if read > MOST_ROWS:
            out.unchecked[f"{kind} beyond the first {MOST_ROWS:,} rows"] += space.n
            continue
        try:
            values = np.asarray(dump.read(record)).astype(np.int64)
        except (DumpError, OSError):
            out.unchecked[f"{kind} that cannot be read"] += space.n
            continue
        values = values[:, None] if values.ndim == 1 else np.moveaxis(values, record.row_dim, 0)
        for s, at in space.stretches():
            where = np.arange(s.pos, s.pos + s.n)
            parts[s.req].append((where, np.full(s.n, record.step), values[at], record))
    found = {}
    for req, some in parts.items():
        sections = some[0][2].shape[1]
        some = [p for p in some if p[2].shape[1] == sections]
        places, in_steps, values = (np.concatenate([p[i] for p in some]) for i in range(3))
        found[req] = _Got(places, in_steps, values, some[0][3])
    return found


# --- positions -------------------------------------------------------------------------------------------------------


def _positions(dump: Any, rank: int, steps: _Steps, out: RunnerCheck) -> Iterator[RunnerFault]:
    got = _got(dump, rank, POSITIONS, steps, out)
    due: dict[int, np.ndarray] = {}
    for req, one in got.items():
        request = dump.requests.get((rank, req))
        if one.values.shape[1] == 1 or request is None or not request.images:
            due[req] = np.repeat(one.at[:, None], one.values.shape[1], 1)
        else:
            due[req] = layout_positions(one.at, one.values, [(i.pos, i.n) for i in request.images])
    believed = _believed(got, due, dump, rank)
    for req, one in got.items():
        request, expected = dump.requests.get((rank, req)), due[req]
        kind = _kind_of_rule(one, request)
        if kind not in believed or (rank, req) in steps.drafts:
            why = "with drafts" if (rank, req) in steps.drafts else "that this model counts in a way of its own"
            out.unchecked[f"{POSITIONS} {why}"] += len(one.at)
            continue
        known = (expected >= 0).all(1)
        out.checked[POSITIONS] += int(known.sum())
        if not known.all():
            out.unchecked[f"{POSITIONS} behind an image whose grid is not known"] += int((~known).sum())
        wrong = known & (one.values != expected).any(1)
        if wrong.any():
            yield _position_fault(one, expected, wrong, request, rank, req, steps)


def _kind_of_rule(one: _Got, request: Request | None) -> str:
    sections = one.values.shape[1]
    return "one" if sections == 1 else "grid" if request is not None and request.images else "text"


def _believed(got: Mapping[int, _Got], due: Mapping[int, np.ndarray], dump: Any, rank: int) -> set[str]:
    """The rules that explain rows of this dump: half of all, and enough of them."""
    right, of = Counter[str](), Counter[str]()
    whole = Counter[str]()
    for req, one in got.items():
        request = dump.requests.get((rank, req))
        kind = _kind_of_rule(one, request)
        agrees = (one.values == due[req]).all(1)
        right[kind] += int(agrees.sum())
        of[kind] += len(agrees)
        whole[kind] += bool(agrees.all()) and len(agrees) >= _LEAST
    # A rule that explains a whole request, or most rows of all, is how this model counts.
    return {k for k in of if whole[k] or (right[k] >= _LEAST and 2 * right[k] >= of[k])}


def layout_positions(at: np.ndarray, values: np.ndarray, images: Sequence[tuple[int, int]]) -> np.ndarray:
    """M-RoPE positions of the rows at prompt positions ``at`` (int64 [n]), by the prompt's layout: int64 [n, sections].

    values: what the model got, from which only the images' grids are chosen: each image (first placeholder, how many)
    has the grid that explains most rows; -1 where no choice matters to what was captured, but to what follows.
    """
    sections = values.shape[1]
    out = np.full((len(at), sections), -1, np.int64)
    begin, base = 0, 0  # where the stretch of text begins, and the position of its first row
    for n_image, (pos, n) in enumerate(images):
        text = (at >= begin) & (at < pos)
        out[text] = (base + at[text] - begin)[:, None]
        base += pos - begin
        inside = (at >= pos) & (at < pos + n)
        after_end = images[n_image + 1][0] if n_image + 1 < len(images) else None
        after = (at >= pos + n) & ((at < after_end) if after_end is not None else True)
        best = _grid(at, values, pos, n, base, inside, after)
        if best is None:
            return out
        height, width = best
        cell = at[inside] - pos
        out[inside] = _cells(cell, height, width, base, sections)
        base += max(height, width)
        begin = pos + n
    text = at >= begin
    out[text] = (base + at[text] - begin)[:, None]
    return out


def _cells(cell: np.ndarray, height: int, width: int, base: int, sections: int) -> np.ndarray:
    """Positions of an image's placeholders: time, row, column (and further sections as time)."""
    found = np.full((len(cell), sections), base, np.int64)
    found[:, 1] += cell // width
    found[:, 2 % sections] += cell % width
    return found


def _grid(
    at: np.ndarray, values: np.ndarray, pos: int, n: int, base: int, inside: np.ndarray, after: np.ndarray
) -> tuple[int, int] | None:
    """(height, width) of an image of ``n`` placeholders: what explains most rows of it and behind it; of two that
    explain as many, the one whose cells stand in more rows, wherever these are."""
    best, most = None, (0, 0)
    cell, text = at[inside] - pos, at[after] - pos - n
    rows = Counter(map(tuple, values.tolist()))
    for height in (h for h in range(1, n + 1) if n % h == 0):
        width = n // height
        right = int((values[inside] == _cells(cell, height, width, base, values.shape[1])).all(1).sum())
        right += int((values[after] == (base + max(height, width) + text)[:, None]).all(1).sum())
        if right and right >= most[0]:
            cells = map(tuple, _cells(np.arange(n), height, width, base, values.shape[1]).tolist())
            score = right, sum(rows[c] for c in cells)
            if score > most:
                best, most = (height, width), score
    return best


def _position_fault(
    one: _Got, due: np.ndarray, wrong: np.ndarray, request: Request | None, rank: int, req: int, steps: _Steps
) -> RunnerFault:
    i = int(np.flatnonzero(wrong)[0])
    low, step = int(one.at[i]), int(one.step[i])
    same = wrong & (one.step == step)
    _, phase, chunk = steps.place(rank, req, low, step)
    name = request.id if request is not None else str(req)
    more = int(wrong.sum()) - int(same.sum())
    how = _how(one.values[same], due[same], one, due, step)
    if i and int(one.step[i - 1]) != step and int(one.at[i - 1]) + 1 == low:
        how += "; they do not go on where the chunk before ended" if phase != DECODE else ""
    end = int(one.at[same].max())
    rows = f"from row {low} on" if same.sum() > 1 or more else f"in row {low}"
    if same.sum() > 1 and int((one.step == step).sum()) > int(same.sum()) and end < int(one.at[one.step == step].max()):
        rows = f"in rows {low} to {end}"
    says = f"positions of request {name!r} are wrong {rows}, {chunk}: {how}"
    says += f"; {more} more of its rows are wrong in later steps" if more else ""
    return RunnerFault(POSITIONS, rank, one.record.tap, one.record.role, name, low, int(one.at[wrong].max()),
                       int(wrong.sum()), step, phase, chunk, says)  # fmt: skip


def _how(got: np.ndarray, due: np.ndarray, one: _Got, all_due: np.ndarray, step: int) -> str:
    """What these positions are instead: another stretch's of the request, shifted, one number."""
    first = f"{_position_text(got[0])}, where {_position_text(due[0])} is due"
    if len(got) > 1 and (got == got[0]).all():
        return f"all are {_position_text(got[0])}, where {_position_text(due[0])} and on are due"
    order = np.argsort(one.at, kind="stable")
    known, places = all_due[order], one.at[order]
    _, unique = np.unique(places, return_index=True)
    known, places = known[unique], places[unique]
    starts = np.flatnonzero((known == got[0]).all(1))
    for s in starts.tolist():
        if len(got) > 1 and s + len(got) <= len(known) and (known[s : s + len(got)] == got).all():
            return f"they are those of rows {int(places[s])} to {int(places[s + len(got) - 1])} ({first})"
    shift = got - due
    if (shift == shift[0, 0]).all() and shift[0, 0]:
        return f"they are off by {int(shift[0, 0]):+d} ({first})"
    sections = np.flatnonzero((got != due).any(0)).tolist()
    if got.shape[1] > 1 and len(sections) < got.shape[1]:
        return f"section {', '.join(str(s) for s in sections)} alone is off ({first})"
    return first


def _position_text(position: np.ndarray) -> str:
    numbers = sorted(set(position.tolist()))
    return str(numbers[0]) if len(numbers) == 1 else "(" + ", ".join(map(str, position.tolist())) + ")"


# --- token ids -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ids:
    """Token ids of one request's rows, each position once and as it came last. at: positions in rising order; id; step:
    int64 [n] each."""

    at: np.ndarray
    id: np.ndarray
    step: np.ndarray

    @classmethod
    def of(cls, parts: Sequence[tuple[int, np.ndarray, int]]) -> _Ids:
        """parts: (first position, ids, step) in the order of steps."""
        at = np.concatenate([np.arange(first, first + len(ids)) for first, ids, _ in parts])
        ids, steps = np.concatenate([p[1] for p in parts]), np.repeat([p[2] for p in parts], [len(p[1]) for p in parts])
        order = np.argsort(at, kind="stable")
        last = np.append(np.diff(at[order]) != 0, True)
        return cls(*(x[order][last] for x in (at, ids, steps)))

    def prompt(self, n: int) -> np.ndarray | None:
        """The ids of the first ``n`` positions; None where one is missing."""
        whole = len(self.at) >= n and (not n or (self.at[0] == 0 and self.at[n - 1] == n - 1))
        return self.id[:n] if whole else None

    def places(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(where ``positions`` stand, which of them do)."""
        where = np.searchsorted(self.at, positions).clip(max=max(len(self.at) - 1, 0))
        return where, self.at[where] == positions


def _ids(dump: Any, rank: int, steps: _Steps, out: RunnerCheck, fed: bool) -> Iterator[RunnerFault]:
    """Ids of the row map are those of the runner's buffer, which the model reads (or embeds). fed: as check's."""
    parts: dict[int, list[tuple[int, np.ndarray, int]]] = defaultdict(list)
    taken = 0
    for (on, step, space), rows in sorted(dump.rows.items()):
        if on != rank or space != TOKENS or len(rows.ids) != rows.n:
            continue
        taken += rows.n
        if taken > MOST_ROWS:
            out.unchecked[f"{IDS} beyond the first {MOST_ROWS:,} rows"] += rows.n
            continue
        recorded = np.array(rows.ids, np.int64)
        for s, at in rows.stretches():
            if s.n:
                parts[s.req].append((s.pos, recorded[at], step))
    ids = {req: _Ids.of(some) for req, some in parts.items()}
    drawn = _drawn(dump, rank, steps)
    # Hashes, or a sampler's tokens, that agree with no row of this dump are of another kind than those known here.
    by_hash = any(_is_prompt(found, dump.requests.get((rank, req))) for req, found in ids.items())
    wanted = {req: r.sampling for req in ids if (r := dump.requests.get((rank, req))) is not None}
    named = {req for req, sampling in wanted.items() if sampling is not None and NAMED_TOKENS in sampling.also}
    drawn = {req: own for req, own in drawn.items() if req not in named}
    agree, of, explained = _fed(ids, drawn)
    out.fed |= agree >= _LEAST and 2 * agree >= of
    by_sampler = fed or 2 * agree >= of or explained >= max(_LEAST, (of - agree) / 2)
    known = {r.prompt: r.id for (on, _), r in dump.requests.items() if on == rank}
    for req, found in ids.items():
        request = dump.requests.get((rank, req))
        if request is None or (rank, req) in steps.drafts:
            out.unchecked[f"{IDS} with drafts"] += len(found.at)
            continue
        if by_hash:
            yield from _prompt_fault(found, request, rank, req, steps, known, out)
        else:
            out.unchecked[f"{IDS} of prompts, of which no hash is known here"] += len(found.at)
        if by_sampler and req in drawn:
            yield from _drawn_fault(found, drawn[req], request, rank, steps, out)
        elif req in named or req in drawn:
            why = "that a client names" if req in named else "that are not those of the sampler"
            out.unchecked[f"{IDS} {why}"] += int((found.at >= request.prompt_len).sum())


def _fed(ids: Mapping[int, _Ids], drawn: Mapping[int, _Ids]) -> tuple[int, int, int]:
    """(drawn tokens that are the next row's id, of how many, others whose row has an id that a runner may have mistaken
    for it: its request's token before, or one that another request drew in the same step)."""
    agree = of = explained = 0
    in_step: dict[int, set[int]] = defaultdict(set)
    for own in drawn.values():
        for step, token in zip(own.step.tolist(), own.id.tolist(), strict=True):
            in_step[step].add(token)
    for req, own in drawn.items():
        if req not in ids or not len(own.at):
            continue
        where, there = ids[req].places(own.at + 1)
        got = ids[req].id[where]
        stale = np.zeros(len(got), bool)
        for rows, at in ((ids[req], own.at), (own, own.at - 1)):  # what was fed, and what was drawn, the row before
            before, known = rows.places(at)
            stale |= known & (rows.id[before] == got)
        others = np.array([g in in_step[s] for g, s in zip(got.tolist(), own.step.tolist(), strict=True)])
        right = there & (got == own.id)
        agree, of = agree + int(right.sum()), of + int(there.sum())
        explained += int((there & ~right & (stale | others)).sum())
    return agree, of, explained


def _is_prompt(found: _Ids, request: Request | None) -> bool:
    """Whether the ids of a prompt are what its hash says."""
    if request is None or not request.prompt or (mine := found.prompt(request.prompt_len)) is None:
        return False
    return _digest(mine) == request.prompt


def _prompt_fault(
    found: _Ids, request: Request, rank: int, req: int, steps: _Steps, known: Mapping[str, str], out: RunnerCheck,
) -> Iterator[RunnerFault]:  # fmt: skip
    n = request.prompt_len
    mine = found.prompt(n) if request.prompt and n <= MOST_ROWS else None
    if mine is None:
        out.unchecked[f"{IDS} of prompts that are not whole in the dump"] += int((found.at < n).sum())
        return
    digest = _digest(mine)
    out.checked[IDS] += n
    if digest is None or digest == request.prompt:
        return
    if (n and (mine == mine[0]).all()) or steps.embedded:  # a prompt of embeddings is named by them, and has no ids
        out.checked[IDS] -= n
        out.unchecked[f"{IDS} of prompts that may have come as embeddings"] += n
        return
    step, phase, chunk = steps.place(rank, req, 0)
    other = known.get(digest)
    how = f"they are those of request {other!r}" if other else "their hash is not that of its prompt"
    first, where = _first_repeat(mine, found.step[:n])
    if first is not None:
        how, chunk = f"from row {first} on, {steps.place(rank, req, first)[2]}, they repeat rows {where}", ""
    says = f"token ids of request {request.id!r} are not its prompt's: {how}"
    yield RunnerFault(IDS, rank, ROOT_TAP, "input.input_ids", request.id, first or 0, n - 1, n - (first or 0), step,
                      phase, chunk, says)  # fmt: skip


def _first_repeat(mine: np.ndarray, step: np.ndarray) -> tuple[int | None, str]:
    """Where a later chunk begins whose ids are those of an earlier stretch, which it repeats, in words."""
    edges = (np.flatnonzero(np.diff(step)) + 1).tolist()
    for low, high in pairwise([*edges, len(mine)]):
        chunk = mine[low:high]
        if len(chunk) >= _LEAST and np.array_equal(chunk, mine[: len(chunk)]):
            return low, f"0 to {len(chunk) - 1}"
    return None, ""


def _digest(ids: np.ndarray) -> str | None:
    """As `hash_tokens`; None of a number that is no token id."""
    small = ids.astype("<i4")
    return hash_token_bytes(small.tobytes()) if np.array_equal(small, ids) else None


def _drawn(dump: Any, rank: int, steps: _Steps) -> dict[int, _Ids]:
    """By request: the position of the row that drew it, the token, the step."""
    parts: dict[int, list[tuple[int, np.ndarray, int]]] = defaultdict(list)
    for r in steps.records[rank]:
        if r.rank != rank or r.step is None or (r.tap, r.role) != ("sampler", "output.token") or r.payload is None:
            continue
        space = dump.rows.get((rank, r.step, LOGITS))
        if space is None or r.shape != (space.n,):
            continue
        try:
            tokens = np.asarray(dump.read(r)).astype(np.int64)
        except (DumpError, OSError):
            continue
        for s, at in space.stretches():
            if s.n:
                parts[s.req].append((s.pos, tokens[at], r.step))
    return {req: _Ids.of(some) for req, some in parts.items()}


def _drawn_fault(
    found: _Ids, drawn: _Ids, request: Request, rank: int, steps: _Steps, out: RunnerCheck
) -> Iterator[RunnerFault]:
    where, there = found.places(drawn.at + 1)
    there &= (drawn.at + 1 >= request.prompt_len) & (found.step[where] > drawn.step)
    out.checked[IDS] += int(there.sum())
    wrong = np.flatnonzero(there & (found.id[where] != drawn.id))
    if not len(wrong):
        return
    first, row = wrong[0], where[wrong[0]]
    at, got, step = int(found.at[row]), int(found.id[row]), int(found.step[row])
    before, known = drawn.places(np.array([at - 2]))
    stale = ": the token before it" if known[0] and int(drawn.id[before[0]]) == got else ""
    more = f"; {len(wrong) - 1} more of its rows" if len(wrong) > 1 else ""
    says = (f"the token id of request {request.id!r} in row {at}, in decoding, is {got}{stale}, and the sampler "
            f"drew {int(drawn.id[first])}{more}")  # fmt: skip
    yield RunnerFault(IDS, rank, ROOT_TAP, "input.input_ids", request.id, at, int(found.at[where[wrong[-1]]]),
                      len(wrong), step, DECODE, "in decoding", says)  # fmt: skip


# --- rows that logits are computed of --------------------------------------------------------------------------------


def _logits_rows(dump: Any, rank: int, steps: _Steps, out: RunnerCheck) -> Iterator[RunnerFault]:
    """Rows that are equal to no row of the model's output went through something between, and are unchecked."""
    outputs: dict[int, Record] = {}
    chosen: dict[int, Record] = {}
    for r in steps.records[rank]:
        if r.rank != rank or r.step is None or r.payload is None or r.row_dim or r.layout != REPLICATED or r.call:
            continue
        if (r.tap, r.role, r.rows) == (ROOT_TAP, "output.0", TOKENS):
            outputs[r.step] = r
        elif r.rows == LOGITS and r.role == "input.hidden_states" and r.tap.endswith("logits_processor"):
            chosen[r.step] = r
    wrong: dict[int, list[tuple[int, int, tuple[int, int]]]] = defaultdict(list)
    read = 0
    for step in sorted(outputs.keys() & chosen):
        whole, some = outputs[step], chosen[step]
        spaces = [dump.rows.get((rank, step, space)) for space in (TOKENS, LOGITS)]
        claimed = [0 if space is None else sum(s.n for s in space.segments) for space in spaces]
        read += claimed[1]
        if read > MOST_LOGITS_ROWS or claimed[0] > MOST_ROWS:
            out.unchecked[f"{LOGITS_ROWS} beyond the first {MOST_LOGITS_ROWS:,}"] += claimed[1]
            continue
        if len(whole.shape) != 2 or claimed[0] != whole.shape[0] or some.dtype != whole.dtype or (
            some.shape != (claimed[1], whole.shape[-1])
        ):  # fmt: skip
            out.unchecked[f"{LOGITS_ROWS} of another form"] += claimed[1]
            continue
        tokens, logits = ([(s.req, s.pos + k) for s in space.segments for k in range(s.n)] if space is not None else []
                          for space in spaces)  # fmt: skip
        if whole.hash and whole.hash == some.hash and tokens == logits:
            out.checked[LOGITS_ROWS] += len(logits)
        else:
            for (req, at), other in _wrongly_chosen(dump, whole, some, tokens, logits, out):
                wrong[req].append((at, step, other))
    for req, rows in wrong.items():
        at, step, (whose, its) = rows[0]
        name, others = (r.id if (r := dump.requests.get((rank, n))) is not None else str(n) for n in (req, whose))
        _, phase, chunk = steps.place(rank, req, at, step)
        more = f"; {len(rows) - 1} more of its rows" if rows[1:] else ""
        of = "" if whose == req else f" of request {others!r}"
        says = (f"the logits of request {name!r} for row {at}, {chunk}, are computed of the model's output in row "
                f"{its}{of}{more}")  # fmt: skip
        yield RunnerFault(LOGITS_ROWS, rank, chosen[step].tap, chosen[step].role, name, at, rows[-1][0], len(rows),
                          step, phase, chunk, says)  # fmt: skip


def _wrongly_chosen(
    dump: Any, whole: Record, some: Record, tokens: Sequence[tuple[int, int]], logits: Sequence[tuple[int, int]],
    out: RunnerCheck,
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:  # fmt: skip
    """(request and position of a row, those of the row whose output it is)."""
    place = {name: k for k, name in enumerate(tokens)}
    every: np.ndarray | None = None
    try:
        for k, row in enumerate(dump.read(some)):
            at = place.get(logits[k])
            if at is not None and (row == dump.read_rows(whole, slice(at, at + 1))[0]).all():
                out.checked[LOGITS_ROWS] += 1
                continue
            if every is None:
                every = dump.read(whole)
            same = np.flatnonzero((every == row).all(1)) if at is not None else np.empty(0, np.int64)
            if len(same) and (row != row[0]).any():
                out.checked[LOGITS_ROWS] += 1
                yield logits[k], tokens[int(same[0])]
            else:
                out.unchecked[f"{LOGITS_ROWS} that are no row of the model's output"] += 1
    except (DumpError, OSError):
        out.unchecked[f"{LOGITS_ROWS} that cannot be read"] += len(logits)


# --- embeddings of images --------------------------------------------------------------------------------------------


def _embeddings(dump: Any, rank: int, steps: _Steps, out: RunnerCheck) -> Iterator[RunnerFault]:
    """An image is known by its hash: another request with the same one gets the same rows from a cache."""
    encoded = _encoded(dump, rank, steps)
    for r in sorted(steps.records[rank], key=lambda r: (-1 if r.step is None else r.step, r.seq)) if encoded else ():
        if (r.tap, r.role, r.rows) != (ROOT_TAP, _EMBEDS, TOKENS) or r.payload is None or r.step is None:
            continue
        rows = dump.rows.get((rank, r.step, TOKENS))
        for s, at in rows.stretches() if rows is not None and r.shape[:1] == (rows.n,) and not r.row_dim else ():
            request = dump.requests.get((rank, s.req))
            for number, image in enumerate(() if request is None else request.images):
                low, high = max(s.pos, image.pos), min(s.pos + s.n, image.pos + image.n)
                if low >= high:
                    continue
                own = encoded.get(image.hash)
                if own is None or own.form != (image.n, r.shape[1:], r.dtype):
                    out.unchecked[f"{EMBEDDINGS} of another form than the encoder's output"] += high - low
                    continue
                try:
                    got = dump.read_rows(r, slice(at.start + low - s.pos, at.start + high - s.pos))
                    due = own.read(dump, low - image.pos, high - image.pos)
                    wrong = (got != due).any(1)
                    whose, its = _whose(dump, got[wrong], encoded, own) if wrong.any() else (None, {})
                except (DumpError, OSError):
                    out.unchecked[f"{EMBEDDINGS} that cannot be read"] += high - low
                    continue
                lost = int(wrong.sum()) - len(its)
                if lost < high - low:
                    out.checked[EMBEDDINGS] += high - low - lost
                if lost:
                    out.unchecked[f"{EMBEDDINGS} that are no row of the encoder's output"] += lost
                if whose is not None:
                    bad = low + np.flatnonzero(wrong)[list(its)]
                    moved = {int(at) - image.pos - k for at, k in zip(bad, its.values(), strict=True)}
                    _, phase, chunk = steps.place(rank, s.req, int(bad[0]), r.step)
                    other = dump.requests.get((rank, whose.req))
                    of = "" if whose.req == s.req else f" of request {other.id if other else whose.req!r}"
                    what = f"not those of its image {number} but those of image {whose.image}{of}"
                    if whose is own and len(moved) == 1:
                        what = f"those of its image {number}, moved by {moved.pop():+d} rows"
                    rows_of = f"the embeddings of request {request.id!r} in rows {bad[0]} to {bad[-1]}, {chunk}"
                    yield RunnerFault(EMBEDDINGS, rank, ROOT_TAP, r.role, request.id, int(bad[0]), int(bad[-1]),
                                      len(bad), r.step, phase, chunk, f"{rows_of}, are {what}")  # fmt: skip


@dataclass(frozen=True)
class _Encoded:
    """Rows [first, first + n) of an encoder's output, or of its image ``first``: one image of a request."""

    record: Record
    first: int
    n: int
    req: int
    image: int

    @property
    def form(self) -> tuple[int, tuple[int, ...], str]:
        return self.n, self.record.shape[1 + self.apart :], self.record.dtype

    @property
    def apart(self) -> bool:
        """Whether each image has its rows in a dimension of its own: [images, n, ...]."""
        return self.record.rows == _IMAGES

    def read(self, dump: Any, start: int, stop: int) -> np.ndarray:
        if self.apart:
            return np.asarray(dump.read_rows(self.record, slice(self.first, self.first + 1))[0][start:stop])
        found: np.ndarray = dump.read_rows(self.record, slice(self.first + start, self.first + stop))
        return found


def _encoded(dump: Any, rank: int, steps: _Steps) -> dict[str, _Encoded]:
    """The encoder's output by hash of the image: of the tap that stands outermost."""
    best: dict[int, Record] = {}
    for r in steps.records[rank]:
        place = r.rows == _MERGED or (r.rows == _IMAGES and len(r.shape) > 2)
        fits = place and (r.rank, r.role, r.row_dim) == (rank, "output.0", 0) and r.payload is not None
        if fits and r.step is not None and (r.step not in best or _depth(r) > _depth(best[r.step])):
            best[r.step] = r
    found: dict[str, _Encoded] = {}
    for step, r in best.items():
        rows = dump.rows.get((rank, step, r.rows))
        for s, at in rows.stretches() if rows is not None and r.shape[:1] == (rows.n,) else ():
            request = dump.requests.get((rank, s.req))
            known = request is not None and s.image is not None and s.image < len(request.images)
            if known and s.pos == 0 and len(found) < MOST_IMAGES:
                n = r.shape[1] if r.rows == _IMAGES else s.n
                found.setdefault(request.images[s.image].hash, _Encoded(r, at.start, n, s.req, s.image))
    return found


_MERGED, _IMAGES = "vision/1", "vision/image"
"""The spaces of an encoder's rows that are one for each placeholder, and one for each image."""


def _depth(r: Record) -> tuple[int, int]:
    return -r.tap.count("."), r.seq


def _whose(
    dump: Any, rows: np.ndarray, encoded: Mapping[str, _Encoded], own: _Encoded
) -> tuple[_Encoded | None, dict[int, int]]:  # fmt: skip
    """The image that most of ``rows`` [n, width] are of, the own one first, and the number in it of each that is."""
    best: tuple[_Encoded | None, dict[int, int]] = (None, {})
    for one in (own, *(e for e in encoded.values() if e is not own)):
        its = one.read(dump, 0, one.n)
        if rows.shape[1:] == its.shape[1:] and rows.dtype == its.dtype:
            known = {row.tobytes(): k for k, row in enumerate(its) if (row != row[0]).any()}
            found = {k: n for k, row in enumerate(rows) if (n := known.get(row.tobytes())) is not None}
            best = (one, found) if len(found) > len(best[1]) else best
    return best


# --- what the ledger and a golden say --------------------------------------------------------------------------------


def is_runners(found: StateFinding) -> bool:
    """Whether a finding of the ledger is a number that the runner computed, not what lies in a cache."""
    return found.kind == METADATA or (found.kind == STALE and found.how.startswith(_WRITTEN))


def ledger_sentence(dump: Any, rank: int, found: StateFinding, text: str) -> str:
    """``said``, the ledger's own sentence, with the chunk where its rows are known."""
    numbers = [req for (on, req), r in dump.requests.items() if on == rank and r.id == found.request]
    if found.low is None or len(numbers) != 1:
        return text
    steps = _Steps(dump)
    chunk = steps.place(rank, numbers[0], found.high if found.high is not None else found.low, found.step)[2]
    return f"{text} ({chunk})" if chunk else text


_INPUTS = re.compile(r"^(?:.*/)?input\.(positions|position_ids|input_ids)$")


def is_input(origin: OriginEntry) -> bool:
    """Whether an origin of a comparison is what the runner hands to the model."""
    return origin.get("module") == ROOT_TAP and _INPUTS.match(str(origin.get("role"))) is not None


def is_explained(origin: OriginEntry, finding: Mapping[str, Any]) -> bool:
    """Whether an origin of a comparison is what the runner's own finding says: other inputs, or rows of logits."""
    roles = finding["role"], f"{finding['module']}/{finding['role']}"
    return is_input(origin) or (origin.get("module") == ROOT_TAP and origin.get("role") in roles)


def with_inputs(origins: Iterable[OriginEntry], chunk: Callable[[str, int], str]) -> list[OriginEntry]:
    """``origins`` with those that are the model's inputs as the runner's. chunk: of a request's position, in words."""
    out: list[OriginEntry] = []
    for origin in origins:
        if is_input(origin) and not origin.get("gap"):
            request, position = origin["request"], origin["position"]
            origin = with_cause(origin, "" if request is None or position is None else chunk(request, position))
        out.append(origin)
    return out


def with_cause(origin: OriginEntry, chunk: str) -> OriginEntry:
    """``origin``, a root input that differs from golden's, with the runner as its cause. chunk: of its first row."""
    match = _INPUTS.match(str(origin.get("role")))
    assert match is not None
    what = IDS if match[1] == "input_ids" else POSITIONS
    where = f"from row {origin['position']} on" if (origin.get("rows") or 0) > 1 else f"in row {origin['position']}"
    of = f" of request {origin['request']!r}" if origin.get("request") else ""
    text = f"the runner: {what}{of} are not golden's {where}" if of else f"the runner: {what} are not golden's"
    text += f", {chunk}" if chunk and of else ""
    parameter = {"request": origin.get("request"), "first": origin.get("position"), "rows": origin.get("rows")}
    cause = {"family": "input", "text": text, "parameter": parameter, "residual": 0.0, "chance": None}
    return {**origin, "class": RUNNER, "cause": cause}


SIDES = ("golden", "mine")
MOST = 100
"""Findings of a side that the result keeps; the number of all is there."""
NOT_THE_KERNEL = "the cache, not the kernel"


CACHE = "cache"
"""The role of an origin that is a cache, not an operator."""
OWNERS = "owners"
"""The mode of the ledger that a capture has by default."""
_CLASSES = {"kv": "KV cache", "state": "state cache"}


def states_of(dumps: tuple[Any, Any]) -> dict[str, dict[str, Any]]:
    """compare.json's ``states``: by side, empty where a run kept no ledger: {"watched": the ledger's totals by rank,
    "count": findings in all, "findings": [each one's fields, its rank, its sentence, and "both": the other run has
    the same]}."""
    out: dict[str, dict[str, Any]] = {}
    inputs = [found.faults for found in check_both(dumps)]
    known = [{_key(dump, one) for one in getattr(dump, "states", [])} for dump in dumps]
    for side, dump, others, own, theirs in zip(SIDES, dumps, reversed(known), inputs, reversed(inputs), strict=True):
        totals = getattr(dump, "state_totals", {})
        found = getattr(dump, "states", [])
        if not totals and not found and not own:
            out[side] = {}
            continue
        same = [_key(dump, one) in others for one in found]
        listed = [
            {**asdict(one), "rank": rank, "sentence": sentence(one), "both": both} | _of_runner(dump, rank, one)
            for (rank, one), both in sorted(zip(found, same, strict=True), key=lambda f: f[1])[:MOST]
        ]
        listed = [*(f.finding() | {"both": f in theirs} for f in own), *listed]
        count = max(sum(one.findings for one in totals.values()), len(found))
        watched = {str(rank): asdict(one) for rank, one in totals.items()}
        out[side] = {"watched": watched, "count": count - sum(same) + sum(f not in theirs for f in own),
                     "findings": listed}  # fmt: skip
    return out


def _of_runner(dump: Any, rank: int, found: StateFinding) -> dict[str, Any]:
    """What a finding of the ledger says more where its numbers are the runner's."""
    if not is_runners(found):
        return {}
    text = ledger_sentence(dump, rank, found, sentence(found))
    parameter = {"request": found.request, "first": found.low, "last": found.high, "step": found.step}
    cause = {"family": "input", "text": f"the runner: {text}", "parameter": parameter, "residual": 0.0, "chance": None}
    return {"sentence": text, "cause": cause}


def whose(found: Mapping[str, Any]) -> str:
    """``the cache, not the kernel``, or whose fault a finding is."""
    return NOT_THE_MODEL if found.get("cause") else NOT_THE_KERNEL


def _key(dump: Any, found: tuple[int, StateFinding]) -> tuple[Any, ...]:
    """What must be the same for two runs' findings to be one: the kind, who reads, where, and who wrote. Blocks have
    other numbers in each run."""
    rank, one = found
    names = {r.id: (r.prompt, r.adapter or "", r.ordinal) for (on, _), r in dump.requests.items() if on == rank}
    who = [names.get(name, name) for name in (one.request, one.writer)]
    return one.kind, one.cache, one.layer, one.part, one.low, one.high, *who


def watched(states: Mapping[str, Any], side: str) -> dict[str, Any]:
    """The totals, by rank, of a ledger that somebody requested; empty for the one that each capture has, which alone is
    no comparison."""
    found = (states.get(side) or {}).get("watched") or {}
    return {rank: one for rank, one in found.items() if one.get("mode") != OWNERS}


def findings(states: Mapping[str, Any], side: str) -> list[dict[str, Any]]:
    return [one for one in _all(states, side) if not one.get("both")]


def _all(states: Mapping[str, Any], side: str) -> list[dict[str, Any]]:
    return list((states.get(side) or {}).get("findings") or ())


def cache_origin(states: Mapping[str, Any]) -> OriginEntry | None:
    """compare.json's entry of the origin that mine's first finding is: the cache of the first layer that shows it."""
    found = findings(states, "mine")
    if not found:
        return None
    one = found[0]
    low, high = one.get("low"), one.get("high")
    return cast("OriginEntry", dict.fromkeys(ORIGIN_KEYS) | {
        "module": one.get("layer") or one.get("first") or f"cache group {one.get('group')}",
        "class": RUNNER if one.get("cause") else _CLASSES.get(str(one.get("cache")), "cache"),
        "role": one.get("role") or CACHE,
        "request": one.get("request") or None,
        "position": low,
        "phase": one.get("phase"),
        "evidence": "values",
        "rows": one.get("rows") or (0 if low is None or high is None else high - low + 1),
        "nonfinite": 0,
        "shape": str(one.get("sentence") or ""),
        "setting": "",
        "cause": one.get("cause"),
    })


def is_cache(origin: OriginEntry) -> bool:
    """Whether an origin is a finding of a run's own: of its ledger, or of what its runner handed to the model."""
    return origin.get("role") == CACHE or (origin.get("class") == RUNNER and origin.get("created") is None)


_STEPS = {
    "fp8": "2**-4 of each number", "fp8_e4m3": "2**-4 of each number", "fp8_inc": "2**-4 of each number",
    "fp8_per_token_head": "2**-4 of each number", "fp8_e5m2": "2**-3 of each number",
    "int8": "half a scale", "int8_per_token_head": "1/254 of the largest number of a token's head",
}  # fmt: skip
"""By format of a cache: half a step, which is what its rounding costs at most. Derived: 2**-(bits of mantissa + 1);
0.5 of 127 codes."""


def cache_notes(dumps: tuple[Any, Any]) -> list[str]:
    """What is reported where the two runs keep keys and values in other formats: attention differs by that alone."""
    kinds = []
    for dump in dumps:
        attrs = [m.attrs for modules in getattr(dump, "modules", {}).values() for m in modules]
        found = {str(a.get("impl.kv_cache_dtype") or a.get("kv_cache_dtype") or "") for a in attrs} - {""}
        kinds.append(sorted(found))
    golden, mine = kinds
    eight = [kind for kind in (*golden, *mine) if kind in _STEPS]
    if golden == mine or not golden or not mine or not eight:
        return []
    cost = "; ".join(f"{kind} rounds by up to {_STEPS[kind]}" for kind in dict.fromkeys(eight))
    return [f"golden's cache is {', '.join(golden)}, mine's {', '.join(mine)}: attention differs by that alone "
            f"({cost}); how much that is, and whether a wrong state is beside it, a replay says"]  # fmt: skip


def notes(states: Mapping[str, Any]) -> list[str]:
    """What is reported before the verdict: a golden with a wrong cache is none, and what both runs do is no
    difference."""
    found = findings(states, "golden")
    what = "RUNNER" if found and found[0].get("cause") else "OWN CACHE"
    lines = [f"GOLDEN'S {what} WAS WRONG: {found[0]['sentence']}; take another golden"] if found else []
    if both := [one for one in _all(states, "mine") if one.get("both")]:
        more = f" (and {len(both) - 1} more)" if len(both) > 1 else ""
        of = "runner" if both[0].get("cause") else "cache"
        lines.append(f"in both runs, and so no difference between them: the {of}: {both[0]['sentence']}{more}")
    return lines
