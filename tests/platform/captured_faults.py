"""Faults that exist only in captured graphs, planted in a recording (captured_calls.py) right after its capture.

The problem: what goes wrong with graphs is not in the model's code, so that no fault planted in a module is like it.
The idea: a recording is a list of calls on known memory; change one thing of it, as the real faults did. Whatever does
not replay that recording stays as it was: other sizes, prompts too long for any size, and an engine without graphs.

``ACCPROBE_CAPTURED_FAULT`` is a JSON list of objects with the fields of ``Fault``, for instance
``[{"kind": "size", "piece": 1, "size": 4, "factor": 1.25}]``. Pieces count from 0; the one behind layer k's attention
(its output projection and MLP, and the query of the next layer) is piece k + 1. Kinds:

- ``leak``: rows of padding are read. The sum over them, times factor, is added to each row of what ``at`` wrote.
  Shows only where a step has padding.
- ``stale``: an input is not copied into its static buffer: the piece reads, for ever, what stood in its input called
  ``input`` at capture. Shows in all replays in which something else stands there.
- ``size``: what ``at`` wrote is wrong by factor. With ``size``: at one captured size only.
- ``twice``: what ``at`` added up (the residual, in front of a norm) has its second part once more, times factor.
- ``count``: attention is told one request too few where a step has padding: what the last row of it reads into the
  piece is what an earlier step has left there. ``input`` is the name of attention's output (``output``).
- ``share``: the first memory of its own that the piece writes is the memory in which the previous piece's last output
  lies (the residual), which the piece still has to read. Nothing is wrong at capture: it was recorded before.
- ``move``: at replay, the input called ``input`` comes at another address. Nothing is served: vLLM's own check of
  addresses, which it makes at log level DEBUG, and here always, ends the step.

``at`` names a recorded call by a part of its name and, behind ``#``, which of several, from 0: ``product#2`` is the
third product of the piece, whatever kernel this processor takes for it, and the fault stands before what reads it.
Without ``at`` it is the piece's first output at its end, where taps have copied it already.

Not here: what the model computes; faults of modules and operators (lab/planted).
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from captured_calls import Call, CallGraph, memory, tensors

ENV = "ACCPROBE_CAPTURED_FAULT"
_PRODUCTS = ("onednn_mm", "weight_packed_linear", "aten::linear")
"""What vLLM's CPU build multiplies by weights with: AVX-512, AMX, AVX2."""
KINDS = ("leak", "stale", "size", "twice", "count", "share", "move")


@dataclass(frozen=True)
class Fault:
    """kind: one of KINDS. piece: which. size: at this captured size only; None for all. factor: the kind's number.
    input: a part of the name of one of the piece's inputs. at: which of its calls."""

    kind: str
    piece: int
    size: int | None = None
    factor: float = 1.0
    input: str = "positions"
    at: str = ""


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
    graph = captured.graph
    place, wrote, parts = _place(captured, fault.at)
    if fault.kind == "leak":
        graph.calls.insert(place, Call("leak", _leak, (wrote, captured.is_padding, fault.factor), {}))
    elif fault.kind == "size":
        graph.calls.insert(place, Call("size", wrote.mul_, (fault.factor,), {}, (wrote,), (False,)))
    elif fault.kind == "twice":
        graph.calls.insert(place, Call("twice", _twice, (wrote, parts[-1], fault.factor), {}))
    elif fault.kind == "stale":
        old = _input(captured, fault.input)
        new = torch.empty(0, dtype=old.dtype).set_(old.untyped_storage().clone())
        graph.share(old, new)
    elif fault.kind == "share":
        _recycle(captured)
    return True


class Miscount:
    """``count`` at one piece: what stands in each row of an input, from one replay to the next."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.left: dict[int, torch.Tensor] = {}

    def spoil(self, names: Sequence[str], inputs: tuple[Any, ...], is_padding: torch.Tensor) -> None:
        """The last row that is somebody's is what an earlier step of this size left there, if this step is padded."""
        read = _named(names, inputs, self.fault.input, self.fault.piece)
        real, size = int((~is_padding).sum()), len(is_padding)
        before = self.left.get(size)
        self.left[size] = read[:size].clone()
        if 0 < real < size and before is not None:
            read[real - 1] = before[real - 1]


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


def _twice(rows: torch.Tensor, part: torch.Tensor, factor: float) -> None:
    rows += factor * part


def _place(captured: Captured, at: str) -> tuple[int, torch.Tensor, list[torch.Tensor]]:
    """(index behind the call, what it wrote, what it read)."""
    calls = captured.graph.calls
    if not at:
        return len(calls), captured.outputs[0], list(captured.outputs)
    name, _, number = at.partition("#")
    names = _PRODUCTS if name == "product" else (name,)
    found = [i for i, call in enumerate(calls) if any(part in call.name for part in names)]
    if int(number or 0) >= len(found):
        raise ValueError(f"piece {captured.piece} has {len(found)} calls of {name}, and {at} is none of them")
    index = found[int(number or 0)]
    call = calls[index]
    read = tensors((call.args, call.kwargs))
    return index + 1, next((t for t, fresh in zip(call.outputs, call.fresh, strict=True) if fresh), read[0]), read


def _input(captured: Captured, name: str) -> torch.Tensor:
    return _named(captured.names, captured.inputs, name, captured.piece)


def _named(names: Sequence[str], inputs: Sequence[Any], name: str, piece: int) -> torch.Tensor:
    for given, value in zip(names, inputs, strict=True):
        if name in given and isinstance(value, torch.Tensor):
            return value
    raise ValueError(f"piece {piece} has no input called {name}: {tuple(names)}")


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
