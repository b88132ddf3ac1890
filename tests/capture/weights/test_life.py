"""What of the weights' life cannot be looked at is counted, and ends nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_accprobe.capture.weights.life import NOT_ASKED, WeightLife
from vllm_accprobe.dump.weights.weight_life import LOAD, RELOAD


class Stubborn:
    """A kernel that hides its weight and wants more than its input."""

    def apply(self, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        raise RuntimeError("where is the metadata?")


def test_a_kernel_that_does_not_give_its_weight_back_is_a_counted_skip() -> None:
    lines: list[dict[str, Any]] = []
    skips: list[tuple[str, str]] = []
    failed: list[BaseException] = []
    life = WeightLife(
        lines.append, lambda path, cls: True, lambda: 0, failed.append,
        skip=lambda path, reason: skips.append((path, reason)),
    )  # fmt: skip
    model = torch.nn.Sequential(torch.nn.Linear(8, 4).bfloat16())
    model[0].quant_method = Stubborn()
    life.begin(LOAD)
    life.look("0", model[0])
    model[0].weight = torch.nn.Parameter(torch.empty(0, dtype=torch.bfloat16))  # packed out of sight
    life.finish(model, given=True)
    assert skips == [("0", f"{NOT_ASKED} (RuntimeError)")]
    assert failed == []
    assert not life.off
    assert lines


def looked_at(how: str) -> list[dict[str, Any]]:
    """The prints of a model that is loaded, and reloaded with the same values."""
    lines: list[dict[str, Any]] = []
    failed: list[BaseException] = []
    life = WeightLife(lines.append, lambda path, cls: True, lambda: 0, failed.append, how=how)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4))
    for kind in (LOAD, RELOAD):
        life.begin(kind)
        with life.watch:
            model[0].weight.data.copy_(torch.ones(4, 8))
        life.look("0", model[0])
        life.finish(model, given=True)
    assert failed == []
    return [line for line in lines if line["event"] == "weight" and line["name"] == "weight"]


def test_the_same_bytes_are_not_summed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_accprobe.capture.weights import life

    made: list[int] = []
    original = life.sums_of
    monkeypatch.setattr(life, "sums_of", lambda tensor: made.append(tensor.numel()) or original(tensor))
    loaded, reloaded = looked_at("full")
    assert made.count(32) == 1
    assert (loaded["order"], loaded["bag"]) == (reloaded["order"], reloaded["bag"])
    assert (loaded["life"], reloaded["life"]) == (0, 1)
    assert reloaded["written"] == [[0, 4, 1]]


def test_parts_can_be_switched_off() -> None:
    assert [line.get("written") for line in looked_at("prints")] == [None, None]
    assert looked_at("off") == []
