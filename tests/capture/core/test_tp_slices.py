"""Fused experts whose sum the model takes itself: what they give is a partial sum in each release's spelling."""

from __future__ import annotations

from types import SimpleNamespace as Plain
from typing import Any

import pytest

from vllm_accprobe.capture.core.layout import Layouts, reduces_later


@pytest.mark.parametrize(
    ("attributes", "later"),
    [
        ({"reduce_results": False}, True),  # to 0.19
        ({"reduce_results": True}, False),
        ({"moe_config": Plain(skip_final_all_reduce=True)}, True),  # from 0.26 on
        ({"moe_config": Plain(skip_final_all_reduce=False)}, False),
        ({"moe_config": Plain()}, False),
        ({}, False),
    ],
)
def test_experts_that_leave_the_all_reduce_to_the_model(attributes: dict[str, Any], later: bool) -> None:
    experts = Plain(global_num_experts=8, _modules={}, **attributes)
    assert reduces_later(experts) is later
    layout = Layouts({"": Plain(_modules={"experts": experts}), "experts": experts}, 1, 2, 128)
    found = layout.of("experts", "output.0", (5, 128))
    assert (found.kind == "partial") is later
    if later:
        assert (found.index, found.size) == (1, 2)


def test_a_model_that_asks_for_it_after_it_has_made_its_experts() -> None:
    config = Plain(skip_final_all_reduce=False)
    experts = Plain(global_num_experts=8, moe_config=config)
    assert not reduces_later(experts)
    config.skip_final_all_reduce = True
    assert reduces_later(experts)
