"""MindSpore's pre-check: section 4.1 of its document."""

from __future__ import annotations

from vllm_accprobe.standards.declaration import ERROR, PASS, SKIPPED, Cell, NamedStandard, Numbers, PairRule
from vllm_accprobe.standards.finding import Judged, RuleFinding, broken, of, skip, unmeasured
from vllm_accprobe.standards.measures import Measures

COSINE, LARGEST = 0.99, 1e-4
COLUMNS = ("Cosine", "MaxAbsErr", "MaxRelativeErr", "Status", "Message")


def pairs(n: Numbers) -> tuple[tuple[Cell, ...], str, str]:
    """Pass where the cosine is above 0.99 and the largest error below 1e-4."""
    m = n.measures
    one_sided = m.cosine is None and bool(m.max_abs_err)
    direction = n.count == 1 or n.identical or n.zero or (m.cosine is not None and m.cosine > COSINE)
    if m.max_abs_err is None:
        why = "no finite values"
        return (m.cosine, None, None, SKIPPED, why), ERROR if n.broken else SKIPPED, why
    good = not n.broken and direction and not one_sided and m.max_abs_err < LARGEST
    why = "" if good else f"not (cosine > {COSINE} and max abs < {LARGEST:g})"
    word = PASS if good else ERROR
    return (m.cosine, m.max_abs_err, m.max_rel_err, word, why), word, why


def output(m: Measures, op: str, dtype: str) -> RuleFinding:
    """The same of one output and its reference: two statuses, no warning. Integers and booleans, of which the document
    says nothing, must be equal."""
    if why := unmeasured(m):
        return skip("mindspore", why)
    if wrong := broken(m):
        return of("mindspore", [wrong])
    largest = m.max_abs_err or 0.0
    if not dtype.startswith("float") and not dtype.startswith("bfloat"):
        bad = "values differ and must be equal" if m.binary_err_ratio or largest else ""
        return of("mindspore", [Judged("max_abs_err", largest, 0.0, ERROR if bad else PASS, bad)])
    judged = []
    if m.cosine is not None and m.elements - m.nonfinite > 1:
        low = m.cosine <= COSINE
        text = f"cosine {m.cosine:.4g} is not above {COSINE}" if low else ""
        judged.append(Judged("cosine", m.cosine, COSINE, ERROR if low else PASS, text))
    elif m.cosine is None and largest and m.elements - m.nonfinite > 1:
        judged.append(Judged("cosine", None, COSINE, ERROR, "one side is all zero"))
    far = largest >= LARGEST
    text = f"largest error {largest:.4g} is not below {LARGEST:g}" if far else ""
    return of("mindspore", [*judged, Judged("max_abs_err", largest, LARGEST, ERROR if far else PASS, text)])


STANDARDS = (NamedStandard("mindspore", pairs=PairRule(COLUMNS, pairs), output=output),)
