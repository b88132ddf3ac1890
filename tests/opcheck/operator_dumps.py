"""Dumps with operator calls, as the capture of operators leaves them."""

from typing import Any

import torch
from opcheck.opcheck_dumps import Maker, name

G = torch.Generator().manual_seed(3)
X, W, Y = (torch.randn(*s, generator=G).bfloat16() for s in ((9, 24), (24, 16), (9, 24)))

SKIPPED = {"skipped": "the KV cache", "role": "input.0", "dtype": "bfloat16", "shape": [9, 24], "stride": [24, 1]}


def tensor(role: str, t: torch.Tensor, **more: Any) -> dict[str, Any]:
    return {"tensor": {"role": role, "dtype": name(t), "shape": list(t.shape), "stride": list(t.stride()),
                       "device": "npu:0", **more}}  # fmt: skip


class OpMaker(Maker):
    def op(self, op: str, args: list[Any], outputs: dict[str, torch.Tensor], *, kwargs: dict[str, Any] | None = None,
           module: str | None = None, call: int = 0, mutates: tuple[str, ...] = ()) -> None:  # fmt: skip
        """args: VALUES, or tensors, whose role is their place; outputs: by role."""
        tap, values = f"{module or ''}::{op}", []
        held: dict[str, torch.Tensor] = {}
        for k, a in enumerate(args):
            if isinstance(a, torch.Tensor):
                held[f"input.{k}"] = a
                a = tensor(f"input.{k}", a)
            values.append(a)
        self._seq += 1
        results = [tensor(r, t) for r, t in outputs.items() if r.startswith("output.")]
        self.writer.line({
            "event": "op", "step": self._step, "tap": tap, "op": op, "call": call, "seq": self._seq, "module": module,
            "args": values, "kwargs": kwargs or {}, "outputs": results, "mutates": list(mutates),
        })  # fmt: skip
        for role, t in (held | outputs).items():
            where = {"event": "tensor", "step": self._step, "tap": tap, "class": op, "role": role, "seq": self._seq}
            self._put({**where, "call": call}, t)
