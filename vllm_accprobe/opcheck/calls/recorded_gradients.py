"""Gradients that msprobe recorded, against float64's from the same gradient coming in.

The problem: a record ``Functional.linear.3.backward`` has the gradient of the output that came in and some gradients
that went out, without their arguments: msprobe hooks the last node of autograd's graph that made the output, so that of
a composite function they are no gradients of its arguments at all. The idea: the forward call of the same number is
made again, from its recorded inputs, in float64; the last node of that graph gives the same list in the same order.
Where the shapes differ, gradients of the arguments in their order are tried; else the row says so. Of statistics
everything is drawn, and this machine's own backward pass is judged. Noise: references/gradients.py's.
Elsewhere: gradients without a record (run/check_calls.py), of fused operators (records.py, references/gradients.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.dump.schema import OpCall
from vllm_accprobe.judge.rounding_unit import unit
from vllm_accprobe.opcheck.calls.operator_calls import LOST, NotKept
from vllm_accprobe.opcheck.calls.random_inputs import WEAKER
from vllm_accprobe.opcheck.calls.records import Calls, Captured
from vllm_accprobe.opcheck.floors.output_rows import matrix, numbers
from vllm_accprobe.opcheck.floors.rounding import judge
from vllm_accprobe.opcheck.measures import measure
from vllm_accprobe.opcheck.reference import BACKWARD, Call, Declined, Expected
from vllm_accprobe.opcheck.reference_table import References
from vllm_accprobe.opcheck.references import api
from vllm_accprobe.opcheck.references.gradients import SavedOutputs, leaves_of, noise_of
from vllm_accprobe.opcheck.run import synthetic_inputs
from vllm_accprobe.opcheck.run.check_calls import Options, by_standard
from vllm_accprobe.opcheck.run.judged_row import judged, message_of
from vllm_accprobe.opcheck.run.result_row import OURS, SKIP, STRICT, CheckResult, unchecked

_CALL = re.compile(r"(.+\.\d+)\.(?:forward|backward)\b")


def is_one(captured: Captured) -> bool:
    """Whether a call is a backward record's, of a function of torch (and not of a fused operator or a module)."""
    return captured.tap.startswith(BACKWARD) and _api(captured).rpartition(".")[0] in api.TORCH_HEADS


def _call_name(record: str) -> str:
    """``Functional.linear.3`` of a record of its forward or backward call; "" of any other tool's."""
    return match[1] if (match := _CALL.match(record)) else ""


def _api(captured: Captured) -> str:
    return captured.what.cls.removeprefix(BACKWARD)


class _Lacking(Exception):
    """Why there is no gradient to hold a record against."""


class RecordedGradients:
    """Of one dump. here: gradients are made on ``device`` even where they were recorded with their values."""

    def __init__(self, calls: Calls, references: References, device: str, seed: int, here: bool):
        self.calls, self.references, self.device, self.seed, self.here = calls, references, device, seed, here
        self._names: set[str] | None = None

    def recorded(self, captured: Captured) -> bool:
        """Whether the backward run of a forward call was recorded, too."""
        if self._names is None:
            taps = [r for (_, tap), by in self.calls.by_tap.items() if tap.startswith(BACKWARD) for r in by.values()]
            self._names = {name for records in taps for r in records.values() if (name := _call_name(r.name))}
        return any(_call_name(r.name) in self._names for r in captured.records.values())

    def check(self, captured: Captured, options: Options) -> Iterator[CheckResult]:
        """A row for each recorded gradient, role ``grad.output.k``; one that says why there is none."""
        c = replace(captured, what=replace(captured.what, cls=_api(captured)))
        try:
            found, drawn = self._found(c)
        except (_Lacking, Declined, NotKept, RuntimeError, TypeError, ValueError, NotImplementedError) as why:
            text = why.reason if isinstance(why, Declined) else " ".join(str(why).split())[:160]
            seq = max((r.seq for r in c.records.values()), default=c.seq)
            reason = f"no gradient: {text}"
            yield unchecked(c.tap, c.what.cls, c.rank, c.step, c.call, seq, reason, status=SKIP, role="grad.")
            return
        for role, exact, mine, noise in found:
            dtype, shape = str(mine.dtype).removeprefix("torch."), tuple(mine.shape)
            reference, captured_numbers = matrix(numbers(exact), 0), matrix(numbers(mine), 0)
            v = judge(reference, captured_numbers, dtype, noise=matrix(noise, 0), common=unit(dtype))
            measures = measure(reference.numpy(), captured_numbers.numpy(), dtype)
            message = message_of(v, None, None, Expected(exact), len(captured_numbers))
            what = f"grad.{role}", dtype, shape, c.records[role].seq
            row = judged(c, what, v, measures, (len(captured_numbers), len(captured_numbers), ""), message)
            if options.standard not in (OURS, STRICT):
                row = by_standard(row, options.standard)
            yield replace(row, message=f"{row.message}; {WEAKER}".lstrip("; ")) if drawn else row

    def _found(self, c: Captured) -> tuple[list[tuple[str, Any, Any, Any]], bool]:
        op = self.calls.forward_operator(c.records)
        if op is None:
            raise _Lacking("its forward call was not captured")
        if any(r.lost for r in c.records.values()):
            raise _Lacking(LOST)
        drawn = any(r.payload is None for r in c.records.values())
        generator = torch.Generator().manual_seed(self.seed)
        call = self._forward(op, generator)
        up = [self._incoming(r, generator) for role, r in sorted(c.records.items()) if role.startswith("input.")]
        outgoing = {role: r for role, r in c.records.items() if role.startswith("output.")}
        if len(up) != 1 or not outgoing:
            raise _Lacking(f"{len(up)} gradients came in and {len(outgoing)} went out where one and some are needed")
        shapes = {int(role.split(".")[1]): tuple(r.shape) for role, r in outgoing.items()}
        step = unit(str(up[0].dtype).removeprefix("torch."))
        exact = _gradients(call, up[0], torch.float64, "cpu", shapes, 0.0)
        moved = _gradients(call, up[0], torch.float64, "cpu", shapes, 1.0)
        made = drawn or self.here
        mine = _gradients(call, up[0], None, self.device, shapes, 0.0) if made else {}
        found = []
        for role, record in sorted(outgoing.items()):
            k = int(role.split(".")[1])
            captured_numbers = mine[k].to("cpu") if made else self.calls.read(record)
            found.append((role, exact[k], captured_numbers, noise_of(exact[k], moved[k], step)))
        return found, drawn

    def _forward(self, op: OpCall, generator: Any) -> Call:
        records = self.calls.op_records[op.rank, op.tap][op.step, op.call]
        try:
            return self.calls.op_call(op, records)
        except NotKept:
            forward = Captured(op.tap, op.rank, op.step, op.call, Call(op.tap, op.op), records)
            return synthetic_inputs.drawn_call(self.calls, forward, generator)

    def _incoming(self, record: Any, generator: Any) -> Any:
        if record.payload is not None:
            return self.calls.read(record)
        return synthetic_inputs.drawn_tensor(record, generator)


def _gradients(
    call: Call, up: Any, dtype: Any, device: str, shapes: Mapping[int, tuple[int, ...]], move: float
) -> dict[int, Any]:  # fmt: skip
    """What went out, by its number. dtype: None for the call's own; move: of what goes in, in roundings. Raises
    _Lacking, Declined."""
    captured_numbers, leaves = leaves_of(call, dtype, device, move)
    ready = api.ready(captured_numbers)
    with SavedOutputs(call.outputs, None if dtype is None or move else up.dtype) as kept:
        output = api.torch_function(call.cls)(*ready.args, **ready.kwargs)
    output = output[0] if isinstance(output, (list, tuple)) else output
    if dtype is not None and not move:
        kept.made = {"output.0": output}
    if not isinstance(output, torch.Tensor) or output.grad_fn is None:
        raise _Lacking("its output does not depend on a floating input")
    step = move * unit(str(up.dtype).removeprefix("torch."))
    grad_output = up.to(device=device, dtype=output.dtype).reshape(output.shape)
    if move:
        sign = torch.randint(0, 2, grad_output.shape, generator=torch.Generator().manual_seed(2), dtype=torch.int8)
        grad_output = grad_output * (1.0 + step * (2.0 * sign - 1.0))
    arguments = torch.autograd.grad(output, list(leaves.values()), grad_output, allow_unused=True, retain_graph=True)
    node = output.grad_fn(grad_output)
    for found in (node if isinstance(node, tuple) else (node,), arguments):
        fitted = {k: _fitted(found[k] if k < len(found) else None, s) for k, s in shapes.items()}
        if all(g is not None for g in fitted.values()):
            return fitted
    seen = ", ".join(str(list(s)) for s in shapes.values())
    raise _Lacking(f"the recorded gradients ({seen}) are of a step inside it that this torch does not make")


def _fitted(gradient: Any, shape: tuple[int, ...]) -> Any | None:
    """A gradient of this shape; one of what was broadcast is added up first, as autograd does behind the node."""
    if gradient is None or len(shape) > gradient.dim():
        return None
    places = zip(reversed(shape), reversed(gradient.shape), strict=False)
    if any(n not in (1, m) for n, m in places):
        return None
    return gradient.detach().sum_to_size(shape)
