"""Calls of references with drawn numbers, what they give, and what the standard says of an output, without a dump."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from vllm_accprobe.opcheck.floors.verdict import Verdict, judge
from vllm_accprobe.opcheck.reference import Call, Declined, Expected
from vllm_accprobe.opcheck.registry import default_references

TABLE = default_references()


def drawer(seed: int) -> Callable[..., torch.Tensor]:
    """Normal numbers in float64, the same in each run of a file."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)


def evaluated(call: Call) -> dict[str, Expected]:
    """Raises Declined."""
    found = TABLE.evaluate(call)
    if isinstance(found, Declined):
        raise found
    return found


def run(cls: str, inputs: Mapping[str, Any], out: Any = None, **more: Any) -> dict[str, Expected]:
    return evaluated(Call("tap", cls, inputs, outputs={} if out is None else {"output.0": out}, **more))


def value(cls: str, inputs: Mapping[str, Any], out: Any = None, **more: Any) -> torch.Tensor:
    return run(cls, inputs, out, **more)["output.0"].value


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


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
