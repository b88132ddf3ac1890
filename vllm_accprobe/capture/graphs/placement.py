"""Which taps stand in a compiled graph, and the memory that they write to.

The problem: an operator in the middle of what a compiler would fuse changes the result, buffers cost memory that the
engine wants for itself, and a graph that was compiled with other taps must not be used again. The idea: by default taps
stand where the engine's own kernels end (projections, attention), so that nothing is torn apart; modules that the
settings name beyond these ask for all. Every tap of the set is placed, chosen or not, with as many rows as fit into
VLLM_ACCPROBE_GRAPH_MB, and the whole has a key. The settings then choose among the placed ones without another graph.
Not here: the operator (tap_op.py), what is seen of the modules (sightings.py), steps and rows (drain.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vllm_accprobe.capture.core.memory import DTYPE_NAMES
from vllm_accprobe.capture.graphs.sightings import Sighting, Sightings
from vllm_accprobe.capture.graphs.tap_op import VERSION, selection, tap

DEFAULT, FULL = "default", "full"
_KERNELS = frozenset(
    {"QKVParallelLinear", "RowParallelLinear", "MergedColumnParallelLinear", "Attention", "MLAAttention"}
)
"""Classes (or those that a vendor's class derives from) whose outputs are in memory anyway."""
_LEAST_ROWS = 8
"""Where not even so many fit, taps are left out instead, from the model's end."""
_TAPPED = "_accprobe_tapped"
_UNWRITTEN = 0xFF
NOT_DEFAULT = "inside compiled code, not of the default taps: VLLM_ACCPROBE_MODULES=all places taps at all modules"
TOO_LARGE = "its tap does not fit into VLLM_ACCPROBE_GRAPH_MB"


@dataclass(frozen=True)
class TapPlan:
    """The taps of one model. kind: ``default`` or ``full``. rows: of each buffer. unfit: by path, why there is none."""

    kind: str
    placed: tuple[Sighting, ...]
    rows: int
    unfit: dict[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self.rows * sum(one.row_bytes for one in self.placed)

    @property
    def key(self) -> str:
        """What a compiled graph depends on: where taps stand, what their buffers look like, the operator's version."""
        sites = [[one.path, one.index, one.shape, DTYPE_NAMES[one.dtype]] for one in self.placed]
        text = json.dumps([VERSION, self.rows, sites])
        return hashlib.sha256(text.encode()).hexdigest()[:32] if sites else ""

    def facts(self) -> dict[str, Any]:
        """What run.json says of it."""
        return {
            "set": self.kind if self.placed else None, "taps": len(self.placed), "rows": self.rows,
            "bytes": self.nbytes, "tap_version": VERSION, "key": self.key,
        }  # fmt: skip


def plan(seen: Sightings, chooses: Callable[[str, str], bool], most_rows: int, budget: int) -> TapPlan:
    """Which of the ``seen`` tensors get a tap.

    Args:
        chooses: whether VLLM_ACCPROBE_MODULES names (path, class) explicitly; names beyond the default set ask for all.
        most_rows: rows of the largest batch. budget: bytes for all buffers of this rank.
    """
    more = any(chooses(one.path, one.cls) and not _is_kernel(one.module) for one in seen.found)
    unfit = dict(seen.unfit)
    wanted = []
    for one in seen.found:
        if more or _is_kernel(one.module):
            wanted.append(one)
        else:
            unfit[one.path] = NOT_DEFAULT
    least = min(_LEAST_ROWS, most_rows)
    used, placed = 0, []
    for one in wanted:
        used += one.row_bytes * least
        if used <= budget:
            placed.append(one)
        else:
            used -= one.row_bytes * least
            unfit[one.path] = TOO_LARGE
    width = sum(one.row_bytes for one in placed)
    rows = min(most_rows, budget // width) if width else 0
    return TapPlan(FULL if more else DEFAULT, tuple(placed), rows, unfit)


class Placed:
    """A plan carried out on a model: its buffers, and the two ``select`` that all of them share.

    chosen: of the placed taps those that the settings choose; only these copy anything, into the buffer beside them.
    """

    def __init__(self, plan: TapPlan, chooses: Callable[[str, str], bool], device: torch.device):
        self.plan = plan
        self.chosen: list[tuple[Sighting, torch.Tensor]] = []
        with torch.inference_mode(False):
            self.select, off = selection(plan.rows, device), selection(plan.rows, device)
            self._handles = []
            by_module: dict[int, list[Sighting]] = {}
            for one in plan.placed:
                by_module.setdefault(id(one.module), []).append(one)
                buffer = torch.empty((plan.rows, *one.shape), dtype=one.dtype, device=device)
                buffer.view(torch.uint8).fill_(_UNWRITTEN)
                on = chooses(one.path, one.cls)
                # A tensor object for each tap: a compiler that was given one object for all of them would read the
                # first one's place in a later process, too, where that module may not be chosen.
                one.module.register_buffer(_buffer(one.index), buffer, persistent=False)
                one.module.register_buffer(_select(one.index), (self.select if on else off)[:], persistent=False)
                if on:
                    self.chosen.append((one, buffer))
            for sightings in by_module.values():
                module = sightings[0].module
                module.__dict__[_TAPPED] = tuple((s.index, _buffer(s.index), _select(s.index)) for s in sightings)
                self._handles.append(module.register_forward_hook(_tap_outputs))

    def remove(self) -> None:
        """Takes the hooks off. A graph that was compiled keeps its taps; they copy what ``select`` chooses: nothing."""
        for handle in self._handles:
            handle.remove()


def unwritten(rows: torch.Tensor) -> bool:
    """Whether the first row is still as the buffer was made: bytes that are NaN in every kind of float."""
    return bool((rows[0].contiguous().view(torch.uint8) == _UNWRITTEN).all())


def _tap_outputs(module: torch.nn.Module, args: Any, output: Any) -> None:
    """A forward hook, and what a compiler traces: no closure, no name of a module."""
    values = output if isinstance(output, (tuple, list)) else (output,)
    for index, buffer, select in getattr(module, _TAPPED):
        if index < len(values) and isinstance(values[index], torch.Tensor):
            tap(values[index], getattr(module, buffer), getattr(module, select))


def _is_kernel(module: torch.nn.Module) -> bool:
    return any(cls.__name__ in _KERNELS for cls in type(module).__mro__)


def _buffer(index: int) -> str:
    return f"accprobe_tap_{index}"


def _select(index: int) -> str:
    return f"accprobe_select_{index}"
