"""What makes a tensor bad: NaN, Inf, values at the end of the dtype's range; where, and how many.

The problem: -inf is an error in a hidden state and meant in a mask, and an 8-bit float reaches its maximum on purpose.
The idea: one definition for the exact counts and for the elements, used only once something is known to be wrong:

- NaN, in any floating dtype.
- Overflow: Inf, or a magnitude of at least the dtype's largest finite value. Where rows become logits, only on the
  positive side: tokens are forbidden with large negative numbers.
- 8-bit floats: overflow when more than a twentieth of the elements lie at the maximum, since a dynamic scale puts the
  largest one there.

Not here: the fused reduction that notices (watch.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_accprobe.capture.core.session import HEAD

LIMITS = {d: float(torch.finfo(d).max) for d in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
FP8_TOPS = {
    getattr(torch, name): top for name, top in (("float8_e4m3fn", 0x7E), ("float8_e5m2", 0x7B)) if hasattr(torch, name)
}
"""Bits, without the sign, of the largest finite value; above them lie only NaN and Inf."""
FP8_SHARE = 0.05


@dataclass(frozen=True)
class Badness:
    """How many elements of a tensor's real rows are NaN, infinite, or at the end of the dtype's range."""

    nan: int = 0
    inf: int = 0
    saturated: int = 0

    def __bool__(self) -> bool:
        return bool(self.nan or self.inf or self.saturated)

    @property
    def word(self) -> str:
        return "NaN" if self.nan else "Inf" if self.inf else "saturation"


@dataclass(frozen=True)
class BadnessRule:
    """Which kinds count: ``nan``, ``overflow`` (Inf and saturation)."""

    nan: bool = True
    overflow: bool = True

    def assess(self, x: torch.Tensor, part: str) -> Badness:
        """The exact counts of a tensor of ``part`` of the model. Waits for a device."""
        top = FP8_TOPS.get(x.dtype)
        if top is not None:
            bits = x.contiguous().view(torch.uint8) & 0x7F
            beyond, at = int((bits > top).sum()), int((bits == top).sum())
            many = self.overflow and bits.numel() and (beyond + at) / bits.numel() > FP8_SHARE
            return Badness(beyond if self.nan else 0, 0, at if many else 0)
        limit = LIMITS.get(x.dtype)
        if limit is None:
            return Badness()
        nan = int(x.isnan().sum()) if self.nan else 0
        if not self.overflow:
            return Badness(nan)
        end = x >= limit if part == HEAD else x.abs() >= limit
        inf = end & x.isinf()
        return Badness(nan, int(inf.sum()), int(end.sum()) - int(inf.sum()))

    def elements(self, x: torch.Tensor, part: str) -> torch.Tensor:
        """Which elements ``assess`` counts, as booleans of the tensor's shape."""
        top = FP8_TOPS.get(x.dtype)
        if top is not None:
            return (x.contiguous().view(torch.uint8) & 0x7F) >= top
        nan = x.isnan() if self.nan else torch.zeros_like(x, dtype=torch.bool)
        limit = LIMITS[x.dtype]
        return nan | (x >= limit if part == HEAD else x.abs() >= limit) if self.overflow else nan


def is_mask(role: str) -> bool:
    """Whether an argument of this name may hold -inf by right."""
    return "mask" in role or role.endswith("bias")


def parameters(module: torch.nn.Module) -> list[tuple[str, Badness]]:
    """Parameters of ``module`` itself, and buffers that a checkpoint may hold, that are not finite. Reads each once.

    Other buffers are workspaces, often without a value yet. Saturation is no error here, nor is Inf in a mask or bias.
    """
    found = []
    temporary = module._non_persistent_buffers_set
    buffers = [(name, buffer) for name, buffer in module._buffers.items() if name not in temporary]
    for name, tensor in [*module._parameters.items(), *buffers]:
        if tensor is None or tensor.device.type == "meta" or not tensor.numel():
            continue
        if tensor.dtype in LIMITS and tensor.layout is torch.strided:
            low, high = torch.aminmax(tensor.detach())
            if bool(torch.isfinite(low)) and bool(torch.isfinite(high)):
                continue
            bad = Badness(int(tensor.isnan().sum()), 0 if is_mask(name) else int(tensor.isinf().sum()))
            if bad:
                found.append((name, bad))
    return found
