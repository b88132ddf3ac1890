"""Operator calls in a journal: read back as they were written; what is not of the language is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from dumps import put, writer

from vllm_accprobe.dump.journal import inputs, tensors
from vllm_accprobe.dump.reader import open_dump


def tensor(role: str, *shape: int, **more: Any) -> dict[str, Any]:
    return {"tensor": {"role": role, "dtype": "float32", "shape": list(shape), "stride": [1] * len(shape),
                       "device": "cpu", **more}}  # fmt: skip


def event(**more: Any) -> dict[str, Any]:
    return {"event": "op", "step": 0, "tap": "m::aten.mm.default", "op": "aten.mm.default", "call": 0, "seq": 3,
            "module": "m", "args": [tensor("input.0", 2, 3), tensor("input.1", 3, 2)],
            "outputs": [tensor("output.0", 2, 2)], **more}  # fmt: skip


def test_a_call_comes_back_with_its_tensors(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    with_list = {"list": [1, tensor("input.2.1", 4), {"float": "-inf"}, {"complex": [1.0, {"float": "nan"}]}]}
    w = writer(tmp_path / "d")
    put(w, "m::aten.mm.default", values, "float32", role="input.0")
    w.line(event(kwargs={"dtype": {"dtype": "bfloat16"}}, mutates=["input.0"], module_call=2))
    w.line(event(call=1, args=[with_list, None, True, "x", {"skipped": "the KV cache", "shape": [9]}]))
    w.close("test", {})
    dump = open_dump(tmp_path / "d")
    assert dump.problems == []
    first, second = dump.ops
    assert (first.rank, first.step, first.tap, first.call, first.seq) == (0, 0, "m::aten.mm.default", 0, 3)
    assert (first.op, first.module, first.module_call) == ("aten.mm.default", "m", 2)
    assert first.mutates == ("input.0",)
    assert first.kwargs == {"dtype": {"dtype": "bfloat16"}}
    assert [t["role"] for t in inputs(first)] == ["input.0", "input.1"]
    assert [t["role"] for t in tensors(first.outputs)] == ["output.0"]
    assert second.args == (with_list, None, True, "x", {"skipped": "the KV cache", "shape": [9]})
    assert [t["role"] for t in inputs(second)] == ["input.2.1"]
    (record,) = dump.records
    assert np.array_equal(dump.read(record), values)


def test_a_later_call_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    values = np.arange(4, dtype=np.float32)
    w = writer(tmp_path / "d")
    for call in range(3):
        put(w, "m::aten.mm.default", values + call, "float32", role="input.0", call=call)
        w.line(event(call=call, slot=[0, 1, 0][call]))
    w.close("test", {})
    dump = open_dump(tmp_path / "d")
    assert [r.call for r in dump.records] == [1, 2]
    assert [c.call for c in dump.ops] == [0, 1, 2]
