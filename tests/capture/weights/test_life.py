"""What is looked at in the weights' life, and how often."""

from typing import Any

import pytest
import torch

from vllm_accprobe.capture.weights.history import WeightLife, WriteWatch
from vllm_accprobe.dump.journal import LOAD, RELOAD, WAKE


def test_a_tensor_that_packing_reorders_is_of_an_unknown_order_until_it_is_given_again() -> None:
    lines: list[dict[str, Any]] = []
    life = WeightLife(lines.append, lambda path, cls: True, lambda: 0, lambda error: None)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4, bias=False).bfloat16())
    as_loaded = model[0].weight.detach().clone()
    for kind, packed in ((LOAD, as_loaded.t().reshape(4, 8)), (WAKE, None), (RELOAD, as_loaded)):
        life.begin(kind)
        if packed is not None:
            model[0].weight.data.copy_(as_loaded)
            life.examine("0", model[0])
            model[0].weight.data.copy_(packed)
        life.finish(model, as_loaded=packed is not None)
    prints = [(p["life"], p["form"], p.get("undone", "")) for p in lines if p["event"] == "weight"]
    assert prints == [(0, "loaded", ""), (0, "packed", "unknown"), (1, "packed", "unknown"), (2, "loaded", "")]


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
        life.examine("0", model[0])
        life.finish(model, as_loaded=True)
    assert failed == []
    return [line for line in lines if line["event"] == "weight" and line["name"] == "weight"]


def test_the_same_bytes_are_not_summed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_accprobe.capture.weights import history

    made: list[int] = []
    original = history.sums_of
    monkeypatch.setattr(history, "sums_of", lambda tensor: made.append(tensor.numel()) or original(tensor))
    loaded, reloaded = looked_at("full")
    assert made.count(32) == 1
    assert (loaded["order"], loaded["bag"]) == (reloaded["order"], reloaded["bag"])
    assert (loaded["life"], reloaded["life"]) == (0, 1)
    assert reloaded["written"] == [[0, 4, 1]]


def test_parts_can_be_switched_off() -> None:
    assert [line.get("written") for line in looked_at("prints")] == [None, None]
    assert looked_at("off") == []


def test_rows_that_were_written_are_told_and_memory_that_was_empty() -> None:
    with WriteWatch() as watch:
        made = torch.empty(4, 8)
        part = made.narrow(0, 1, 2)
        part.copy_(torch.ones(2, 8))
        part[0].fill_(2.0)
    assert watch.failed is None
    assert watch.of(made) == (((1, 2, 2), (2, 3, 1)), True)
    assert watch.of(torch.zeros(2, 2)) == ((), False)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_copy_that_its_operator_calls_a_view_is_new_memory(mode: type) -> None:
    """reshape and contiguous may copy: the copy must not go on with the writes of what lay there before."""
    with mode(), WriteWatch() as watch:
        source = torch.ones(4, 8)
        copied = source.t().reshape(4, 8)
        kept = watch._storages.get(copied.untyped_storage().data_ptr())
        assert kept is not None
        assert kept.writes == []
        view = source.view(8, 4)
        view[0].zero_()
    assert watch.of(source) == (((0, 1, 1),), False)
    assert watch.of(copied) == ((), False)


def test_a_watch_that_is_off_knows_nothing() -> None:
    with WriteWatch(on=False) as watch:
        made = torch.empty(4, 8).fill_(1.0)
    assert watch.of(made) == (None, False)
