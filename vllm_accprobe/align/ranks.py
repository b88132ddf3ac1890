"""From the ranks' pieces of a tensor to the whole, or the reason why there is none.

The problem: TP=4 and TP=1 hold one tensor in different pieces, some ranks hold copies, and a merged projection is cut
block by block. The idea: a `MergePlan`, made from layouts and shapes alone, says which members are used and how their
blocks follow one another; copies are listed, so that a difference between them is seen. Where it was not recorded how a
merged projection is cut, its name tells: gate_up is two equal blocks; qkv has as many columns of q as the output
projection takes in, the rest half k and half v. Where the numbers do not come out, nothing is guessed. Not here: which
records belong together (comparison/plan/make_plan.py), reading (dump/reader.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vllm_accprobe.dump.record_table import TensorSite
from vllm_accprobe.dump.schema import OWN, Layout, Record

ONE, CAT, SUM = "one", "cat", "sum"
TAKEN_FOR_COPIES = "layout unknown: ranks of one shape"


@dataclass(frozen=True, slots=True)
class RankPiece:
    rank: int
    layout: Layout
    shape: tuple[int, ...]
    dtype: str
    hash: str | None


@dataclass(frozen=True, slots=True)
class MergePlan:
    """kind: one (take the first member of ``use``), cat or sum.

    use: indices of the members that are read, in order of their place in the group. pieces: for cat: (index into use,
    start, stop) along ``dim``, to be put one after the other. copies: groups of members that should be equal, the one
    used first. shape: of the whole. note: what a reader should know. cut: (dim, size) where padding beyond ``size`` was
    left out: the other side may have to be cut there too.
    """

    kind: str
    use: tuple[int, ...]
    shape: tuple[int, ...]
    dim: int | None = None
    pieces: tuple[tuple[int, int, int], ...] = ()
    copies: tuple[tuple[int, ...], ...] = ()
    note: str = ""
    cut: tuple[int, int] | None = None


class Unmergeable(Exception):
    """The pieces do not make a whole; the message is a short stable reason."""


def plan_merge(members: Sequence[RankPiece], other: tuple[int, ...] | None = None) -> MergePlan:
    """How ``members`` make one tensor. other: the shape the other side has, where its ranks were merged or one.

    Raises Unmergeable.
    """
    if not members:
        raise Unmergeable("no rank holds it")
    if len({m.dtype for m in members}) > 1:
        raise Unmergeable("ranks hold different dtypes")
    layouts = [m.layout for m in members]
    kinds = {x.kind for x in layouts}
    if len(kinds) > 1:
        raise Unmergeable("ranks disagree about the layout")
    kind = kinds.pop()
    order = sorted(range(len(members)), key=lambda i: (layouts[i].index, members[i].rank))
    if kind == "replicated":
        first = members[order[0]]
        if any(m.shape != first.shape for m in members):
            raise Unmergeable("ranks hold different shapes of a replicated tensor")
        return MergePlan(ONE, (order[0],), first.shape, copies=(tuple(order),) if len(order) > 1 else ())
    if kind == OWN:
        if len(members) > 1:
            raise Unmergeable("ranks hold images of their own")
        return MergePlan(ONE, (0,), members[0].shape)
    if kind == "unknown":
        return _unknown(members, order, other)
    groups = _by_index(layouts, order)
    if kind == "partial":
        shapes = {m.shape for m in members}
        if len(shapes) > 1:
            raise Unmergeable("ranks hold different shapes of a partial sum")
        use = tuple(g[0] for g in groups)
        return MergePlan(SUM if len(use) > 1 else ONE, use, members[use[0]].shape, copies=_copies(groups))
    if kind == "shard":
        return _sharded(_repeated(members, other), groups)
    raise Unmergeable(f"layout {kind!r} is not known")


def _by_index(layouts: Sequence[Layout], order: Sequence[int]) -> list[list[int]]:
    size = layouts[0].size
    if any(x.size != size for x in layouts):
        raise Unmergeable("ranks disagree about the size of their group")
    groups: list[list[int]] = [[] for _ in range(size)] if 0 < size <= 1 << 20 else []
    for i in order:
        if not 0 <= layouts[i].index < len(groups):
            raise Unmergeable("a rank's place is outside its group")
        groups[layouts[i].index].append(i)
    if not all(groups):
        missing = [str(k) for k, g in enumerate(groups) if not g]
        raise Unmergeable(f"not every rank of the group was captured (missing {', '.join(missing[:4])} of {size})")
    return groups


def _copies(groups: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(g) for g in groups if len(g) > 1)


def _unknown(members: Sequence[RankPiece], order: Sequence[int], other: tuple[int, ...] | None) -> MergePlan:
    first = members[order[0]]
    same_shape = all(m.shape == first.shape for m in members)
    if len(members) == 1 and first.layout.size <= 1:
        return MergePlan(ONE, (order[0],), first.shape)
    if same_shape and first.hash and all(m.hash == first.hash for m in members):
        return MergePlan(ONE, (order[0],), first.shape, note="layout unknown: all ranks hold the same")
    if len(members) < first.layout.size:
        raise Unmergeable("layout unknown and not every rank was captured")
    if same_shape and first.hash is None and first.shape == other:  # values will tell whether these are copies
        return MergePlan(ONE, (order[0],), first.shape, copies=(tuple(order),), note=TAKEN_FOR_COPIES)
    if same_shape and other is not None and len(other) == len(first.shape):
        ratio = [(d, o / n) for d, (n, o) in enumerate(zip(first.shape, other, strict=True)) if n and o != n]
        if len(ratio) == 1 and ratio[0][1] == len(members):
            dim, n = ratio[0][0], first.shape[ratio[0][0]]
            pieces = tuple((k, 0, n) for k in range(len(members)))
            shape = (*first.shape[:dim], n * len(members), *first.shape[dim + 1 :])
            note = f"layout unknown: joined along dim {dim} by shape"
            return MergePlan(CAT, tuple(order), shape, dim, pieces, note=note)
    raise Unmergeable("layout unknown: ranks differ and shapes do not tell how to join them")


def _repeated(members: Sequence[RankPiece], other: tuple[int, ...] | None) -> Sequence[RankPiece]:
    """Heads may be fewer than ranks, and then neighbouring ranks hold the same; where it was not recorded (another
    tool's dump, without hashes), the other side's size tells."""
    first = members[0]
    layout, shape = first.layout, first.shape
    if other is None or first.hash is not None or len(layout.parts) != 1 or layout.parts[0][1] != 1:
        return members
    if layout.dim is None or len(other) != len(shape) or not -len(shape) <= layout.dim < len(shape):
        return members
    whole, wanted = layout.size * shape[layout.dim], other[layout.dim]
    if not wanted or whole % wanted or whole == wanted or layout.size % (whole // wanted):
        return members
    parts = ((layout.parts[0][0], whole // wanted),)
    return [replace(m, layout=replace(m.layout, parts=parts)) for m in members]


def _sharded(members: Sequence[RankPiece], groups: Sequence[Sequence[int]]) -> MergePlan:
    use = tuple(g[0] for g in groups)
    chosen = [members[i] for i in use]
    layout, shape = chosen[0].layout, chosen[0].shape
    if layout.dim is None or not -len(shape) <= layout.dim < len(shape):
        raise Unmergeable("the layout names a dimension that the tensor does not have")
    dim = layout.dim % len(shape)
    pieces: list[tuple[int, int, int]] = []
    copies = list(_copies(groups))
    starts = [0] * len(use)
    blocks = len(layout.parts)
    for m in chosen:
        if len(m.layout.parts) != blocks or sum(n for n, _ in m.layout.parts) != m.shape[dim]:
            raise Unmergeable("the blocks of the layout do not add up to the tensor's size")
        if m.shape[:dim] + m.shape[dim + 1 :] != shape[:dim] + shape[dim + 1 :]:
            raise Unmergeable("ranks hold different shapes")
    for b in range(blocks):
        replicas = layout.parts[b][1]
        if replicas < 1 or len(use) % replicas:
            raise Unmergeable("the number of replicas does not divide the number of ranks")
        for k, m in enumerate(chosen):
            n = m.layout.parts[b][0]
            if k % replicas == 0:
                pieces.append((k, starts[k], starts[k] + n))
            starts[k] += n
    total = sum(stop - start for _, start, stop in pieces)
    cut = None
    if layout.valid is not None and 0 <= layout.valid <= total:
        pieces, total, cut = _cut(pieces, layout.valid), layout.valid, (dim, layout.valid)
    return MergePlan(CAT, use, (*shape[:dim], total, *shape[dim + 1 :]), dim, tuple(pieces), tuple(copies), cut=cut)


def _cut(pieces: Sequence[tuple[int, int, int]], valid: int) -> list[tuple[int, int, int]]:
    """Drops what lies beyond ``valid``: a vocabulary's padding stands at the end of the whole."""
    out, left = [], valid
    for k, start, stop in pieces:
        n = min(stop - start, left)
        if n > 0:
            out.append((k, start, start + n))
        left -= n
    return out


def merge(plan: MergePlan, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The whole, from the arrays of ``plan.use`` in that order. For a sum the arrays are numbers, and it is float64."""
    if plan.kind == ONE:
        return arrays[0]
    if plan.kind == SUM:
        total = arrays[0].astype(np.float64)
        for a in arrays[1:]:
            total += a
        return total
    assert plan.dim is not None
    before = (slice(None),) * plan.dim
    return np.concatenate([arrays[k][(*before, slice(start, stop))] for k, start, stop in plan.pieces], axis=plan.dim)


Parts = tuple[tuple[int, int], ...]
_GATE_UP = re.compile(r"gate_up|gate_and_up|w13|w1_w3", re.I)
_QKV = re.compile(r"qkv|query_key_value|Wqkv", re.I)
_OUT = ("o_proj", "out_proj", "proj", "dense", "wo")
_TAKES_BOTH = re.compile(r"AndMul|SwiGLU|GeGLU|ReGLU|swiglu", re.ASCII)
"""Classes of activations whose input is gate and up."""
APART = "layout unknown: how ranks cut this merged projection is not known"


def _kind(record: Record | TensorSite) -> re.Pattern[str] | None:
    leaf = record.tap.rpartition(".")[2]
    if record.role.startswith("input"):  # what goes into a projection is not what comes out of it
        return _GATE_UP if _TAKES_BOTH.search(record.cls) else None
    return next((kind for kind in (_GATE_UP, _QKV) if kind.search(leaf)), None)


def plan_merged(
    record: Record | TensorSite, members: Sequence[RankPiece], other: tuple[int, ...] | None, widths: Mapping[str, int]
) -> MergePlan | None:
    """How ``members`` of unknown layout make a merged projection of the shape ``other``, blocks in the order of one
    rank; None where they are no such thing. record: one of them. widths: of what each tap takes in on one rank. Raises
    Unmergeable."""
    shape = members[0].shape if members else ()
    if len(members) < 2 or any(m.layout.kind != "unknown" or m.shape != shape for m in members):
        return None
    kind = _kind(record)
    if kind is None or other is None or len(other) != len(shape):
        return None
    dims = [d for d, (n, o) in enumerate(zip(shape, other, strict=True)) if n != o]
    if len(dims) != 1 or other[dims[0]] < shape[dims[0]]:
        return None
    dim, n = dims[0], len(members)
    parts = _parts(record.tap, kind, shape[dim], other[dim], n, widths)
    if parts is None:
        raise Unmergeable(APART)
    ranks = sorted(range(n), key=lambda i: members[i].rank)
    layouts = {i: Layout("shard", index=place, size=n, dim=dim, parts=parts) for place, i in enumerate(ranks)}
    made = plan_merge([replace(m, layout=layouts[i]) for i, m in enumerate(members)])
    return replace(made, note=f"layout unknown: joined along dim {dim} as {len(parts)} merged blocks")


def _parts(
    tap: str, kind: re.Pattern[str], local: int, whole: int, ranks: int, widths: Mapping[str, int]
) -> Parts | None:
    head = tap.rpartition(".")[0]
    if kind is _GATE_UP:
        return ((local // 2, 1), (local // 2, 1)) if local % 2 == 0 and local * ranks == whole else None
    q = next((widths[f"{head}.{o}"] for o in _OUT if f"{head}.{o}" in widths), 0)
    kv = (local - q) // 2
    if not 0 < q < local or (local - q) % 2:
        return None
    rest = whole - ranks * q
    replicas, remainder = divmod(2 * kv * ranks, rest) if rest > 0 else (0, 1)
    return None if remainder or replicas < 1 or ranks % replicas else ((q, 1), (kv, replicas), (kv, replicas))
