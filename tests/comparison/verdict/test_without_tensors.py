"""Dumps without tensors: a ledger or the weights are the comparison; tensors without partners stay "nothing"."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_accprobe.comparison.notes import without_tensors

WATCHED = {"watched": {"0": {"steps": 24}}, "count": 0, "findings": []}
WRONG = WATCHED | {"count": 1, "findings": [{"sentence": "a stale slot"}]}
NONE: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("mine", "weights", "captured", "told"),
    [
        (WATCHED, NONE, False, "this is about mine's ledger of states (24 steps)"),
        (NONE, {"compared": 12, "findings": []}, False, "this is about 12 weights"),
        (WATCHED, {"told": 3, "findings": []}, False, "mine's ledger of states (24 steps) and 3 weights"),
        (WATCHED, NONE, True, ""),  # whoever captured tensors wants them compared
        (WRONG, NONE, True, "this is about mine's ledger of states (24 steps)"),
        (NONE, {"compared": 12, "findings": [{"side": "mine"}]}, True, "this is about 12 weights"),
        (NONE, {"compared": 12, "findings": [{"side": "both"}]}, True, ""),
        (NONE, NONE, False, ""),
    ],
)
def test_what_is_said_instead(mine: dict[str, Any], weights: dict[str, Any], captured: bool, told: str) -> None:
    coverage = {"taps_only_golden": ["model"] if captured else [], "taps_only_mine": []}
    setting: Any = SimpleNamespace(coverage=coverage, states={"golden": {}, "mine": mine}, weights=weights)
    said = without_tensors(setting, "nothing could be compared: g holds no tensors", units=False)
    assert told in said
    assert bool(said) == bool(told)
    assert not said or said.startswith("no tensors were compared (g holds no tensors)")
