"""How large the planted errors really are: measured at the faulty module's output, whatever a judge says.

The problem: a fault is planted by a factor; what that makes of a row depends on the row, and what was planted is
rounded to bfloat16. A case whose error drowns in rounding alone would be no case. The idea: against a golden of the
same kind the faulty module has bit for bit the inputs of the golden's on a CPU with one thread, so its output's
difference is the planted error and nothing else.
Not here: what should be found (table.py).
"""

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lab.cases import TUNED, Case, half
from lab.generated import NEAR

FLOOR = NEAR / 2
"""Relative L2 error that rounding to bfloat16 leaves in a row: half of generated.NEAR."""
VISIBLE = 1.5 * FLOOR
"""A case's worst row must be off by more. Chosen: half as much again as rounding alone."""
SAME_KIND = "serial"


@dataclass(frozen=True)
class Strength:
    """Relative L2 errors of the module's output: pooled over all calls (rows that decode, where only these are
    planted), and of the worst row. None: the outputs were not compared."""

    case: Case
    pooled: float | None
    worst: float | None

    @property
    def weak(self) -> bool:
        return self.worst is None or self.worst < VISIBLE


def strength(root: Path, case: Case) -> Strength:
    from vllm_accprobe.comparison.engine import compare

    golden, mine = root / "_runs" / f"{case.model}-{SAME_KIND}", root / case.name / "mine"
    result = compare(golden, mine.resolve(), taps=",".join(case.expected))
    outputs = [
        p for p in result.pairs if p.tap in case.expected and p.role.startswith("output") and p.rel_l2 is not None
    ]
    which = f"output.{case.faults[0].get('output', 0)}"
    outputs = [p for p in outputs if p.role == which] or outputs
    decode = all(f.get("rows") == "decode" for f in case.faults)
    errors = [p.decode_rel_l2 if decode else p.rel_l2 for p in outputs]
    known = [(e, p.rows or 1) for e, p in zip(errors, outputs, strict=True) if e is not None]
    rows = sum(n for _, n in known)
    return Strength(
        case,
        math.sqrt(sum(e * e * n for e, n in known) / rows) if rows else None,
        max((p.worst_row_rel_l2 for p in outputs if p.worst_row_rel_l2 is not None), default=None),
    )


def strengths(root: Path, cases: Iterable[Case], *, held_out: bool = False) -> Iterator[str]:
    """A line for each case whose run is there (of the half that is held out only where asked, or where the error is
    too small), and what each group is like."""
    found = []
    for case in cases:
        if not (root / case.name / "mine" / "run.json").exists():
            continue
        try:
            one = strength(root, case)
        except Exception as e:
            yield f"{case.name}: error: {e}"
            continue
        found.append(one)
        if one.weak or held_out or half(case.name, case.group) == TUNED:
            mark = "WEAK " if one.weak else ""
            yield f"{mark}{case.name}: pooled {_told(one.pooled)}, worst row {_told(one.worst)}"
    for group in dict.fromkeys(one.case.group for one in found):
        pooled = sorted(one.pooled for one in found if one.case.group == group and one.pooled is not None)
        if pooled:
            middle = statistics.median(pooled)
            yield f"{group}: {len(pooled)} cases, pooled {pooled[0]:.4f} to {pooled[-1]:.4f}, median {middle:.4f}"


def _told(error: float | None) -> str:
    return "not compared" if error is None else f"{error:.4f}"
