"""scripts/card_torch.py on the CPU: a way by itself, the page of what was found, what is said of what was not run."""

from __future__ import annotations

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
    with torch.no_grad():
        found, taps = card_torch.run(way, torch.device("cpu"), {})
    assert found["passed"]
    assert found["fault_first"] == card_torch.FAULTY
    assert len(taps) == found["taps"] == 16
    assert found["clean_largest"] == 0
    assert set(found["step_us"]) == {"without", "off", "on"}


def test_the_page_says_what_failed_and_what_was_not_run() -> None:
    one = {
        "taps": 16, "off_changes_no_bit": True, "on_changes_no_bit": False, "clean_largest": 0.25, "fault_first": None,
        "ready_s": {"without": 1.0, "with": 2.0}, "step_us": {"without": 10.0, "off": 11.0, "on": 12.0},
        "tap_us": {"off": 0.1, "on": 0.2}, "passed": False,
    }  # fmt: skip
    page = card_torch.page(torch.device("cpu"), {"eager": one, "captured": "needs CUDA graphs; this is cpu"})
    assert page.splitlines()[7:] == [
        "| | taps | off changes no bit | on changes no bit | largest distance, clean | fault seen first at | |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| eager | 16 | yes | NO | 2.50e-01 | nowhere | FAILED |",
        "| captured | needs CUDA graphs; this is cpu | | | | | not run |",
        "",
        "| | made ready, s, without taps | with | fastest step, µs, without taps | off | on | µs a tap, off | on |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| eager | 1.0 | 2.0 | 10 | 11 | 12 | 0.1 | 0.2 |",
    ]
