"""Faults that exist only in captured graphs, planted in a recording (captured_calls.py) right after its capture.

The problem: what goes wrong with graphs is not in the model's code, so that no fault planted in a module is like it.
The idea: a recording is a list of calls on known memory; change one thing of it, as the real faults did. Whatever does
not replay that recording stays as it was: other sizes, prompts too long for any size, and an engine without graphs.

``ACCPROBE_CAPTURED_FAULT`` is a JSON list of objects with the fields of ``Fault``, for instance
``[{"kind": "size", "piece": 1, "size": 4, "factor": 1.25}]``. Pieces count from 0; the one behind layer k's attention
(its output projection and MLP, and the query of the next layer) is piece k + 1. Kinds:

- ``leak``: rows of padding are read. The sum over them, times factor, is added to each row of the piece's first
  output. Shows only where a step has padding.
- ``stale``: an input is not copied into its static buffer: the piece reads, for ever, what stood in its input called
  ``input`` at capture. Shows in all replays in which something else stands there.
- ``size``: the piece's first output is wrong by factor. With ``size``: at one captured size only.
- ``share``: the first memory of its own that the piece writes is the memory in which the previous piece's last output
  lies (the residual), which the piece still has to read. Nothing is wrong at capture: it was recorded before.
- ``move``: at replay, the input called ``input`` comes at another address. Nothing is served: vLLM's own check of
  addresses, which it makes at log level DEBUG, and here always, ends the step.

Not here: what the model computes; faults of modules and operators (tests/faults).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from captured_calls import Call, CallGraph, memory, tensors

ENV = "ACCPROBE_CAPTURED_FAULT"
KINDS = ("leak", "stale", "size", "share", "move")


@dataclass(frozen=True)
class Fault:
    """kind: one of KINDS. piece: which. size: at this captured size only; None for all. factor: the kind's number.
    input: a part of the name of one of the piece's inputs."""

    kind: str
    piece: int
    size: int | None = None
    factor: float = 1.0
    input: str = "positions"


@dataclass(frozen=True)
class Captured:
    """A piece that was just captured. names: of its inputs. previous: outputs of the piece before it, at this size.
    is_padding: bool, shape (size,), the runner's own buffer."""

    graph: CallGraph
    piece: int
    size: int
    names: tuple[str, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[torch.Tensor, ...]
    previous: tuple[torch.Tensor, ...]
    is_padding: torch.Tensor


def from_env() -> tuple[Fault, ...]:
    """Raises ValueError where the variable names another kind."""
    faults = tuple(Fault(**fields) for fields in json.loads(os.environ.get(ENV) or "[]"))
    for fault in faults:
        if fault.kind not in KINDS:
            raise ValueError(f"{ENV}: kind is one of {KINDS}, not {fault.kind}")
    return faults


def plant(fault: Fault, captured: Captured) -> bool:
    """Changes the recording, if the fault is about it. Returns whether it did. Raises ValueError where it cannot."""
    if fault.piece != captured.piece or fault.size not in (None, captured.size):
        return False
    graph, first = captured.graph, captured.outputs[0]
    if fault.kind == "leak":
        graph.calls.append(Call("leak", _leak, (first, captured.is_padding, fault.factor), {}))
    elif fault.kind == "size":
        graph.calls.append(Call("size", first.mul_, (fault.factor,), {}, (first,), (False,)))
    elif fault.kind == "stale":
        old = _input(captured, fault.input)
        new = torch.empty(0, dtype=old.dtype).set_(old.untyped_storage().clone())
        graph.share(old, new)
    elif fault.kind == "share":
        _recycle(captured)
    return True


def moved(faults: Sequence[Fault], piece: int, names: Sequence[str], inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The inputs of a replay: as they are, or those that ``move`` names at another address."""
    wanted = [fault.input for fault in faults if (fault.kind, fault.piece) == ("move", piece)]
    return tuple(
        value.clone() if isinstance(value, torch.Tensor) and any(name in given for name in wanted) else value
        for given, value in zip(names, inputs, strict=True)
    )


def _leak(rows: torch.Tensor, is_padding: torch.Tensor, factor: float) -> None:
    padding = is_padding.view(-1, *[1] * (rows.dim() - 1))
    rows += factor * torch.where(padding, rows, 0).sum(0, keepdim=True)


def _input(captured: Captured, name: str) -> torch.Tensor:
    for given, value in zip(captured.names, captured.inputs, strict=True):
        if name in given and isinstance(value, torch.Tensor):
            return value
    raise ValueError(f"piece {captured.piece} has no input called {name}: {captured.names}")


def _recycle(captured: Captured) -> None:
    read = {memory(t) for t in tensors(captured.inputs)}
    victims = [t for t in captured.previous if memory(t) in read]
    if not victims:
        raise ValueError(f"piece {captured.piece} reads nothing of the piece before it")
    victim = victims[-1]
    for call in captured.graph.calls:
        for tensor in tensors((call.args, call.kwargs, call.outputs)):
            alike = (tensor.shape, tensor.dtype) == (victim.shape, victim.dtype)
            if alike and memory(tensor) not in read:
                captured.graph.share(tensor, victim)
                return
    raise ValueError(f"piece {captured.piece} has no memory like {tuple(victim.shape)} {victim.dtype}")
