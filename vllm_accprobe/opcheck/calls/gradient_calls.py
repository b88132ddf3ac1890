"""Backward runs that a dump recorded, as calls that can be checked: gradients, and the forward call that they are of.

The problem: msprobe records a backward run beside its forward, ``NPU.npu_swiglu.3.backward``: the gradients that came
in as inputs, those that went out as outputs, and none of the arguments that they depend on. The idea: the record's name
says which forward call it is; its call is that one's, with the gradients of its outputs in ``extra["up"]``, and what
went out as outputs. The class begins with ``backward.``, so that no formula of the forward is held against it.
Not here: the gradients' reference (references/gradients.py), where records stand (formats/common/msprobe_records.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_accprobe.dump.schema import OpCall, Record
from vllm_accprobe.opcheck.reference import BACKWARD, Call

if TYPE_CHECKING:
    from vllm_accprobe.opcheck.calls.module_index import ModuleIndex

_NAME = re.compile(r"(.+?)\.(?:forward|backward)\b(?:\.\d+)?")


def is_gradient(tap: str) -> bool:
    return tap.startswith(BACKWARD)


class GradientCalls:
    """Of the records of ``index``."""

    def __init__(self, index: ModuleIndex):
        self._index = index
        self._forward: dict[tuple[int, int | None, str], OpCall] | None = None

    def operator(self, records: Mapping[str, Record]) -> OpCall | None:
        """The forward call of an operator's backward records; None where there is none."""
        if self._forward is None:
            self._forward = dict(self._named())
        first = next(iter(records.values()))
        match = _NAME.match(first.name)
        return self._forward.get((first.rank, first.step, match[1])) if match else None

    def _named(self) -> Any:
        for (rank, tap), ops in self._index.ops.items():
            for op in ops:
                held = self._index.op_records.get((rank, tap), {}).get((op.step, op.call), {})
                for record in held.values():
                    if match := _NAME.match(record.name):
                        yield (rank, op.step, match[1]), op
                        break

    def call(self, tap: str, cls: str, records: Mapping[str, Record], forward: Call | None) -> Call:
        """forward: the call that these gradients are of, None where it was not captured."""
        read = self._index.read
        outputs = {role: read(r) for role, r in records.items() if role.startswith("output.")}
        if forward is None:
            return Call(tap, cls, outputs=outputs)
        came = {role.removeprefix("input."): r for role, r in records.items() if role.startswith("input.")}
        ups = {f"output.{place}": read(r) for place, r in came.items()}
        extra = {**forward.extra, "up": ups, "saved": forward.outputs}
        return replace(forward, name=tap, cls=cls, outputs=outputs, extra=extra)
