"""MindSpore's pre-check: section 4.1 of its document."""

from __future__ import annotations

from vllm_accprobe.standards.declaration import ERROR, PASS, SKIPPED, Cell, NamedStandard, Numbers, PairRule

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


STANDARDS = (NamedStandard("mindspore", pairs=PairRule(COLUMNS, pairs)),)
