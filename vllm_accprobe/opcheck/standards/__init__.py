"""Other tools' standards for one operator's output, for one machine and for two.

`judge` says what a standard makes of one output's Measures, `judge_two` of two machines' measures of the same call.
Our own standard for one machine is opcheck/floors/verdict.py's, called "operator"; for two, its two verdicts side by
side (pairs.both). Which algorithm an operator falls under: apis.py; what each does: single.py, two_sided.py, pairs.py.
"""

from __future__ import annotations

from vllm_accprobe.opcheck.measures import Measures
from vllm_accprobe.opcheck.standards import pairs
from vllm_accprobe.opcheck.standards.apis import api_of
from vllm_accprobe.opcheck.standards.finding import ERROR, PASS, SKIP, WARNING, Finding, Judged
from vllm_accprobe.opcheck.standards.single import SINGLE
from vllm_accprobe.opcheck.standards.two_sided import RELEASES, Values
from vllm_accprobe.opcheck.standards.two_sided import judge as _judge_release

__all__ = [
    "ERROR", "NAMES", "PASS", "SKIP", "TWO_SIDED", "WARNING", "Finding", "Judged", "UnknownStandard", "judge",
    "judge_two",
]  # fmt: skip

NAMES = tuple(SINGLE)
"""Standards for one machine, besides our own."""
TWO_SIDED = (*RELEASES, "ait", "xray")
"""Standards for two machines, besides "operator"."""


class UnknownStandard(ValueError):
    """A name that is none of a standard; the message lists those that are."""


def judge(name: str, measures: Measures, op: str, dtype: str) -> Finding:
    """One output against its reference under the standard ``name``, one of NAMES. op: an API, `aten.mm.default` or a
    module's class; dtype: the output's, torch's name. Raises UnknownStandard."""
    if name not in SINGLE:
        raise UnknownStandard(f"no standard is called {name!r}; there are operator, {', '.join(NAMES)}")
    return SINGLE[name](measures, op, dtype)


def judge_two(
    name: str, golden: Values, mine: Values, op: str, dtype: str, *, cls: str = "", algorithm: str | None = None
) -> Finding:
    """One output on two machines under the standard ``name``, one of TWO_SIDED. golden, mine: Measures' fields that
    were measured; cls: the module's class, where ``op`` is no API; algorithm: instead of the documents' choice, for
    msprobe's standards. Raises UnknownStandard."""
    if name in RELEASES:
        return _judge_release(RELEASES[name], golden, mine, api_of(op, cls), dtype, algorithm)
    if name == "xray":
        return pairs.decades(golden, mine)
    if name == "ait":
        return pairs.both(SINGLE["ait"](as_measures(golden), op, dtype), SINGLE["ait"](as_measures(mine), op, dtype))
    raise UnknownStandard(
        f"no standard for two machines is called {name!r}; there are operator, {', '.join(TWO_SIDED)}"
    )


def as_measures(values: Values) -> Measures:
    """Measures of a csv's values; what is not there is None, and a count 0."""
    return Measures(**{f: values.get(f) if f not in _COUNTS else int(values.get(f) or 0) for f in Measures.FIELDS})  # type: ignore[arg-type]


_COUNTS = ("elements", "nonfinite", "nonfinite_mismatch", *pairs.DECADES)
