"""What a standard's file declares: its names, and for each what it judges and how.

The problem: compare has pairs of whole tensors, opcheck one output against its reference, opdiff one output of two
machines; a tool's rule may fit one of them or all. The idea: a `NamedStandard` has a place for each, and what is empty
it cannot judge; rules are plain functions from numbers to words. Not here: the rules (one file each), finding them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from vllm_accprobe.standards.finding import ERROR as ERROR, PASS as PASS, WARNING as WARNING, RuleFinding
from vllm_accprobe.standards.measures import Measures, Values, as_measures

if TYPE_CHECKING:
    from vllm_accprobe.standards.limits import Standard

PAIRS, OUTPUT, MACHINES = "pairs of tensors", "one machine's output", "two machines"
SKIPPED, NO_VERDICT = "SKIP", ""
"""Words of a PairRule besides PASS, WARNING and ERROR: nothing could be judged; the tool gives no verdict."""
Cell = float | int | str | None
OF_PAIRS = ("cosine", "max_abs_err", "mean_abs_err", "rmse", "rel_l2", "max_rel_err", "kl", "nonfinite",
            "nonfinite_mismatch")  # fmt: skip
"""Measures that pairs have."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """One pair of tensors. measures: as of one output, where pairs are measured for them; elements: sums by the names
    of kernels/definition.ELEMENT_FIELDS, None where not measured; identical: all numbers are equal; zero: both hold
    nothing else."""

    dtype: str
    measures: Measures
    elements: Mapping[str, float] | None
    identical: bool
    zero: bool

    @classmethod
    def of(
        cls, dtype: str, size: int, values: Values, elements: Mapping[str, float] | None, identical: bool
    ) -> Numbers:  # fmt: skip
        """size: all elements; values: OF_PAIRS by name. Largest values of each side are not measured of pairs,
        and no overflow is distinguished from another infinity. What both sides hold (NaN and NaN, the same infinity) is
        right in shares."""
        found = {**values, "elements": size}
        zero = values.get("cosine") is None and not values.get("max_abs_err")
        numbers = cls(dtype, as_measures(found), elements, identical, zero)
        if size:
            both, wrong = numbers.count, numbers.measures.nonfinite_mismatch
            agreed = numbers.measures.nonfinite - wrong
            found["inf_nan_err_ratio"] = wrong / size
            for parts in (100, 1000, 10000):
                near = numbers.sum(f"within_{parts}", float(both))
                found[f"dual_{parts}"] = None if near is None else (near + agreed) / size
            unequal = numbers.sum("unequal", 0.0)
            found["binary_err_ratio"] = None if unequal is None else (unequal + wrong) / size
        return replace(numbers, measures=as_measures(found))

    @property
    def count(self) -> int:
        return self.measures.elements - self.measures.nonfinite

    @property
    def broken(self) -> bool:
        return self.measures.nonfinite_mismatch > 0

    def sum(self, name: str, identical: float) -> float | None:
        """``elements``' ``name``; where it was not measured, ``identical`` of identical tensors."""
        if self.elements is not None:
            return self.elements[name]
        return identical if self.identical else None

    def share(self, name: str) -> float | None:
        """Of the elements, those that ``name`` counts; of identical tensors all."""
        counted = self.sum(name, float(self.count))
        return None if counted is None or not self.count else counted / self.count


@dataclass(frozen=True, slots=True)
class PairRule:
    """columns: after our own in compare.csv; rule: the cells of a tensor, its word (pass, warning, error, SKIPPED, or
    NO_VERDICT), and why; needs_kl: whether a further pass is to be made."""

    columns: tuple[str, ...]
    rule: Callable[[Numbers], tuple[tuple[Cell, ...], str, str]]
    needs_kl: bool = False


OutputRule = Callable[[Measures, str, str], RuleFinding]
"""(measures, op, dtype): op: an API, `aten.mm.default` or a module's class; dtype: the output's, torch's name."""


class MachineSide(Protocol):
    """One output on one machine, as a csv has it: opcheck/diff/csv_rows.Row."""

    @property
    def dtype(self) -> str: ...
    @property
    def status(self) -> str:
        """The writer's own: pass, warning, error, skip, or "" where it gave none."""

    @property
    def message(self) -> str: ...
    @property
    def severity(self) -> float: ...
    @property
    def values(self) -> Mapping[str, float | None]:
        """Measures that were taken, by name."""


@dataclass(frozen=True, slots=True)
class MachineRule:
    """rule: (golden, mine, api, algorithm or None); api: api_of's name; algorithm: what the user chose of
    ``algorithms``, which are by the names that ``--algorithm`` takes. level: of an API, "" where there are none;
    columns: further names of Judged that become columns of details.csv."""

    rule: Callable[[MachineSide, MachineSide, str, str | None], RuleFinding]
    algorithms: Mapping[str, str] = field(default_factory=dict)
    level: Callable[[str], str] = lambda api: ""
    columns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NamedStandard:
    """name: what ``--standard`` takes. limits: compare's own, by rows, in units of rounding (limits.py); pairs:
    compare's
    by another tool's rule; output: of one machine's output; floors: opcheck judges it by its own floors instead
    (opcheck/floors/verdict.py); machines: of two machines."""

    name: str
    limits: Standard | None = None
    pairs: PairRule | None = None
    output: OutputRule | None = None
    floors: bool = False
    machines: MachineRule | None = None

    @property
    def ours(self) -> bool:
        return self.limits is not None or self.floors

    def judges(self, what: str) -> bool:
        """what: PAIRS, OUTPUT or MACHINES."""
        if what == PAIRS:
            return self.limits is not None or self.pairs is not None
        return (self.output is not None or self.floors) if what == OUTPUT else self.machines is not None
