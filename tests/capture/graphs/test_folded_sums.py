"""Products that an addition reads directly are found, in one forward, and get no tap of the default set."""

from typing import Any

import pytest
import torch

from vllm_accprobe.capture.graphs.placement import FOLDED, FoldedSums, plan, watching


class RowParallelLinear(torch.nn.Linear):
    """By its name one of the default set's."""


class Shared(torch.nn.Module):
    """What becomes of a product: ``how`` takes it and the input."""

    def __init__(self, how: Any, bias: bool = False):
        super().__init__()
        self.down = RowParallelLinear(4, 4, bias=bias)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how(self.down(x), x)  # type: ignore[no-any-return]


class Model(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module):
        super().__init__()
        self.model = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)  # type: ignore[no-any-return]


HOWS = {
    "added": (lambda y, x: y + x, True), "added the other way round": (lambda y, x: x + y, True),
    "added in place": (lambda y, x: y.add_(x), True), "a row for all": (lambda y, x: y + x[:1], True),
    "later": (lambda y, x: (x.relu() * 2, y + x)[1], True), "multiplied first": (lambda y, x: y * 2 + x, False),
    "in float32": (lambda y, x: y.float() + x.float(), False), "of more dimensions": (lambda y, x: y + x[None], False),
    "a number": (lambda y, x: y + 1, False), "a part": (lambda y, x: y[:2] + x[:2], False),
}  # fmt: skip


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference"])
@pytest.mark.parametrize("how", HOWS)
def test_what_is_added_directly_is_folded(how: str, inference: bool) -> None:
    does, folded = HOWS[how]
    model = Model(Shared(does)).bfloat16()
    with torch.inference_mode(inference), torch.no_grad(), watching(model, ["model"]) as seen:
        model(torch.randn(5, 4).bfloat16())
    assert [one.folded for one in seen.found if one.role == "output.0" and one.path == "model.down"] == [folded]
    for folds in (False, True):
        made = plan(seen, lambda path, cls: False, 32, 10**6, folds=folds)
        assert [one.path for one in made.placed] == ([] if folds and folded else ["model.down"])
        assert made.unfit == ({"model.down": FOLDED} if folds and folded else {})
    everything = plan(seen, lambda path, cls: True, 32, 10**6, folds=True, places=lambda path, cls: True)
    assert [one.path for one in everything.placed] == ["model.down"]


def test_a_bias_is_what_is_folded_already() -> None:
    model = Model(Shared(lambda y, x: y + x, bias=True))
    with torch.no_grad(), watching(model, ["model"]) as seen:
        model(torch.randn(5, 4))
    assert not any(one.folded for one in seen.found)


def test_memory_that_is_used_again_is_another_product() -> None:
    sums, one = FoldedSums(), torch.ones(2, 2)
    sums.ran("aten::mm", (), one)
    first = sums.number(one)
    sums.ran("aten::mm", (), one)
    sums.ran("aten::add", (one, torch.ones(2, 2)), None)
    assert first is not None
    assert sums.folded == {first + 1}


def test_few_are_held() -> None:
    sums, kept = FoldedSums(), [torch.ones(2, 2) for _ in range(100)]
    for one in kept:
        sums.ran("aten::mm", (), one)
    assert sums.number(kept[0]) is None
    assert sums.number(kept[-1]) == 100
