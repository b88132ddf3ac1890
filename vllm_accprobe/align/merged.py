"""How a merged projection is cut over ranks, where nobody wrote it down.

The problem: rank 0 of two holds the first half of gate and the first half of up, and joining the ranks' pieces one
behind the other gives neither order that a single rank has. The idea: engines call such layers by what they merge: two
equal blocks in gate_up, and in qkv as many columns of q as the output projection beside it takes in, the rest half k
and half v, each head of which several ranks may hold alike. Where the numbers do not come out, nothing is guessed.
Not here: layouts that were written down (shards.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from vllm_accprobe.align.shards import MergePlan, RankPiece, Unmergeable, plan_merge
from vllm_accprobe.dump.schema import Layout, Record

Parts = tuple[tuple[int, int], ...]
_GATE_UP = re.compile(r"gate_up|gate_and_up|w13|w1_w3", re.I)
_QKV = re.compile(r"qkv|query_key_value|Wqkv", re.I)
_OUT = ("o_proj", "out_proj", "proj", "dense", "wo")
_TAKES_BOTH = re.compile(r"AndMul|SwiGLU|GeGLU|ReGLU|swiglu", re.ASCII)
"""Classes of activations whose input is gate and up."""
APART = "layout unknown: how ranks cut this merged projection cannot be told"


def _kind(record: Record) -> re.Pattern[str] | None:
    leaf = record.tap.rpartition(".")[2]
    if record.role.startswith("input"):  # what goes into a projection is not what comes out of it
        return _GATE_UP if _TAKES_BOTH.search(record.cls) else None
    return next((kind for kind in (_GATE_UP, _QKV) if kind.search(leaf)), None)


def plan_merged(
    record: Record, members: Sequence[RankPiece], other: tuple[int, ...] | None, widths: Mapping[str, int]
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
    replicas, odd = divmod(2 * kv * ranks, rest) if rest > 0 else (0, 1)
    return None if odd or replicas < 1 or ranks % replicas else ((q, 1), (kv, replicas), (kv, replicas))
