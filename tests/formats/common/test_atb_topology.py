"""Graphs of ATB: which operator stands for which."""

from __future__ import annotations

import pytest

from vllm_accprobe.formats import atb


@pytest.mark.parametrize("kind", ["LinearQuantOperation", "LinearDequantOnly", "LinearW8A8Operation"])
def test_what_a_quantised_type_stands_for(kind: str) -> None:
    plain = {"LinearDequantOnly": "LinearNoQuant"}.get(kind, "LinearOperation")
    assert atb.plain_kind(kind) == atb.plain_kind(plain)
