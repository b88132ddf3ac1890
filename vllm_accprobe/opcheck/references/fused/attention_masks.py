"""Which key a query of a fused attention sees: atten_mask, and what sparse_mode and the tokens' windows make of it.

The problem: one argument is a whole mask in some modes and a compressed triangle in others, and then the mode alone
says who sees whom. The idea: a rule per mode, on indices, in parts that fit into memory.
Source: torch_npu's document of npu_fusion_attention, table of sparse_mode, and CANN's of aclnnFlashAttentionScore, for
Sq queries i and Skv keys j: without atten_mask all see all, whatever the mode; 0, 1 and 5: the mask as it is (in mode 0
the band i - pre <= j <= i + next must lie outside of it too); 2: j <= i; 3: j <= i + Skv - Sq; 4: a band from the lower
right corner, i - pre <= j - (Skv - Sq) <= i + next; 6: as 3, or j < prefix; 7 (TND): as 3, the last sample as 4;
8: as 2, the first sample as 4. msprobe's benchmark function has mode 4's band from the upper left, which is the same
for Sq = Skv, and makes masks where none was given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Declined
from vllm_accprobe.opcheck.references.fused.fused_calls import Given

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
