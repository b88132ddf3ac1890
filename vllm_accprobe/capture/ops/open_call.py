"""One operator call on its way: what was taken of it so far, and the journal's line of it.

The problem: what a line says is known bit by bit: the arguments before the call, what the call changed after it, hashes
of a device's tensors later still. The idea: one object gathers it, and is asked for the line when all of it is known.
Not here: what is taken, and when (dispatch.py).
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_accprobe.capture.ops.op_tensors import TakenTensor
from vllm_accprobe.capture.ops.touched import Touched
from vllm_accprobe.dump.opcalls import op_line


class OpenCall:
    """One call on its way: what is known of it, what was taken of it, its written arguments as they were before and as
    they are after. keep: its tensors are stored; place: of its line, what says where the call was; touched: what it
    touches of caches, by role."""

    __slots__ = (
        "after", "args", "before", "keep", "kwargs", "mutates", "number", "outputs", "place", "refused", "taken", "tap",
        "touched",
    )  # fmt: skip

    def __init__(
        self, tap: str, number: int, keep: bool, args: list[Any], kwargs: dict[str, Any], place: dict[str, Any]
    ):
        self.tap = tap
        self.number = number
        self.keep = keep
        self.args = args
        self.kwargs = kwargs
        self.place = place
        self.outputs: list[Any] = []
        self.mutates: list[str] = []
        self.refused = False
        self.taken: list[tuple[TakenTensor, dict[str, Any]]] = []
        self.before: list[tuple[str, torch.Tensor | Touched, TakenTensor | None, dict[str, Any]]] = []
        self.after: list[tuple[str, TakenTensor, dict[str, Any]]] = []
        self.touched: dict[str, Touched | None] = {}

    def line(self) -> dict[str, Any]:
        """The journal's line, when everything about its tensors is known."""
        for taken, about in self.taken:
            taken.add_to(about)
        for role, taken, about in self.after:
            if role in self.mutates:
                taken.add_to(about.setdefault("after", {}))
        args, kwargs, outputs = self.args, self.kwargs, self.outputs
        if self.refused:
            args, outputs = [_settled(v) for v in args], [_settled(v) for v in outputs]
            kwargs = {name: _settled(v) for name, v in kwargs.items()}
        return op_line(self.tap, self.number, args, kwargs, outputs, self.mutates, **self.place)


def _settled(value: Any) -> Any:
    """A VALUE as it is written: a tensor that was not looked at becomes ``skipped`` with its shape."""
    if isinstance(value, dict):
        if "tensor" in value and "skipped" in value["tensor"]:
            return value["tensor"]
        if "list" in value:
            return {"list": [_settled(v) for v in value["list"]]}
    return value
