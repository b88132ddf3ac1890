"""The load format ``drawn``: an engine whose weights are drawn, for architectures of which no library writes a
checkpoint.

The problem: many of vLLM's models exist in no other library, so nothing writes their weights, and vLLM's own dummy
weights are so small that nothing of a network is left. The idea: a loader that draws each parameter by its name, the
same in every run, at the size that keeps the network alive. Not here: how vLLM reads checkpoints.
"""

from __future__ import annotations

import zlib
from typing import Any


def register() -> None:
    """Makes ``load_format="drawn"`` known to vLLM, once."""
    from vllm.model_executor import model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    if "drawn" in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
        return

    @model_loader.register_model_loader("drawn")
    class Drawn(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: Any, model_config: Any) -> None:
            import torch

            buffers = [(n, b) for n, b in model.named_buffers() if n.endswith("_bias")]  # of routers' scores
            for name, tensor in [*model.named_parameters(), *buffers]:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                tensor.data.copy_(_drawn(name, tensor.data, generator))


def _drawn(name: str, old: Any, generator: Any) -> Any:
    import torch

    leaf, shape = name.rpartition(".")[2], old.shape
    if not old.is_floating_point():
        if "zero" in leaf:
            return torch.full(shape, 0x77777777 if old.dtype is torch.int32 else 0)  # codes of four bits
        least, most = (-(2**31), 2**31) if old.dtype is torch.int32 else (-127, 128)
        return old if leaf == "g_idx" else torch.randint(least, most, shape, generator=generator).to(old.dtype)
    noise = torch.randn(shape, generator=generator)
    if leaf in ("A", "A_log"):
        size = 1.0 + 15.0 * torch.rand(shape, generator=generator)
        return -size if leaf == "A" else size.log()
    if leaf == "D":
        return 1.0 + 0.1 * noise
    if leaf == "dt_bias":
        return -3.0 + 0.5 * noise
    if "scale" in leaf and ("weight" in leaf or leaf == "scales"):
        return (1.0 + 0.1 * noise.abs()) / (1000.0 if leaf != "scales" else 50.0)
    if old.dim() < 2:
        constant = old.numel() and bool((old == old.flatten()[0]).all()) and bool(old.isfinite().all())
        middle = old if constant and leaf == "weight" else float(leaf == "weight")  # a norm may add 1 itself
        return middle + 0.1 * noise
    if "embed" in name:
        return noise if "word" in name or "tok" in name else 0.3 * noise
    fan_in = shape[-1] if "experts" in name and old.dim() == 3 else old[0].numel()
    return noise * (4.0 if "lm_head" in name or leaf == "output" else 1.0) / fan_in**0.5
