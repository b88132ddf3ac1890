"""Our own standards: limits by rows for pairs of tensors (limits.py), floors for one operator's output.

Of an operator's output the verdict is opcheck/floors/verdict.py's, called ``operator``, and ``strict`` where
rounding toward zero fails; of two machines it is what both csv files say themselves.
"""

from __future__ import annotations

from vllm_accprobe.standards import limits as c
from vllm_accprobe.standards.declaration import MachineRule, MachineSide, NamedStandard
from vllm_accprobe.standards.finding import ERROR, PASS, WARNING, Judged, RuleFinding, skip
from vllm_accprobe.standards.limits import Standard
from vllm_accprobe.standards.two_machines import both

_STRICT = {"created": c.STRICT_CREATED, "total": c.STRICT_TOTAL, "amplification": c.STRICT_AMPLIFICATION}
OPERATOR = "operator"


def _own(side: MachineSide) -> RuleFinding:
    """What the csv's own status says."""
    if side.status not in (PASS, WARNING, ERROR):
        return skip(OPERATOR, side.message or "no status")
    if side.status == PASS:
        return RuleFinding(PASS, OPERATOR)
    verdict = Judged("verdict", side.severity, 1.0, side.status, side.message)
    return RuleFinding(side.status, OPERATOR, side.message, (verdict,))


def _two(golden: MachineSide, mine: MachineSide, api: str, algorithm: str | None) -> RuleFinding:
    return both(_own(golden), _own(mine))


STANDARDS = (
    NamedStandard("accprobe", limits=Standard()),
    NamedStandard(OPERATOR, floors=True, machines=MachineRule(_two)),
    NamedStandard("strict", limits=Standard("strict", **_STRICT, truncations=0), floors=True),
)
