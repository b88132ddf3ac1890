"""A call of a fused operator: its arguments by name, and all the names under which a dump may have it.

The problem: one operator is ``NPU.npu_rms_norm`` in msprobe's dump.json, ``npu::npu_rms_norm`` in a graph,
``torch.ops.npu.npu_rms_norm.default`` in our own dumps; its arguments come by place or by keyword, under names that
differ between torch_npu's documents and its schema. The idea: a reference is written once for `FusedArguments`,
arguments by the schema's names with defaults, and ``@fused("npu_rms_norm(self, gamma, epsilon=1e-06)")`` marks it for
every spelling. In float64 it is the reference, in float32 on a device what that device has where torch_npu is not
installed. Source of schemas: op-plugin's op_plugin_functions.yaml and torch_npu's custom API documents
(github.com/Ascend).
Elsewhere: the formulas (npu_*.py), how a formula is differentiated (../gradients.py).
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import DIFFERENTIABLE, Call, Declined, Expected, device_kernel, reference
from vllm_accprobe.opcheck.references import ours
from vllm_accprobe.opcheck.references.aten import operator_kernel, tensors_by_role
from vllm_accprobe.opcheck.references.gradients import derived
from vllm_accprobe.opcheck.references.parts import unit_of

HEADS = ("NPU", "torch.ops.npu", "torch_npu", "aten", "Aten", "VF")
RANDOM = "an operator that draws random numbers"
_MISSING = object()


Parameters = tuple[tuple[tuple[str, ...], Any], ...]
"""Of each its names, the schema's, then those of documents, and its default, ``_MISSING`` where there is none."""


def parsed(schema: str) -> tuple[str, Parameters]:
    """(operator, parameters) of ``npu_x(self/input, dim=-1)``: names between slashes mean the same."""
    name, _, rest = schema.rstrip(")").partition("(")
    found = []
    for part in filter(None, (p.strip() for p in rest.split(","))):
        names, equals, default = part.partition("=")
        found.append((tuple(names.split("/")), ast.literal_eval(default) if equals else _MISSING))
    return name, tuple(found)


def spelled(name: str) -> tuple[str, ...]:
    """Every name of a fused operator that a dump may have."""
    return name, *(f"{head}.{name}" for head in HEADS)


class FusedArguments:
    """The arguments of one call. dtype: of floating tensors. Raises Declined where the schema does not know one."""

    def __init__(self, parameters: Parameters, call: Call, dtype: Any = torch.float64):
        if len(call.args) > len(parameters):
            raise Declined(f"{len(call.args)} arguments, where its schema has {len(parameters)}")
        self.call, self.dtype = call, dtype
        self._values = {names[0]: v for (names, _), v in zip(parameters, call.args, strict=False)}
        named = {name: names[0] for names, _ in parameters for name in names}
        for key, value in call.kwargs.items():
            if key not in named:
                raise Declined(f"argument {key[:40]} is not in its schema")
            self._values[named[key]] = value
        for names, default in parameters:
            if names[0] not in self._values and default is _MISSING:
                raise Declined(f"argument {names[0]} was not captured")
            self._values.setdefault(names[0], default)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def stored(self, name: str) -> Any:
        """A tensor as it was captured. Raises Declined."""
        if not isinstance(self[name], torch.Tensor):
            raise Declined(f"argument {name} is no tensor")
        return self[name]

    def tensor(self, name: str) -> Any:
        """A floating tensor in ``dtype``. Raises Declined."""
        found = self.stored(name)
        if not found.is_floating_point():
            raise Declined(f"argument {name} is no floating-point tensor")
        return found.to(self.dtype)

    def maybe(self, name: str) -> Any | None:
        """`tensor`, None where it is missing."""
        return None if self[name] is None else self.tensor(name)

    def number(self, name: str) -> float:
        """A number, or a tensor of one element. Raises Declined."""
        value = self[name]
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            return float(value)
        if not isinstance(value, (bool, int, float)):
            raise Declined(f"argument {name} is no number")
        return float(value)

    def integers(self, name: str) -> list[int] | None:
        """A list of integers, or a tensor of them; None where it is missing. Raises Declined."""
        value = self[name]
        if value is None:
            return None
        found = value.tolist() if isinstance(value, torch.Tensor) else value
        if not isinstance(found, (list, tuple)) or any(type(n) is not int for n in found):
            raise Declined(f"argument {name} is no list of integers")
        return [*found]

    def unit(self, *names: str) -> float:
        """One rounding of the coarsest of these tensors' dtypes."""
        return unit_of(*(self.stored(n) for n in names))

    def output(self, k: int) -> Any | None:
        """What was captured of output ``k``, in ``dtype`` where it is floating; None where nothing was."""
        found = self.call.outputs.get(f"output.{k}")
        if found is None or not found.is_floating_point():
            return found
        return found.to(self.dtype)


FusedReference = Callable[[FusedArguments], "Expected | Mapping[str, Expected]"]


def backward(schema: str, forward: Any, up: str, inputs: Sequence[str], *more: str) -> Any:
    """The reference of a fused operator's gradient: by autograd on ``forward``, which `fused` marked, the gradient of
    ``inputs[k]`` as output k. up: the gradient of the forward's first output. Arguments of both have the same names."""
    here = {own[0] for own, _ in parsed(schema)[1]}
    names = [own[0] for own, _ in forward.parameters if own[0] in here]

    def gradient(g: FusedArguments) -> dict[str, Expected]:
        return derived(g, forward, names, up, inputs)

    gradient.__module__ = forward.__module__
    return fused(schema, *more, differentiable=False)(gradient)


def fused(schema: str, *more: str, differentiable: bool = True) -> Callable[[FusedReference], Any]:
    """Marks a function as the reference of a fused operator, and of ``more`` with the same arguments. differentiable:
    its outputs depend on its inputs by torch's operations alone."""
    name, parameters = parsed(schema)

    def mark(function: FusedReference) -> Any:
        @reference(*(s for n in (name, *more) for s in spelled(n)))
        @functools.wraps(function)
        def exact(call: Call) -> Expected | Mapping[str, Expected]:
            return function(FusedArguments(parameters, call))

        exact.__name__ = name
        exact.parameters = parameters  # type: ignore[attr-defined]
        exact.in_dtype = lambda call, dtype: function(FusedArguments(parameters, call, dtype))  # type: ignore[attr-defined]
        setattr(exact, DIFFERENTIABLE, differentiable)
        return exact

    return mark


@device_kernel("npu_*", "fast_gelu", *(f"{head}.npu_*" for head in HEADS), *(f"{head}.fast_gelu" for head in HEADS))
def fused_kernel(call: Call) -> dict[str, Any]:
    """torch_npu's own operator where it is installed; else its formula in float32 on the tensors' device, rounded to
    the dtypes that were captured, or its first tensor's."""
    parts = call.cls.replace("::", ".").removeprefix("torch.ops.").split(".")
    name = parts[min(1, len(parts) - 1)]
    if hasattr(torch.ops.npu, name):
        return dict(operator_kernel(replace(call, cls=f"torch.ops.npu.{name}")))
    found = ours().find(call.cls)
    if isinstance(found, Declined) or not hasattr(found, "in_dtype"):
        raise Declined("torch_npu is not installed")
    result = found.in_dtype(call, torch.float32)
    expected = result if isinstance(result, Mapping) else {"output.0": result}
    tensors = tensors_by_role(call.args, call.kwargs).values()
    first = next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)

    def rounded(role: str, value: Any) -> Any:
        dtype = call.outputs[role].dtype if role in call.outputs else first
        return value.to(dtype) if value.is_floating_point() else value

    return {role: rounded(role, e.value) for role, e in expected.items() if not e.only_measured}
