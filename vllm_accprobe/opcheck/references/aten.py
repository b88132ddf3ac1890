"""Any aten operator: calls itself on the CPU, in float64.

The problem: torch has some two thousand operators, and no table of formulas will ever hold them. The idea: an
operator's own CPU kernel in float64 is an independent and far more exact implementation of what a device computed in
bfloat16. Floating tensors become float64 (complex128), a ``dtype`` argument that names a smaller float is raised too;
where there is no kernel for float64, float32 is tried. Operators that draw random numbers, hold no tensor, or write
without saying what they wrote are declined.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Call, Declined, Expected, reference

_RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal", "uniform", "exponential", "random", "geometric")
_EMPTY = ("empty", "new_empty", "empty_like", "empty_strided", "resize_")


def overload(name: str) -> Any:
    """torch.ops.aten.<name>[.<overload>] for ``aten.mm``, ``aten.mm.default`` or ``torch.ops.aten.mm``; raises
    Declined."""
    parts = name.removeprefix("torch.ops.").split(".")
    if parts[0] != "aten" or not 2 <= len(parts) <= 3 or not all(p.isidentifier() for p in parts):
        raise Declined(f"no reference for {name}")
    try:
        packet = getattr(torch.ops.aten, parts[1])
        return getattr(packet, parts[2]) if len(parts) == 3 else packet
    except AttributeError:
        raise Declined(f"this torch has no operator {name}") from None


def raised(value: Any, real: Any, imaginary: Any) -> Any:
    """Tensors, dtypes and containers of them with floats in these dtypes, everything on the CPU."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        if value.is_complex():
            return value.to(imaginary)
        return value.to(real) if value.is_floating_point() else value.clone()
    if isinstance(value, torch.dtype):
        return real if value.is_floating_point else imaginary if value.is_complex else value
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, (list, tuple)):
        return type(value)(raised(v, real, imaginary) for v in value)
    return value


@reference("aten.*", "torch.ops.aten.*")
def itself(call: Call) -> dict[str, Expected]:
    base = call.cls.removeprefix("torch.ops.").split(".")[1]
    if any(word in base for word in _RANDOM):
        raise Declined("an operator that draws random numbers")
    if base in _EMPTY:
        raise Declined("an operator whose result has no defined values")
    function = overload(call.cls)
    why = ""
    for real, imaginary in ((torch.float64, torch.complex128), (torch.float32, torch.complex64)):
        try:
            args = raised(call.args, real, imaginary)
            kwargs = {k: raised(v, real, imaginary) for k, v in call.kwargs.items()}
            result = function(*args, **kwargs)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            why = why or " ".join(str(error).split())[:80]
            continue
        return _outputs(result, real)
    raise Declined(f"its own CPU kernel refuses: {why}", failed=True)


def _outputs(result: Any, real: Any) -> dict[str, Expected]:
    values = result if isinstance(result, (list, tuple)) else [result]
    found = {}
    for k, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            value = value.double() if value.is_floating_point() else value
            noise = 2.0**-20 * value.abs() if real is torch.float32 and value.is_floating_point() else None
            found[f"output.{k}"] = Expected(value, noise)
    if not found:
        raise Declined("its result holds no tensor")
    return found
