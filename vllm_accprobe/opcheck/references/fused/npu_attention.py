"""Fused attention of torch_npu in all its layouts and sparse modes, and its gradient.

Formula: attention.py's, softmax(mask(scale * (pse + q kᵀ))) v, with pse_type 0 of the second version scale * q kᵀ +
pse; scale is 1 where it is missing; query_rope and key_rope are further channels [torch_npu's document of
npu_fusion_attention; msprobe's benchmark function takes 1 / sqrt(d)]. Further outputs: the largest score and the sum of
exponentials, eight times each. The gradient gives dq, dk, dv and dpse, by autograd on this formula. Dropout draws
numbers that no dump has: with keep_prob below 1 the largest score and the sum are judged, the rest is not. Of a query
that sees no key the documents give no value: zeros, the mean of v and the output without a mask are all published, and
the nearest counts. Layouts: BSH, SBH, BSND, BNSD, or TND with the samples one after another and their lengths added up
(trailing zeros stand for samples that take no part). Masks: `AttentionMasks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Declined, Expected, decline_if
from vllm_accprobe.opcheck.references.attention import COARSE, EXP, attend, score_sums
from vllm_accprobe.opcheck.references.fused.fused_calls import RANDOM, FusedArguments, backward, fused
from vllm_accprobe.opcheck.roundings import SUM

COMPRESSED = {2: (2048, 2048), 3: (2048, 2048), 4: (2048, 2048), 6: (3072, 2048), 7: (2048, 2048), 8: (2048, 2048)}
"""The shape of a compressed mask, by mode."""


@dataclass(frozen=True)
class AttentionMasks:
    """Which key a query sees: atten_mask, and what sparse_mode and the tokens' windows make of it [torch_npu's document
    of npu_fusion_attention, table of sparse_mode, and CANN's of aclnnFlashAttentionScore]. For Sq queries i and Skv
    keys j: without atten_mask all see all, whatever the mode; 0, 1 and 5: the mask as it is (in mode 0 the band i - pre
    <= j <= i + next must lie outside of it too); 2: j <= i; 3: j <= i + Skv - Sq; 4: a band from the lower right
    corner, i - pre <= j - (Skv - Sq) <= i + next; 6: as 3, or j < prefix; 7 (TND): as 3, the last sample as 4; 8: as 2,
    the first sample as 4.

    mode: sparse_mode; mask: atten_mask as bool, None where the rule alone counts; none: there is no mask; before,
    after: pre_tockens and next_tockens; varlen: a TND call; samples: how many."""

    mode: int
    mask: Any | None
    none: bool
    before: int
    after: int
    prefix: list[int] | None
    varlen: bool
    samples: int

    def of(self, sample: int, sq: int, skv: int) -> Any | None:
        """bool [1 or heads, queries, keys], True where masked; None where all see all. Raises Declined."""
        if self.none:
            return None
        i, j = torch.arange(sq).unsqueeze(1), torch.arange(skv).unsqueeze(0)
        if self.mask is None:
            return self._ruled(sample, i, j, sq, skv).unsqueeze(0)
        found = self._as_captured(self.mask, sample, sq, skv)
        if self.mode == 0 and (self.before < sq or self.after < skv):
            outside = (j < i - self.before) | (j > i + self.after)
            if bool((outside & ~found).any()):
                raise Declined("its atten_mask lets through what pre_tockens and next_tockens leave out: the document "
                               "does not define that")  # fmt: skip
        return found

    def _as_captured(self, mask: Any, sample: int, sq: int, skv: int) -> Any:
        shape = list(mask.shape)
        while mask.dim() < 4:
            mask = mask.unsqueeze(0)
        if self.varlen and mask.shape[-2] >= sq and mask.shape[-1] >= skv:
            mask = mask[..., :sq, :skv]
        decline_if(tuple(mask.shape[-2:]) != (sq, skv), f"atten_mask {shape} does not fit {sq} queries and {skv} keys")
        return mask[sample if mask.shape[0] > 1 else 0]

    def _ruled(self, sample: int, i: Any, j: Any, sq: int, skv: int) -> Any:
        mode = 4 if (self.mode, sample) in ((7, self.samples - 1), (8, 0)) else self.mode
        last = i if mode in (2, 8) else i + skv - sq
        if mode == 4:
            return (j > last + self.after) | (j < last - self.before)
        if mode != 6:
            return j > last
        if self.prefix is None or sample >= len(self.prefix):
            raise Declined("sparse_mode 6 without a prefix for each sample")
        return (j > last) & (j >= self.prefix[sample])


def masks_of(g: FusedArguments, names: tuple[str, str], varlen: bool, samples: int) -> AttentionMasks:
    """names: of pre_tockens and next_tockens. Raises Declined."""
    mode, none = int(g.number("sparse_mode")), g["atten_mask"] is None
    if not 0 <= mode <= 8 or (mode in (7, 8) and not varlen) or (mode == 5 and varlen):
        raise Declined(f"sparse_mode {mode} is not defined for this layout")
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


LAYOUTS = {"BSH": (0, 1, 2, 3), "SBH": (1, 0, 2, 3), "BSND": (0, 1, 2, 3), "BNSD": (0, 2, 1, 3), "TND": (0, 1, 2)}
"""Which dimensions, once H is cut into N and D, make [B, S, N, D], and backwards; of TND [T, N, D]."""
_JOINED = ("BSH", "SBH")


Runs = list[tuple[int, int]]
"""Of each sample of TND, its first row and the one past its last."""
SampleLengths = tuple[Runs, Runs]
"""Of queries and of keys."""


def _runs(ends: Sequence[int], total: int) -> Runs:
    live = list(ends)
    while live and live[-1] == 0:
        live.pop()
    starts = [0, *live[:-1]]
    if any(a > b for a, b in zip(starts, live, strict=True)) or (live and live[-1] > total):
        raise Declined(f"lengths {list(ends)[:8]} do not fit {total} rows")
    return [*zip(starts, live, strict=True)]


def by_token(x: Any, layout: str, heads: int) -> Any:
    """[B, S, N, D], or of TND [T, N, D]. Raises Declined."""
    joined = layout in _JOINED
    if layout not in LAYOUTS or x.dim() + joined != len(LAYOUTS[layout]):
        raise Declined(f"a tensor {list(x.shape)} in layout {layout!r}")
    decline_if(joined and (not heads or x.shape[-1] % heads), f"{heads} heads do not fit a width of {x.shape[-1]}")
    return (x.unflatten(-1, (heads, -1)) if joined else x).permute(LAYOUTS[layout])


def back(samples: Sequence[Any], layout: str, rows: int, lengths: SampleLengths | None) -> Any:
    """[S, N, D] of each sample in the layout of the output; rows of TND that no sample has are 0."""
    if lengths is not None:
        missing = rows - sum(len(s) for s in samples)
        return torch.cat([*samples, samples[0].new_zeros(missing, *samples[0].shape[1:])])
    x = torch.stack(list(samples)).permute(LAYOUTS[layout])
    return x.flatten(2) if layout in _JOINED else x


def heads_of_keys(query: Any, key: Any, layout: str, heads: int) -> int:
    """How many heads keys have. Raises Declined."""
    decline_if(layout not in LAYOUTS, f"a tensor {list(query.shape)} in layout {layout!r}")
    if layout in _JOINED:
        size = query.shape[-1] // heads if heads else 0
        found = key.shape[-1] // size if size else 0
    else:
        found = key.shape[1 if layout in ("BNSD", "TND") else 2] if key.dim() > 2 else 0
    decline_if(not found or heads % found, f"{heads} heads of queries do not fit {found} of keys")
    return found


_COPIES = 8
"""Of each largest score and sum."""
_FEW = "head_num, input_layout"
_REST = "inner_precise=0, prefix=None, actual_seq_qlen=None, actual_seq_kvlen=None, sparse_mode=0,"
_LAST = "gen_mask_parallel=True, sync=False,"
_TAIL = "softmax_layout='', sink=None, dropout_mask=None, seed=0, offset=0"
_TOKENS, _TOKENS_2 = ("pre_tockens", "next_tockens"), ("pre_tokens", "next_tokens")
_WIDE = ", ".join(f"{n}=2147483647" for n in _TOKENS)
_WIDE_2 = ", ".join(f"{n}=2147483647" for n in _TOKENS_2)


@dataclass(frozen=True)
class _Sample:
    """One sample: q [Sq, N, D], k, v [Skv, Nk, ...]; added to scores, masked: [1 or N, Sq, Skv] or None; sink: [N]."""

    q: Any
    k: Any
    v: Any
    scale: float
    added: Any | None
    masked: Any | None
    sink: Any | None

    def attended(self, unit: float, mine: Any | None) -> tuple[Any, Any]:
        """(output, noise) [Sq, N, Dv], no noise for gradients. mine: what was captured of it. Raises Declined."""
        n, heads = self.q.shape[:2]
        if not n or not len(self.k):
            return (self.v.new_zeros(n, heads, self.v.shape[-1]),) * 2
        y, noise = self._attend(unit, self.masked)
        if self.masked is None or self.sink is not None:
            return y, noise
        blind = self.masked.all(-1).T.unsqueeze(-1)
        if not bool(blind.any()):
            return y, noise
        decline_if(y.requires_grad, "a query that sees no key: its gradient is not in the documents")
        if mine is not None:
            every = self.v.mean(0, keepdim=True).repeat_interleave(heads // self.v.shape[1], 1).expand_as(y)
            choices = torch.stack((torch.zeros_like(y), every, self._attend(unit, None)[0]))
            nearest = (choices - mine).square().sum(-1, keepdim=True).argmin(0, keepdim=True)
            y = torch.where(blind, choices.gather(0, nearest.expand(1, *y.shape)).squeeze(0), y)
        return y, noise

    def _attend(self, unit: float, hidden: Any | None) -> tuple[Any, Any]:
        more: Any = {"hidden": hidden, "added": self.added, "sinks": self.sink}
        return attend(self.q, self.k, self.v, self.scale, step=unit, **more)[:2]

    def sums(self) -> list[Any]:
        """Largest scores, and sums of exponentials, [Sq, N, 1]."""
        if not len(self.q) or not len(self.k):
            return [self.q.new_zeros(*self.q.shape[:2], 1)] * 2
        added = None if self.added is None else self.added.detach()
        q, k = self.q.detach(), self.k.detach()
        found = score_sums(q, k, self.scale, hidden=self.masked, added=added, sinks=self.sink)
        return [t.T.unsqueeze(-1) for t in found[:2]]


def _attention(g: FusedArguments, tokens: tuple[str, str], second: bool = False) -> dict[str, Expected]:
    layout, heads = str(g["input_layout"]), int(g.number("head_num"))
    query, key, value = (g.tensor(n) for n in ("query", "key", "value"))
    of_keys = heads_of_keys(query, key, layout, heads)
    q, k, v = (by_token(t, layout, n) for t, n in ((query, heads), (key, of_keys), (value, of_keys)))
    if second and g["query_rope"] is not None:
        q = torch.cat((q, by_token(g.tensor("query_rope"), layout, heads)), -1)
        k = torch.cat((k, by_token(g.tensor("key_rope"), layout, of_keys)), -1)
    if q.shape[-1] != k.shape[-1] or k.shape[:-1] != v.shape[:-1] or q.shape[-2] != heads:
        raise Declined("its query, key and value do not fit one another")
    decline_if(g["padding_mask"] is not None, "padding_mask is not in the documents")
    kind = int(g.number("pse_type")) if second else 1
    decline_if(g["pse"] is not None and kind not in (0, 1), f"pse_type {kind} makes its own positions")
    varlen, lengths = layout == "TND", None
    if varlen:
        queries, others = g.integers("actual_seq_qlen"), g.integers("actual_seq_kvlen")
        if queries is None or others is None or len(queries) != len(others):
            raise Declined("a TND call without the lengths of its samples")
        lengths = _runs(queries, len(q)), _runs(others, len(k))
    count = len(q) if lengths is None else len(lengths[0])
    masks = masks_of(g, tokens, varlen, count)
    sink, dropped, scale, mine = g.maybe("sink"), g.number("keep_prob") < 1.0, g.number("scale"), g.output(0)
    try:
        mine = None if mine is None else by_token(mine, layout, heads)
    except Declined:
        mine = None
    found, parts = [], []
    for b in range(count):
        rows, keys = (b, b) if lengths is None else (slice(*side[b]) for side in lengths)
        one = q[rows], k[keys], v[keys]
        sizes = len(one[0]), len(one[1])
        added, masked = _pse(g, b, heads, *sizes, varlen), masks.of(b, *sizes)
        added = added if added is None or kind != 1 else added * scale
        found.append(_Sample(*one, scale, added, None if masked is None else masked.to(q.device), sink))
        parts.append(found[-1].attended(g.unit("query"), None if mine is None else mine[rows]))
    y, noise = (back([p[n] for p in parts], layout, q.shape[-3], lengths) for n in (0, 1))
    drop = f"{RANDOM}: keep_prob {g.number('keep_prob'):g}" if dropped else ""
    decline_if(dropped and y.requires_grad, drop)
    expected = {"output.0": Expected(y, noise, groups=1, only_measured=drop)}
    return expected | _statistics(g, q, k, found, lengths, sink)


def _pse(g: FusedArguments, sample: int, heads: int, sq: int, skv: int, varlen: bool) -> Any | None:
    """[N, 1 or Sq, Skv] of a sample. Raises Declined: compressed, or of a TND call."""
    pse = g.maybe("pse")
    if pse is None:
        return None
    if varlen or pse.dim() != 4 or pse.shape[-1] != skv or pse.shape[-2] not in (1, sq) or pse.shape[1] != heads:
        raise Declined(f"pse {list(pse.shape)} is compressed, or does not fit {sq} queries and {skv} keys")
    return pse[sample if pse.shape[0] > 1 else 0]


def _statistics(
    g: FusedArguments, q: Any, k: Any, samples: list[_Sample], lengths: SampleLengths | None, sink: Any | None
) -> dict[str, Expected]:  # fmt: skip
    """Largest scores and sums of exponentials, [B, N, Sq, 8], or of a TND call [T, N, 8] where softmax_layout says so.
    With a sink the documents do not say whether it counts."""
    if sink is not None or (lengths is not None and g["softmax_layout"] != "TND"):
        return {}
    unit, scale, rows = g.unit("query"), abs(g.number("scale")), q.shape[-3]
    size = SUM * q.shape[-1] ** 0.5 * scale * q.detach().norm(dim=-1).amax() * k.detach().norm(dim=-1).amax()
    found, expected = [s.sums() for s in samples], {}
    blind = back([total == 0 for _, total in found], "BNSD", rows, lengths)
    for n, role in enumerate(("output.1", "output.2")):
        value = back([f[n].expand(*f[n].shape[:-1], _COPIES) for f in found], "BNSD", rows, lengths)
        mine = g.output(n + 1)
        if mine is not None and mine.shape == value.shape:  # of a query that sees no key
            value = torch.where(blind.expand(value.shape), mine, value)
        coarse = COARSE if unit > EXP and n == 1 else 0.0
        error = size + EXP * (1.0 + value.abs()) if n == 0 else value.abs() * (size + EXP + coarse)
        expected[role] = Expected(value, error, common=coarse, groups=1)
    return expected


@fused(
    f"npu_fusion_attention(query, key, value, {_FEW}, pse=None, padding_mask=None, atten_mask=None, scale=1.0,"
    f"keep_prob=1.0, {_WIDE}, {_REST}{_LAST}{_TAIL}",
    "npu_fusion_attention_v3",
)
def npu_fusion_attention(g: FusedArguments) -> dict[str, Expected]:
    return _attention(g, _TOKENS)


@fused(
    f"npu_fusion_attention_v2(query, key, value, {_FEW}, pse=None, padding_mask=None, atten_mask=None, query_rope=None,"
    f"key_rope=None, scale=1.0, keep_prob=1.0, {_WIDE_2}, {_REST}{_LAST}pse_type=1, q_start_idx=None,"
    f"kv_start_idx=None, {_TAIL}"
)
def npu_fusion_attention_v2(g: FusedArguments) -> dict[str, Expected]:
    return _attention(g, _TOKENS_2, second=True)


_SAVED = "softmax_max=None, softmax_sum=None, softmax_in=None, attention_in=None,"
npu_fusion_attention_grad = backward(
    f"npu_fusion_attention_grad(query, key, value, dy, {_FEW}, pse=None, padding_mask=None, atten_mask=None, {_SAVED}"
    f"scale/scale_value=1.0, keep_prob=1.0, {_WIDE}, inner_precise=0, seed=0, offset=0, numels=0, prefix=None,"
    f"actual_seq_qlen=None, actual_seq_kvlen=None, sparse_mode=0, {_LAST}softmax_layout='', sink=None",
    npu_fusion_attention, "dy", ("query", "key", "value", "pse"), "npu_fusion_attention_grad_v3",
)  # fmt: skip
npu_fusion_attention_grad_v2 = backward(
    f"npu_fusion_attention_grad_v2(query, key, value, dy, {_FEW}, pse=None, padding_mask=None, atten_mask=None,"
    f"{_SAVED} query_rope=None, key_rope=None, scale/scale_value=1.0, keep_prob=1.0, {_WIDE_2}, inner_precise=0,"
    f"seed=0, offset=0, numels=0, prefix=None, actual_seq_qlen=None, actual_seq_kvlen=None, sparse_mode=0, {_LAST}"
    "pse_type=1,"
    "q_start_idx=None, kv_start_idx=None, softmax_layout='', sink=None",
    npu_fusion_attention_v2, "dy", ("query", "key", "value", "pse", "query_rope", "key_rope"),
)  # fmt: skip
