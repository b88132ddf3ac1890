"""Each model's layers are seen before they are packed, whatever kernel does it here: the target's and its draft's."""

from typing import Any

import pytest
import torch

from vllm_accprobe.capture.vllm.weights import before_packing


class EmptyingMethod:
    """Packs as vLLM's CPU linear layers do: nothing of the weight is left."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.weight = torch.nn.Parameter(torch.empty(0))


def model(fill: float) -> torch.nn.Module:
    made = torch.nn.Sequential(torch.nn.Linear(3, 2, bias=False))
    torch.nn.init.constant_(made[0].weight, fill)
    made[0].quant_method = EmptyingMethod()  # type: ignore[assignment]
    return made


def pack(model: torch.nn.Module, *_: Any) -> None:
    for layer in model.modules():
        if hasattr(layer, "quant_method"):
            layer.quant_method.process_weights_after_loading(layer)


def test_a_second_model_is_a_draft_and_is_seen_before_packing_too(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from vllm.model_executor.model_loader import base_loader  # takes seconds: not in each process that collects

    monkeypatch.setattr(base_loader, "process_weights_after_loading", pack)
    seen: list[tuple[str, float]] = []
    target, draft = model(1.0), model(2.0)

    def look(who: str) -> Any:
        return lambda of, layer: seen.append((who, float(layer.weight.detach().sum())))

    with before_packing(look("target"), look("draft")):
        for one in (target, draft):
            base_loader.process_weights_after_loading(one)
    assert seen == [("target", 6.0), ("draft", 12.0)]
    assert [one[0].weight.numel() for one in (target, draft)] == [0, 0]
    assert base_loader.process_weights_after_loading is pack
    assert not any("process_weights_after_loading" in vars(one[0].quant_method) for one in (target, draft))
