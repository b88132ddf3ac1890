"""What is compared at one place: a unit of the plan, and the sampler's own places.

Not here: which units there are (units.py), the groups that a unit has (joining.py), measuring (measure/).
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_accprobe.comparison.plan.joining import Group
from vllm_accprobe.judge.flow import Key
from vllm_accprobe.judge.routing import Chooser

SAMPLER = "sampler"
TOKEN, TOP_LOGITS, TOP_IDS = "output.token", "output.top_logits", "output.top_ids"
MASKED_LOGITS, MASKED_IDS = "output.masked_logits", "output.masked_ids"
"""What masks left of the logits, in steps with any: two runs need not mask alike."""
LOOKED_UP = (TOP_IDS, MASKED_LOGITS, MASKED_IDS)
"""Roles of the sampler that are looked at where a token flips, and not compared."""


@dataclass(frozen=True)
class Unit:
    """All of one (tap, role, call) of mine, with the golden's groups that may hold its rows.

    depth: layers passed; gap: those of them that were passed unseen since the compared tensor before
    (judge/untapped_depth.py). router: of chosen experts, the groups (golden's, mine's) of the logits by which they were
    chosen, where both are there, with chooser and bias (golden's, mine's) where something else than their size decides
    (judge/routing.py). takes: of a router's logits, how many of the highest are taken, where the choice
    itself is not in both dumps; else 0."""

    key: Key
    golden_key: Key
    cls: str
    rule: str
    order: int
    depth: int
    golden: list[Group]
    mine: list[Group]
    router: tuple[list[Group], list[Group]] | None = None
    gap: int = 0
    takes: int = 0
    chooser: Chooser | None = None
    bias: tuple[Group, Group] | None = None

    @property
    def is_param(self) -> bool:
        return self.key[1].startswith("param.")

    @property
    def vision(self) -> bool:
        return any(g.where is not None and g.where[2].startswith("vision") for g in self.mine)
