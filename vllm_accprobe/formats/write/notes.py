"""What an export notes beside its tensors, so that reading it back loses nothing.

The problem: another tool's layout has no name for an input (HDF5's datasets are numbered), no place for an operator
below a module, for a module's numbers (eps, head counts) or for how a rank's tensor is a part of the whole. The idea:
the layout is kept as that tool wants it, and what it cannot say is noted beside it, in the words of our own journal
(events.py, opcalls.py); who does not know of the notes does not see them, and whoever reads them trusts nothing.
Not here: where a container keeps them (containers.py, formats/xray.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_accprobe.dump import dtypes, opcalls
from vllm_accprobe.dump.journal import events
from vllm_accprobe.dump.journal.event_lines import MODULE
from vllm_accprobe.dump.schema import Layout, Module, OpCall, Record

NAME = "accprobe"
"""Of the attribute, or the key, that holds notes."""
DTYPES = "accprobe.dtypes"
"""In a safetensors header's metadata: dtypes by name, where the format has none for them."""
LONGEST = 60_000
"""Bytes of one attribute: HDF5 takes 64 kB."""


@dataclass(frozen=True)
class Noted:
    """Where a tensor belongs. dtype: the dump's own; "" where the container's is it."""

    tap: str
    role: str
    call: int
    cls: str
    dtype: str
    layout: Layout


def of_record(r: Record) -> dict[str, Any]:
    found: dict[str, Any] = {"tap": r.tap, "role": r.role, "call": r.call, "class": r.cls, "dtype": r.dtype}
    return found | ({} if r.layout.kind == "replicated" and r.layout.size == 1 else {"layout": r.layout.to_event()})


def of_module(m: Module) -> dict[str, Any]:
    return {key: value for key, value in MODULE.to_line(m).items() if key != "event"}


def of_op(op: OpCall) -> dict[str, Any]:
    return {
        "step": op.step, "tap": op.tap, "op": op.op, "call": op.call, "seq": op.seq, "module": op.module,
        "args": list(op.args), "kwargs": dict(op.kwargs), "outputs": list(op.outputs), "mutates": list(op.mutates),
        "module_call": op.module_call,
    } | ({} if op.inside is None else {"inside": op.inside})  # fmt: skip


def narrow(dtype: str) -> bool:
    """Whether HDF5 and npz have no such dtype: its numbers are float32 there, which is exact."""
    return dtype == "bfloat16" or dtype.startswith("float8")


def text(note: Mapping[str, Any]) -> bytes:
    return json.dumps(note, separators=(",", ":"), allow_nan=False).encode("ascii")


def parsed(data: bytes) -> Mapping[str, Any]:
    """{} for what is no note."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def record(e: Any) -> Noted | None:
    """The note of a record; None for what is none."""
    try:
        dtype = events.string(e, "dtype", "")
        return Noted(
            events.string(e, "tap"), events.string(e, "role"), events.integer(e, "call", 0),
            events.string(e, "class", ""), dtype if dtype in dtypes.DTYPES else "", Layout.from_event(e.get("layout")),
        )  # fmt: skip
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def module(e: Any) -> Module | None:
    """A module as of_module wrote it; None for what is none."""
    try:
        return MODULE.from_line(e)  # type: ignore[no-any-return]
    except (ValueError, TypeError, AttributeError):
        return None


def op(rank: int, e: Any) -> OpCall | None:
    """A call as of_op wrote it; None for what is none."""
    try:
        return opcalls.op_call(rank, e)
    except (ValueError, TypeError, AttributeError, KeyError):
        return None
