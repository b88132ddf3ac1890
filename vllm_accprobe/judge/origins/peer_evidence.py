"""What judging hidden errors looks at: one tensor with what stands in front of it, and the sign that one may show.

The problem: each layer is held against every other one, so that what follows from one of them alone would be worked
out as often as there are layers. The idea: a `Look` is plain arrays; `Known` is what it is to the others, worked out
when it is first asked for.
Not here: asking (outliers.py), what stands in front of what (origin.py), sums per column (columns.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

import numpy as np

from vllm_accprobe.judge import constants as c
from vllm_accprobe.judge.chance import tail
from vllm_accprobe.judge.origins.columns import Columns

GROWTH, GAIN, COLUMNS = "growth", "gain", "columns"
_NONE = np.zeros(0, np.int64)
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(eq=False)
class Look:
    """One tensor and what stands in front of it, all float64 [n], by row key.

    err, gain: relative L2 error and slope - 1 of each row. before, gain_before: the largest of the inputs' at the rows
    that influence it. passed: mean gain of each input over all rows, with its sign, by the input's kind: to first order
    the outputs' mean follows the inputs' means, and single rows' noise averages out of both. unit: one rounding.
    inputs_known: what went in was compared, so that ``before`` of 0 means equal inputs. unfed: of an operator's own
    inputs none was compared.
    columns, columns_before: sums per column, None where not taken. mixing: whether the operator mixes
    positions (attention). untapped: operators that nobody saw lie in front.
    """

    tap: str
    role: str
    cls: str
    unit: float
    keys: np.ndarray
    err: np.ndarray
    gain: np.ndarray
    before: np.ndarray
    gain_before: np.ndarray
    width: int = 1
    columns: Columns | None = None
    columns_before: Sequence[Columns] = ()
    mixing: bool = False
    passed: Mapping[str, float] = field(default_factory=dict)
    inputs_known: bool = False
    untapped: bool = False
    growth: np.ndarray = field(default_factory=lambda: np.zeros(0))
    unfed: bool = False

    @property
    def kind(self) -> str:
        """What it has in common with the same operator in other layers."""
        return kind_of_place(self.tap, self.role)


@dataclass(frozen=True)
class Hidden:
    """rows: bool [n], where it shows. how: GROWTH, GAIN or COLUMNS. size: of the error, as a relative L2 error of the
    rows or columns concerned. strength: times what was needed. tier: see tiers.py; chance: the probability that honest
    machines show this anywhere in the comparison. columns: the bad ones."""

    rows: np.ndarray
    how: str
    size: float
    strength: float
    tier: str
    chance: float
    columns: np.ndarray = field(default_factory=lambda: _NONE)


@cache
def operator_of(tap: str) -> str:
    """What modules have in common whose paths differ by a number alone: ``model.layers.*.mlp.down_proj``."""
    return _NUMBER.sub("*", tap)


def kind_of_place(tap: str, role: str) -> str:
    """`Look.kind` of a tap and role."""
    return f"{operator_of(tap)}|{role}"


class Known:
    """What a look is to the other layers: worked out once, asked for by each of them."""

    def __init__(self, look: Look):
        self.look = look

    def work_out(self) -> None:
        """What each layer asks of every other one, while the rows are at hand."""
        if self.fit:
            _ = self.growth, self.log_made, self.gain, self.before

    @cached_property
    def fit(self) -> bool:
        """Whether something can be learned from it: enough rows, and numbers."""
        return len(self.look.keys) >= c.FEW and bool(np.isfinite(np.median(self.look.err)))

    @cached_property
    def before(self) -> float:
        """Median over its rows."""
        return float(np.median(self.look.before))

    @cached_property
    def growth(self) -> float:
        """Median over its rows, in powers of two."""
        return float(np.median(self.look.growth))

    @cached_property
    def made(self) -> float:
        """What the typical row gained in error, beyond what came in: relative L2, independent errors taken for
        granted; of a row that came in with no finite error nothing can be told, 0."""
        told = np.isfinite(self.look.before)
        gained = self.look.err**2 - np.where(told, self.look.before, 0.0) ** 2
        return float(np.sqrt(max(float(np.median(np.where(told, gained, 0.0))), 0.0)))

    @cached_property
    def log_made(self) -> float:
        """``made`` in powers of two, not less than the least honest error: noise that differs by a factor from layer to
        layer is normal there."""
        floor = c.LEAST_HONEST * self.look.unit
        return 0.5 * float(np.log2(self.made**2 + floor**2))

    @cached_property
    def gain(self) -> float:
        return float(np.median(self.look.gain))

    @cached_property
    def gain_error(self) -> float:
        """Standard error of ``gain``, from the rows' own spread and number."""
        spread = c.MAD * float(np.median(np.abs(self.look.gain - self.gain)))
        return spread / (c.INDEPENDENT * max(len(self.look.gain), 1)) ** 0.5

    @cached_property
    def growth_tail(self) -> float:
        return tail(self.look.growth, self.growth)

    @cached_property
    def gain_tail(self) -> float:
        return tail(self.look.gain, self.gain)
