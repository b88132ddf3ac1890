"""What the device kernels of several families need.

The problem: whether this machine's device computes an operator rightly can only be seen by letting it do so, where no
vLLM is installed. The idea: each family has, below its exact formulas, its classes of modules in a few torch operators,
in the captured dtype, on the device where the call's tensors lie, marked with ``@device_kernel``; a vendor's kernel of
the same name (``torch.ops._C.rms_norm``) is taken where it is registered. An operator call runs itself (aten.py).
Blocks compute nothing of their own and have none. Not here: the kernels, which stand in the families' files.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_accprobe.opcheck.calls.case import mapped
from vllm_accprobe.opcheck.reference import Call, Declined


def on(call: Call, device: Any) -> Call:
    """``call`` with all its tensors on ``device``, and its device arguments naming it. A tensor that has a shape and no
    values (an output, where inputs are drawn) stays as it is."""
    moved: Call = mapped(call, lambda t: t if t.is_meta else t.to(device))
    return moved


def vendor(name: str) -> Any | None:
    """torch.ops._C.<name> where it is registered in this process, else None."""
    return getattr(torch.ops._C, name, None)


def weight_here(call: Call) -> Any:
    """The parameter ``weight`` in its own dtype, where it lies. Raises Declined: missing, packed or quantised."""
    call.param("weight")  # raises Declined where it is missing or packed
    found = call.params["weight"]
    if not found.is_floating_point() or found.element_size() < 2:
        raise Declined("a quantised weight: what its kernel does is not torch's")
    return found
