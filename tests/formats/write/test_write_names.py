"""Names in exports: what is written, and what it is read as."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_accprobe.dump.schema import Layout, Record
from vllm_accprobe.formats.write import containers

REPLICATED = Layout("replicated")


def _record(tap: str, role: str, step: int | None = 0, call: int = 0, cls: str = "Linear", rank: int = 0) -> Record:
    return Record(rank, step, tap, cls, role, call, 0, "float32", (2,), None, 0, None, None, REPLICATED, None)


RECORDS = [
    _record("a.fc", "param.weight", None), _record("a.fc", "input.x"), _record("a.fc", "input.2.1"),
    _record("a.fc", "output.0"), _record("a.fc", "output.0", call=1), _record("a/b", "output.0"),
    _record("a_b", "output.0"), _record("<root>", "output", 10, cls=""),
]  # fmt: skip


def test_keys() -> None:
    written = containers.record_keys(RECORDS)
    assert written == [
        "param/a.fc/param.weight", "0/a.fc/input.x", "0/a.fc/input.2.1", "0/a.fc/output.0", "0/a.fc/output.0#1",
        "0/a_b/output.0", "0/a_b/output.0~2", "10/<root>/output",
    ]  # fmt: skip
    places = [containers.key_place(key) for key in written]
    assert [p and (p.rank, p.step, p.tap, p.role, p.call) for p in places] == [
        (None, None, "a.fc", "param.weight", 0), (None, 0, "a.fc", "input.x", 0), (None, 0, "a.fc", "input.2.1", 0),
        (None, 0, "a.fc", "output.0", 0), (None, 0, "a.fc", "output.0", 1), (None, 0, "a_b", "output.0", 0),
        (None, 0, "a_b", "output.0~2", 0), (None, 10, "<root>", "output", 0),
    ]  # fmt: skip
    several = containers.record_keys([_record("x", "output.0"), _record("x", "output.0", rank=1)])
    assert several == ["rank0/0/x/output.0", "rank1/0/x/output.0"]
    assert containers.key_place(several[1]) == containers.KeyPlace(1, 0, "x", "output.0", 0)
    assert containers.key_place("weights") is None
    assert containers.key_place("0/x/other.0") is None


@pytest.mark.parametrize(("name", "place"), [
    ("blocks.1.norm2.LayerNorm.1.forward_params.weight", ("blocks.1.norm2", "LayerNorm", "param.weight", None)),
    ("blocks.0.fc.ColumnParalleLinear.forward_output.0", ("blocks.0.fc", "ColumnParalleLinear", "output.0", None)),
    ("blocks.0.forward_input.2", ("blocks.0", "", "input.2", None)),
    ("Qwen3_VisionTransformer.0.forward_output.0", ("<root>", "Qwen3_VisionTransformer", "output.0", None)),
    ("lm_head.Linear.0.call3.forward_output.0", ("lm_head", "Linear", "output.0", 3)),
    ("a.Linear.0.backward_input.0", ("backward.a", "Linear", "input.0", None)),
    ("something else", ("something else", "", "output.0", None)),
])  # fmt: skip
def test_places(name: str, place: tuple[Any, ...]) -> None:
    assert containers.dataset_place(name) == place
