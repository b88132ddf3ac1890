"""Fused attention of torch_npu in all its layouts and sparse modes, and its gradient.

Which key a query of a fused attention sees: atten_mask, and what sparse_mode and the tokens' windows make of it.

The problem: one argument is a whole mask in some modes and a compressed triangle in others, and then the mode alone
says who sees whom. The idea: a rule per mode, on indices, in parts that fit into memory.
Source: torch_npu's document of npu_fusion_attention, table of sparse_mode, and CANN's of aclnnFlashAttentionScore, for
Sq queries i and Skv keys j: without atten_mask all see all, whatever the mode; 0, 1 and 5: the mask as it is (in mode 0
the band i - pre <= j <= i + next must lie outside of it too); 2: j <= i; 3: j <= i + Skv - Sq; 4: a band from the lower
right corner, i - pre <= j - (Skv - Sq) <= i + next; 6: as 3, or j < prefix; 7 (TND): as 3, the last sample as 4;
8: as 2, the first sample as 4. msprobe's benchmark function has mode 4's band from the upper left, which is the same
for Sq = Skv, and makes masks where none was given.

A fused attention's tensors by sample, whatever their layout, and back.

The problem: query, key and value come as BSH, SBH, BSND, BNSD, or TND with the samples one after another and their
lengths added up. The idea: a list of samples [heads, rows, size], views of what came, and the way back.
Source: torch_npu's document of npu_fusion_attention: input_layout, actual_seq_qlen, actual_seq_kvlen (trailing zeros
stand for samples that take no part).

Fused attention of torch_npu in all its layouts and sparse modes, and its gradient.

Formula: torch_npu's document of npu_fusion_attention: softmax(mask(scale * (pse + q kᵀ))) v, with pse_type 0 of the
second version scale * q kᵀ + pse; scale is 1 unless given (msprobe's benchmark function takes 1 / sqrt(d)); fewer heads
of keys serve several of queries; a sink is one more score a head that has no value; query_rope and key_rope are further
channels. Further outputs: the largest score and the sum of exponentials, eight times each. npu_fusion_attention_grad
gives dq, dk, dv and dpse, by autograd on this formula.
Dropout draws numbers that no dump has: with keep_prob below 1 the largest score and the sum are judged, the rest is
not. Of a query that sees no key the documents give no value: zeros, the mean of v and what it would be without a mask
are all published, and the nearest counts.
Noise: as in torch_attention.py. Scores of some 2**24 elements are held at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from vllm_accprobe.opcheck.reference import ROUNDED, SUM, Declined, Expected
from vllm_accprobe.opcheck.references.fused.fused_calls import RANDOM, Given, fused
from vllm_accprobe.opcheck.references.gradients import derived

COMPRESSED = {2: (2048, 2048), 3: (2048, 2048), 4: (2048, 2048), 6: (3072, 2048), 7: (2048, 2048), 8: (2048, 2048)}
"""The shape of a compressed mask, by mode."""


@dataclass(frozen=True)
class AttentionMasks:
    """mode: sparse_mode; given: atten_mask as bool, None where the rule alone counts; varlen: a TND call; samples: how
    many."""

    mode: int
    given: Any | None
    none: bool
    before: int
    after: int
    prefix: list[int] | None
    varlen: bool
    samples: int

    def rows(self, sample: int, heads: slice, queries: slice, sq: int, skv: int) -> Any | None:
        """bool [1 or heads, queries, skv], True where masked; None where all see all. Raises Declined."""
        if self.none:
            return None
        i = torch.arange(queries.start, queries.stop).unsqueeze(1)
        j = torch.arange(skv).unsqueeze(0)
        if self.given is None:
            return self._ruled(sample, i, j, sq, skv).unsqueeze(0)
        found = self._given(self.given, sample, heads, queries, sq, skv)
        if self.mode == 0 and (self.before < sq or self.after < skv):
            outside = (j < i - self.before) | (j > i + self.after)
            if bool((outside & ~found).any()):
                raise Declined("its atten_mask lets through what pre_tockens and next_tockens leave out: the document "
                               "does not define that")  # fmt: skip
        return found

    def _given(self, mask: Any, sample: int, heads: slice, queries: slice, sq: int, skv: int) -> Any:
        shape = list(mask.shape)
        while mask.dim() < 4:
            mask = mask.unsqueeze(0)
        if self.varlen and mask.shape[-2] >= sq and mask.shape[-1] >= skv:
            mask = mask[..., :sq, :skv]
        if tuple(mask.shape[-2:]) != (sq, skv):
            raise Declined(f"atten_mask {shape} does not fit {sq} queries and {skv} keys")
        part = mask[sample if mask.shape[0] > 1 else 0]
        part = part[heads] if part.shape[0] > 1 else part
        return part[:, queries]

    def _ruled(self, sample: int, i: Any, j: Any, sq: int, skv: int) -> Any:
        shift, mode = skv - sq, self.mode
        if (mode, sample) in ((7, self.samples - 1), (8, 0)):
            mode = 4
        if mode in (2, 8):
            return j > i
        if mode in (3, 7):
            return j > i + shift
        if mode == 4:
            return (j > i + shift + self.after) | (j < i + shift - self.before)
        if self.prefix is None or sample >= len(self.prefix):
            raise Declined("sparse_mode 6 without a prefix for each sample")
        return (j > i + shift) & (j >= self.prefix[sample])


def masks_of(g: Given, names: tuple[str, str], varlen: bool, samples: int) -> AttentionMasks:
    """names: of pre_tockens and next_tockens. Raises Declined."""
    mode, given = int(g.number("sparse_mode")), g["atten_mask"]
    if not 0 <= mode <= 8 or (mode in (7, 8) and not varlen) or (mode == 5 and varlen):
        raise Declined(f"sparse_mode {mode} is not defined for this layout")
    none = given is None
    mask = None if none else g.stored("atten_mask").bool().cpu()
    if mask is not None and mode in COMPRESSED and tuple(mask.shape) == COMPRESSED[mode]:
        triangle = mask[:2048]
        if not torch.equal(triangle, torch.ones_like(triangle).triu(1)):
            raise Declined("its compressed atten_mask is no upper triangle")
        mask = None
    elif mask is not None and mode in (6, 7, 8):
        raise Declined(f"sparse_mode {mode} needs a compressed atten_mask")
    before, after = (int(g.number(n)) for n in names)
    return AttentionMasks(mode, mask, none, before, after, g.integers("prefix"), varlen, samples)


LAYOUTS = ("BSH", "SBH", "BSND", "BNSD", "TND")


@dataclass(frozen=True)
class SampleLengths:
    """Of each sample, its first row and the one past its last, of queries and of keys; TND's only."""

    queries: tuple[tuple[int, int], ...]
    keys: tuple[tuple[int, int], ...]


def lengths_of(g: Given, rows: int, keys: int) -> SampleLengths:
    """Raises Declined."""
    queries, others = g.integers("actual_seq_qlen"), g.integers("actual_seq_kvlen")
    if queries is None or others is None or len(queries) != len(others):
        raise Declined("a TND call without the lengths of its samples")
    return SampleLengths(_runs(queries, rows), _runs(others, keys))


def _runs(ends: Sequence[int], total: int) -> tuple[tuple[int, int], ...]:
    live = list(ends)
    while live and live[-1] == 0:
        live.pop()
    starts = [0, *live[:-1]]
    if any(a > b for a, b in zip(starts, live, strict=True)) or (live and live[-1] > total):
        raise Declined(f"lengths {list(ends)[:8]} do not fit {total} rows")
    return tuple(zip(starts, live, strict=True))


def by_head(x: Any, layout: str, heads: int) -> Any:
    """[B, N, S, D], or of TND [N, T, D]. Raises Declined."""
    dims = 3 if layout in ("BSH", "SBH", "TND") else 4
    if layout not in LAYOUTS or x.dim() != dims:
        raise Declined(f"a tensor {list(x.shape)} in layout {layout!r}")
    if layout in ("BSH", "SBH"):
        x = x if layout == "BSH" else x.transpose(0, 1)
        if not heads or x.shape[-1] % heads:
            raise Declined(f"{heads} heads do not fit a width of {x.shape[-1]}")
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)
    if layout == "BSND":
        return x.transpose(1, 2)
    return x if layout == "BNSD" else x.transpose(0, 1)


def back(samples: Sequence[Any], layout: str, rows: int, lengths: SampleLengths | None) -> Any:
    """[N, S, D] of each sample in the layout of the output; rows of TND that no sample has are 0."""
    if lengths is not None:
        whole = [s.transpose(0, 1) for s in samples]
        missing = rows - sum(len(s) for s in whole)
        if missing:
            whole.append(whole[0].new_zeros(missing, *whole[0].shape[1:]))
        return torch.cat(whole)
    x = torch.stack(list(samples))
    if layout == "BNSD":
        return x
    x = x.transpose(1, 2)
    if layout == "BSND":
        return x
    x = x.flatten(2)
    return x if layout == "BSH" else x.transpose(0, 1)


def heads_of_keys(query: Any, key: Any, layout: str, heads: int) -> int:
    """How many heads keys have. Raises Declined."""
    if layout not in LAYOUTS:
        raise Declined(f"a tensor {list(query.shape)} in layout {layout!r}")
    if layout in ("BSH", "SBH"):
        size = query.shape[-1] // heads if heads else 0
        found = key.shape[-1] // size if size else 0
    else:
        found = key.shape[1 if layout in ("BNSD", "TND") else 2] if key.dim() > 2 else 0
    if not found or heads % found:
        raise Declined(f"{heads} heads of queries do not fit {found} of keys")
    return found


_MOST = 1 << 24
_COPIES = 8
"""Of each largest score and sum."""
_EXP, _COARSE = 2.0**-20, 2.0**-15
"""Relative error of an exponential: in float32, and as kernels for 16 bits take it (attention.py)."""
_FEW = "head_num, input_layout"
_REST = "inner_precise=0, prefix=None, actual_seq_qlen=None, actual_seq_kvlen=None, sparse_mode=0,"
_LAST = "gen_mask_parallel=True, sync=False,"
_TAIL = "softmax_layout='', sink=None, dropout_mask=None, seed=0, offset=0"
_TOKENS, _TOKENS_2 = ("pre_tockens", "next_tockens"), ("pre_tokens", "next_tokens")
_WIDE = ", ".join(f"{n}=2147483647" for n in _TOKENS)
_WIDE_2 = ", ".join(f"{n}=2147483647" for n in _TOKENS_2)


@dataclass(frozen=True)
class _Scores:
    """What one sample's scores are made of. pse: [1 or heads, 1 or queries, keys] or None; sink: [heads] or None."""

    scale: float
    pse: Any | None
    pse_first: bool
    sink: Any | None


def _parts(heads: int, sq: int, skv: int) -> Iterator[tuple[slice, slice]]:
    """(heads, queries) of parts whose scores fit."""
    per_head = max(sq * skv, 1)
    step = max(_MOST // per_head, 1)
    rows = sq if per_head <= _MOST else max(_MOST // max(skv, 1), 1)
    for h in range(0, heads, step):
        for i in range(0, max(sq, 1), max(rows, 1)):
            yield slice(h, min(h + step, heads)), slice(i, min(i + rows, sq))


def _part(q: Any, k: Any, v: Any, pse: Any, sink: Any, scale: float, pse_first: bool, masked: Any) -> tuple[Any, ...]:
    """q [h, n, d], k, v [h, m, d] → what they attend to, weights, largest scores and sums [h, n, 1]."""
    products = q @ k.transpose(-1, -2)
    if pse is not None:
        scores = (products + pse) * scale if pse_first else products * scale + pse
    else:
        scores = products * scale
    plain = scores
    if masked is not None:
        scores = scores.masked_fill(masked, -math.inf)
    largest = scores.detach().amax(-1, keepdim=True)
    if sink is not None:
        largest = torch.maximum(largest, sink.detach().reshape(-1, 1, 1))
    largest = torch.nan_to_num(largest, neginf=0.0)
    e = torch.exp(scores - largest)
    total = e.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink.reshape(-1, 1, 1) - largest)
    p = e / total.clamp(min=torch.finfo(e.dtype).tiny)
    return p @ v, p, largest, total, plain


def _attend(
    q: Any, k: Any, v: Any, s: _Scores, masks: AttentionMasks, sample: int, unit: float, mine: Any | None
) -> tuple[Any, Any | None, Any, Any]:  # fmt: skip
    """(output, its noise [N, Sq, Dv]; largest scores, sums [N, Sq, 1]) of one sample. mine: what was captured of it.
    Without noise where gradients are wanted. Raises Declined."""
    heads, sq, skv = q.shape[0], q.shape[1], k.shape[1]
    wants = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    repeat = heads // max(k.shape[0], 1)
    if not sq or not skv:
        empty = q.new_zeros(heads, sq, 1)
        return v.new_zeros(heads, sq, v.shape[-1]), v.new_zeros(heads, sq, v.shape[-1]), empty, empty
    rows: list[tuple[slice, tuple[Any, ...]]] = []
    for h, i in _parts(heads, sq, skv):
        of_keys = torch.arange(h.start, h.stop) // repeat
        masked = masks.rows(sample, h, i, sq, skv)
        pse = None if s.pse is None else s.pse[h if s.pse.shape[0] > 1 else slice(None)]
        pse = pse if pse is None or pse.shape[1] == 1 else pse[:, i]
        sink = None if s.sink is None else s.sink[h]
        given = q[h, i], k[of_keys], v[of_keys], pse, sink, s.scale, s.pse_first, masked
        seen_by_none = None if masked is None or sink is not None else masked.all(-1, keepdim=True)
        blind = seen_by_none is not None and bool(seen_by_none.any())
        if wants:
            if blind:
                raise Declined("a query that sees no key: its gradient is not in the documents")
            many = heads * sq * skv > _MOST
            out = checkpoint(_part, *given, use_reentrant=False) if many else _part(*given)
            rows.append((h, (out[0], out[0].detach(), out[2], out[3])))
            continue
        y, p, largest, total, plain = _part(*given)
        if blind and mine is not None:
            y = _nearest(y, plain, given[2], seen_by_none, mine[h, i])
        own = ROUNDED * unit
        w = p * p * (own * own)
        spread = w @ (given[2] * given[2]) - 2 * y * (w @ given[2]) + y * y * w.sum(-1, keepdim=True)
        rows.append((h, (y, spread.clamp(min=0.0).sqrt(), largest, total)))
    starts = sorted({h.start for h, _ in rows})
    by_head = [[torch.cat([r[n] for h, r in rows if h.start == start], 1) for start in starts] for n in range(4)]
    return tuple(torch.cat(parts) for parts in by_head)  # type: ignore[return-value]


def _nearest(y: Any, plain: Any, v: Any, blind: Any, mine: Any) -> Any:
    """y, and where a query sees no key the nearest to ``mine`` of what is published for that."""
    every = v.mean(1, keepdim=True).expand_as(y)
    without = torch.softmax(plain, -1) @ v
    choices = torch.stack((torch.zeros_like(y), every, without))
    nearest = (choices - mine).square().sum(-1, keepdim=True).argmin(0, keepdim=True)
    return torch.where(blind, choices.gather(0, nearest.expand(1, *y.shape)).squeeze(0), y)


def _attention(g: Given, tokens: tuple[str, str], second: bool = False) -> dict[str, Expected]:
    layout, heads = str(g["input_layout"]), int(g.number("head_num"))
    query, key, value = (g.tensor(n) for n in ("query", "key", "value"))
    of_keys = heads_of_keys(query, key, layout, heads)
    q, k, v = (by_head(t, layout, n) for t, n in ((query, heads), (key, of_keys), (value, of_keys)))
    if second and g["query_rope"] is not None:
        q = torch.cat((q, by_head(g.tensor("query_rope"), layout, heads)), -1)
        k = torch.cat((k, by_head(g.tensor("key_rope"), layout, of_keys)), -1)
    if q.shape[-1] != k.shape[-1] or k.shape[:-1] != v.shape[:-1] or q.shape[-3] != heads:
        raise Declined("its query, key and value do not fit one another")
    if g["padding_mask"] is not None:
        raise Declined("padding_mask is not in the documents")
    kind = int(g.number("pse_type")) if second else 1
    if g["pse"] is not None and kind not in (0, 1):
        raise Declined(f"pse_type {kind} makes its own positions")
    varlen = layout == "TND"
    lengths = lengths_of(g, q.shape[1], k.shape[1]) if varlen else None
    count = len(q) if lengths is None else len(lengths.queries)
    masks = masks_of(g, tokens, varlen, count)
    sink, dropped = g.maybe("sink"), g.number("keep_prob") < 1.0
    mine = _captured(g, layout, heads)
    found = []
    for b in range(count):
        one = _sample(q, k, v, lengths, b)
        theirs = None if mine is None else mine[b] if lengths is None else mine[:, slice(*lengths.queries[b])]
        s = _Scores(g.number("scale"), _pse(g, b, heads, one[0].shape[1], one[1].shape[1], varlen), kind == 1, sink)
        found.append(_attend(*one, s, masks, b, g.unit("query"), theirs))
    rows = q.shape[-2]
    y, noise = (back([f[n] for f in found], layout, rows, lengths) for n in (0, 1))
    drop = f"{RANDOM}: keep_prob {g.number('keep_prob'):g}" if dropped else ""
    if dropped and y.requires_grad:
        raise Declined(drop)
    expected = {"output.0": Expected(y, noise, groups=1, only_measured=drop)}
    return expected | _statistics(g, q, k, found, lengths, sink)


def _sample(q: Any, k: Any, v: Any, lengths: SampleLengths | None, b: int) -> tuple[Any, Any, Any]:
    if lengths is None:
        return q[b], k[b], v[b]
    keys = slice(*lengths.keys[b])
    return q[:, slice(*lengths.queries[b])], k[:, keys], v[:, keys]


def _captured(g: Given, layout: str, heads: int) -> Any | None:
    """What was captured of the output, by head; None where nothing that fits was."""
    out = g.output(0)
    try:
        return None if out is None else by_head(out, layout, heads)
    except Declined:
        return None


def _pse(g: Given, sample: int, heads: int, sq: int, skv: int, varlen: bool) -> Any | None:
    """[N, 1 or Sq, Skv] of a sample. Raises Declined: compressed, or of a TND call."""
    pse = g.maybe("pse")
    if pse is None:
        return None
    if varlen or pse.dim() != 4 or pse.shape[-1] != skv or pse.shape[-2] not in (1, sq) or pse.shape[1] != heads:
        raise Declined(f"pse {list(pse.shape)} is compressed, or does not fit {sq} queries and {skv} keys")
    return pse[sample if pse.shape[0] > 1 else 0]


def _statistics(
    g: Given, q: Any, k: Any, found: list[tuple[Any, ...]], lengths: SampleLengths | None, sink: Any | None
) -> dict[str, Expected]:  # fmt: skip
    """Largest scores and sums of exponentials, [B, N, Sq, 8], or of a TND call [T, N, 8] where softmax_layout says so.
    With a sink the documents do not say whether it counts."""
    if sink is not None or (lengths is not None and g["softmax_layout"] != "TND"):
        return {}
    unit, scale = g.unit("query"), abs(g.number("scale"))
    size = SUM * q.shape[-1] ** 0.5 * scale * q.detach().norm(dim=-1).amax() * k.detach().norm(dim=-1).amax()
    expected = {}
    for role, n in (("output.1", 2), ("output.2", 3)):
        parts = [f[n].detach().expand(*f[n].shape[:-1], _COPIES) for f in found]
        value = back(parts, "BNSD", q.shape[-2], lengths)
        mine = g.output(n - 1)
        blind = back([f[3].detach() == 0 for f in found], "BNSD", q.shape[-2], lengths).expand(value.shape)
        if mine is not None and mine.shape == value.shape:  # of a query that sees no key
            value = torch.where(blind, mine, value)
        coarse = _COARSE if unit > 2.0**-20 and n == 3 else 0.0
        error = size + _EXP * (1.0 + value.abs()) if n == 2 else value.abs() * (size + _EXP + coarse)
        expected[role] = Expected(value, error, common=coarse, groups=1)
    return expected


@fused(
    f"npu_fusion_attention(query, key, value, {_FEW}, pse=None, padding_mask=None, atten_mask=None, scale=1.0,"
    f"keep_prob=1.0, {_WIDE}, {_REST}{_LAST}{_TAIL}",
    "npu_fusion_attention_v3",
)
def npu_fusion_attention(g: Given) -> dict[str, Expected]:
    return _attention(g, _TOKENS)


@fused(
    f"npu_fusion_attention_v2(query, key, value, {_FEW}, pse=None, padding_mask=None, atten_mask=None, query_rope=None,"
    f"key_rope=None, scale=1.0, keep_prob=1.0, {_WIDE_2}, {_REST}{_LAST}pse_type=1, q_start_idx=None,"
    f"kv_start_idx=None, {_TAIL}"
)
def npu_fusion_attention_v2(g: Given) -> dict[str, Expected]:
    return _attention(g, _TOKENS_2, second=True)


_SAVED = "softmax_max=None, softmax_sum=None, softmax_in=None, attention_in=None,"
_COMMON = (
    "query", "key", "value", "head_num", "input_layout", "pse", "padding_mask", "atten_mask", "keep_prob", "prefix",
    "actual_seq_qlen", "actual_seq_kvlen", "sparse_mode", "sink",
)  # fmt: skip


def _gradient(g: Given, forward: Any, more: tuple[str, ...], wanted: tuple[str, ...]) -> dict[str, Expected]:
    names = {n: n for n in (*_COMMON, *more)} | {"scale": "scale_value"}
    return derived(g, forward, names, "dy", wanted)


@fused(
    f"npu_fusion_attention_grad(query, key, value, dy, {_FEW}, pse=None, padding_mask=None, atten_mask=None, {_SAVED}"
    f"scale_value=1.0, keep_prob=1.0, {_WIDE}, inner_precise=0, seed=0, offset=0, numels=0, prefix=None,"
    f"actual_seq_qlen=None, actual_seq_kvlen=None, sparse_mode=0, {_LAST}softmax_layout='', sink=None",
    "npu_fusion_attention_grad_v3",
    differentiable=False,
)
def npu_fusion_attention_grad(g: Given) -> dict[str, Expected]:
    return _gradient(g, npu_fusion_attention, _TOKENS, ("query", "key", "value", "pse"))


@fused(
    f"npu_fusion_attention_grad_v2(query, key, value, dy, {_FEW}, pse=None, padding_mask=None, atten_mask=None,"
    f"{_SAVED} query_rope=None, key_rope=None, scale_value=1.0, keep_prob=1.0, {_WIDE_2}, inner_precise=0, seed=0,"
    f"offset=0, numels=0, prefix=None, actual_seq_qlen=None, actual_seq_kvlen=None, sparse_mode=0, {_LAST}pse_type=1,"
    "q_start_idx=None, kv_start_idx=None, softmax_layout='', sink=None",
    differentiable=False,
)
def npu_fusion_attention_grad_v2(g: Given) -> dict[str, Expected]:
    wanted = "query", "key", "value", "pse", "query_rope", "key_rope"
    return _gradient(g, npu_fusion_attention_v2, (*_TOKENS_2, "query_rope", "key_rope", "pse_type"), wanted)
