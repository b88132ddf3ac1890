"""Gradients: what a device's backward pass gives, against float64's.

The problem: a kernel's forward may be right and its gradient wrong, and an inference engine never captures gradients.
The idea: from the captured inputs and one drawn gradient of the output, torch's autograd gives the gradients of every
floating input and parameter twice: through the exact reference in float64, and through the operator itself in the
captured dtype on a device. Noise: how far the exact gradients move when the inputs and the output's gradient move by
one rounding, because a backward pass works from a rounded forward pass; and one rounding of the gradient's root mean
square, because some are differences of equal things (attention with one key). Blocks, integers and operators without a
gradient are skipped. What is judged is this machine's operator, not what was captured. Not here: the operators
(references/).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.judge.floor import unit
from vllm_accprobe.opcheck.calls.case import closed
from vllm_accprobe.opcheck.calls.records import Captured
from vllm_accprobe.opcheck.floors.output_rows import matrix, numbers
from vllm_accprobe.opcheck.floors.rounding import judge
from vllm_accprobe.opcheck.measures import measure
from vllm_accprobe.opcheck.reference import Call, Declined, Expected
from vllm_accprobe.opcheck.reference_table import References
from vllm_accprobe.opcheck.references import api
from vllm_accprobe.opcheck.references.aten import of, outputs_by_role, tensors_by_role
from vllm_accprobe.opcheck.references.kernels_common import on
from vllm_accprobe.opcheck.run.judged_row import judged, message_of
from vllm_accprobe.opcheck.run.result_row import SKIP, Checked, unchecked

_ROLE = "grad."
_SPREAD = 4.0


def check(captured: Captured, references: References, device: str = "cpu", seed: int = 0) -> Iterator[Checked]:
    """A row per gradient, role ``grad.input.x`` or ``grad.param.weight``; one that says why there is none."""
    call = closed(captured.what, references)
    try:
        gradients = list(_gradients(call, references, device, seed))
    except (Declined, RuntimeError, TypeError, ValueError, NotImplementedError) as why:
        text = why.reason if isinstance(why, Declined) else " ".join(str(why).split())[:120]
        c = captured
        yield unchecked(c.tap, call.cls, c.rank, c.step, c.call, 0, f"no gradient: {text}", status=SKIP, role=_ROLE)
        return
    for name, exact, mine, noise in gradients:
        dtype, shape = str(mine.dtype).removeprefix("torch."), tuple(mine.shape)
        reference, given = matrix(numbers(exact), 0), matrix(numbers(mine), 0)
        spread = matrix(noise.cpu(), 0)
        v = judge(reference, given, dtype, noise=spread, common=unit(dtype))
        measures = measure(reference.numpy(), given.numpy(), dtype)
        message = message_of(v, None, None, Expected(exact), len(given))
        yield judged(captured, (_ROLE + name, dtype, shape, 0), v, measures, (len(given), len(given), ""), message)


def _gradients(call: Call, references: References, device: str, seed: int) -> Iterator[tuple[str, Any, Any, Any]]:
    """(input, exact gradient, the device's, noise) for everything that has a gradient."""
    output = call.outputs.get("output.0")
    if output is None or not output.is_floating_point():
        raise Declined("its output is no floating-point tensor")
    step = unit(str(output.dtype).removeprefix("torch."))
    generator = torch.Generator().manual_seed(seed)
    up = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)

    def exactly(moved: bool) -> dict[str, Any]:
        sign = torch.randint(0, 2, up.shape, generator=generator, dtype=torch.int8)
        wanted = up.double() * (1.0 + step * (2.0 * sign - 1.0)) if moved else up.double()
        wide, leaves = leaves_of(call, torch.float64, "cpu", step if moved else 0.0)
        if "." in call.cls:
            wide, function = _called(wide)
            result = outputs_by_role(function(*wide.args, **wide.kwargs), (), {})
            return _grad(result["output.0"], leaves, wanted)
        expected = references.evaluate(wide)
        if isinstance(expected, Declined):
            raise expected
        return _grad(expected["output.0"].value, leaves, wanted)

    same, leaves = leaves_of(call, None, device, 0.0)
    mine = references.run(same)
    if isinstance(mine, Declined):
        raise mine
    theirs = _grad(mine["output.0"], leaves, up.to(device))
    exact, moved = exactly(False), exactly(True)
    found = [name for name in exact if name in theirs]
    if not found:
        raise Declined("nothing that goes in has one")
    for name in found:
        change = _SPREAD * (moved[name] - exact[name]).abs()
        if change.dim():
            change = torch.maximum(change, change.square().mean(-1, keepdim=True).sqrt())
        change = change + step * exact[name].square().mean().sqrt()
        yield name, exact[name], theirs[name], change


def _called(call: Call) -> tuple[Call, Any]:
    """(the call, its arguments as the function takes them; the function): of an operator, or of an API that msprobe
    recorded. Raises Declined."""
    if call.cls.rpartition(".")[0] in api.HEADS:
        return api.ready(call), api.torch_function(call.cls)
    return call, of(call.cls)


def _grad(output: Any, leaves: Mapping[str, Any], up: Any) -> dict[str, Any]:
    if not output.requires_grad:
        raise Declined("its output does not depend on a floating input")
    found = torch.autograd.grad(output, list(leaves.values()), up.reshape(output.shape).to(output.dtype),
                                allow_unused=True)  # fmt: skip
    return {name: g.detach() for name, g in zip(leaves, found, strict=True) if g is not None}


def leaves_of(call: Call, dtype: Any, device: str, move: float) -> tuple[Call, dict[str, Any]]:
    """``call`` with leaves that want gradients in the place of its floating inputs and parameters. move: relative size
    of a random change of the inputs, always the same one."""
    generator = torch.Generator().manual_seed(1)
    leaves: dict[str, Any] = {}

    def leaf(name: str, t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return [leaf(f"{name}.{i}", v) for i, v in enumerate(t)] if isinstance(t, (list, tuple)) else t
        if not t.is_floating_point() or t.element_size() < 2 or not t.numel():
            return t.to(device)
        new = t.detach().to(device=device, dtype=dtype or t.dtype, copy=True)
        if move:
            new *= 1.0 + move * (2.0 * torch.rand(new.shape, generator=generator, dtype=torch.float64) - 1.0)
        leaves[name] = new.requires_grad_()
        return leaves[name]

    if "." in call.cls:
        args = tuple(leaf(f"input.{i}", a) for i, a in enumerate(call.args))
        kwargs = {k: leaf(f"input.{k}", v) for k, v in call.kwargs.items()}
        if not tensors_by_role(args, kwargs):
            raise Declined("it has no tensors")
        return replace(call, args=args, kwargs=kwargs), leaves
    rest = on(call, device)
    inputs = {k: leaf(f"input.{k}", v) for k, v in call.inputs.items()}
    params = {k: leaf(f"param.{k}", v) if "cache" not in k else v.to(device) for k, v in call.params.items()}
    return replace(rest, inputs=inputs, params=params), leaves
