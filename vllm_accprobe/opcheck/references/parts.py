"""What references of several families need of a call and of a device.

What the device kernels of several families need.

The problem: whether this machine's device computes an operator rightly can only be seen by letting it do so, where no
vLLM is installed. The idea: each family has, below its exact formulas, its classes of modules in a few torch operators,
in the captured dtype, on the device where the call's tensors lie, marked with ``@device_kernel``; a vendor's kernel of
the same name (``torch.ops._C.rms_norm``) is taken where it is registered. An operator call runs itself (aten.py).
Blocks compute nothing of their own and have none.

What references of several families ask of a call: parameters it may lack, other ranks, what is inside a block.

The problem: most references want the same few things, and each must decline in the same words where they are missing.

Not here: the kernels, which stand in the families' files, which parts a block hands on (composite.py, hf.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.judge.floor import unit
from vllm_accprobe.kernels.float_formats import LOW, half_step, smallest
from vllm_accprobe.opcheck.calls.case import mapped
from vllm_accprobe.opcheck.reference import Call, Declined, Expected


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


Inside = Sequence[tuple[str, str, Any]]
UNTOLD = "a block whose parts do not tell what it hands on"
"""Why a block is declined."""
UNSEEN = (
    "it hands on what its projection gave; the convolution and the recurrence in front of that are no modules, and "
    "were not computed again"
)
"""Why a block is not right by what its last part gave."""


def param_if(call: Call, name: str) -> Any | None:
    """A parameter in float64; None where the module has none of this name. Raises Declined where it was packed."""
    return call.param(name) if name in call.params else None


def unit_of(*tensors: Any) -> float:
    """One rounding of the coarsest of these tensors' dtypes."""
    return max(unit(str(t.dtype).removeprefix("torch.")) for t in tensors)


_LEAST = {half_step(n): 0.5 * smallest(n) for n, (_, least) in LOW.items() if least > -126}
"""By unit, half the smallest subnormal number of the dtypes that have a narrow range."""


def once(size: Any, unit: float, times: Any = 1.0) -> Any:
    """What rounding numbers of this ``size`` once to the grid of ``unit`` leaves at most in what they are multiplied
    ``times`` for: u |x| + eta [Higham, ASNA, (2.8)]."""
    return (unit * times) * size + subnormal(unit, times)


def subnormal(unit: float, times: Any = 1.0) -> Any:
    """The eta of `once`, half the smallest subnormal number: in float16 2**-25, and silu(-15) = -4.6e-6 lies 6e-8 from
    its neighbours; 0.0 in dtypes that have bfloat16's range."""
    least = _LEAST.get(unit, 0.0)
    return least * times if least else 0.0


def reshaped(y: Expected, shape: Sequence[int]) -> Expected:
    """``y`` in the shape that was captured."""
    value, noise, bound = (None if t is None else t.reshape(shape) for t in (y.value, y.noise, y.bound))
    return replace(y, value=value, noise=noise, bound=bound)


def ranks_of(call: Call, size: int) -> list[Call]:
    """The same call on all ``size`` ranks, whose results are added up. Raises Declined."""
    found: list[Call] = list(call.extra.get("ranks", ()))
    if len(found) != size:
        raise Declined("adds up over ranks, and not all of them were captured")
    return found


def inside(call: Call) -> Inside:
    """(path below the block, role, record) in the order of execution. Raises Declined where there is none."""
    found: Inside = call.extra.get("children", ())
    if not found:
        raise Declined("nothing inside it was captured")
    return found


def all_seen(call: Call) -> None:
    """Raises Declined where a part of this block ran that was not captured: what it added, or made of the others'
    results, nobody knows."""
    if unseen := call.extra.get("unseen"):
        more = f" and {len(unseen) - 1} more" if len(unseen) > 1 else ""
        raise Declined(f"a block of which parts were not captured ({unseen[0]}{more})")


def same(call: Call, role: str, child: str, child_role: str) -> Expected | None:
    """The value of output ``role`` handed on from the last output of the child whose path ends so; None where it was
    not captured."""
    read = call.extra.get("read")
    out = call.outputs.get(role)
    for path, r, record in reversed(inside(call)):
        if r == child_role and (path == child or (child.startswith("*") and path.endswith(child[1:]))):
            if read is None or out is None or tuple(record.shape) != tuple(out.shape):
                return None
            return Expected(read(record).double(), None, 0.0)
    return None


def first(call: Call, *children: str) -> Expected | None:
    """output.0 as the first of these children that was captured gave it; None where none was."""
    return next((f for f in (same(call, "output.0", child, "output.0") for child in children) if f), None)


def held(call: Call, child: str, child_role: str = "output.0") -> Expected:
    """output.0 as this child gave it. Raises Declined."""
    found = same(call, "output.0", child, child_role)
    if found is None:
        raise Declined(UNTOLD)
    return found


WHERE_SCALED = "where the routed scaling factor is applied was not recorded"


def routed_factor(call: Call) -> float:
    """What a block multiplies its routed experts' sum with: the model's factor where no object inside the block applies
    it to its weights or its sum, else 1. Raises Declined where that was not recorded."""
    whole = call.attrs.get("routed_scaling_factor") or call.config.get("routed_scaling_factor") or 1.0
    factors = call.extra.get("factors", {})  # of the objects inside it, by their paths
    inner = math.prod(factors.values())
    if math.isclose(whole, inner) or ("routed_scaling_factor" not in {**call.attrs, **call.config} and factors):
        return 1.0
    if not factors or not math.isclose(inner, 1.0):
        raise Declined(WHERE_SCALED)
    return float(whole)
