"""Names of operators in msprobe's dumps."""

from __future__ import annotations

import pytest

from vllm_accprobe.formats.msprobe import operator_name


@pytest.mark.parametrize(
    ("api", "framework", "operator"),
    [
        ("Functional.linear", "pytorch", "Functional.linear"),
        ("Functional.linear", "mindspore", "mindspore.ops.linear"),
        ("Tensor.add", "mindspore", "mindspore.Tensor.add"),
        ("Tensor.add", "pytorch", "Tensor.add"),
        ("Mint.add", "mindspore", "Mint.add"),
        ("Aten.mm.default", "pytorch", "aten.mm.default"),
        ("Aten", "pytorch", "Aten"),
    ],
)
def test_names(api: str, framework: str, operator: str) -> None:
    assert operator_name(api, framework) == operator
