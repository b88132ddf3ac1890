"""Writes a golden pack: one file of a few megabytes from a dump.

The problem: a golden is gigabytes of somebody's prompts, and the team that needs one has no GPU. The idea: a zip file
whose members are a dump of some rows (rows by rule, ``rows_wanted``), which everything that reads dumps reads, and
sketches of others (sketch.py). What is read once a row (token ids, positions, the sampler's best logits) is there for
all rows; of modules the outer calls come before the inner ones, and all that are there have the same rows. A budget
decides how many; all that is left out is counted. The dump's own words are written
anew from what the reader understood, so that no path, host name or process number gets in. docs/golden.md says what is
in a pack. Not here: reading (pack_sketches.py, formats/io/pack_file.py), the verdict of sketches (estimated.py), which
rows are captured (make.py).
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import time
import zipfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from vllm_accprobe.align.tokens import POSITION_BITS, POSITION_MASK, SideRows, identity
from vllm_accprobe.comparison.measure.read import Loader, Unread
from vllm_accprobe.comparison.plan.make_plan import Plan, make_plan
from vllm_accprobe.comparison.plan.unit import SAMPLER, Group, Key, Unit
from vllm_accprobe.dump.dtypes import DTYPES, rounded_hashes, widen
from vllm_accprobe.dump.files import DumpError, HeaderEntry, build_header
from vllm_accprobe.dump.journal import KINDS, TensorHead, is_operator
from vllm_accprobe.dump.journal_writer import encode
from vllm_accprobe.dump.reader import Dump, open_dump
from vllm_accprobe.dump.schema import (
    DEALT,
    JOURNAL,
    PREFILL,
    ROOT_TAP,
    RUN_JSON,
    SCHEMA,
    TOKENS,
    Masks,
    Record,
    Request,
    RowSpace,
    Segment,
    rank_dir,
    segment_name,
)
from vllm_accprobe.formats.io.pack_file import INDEX, KIND, MANIFEST, MOST, PROMPTS, SKETCHES, VERSION
from vllm_accprobe.golden.sketch import BYTES, KIND as KIND_OF_SKETCH, NUMBERS, ROUNDING, Sketch, signs_of, turned
from vllm_accprobe.whole_file import whole

MB = 1_000_000
VISION = "vision"
"""Begins the name of the rows of images."""
_RANDOM = 3
"""Chosen: random rows of a prompt, and as many of its answer, that are wanted in full."""
_ONCE_A_ROW = 256
"""Chosen: bytes of a row up to which a tensor of the sampler, or integers of the model's root, are kept whole."""
_WIDE = 4
"""Chosen: an outer call whose row is so many times the usual one (logits) waits with the inner calls."""
_LINE = 26
"""Measured: bytes that a tensor's line takes in the packed journal."""
_TRIES, _NEAR = 6, 0.9
"""Chosen: how often a pack is made, until it takes so much of its budget."""
_FULL_ROWS = 2
"""Chosen: rows that must fit before a wider kind of call is kept in full."""
_FEWEST = 16
"""Elements below which a row is no longer than its sketch."""
SKETCH_SHARE = 0.25
"""Chosen: of the budget, what sketches may take."""
IMAGE_SHARE = 0.25
"""Chosen: of what full rows may take, and of what sketches may take, those of images at most."""
BUDGET, NARROW, NO_ROWS, OPERATORS, WEIGHT_ROWS, PARAMETERS, UNREADABLE = (
    "full rows beyond the budget", "sketches of integers, or of rows of fewer than 16 elements",
    "tensors without rows", "tensors of operator calls",
    "which rows of a weight differ", "values of parameters", "tensors whose payload cannot be read",
)  # fmt: skip
SKETCH_BUDGET = "sketches beyond the budget"
CANNOT = (
    "rows that are in no full row and no sketch",
    f"in a sketched row: which elements differ, and errors below {ROUNDING * 1e4:.1f}e-4 of its norm",
    "whether golden computed a row rightly whose inputs it does not hold: such a row is never acquitted",
    "which rows of a weight differ",
)
"""What a pack cannot show, said in its manifest."""


@dataclass(frozen=True)
class RequestShape:
    """What `rows_wanted` must know of one request.

    prompt_len: positions of its prompt. generated: forwards of generated tokens, whose rows lie at positions
    prompt_len .. prompt_len + generated - 1. chunk_ends: last positions of the prefill's chunks, where they are known
    already. prompt: `hash_tokens` of the ids, by which the random rows of each prompt are others; "" is a prompt like
    any other."""

    prompt_len: int
    generated: int = 0
    chunk_ends: tuple[int, ...] = ()
    prompt: str = ""


@dataclass(frozen=True)
class RowChoice:
    """rows: (index of the request, position), the most important first: a budget cuts the end."""

    rows: tuple[tuple[int, int], ...]

    def of(self, request: int) -> tuple[int, ...]:
        """The request's positions, ascending."""
        return tuple(sorted(position for r, position in self.rows if r == request))


@dataclass(frozen=True)
class PackSummary:
    """What `pack` wrote. bytes: of the file; taps: that have a full row or a sketch; rows_full: rows (request or image,
    position) that some module has in full; rows_sketched: rows that have sketches; left_out: reason → how often."""

    bytes: int
    taps: int
    rows_full: int
    rows_sketched: int
    left_out: Mapping[str, int] = field(default_factory=dict)


def rows_wanted(requests: Sequence[RequestShape], seed: int) -> RowChoice:
    """Which rows a pack stores in full: of each request the prompt's last and first, the last and first generated,
    chunk ends, and some random ones by ``seed``. Each next request begins with another kind, so that a small budget
    has rows of all kinds."""
    each = [_wanted(r, seed) for r in requests]
    turned = [w[i % min(3, len(w)) :] + w[: i % min(3, len(w))] if w else [] for i, w in enumerate(each)]
    most = max(map(len, turned), default=0)
    return RowChoice(tuple((i, w[n]) for n in range(most) for i, w in enumerate(turned) if n < len(w)))


def in_turn(lists: Iterable[Sequence[int]]) -> list[int]:
    """The first of each list, then the second of each, and so on."""
    return [key for some in zip_longest(*lists) for key in some if key is not None]


def _wanted(r: RequestShape, seed: int) -> list[int]:
    last, end = r.prompt_len - 1, r.prompt_len + r.generated
    prompt, answer = (by_draw(range(*span), r.prompt, seed) for span in ((0, r.prompt_len), (r.prompt_len, end)))
    wanted = [last, end - 1, 0, *prompt[:1], *answer[:1], *r.chunk_ends, r.prompt_len, *prompt[1:_RANDOM],
              *answer[1:_RANDOM]]  # fmt: skip
    return [p for p in dict.fromkeys(wanted) if 0 <= p < end]


def by_draw(positions: Iterable[int], prompt: str, seed: int) -> list[int]:
    """Positions of a prompt in an order drawn by ``seed``, the same on any machine."""
    draw = {p: hashlib.blake2b(f"{seed}|{prompt}|{p}".encode(), digest_size=8).digest() for p in positions}
    return sorted(draw, key=draw.__getitem__)


def default_bytes(row: int) -> int:
    """The budget for a model of which one row of every tensor has ``row`` bytes: 8 MB where a row has 5.7 MB (7B), 24
    MB where it has 28 MB (70B). chosen: the power between the two, and a quarter of a megabyte at least."""
    return int(min(max(8 * MB * (row / (5.7 * MB)) ** 0.69, MB / 4), 32 * MB))


@dataclass(frozen=True)
class SketchPlace:
    """One tensor's sketches. name: of the matrix; width: of a row; first: of its rows in the file; rows: which list of
    rows."""

    name: str
    width: int
    first: int
    rows: int


def sketched_units(plan: Plan) -> list[tuple[Unit, list[Key]]]:
    """The units, each with the keys that it stands for. Images are sketched by tensor, whatever call they were in: two
    servers need not batch them alike."""
    found: list[tuple[Unit, list[Key]]] = []
    first: dict[tuple[str, str], int] = {}
    for unit in plan.units:
        at = first.setdefault(unit.key[:2], len(found)) if unit.vision else len(found)
        if at == len(found):
            found.append((unit, [unit.key]))
            continue
        of, keys = found[at]
        golden = [*of.golden, *(g for g in unit.golden if g not in of.golden)]
        found[at] = replace(of, golden=golden, mine=[*of.mine, *unit.mine]), [*keys, unit.key]
    return found


def place_name(key: Key) -> str:
    """``tap/role#call``, of golden's names."""
    return f"{key[0]}/{key[1]}#{key[2]}"


def pack(
    dump: Path | Dump, out: Path, *, max_bytes: int | None = None, seed: int = 0, prompts: Path | None = None
) -> PackSummary:
    """Writes the pack ``out`` of the dump at ``dump``. prompts: a text file that goes in as it is.

    Raises DumpError for what is no dump of accprobe's or has no rows, and where ``max_bytes`` is too small for what
    every pack has; OSError."""
    opened = dump if isinstance(dump, Dump) else open_dump(dump)
    packing = _Packing(opened, seed)
    text = _prompts(prompts)
    least = max(default_bytes(packing.row_bytes), packing.fixed_bytes(text) + MB // 2)  # of many prompts, tiny rows
    limit = least if max_bytes is None else max_bytes
    share, data, summary = 1.0, b"", None
    for _ in range(_TRIES):
        members, made = packing.members(int(limit * share), text)
        found = _archive(members)
        if len(data) < len(found) <= limit:
            data, summary = found, made
        if summary is not None and (not made.left_out.get(BUDGET) or _NEAR * limit <= len(data)):
            break
        share *= 0.98 * limit / len(found)
    if summary is None:
        raise DumpError(f"{opened.path}: its pack takes {len(found):,} bytes at least, more than the {limit:,} allowed")
    for name, size in ((name, len(member)) for name, member in members.items()):
        if size > (most := MOST.get(name.rpartition("/")[2], size)):
            raise DumpError(f"{opened.path}: {name} of its pack has {size:,} bytes, more than the {most:,} that a pack "
                            "may have: pack fewer prompts")  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    with whole(out, needed=len(data)) as part:
        part.write_bytes(data)
        part.chmod(0o600)  # it has the prompts' token ids
    return replace(summary, bytes=len(data))


def _prompts(path: Path | None) -> bytes | None:
    if path is None:
        return None
    data = path.read_bytes()
    try:
        data.decode()
    except UnicodeDecodeError:
        raise DumpError(f"{path} is not UTF-8 text: a pack takes prompts as text") from None
    return data


def _archive(members: Mapping[str, bytes]) -> bytes:
    """The zip: the manifest first, by which it is recognised; tensors are stored, text is deflated."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in members.items():
            about = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            about.compress_type = zipfile.ZIP_STORED if name.endswith(".safetensors") else zipfile.ZIP_DEFLATED
            about.external_attr = 0o600 << 16
            archive.writestr(about, data, compresslevel=9)
    return out.getvalue()


def json_bytes(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


_Call = tuple[int, int, str, int]
"""(rank, step, tap, call)."""


@dataclass
class _KeptCall:
    """One call's tensors, and its rows. cost: bytes of one row of what no other tensor of the step has."""

    records: list[Record]
    outer: bool
    cost: int = 0
    rows: set[int] = field(default_factory=set)

    @property
    def vision(self) -> bool:
        return (self.records[0].rows or "").startswith(VISION)


class _Packing:
    """What is known of a dump before a budget is."""

    def __init__(self, dump: Dump, seed: int):
        self.dump, self.seed = dump, seed
        self.plan: Plan = make_plan(dump, dump)
        side = self.plan.tokens.mine
        self.keys = {at: side.of(*at) for at in dump.rows}
        self.requests: list[Request] = [g for g, _, _ in self.plan.requests.pairs]
        self.wanted, self.order = self._order()
        self.wanted_images, self.order_of_images = self._order_of_images()
        if not self.order:
            raise DumpError(f"{dump.path} says of no row whose it is: a pack is made of a dump with rows of requests")
        self.left_out: Counter[str] = Counter()
        self.entire: list[Record] = []
        """What is kept with all of its rows."""
        self.calls: dict[_Call, _KeptCall] = {}
        self._sort_records()

    # --- rows ----------------------------------------------------------------------------------------------------

    def _order(self) -> tuple[list[int], list[int]]:
        """The keys of rows of text: (those that are wanted in full, all that are comparable: the others as they are
        drawn)."""
        there: dict[int, list[int]] = defaultdict(list)
        for (_, _, name), rows in self.keys.items():
            if rows is not None and not name.startswith(VISION):
                for key in rows.keys[rows.keep].tolist():
                    there[key >> POSITION_BITS].append(key & POSITION_MASK)
        ends: dict[tuple[str, str], set[int]] = defaultdict(set)
        for (rank, _, name), space in self.dump.rows.items():
            for s in space.segments if name == TOKENS else ():
                if s.phase == PREFILL and (r := self.dump.requests.get((rank, s.req))) is not None:
                    ends[r.internal_id, r.prompt].add(s.pos + s.n - 1)
        shapes = []
        for i, r in enumerate(self.requests):
            have = set(there.get(i, ()))
            generated = max([p + 1 - r.prompt_len for p in have if p >= r.prompt_len], default=0)
            chunks = tuple(sorted(ends[r.internal_id, r.prompt] - {r.prompt_len - 1}, reverse=True))
            shapes.append(RequestShape(r.prompt_len, generated, chunks, r.prompt))
        wanted = [i << POSITION_BITS | p for i, p in rows_wanted(shapes, self.seed).rows if p in set(there.get(i, ()))]
        drawn = ([i << POSITION_BITS | p for p in by_draw(set(there.get(i, ())), r.prompt, self.seed)]
                 for i, r in enumerate(self.requests))  # fmt: skip
        return wanted, list(dict.fromkeys([*wanted, *in_turn(drawn)]))

    def _order_of_images(self) -> tuple[list[int], list[int]]:
        """As `_order`, of images: of each the first row, the last of each kind of rows (patches, merged ones), and some
        that all kinds have."""
        there: dict[int, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        for (_, _, name), rows in self.keys.items():
            for key in rows.keys[rows.keep].tolist() if rows is not None and name.startswith(VISION) else ():
                there[key >> POSITION_BITS][name.partition(DEALT)[0]].add(key & POSITION_MASK)
        wanted, drawn = [], []
        for image, by in sorted(there.items()):
            every, shared = set().union(*by.values()), set.intersection(*by.values())
            ends = sorted(map(max, by.values()), reverse=True)
            rows_ = [min(every), *ends, *by_draw(shared, "", self.seed)[:_RANDOM]]
            wanted.append([image << POSITION_BITS | p for p in dict.fromkeys(rows_)])
            drawn.append([image << POSITION_BITS | p for p in by_draw(every, "", self.seed)])
        some = in_turn(wanted)
        return some, list(dict.fromkeys([*some, *in_turn(drawn)]))

    # --- tensors -------------------------------------------------------------------------------------------------

    def _sort_records(self) -> None:
        found: dict[_Call, list[Record]] = defaultdict(list)
        for r in self.dump.records:
            if r.step is None:
                self.left_out[PARAMETERS] += r.payload is not None
            elif is_operator(r.tap):
                self.left_out[OPERATORS] += 1
            elif r.payload is None:
                self.left_out[UNREADABLE] += 1
            elif r.rows is None or self.keys.get((r.rank, r.step, r.rows)) is None:
                self.left_out[NO_ROWS] += 1
            elif row_bytes(r) <= _ONCE_A_ROW and is_once_a_row(r):
                self.entire.append(r)
            else:
                found[r.rank, r.step, r.tap, r.call].append(r)
        first: dict[tuple[int, int | None, str], tuple[int, str]] = {}
        for call, records in found.items():
            kept = self.calls[call] = _KeptCall(records, is_outer(call[2]))
            for r in records:
                maker = first.setdefault((r.rank, r.step, r.hash or f"{r.seq}"), (r.seq, r.role))
                kept.cost += row_bytes(r) if maker == (r.seq, r.role) else 0
        self.partly: set[bool] = set()
        """Of text (False) or images (True) some calls have no full row: all rows are then sketched."""
        self.row_bytes = self._row_bytes()
        for vision in (False, True):
            of = [h for h in self.calls.values() if h.vision is vision]
            usual = np.median([h.cost for h in of if h.outer and h.cost] or [0])
            for kept in of:
                kept.outer = kept.outer and bool(kept.cost <= _WIDE * usual)

    def _row_bytes(self) -> int:
        """Of one row of every tensor of text, as many ranks as there are."""
        most: dict[tuple[int, str, int], int] = {}
        for (rank, _, tap, call), kept in self.calls.items():
            if not kept.vision:
                most[rank, tap, call] = max(most.get((rank, tap, call), 0), kept.cost)
        return sum(most.values())

    @cached_property
    def _where(self) -> dict[int, list[_Call]]:
        """Calls by the key of a wanted row that they have."""
        spaces: dict[tuple[int, int, str], list[_Call]] = defaultdict(list)
        for call, kept in self.calls.items():
            spaces[call[0], call[1], kept.records[0].rows or ""].append(call)
        wanted = {*self.wanted, *self.wanted_images}
        found: dict[int, list[_Call]] = defaultdict(list)
        for space, calls in spaces.items():
            rows = self.keys[space]
            assert rows is not None
            for key in rows.keys[rows.keep].tolist():
                if key in wanted:
                    found[key] += calls
        return found

    def _kinds(self, room: int, vision: bool) -> set[str]:
        """The kinds of calls, a tap without its numbers, that are kept in full."""
        cost: Counter[str] = Counter()
        outer: dict[str, bool] = {}
        seen: set[tuple[int, str, int]] = set()
        for (rank, _, tap, call), kept in self.calls.items():
            if (rank, tap, call) not in seen and kept.vision is vision:
                seen.add((rank, tap, call))
                cost[kind_of_tap(tap)] += kept.cost + _LINE * len(kept.records)
                outer[kind_of_tap(tap)] = kept.outer
        return first_kinds(cost, outer, room)

    def _choose(self, room: int) -> set[int]:
        """Puts rows into the calls that `members` writes, at most ``room`` bytes of them; returns the keys of all rows
        that some call has. Images come before text, which would leave nothing."""
        for kept in self.calls.values():
            kept.rows = set()
        self.left_out[BUDGET], self.partly = 0, set()
        full: set[int] = set()
        for vision, wanted, share in ((True, self.wanted_images, IMAGE_SHARE), (False, self.wanted, 1.0)):
            some, spent = self._taken(wanted, int(room * share), vision)
            full |= some
            room -= spent
        return full

    def _taken(self, wanted: list[int], room: int, vision: bool) -> tuple[set[int], int]:
        """(the rows that fit, their bytes). All calls that have any have the same: a judge that sees a module's output
        and not the module's inside in that row would take what came in for what the module did."""
        kinds = self._kinds(room, vision)
        if any(kind_of_tap(tap) not in kinds for (_, _, tap, _), h in self.calls.items() if h.vision is vision):
            self.partly.add(vision)
        full: set[int] = set()
        left = room
        for key in wanted:
            calls = [self.calls[c] for c in self._where[key] if kind_of_tap(c[2]) in kinds]
            cost = sum(h.cost + (0 if h.rows else _LINE * len(h.records)) for h in calls)
            fits = bool(calls) and cost <= left
            self.left_out[BUDGET] += len(self._where[key]) - (len(calls) if fits else 0)
            if fits:
                left -= cost
                full.add(key)
                for kept in calls:
                    kept.rows.add(key)
        return full, room - left

    # --- the file ------------------------------------------------------------------------------------------------

    def _texts(self, prompts: bytes | None) -> dict[str, bytes]:
        return {RUN_JSON: json_bytes(self._run())} | ({PROMPTS: prompts} if prompts is not None else {})

    def fixed_bytes(self, prompts: bytes | None) -> int:
        """What every pack of this dump has, about."""
        journals = (self._journal(rank, [], {}) for rank in self.dump.ranks)
        texts = sum(len(_packed(d)) for d in (*self._texts(prompts).values(), *journals))
        return texts + sum(r.payload.nbytes for r in self.entire if r.payload)

    def members(self, limit: int, prompts: bytes | None) -> tuple[dict[str, bytes], PackSummary]:
        """Name → bytes of what fits into about ``limit`` bytes, and what that is."""
        kept = Counter(self.left_out)
        fixed = self._texts(prompts)
        room = max(limit - self.fixed_bytes(prompts), 0)
        full = self._choose(int(room * (1 - SKETCH_SHARE)))
        sketches = _Sketches(self, int(room * SKETCH_SHARE), full)
        index, numbers = sketches.made()
        taps = {tap for (_, _, tap, _), h in self.calls.items() if h.rows} | sketches.taps
        ranks: dict[str, bytes] = {}
        for rank in self.dump.ranks:
            lines, spaces, data = self._rank(rank, sketches.keys_of)
            ranks[f"{rank_dir(rank)}/{JOURNAL}"] = self._journal(rank, lines, spaces)
            if data:
                entry = [HeaderEntry("rows", "uint8", (len(data),), 0, len(data))]
                header = build_header(entry, len(data), 248)
                ranks[f"{rank_dir(rank)}/{segment_name(0)}"] = len(header).to_bytes(8, "little") + header + data
        members = {**fixed, **ranks, INDEX: json_bytes(index), SKETCHES: numbers}
        left_out = dict(sorted((k, n) for k, n in self.left_out.items() if n))
        self.left_out = kept
        summary = PackSummary(0, len(taps), len(full), len(sketches.rows), left_out)
        return {MANIFEST: json_bytes(self._manifest(members, summary)), **members}, summary

    def _manifest(self, members: Mapping[str, bytes], summary: PackSummary) -> dict[str, Any]:
        run = self._run()
        weights = hashlib.sha256()
        for p in sorted(self.dump.lives.prints, key=lambda p: (p.rank, p.life, p.parameter, p.form)):
            weights.update(f"{p.rank}|{p.parameter}|{p.form}|{p.dtype}|{p.shape}|{p.order}\n".encode())
        return {
            "kind": KIND, "schema": VERSION, "created": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
            "start_time": run.get("start_time"),
            **{key: run.get(key) for key in ("model", "versions", "device", "platform", "engine", "parallel")},
            "weights": weights.hexdigest() if self.dump.lives.prints else None,
            "seed": self.seed,
            "sketch": KIND_OF_SKETCH,
            "taps": summary.taps, "rows_full": summary.rows_full, "rows_sketched": summary.rows_sketched,
            "left_out": dict(summary.left_out), "cannot_show": list(CANNOT),
            "members": {n: {"bytes": len(d), "sha256": hashlib.sha256(d).hexdigest()} for n, d in members.items()},
        }  # fmt: skip

    def _run(self) -> dict[str, Any]:
        """run.json without a path, a host or what a user set for one machine."""
        run = {k: v for k, v in public(self.dump.run).items() if k not in ("probe", "command", "env", "argv")}
        model = run.get("model")
        if isinstance(model, dict) and isinstance(model.get("path"), str):
            run["model"] = model | {"path": Path(model["path"]).name}
        probe = public(self.dump.run.get("probe"))
        known = ("task", "tokens", "steps", "modules", "parts", "graphs", "ops", "weights")
        run["probe"] = {k: probe[k] for k in known if k in probe} if isinstance(probe, dict) else {}
        return {**run, "schema": SCHEMA, "packed": True}

    def _journal(self, rank: int, lines: list[dict[str, Any]], spaces: Mapping[tuple[int, str], RowSpace]) -> bytes:
        """All lines of a rank: what the dump says of the run, row maps, and the tensors' ``lines``."""
        d = self.dump
        start = {k: v for k, v in d.starts.get(rank, {}).items() if k not in ("pid", "host")}
        found: list[dict[str, Any]] = [start or {"event": "start", "schema": SCHEMA, "rank": rank}]

        def of(kind: str, values: Iterable[Any]) -> None:
            found.extend(KINDS[kind].to_line(v) for v in values)

        of("module", d.modules.get(rank, ()))
        of("life", (e for e in d.lives.events if e.rank == rank))
        prints = [p for p in d.lives.prints if p.rank == rank]
        self.left_out[WEIGHT_ROWS] += sum(p.rows is not None for p in prints) if lines else 0
        of("weight", (replace(p, rows=None) for p in prints))
        found += [self._param(r) for r in d.records if r.rank == rank and r.step is None]
        of("request", (r for (on, _), r in d.requests.items() if on == rank))
        of("step", (s for (on, _), s in d.steps.items() if on == rank))
        of("rows", (s for (on, _, _), s in d.rows.items() if on == rank))
        of("rows", spaces.values())
        masks: dict[int, dict[int, Any]] = defaultdict(dict)
        for (on, step, req), mask in d.masks.items():
            if on == rank:
                masks[step][req] = mask
        of("masks", (Masks(step, by) for step, by in masks.items()))
        of("cached", (c for on, c in d.cached if on == rank))
        found += lines
        of("skip", (replace(s, reason=public(s.reason)) for s in d.skips) if rank == min(d.ranks) else ())
        of("end", [replace(e, reason="packed") for on, e in d.ends.items() if on == rank])
        return b"".join(map(encode, found))

    def _param(self, r: Record) -> dict[str, Any]:
        line = TensorHead(r.tap, r.cls, r.role, r.rows, r.row_dim, r.layout.to_event(), False, r.sample, True).line()
        stats = {n: getattr(r.stats, n) for n in r.stats.__slots__} if r.stats is not None else None
        if r.rounded is not None:
            line["rounded"] = r.rounded
        elif r.dtype in ("float32", "float64") and r.payload is not None:
            line["rounded"] = rounded_hashes(self.dump.read(r))
        return line | {"dtype": r.dtype, "shape": list(r.shape), "call": r.call, "seq": r.seq, "hash": r.hash,
                       "stats": stats}  # fmt: skip

    def _rank(
        self, rank: int, sketched: Mapping[tuple[str, str, int], Any]
    ) -> tuple[list[dict[str, Any]], dict[tuple[int, str], RowSpace], bytes]:
        """(lines of tensors, row spaces of chosen rows, their payload)."""
        lines: list[tuple[int, int, dict[str, Any]]] = []
        spaces: dict[tuple[int, str], RowSpace] = {}
        data, placed = bytearray(), dict[str, int]()

        def add(r: Record, payload: bytes | None, rows: str | None, n: int) -> None:
            shape = [n if d == r.row_dim else size for d, size in enumerate(r.shape)]
            head = TensorHead(r.tap, r.cls, r.role, rows, r.row_dim, r.layout.to_event(), r.mutated)
            line = head.line() | {"dtype": r.dtype, "shape": shape, "call": r.call, "seq": r.seq, "step": r.step}
            if payload is not None:
                name = xxhash.xxh3_128_hexdigest(payload)
                if name not in placed:
                    placed[name] = len(data)
                    data.extend(payload)
                line |= {"seg": 0, "off": placed[name], "nbytes": len(payload), "hash": name}
            assert r.step is not None
            lines.append((r.step, r.seq, line))

        for r in self.entire:
            if r.rank == rank:
                add(r, self.dump.read(r).tobytes(), r.rows, r.shape[r.row_dim])
        shown = {(tap, role, call) for (on, _, tap, call), h in self.calls.items() if h.rows for role in _roles(h)}
        for (on, step, _, call), kept in self.calls.items():
            if on != rank:
                continue
            for r in kept.records:
                if kept.rows:
                    assert r.rows is not None
                    keys = self.keys[on, step, r.rows]
                    assert keys is not None
                    at = np.flatnonzero(np.isin(keys.keys, np.fromiter(kept.rows, np.int64)) & keys.keep)
                    if not len(at):
                        continue
                    name = self._space(rank, step, r.rows, at, spaces)
                    add(r, np.take(self.dump.read(r), at, r.row_dim).tobytes(), name, len(at))
                elif (place := (r.tap, r.role, call)) in sketched and place not in shown:
                    shown.add(place)  # so that whoever reads the dump knows of the place
                    add(r, None, r.rows, r.shape[r.row_dim])
        return [line for _, _, line in sorted(lines, key=lambda x: x[:2])], spaces, bytes(data)

    def _space(
        self, rank: int, step: int, name: str, at: np.ndarray, spaces: dict[tuple[int, str], RowSpace]
    ) -> str:  # fmt: skip
        """The name of the space of these rows of another, which is made where there is none: ``tokens/full``. That of
        images keeps its name, and takes the other's place."""
        old = self.dump.rows[rank, step, name]
        if len(at) == old.n:
            return name
        new = name if name.startswith(VISION) else f"{name}/full"
        if (step, new) not in spaces:
            ids = tuple(old.ids[i] for i in at.tolist()) if old.ids else ()
            spaces[step, new] = RowSpace(step, new, old.src_rows, tuple(_picked(old, at)), ids)
        return new


_PART = r"[/\\][^\s/\\'\",;()]+"
_PATH = re.compile(rf"(?<![\w:/\\.])(?:file:/{{0,2}}|~\w*|\.{{1,2}}|[A-Za-z]:)?(?:{_PART})*({_PART})")
_BEGINS = re.compile(r"(?:~\w*|\.{1,2}|[A-Za-z]:)?[/\\]")


def public(value: Any) -> Any:
    """JSON without a model's ``_name_or_path``, without the folders of paths in its texts (``/home/me/adapter`` becomes
    ``adapter``), and with null for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {k: public(v) for k, v in value.items() if k != "_name_or_path"}
    if isinstance(value, (list, tuple)):
        return [public(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if not isinstance(value, str):
        return value
    if _BEGINS.match(value):  # folders may have spaces
        return re.split(r"[/\\]", value.rstrip("/\\"))[-1]
    return _PATH.sub(lambda found: found[1][1:], value)


def _roles(kept: _KeptCall) -> set[str]:
    return {r.role for r in kept.records}


def _packed(data: bytes) -> bytes:
    return zlib.compress(data, 9)


def _picked(space: RowSpace, at: np.ndarray) -> list[Segment]:
    """The segments of the rows ``at`` of a space, ascending."""
    found: list[Segment] = []
    for s, rows in space.stretches():
        for i in at[(at >= rows.start) & (at < rows.stop)].tolist():
            n = i - rows.start
            last = found[-1] if found else None
            if last is not None and (last.req, last.image, last.pos + last.n, last.row + last.n) == (
                s.req, s.image, s.pos + n, s.row + n
            ):  # fmt: skip
                found[-1] = replace(last, n=last.n + 1)
            else:
                drafts = None if s.drafts is None else 0
                found.append(replace(s, pos=s.pos + n, n=1, row=s.row + n, drafts=drafts))
    return found


def is_once_a_row(r: Record) -> bool:
    """Whether a tensor is the sampler's, or holds integers of the model's root: token ids and positions."""
    return r.tap == SAMPLER or (r.tap == ROOT_TAP and DTYPES[r.dtype].kind == "int")


def row_bytes(r: Record) -> int:
    """Of one row of a tensor with rows."""
    return (r.payload.nbytes if r.payload else 0) // max(r.shape[r.row_dim], 1)


def first_kinds(cost: Mapping[str, int], outer: Mapping[str, bool], room: float) -> set[str]:
    """The kinds of calls of which `_FULL_ROWS` rows fit into ``room`` bytes: outer ones first, narrow before wide.
    cost: of a row."""
    found: set[str] = set()
    left = room / _FULL_ROWS
    for kind in sorted(cost, key=lambda k: (not outer[k], cost[k])):
        if cost[kind] <= left:
            left -= cost[kind]
            found.add(kind)
    return found


def kind_of_tap(tap: str) -> str:
    """A tap without its numbers: the same in all layers."""
    return re.sub(r"\d+", "*", tap)


_LAYER = re.compile(r"\.\d+(?:\.|$)")


def is_outer(tap: str) -> bool:
    """Whether a call is of a whole layer, of what a layer calls itself, or of what lies outside of layers."""
    layer = _LAYER.search(tap)
    return layer is None or "." not in tap[layer.end() :]


class _Sketches:
    """Sketches of as many rows as ``room`` bytes allow, of every tensor of floats. Inputs that are an
    earlier output to the bit, in every step, have that output's."""

    def __init__(self, packing: _Packing, room: int, full: set[int]):
        self._packing, self._loader = packing, Loader(packing.dump, 1 << 28)
        self.left_out = packing.left_out
        self._units: list[tuple[Unit, str]] = []
        """(unit, name of its matrix)."""
        made: dict[Any, str] = {}
        for unit, _ in sketched_units(packing.plan):
            first = unit.mine[0].first
            if unit.is_param or is_operator(unit.key[0]) or unit.key[0] in (ROOT_TAP, SAMPLER):
                continue
            groups = [g for g in unit.mine if g.where is not None and g.readable]
            width = np.prod(first.shape, dtype=np.int64) // max(first.shape[unit.mine[0].row_dim], 1) if groups else 0
            if not groups or DTYPES[first.dtype].kind != "float" or width < _FEWEST:
                self.left_out[NARROW] += 1
                continue
            prints = tuple((g.moment, g.fingerprint or id(g)) for g in groups)
            self._units.append((unit, made.setdefault(prints, place_name(unit.key))))
        self.rows: list[int] = []
        self.left_out[SKETCH_BUDGET] = 0
        for vision, every, share in ((True, packing.order_of_images, IMAGE_SHARE), (False, packing.order, 1.0)):
            cost = BYTES * len({name for unit, name in self._units if unit.vision is vision})
            order = [key for key in every if cost and (vision in packing.partly or key not in full)]
            some = order[: int(room * share / max(cost, 1))]
            self.rows += some
            self.left_out[SKETCH_BUDGET] += (len(order) - len(some)) * cost // BYTES
            room -= len(some) * cost
        self.keys_of = {unit.key: None for unit, _ in self._units} if self.rows else {}
        self.taps = {unit.key[0] for unit, _ in self._units} if self.rows else set()

    def made(self) -> tuple[dict[str, Any], bytes]:
        """(the index, the safetensors file). places: place → (matrix's name, width, first row in the file, list of
        rows); requests: [rank, number in its journal]; lists: [first, n] of the file's tensor ``rows``."""
        wanted = np.array(self.rows, np.int64)
        norms, numbers = [np.zeros(0, np.float32)], [np.zeros((0, NUMBERS), np.int16)]
        lists: dict[tuple[int, ...], int] = {}
        by_name: dict[str, SketchPlace] = {}
        places: dict[str, list[Any]] = {}
        full = self._full()
        first = 0
        for unit, name in self._units if len(wanted) else ():
            if name not in by_name:
                found = self._unit(unit, name, wanted[~np.isin(wanted, full[name])])
                if found is None:  # it has no row here, or is in full
                    continue
                keys, sketch, width = found
                norm, number = sketch.packed()
                norms.append(norm)
                numbers.append(number)
                at = lists.setdefault(tuple(keys.tolist()), len(lists))
                by_name[name] = SketchPlace(name, width, first, at)
                first += len(keys)
            p = by_name[name]
            places[place_name(unit.key)] = [p.name, p.width, p.first, p.rows]
        rows: list[tuple[int, int]] = []
        spans = []
        for keys_ in lists:
            spans.append([len(rows), len(keys_)])
            rows += [(k >> POSITION_BITS, k & POSITION_MASK) for k in keys_]
        index = {"places": places, "lists": spans, **self._numbers()}
        data = (np.concatenate(numbers), np.concatenate(norms), np.array(rows, np.int32).reshape(-1, 2))
        return index, _safetensors(dict(zip(("numbers", "norm", "rows"), data, strict=True)))

    def _full(self) -> dict[str, np.ndarray]:
        """By matrix: the keys of rows that all of its places have in full."""
        by_place: dict[tuple[str, int], set[int]] = defaultdict(set)
        for (_, _, tap, call), kept in self._packing.calls.items():
            by_place[tap, call] |= kept.rows
        shared: dict[str, set[int]] = {}
        for unit, name in self._units:
            own = by_place[unit.key[0], unit.key[2]]
            shared[name] = shared[name] & own if name in shared else set(own)
        return {name: np.array(sorted(keys), np.int64) for name, keys in shared.items()}

    def _unit(self, unit: Unit, name: str, wanted: np.ndarray) -> tuple[np.ndarray, Sketch, int] | None:
        kept: dict[int, tuple[float, np.ndarray]] = {}
        signs: dict[int, np.ndarray] = {}

        def signs_for(width: int) -> np.ndarray | None:
            if not signs:
                signs[width] = signs_of(self._packing.seed, name, width)
            return signs.get(width)

        for _, found, some in sketches_of(unit.mine, self._packing.plan.tokens.mine, self._loader, wanted, signs_for):
            if some is None:
                self.left_out[UNREADABLE] += 1
                return None
            kept.update(zip(found.tolist(), zip(some.norm, some.numbers, strict=True), strict=True))
        if not kept:
            return None
        keys = sorted(kept)
        norm = np.array([kept[k][0] for k in keys])
        numbers = np.array([kept[k][1] for k in keys]).reshape(-1, NUMBERS)
        return np.array(keys, np.int64), Sketch(norm, numbers, np.zeros(len(keys))), next(iter(signs))

    def _numbers(self) -> dict[str, list[list[int]]]:
        """By which a reader finds what rows are of: (rank, number) of each request, (rank, number, image) of each
        image."""
        known = {identity(r): at for at, r in sorted(self._packing.dump.requests.items(), reverse=True)}
        first = {subject: (*known[of], k) for (of, k), subject in self._packing.plan.tokens.mine.images.items()}
        return {"requests": [list(known[identity(r)]) for r in self._packing.requests],
                "images": [list(first[subject]) for subject in sorted(first)]}  # fmt: skip


def sketches_of(
    groups: Sequence[Group], side: SideRows, loader: Loader, wanted: np.ndarray,
    signs: Callable[[int], np.ndarray | None],
) -> Iterator[tuple[int, np.ndarray, Sketch | None]]:  # fmt: skip
    """Of each group with rows that are ``wanted``: (its number, the keys of these rows, their sketches; None where its
    payload cannot be read). signs: for a width; None leaves the group out."""
    try:
        for number, group in enumerate(groups):
            there = side.rows.get(group.where) if group.where is not None and group.readable else None
            at = np.zeros(0) if there is None else np.flatnonzero(there.keep & np.isin(there.keys, wanted))
            if there is None or not len(at):
                continue
            keys = there.keys[at]
            try:
                block = loader.load(group)
            except Unread:
                yield number, keys, None
                continue
            matrix = signs(block.data.shape[1])
            if matrix is not None and len(block.data) == len(there.keys):
                rows = turned(widen(block.data[at], block.dtype), keys & POSITION_MASK)
                yield number, keys, Sketch.of(rows, matrix)
    finally:
        loader.forget()


_NAMES = {"int16": "I16", "float32": "F32", "int32": "I32"}


def _safetensors(tensors: Mapping[str, np.ndarray]) -> bytes:
    head: dict[str, Any] = {}
    at = 0
    for name, a in tensors.items():
        head[name] = {"dtype": _NAMES[a.dtype.name], "shape": list(a.shape), "data_offsets": [at, at + a.nbytes]}
        at += a.nbytes
    text = json_bytes(head)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(a.tobytes() for a in tensors.values())
