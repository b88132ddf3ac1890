"""Exact gradients: what a backward pass should return, from a call's inputs and the gradients of its outputs.

The problem: a kernel's forward may be right and its gradient wrong; a dump may have that gradient, and a formula for
each would be written twice. The idea: references compute in torch's float64, so that autograd differentiates the
reference itself; a function of torch is its own. Noise: how far the exact gradients move when every floating input and
each gradient that comes in moves by one rounding of its dtype [stochastic estimates of conditioning: Parker, Monte
Carlo Arithmetic, 1997]; what autograd saved of a forward's outputs is used as it was saved (`SavedOutputs`); and one
rounding of the gradient's root mean square, because some are differences of equal things (attention with one key).
Elsewhere: gradients drawn and run here (run/check_calls.py), which record belongs to which call (calls/records.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.judge.rounding_unit import unit
from vllm_accprobe.opcheck.reference import BACKWARD, DIFFERENTIABLE, Call, Declined, Expected, decline_if, reference
from vllm_accprobe.opcheck.reference_table import References
from vllm_accprobe.opcheck.references import api, ours
from vllm_accprobe.opcheck.references.aten import of, outputs_by_role, tensors_by_role
from vllm_accprobe.opcheck.references.parts import on

SPREAD = 4.0
"""Times that a gradient moves with its inputs: one draw of signs, where a right kernel has others (chosen)."""
Outputs = Callable[[Call], Mapping[str, Any]]


def called(call: Call) -> tuple[Call, Any]:
    """(the call as its function takes it; the function): an operator, or an API of msprobe's. Raises Declined."""
    if call.cls.rpartition(".")[0] in api.TORCH_HEADS:
        return api.ready(call), api.torch_function(call.cls)
    return call, of(call.cls)


def by_torch(call: Call) -> Mapping[str, Any]:
    """The outputs of torch's own function for the call. Raises Declined."""
    ready, function = called(call)
    return outputs_by_role(function(*ready.args, **ready.kwargs), (), {})


def grad(pairs: Sequence[tuple[Any, Any]], leaves: Mapping[str, Any]) -> dict[str, Any]:
    """By leaf, the gradient of the sum of <output, gradient> over ``pairs``. Raises Declined."""
    pairs = [(y, up) for y, up in pairs if y.requires_grad]
    decline_if(not pairs, "its output does not depend on a floating input")
    outputs = [y for y, _ in pairs]
    ups = [up.reshape(y.shape).to(y.dtype) for y, up in pairs]
    found = torch.autograd.grad(outputs, list(leaves.values()), ups, allow_unused=True)
    return {name: g.detach() for name, g in zip(leaves, found, strict=True) if g is not None}


def leaves_of(call: Call, dtype: Any, device: str, move: float) -> tuple[Call, dict[str, Any]]:
    """``call`` with leaves that want gradients in the place of its floating inputs and parameters. move: times one
    rounding of its dtype, the relative size of a random change of each, always the same one."""
    generator = torch.Generator().manual_seed(1)
    leaves: dict[str, Any] = {}

    def leaf(name: str, t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return [leaf(f"{name}.{i}", v) for i, v in enumerate(t)] if isinstance(t, (list, tuple)) else t
        if not t.is_floating_point() or t.element_size() < 2 or not t.numel():
            return t.to(device)
        new = t.detach().to(device=device, dtype=dtype or t.dtype, copy=True)
        if move:
            step = move * unit(str(t.dtype).removeprefix("torch."))
            new *= 1.0 + step * (2.0 * torch.rand(new.shape, generator=generator, dtype=torch.float64) - 1.0)
        leaves[name] = new.requires_grad_()
        return leaves[name]

    if "." in call.cls or call.args:
        args = tuple(leaf(f"input.{i}", a) for i, a in enumerate(call.args))
        kwargs = {k: leaf(f"input.{k}", v) for k, v in call.kwargs.items()}
        decline_if(not tensors_by_role(args, kwargs), "it has no tensors")
        return replace(call, args=args, kwargs=kwargs), leaves
    rest = on(call, device)
    inputs = {k: leaf(f"input.{k}", v) for k, v in call.inputs.items()}
    params = {k: leaf(f"param.{k}", v) if "cache" not in k else v.to(device) for k, v in call.params.items()}
    return replace(rest, inputs=inputs, params=params), leaves


class SavedOutputs:
    """A forward pass in float64 whose backward pass sees its outputs as an engine's autograd saved them: rounded. A
    softmax's or a sigmoid's gradient is a formula of its output, which was rounded before it was saved; that error is
    the forward's, and no fault of the backward.

    made: outputs by role, filled once they are there; saved: what was captured of them; dtype: an engine's, of those
    that were not captured. Used as a context around the forward pass."""

    def __init__(self, saved: Mapping[str, Any], dtype: Any):
        self.made: Mapping[str, Any] = {}
        self._saved, self._dtype = saved, dtype
        self._hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, self._unpacked)

    def __enter__(self) -> SavedOutputs:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def _unpacked(self, t: Any) -> Any:
        for role, y in self.made.items():
            same = isinstance(y, torch.Tensor) and t.numel() and t.data_ptr() == y.data_ptr() and t.shape == y.shape
            if same and t.is_floating_point():
                kept = self._saved.get(role)
                if kept is None or kept.is_meta or kept.numel() != t.numel():  # statistics have no numbers
                    kept = t.to(self._dtype)
                return kept.reshape(t.shape).to(t.dtype)
        return t


def exact_gradients(
    call: Call, outputs: Outputs, ups: Mapping[str, Any], saved: Mapping[str, Any] | None = None
) -> dict[str, Expected]:
    """By input (``input.0``, ``param.weight``), its gradient. outputs: the call's outputs in float64 by role, as torch
    differentiates them; ups: the gradients of outputs, by role, in their own dtypes; saved: the outputs as they were
    captured, which are rounded here where they were not. Raises Declined."""
    generator = torch.Generator().manual_seed(2)
    rounded = next((up.dtype for up in ups.values() if up.is_floating_point()), torch.float64)

    def found(moved: bool) -> dict[str, Any]:
        wide, leaves = leaves_of(call, torch.float64, "cpu", 1.0 if moved else 0.0)
        with SavedOutputs(saved or {}, torch.float64 if moved else rounded) as kept:
            kept.made = made = outputs(wide)
        pairs = []
        for role, up in ups.items():
            decline_if(role not in made, f"no reference for {role} of {call.cls}")
            if made[role].numel() != up.numel():
                raise Declined(f"a gradient {list(up.shape)} of an output {list(made[role].shape)}")
            sign = 2.0 * torch.randint(0, 2, up.shape, generator=generator, dtype=torch.int8) - 1.0
            step = unit(str(up.dtype).removeprefix("torch.")) if moved else 0.0
            pairs.append((made[role], up.double() * (1.0 + step * sign)))
        return grad(pairs, leaves)

    exact, moved = found(False), found(True)
    coarsest = max((unit(str(up.dtype).removeprefix("torch.")) for up in ups.values()), default=0.0)
    return {name: Expected(g, noise_of(g, moved[name], coarsest), common=coarsest) for name, g in exact.items()}


def noise_of(exact: Any, moved: Any, step: float) -> Any:
    """Standard error of a right gradient, of an element or its row, whichever is larger."""
    change = SPREAD * (moved - exact).abs()
    if change.dim():
        change = torch.maximum(change, change.square().mean(-1, keepdim=True).sqrt())
    return change + step * exact.square().mean().sqrt()


def derived(
    g: Any, forward: Callable[[Call], Any], names: Iterable[str], up: str, inputs: Sequence[str]
) -> dict[str, Expected]:  # fmt: skip
    """What a fused operator's backward gives as ``output.k``: the gradient of ``inputs[k]``. g: its arguments; forward:
    its reference; names: of forward's arguments; up: the gradient of its first output. Raises Declined."""
    call = Call(g.call.name, "npu.forward", kwargs={name: g[name] for name in names})

    def outputs(wide: Call) -> Mapping[str, Any]:
        result = forward(wide)
        return {r: e.value for r, e in (result if isinstance(result, Mapping) else {"output.0": result}).items()}

    found = exact_gradients(call, outputs, {"output.0": g.stored(up)})
    return {f"output.{k}": found[f"input.{name}"] for k, name in enumerate(inputs) if f"input.{name}" in found}


def differentiated(references: References, call: Call) -> Mapping[str, Any]:
    """The outputs of ``call`` in float64, by role, as torch can differentiate them. Raises Declined."""
    if "." in call.cls and not getattr(references.find(call.cls), DIFFERENTIABLE, False):
        return by_torch(call)
    decline_if("." not in call.cls and not references.runs(call.cls), "a block: no gradient")
    expected = references.evaluate(call)
    if isinstance(expected, Declined):
        raise expected
    return {role: e.value for role, e in expected.items()}


@reference(f"{BACKWARD}*")
def recorded(call: Call) -> dict[str, Expected]:
    """Gradients that a dump holds: ``output.k`` is that of argument k, or of the k-th tensor where there are as many as
    tensors. extra: ``up``, gradients of the forward call's outputs by role."""
    ups: Any = call.extra.get("up")
    decline_if(not ups, "a gradient whose forward call was not captured")
    rest = {k: v for k, v in call.extra.items() if k not in ("up", "saved")}
    forward = replace(call, cls=call.cls.removeprefix(BACKWARD), outputs=dict(ups), extra=rest)
    found = exact_gradients(forward, functools.partial(differentiated, ours()), ups, call.extra.get("saved"))
    named = _roles(call, found)
    decline_if(not named, "its gradients do not name their arguments")
    return {role: found[name] for role, name in named.items()}


def _roles(call: Call, found: Mapping[str, Expected]) -> dict[str, str]:
    """Role of a captured gradient → the argument that it is of: by its place, else in the order of the tensors."""
    captured = {role: t for role, t in call.outputs.items() if role.startswith("output.") and t.is_floating_point()}
    placed = {role: role.replace("output.", "input.", 1) for role in captured}
    if all(n in found and found[n].value.shape == captured[r].shape for r, n in placed.items()):
        return placed
    if len(captured) != len(found):
        return {r: n for r, n in placed.items() if n in found and found[n].value.shape == captured[r].shape}
    pairs = dict(zip(captured, found, strict=True))
    return pairs if all(found[n].value.shape == captured[r].shape for r, n in pairs.items()) else {}
