"""Tensors that no engine stored, built from some that it did, and relations found from values.

The problem: what one engine computes at one place another computes at three; a residual sum or a split is a line of
Python that no module boundary shows. The idea: a `Derived` record says of which records it is made and how; a `View` is
a dump with such records and makes their values when they are read. `Relations` finds a slice, picked rows, a sum or a
product of earlier tensors: each is exact or rounded once (IEEE 754), so that all bits must agree. Formulas: joining and
adding as numpy does; ``rope`` is x * cos + rotate_half(x) * sin on each head of the size of cos [Su et al., RoFormer,
arXiv 2104.09864, in the half-split form of GPT-NeoX], in float32. Not here: which tensors are wanted (names.py,
topology/data_flow.py, opcheck/proof/explained.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from typing import Any, Protocol

import numpy as np

from vllm_accprobe.align.mapping import CAT, HALVES, ROPE, SUM
from vllm_accprobe.dump.dtypes import DTYPES, put_into, round_to_bfloat16, widen
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.schema import Layout, Payload, Record, Stats

ROWS = 16
"""Rows that are compared (chosen): 16 rows of 64 columns in bfloat16 agree by chance with less than 2**-1000."""
ENOUGH = 32
"""Elements below which bits may agree by chance: not compared (chosen)."""
_NEAR = 12
"""Tensors of one shape whose sums and products are tried: the latest (chosen)."""
LARGEST = 256 << 20
"""Bytes of a tensor that is read (chosen)."""
_FLOATS = {"float32": np.float32, "float16": np.float16, "bfloat16": None}


class TensorLike(Protocol):
    """A tensor at a call. record: None where nothing of it was stored."""

    @property
    def record(self) -> Record | None: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Relation:
    """kind: Slice (columns, see `_cut`), Gather (rows), Add or Mul; takes: names of what it takes."""

    kind: str
    takes: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)


class Relations:
    """The tensors of one dump. rows: how many of each are read and must agree; None: all of them."""

    def __init__(self, dump: Dump, rows: int | None = ROWS):
        self._dump = dump
        self._count = rows
        self._first: dict[str, np.ndarray | None] = {}

    def explain(self, missing: TensorLike, had: Sequence[tuple[str, TensorLike]]) -> Relation | None:
        """How ``missing`` follows from tensors that were there before; the latest are tried first. None where nothing
        fits exactly, or there are no values."""
        wanted = self._rows(missing, self._count)
        if wanted is None or wanted.size < ENOUGH:
            return None
        near = [(name, seen) for name, seen in reversed(had) if seen.dtype == missing.dtype]
        for name, seen in near:
            if seen.shape[:-1] == missing.shape[:-1] and seen.shape[-1:] > missing.shape[-1:]:
                rows = self._begin(name, seen)
                cut = None if rows is None else _cut(rows, wanted)
                if cut is not None:
                    return Relation("Slice", (name,), cut)
            elif seen.shape[1:] == missing.shape[1:] and len(seen.shape) > 1 and seen.shape[0] > missing.shape[0]:
                rows = self._rows(seen, None) if seen.shape[-1] >= ENOUGH else None
                if rows is not None and _picked(rows, wanted):
                    return Relation("Gather", (name,), {"axis": 0, "rows": missing.shape[0]})
        if missing.dtype not in _FLOATS:
            return None
        alike = [(name, seen) for name, seen in near if seen.shape == missing.shape][:_NEAR]
        same = [(name, rows) for name, seen in alike if (rows := self._begin(name, seen)) is not None]
        for (a, x), (b, y) in combinations(same, 2):
            for kind, f in (("Add", np.add), ("Mul", np.multiply)):
                # One row first: most pairs part there.
                if _computes(f, x[:1], y[:1], wanted[:1], missing.dtype, 1) and _computes(
                    f, x, y, wanted, missing.dtype, ENOUGH
                ):
                    return Relation(kind, (b, a))
        return None

    def _begin(self, name: str, seen: TensorLike) -> np.ndarray | None:
        if name not in self._first:
            self._first[name] = self._rows(seen, self._count)
        return self._first[name]

    def _rows(self, seen: TensorLike, most: int | None) -> np.ndarray | None:
        """The first rows' stored bits as a matrix, or all; None where there are no values."""
        r = seen.record
        if r is None or r.payload is None or r.payload.nbytes > LARGEST or not r.shape or not r.shape[-1]:
            return None
        try:
            if most is not None and len(r.shape) > 1 and r.row_dim == 0:
                bits = self._dump.read_rows(r, slice(0, most))
            else:
                bits = self._dump.read(r)
        except (DumpError, OSError):
            return None
        return bits.reshape(-1, r.shape[-1])[:most].copy()


def _picked(whole: np.ndarray, part: np.ndarray) -> bool:
    """Whether each row of ``part`` is one of ``whole``, later ones behind earlier ones."""
    known: dict[bytes, int] = {row.tobytes(): i for i, row in enumerate(whole)}
    places = [known.get(row.tobytes(), -1) for row in part]
    return min(places) >= 0 and all(a < b for a, b in pairwise(places))


def _cut(whole: np.ndarray, part: np.ndarray) -> dict[str, Any] | None:
    """Which columns of ``whole`` are ``part``: of the whole, or of each of so many groups of heads (``groups``), as a
    projection has them that holds a group's queries, key, value and gate side by side. None where there are none."""
    widths = whole.shape[1], part.shape[1]
    if not (whole[0] == part[0, 0]).any():
        return None
    for groups in (n for n in range(1, widths[1] + 1) if not any(width % n for width in widths)):
        of_each = (x.reshape(-1, width // groups) for x, width in zip((whole, part), widths, strict=True))
        at = _offset(*of_each)
        if at is not None:
            found = {"axis": -1, "begin": at, "end": at + widths[1] // groups}
            return found | ({"groups": groups} if groups > 1 else {})
    return None


def _offset(whole: np.ndarray, part: np.ndarray) -> int | None:
    """Where the columns of ``part`` begin in ``whole``; None where they are not in it, or in several places."""
    width = part.shape[1]
    windows = np.lib.stride_tricks.sliding_window_view(whole[0], width)
    hits = [int(i) for i in np.flatnonzero(windows[:, 0] == part[0, 0]) if (whole[:, i : i + width] == part).all()]
    return hits[0] if len(hits) == 1 else None


def _computes(f: np.ufunc, x: np.ndarray, y: np.ndarray, wanted: np.ndarray, dtype: str, enough: int) -> bool:
    """Whether ``f`` of both gives exactly what is wanted. enough: elements of which no side may be zero, for a sum with
    zeros and a product of them tell nothing."""
    with np.errstate(all="ignore"):
        exact = f(widen(x, dtype).astype(np.float64), widen(y, dtype).astype(np.float64))
        want = widen(wanted, dtype).astype(np.float64)
        if dtype == "bfloat16":
            got = widen(round_to_bfloat16(exact.astype(np.float32)), dtype).astype(np.float64)
        else:
            got = exact.astype(_FLOATS[dtype]).astype(np.float64)
        if not np.isfinite(want).all() or not (got == want).all():
            return False
        return enough <= 1 or all(np.count_nonzero(side) >= enough for side in (widen(x, dtype), widen(y, dtype), want))


COMPUTED = -1
"""The segment number of a payload that lies in no file."""


@dataclass(frozen=True, slots=True)
class Derived(Record):
    """A record built from ``parts``. label: its name in its own engine's spelling; rule: which rule made it.

    heads: of one part, the arguments of `by_part`, or for ``halves`` (the two of each pair half a head apart) the size
    of a head; of a rotary embedding the size of a head, and 1 where neighbours are
    turned as pairs; () where that is not known."""

    parts: tuple[Record, ...] = ()
    join: str = CAT
    dim: int = 0
    transpose: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    label: str = ""
    rule: str = ""

    @property
    def name(self) -> str:
        return self.label


def plain(record: Record) -> Record | None:
    """The tensor of the dump that ``record`` is as it is, under whatever name; None where it is made of any."""
    while isinstance(record, Derived):
        if len(record.parts) != 1 or record.transpose or record.heads:
            return None
        record = record.parts[0]
    return record


def with_rows(records: Sequence[Record]) -> list[Record]:
    """``records``, those of heads side by side, [rows x heads, ...], as [rows, heads, ...]. That they are is shown by
    their call: one of its tensors of that length is to the bit one of the same step that has rows."""
    known: dict[tuple[int, int | None, str | None], Record] = {}
    for r in records:
        if r.rows is not None and r.row_dim == 0 and r.hash is not None and r.shape:
            known.setdefault((r.rank, r.step, r.hash), r)
    calls: dict[tuple[int, int | None, str, int, int], Record] = {}
    for r in records:
        like = known.get((r.rank, r.step, r.hash)) if r.rows is None and r.step is not None and r.shape else None
        if like is not None and r.dtype == like.dtype and like.shape[0] and math.prod(r.shape) == math.prod(like.shape):
            calls.setdefault((r.rank, r.step, r.tap, r.call, r.shape[0]), like)
    out: list[Record] = []
    for r in records:
        like = calls.get((r.rank, r.step, r.tap, r.call, r.shape[0])) if r.rows is None and r.shape else None
        if like is None or r.shape[0] <= like.shape[0] or r.shape[0] % like.shape[0]:
            out.append(r)
            continue
        fields = {name: getattr(r, name) for name in Record.__slots__}
        shape = (like.shape[0], r.shape[0] // like.shape[0], *r.shape[1:])
        out.append(Derived(**fields | {"shape": shape, "rows": like.rows, "row_dim": 0}, parts=(r,), label=r.name))
    return out


def spread(records: Iterable[Record]) -> Iterator[Derived]:
    """What `with_rows` made of ``records`` and their parts."""
    for r in records:
        if isinstance(r, Derived):
            if len(r.parts) == 1 and r.parts[0].rows is None and r.rows is not None:
                yield r
            yield from spread(r.parts)


def derive(
    parts: Sequence[Record],
    tap: str,
    role: str,
    *,
    cls: str = "",
    join: str = CAT,
    dim: int | None = None,
    transpose: tuple[int, ...] = (),
    heads: tuple[int, ...] = (),
    rule: str = "",
) -> Derived | str:
    """The record of ``parts``, all of one step, rank and call, or the reason why they cannot be one.

    dim: along which they are joined; None: parameters along 0, others along the last.
    """
    first = parts[0]
    label = _label(parts, join)
    fields = {name: getattr(first, name) for name in Record.__slots__}
    fields |= {"tap": tap, "role": role, "cls": cls or first.cls, "call": first.call}
    if len(parts) == 1 and not transpose and not heads:
        return Derived(**fields, parts=(first,), label=label, rule=rule)
    shape, row_dim, layout = list(first.shape), first.row_dim, first.layout
    dtype: str = first.dtype
    stats, axis = first.stats, 0
    kinds = {DTYPES[p.dtype].kind for p in parts}
    if len(parts) > 1:
        if any((p.rows, p.row_dim) != (first.rows, first.row_dim) for p in parts):
            return "its parts have different rows"
        if join == CAT:
            axis = dim if dim is not None else (0 if role.startswith("param.") else -1)
            if not shape or not -len(shape) <= axis < len(shape):
                return "its parts have no such dimension"
            axis %= len(shape)
            if any(p.dtype != dtype for p in parts):
                return "its parts have different dtypes"
            rest = {(*p.shape[:axis], *p.shape[axis + 1 :]) for p in parts}
            if len(rest) > 1 or any(len(p.shape) != len(shape) for p in parts):
                return "its parts have different shapes"
            shape[axis] = sum(p.shape[axis] for p in parts)
            joined = _layouts(parts, axis)
            if joined is None:
                return "its parts are cut differently over ranks"
            layout, stats = joined, _stats(parts)
        else:
            if kinds != {"float"}:
                return "its parts are not numbers that can be added"
            if join == SUM and any(p.shape != first.shape or p.layout != layout for p in parts):
                return "its parts have different shapes"
            if join == ROPE and (len(parts) != 3 or not _turns(parts, *heads[:1])):
                return "its parts do not make a rotary embedding"
            dtype, stats = "float32", None
    if transpose:
        if sorted(transpose) != list(range(len(shape))):
            return "it has other dimensions than the transpose"
        shape = [shape[i] for i in transpose]
        row_dim = transpose.index(row_dim) if first.rows is not None else row_dim
        if layout.kind == "shard" and layout.dim is not None:
            layout = replace(layout, dim=transpose.index(layout.dim % len(shape)) - len(shape))
    if heads and join == CAT:
        axis = 0 if role.startswith("param.") else -1
        if not shape or shape[axis] % math.prod((heads[0], heads[1] + 2)) or layout.kind == "shard":
            return "it has no whole heads"
    if join == HALVES:
        axis = 0 if role.startswith("param.") else -1
        if not shape or shape[axis] % heads[0] or heads[0] % 2 or layout.kind == "shard":
            return "it has no whole heads"
    stored = all(p.payload is not None for p in parts)
    nbytes = int(np.prod(shape, dtype=np.int64)) * DTYPES[dtype].storage.itemsize
    fields |= {
        "shape": tuple(shape),
        "row_dim": row_dim,
        "layout": layout,
        "dtype": dtype,
        "stats": stats,
        "hash": None,
        "sample": None,
        "rounded": None,
        "payload": Payload(COMPUTED, 0, nbytes) if stored else None,
    }
    fields |= {"join": join, "dim": axis, "transpose": transpose, "heads": heads}
    return Derived(**fields, parts=tuple(parts), label=label, rule=rule)


def _label(parts: Sequence[Record], join: str) -> str:
    """``model.layers.0.self_attn.{q_proj,k_proj,v_proj}/output.0``: in the shortest form."""
    if join == ROPE:
        return f"rope({parts[0].name})"
    if len(parts) == 1:
        return parts[0].name
    sign = "+" if join == SUM else ","
    roles, taps = [p.role for p in parts], [p.tap for p in parts]
    call = f"#{parts[0].call}" if parts[0].call else ""
    if len(set(taps)) == 1:
        return f"{taps[0]}/{sign.join(roles)}{call}"
    heads = {t.rpartition(".")[0] for t in taps}
    if len(set(roles)) == 1 and len(heads) == 1:
        return f"{heads.pop()}.{{{sign.join(t.rpartition('.')[2] for t in taps)}}}/{roles[0]}{call}"
    return sign.join(p.name for p in parts)


def _layouts(parts: Sequence[Record], axis: int) -> Layout | None:
    first = parts[0].layout
    if all(p.layout == first for p in parts) and first.kind == "replicated":
        return first
    places = {(p.layout.kind, p.layout.group, p.layout.index, p.layout.size) for p in parts}
    dims = {None if p.layout.dim is None else p.layout.dim % len(p.shape) for p in parts}
    if len(places) > 1 or first.kind != "shard" or dims != {axis} or any(p.layout.valid is not None for p in parts):
        return first if first.size == 1 and all(p.layout.size == 1 for p in parts) else None
    return replace(first, parts=tuple(b for p in parts for b in p.layout.parts))


def _stats(parts: Sequence[Record]) -> Stats | None:
    found = [p.stats for p in parts if p.stats is not None]
    return join_stats(found) if len(found) == len(parts) else None


def join_stats(found: Sequence[Stats]) -> Stats | None:
    """The statistics of several tensors as one: exact, but for rounding. None where one of them is not whole."""
    counts = [s.count - s.nan - s.inf for s in found]
    total = sum(counts)
    whole = [s for s, n in zip(found, counts, strict=True) if n]
    if any(None in (s.min, s.max, s.mean, s.l2) for s in whole) or not total:
        return None
    mean = sum((s.mean or 0.0) * n for s, n in zip(found, counts, strict=True)) / total
    return Stats(
        sum(s.count for s in found),
        min(s.min for s in whole if s.min is not None),
        max(s.max for s in whole if s.max is not None),
        mean,
        math.hypot(*(s.l2 or 0.0 for s in whole)),
        sum(s.nan for s in found),
        sum(s.inf for s in found),
    )


def _turns(parts: Sequence[Record], head: int = 0) -> bool:
    x, cos, sin = (p.shape for p in parts)
    if not x or len(cos) != 2 or cos != sin or parts[0].row_dim != 0 or x[0] != cos[0] or cos[1] % 2 or not cos[1]:
        return False
    if head and (head < cos[1] or (len(x) > 2 and x[-1] != head)):
        return False
    return int(np.prod(x[1:], dtype=np.int64)) % (head or cos[1]) == 0 and (len(x) == 2 or x[-1] >= cos[1])


class View:
    """A dump with ``records`` in place of its own; everything else is the dump's."""

    def __init__(self, dump: Any, records: list[Record]):
        self._dump = dump
        self.records = records

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dump, name)

    def read(self, record: Record, out: np.ndarray | None = None) -> np.ndarray:
        return read(self._dump, record, out)

    def read_rows(self, record: Record, rows: slice, out: np.ndarray | None = None) -> np.ndarray:
        if record.payload is None or record.payload.seg != COMPUTED:
            return np.asarray(self._dump.read_rows(record, rows, out))
        return put_into(out, read(self._dump, record).reshape(record.shape)[rows], record.name)


def read(dump: Any, record: Record, out: np.ndarray | None = None) -> np.ndarray:
    """The bits of ``record`` from its ``dump``, as dump.reader's ``read`` gives them, also for a `Derived` record."""
    if not isinstance(record, Derived):
        return np.asarray(dump.read(record, out))
    if len(record.parts) == 1 and not record.transpose and not record.heads:
        return read(dump, record.parts[0], out).reshape(record.shape)
    return put_into(out, _make(dump, record), record.name)


def _make(dump: Any, record: Derived) -> np.ndarray:
    arrays = [read(dump, p) for p in record.parts]
    if len(arrays) == 1:
        value = arrays[0]
    elif record.join == CAT:
        value = np.concatenate(arrays, axis=record.dim)
    else:
        floats = [widen(a, p.dtype).astype(np.float32) for a, p in zip(arrays, record.parts, strict=True)]
        turned = record.join == ROPE
        value = rope(floats[0], floats[1], floats[2], *record.heads) if turned else _total(floats)
    if record.heads and record.join == CAT:
        value = by_part(value, record.dim, *record.heads)
    if record.join == HALVES:
        moved = np.moveaxis(value, record.dim, 0)
        pairs = moved.reshape(-1, record.heads[0] // 2, 2, *moved.shape[1:])
        value = np.moveaxis(np.swapaxes(pairs, 1, 2).reshape(moved.shape), 0, record.dim)
    return np.ascontiguousarray(np.transpose(value, record.transpose) if record.transpose else value)


def by_part(value: np.ndarray, axis: int, groups: int, queries: int) -> np.ndarray:
    """``value``, whose axis has for each of ``groups`` that many ``queries``, a key and a value, with all queries
    first, then all keys and all values."""
    moved = np.moveaxis(value, axis, 0)
    heads = moved.reshape(groups, queries + 2, -1, *moved.shape[1:])
    parts = heads[:, :queries], heads[:, queries:-1], heads[:, -1:]
    return np.moveaxis(np.concatenate([p.reshape(-1, *moved.shape[1:]) for p in parts]), 0, axis)


def _total(arrays: Sequence[np.ndarray]) -> np.ndarray:
    total = np.sum([a.astype(np.float64) for a in arrays], axis=0)
    with np.errstate(over="ignore"):
        return np.asarray(total, np.float32)


def rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, head: int = 0, pairs: int = 0) -> np.ndarray:
    """x: float32 [rows, ...] of heads; cos, sin: float32 [rows, d], both halves alike, or neighbours. float32 as x. Of
    heads of more than d the first d are rotated and the rest stays. head: their size; 0 where only a shape [rows,
    heads, size] shows one that is not d. pairs: whether neighbours are turned, where halves are usual; they are, too,
    where they alone are alike in cos and sin (Cohere)."""
    rows, d = cos.shape
    heads = x.reshape(rows, -1, head or (x.shape[-1] if x.ndim > 2 else d))
    halves = all((v[:, : d // 2] == v[:, d // 2 :]).all() for v in (cos, sin))
    if pairs or (not halves and all((v[:, ::2] == v[:, 1::2]).all() for v in (cos, sin))):
        cos, sin = (np.repeat(v[:, : d // 2] if halves else v[:, ::2], 2, axis=1) for v in (cos, sin))
        turned = np.stack([-heads[..., 1:d:2], heads[..., 0:d:2]], axis=-1).reshape(*heads.shape[:2], d)
    else:
        turned = np.concatenate([-heads[..., d // 2 : d], heads[..., : d // 2]], axis=-1)
    whole = np.concatenate([heads[..., :d] * cos[:, None] + turned * sin[:, None], heads[..., d:]], axis=-1)
    return np.asarray(whole, np.float32).reshape(x.shape)
