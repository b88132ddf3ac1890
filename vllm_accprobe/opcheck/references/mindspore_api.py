"""MindSpore's ``mint`` API: held against torch's functions, and run here and now where MindSpore is installed.

The problem: what a dump says of ``Mint.add`` shows the device that was captured; whether this machine's MindSpore and
its device compute it rightly is seen only by running it. The idea: ``mint`` takes the arguments of torch's functions of
the same name and is documented to compute the same [MindSpore's API mapping, "PyTorch and MindSpore API Mapping
Table"], so that torch's is its reference (api.py). To run it, torch's tensors go over by way of numpy, the function of
the same name is called, and what comes out goes back; bfloat16, which numpy does not have, goes by way of float32,
which holds it exactly. Only public functions of ``mint``, and arithmetic of tensors, can be named by a dump. MindSpore
is an extra (``pip install vllm-accprobe[mindspore]``, in an environment of its own beside vLLM's: it wants an older
numpy). Not here: which functions of torch these may be (api.py).
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Call, Declined, device_kernel, reference
from vllm_accprobe.opcheck.references import api
from vllm_accprobe.opcheck.references.api import DUNDER, split
from vllm_accprobe.opcheck.references.aten import each, outputs_by_role

HEADS = ("Mint", "MintFunctional", "mindspore.Tensor")
MISSING = "MindSpore is not installed"
_NAMES = tuple(f"{head}.*" for head in HEADS)


def is_mint(name: str) -> bool:
    """Whether an API's name is one of MindSpore's that can be run here: ``Mint.add``, ``MintFunctional.silu``."""
    return name.rpartition(".")[0] in HEADS


def installed() -> bool:
    return importlib.util.find_spec("mindspore") is not None


@functools.cache
def _mindspore() -> Any:
    if not installed():
        raise Declined(MISSING)
    try:
        import mindspore
    except Exception as error:  # a build for a device whose driver is missing raises whatever it likes
        raise Declined(f"MindSpore cannot be imported: {_line(error)}") from None
    return mindspore


def described() -> str:
    """``MindSpore 2.7.1 on CPU``. Raises Declined."""
    ms = _mindspore()
    return f"MindSpore {ms.__version__} on {ms.get_context('device_target')}"


def _function(name: str) -> Any:
    head, function = split(name)
    ms = _mindspore()
    if head == "mindspore.Tensor":
        found = getattr(ms.Tensor, function, None) if function in DUNDER else None
    else:
        module = ms.mint if head == "Mint" else ms.mint.nn.functional
        found = None if function.startswith("_") or function not in dir(module) else getattr(module, function)
    if not callable(found) or isinstance(found, type):
        raise Declined(f"this MindSpore has no function {name}")
    return found


@reference(*_NAMES)
def by_torch(call: Call) -> Any:
    """torch's function of the same name."""
    return api.function(call)


@device_kernel(*_NAMES)
def run(call: Call) -> dict[str, Any]:
    """What MindSpore gives for the call's arguments, torch tensors by role (``output.0``); where it is not installed,
    what torch's function of the same name gives where the tensors lie. Raises Declined."""
    if not installed():
        return dict(api.api_kernel(call))
    function = _function(call.cls)
    try:
        args, kwargs = each(list(call.args), _over), {k: each(v, _over) for k, v in call.kwargs.items()}
        result = _back(function(*args, **kwargs))
    except Exception as error:  # kernels that a device does not have are found out by calling them
        raise Declined(f"MindSpore refuses {call.cls}: {_line(error)}") from None
    return outputs_by_role(result, (), {})


def _over(value: Any) -> Any:
    ms = _mindspore()
    if isinstance(value, torch.Tensor):
        if value.dtype == torch.bfloat16:
            return ms.Tensor(value.detach().float().numpy()).astype(ms.bfloat16)
        return ms.Tensor(value.detach().contiguous().numpy())
    if isinstance(value, torch.dtype):
        name = str(value).removeprefix("torch.")
        return getattr(ms, "bool_" if name == "bool" else name)
    return value


def _back(value: Any) -> Any:
    ms = _mindspore()
    if isinstance(value, ms.Tensor):
        if value.dtype == ms.bfloat16:
            return torch.from_numpy(value.astype(ms.float32).asnumpy().copy()).bfloat16()
        return torch.from_numpy(value.asnumpy().copy())
    if isinstance(value, (list, tuple)):
        return type(value)(_back(v) for v in value) if type(value) in (list, tuple) else tuple(_back(v) for v in value)
    return value


def _line(error: Exception) -> str:
    text = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {text[:100]}"


def note(names: Mapping[str, Any] | set[str]) -> str:
    """What to say about the dump's mint calls before any number; "" where it has none."""
    count = sum(is_mint(n) for n in names)
    if not count:
        return ""
    what = f"{count} API{'s' if count > 1 else ''} of MindSpore"
    try:
        return f"{what} also run here and now, by {described()}: rows mindspore.output.k"
    except Declined as why:
        by = "torch's functions of the same names stand in where a call is run here"
        return f"{what}: {why.reason}; {by}"
