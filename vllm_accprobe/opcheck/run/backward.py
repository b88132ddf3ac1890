"""Gradients: what a device's backward pass gives, against float64's.

The problem: a kernel's forward may be right and its gradient wrong, and an inference engine never captures gradients.
The idea: from the captured inputs and one drawn gradient of the output, torch's autograd gives the gradients of every
floating input and parameter twice: through the exact reference in float64, and through the operator itself in the
captured dtype on a device. Blocks, integers and operators without a
gradient are skipped. What is judged is this machine's operator, not what was captured. Not here: the operators
(references/), the exact gradients (references/gradients.py).
"""

from __future__ import annotations

from collections.abc import Iterator
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
from vllm_accprobe.opcheck.references.gradients import differentiated, exact_gradients, grad, leaves_of
from vllm_accprobe.opcheck.run.judged_row import judged, message_of
from vllm_accprobe.opcheck.run.result_row import SKIP, Checked, unchecked

_ROLE = "grad."


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
    generator = torch.Generator().manual_seed(seed)
    up = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)

    exact = exact_gradients(call, lambda wide: differentiated(references, wide), {"output.0": up})
    same, leaves = leaves_of(call, None, device, 0.0)
    mine = references.run(same)
    if isinstance(mine, Declined):
        raise mine
    theirs = grad([(mine["output.0"], up.to(device))], leaves)
    found = [name for name in exact if name in theirs]
    if not found:
        raise Declined("nothing that goes in has one")
    for name in found:
        yield name, exact[name].value, theirs[name], exact[name].noise
