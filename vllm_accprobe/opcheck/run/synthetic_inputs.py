"""A dump of statistics, checked all the same: from inputs that are drawn.

The problem: a ``stats`` dump, or a trace of operators, has no tensor to replay. The idea: inputs of the recorded shape,
dtype, range and moments are drawn with a seed, parameters come from the dump or the checkpoint or are drawn as well,
and the operator that this machine has (an accelerator's, vLLM's native code, torch's) is compared with float64 on them.
That says nothing of the values that the engine had, and every row says that it is weaker evidence.
Not here: how tensors are drawn (random_inputs.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from vllm_accprobe.dump.schema import REPLICATED, Record
from vllm_accprobe.opcheck.calls.case import closed
from vllm_accprobe.opcheck.calls.operator_calls import FINGERPRINT, LOST, STATISTICS, NotKept, op_call
from vllm_accprobe.opcheck.calls.random_inputs import WEAKER, DrawnMoments, draw
from vllm_accprobe.opcheck.calls.records import Calls, Captured
from vllm_accprobe.opcheck.reference import Call, Declined, decline_if
from vllm_accprobe.opcheck.reference_table import References
from vllm_accprobe.opcheck.references import api
from vllm_accprobe.opcheck.references.aten import tensors_by_role
from vllm_accprobe.opcheck.references.parts import on
from vllm_accprobe.opcheck.run.check_calls import Options, check_call
from vllm_accprobe.opcheck.run.judged_row import without_verdict
from vllm_accprobe.opcheck.run.rerun import forward_native
from vllm_accprobe.opcheck.run.result_row import FAIL, PASS, SKIP, WARNING, CheckResult

MEASURED = (PASS, WARNING, FAIL)
_CHECKED = ("aten.", "torch.ops.aten.", *(f"{head}." for head in api.TORCH_HEADS))
"""Operators that examine their indices before they follow them. Others may read and write wherever drawn integers,
which fit neither each other nor a cache, would lead them."""


_OFFSETS = ("aten._grouped_mm", "aten._scaled_grouped_mm")
"""Operators whose integers are places where groups end: drawn ones fit no groups, and rows are left as memory was."""


def _whole(tensor: Any) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def possible(captured: Captured) -> bool:
    """Whether only the tensors of this call are missing: all of them."""
    if captured.missing.endswith(FINGERPRINT):
        return all(r.payload is None and not r.lost for r in captured.records.values())
    return captured.missing == STATISTICS


def drawn(calls: Calls, captured: Captured, seed: int, anew: bool = False) -> Captured:
    """The call with drawn inputs, its outputs without values; as it is, with the reason, where they cannot be drawn.
    anew: inputs that were captured are drawn, too."""
    records = captured.records
    if anew:
        records = {role: r if role.startswith("param") else replace(r, payload=None) for role, r in records.items()}
    try:
        found = replace(captured, records=records)
        call = drawn_call(calls, found, torch.Generator().manual_seed(seed))
    except (Declined, NotKept, RuntimeError, ValueError) as why:
        return replace(captured, missing=_why_not(why))
    return replace(captured, what=call, missing="")


def check(
    calls: Calls, captured: Captured, references: References, device: str, options: Options, weaker: bool
) -> Iterator[CheckResult]:  # fmt: skip
    """The rows of what this machine's operator makes of a call; one that says why, where it cannot. weaker: its inputs
    were drawn."""
    c = captured
    try:
        decline_if(c.missing, c.missing)
        made = _made(c.what if weaker else closed(c.what, references), references, device, weaker)
    except (Declined, RuntimeError, ValueError) as why:
        text = c.missing or (_why_not(why) if weaker else f"cannot be run here: {_line(why)}")
        yield without_verdict(c, "", None, SKIP, text)
        return
    made_note = WEAKER if weaker else f"made here, on {device}"
    for row in check_call(calls.dump, with_outputs(c, c.what, made), lambda x: references.evaluate(x.what), options):
        yield replace(row, message=f"{row.message}; {made_note}".lstrip("; ")) if row.status in MEASURED else row


def _why_not(why: Exception) -> str:
    return f"{STATISTICS}, and inputs cannot be drawn: {_line(why)}"


def _line(why: Exception) -> str:
    return " ".join(str(why).split())[:120]


def with_outputs(captured: Captured, call: Call, made: Mapping[str, Any]) -> Captured:
    """``captured`` as if ``call`` had returned ``made``, tensors by role."""
    records = dict(captured.records)
    c = captured
    for role, value in made.items():
        dtype, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
        old = records.get(role) or next(iter(records.values()), None)
        if old is None:  # an operator of which its line alone was kept
            old = Record(c.rank, c.step, c.tap, c.what.cls, role, c.call, c.seq, dtype, shape, None, 0, None, None,
                         REPLICATED, None)  # fmt: skip
        records[role] = replace(old, role=role, dtype=dtype, shape=shape, rows=None)
    return replace(captured, what=replace(call, outputs=dict(made)), records=records, missing="")


def drawn_call(calls: Calls, captured: Captured, generator: Any) -> Call:
    """The call as recorded, its inputs drawn; its outputs have only shape and dtype. Raises Declined, NotKept."""

    def read(record: Record) -> Any:
        if record.payload is not None:
            return calls.read(record)
        if record.lost:
            raise NotKept(LOST)
        if record.role.startswith(("output.", "inplace.")):
            return torch.empty(record.shape, dtype=getattr(torch, record.dtype), device="meta")
        return drawn_tensor(record, generator)

    def value(t: Mapping[str, Any]) -> Any:
        kept = calls.parameters.record(captured.rank, None, str(t["param"])) if t.get("param") else None
        if kept is not None:
            return draw(tuple(t.get("shape", kept.shape)), str(t["dtype"]), _moments(kept), generator)
        n, mean, l2 = int(t.get("count") or 0), t.get("mean"), t.get("l2")
        std = max(l2 * l2 / n - mean * mean, 0.0) ** 0.5 if n and mean is not None and l2 is not None else None
        known = DrawnMoments(t.get("min"), t.get("max"), mean, std)
        return draw(tuple(t.get("shape", ())), str(t["dtype"]), known, generator)

    operator = calls.operator(captured)
    if operator is not None:
        return op_call(operator, captured.records, read, partial(calls.parameters.record, captured.rank, None), value)
    call = calls.call(captured.rank, captured.tap, captured.what.cls, captured.records, read)
    lacking = calls.parameters.lacking(captured.rank, captured.tap, call.params)
    return replace(call, params={**call.params, **{name: read(record) for name, record in lacking.items()}})


def drawn_tensor(record: Record, generator: Any) -> Any:
    """A tensor like the one that ``record`` tells of. Raises Declined."""
    return draw(record.shape, record.dtype, _moments(record), generator)


def _moments(record: Record) -> DrawnMoments:
    s = record.stats
    return DrawnMoments(s.min, s.max, s.mean, s.std) if s is not None else DrawnMoments(None, None, None, None)


def _made(call: Call, references: References, device: str, weaker: bool) -> Mapping[str, Any]:
    """What the operator of this machine gives, in the dtypes that were captured. Raises Declined."""
    if weaker and call.cls.removeprefix("torch.ops.").startswith(_OFFSETS):
        raise Declined("drawn integers are no ends of groups")
    unchecked_kernel = weaker and "." in call.cls and not call.cls.startswith(_CHECKED)
    if unchecked_kernel and any(_whole(t) for t in tensors_by_role(call.args, call.kwargs).values()):
        raise Declined("a kernel with integer inputs, which it may take for addresses")
    found: Mapping[str, Any] | Declined | None = forward_native(call) if device == "cpu" else None
    if found is None:
        found = references.run(on(call, device))
    if isinstance(found, Declined):
        raise found
    roles = [r for r in call.outputs if r in found] or [r for r in found if r.startswith("output.")]
    decline_if(not roles, "nothing that was captured comes out of it")
    return {r: found[r].detach().to("cpu") for r in roles}
