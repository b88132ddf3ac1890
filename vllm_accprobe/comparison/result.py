"""What a comparison found: the values that the engine makes and the reports read.

The problem: verdict, table, page and exit code must all say the same thing. The idea: they read one frozen value,
`Comparison`, of plain numbers, strings and lists; nothing needs a tensor again. Not here: one pair (pair.py), how the
numbers come about (engine.py), what they mean (judge/), words (report/).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

from vllm_accprobe.comparison.pair import COLUMNS, FAIL, NOT_JUDGED, PASS, SKIP, Counts, Pair, Pairs
from vllm_accprobe.comparison.runner_inputs import RUNNER, cache_origin, is_cache, is_explained
from vllm_accprobe.comparison.verdict.neighbours import OriginNeighbours, neighbours, with_neighbours
from vllm_accprobe.judge.origins import OriginEntry
from vllm_accprobe.judge.statistic import RATE as FALSE_ALARM_RATE

if TYPE_CHECKING:
    from vllm_accprobe.comparison.measure.measured import Measured
    from vllm_accprobe.comparison.plan.relations import Sources
    from vllm_accprobe.comparison.row_table import RowTable, ValueSample, ValueSpread

__all__ = [
    "COLUMNS", "FAIL", "FALSE_ALARM_RATE", "PARTLY", "PASS", "SKIP", "WHOLE", "CompareError", "Comparison", "Counts",
    "Foreign", "NothingCompared", "Pair",
]  # fmt: skip

SCHEMA = 1
PARTLY, WHOLE = "partly", "whole"
"""How much of a comparison was replayed, where anything was."""


class CompareError(Exception):
    """The comparison cannot be made; the message is one line: what, where, what to do. Exit code 2."""


class NothingCompared(CompareError):
    """Both dumps were read and no pair of tensors came out. Exit code 3."""


@dataclass(frozen=True)
class Foreign:
    standard: str
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


@dataclass(frozen=True)
class Comparison:
    """The whole result. ``coverage``, ``first_divergence``, ``tokens`` and, without their neighbours, ``origins`` are
    exactly compare.json's.

    rows: errors by row; samples: some values of failed pairs; spreads: values and errors of the worst in bins
    (comparison/row_table.py); None and empty where not kept. without_spread: how many of the worst have none, by
    reason. foreign: another tool's columns, where its standard was requested (comparison/notes.py). measured: what was
    judged, to judge it again (comparison/measure/measured.py). false_alarm_rate: the probability, of a whole comparison
    of machines that only round, of any origin that the judge was configured to allow; by_chance: the expected number of
    such origins here, at most that rate, None where it was not computed. machines: {"golden": [habit], "mine":
    [habit]}, how each side computes (report/verdict_parts.py says what a habit is). replayed: "", "partly" or "whole":
    how much of it was replayed. options: what was given beside the two dumps, as words of a command line, for commands
    that compare them again (follow_ups.py). out: the directory that it is written to, as it was typed, "" where it is
    not. created: what each tap's outputs created at most, over what one operator may (judge/origins.py). golden_ids:
    golden's id of a request by mine's, which names it everywhere else, where they are not the same. states: what the
    runs' own ledgers of states have found (runner_inputs.py); any finding of mine's fails the comparison."""

    golden_path: str
    mine_path: str
    golden_run: dict[str, Any]
    mine_run: dict[str, Any]
    pairs: Sequence[Pair]
    coverage: dict[str, Any]
    first_divergence: dict[str, Any] | None
    origins: list[OriginEntry]
    tokens: dict[str, Any]
    verdict: str
    notes: list[str]
    plan: list[str]
    standard: dict[str, Any]
    rows: RowTable | None = None
    samples: tuple[ValueSample, ...] = ()
    spreads: tuple[ValueSpread, ...] = ()
    without_spread: dict[str, int] = field(default_factory=dict)
    foreign: Foreign | None = None
    measured: Measured | None = field(default=None, repr=False, compare=False)
    false_alarm_rate: float = FALSE_ALARM_RATE
    by_chance: float | None = None
    machines: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    replayed: str = ""
    options: tuple[str, ...] = ()
    out: str = ""
    created: dict[str, float] = field(default_factory=dict)
    states: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Any] = field(default_factory=dict)
    golden_ids: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.pairs, Pairs):
            object.__setattr__(self, "pairs", Pairs(self.pairs))
        c = self.counts
        counted = {"pairs": c.compared, "pairs_passed": c.passed, "pairs_failed": c.failed, "pairs_skipped": c.skipped,
                   "pairs_identical": c.identical, "pairs_bit_identical": c.bit_identical}  # fmt: skip
        # Whoever changes a pair's status makes a new Comparison, and its coverage must not tell of the old one.
        others = {k: v for k, v in self.coverage.items() if k not in counted}
        skipped = {k: v for k, v in others.get("skipped", {}).items() if not k.startswith(NOT_JUDGED)}
        skipped |= {k: n for k, n in c.skip_reasons.items() if k.startswith(NOT_JUDGED)}
        if skipped or "skipped" in others:
            others["skipped"] = skipped
        object.__setattr__(self, "coverage", counted | others)
        cache = cache_origin(self.states)
        if cache is not None:  # whatever the tensors, a replay, or another tool's standard, say
            object.__setattr__(self, "verdict", FAIL)
            runners = cache["class"] == RUNNER
            left = [o for o in self.origins if not is_cache(o) and not (runners and is_explained(o, cache))]
            object.__setattr__(self, "origins", [cache, *left])

    @property
    def table(self) -> Pairs:
        """``pairs``, by columns."""
        assert isinstance(self.pairs, Pairs)
        return self.pairs

    @property
    def counts(self) -> Counts:
        return self.table.counts

    @cached_property
    def neighbours(self) -> list[OriginNeighbours | None]:
        return neighbours(self.origins, self.table, self.measured, self.rows)

    @property
    def sources(self) -> Sources:
        """Where each module's code is, on both sides; empty where no capture said so."""
        return {} if self.measured is None else self.measured.setting.sources

    @cached_property
    def would_decide(self) -> list[dict[str, str]]:
        """What would decide where the answer is open: [{"why", "command"}], the best first (follow_ups.py)."""
        found: list[dict[str, str]] = _above("comparison.verdict.follow_ups").would_decide(self)
        return found

    @cached_property
    def not_checked(self) -> dict[str, str] | None:
        """Why not everything was checked, and what would check it: {"why", "command"}; None where all was."""
        found: dict[str, str] | None = _above("comparison.verdict.follow_ups").not_checked(self)
        return found

    @cached_property
    def next_steps(self) -> list[dict[str, str]]:
        """What to type next after a failure: [{"why", "command"}], the most useful first (report/follow_ups.py)."""
        found: list[dict[str, str]] = _above("report.follow_ups").next_steps(self)
        return found

    def to_json(self) -> dict[str, Any]:
        """compare.json (schema 1); ``states`` is there where a run kept a ledger of them. Numbers that JSON
        cannot hold become the strings "nan", "inf" and "-inf"."""
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
                "origins": with_neighbours(self.origins, self.neighbours, self.sources),
                "tokens": self.tokens,
                "false_alarm_rate": self.false_alarm_rate,
                "by_chance": self.by_chance,
                "machines": {side: self.machines.get(side, []) for side in ("golden", "mine")},
                "replayed": self.replayed,
                "not_checked": self.not_checked,
                "would_decide": self.would_decide,
                "next": self.next_steps,
            }
            | ({"weights": self.weights} if self.weights else {})
            | ({"states": self.states} if any(self.states.values()) else {})
        )

    def to_pandas(self) -> Any:
        """A pandas.DataFrame with a row per pair and compare.csv's columns (report/notebook.py)."""
        return _above("report.notebook").to_pandas(self)

    def plot_depth(self) -> Any:
        """A plotly figure of the error over depth (report/notebook.py)."""
        return _above("report.notebook").plot_depth(self)

    def _repr_html_(self) -> str:
        """What a notebook shows for a comparison: verdict, origins and worst pairs, without script."""
        return str(_above("report.notebook").repr_html(self))


def _above(module: str) -> Any:
    """What reads a finished comparison, and is imported only when it is needed."""
    return import_module(f"vllm_accprobe.{module}")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
