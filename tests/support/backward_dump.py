"""Writes forward and backward records as msprobe does: one step, one rank, dump.json and a file for each tensor."""

import json
from pathlib import Path
from typing import Any

import torch


class BackwardDump:
    """``root`` is the dump's directory, which must not be there."""

    def __init__(self, root: Path):
        self.root, self.place = root, root / "step0" / "rank0"
        (self.place / "dump_tensor_data").mkdir(parents=True)
        self.data: dict[str, Any] = {}
        self.parents: dict[str, Any] = {}

    def _info(self, key: str, suffix: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            name = f"{key}.{suffix}.pt"
            torch.save(value.detach(), self.place / "dump_tensor_data" / name)
            return {"type": "torch.Tensor", "dtype": str(value.dtype), "shape": list(value.shape), "data_name": name}
        if isinstance(value, (list, tuple)):
            return [self._info(key, f"{suffix}.{i}", v) for i, v in enumerate(value)]
        if isinstance(value, slice):
            return {"type": "slice", "value": [value.start, value.stop, value.step]}
        if isinstance(value, torch.dtype):
            return {"type": "torch.dtype", "value": str(value)}
        return None if value is None else {"type": type(value).__name__, "value": "..." if value is ... else value}

    def forward(
        self, key: str, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: tuple[Any, ...],
        parent: str | None = None, **parameters: Any,
    ) -> None:  # fmt: skip
        self.data[key] = {
            "input_args": [self._info(key, f"input.{i}", v) for i, v in enumerate(args)],
            "input_kwargs": {k: self._info(key, f"input.{k}", v) for k, v in kwargs.items()},
            "output": [self._info(key, f"output.{i}", v) for i, v in enumerate(outputs)],
        }
        if parameters:
            infos = {k: self._info(key, f"parameters.{k}", v) for k, v in parameters.items()}
            self.data[key]["parameters"] = infos
        self.parents[key] = parent

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: tuple[Any, ...]) -> None:
        """A forward call of an API, numbered."""
        self.forward(f"{name}.{sum(k.startswith(name) for k in self.data)}.forward", args, kwargs, outputs)

    def backward(self, key: str, ups: tuple[Any, ...], grads: tuple[Any, ...], parent: str | None = None) -> None:
        """ups: gradients of what came out forward; grads: of what went in."""
        self.data[key] = {
            "input": [self._info(key, f"input.{i}", v) for i, v in enumerate(ups)],
            "output": [self._info(key, f"output.{i}", v) for i, v in enumerate(grads)],
        }
        self.parents[key] = parent

    def close(self) -> Path:
        head = {"task": "tensor", "level": "mix", "framework": "pytorch", "data": self.data}
        (self.place / "dump.json").write_text(json.dumps(head))
        (self.place / "construct.json").write_text(json.dumps(self.parents))
        return self.root
