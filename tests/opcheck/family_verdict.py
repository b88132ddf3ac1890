"""What the standard says of an output, given its call: as opcheck does, without a dump."""

from __future__ import annotations

import torch
from reference_calls import TABLE

from vllm_accprobe.opcheck.floors.verdict import Verdict, judge
from vllm_accprobe.opcheck.reference import Call, Declined


def verdict(call: Call, role: str, mine: torch.Tensor) -> Verdict:
    """``mine`` in ``role`` against the reference of ``call``, whose own outputs stay as they are."""
    found = TABLE.evaluate(call)
    assert not isinstance(found, Declined), found.reason
    e = found[role]
    rows = slice(None) if e.rows is None else e.rows
    noise, bound = (
        None if x is None else x.expand_as(e.value).reshape(len(mine), -1)[rows] for x in (e.noise, e.bound)
    )
    numbers = mine.double() if mine.is_floating_point() else mine.long()
    sides = (x.reshape(len(mine), -1)[rows] for x in (e.value, numbers))
    return judge(*sides, str(mine.dtype).removeprefix("torch."), noise=noise, bound=bound, last=e.unit,
                 common=e.common, groups=e.groups, shared=e.shared)  # fmt: skip
