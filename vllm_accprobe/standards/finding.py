"""What a standard says about one output, and from which numbers.

The problem: a verdict without its numbers cannot be argued with. The idea: a `RuleFinding` carries each number that had
a limit, as a `Judged`; status, message and severity follow from those. Not here: the limits (one file per standard).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_accprobe.standards.measures import Measures

PASS, WARNING, ERROR, SKIP = "pass", "warning", "error", "skip"
_ORDER = (PASS, WARNING, ERROR)
_RIGHT = ("dual_", "ait_share", "cosine")


@dataclass(frozen=True, slots=True)
class Judged:
    """One number against its limit. name: of the measure or ratio; limit: above (or for shares of right elements,
    below) which the status is not pass; reason: "" or why there is no such number or what is wrong with it."""

    name: str
    value: float | None
    limit: float | None
    status: str
    reason: str = ""

    @property
    def severity(self) -> float:
        """How many times the limit is passed: value / limit, of shares of right elements their complements'; inf
        where nothing is allowed or the value is no number; 0 where it is well."""
        if self.status not in (WARNING, ERROR):
            return 0.0
        value, limit = self.value, self.limit
        if value is None or limit is None or math.isnan(value):
            return math.inf
        if self.name.startswith(_RIGHT):
            value, limit = 1.0 - value, 1.0 - limit
        return value / limit if limit > 0 else math.inf


@dataclass(frozen=True, slots=True)
class RuleFinding:
    """status: pass, warning, error or skip; algorithm: by which rule; message: "" or what decided, in one line;
    judged: all that was compared with limits, also what does not count for the status."""

    status: str
    algorithm: str
    message: str = ""
    judged: tuple[Judged, ...] = ()

    @property
    def severity(self) -> float:
        """The largest of what was judged; the ratio of small values' errors, which says how many and not how far, only
        where nothing else is beyond its limit."""
        far = [j.severity for j in self.judged if j.name != "small_value_ratio"]
        return max(far, default=0.0) or max((j.severity for j in self.judged), default=0.0)


def worst(statuses: Sequence[str]) -> str:
    """Error before warning before pass; skip where all are skipped, or there is none."""
    found = [s for s in statuses if s in _ORDER]
    return max(found, key=_ORDER.index) if found else SKIP


def of(algorithm: str, judged: Sequence[Judged], *, advisory: Sequence[Judged] = (), note: str = "") -> RuleFinding:
    """The finding of several numbers. advisory: shown and without a say; note: ends the message."""
    status = worst([j.status for j in judged])
    reasons = [j.reason for j in judged if j.reason and j.status == status]
    if status == PASS:  # a measure that could not be compared is said even where the others pass
        reasons = [j.reason for j in judged if j.status == SKIP and j.reason]
    message = "; ".join(dict.fromkeys([*reasons, *([note] if note else [])]))
    return RuleFinding(status, algorithm, message, (*judged, *advisory))


def skip(algorithm: str, reason: str) -> RuleFinding:
    return RuleFinding(SKIP, algorithm, reason)


def unmeasured(m: Measures) -> str:
    """Why nothing can be said about ``m``, or ""."""
    if not m.elements:
        return "empty tensor"
    return "no finite values" if m.max_abs_err is None and not m.inf_nan_err_ratio else ""


def broken(m: Measures) -> Judged | None:
    """The error that a one-sided NaN or infinity is, in any standard: the tools' documents do not say so, and the tools
    do not always find it."""
    if not m.inf_nan_err_ratio:
        return None
    reason = f"{m.nonfinite_mismatch} of {m.elements} elements are NaN or infinite on one side only"
    return Judged("inf_nan_err_ratio", m.inf_nan_err_ratio, 0.0, ERROR, reason)
