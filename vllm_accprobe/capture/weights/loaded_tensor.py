"""What a tensor was as a checkpoint or a sync gave it, as far as it is kept: sums, never values.

Not here: when it is looked at (life.py), how a print is made (prints.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_accprobe.capture.weights.prints import RowSums


@dataclass
class LoadedTensor:
    """What a tensor was as it was given last. raw: `raw_bytes` of it."""

    sums: RowSums
    dtype: torch.dtype
    raw: int | None = None

    def same(self, tensor: torch.Tensor, raw: int | None) -> bool:
        """Whether ``tensor`` holds these very bytes: then nothing of it must be looked at again."""
        return raw is not None and (raw, tensor.dtype, tuple(tensor.shape)) == (self.raw, self.dtype, self.sums.shape)
