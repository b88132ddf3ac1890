"""torch_xray: the largest error, and on two machines its counts of errors above 1e-n.

Its document states no threshold, but in its example table all of Max Err 0.0156 fail and none of 0.0078, so 0.01 is
taken; IsClose is torch.isclose with its defaults and GtNum counts |d| > 1e-3. Of two machines it says only to examine
both counts. A kernel that is as good as golden's may have some more elements beyond a bound, but not a decade's worth,
so more than twice golden's count beyond 10**-n is a warning, and an error if it is also more than golden's count beyond
10**-(n+1). That rule is ours.
"""

from __future__ import annotations

from vllm_accprobe.standards.declaration import Cell, MachineRule, MachineSide, NamedStandard, Numbers, PairRule
from vllm_accprobe.standards.finding import ERROR, PASS, WARNING, Judged, RuleFinding, broken, of, skip, unmeasured
from vllm_accprobe.standards.measures import DECADES, Measures, Values
from vllm_accprobe.standards.two_machines import dtypes_differ

LARGEST = 1e-2
COLUMNS = ("Status", "Cosine", "RMSE", "IsClose (%)", "Max Err (t)", "GtNum")


def pairs(n: Numbers) -> tuple[tuple[Cell, ...], str, str]:
    """Fail where the largest error is above 0.01."""
    close, above = n.share("close"), n.sum("above", 0.0)
    m, largest = n.measures, n.measures.max_abs_err
    bad = n.broken or (largest is not None and not largest <= LARGEST)
    cells = m.cosine, m.rmse, None if close is None else 100.0 * close, largest, None if above is None else int(above)
    why = "NaN or infinity on one side only" if n.broken else f"Max Err above {LARGEST:g}" if bad else ""
    return ("Fail" if bad else "", *cells), ERROR if bad else PASS, why


def output(m: Measures, op: str, dtype: str) -> RuleFinding:
    """The largest error against 0.01."""
    if why := unmeasured(m):
        return skip("decades", why)
    if wrong := broken(m):
        return of("decades", [wrong])
    largest = m.max_abs_err or 0.0
    reason = f"{m.above_1e_2} elements are off by more than {LARGEST:g}" if largest > LARGEST else ""
    return of("decades", [Judged("max_abs_err", largest, LARGEST, ERROR if reason else PASS, reason)])


def machines(golden: MachineSide, mine: MachineSide, api: str, algorithm: str | None) -> RuleFinding:
    """The counts of both sides."""
    return decades(golden.values, mine.values) if golden.dtype == mine.dtype else dtypes_differ(golden, mine)


def decades(golden: Values, mine: Values) -> RuleFinding:
    """golden, mine: measures that were taken."""
    theirs, ours = _counts(golden), _counts(mine)
    if not theirs or not ours:
        side = "mine" if theirs else "golden"
        return skip("decades", f"{side} has no counts above 1e-n")
    judged = []
    for n, (g, m) in enumerate(zip(theirs, ours, strict=True), 1):
        finer = theirs[n] if n < len(theirs) else None
        if m > 2 * g and finer is not None and m > finer:
            text = f"{m:.0f} elements are off by more than 1e-{n}, golden has {finer:.0f} beyond 1e-{n + 1}"
            judged.append(Judged(f"above_1e_{n}", m, finer, ERROR, text))
        elif m > 2 * g:
            text = f"{m:.0f} elements are off by more than 1e-{n}, golden has {g:.0f}"
            judged.append(Judged(f"above_1e_{n}", m, 2 * g, WARNING, text))
        else:
            judged.append(Judged(f"above_1e_{n}", m, 2 * g, PASS))
    coarsest = next((j for j in judged if j.status == ERROR), None)
    if coarsest is not None:  # the others would say the same again
        return of("decades", [coarsest], advisory=[j for j in judged if j is not coarsest])
    return of("decades", judged)


def _counts(values: Values) -> list[float]:
    found = [values.get(d) for d in DECADES]
    return [v for v in found if v is not None] if None not in found else []


STANDARDS = (NamedStandard("xray", pairs=PairRule(COLUMNS, pairs), output=output, machines=MachineRule(machines)),)
