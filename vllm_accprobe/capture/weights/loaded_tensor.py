"""What a tensor was as a checkpoint or a sync gave it, as far as it is kept: sums, never values.

Not here: when it is looked at (life.py), how a print is made (prints.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_accprobe.capture.weights.prints import RowSums, sums_of


@dataclass
class LoadedTensor:
    """What a tensor was as it was given last. raw: `raw_bytes` of it. columns: of a weight that a kernel can be asked
    for; asked: these columns themselves where they are integers, one or two percent of the weight, on the host."""

    sums: RowSums
    dtype: torch.dtype
    raw: int | None = None
    columns: RowSums | None = None
    asked: torch.Tensor | None = None

    @classmethod
    def of(cls, sums: RowSums, tensor: torch.Tensor, raw: int | None, asked: torch.Tensor | None) -> LoadedTensor:
        """asked: `through_kernel.expected` of ``tensor``."""
        kept = asked.cpu() if asked is not None and not asked.is_floating_point() else None
        return cls(sums, tensor.dtype, raw, None if asked is None else sums_of(asked), kept)

    def same(self, tensor: torch.Tensor, raw: int | None) -> bool:
        """Whether ``tensor`` holds these very bytes: then nothing of it must be looked at again."""
        return raw is not None and (raw, tensor.dtype, tuple(tensor.shape)) == (self.raw, self.dtype, self.sums.shape)
