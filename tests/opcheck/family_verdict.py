"""What the standard says of an output, given its call: as opcheck does, without a dump."""

import torch
from reference_calls import evaluated

from vllm_accprobe.opcheck.floors.verdict import Verdict, judge
from vllm_accprobe.opcheck.reference import Call, Expected


def judged(e: Expected, mine: torch.Tensor) -> Verdict:
    rows = slice(None) if e.rows is None else e.rows
    first = len(mine) if mine.dim() else 1
    noise, bound = (None if x is None else x.expand_as(e.value).reshape(first, -1)[rows] for x in (e.noise, e.bound))
    numbers = mine.double() if mine.is_floating_point() else mine.long()
    sides = (x.reshape(first, -1)[rows] for x in (e.value, numbers))
    return judge(*sides, str(mine.dtype).removeprefix("torch."), noise=noise, bound=bound, last=e.unit,
                 common=e.common, groups=e.groups, shared=e.shared)  # fmt: skip


def verdict(call: Call, role: str, mine: torch.Tensor) -> Verdict:
    """``mine`` in ``role`` against the reference of ``call``, whose own outputs stay as they are."""
    return judged(evaluated(call)[role], mine)
