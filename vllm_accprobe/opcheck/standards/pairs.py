"""Two machines under standards that were made for one, or that state no limits.

The problem: ait's tolerance and our own verdict judge one machine, and torch_xray's document says only to look at the
counts beyond 1e-n of both. The idea: where mine fails and golden does not, it is an error; where both fail, the
standard is too tight for the operator, a warning. For the counts: a kernel that is as good as golden's may have some
more elements beyond a bound, but not a decade's worth, so more than twice golden's count beyond 10**-n is a warning,
and an error if it is also more than golden's count beyond 10**-(n+1). That rule is ours.
Not here: msprobe's two-sided standard (two_sided.py).
"""

from __future__ import annotations

from vllm_accprobe.opcheck.standards.finding import ERROR, PASS, SKIP, WARNING, Finding, Judged, of, skip
from vllm_accprobe.opcheck.standards.two_sided import Values

DECADES = tuple(f"above_1e_{n}" for n in range(1, 7))
_RANK = {PASS: 0, WARNING: 1, ERROR: 2}


def both(golden: Finding, mine: Finding) -> Finding:
    """Of one standard's findings about each machine."""
    if SKIP in (golden.status, mine.status):
        side, why = ("golden", golden) if golden.status == SKIP else ("mine", mine)
        return skip(mine.algorithm, f"{side}: {why.message or 'skipped'}")
    if _RANK[mine.status] > _RANK[golden.status]:
        return mine
    if mine.status == PASS:
        return mine
    message = f"golden does not pass either ({golden.message or golden.status}); mine: {mine.message or mine.status}"
    return Finding(WARNING, mine.algorithm, message, mine.judged)


def decades(golden: Values, mine: Values) -> Finding:
    """torch_xray's counts of both sides."""
    theirs, ours = _counts(golden), _counts(mine)
    if not theirs or not ours:
        side = "mine" if theirs else "golden"
        return skip("decades", f"{side} has no counts above 1e-n")
    judged = []
    for n, (g, m) in enumerate(zip(theirs, ours, strict=True), 1):
        finer = theirs[n] if n < len(theirs) else None
        if m > 2 * g and finer is not None and m > finer:
            said = f"{m:.0f} elements are off by more than 1e-{n}, golden has {finer:.0f} beyond 1e-{n + 1}"
            judged.append(Judged(f"above_1e_{n}", m, finer, ERROR, said))
        elif m > 2 * g:
            said = f"{m:.0f} elements are off by more than 1e-{n}, golden has {g:.0f}"
            judged.append(Judged(f"above_1e_{n}", m, 2 * g, WARNING, said))
        else:
            judged.append(Judged(f"above_1e_{n}", m, 2 * g, PASS))
    coarsest = next((j for j in judged if j.status == ERROR), None)
    if coarsest is not None:  # the others would say the same again
        return of("decades", [coarsest], advisory=[j for j in judged if j is not coarsest])
    return of("decades", judged)


def _counts(values: Values) -> list[float]:
    found = [values.get(d) for d in DECADES]
    return [v for v in found if v is not None] if None not in found else []
