"""Which packer a layer of vLLM moves its weights with, where it is at hand.

The idea: vLLM's CPU experts pack with a function of their module for the instruction set that stands in their class;
that function packs whatever it is given. Other backends' packers are not asked: they are told as orders that nobody
here can undo. Not here: what is asked of a packer (capture/weights/undo.py).
"""

from __future__ import annotations

import sys
from typing import Any

from vllm_accprobe.capture.weights.undo import Packer

_EXPERTS = ("w13_weight", "w2_weight")


def packer_of(layer: Any, name: str) -> tuple[str, Packer] | None:
    """(its name, the packer) of the layer's tensor ``name``, or None."""
    if name not in _EXPERTS:
        return None
    kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    isa = getattr(type(experts), "isa", None)
    pack = getattr(sys.modules.get(type(experts).__module__), "cpu_prepack_moe_weight", None)
    if not isinstance(isa, str) or not callable(pack):
        return None
    return f"cpu_prepack_moe_weight({isa})", lambda block: pack(block, isa)
