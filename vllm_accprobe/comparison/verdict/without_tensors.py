"""Dumps without a tensor to compare: what their ledgers of states and their weights' lives say all the same.

The problem: a ledger of states is a dump without tensors, and so is a server's that was loaded, reloaded and never
asked; a comparison of two such found "nothing" and hid what they had found. The idea: where neither side captured a
tensor, mine's ledger, or the weights that were compared, are the comparison. Where tensors were captured and none has a
partner, that stays "nothing could be compared", since whoever wanted them compared must not read PASS; but a finding of
mine's own is told, and fails. Not here: what they say (comparison/states.py, judge/weights/).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_accprobe.comparison.measure.measured import Setting
from vllm_accprobe.comparison.states import findings, watched
from vllm_accprobe.judge.weights.faults import wrong_weights


def without_tensors(setting: Setting, why: str, units: bool) -> str:
    """The sentence that is said of a comparison without pairs; "" where there is nothing to compare at all. units:
    whether any tensor of one side has one of the other, by name."""
    seen = setting.coverage
    captured = units or bool(seen.get("taps_only_golden") or seen.get("taps_only_mine"))
    mine = watched(setting.states, "mine")
    weights = setting.weights.get("compared", 0) or setting.weights.get("told", 0)
    wrong = findings(setting.states, "mine")
    said = [f"mine's ledger of states ({_looked(mine)})"] if mine else ["mine's ledger of states"] if wrong else []
    said += [f"{weights:,} weights"] if weights else []
    found = wrong or wrong_weights(setting.weights)
    if not said or (captured and not found):
        return ""
    because = why.removeprefix("nothing could be compared: ")
    return f"no tensors were compared ({because}): this is about " + " and ".join(said)


def _looked(mine: Mapping[str, Any]) -> str:
    steps = max(int(one.get("steps", 0)) for one in mine.values())
    return f"{steps:,} steps"
