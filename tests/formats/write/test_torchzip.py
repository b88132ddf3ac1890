"""A .pt file written without torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.formats.io import torchfile
from vllm_accprobe.formats.write import torchzip


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_our_pt_files_are_torchs(tmp_path: Path, dtype: str) -> None:
    storage = DTYPES[dtype].storage
    raw = np.random.default_rng(1).integers(0, 2, 24 * storage.itemsize).astype(np.uint8)
    for i, shape in enumerate([(2, 3, 4), (24,), (0, 4), ()]):
        array = raw[: int(np.prod(shape)) * storage.itemsize].view(storage).reshape(shape)
        path = tmp_path / f"{i}.pt"
        torchzip.save_pt(path, array, dtype)
        found = torch.load(path, weights_only=True)
        assert (str(found.dtype), tuple(found.shape)) == (f"torch.{dtype}", shape)
        flat = torch.empty(found.numel(), dtype=found.dtype).copy_(found.reshape(-1))
        assert flat.view(torch.uint8).numpy().tobytes() == array.tobytes()
        assert torchfile.items(path)[0][1].read().tobytes() == array.tobytes()
