"""What was captured inside a block, as the references of blocks read it.

vLLM's blocks (composite.py) and transformers' (hf.py) are checked against the outputs of their parts; here is how a
part's output is found. Not here: which part a block hands on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_accprobe.opcheck.reference import Call, Declined, Expected


def parts(call: Call) -> Sequence[tuple[str, str, Any]]:
    """(path inside the block, role, record) of each tensor captured inside, in order. Raises Declined if none was."""
    found: Sequence[tuple[str, str, Any]] = call.extra.get("children", ())
    if not found:
        raise Declined("nothing inside it was captured")
    return found


def same(call: Call, role: str, child: str, child_role: str) -> Expected | None:
    """The value of output ``role`` handed on from the last output of the child whose path ends so; None where it was
    not captured."""
    read = call.extra.get("read")
    out = call.outputs.get(role)
    for path, r, record in reversed(parts(call)):
        if r == child_role and (path == child or (child.startswith("*") and path.endswith(child[1:]))):
            if read is None or out is None or tuple(record.shape) != tuple(out.shape):
                return None
            return Expected(read(record).double(), None, 0.0)
    return None


def unscaled(call: Call) -> None:
    """Engines apply a routed scaling factor in the experts, behind them or, in float16, in the layers around."""
    if call.config.get("routed_scaling_factor") not in (None, 1, 1.0):
        raise Declined("where the routed scaling factor is applied was not recorded")
