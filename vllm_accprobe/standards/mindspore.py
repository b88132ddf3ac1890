"""MindSpore's pre-check: section 4.1 of its document."""

from __future__ import annotations

from vllm_accprobe.standards.declaration import ERROR, PASS, SKIPPED, Cell, NamedStandard, Numbers, PairRule

COSINE, LARGEST = 0.99, 1e-4
COLUMNS = ("Cosine", "MaxAbsErr", "MaxRelativeErr", "Status", "Message")


def pairs(n: Numbers) -> tuple[tuple[Cell, ...], str, str]:
    """Pass where the cosine is above 0.99 and the largest error below 1e-4."""
    one_sided = n.cosine is None and bool(n.max_abs)
    direction = n.count == 1 or n.identical or n.zero or (n.cosine is not None and n.cosine > COSINE)
    good = not n.broken and direction and not one_sided and n.max_abs is not None and n.max_abs < LARGEST
    why = "" if good else f"not (cosine > {COSINE} and max abs < {LARGEST:g})"
    if n.max_abs is None:
        return (n.cosine, None, None, SKIPPED, "no finite values"), ERROR if n.broken else SKIPPED, "no finite values"
    return (n.cosine, n.max_abs, n.max_rel, PASS if good else ERROR, why), PASS if good else ERROR, why


STANDARDS = (NamedStandard("mindspore", pairs=PairRule(COLUMNS, pairs)),)
