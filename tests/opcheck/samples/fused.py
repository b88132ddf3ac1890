"""Samples of torch_npu's fused operators, from the definitions and wrong kernels of fused_cases.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from fused_cases import CASES, drawn, ran
from opcheck.samples.sample import Draw, Made, made, sample

from vllm_accprobe.opcheck.reference import Call

FLOAT32 = ("output.1", "output.2")
"""Outputs that kernels give in float32 where they are a norm's root or mean."""


def fused_call(name: str, seed: int, dtype: torch.dtype, spelling: str = "NPU.{}") -> Call:
    args, kwargs = drawn(name, seed, dtype)
    return Call("tap", spelling.format(name), args=args, kwargs=kwargs)


def _stored(name: str, role: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype that the operator's result has."""
    single = ("norm" in name and role in FLOAT32) or (name == "npu_deep_norm" and role == "output.0")
    back = name.endswith("backward") or name == "npu_deep_norm"
    return torch.float32 if single and not (back and role == FLOAT32["rms" not in name]) else dtype


def _maker(name: str) -> Any:
    def make(d: Draw, fault: str) -> Made:
        call = fused_call(name, d.seed, d.dtype)
        kernel = CASES[name].wrong[fault] if fault else CASES[name].right
        found = {f"output.{k}": y for k, y in enumerate(ran(kernel, call.args, dict(call.kwargs), np.float64))}
        numbers = {r: (y, _stored(name, r, d.dtype)) for r, y in found.items() if y.dtype.kind == "f"}
        codes = {r: torch.from_numpy(y.copy()) for r, y in found.items() if y.dtype.kind != "f"}
        outputs = numbers | codes
        return made(call.cls, *call.args, kwargs=call.kwargs, outputs=outputs)

    make.__name__, make.__module__ = name, __name__
    return make


for _name, _case in CASES.items():
    sample(*_case.wrong, seeds=2, dtypes=_case.dtypes)(_maker(_name))
