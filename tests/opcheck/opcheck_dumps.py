"""A small dump of module calls for the tests of opcheck, through the real writer."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dump.dumps import put_event

from vllm_accprobe.dump.writer import RankWriter, write_run_json

BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16}


def stored(tensor: torch.Tensor) -> np.ndarray:
    """The bits of a tensor as numpy."""
    tensor = tensor.detach().contiguous()
    return tensor.view(BITS[tensor.dtype]).numpy() if tensor.dtype in BITS else tensor.numpy()


def name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class Maker:
    """Writes modules, parameters, steps and calls of one rank, in the order in which they are given."""

    def __init__(self, root: Path, rank: int = 0, run: Mapping[str, Any] | None = None):
        write_run_json(root, dict(run or {"model": {"path": "", "class": "Tiny"}}))
        self.root, self._seq, self._index = root, 0, 0
        self.writer = RankWriter(root, rank, {"local_rank": rank}, budget_bytes=1 << 30, block_bytes=1 << 20)
        self._alive: list[np.ndarray] = []

    def module(self, tap: str, cls: str, **attrs: Any) -> None:
        self.writer.line({"event": "module", "tap": tap, "class": cls, "index": self._index, "attrs": attrs})
        self._index += 1

    def request(self, req: int, prompt_len: int) -> None:
        event = {"event": "request", "req": req, "id": f"r{req}", "prompt": f"{req}a" * 16, "prompt_len": prompt_len}
        self.writer.line(event)

    def step(self, step: int, spans: Sequence[tuple[int, int, int]], phase: str = "prefill") -> None:
        """spans: (request, position, rows). phase: of all of them."""
        self._step, self._seq, segments, row = step, 0, [], 0
        for req, pos, n in spans:
            segments.append({"req": req, "pos": pos, "n": n, "row": row, "phase": phase})
            row += n
        self.writer.line({"event": "step", "step": step, "batch": {"requests": len(spans), "tokens": row}})
        self.writer.line({
            "event": "rows", "step": step, "space": "tokens", "src_rows": row, "segments": segments,
            "ids": list(range(row)),
        })  # fmt: skip

    def param(self, tap: str, cls: str, **tensors: torch.Tensor) -> None:
        for key, value in tensors.items():
            self._put({"event": "param", "tap": tap, "class": cls, "role": f"param.{key}"}, value)

    def call(
        self,
        tap: str,
        cls: str,
        inputs: Mapping[str, torch.Tensor],
        *outputs: torch.Tensor,
        rows: str | None = "tokens",
        number: int = 0,
    ) -> None:
        """number: which of the tap's calls in this step."""
        where = {"event": "tensor", "step": self._step, "tap": tap, "class": cls, "call": number}
        roles = [(f"input.{k}", v) for k, v in inputs.items()] + [(f"output.{k}", v) for k, v in enumerate(outputs)]
        for role, value in roles:
            more = {"rows": rows, "row_dim": 0} if rows else {}
            self._put({**where, "role": role, "seq": self._seq, **more}, value)
            self._seq += 1

    def _put(self, event: dict[str, Any], tensor: torch.Tensor) -> None:
        array = stored(tensor)
        if not tensor.is_contiguous():
            event = {**event, "stride": list(tensor.stride()), "offset": tensor.storage_offset()}
        self._alive.append(array)
        put_event(self.writer, array, {
            "call": 0, **event, "dtype": name(tensor), "shape": list(tensor.shape),
        })  # fmt: skip

    def close(self) -> Path:
        self.writer.close("done", {})
        return self.root


def one_call(root: Path) -> None:
    """A dump of one right call, of three rows."""
    maker = Maker(root)
    maker.module("act", "SiluAndMul")
    maker.request(0, 3)
    maker.step(0, [(0, 0, 3)])
    x = torch.linspace(-2, 2, 24).reshape(3, 8)
    maker.call("act", "SiluAndMul", {"0": x}, torch.nn.functional.silu(x[:, :4]) * x[:, 4:])
    maker.close()
