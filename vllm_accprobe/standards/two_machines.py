"""Two machines under a rule that was made for one.

The problem: ait's tolerance and our own verdict judge one machine. The idea: where mine fails and golden does not, it
is an error; where both fail, the standard is too tight for the operator, a warning. `each` makes such a rule for two of
any rule for one.
Not here: msprobe's standard for two (msprobe.py), torch_xray's counts (xray.py).
"""

from __future__ import annotations

from vllm_accprobe.standards.declaration import MachineRule, MachineSide, OutputRule
from vllm_accprobe.standards.finding import ERROR, PASS, SKIP, WARNING, RuleFinding, skip
from vllm_accprobe.standards.measures import as_measures

_RANK = {PASS: 0, WARNING: 1, ERROR: 2}


def both(golden: RuleFinding, mine: RuleFinding) -> RuleFinding:
    """Of one standard's findings about each machine."""
    if SKIP in (golden.status, mine.status):
        side, why = ("golden", golden) if golden.status == SKIP else ("mine", mine)
        return skip(mine.algorithm, f"{side}: {why.message or 'skipped'}")
    if _RANK[mine.status] > _RANK[golden.status]:
        return mine
    if mine.status == PASS:
        return mine
    message = f"golden does not pass either ({golden.message or golden.status}); mine: {mine.message or mine.status}"
    return RuleFinding(WARNING, mine.algorithm, message, mine.judged)


def each(rule: OutputRule) -> MachineRule:
    """``rule`` on each machine, and `both` of what it says."""

    def judge(golden: MachineSide, mine: MachineSide, api: str, algorithm: str | None) -> RuleFinding:
        if golden.dtype != mine.dtype:
            return dtypes_differ(golden, mine)
        return both(*(rule(as_measures(side.values), api, mine.dtype) for side in (golden, mine)))

    return MachineRule(judge)


def dtypes_differ(golden: MachineSide, mine: MachineSide, algorithm: str = "") -> RuleFinding:
    return skip(algorithm, f"dtypes differ: golden {golden.dtype}, mine {mine.dtype}; errors have no ratio")
