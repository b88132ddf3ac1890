"""What a comparison found: the values that the engine makes and the reports read.

The problem: verdict, table, page and exit code must all say the same thing. The idea: they read one frozen
value, `Comparison`, of plain numbers, strings and lists; nothing is computed twice and nothing needs a tensor again.
Not here: how the numbers come about (engine.py), what they mean (judge/), how they look (report/).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vllm_accprobe.judge.constants import FALSE_ALARM_RATE

if TYPE_CHECKING:
    from vllm_accprobe.comparison.measure.measured import Measured
    from vllm_accprobe.comparison.row_table import RowTable, Sample

SCHEMA = 1
PASS, FAIL, SKIP = "pass", "fail", "skip"
PARTLY, WHOLE = "partly", "whole"


class CompareError(Exception):
    """The comparison cannot be made; the message is one line: what, where, what to do. Exit code 2."""


class NothingCompared(CompareError):
    """Both dumps were read and no pair of tensors came out. Exit code 3."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One row of compare.csv: a tensor of mine against the same rows of the golden.

    golden, mine: each tensor's name in its own dump's spelling (``tap/role#call``); "" where there is no partner.
    step: mine's step, None for a parameter. rank: mine's rank, or None when several ranks were merged.
    shape: of the rows compared, ``[rows, ...]``; the metrics are defined in kernels/catalog.py.
    worst_row_norm_ratio: the norm ratio mine/golden furthest from 1. max_abs_index: index within ``shape``.
    status: pass, fail or skip; message: why, in words. order: place in the data flow, small is early.
    rule: how the names were paired. rows: how many rows were compared (None for tensors without rows).
    phase: prefill, decode, mixed or None. worst_request, worst_position: of the worst row.
    limit: what worst_row_rel_l2 was held against (0.0: exact equality). identical: the numbers compared are equal, in
    whatever dtype and file they lie (NaN equals NaN); bit_identical: so are their stored bits, by hash or by reading.
    Neither where only statistics, checksums or samples were there to compare.
    measure, measured, allowed: which measure decided (judge.verdict.METRICS, or ``created``), its value in the row that
    decided, and its own limit; a norm ratio may be off by ``allowed`` from 1. floor: the worst row that honest rounding
    and batching alone would give, floor_source: how that is known (judge/calibration.py), x_floor: worst_row_rel_l2 in
    units of it. elements, kl: for other tools' standards (oracle.ELEMENT_FIELDS, KL divergence); no columns.
    """

    golden: str
    mine: str
    step: int | None
    rank: int | None
    dtype_golden: str | None
    dtype_mine: str | None
    shape: tuple[int, ...]
    cosine: float | None = None
    max_abs_err: float | None = None
    mean_abs_err: float | None = None
    rmse: float | None = None
    rel_l2: float | None = None
    max_rel_err: float | None = None
    worst_row_rel_l2: float | None = None
    worst_row_norm_ratio: float | None = None
    nonfinite: int | None = None
    nonfinite_mismatch: int | None = None
    status: str = SKIP
    message: str = ""
    tap: str = ""
    cls: str = ""
    role: str = ""
    call: int = 0
    order: int = 0
    rule: str = ""
    rows: int | None = None
    phase: str | None = None
    prefill_rel_l2: float | None = None
    decode_rel_l2: float | None = None
    worst_request: str | None = None
    worst_position: int | None = None
    max_abs_index: tuple[int, ...] | None = None
    max_abs_golden: float | None = None
    max_abs_mine: float | None = None
    limit: float | None = None
    identical: bool = False
    bit_identical: bool = False
    measure: str | None = None
    measured: float | None = None
    allowed: float | None = None
    floor: float | None = None
    floor_source: str | None = None
    x_floor: float | None = None
    elements: tuple[float, ...] | None = None
    kl: float | None = None


_NO_COLUMNS = ("elements", "kl")
COLUMNS: tuple[str, ...] = tuple(f.name for f in fields(Pair) if f.name not in _NO_COLUMNS)
"""Names of compare.csv's columns, in order."""


@dataclass(frozen=True)
class Counts:
    """How many pairs there are of each kind: the only place that counts them, for all that is printed and written.

    total: rows of compare.csv, compared + skipped; compared: passed + failed; identical: of those compared, whichever
    their status; bit_identical: of those identical. skip_reasons: adds up to ``skipped``."""

    passed: int
    failed: int
    skipped: int
    identical: int
    bit_identical: int
    skip_reasons: dict[str, int]

    @property
    def compared(self) -> int:
        return self.passed + self.failed

    @property
    def total(self) -> int:
        return self.compared + self.skipped


def count_pairs(pairs: list[Pair]) -> Counts:
    status = Counter(p.status for p in pairs)
    reasons = Counter(p.message for p in pairs if p.status == SKIP)
    known = [p.bit_identical for p in pairs if p.identical and p.status != SKIP]
    return Counts(status[PASS], status[FAIL], status[SKIP], len(known), sum(known), dict(reasons))


@dataclass(frozen=True)
class Foreign:
    """Another tool's columns: their names, and a row of cells for each pair."""

    standard: str
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


@dataclass(frozen=True)
class Comparison:
    """The whole result. ``coverage``, ``first_divergence``, ``origins`` and ``tokens`` are exactly compare.json's.

    rows: errors by row, and samples: some values of failed pairs (comparison/row_table.py); None and empty where not
    kept. foreign: another tool's columns, where its standard was asked for (comparison/verdict/foreign.py). measured:
    what was judged, to judge it again (comparison/measure/measured.py). false_alarm_rate: the probability, of a whole
    comparison of honest machines, of any origin that the judge was told to allow; by_chance: the expected number of
    such origins here, at most that rate, None where nobody worked it out. machines: {"golden": [habit], "mine":
    [habit]}, how each side computes (report/machines.py says what a habit is). replayed: "", "partly" or "whole": how
    much of it was replayed. options: what was given beside the two dumps, as words of a command line, for commands that
    compare them again (deciding.py)."""

    golden_path: str
    mine_path: str
    golden_run: dict[str, Any]
    mine_run: dict[str, Any]
    pairs: list[Pair]
    coverage: dict[str, Any]
    first_divergence: dict[str, Any] | None
    origins: list[dict[str, Any]]
    tokens: dict[str, Any]
    verdict: str
    notes: list[str]
    plan: list[str]
    standard: dict[str, Any]
    rows: RowTable | None = None
    samples: tuple[Sample, ...] = ()
    foreign: Foreign | None = None
    measured: Measured | None = field(default=None, repr=False, compare=False)
    false_alarm_rate: float = FALSE_ALARM_RATE
    by_chance: float | None = None
    machines: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    replayed: str = ""
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        c = self.counts
        counted = {"pairs": c.compared, "pairs_passed": c.passed, "pairs_failed": c.failed, "pairs_skipped": c.skipped,
                   "pairs_identical": c.identical, "pairs_bit_identical": c.bit_identical}  # fmt: skip
        # Whoever changes a pair's status makes a new Comparison, and its coverage must not tell of the old one.
        others = {k: v for k, v in self.coverage.items() if k not in counted}
        object.__setattr__(self, "coverage", counted | others)

    @cached_property
    def counts(self) -> Counts:
        return count_pairs(self.pairs)

    @cached_property
    def would_decide(self) -> list[dict[str, str]]:
        """What would decide where the answer is open: [{"why", "command"}], the best first (deciding.py)."""
        from vllm_accprobe.comparison.verdict import deciding

        return deciding.would_decide(self)

    def to_json(self) -> dict[str, Any]:
        """compare.json (schema 1). Numbers that JSON cannot hold become the strings "nan", "inf" and "-inf"."""
        return _plain(
            {
                "schema": SCHEMA,
                "verdict": self.verdict,
                "golden": self.golden_path,
                "mine": self.mine_path,
                "notes": self.notes,
                "standard": self.standard,
                "coverage": self.coverage,
                "first_divergence": self.first_divergence,
                "origins": self.origins,
                "tokens": self.tokens,
                "false_alarm_rate": self.false_alarm_rate,
                "by_chance": self.by_chance,
                "machines": {side: self.machines.get(side, []) for side in ("golden", "mine")},
                "would_decide": self.would_decide,
            }
        )

    def to_pandas(self) -> Any:
        """A pandas.DataFrame with a row per pair and compare.csv's columns (report/notebook.py)."""
        from vllm_accprobe.report import notebook

        return notebook.to_pandas(self)

    def plot_depth(self) -> Any:
        """A plotly figure of the error over depth (report/notebook.py)."""
        from vllm_accprobe.report import notebook

        return notebook.plot_depth(self)

    def _repr_html_(self) -> str:
        """What a notebook shows for a comparison: verdict, origins and worst pairs, without script."""
        from vllm_accprobe.report import notebook

        return notebook.repr_html(self)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
