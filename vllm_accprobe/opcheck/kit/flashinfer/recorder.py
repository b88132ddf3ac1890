"""FlashInfer's flight-recorder folders, written: one for each call of its API, so that `flashinfer replay` runs them.

The problem: a kernel's team has a tool of its own for failing calls, which reads folders of its own. The idea: a
`FlashCall` is a function, its arguments as Python would have been given them, and what was captured as its result; it
becomes ``metadata.jsonl``, ``inputs.pt`` and ``outputs.pt`` under a name that sorts in the order of execution. An
object's call is three folders, ``__init__``, ``plan`` and ``run``, with one ``self_id``, by which replay finds the
object. Its workspace is one stored byte that is expanded to its size when it is loaded. What a call leaves in its
arguments has no place in the recorder: it lies in a third file, which FlashInfer does not read and we do. Format:
flashinfer/api_logging.py of 0.7.2, _dump_function_inputs, _dump_function_outputs and replay_from_dump.
Not here: which captured call is which function (modules.py, operators.py), reading (formats/flashinfer.py).
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vllm_accprobe.opcheck.kit.flashinfer.signatures import FUNCTIONS, WORKSPACE, WRAPPERS

FORMAT = "0.7.2"
"""The release of FlashInfer whose recorder's layout is written."""
INPLACE = "inplace.pt"
_BEGIN = datetime.datetime(2000, 1, 1)
"""Folders are told apart and put in order by milliseconds; when a call ran is in no dump."""


class NotFlashInfers(Exception):
    """FlashInfer has no such function, or not with these arguments; the message says which."""


@dataclass(frozen=True)
class FlashCall:
    """function: ``rmsnorm``, or ``Wrapper.run``; args, kwargs: tensors, numbers, dtypes, pairs; results: what it
    returned, one or several tensors, () where it works in place; inplace: by role (``input.0``), what it left in its
    arguments; init, plan: by keyword, what its object was told before, of a wrapper."""

    function: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    results: tuple[Any, ...] = ()
    inplace: Mapping[str, Any] = field(default_factory=dict)
    init: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)


class FolderWriter:
    """Writes calls into ``root``, in the order in which they come. Raises OSError."""

    def __init__(self, root: Path):
        self.root = root
        self.folders = 0
        self._calls: dict[tuple[int, str], int] = {}

    def write(self, call: FlashCall, rank: int, source: Mapping[str, Any]) -> None:
        """One call. rank: of the process; source: what it was captured as, for whoever reads the metadata."""
        cls, _, method = call.function.rpartition(".")
        if not cls:
            self._folder(call.function, *FUNCTIONS[call.function], call.args, call, rank, source)
            return
        module, names = WRAPPERS[cls]
        who = 1 + self.folders
        me = _SelfArgument(cls)
        workspace = torch.zeros(1, dtype=torch.uint8).expand(WORKSPACE)
        before = FlashCall(f"{cls}.__init__", (me, workspace), call.init)
        self._folder(before.function, module, names["__init__"], before.args, before, rank, source, who)
        before = FlashCall(f"{cls}.plan", (me,), call.plan)
        self._folder(before.function, module, names["plan"], before.args, before, rank, source, who)
        self._folder(call.function, module, names[method], (me, *call.args), call, rank, source, who)

    def _folder(
        self, function: str, module: str, signature: str, args: Sequence[Any], call: FlashCall, rank: int,
        source: Mapping[str, Any], who: int | None = None,
    ) -> None:  # fmt: skip
        number = self._calls[rank, function] = self._calls.get((rank, function), 0) + 1
        at = _BEGIN + datetime.timedelta(milliseconds=self.folders)
        self.folders += 1
        stamp = at.strftime("%Y%m%d_%H%M%S_%f")[:-3]
        folder = self.root / f"{stamp}_pid{rank}_{function}_call{number:04d}"
        inputs: dict[str, Any] = {}
        told: dict[str, Any] = {}
        for key, value in [
            *((f"arg_{n}", a) for n, a in enumerate(args)),
            *((f"kwarg_{n}", a) for n, a in call.kwargs.items()),
        ]:
            if isinstance(value, torch.Tensor):
                inputs[key] = value
            else:
                told[key] = _value(value, key, inputs)
        folder.mkdir(parents=True)
        inputs = {key: _own(t) for key, t in inputs.items()}
        outputs = {f"result_{n}" if len(call.results) > 1 else "result": _own(t) for n, t in enumerate(call.results)}
        sizes = [sum(t.numel() * t.element_size() for t in side.values()) for side in (inputs, outputs)]
        line = {
            "function_name": function, "module": module, "call_sequence": number, "timestamp": stamp,
            "process_id": rank, "input_metadata": told, "output_metadata": {},
            "tensor_info": {"input_tensor_keys": list(inputs), "output_tensor_keys": [],
                            "input_size_bytes": sizes[0], "input_size_mb": sizes[0] / 2**20},
            "tensor_details": {key: _details(t) for key, t in inputs.items()},
            "tensor_format": "torch", "function_signature": signature,
            "versions": {"torch": torch.__version__, "flashinfer": FORMAT},
            "execution_status": "inputs_saved", "graph_capture": False,
            **({} if who is None else {"self_id": who}),
            "dump_dir": folder.name, "accprobe": dict(source),
        }  # fmt: skip
        # replay wants this file also where no argument is a tensor
        torch.save(inputs, folder / "inputs.pt")
        if outputs:
            torch.save(outputs, folder / "outputs.pt")
        if call.inplace:
            names = {role: _key(role) for role in call.inplace}
            torch.save({names[role]: _own(t) for role, t in call.inplace.items()}, folder / INPLACE)
        done = {
            **line, "execution_status": "completed",
            "output_metadata": {} if outputs else {"result": None},
            "tensor_info": {**line["tensor_info"], "output_tensor_keys": list(outputs),  # type: ignore[dict-item]
                            "output_size_bytes": sizes[1], "output_size_mb": sizes[1] / 2**20,
                            "total_size_bytes": sum(sizes), "total_size_mb": sum(sizes) / 2**20},
            "tensor_details": {**line["tensor_details"], **{k: _details(t) for k, t in outputs.items()}},  # type: ignore[dict-item]
        }  # fmt: skip
        text = [json.dumps(entry, allow_nan=False) + "\n" for entry in (line, done)]
        (folder / "metadata.jsonl").write_text("".join(text), encoding="utf-8")
        with (self.root / "session.jsonl").open("a", encoding="utf-8") as f:
            f.writelines(text)


@dataclass(frozen=True)
class _SelfArgument:
    """Stands for the object: the recorder has its text there."""

    cls: str


def _key(role: str) -> str:
    """``input.0`` → ``arg_0``, ``input.x`` → ``kwarg_x``."""
    name = role.removeprefix("input.")
    return f"arg_{name}" if name.isdecimal() else f"kwarg_{name}"


def _own(t: Any) -> Any:
    """With memory of its own, strides as they are where nothing else lies between."""
    t = t.detach().cpu()
    if t.dim() and 0 in t.stride():
        return t  # the workspace: one byte is stored
    return t.clone(memory_format=torch.preserve_format)


def _details(t: Any) -> dict[str, Any]:
    return {"shape": list(t.shape), "dtype": str(t.dtype), "stride": list(t.stride()), "device": "cuda:0"}


def _value(value: Any, key: str, tensors: dict[str, Any]) -> Any:
    """A value as the recorder writes it; tensors inside go to ``tensors``. Raises NotFlashInfers."""
    if isinstance(value, torch.Tensor):
        tensors[key] = value
        return {"type": "torch.Tensor", "tensor_key": key, **_details(value), "requires_grad": False,
                "is_contiguous": value.is_contiguous()}  # fmt: skip
    if isinstance(value, _SelfArgument):
        return {"type": value.cls, "repr": f"<{value.cls}>"}
    if isinstance(value, torch.dtype):
        return {"type": "torch.dtype", "value": str(value)}
    if isinstance(value, (list, tuple)):
        items = [_value(v, f"{key}__{n}", tensors) for n, v in enumerate(value)]
        return {"type": type(value).__name__, "length": len(items), "items": items, "truncated": False}
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise NotFlashInfers(f"argument {key} is a {type(value).__name__}, which its recorder cannot keep")
