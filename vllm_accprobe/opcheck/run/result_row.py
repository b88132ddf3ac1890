"""One output of one call, as checked: the row that everything after the check works with.

Not here: how a row comes about (check_calls.py), how it is printed (table.py). Needs no torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

from vllm_accprobe.align.names import enclosing
from vllm_accprobe.judge.statistic import PROVED
from vllm_accprobe.standards.measures import Measures
from vllm_accprobe.standards.ours import OPERATOR

PASS, FAIL, SKIP, ERROR, WARNING = "pass", "fail", "skip", "error", "warning"
CACHE = "cache"
"""The role of a row that is of a cache."""
OURS, STRICT = OPERATOR, "strict"
"""Our own standards: verdict.py's; and the same without rounding toward zero (rounding.py)."""


class Unavailable(Exception):
    """What was requested cannot be had on this machine; one line."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One output of one call; table.py makes opcheck.csv of it. rows: in the tensor; checked: that had a reference;
    unchecked_because: why the others had none; left: which rows of the tensor these are.

    created: rel_l2 of the worst row, reference against mine; measure, measured, allowed: of verdict.Verdict, in floors;
    request, position, column: where, None where the measure does not say; message: for people; measures: of
    measures.py, None where nothing was measured; algorithm: how another tool's standard came to the status; rounding:
    "toward zero" where the numbers show it, "" where they do not, or not enough of them. dtype: that of the numbers, by
    which they are judged; stored: of the dump's tensor where that is a wider one (grid.py), else "". evidence: how it
    was computed, counts in one line (of_machine.py), of the outputs that were examined for that, else "". habit:
    what its machine does everywhere, where that was allowed for, else "". tier: which floor it breaks (statistic.py),
    "" where it passes; chance: then, the probability that a replay of a correct machine shows as much anywhere, 0.0
    where it is proved. cache: of an attention over a cache of 8 bits, the fields of
    reference.py's CacheRounding. smallest: the relative errors that would have been named at least, of all rows, of a
    column and of one row (floors/pooled.py), None where no limit was in force. replayed: runs of the tensor's rows,
    (first, one behind the last), where a replay left out the others; () where it left out none. cause: why it is wrong,
    a sentence, where that is proved (opcheck/causes), else "". by_name: by what blocks of its class usually do."""

    tap: str
    cls: str
    role: str
    rank: int
    step: int | None
    call: int
    seq: int
    dtype: str = ""
    shape: tuple[int, ...] = ()
    rows: int = 0
    checked: int = 0
    unchecked_because: str = ""
    created: float | None = None
    measure: str | None = None
    measured: float | None = None
    allowed: float | None = None
    request: str | None = None
    position: int | None = None
    column: int | None = None
    status: str = SKIP
    message: str = ""
    measures: Measures | None = None
    algorithm: str = ""
    stored: str = ""
    rounding: str = ""
    evidence: str = ""
    habit: str = ""
    tier: str = ""
    chance: float | None = None
    cache: tuple[str, float, float, float] | None = None
    left: tuple[int, ...] = ()
    smallest: tuple[float, float, float] | None = None
    replayed: tuple[tuple[int, int], ...] = ()
    cause: str = ""
    by_name: bool = False

    @property
    def severity(self) -> float:
        """measured / allowed, 0 where nothing was measured."""
        if self.measured is None or self.allowed is None:
            return 0.0
        return self.measured / self.allowed if self.allowed else (math.inf if self.measured else 0.0)

    @property
    def id(self) -> str:
        """``rank.step.seq``, "" for a parameter."""
        return id_of(self.rank, self.step, self.seq) if self.step is not None else ""

    def to_plain(self) -> list[Any]:
        """As JSON has it, from one of our processes to another."""
        measures = None if self.measures is None else [getattr(self.measures, name) for name in Measures.FIELDS]
        return [measures, *_rest(self)]

    @classmethod
    def of_plain(cls, plain: list[Any]) -> CheckResult:
        measures, *rest = plain
        found = dict(zip(_REST, (_tuples(v) if type(v) is list else v for v in rest), strict=True))
        return cls(**found, measures=None if measures is None else Measures(*measures))


COLUMNS = tuple(f.name for f in fields(CheckResult))
_REST = tuple(name for name in COLUMNS if name != "measures")
_rest = attrgetter(*_REST)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def id_of(rank: int, step: int | None, seq: int) -> str:
    """What a person writes to mean this row: ``rank.step.seq``."""
    return f"{rank}.{step}.{seq}"


OWN_CODE = "no block of its class gives what its parts add up to: its own code may do more (a golden decides)"


def without_unknown_blocks(rows: Sequence[CheckResult]) -> list[CheckResult]:
    """``rows``, with the layers and MLPs unchecked that are known by name alone, where no output of their class, in two
    layers or more, is what its parts add up to: where our formula is right for none it may be the formula that is wrong
    (Granite's residual factor, a layer with attention and MLP side by side)."""
    outer = {up for r in rows for up in enclosing(r.tap)}
    right = {(r.cls, r.role) for r in rows if r.status == PASS}
    wrong: dict[tuple[str, str], set[str]] = {}
    for r in rows:
        if r.status == FAIL and r.by_name and r.tap in outer and (r.cls, r.role) not in right:
            wrong.setdefault((r.cls, r.role), set()).add(r.tap)
    unknown = {key for key, taps in wrong.items() if len(taps) > 1}
    none: dict[str, Any] = {"measure": None, "measured": None, "allowed": None, "tier": "", "chance": None, "cause": ""}
    return [
        replace(r, status=SKIP, message=OWN_CODE, **none) if r.status == FAIL and (r.cls, r.role) in unknown else r
        for r in rows
    ]


def grids(rows: Iterable[CheckResult]) -> list[str]:
    """Sentences on the outputs that were judged as numbers of a coarser dtype than their tensors'."""
    found = Counter((r.stored, r.dtype) for r in rows if r.stored)
    return [
        f"{n:,} {'output is a tensor' if n == 1 else 'outputs are tensors'} of {stored} that hold{'s' * (n == 1)} "
        f"{dtype} numbers: judged by what {dtype} can hold" for (stored, dtype), n in found.most_common()
    ]  # fmt: skip


def unchecked(
    tap: str, cls: str, rank: int, step: int | None, call: int, seq: int, why: str, *, status: str = SKIP,
    role: str = "", dtype: str = "", shape: tuple[int, ...] = (),
) -> CheckResult:  # fmt: skip
    """A row that has no verdict, and says why."""
    return CheckResult(
        tap, cls, role, rank, step, call, seq, dtype, shape, unchecked_because=why, status=status, message=why
    )


def of_no_operator(tap: str, cls: str, rank: int, text: str, **more: Any) -> CheckResult:
    """A proved fault that no operator made: a cache's, the runner's, a weight's. more: further fields."""
    return CheckResult(tap, cls, CACHE, rank, None, 0, 0, status=FAIL, message=text, tier=PROVED, **more)
