"""scripts/card_torch.py on the CPU: a way by itself, the page of what was found, what is said of what was not run."""

import card_torch
import pytest
import torch


def traced(made: card_torch.Model, x: torch.Tensor) -> card_torch.Forward:
    """As ``compiled``, without inductor, which takes a minute."""
    torch._dynamo.reset()
    return torch.compile(made, fullgraph=True, backend="eager")


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_a_way_finds_the_fault_and_changes_no_bit(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setitem(card_torch.WAYS, "compiled", traced)
    monkeypatch.setattr(card_torch, "TIMES", 2)
    with torch.no_grad():
        found, taps = card_torch.run(way, torch.device("cpu"), {})
    assert found["passed"]
    assert found["fault_first"] == card_torch.FAULTY
    assert len(taps) == found["taps"] == 16
    assert found["clean_largest"] == 0
    assert set(found["step_us"]) == {"without", "off", "on"}
