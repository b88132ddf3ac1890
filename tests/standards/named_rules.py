"""A standard's rules by its name, as opcheck and opdiff find them."""

from dataclasses import dataclass

from vllm_accprobe.standards import MACHINES, OUTPUT, find
from vllm_accprobe.standards.msprobe import api_of


@dataclass(frozen=True)
class OneSide:
    """One machine's output, of its measures alone."""

    values: dict[str, float | None]
    dtype: str
    status: str = ""
    message: str = ""
    severity: float = 0.0


def judge(name, measures, op, dtype):
    return find(name, OUTPUT).output(measures, op, dtype)


def judge_two(name, golden, mine, op, dtype, *, cls="", algorithm=None):
    rule = find(name, MACHINES).machines.rule
    return rule(OneSide(golden, dtype), OneSide(mine, dtype), api_of(op, cls), algorithm)
