"""What is said before all numbers: what a proof has found of a dump's taps."""

from __future__ import annotations

import math
from typing import Any

import pytest

from vllm_accprobe.comparison.notes import taps_effect

NOTHING = {
    "tokens": False, "top_logits": False, "logits": False, "root": False, "root_rel_l2": 0.0, "against": "off",
    "repeats": True,
}  # fmt: skip


def said(changed: Any) -> str:
    return "; ".join(taps_effect({"engine": {"graphs": {"changed": changed}}}))


def test_taps_that_changed_nothing() -> None:
    assert said(NOTHING) == "its taps changed no bit of the result (accprobe doctor --graphs)"


def test_taps_that_changed_the_result() -> None:
    changed = NOTHING | {"root": True, "logits": True, "root_rel_l2": 0.00934, "module": "model.norm\n"}
    assert said(changed) == (
        "ITS TAPS CHANGED THE RESULT by 0.0093 (relative L2): logits, root, first where a tap stands at model.norm?; "
        "compare without that tap (docs/doctor.md)"
    )
    assert said(NOTHING | {"tokens": True}).startswith("ITS TAPS CHANGED THE RESULT: tokens; ")
    assert "not known" in said(changed | {"repeats": False})


@pytest.mark.parametrize(
    "run", [{}, {"engine": 3}, {"engine": {"graphs": {}}}, {"engine": {"graphs": {"changed": "x"}}}]
)
def test_without_a_proof_nothing_is_said(run: dict[str, Any]) -> None:
    assert taps_effect(run) == []


def test_a_strangers_figures_are_no_matter() -> None:
    assert said({"repeats": 1}) == said(NOTHING | {"repeats": None})
    assert "not known" in said({})
    assert said(NOTHING | {"root": True, "root_rel_l2": math.inf}).startswith("ITS TAPS CHANGED THE RESULT by inf")
