"""Which taps stand in a compiled graph, and the memory that they write to.

The problem: an operator in the middle of what a compiler would fuse changes the result, buffers cost memory that the
engine wants for itself, and a graph that was compiled with other taps must not be used again. The idea: by default taps
stand where the engine's own kernels end or begin (projections, attention, a router's choice), so that nothing is torn
apart; modules that the settings name beyond these ask for all outputs. Every tap of the set is placed, chosen or not,
with as many rows as fit into VLLM_ACCPROBE_GRAPH_MB; where only few would, the last taps measure instead of copying
(VLLM_ACCPROBE_TASK=stats: all of them), and the whole has a key. The settings then choose among the placed ones without
another graph. Not here: the operators (tap_op.py, stats_op.py), what is seen of the modules (sightings.py), hooks
(in_module.py), steps and rows (drain.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_accprobe.capture.core.memory import DTYPE_NAMES
from vllm_accprobe.capture.graphs.in_module import ModuleTaps, Spot
from vllm_accprobe.capture.graphs.sightings import Sighting, Sightings
from vllm_accprobe.capture.graphs.stats_op import STATS_VERSION, WORDS, stats_buffer, stats_selection
from vllm_accprobe.capture.graphs.tap_op import VERSION, selection

DEFAULT, FULL, NAMED = "default", "full", "named"
_KERNELS = frozenset(
    {"QKVParallelLinear", "RowParallelLinear", "MergedColumnParallelLinear", "Attention", "MLAAttention", "GateLinear"}
)
"""Classes (or those that a vendor's class derives from) whose outputs are in memory anyway."""
_CHOICES = frozenset({"input.router_logits", "input.topk_ids", "input.topk_weights"})
"""What a router chose and by what: inputs of kernels that fuse nothing."""
_LEAST_ROWS = 8
"""Where not even so many fit, taps measure instead, and then are left out, from the model's end."""
RING_MOST = 256 << 20
STATS_BYTES = 8 * WORDS
"""Of a call that is measured."""
_UNWRITTEN = 0xFF
NOT_DEFAULT = "inside compiled code, not of the default taps: VLLM_ACCPROBE_MODULES=all places taps at all modules"
FOLDED = (
    "inside compiled code, not of the default taps: its product is added up in the same kernel, and a tap would change "
    "the sum's rounding; VLLM_ACCPROBE_MODULES=all places one"
)
NOT_NAMED = "inside compiled code, not among VLLM_ACCPROBE_GRAPH_TAPS"
TOO_LARGE = "its tap does not fit into VLLM_ACCPROBE_GRAPH_MB"


@dataclass(frozen=True)
class TapPlan:
    """The taps of one model. kind: ``default``, ``full`` or ``named``. placed: in order of execution, one per call.
    rows: of each buffer. unfit: by path, why there is no tap; partly: by path and role, where there are others.
    measured: the ``tap`` of those that keep statistics of all rows, of most_rows at most, instead of rows."""

    kind: str
    placed: tuple[Sighting, ...]
    rows: int
    unfit: dict[str, str]
    partly: dict[tuple[str, str], str] = field(default_factory=dict)
    measured: frozenset[tuple[int, str]] = frozenset()
    most_rows: int = 0

    def measures(self, one: Sighting) -> bool:
        """Whether the tap at ``one`` keeps statistics instead of rows."""
        return one.tap in self.measured

    @property
    def statistics(self) -> int:
        """How many of ``placed`` are measured."""
        return sum(map(self.measures, self.placed))

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        rows = self.rows * sum(one.row_bytes for one in self.placed if not self.measures(one))
        return rows + STATS_BYTES * self.statistics

    @property
    def key(self) -> str:
        """What a compiled graph depends on: where taps stand, what their buffers look like, the operator's version."""
        sites = [
            [one.path, one.role, one.call, one.shape, DTYPE_NAMES[one.dtype], self.measures(one)] for one in self.placed
        ]
        text = json.dumps([VERSION, STATS_VERSION, self.rows, self.most_rows, sites])
        return hashlib.sha256(text.encode()).hexdigest()[:32] if sites else ""

    def facts(self) -> dict[str, Any]:
        """What run.json says of it."""
        return {
            "set": self.kind if self.placed else None, "taps": len(self.placed), "rows": self.rows,
            "tensors": len(self.placed) - self.statistics, "statistics": self.statistics,
            "bytes": self.nbytes, "tap_version": VERSION, "key": self.key,
        }  # fmt: skip


def ring_bytes(budget: int, device: torch.device) -> int:
    """Of ``budget`` bytes those for copies of buffers that are on their way to the host, so that the next replay may
    write them: a quarter, and no more than is staged without it. None in host memory, where what the taps hold is
    taken before the next forward begins."""
    return 0 if device.type == "cpu" else min(budget // 4, RING_MOST)


def plan(
    seen: Sightings,
    chooses: Callable[[str, str], bool],
    most_rows: int,
    budget: int,
    *,
    inputs: bool = True,
    outputs: bool = True,
    only_stats: bool = False,
    places: Callable[[str, str], bool] | None = None,
    folds: bool = False,
) -> TapPlan:
    """Which of the ``seen`` tensors get a tap.

    Args:
        chooses: whether VLLM_ACCPROBE_MODULES names (path, class) explicitly; names beyond the default set ask for all.
        most_rows: rows of the largest batch. budget: bytes for all buffers of this rank. inputs, outputs: whether
            VLLM_ACCPROBE_PARTS names them. only_stats: no rows are kept.
        places: which (path, class) get a tap, whatever else; None: the default or the full set, as ``chooses`` says.
        folds: whether the compiler folds sums into products (folded_sums.py): those are not of the default set then.
    """
    more = places is None and any(chooses(one.path, one.cls) and not _has_default(one, seen) for one in seen.found)
    named = None if places is None else {one.tap for one in seen.found if places(one.path, one.cls)}
    taps: dict[tuple[int, str], list[Sighting]] = {}
    left: list[tuple[Sighting, str]] = []
    for one in seen.found:
        if not (inputs if one.goes_in else outputs):
            continue
        apart = folds and one.folded
        fits = (_is_default(one) and not apart) or ((more or named is not None) and not one.goes_in)
        if fits and (named is None or one.tap in named):
            taps.setdefault(one.tap, []).append(one)
        elif not one.goes_in:
            left.append((one, NOT_NAMED if named is not None else FOLDED if apart else NOT_DEFAULT))
    least = min(_LEAST_ROWS, most_rows)
    needs = {tap: sum(one.row_bytes for one in calls) * least for tap, calls in taps.items()}
    behind = sum(min(needs[tap], STATS_BYTES * len(calls)) for tap, calls in taps.items())
    kept = behind <= budget  # so much that something of those behind still fits
    used, placed, measured = 0, set(), set()
    for tap, calls in taps.items():
        need, numbers = needs[tap], STATS_BYTES * len(calls)
        behind -= min(need, numbers)
        if not only_stats and used + need + behind * kept <= budget:
            used += need
        elif used + numbers <= budget:
            used += numbers
            measured.add(tap)
        else:
            left += [(one, TOO_LARGE) for one in calls]
            continue
        placed.add(tap)
    ones = tuple(one for one in seen.found if one.tap in placed)
    width = sum(one.row_bytes for one in ones if one.tap not in measured)
    numbers = STATS_BYTES * sum(one.tap in measured for one in ones)
    rows = min(most_rows, (budget - numbers) // width) if width else 0
    there = {one.path for one in ones}
    unfit = {path: why for path, why in seen.unfit.items() if path not in there}
    unfit |= {one.path: why for one, why in left if one.path not in there}
    partly = {(one.path, one.role): why for one, why in left if one.path in there}
    kind = FULL if more else DEFAULT if named is None else NAMED
    return TapPlan(kind, ones, rows, unfit, partly, frozenset(measured), most_rows)


class Placed:
    """A plan carried out on a model: its buffers, and the two ``select`` that all taps of a kind share.

    chosen: of the placed taps those that the settings choose, in order of execution, with the buffer of their call;
    only these write anything. select: of the taps that copy, stats_select of those that measure. cursors: must be 0
    when a forward begins that is to be captured.
    """

    def __init__(self, plan: TapPlan, chooses: Callable[[str, str], bool], device: torch.device):
        self.plan = plan
        self.chosen: list[tuple[Sighting, torch.Tensor]] = []
        self.cursors: list[torch.Tensor] = []
        taps: dict[tuple[int, str], list[Sighting]] = {}
        for one in plan.placed:
            taps.setdefault(one.tap, []).append(one)
        with torch.inference_mode(False):
            self.select, off = selection(plan.rows, device), selection(plan.rows, device)
            most = plan.most_rows if plan.measured else 0
            self.stats_select, stats_off = stats_selection(most, device), stats_selection(most, device)
            modules: dict[int, ModuleTaps] = {}
            buffers: dict[tuple[tuple[int, str], str, int], torch.Tensor] = {}
            for tap, calls in taps.items():
                first, on = calls[0], any(chooses(one.path, one.cls) for one in calls)
                measured = plan.measures(first)
                if measured:
                    buffer = stats_buffer(device, *[len(calls)] * (len(calls) > 1))
                else:
                    size = (plan.rows, *first.shape) if len(calls) == 1 else (len(calls), plan.rows, *first.shape)
                    buffer = torch.empty(size, dtype=first.dtype, device=device)
                    buffer.view(torch.uint8).fill_(_UNWRITTEN)
                cursor, parts = None, [buffer]
                if len(calls) > 1:
                    parts = list(buffer)
                    cursor = torch.zeros(1, dtype=torch.int64, device=device)
                    self.cursors.append(cursor)
                buffers |= {(tap, one.path, one.call): part for one, part in zip(calls, parts, strict=True)}
                # A tensor object for each tap: a compiler that was given one object for all of them would read the
                # first one's place in a later process, too, where that module may not be chosen.
                chosen, not_chosen = (self.stats_select, stats_off) if measured else (self.select, off)
                spot = Spot(first.at, first.goes_in, buffer, (chosen if on else not_chosen)[:], cursor, measured)
                modules.setdefault(id(first.module), ModuleTaps(first.module)).add(spot, first.bypassed)
            self._modules = list(modules.values())
        for one in plan.placed:
            if chooses(one.path, one.cls):
                self.chosen.append((one, buffers[one.tap, one.path, one.call]))

    def begin(self) -> None:
        """A forward that is to be captured comes next."""
        for cursor in self.cursors:
            cursor.zero_()

    def remove(self) -> None:
        """Takes the hooks off. A graph that was compiled keeps its taps; they copy what ``select`` chooses: nothing."""
        for module in self._modules:
            module.remove()


def unwritten(rows: torch.Tensor) -> bool:
    """Whether the first row is still as the buffer was made: bytes that are NaN in every kind of float."""
    return bool((rows[0].contiguous().view(torch.uint8) == _UNWRITTEN).all())


def _is_default(one: Sighting) -> bool:
    if one.goes_in:
        return one.boundary or one.role in _CHOICES
    return any(cls.__name__ in _KERNELS for cls in type(one.module).__mro__)


def _has_default(one: Sighting, seen: Sightings) -> bool:
    return any(_is_default(other) for other in seen.found if other.path == one.path)
