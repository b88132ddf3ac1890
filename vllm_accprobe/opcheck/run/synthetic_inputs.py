"""A dump of statistics, checked all the same: from inputs that are drawn.

The problem: a ``stats`` dump, or a trace of operators, has no tensor to replay. The idea: inputs of the recorded shape,
dtype, range and moments are drawn with a seed, parameters come from the dump or the checkpoint or are drawn as well,
and the operator that this machine has (an accelerator's, vLLM's native code, torch's) is held against float64 on them.
That says nothing of the values that the engine had, and every row says that it is weaker evidence.
Not here: how tensors are drawn (random_inputs.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from vllm_accprobe.dump.schema import Record
from vllm_accprobe.opcheck.calls.operator_calls import STATISTICS, NotKept, op_call
from vllm_accprobe.opcheck.calls.random_inputs import WEAKER, DrawnMoments, draw
from vllm_accprobe.opcheck.calls.records import Calls, Captured
from vllm_accprobe.opcheck.reference import Call, Declined
from vllm_accprobe.opcheck.reference_table import References
from vllm_accprobe.opcheck.references.kernels_common import on
from vllm_accprobe.opcheck.run.replay import Options, check_call
from vllm_accprobe.opcheck.run.rerun import forward_native
from vllm_accprobe.opcheck.run.result_row import FAIL, PASS, SKIP, Checked, unchecked


def possible(captured: Captured) -> bool:
    """Whether only the tensors of this call are missing."""
    return captured.missing == STATISTICS


def drawn(calls: Calls, captured: Captured, seed: int) -> Captured:
    """The call with drawn inputs and no outputs; as it is, with the reason, where they cannot be drawn."""
    try:
        call = _call(calls, captured, torch.Generator().manual_seed(seed))
    except (Declined, NotKept, RuntimeError, ValueError) as why:
        text = f"{STATISTICS}, and inputs cannot be drawn: {' '.join(str(why).split())[:120]}"
        return replace(captured, missing=text)
    return replace(captured, what=replace(call, outputs={}), missing="")


def check(
    calls: Calls, captured: Captured, references: References, device: str, seed: int, options: Options
) -> Iterator[Checked]:  # fmt: skip
    """The rows of a call whose inputs are drawn; one that says why, where that cannot be."""
    try:
        call = _call(calls, captured, torch.Generator().manual_seed(seed))
        made = _made(call, references, device)
    except (Declined, NotKept, RuntimeError, ValueError) as why:
        c = captured
        text = f"{STATISTICS}, and inputs cannot be drawn: {' '.join(str(why).split())[:120]}"
        seq = max((r.seq for r in c.records.values()), default=c.seq)
        yield unchecked(c.tap, c.what.cls, c.rank, c.step, c.call, seq, text, status=SKIP)
        return
    records = dict(captured.records)
    for role, value in made.items():
        dtype, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
        old = records.get(role, next(iter(records.values()), None))
        if old is not None:
            records[role] = replace(old, role=role, dtype=dtype, shape=shape, rows=None)
    drawn = replace(captured, what=replace(call, outputs=made), records=records, missing="")
    for row in check_call(calls.dump, drawn, lambda c: references.evaluate(c.what), options):
        measured = row.status in (PASS, FAIL)
        yield replace(row, message=f"{row.message}; {WEAKER}".lstrip("; ")) if measured else row


def _call(calls: Calls, captured: Captured, generator: Any) -> Call:
    """The call as recorded, its inputs drawn; its outputs have only shape and dtype."""

    def read(record: Record) -> Any:
        if record.payload is not None:
            return calls.read(record)
        if record.role.startswith(("output.", "inplace.")):
            return torch.empty(record.shape, dtype=getattr(torch, record.dtype), device="meta")
        s = record.stats
        known = DrawnMoments(s.min, s.max, s.mean, s.std) if s is not None else DrawnMoments(None, None, None, None)
        return draw(record.shape, record.dtype, known, generator)

    def value(t: Mapping[str, Any]) -> Any:
        n, mean, l2 = int(t.get("count") or 0), t.get("mean"), t.get("l2")
        std = max(l2 * l2 / n - mean * mean, 0.0) ** 0.5 if n and mean is not None and l2 is not None else None
        known = DrawnMoments(t.get("min"), t.get("max"), mean, std)
        return draw(tuple(t.get("shape", ())), str(t["dtype"]), known, generator)

    operator = calls.operator(captured)
    if operator is not None:
        return op_call(operator, captured.records, read, partial(calls.parameters.record, captured.rank), value)
    return calls.call(captured.rank, captured.tap, captured.what.cls, captured.records, read)


def _made(call: Call, references: References, device: str) -> Mapping[str, Any]:
    """What the operator of this machine gives, in the dtypes that were captured. Raises Declined."""
    found: Mapping[str, Any] | Declined | None = forward_native(call) if device == "cpu" else None
    if found is None:
        found = references.run(on(call, device))
    if isinstance(found, Declined):
        raise found
    roles = [r for r in call.outputs if r in found] or [r for r in found if r.startswith("output.")]
    if not roles:
        raise Declined("nothing that was captured comes out of it")
    return {r: found[r].detach().to("cpu") for r in roles}
