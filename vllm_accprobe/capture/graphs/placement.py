"""Which taps a compiled graph has, and the memory that they write to.

The problem: an operator in the middle of what a compiler would fuse changes the result, buffers cost memory, they must
exist before anything is compiled, and a graph that was compiled with other taps must not be used again. The idea: one
small forward of invented tokens, not compiled, shows what each module takes and returns, in which piece of the graph,
and which products the compiler would add up in the same kernel. By default taps stand where the engine's own kernels
end or begin (projections, attention, a router's choice), so that no fusion is broken; VLLM_ACCPROBE_MODULES may ask for
all outputs. Every tap of the set is placed, chosen or not, with as many rows as fit into VLLM_ACCPROBE_GRAPH_MB; where
only few would, the last taps keep statistics. The settings choose among the placed taps without another graph; what
cannot be tapped has a reason. All that our hooks read are attributes and buffers of the module, so no closure enters
the graph.

Not here: who runs that forward (vllm/compiled.py), the operators (graph_ops.py), steps and rows (readout.py).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_accprobe.capture.core.attribute_override import override
from vllm_accprobe.capture.core.session import DTYPE_NAMES
from vllm_accprobe.capture.graphs.graph_ops import (
    STATS_VERSION,
    VERSION,
    WORDS,
    selection,
    stats_buffer,
    stats_selection,
    tap,
    tap_each,
    tap_stats,
    tap_stats_each,
)
from vllm_accprobe.capture.taps.hooks import argument_names, innermost, instances

_PRODUCTS = frozenset({"aten::mm", "aten::linear"})
_SUMS = frozenset({"aten::add", "aten::add_"})
_REMEMBERED = 64
"""Chosen: products whose memory is kept at a time. The addition comes a few operators later; a mixture's shared expert
has its routed ones in between."""


class FoldedSums:
    """Which products were added to something. A product is known by a number of its own."""

    def __init__(self) -> None:
        self.folded: set[int] = set()
        self._held: OrderedDict[int, tuple[int, torch.Tensor]] = OrderedDict()  # by address
        self._count = 0

    def ran(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """An operator has run. name: with its namespace."""
        if name in _PRODUCTS:
            no_bias = len(args) < 3 or args[2] is None
            if no_bias and isinstance(result, torch.Tensor) and result.dim() == 2:
                self._count += 1
                self._held[result.data_ptr()] = (self._count, result)
                self._held.move_to_end(result.data_ptr())
                if len(self._held) > _REMEMBERED:
                    self._held.popitem(last=False)
        elif name in _SUMS and len(args) > 1:
            for one, other in ((args[0], args[1]), (args[1], args[0])):
                number = self.number(one)
                if number is not None and _expands(other, one):
                    self.folded.add(number)

    def number(self, value: Any) -> int | None:
        """Of the product that ``value`` is, None where it is none, or only a part or another view of one."""
        if not isinstance(value, torch.Tensor) or not self._held:
            return None
        number, product = self._held.get(value.data_ptr(), (None, value))
        return number if value.shape == product.shape else None


def _expands(other: Any, product: torch.Tensor) -> bool:
    if not isinstance(other, torch.Tensor) or other.dtype != product.dtype or other.dim() > product.dim():
        return False
    behind = product.shape[product.dim() - other.dim() :]
    return all(a in (1, b) for a, b in zip(other.shape, behind, strict=True))


_ALLOCATIONS = frozenset({"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided"})


class Cutter(TorchDispatchMode):
    """While it is entered, operators are seen. ``piece``: that of what is computed now, -1 before the first operator.

    splitting: names of operators at which the graph is cut (``vllm::unified_attention_with_output``). opaque: of others
    that no compiler looks into. on_call: called for each call of either, with whether it splits. ``sums``: see there.
    """

    def __init__(self, splitting: Sequence[str], opaque: Sequence[str], on_call: Callable[[bool], None]):
        super().__init__()
        self.piece = -1
        self.sums = FoldedSums()
        self._splitting = frozenset(splitting)
        self._opaque = frozenset(opaque)
        self._on_call = on_call
        self._open = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        if name in self._splitting or f"{name}.{func._overloadname}" in self._splitting:
            self._open = False
            self._on_call(True)
        elif not self._open and name not in _ALLOCATIONS:
            self._open = True
            self.piece += 1
        if name in self._opaque:
            self._on_call(False)
        result = func(*args, **(kwargs or {}))
        self.sums.ran(name, args, result)
        return result


SHAPES = "inside compiled code: called several times in one forward, with tensors of several shapes"
NO_ROWS = "inside compiled code: it gives back no tensor with a row for each token"
CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList)
UNCALLED = "never called by the batch that says what can be tapped inside compiled code (an operator may call it later)"
BETWEEN = -1


@dataclass(frozen=True)
class Sighting:
    """One tensor of one call of a module: ``shape`` behind its rows; role, path and call as an eager dump says.

    at: its place among the outputs; of an input its position, or its name where it came by keyword. bypassed: the call
    went straight to ``forward``, past the module's hooks. boundary: it goes into an operator that is not looked into.
    folded: it is a product that is added to something, see FoldedSums.
    """

    path: str
    cls: str
    module: torch.nn.Module
    role: str
    at: int | str
    shape: tuple[int, ...]
    dtype: torch.dtype
    call: int = 0
    bypassed: bool = False
    boundary: bool = False
    folded: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def goes_in(self) -> bool:
        """Whether it is an input."""
        return self.role.startswith("input.")

    @property
    def tap(self) -> tuple[int, str]:
        """What tells taps apart: the calls of one module share theirs."""
        return id(self.module), self.role


@dataclass
class Sightings:
    """``found``: in the order in which inputs went in and outputs came out. ``unfit``: by module path, why it cannot be
    tapped. ``names``: other names of modules, and the one that it is called by. ``pieces``: by module path, those in
    which its results are computed, BETWEEN where its own splitting operator gives them."""

    found: list[Sighting] = field(default_factory=list)
    unfit: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    pieces: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class _Call:
    """One call of a module while it runs. own: it has called an operator that splits, and no module since; boundary: it
    has called one that no compiler looks into."""

    path: str
    number: int
    bypassed: bool
    own: bool = False
    boundary: bool = False


class _Watch:
    """The forward that is observed: which modules run, and what was seen so far."""

    def __init__(self, splitting: Sequence[str], opaque: Sequence[str]):
        self.running: list[_Call] = []
        self.announced: set[int] = set()
        self.numbers: Counter[str] = Counter()
        self.seen: list[tuple[int, Sighting, _Call]] = []
        self.products: dict[tuple[int, str], int] = {}
        self.names: dict[str, str] = {}
        self.called: dict[str, list[int]] = {}
        self.cutter = Cutter(splitting, opaque, self._boundary)

    def _boundary(self, splits: bool) -> None:
        if self.running:
            self.running[-1].own |= splits
            self.running[-1].boundary = True

    def wrapped(self, module: torch.nn.Module, names: Sequence[str]) -> Callable[..., Any]:
        """What stands in place of ``module.forward``."""
        original = module.forward
        arguments = argument_names(MethodType(type(module).forward, module))[0]  # of ours has none to tell

        def forward(*args: Any, **kwargs: Any) -> Any:
            path = innermost(names, [call.path for call in self.running])
            call = _Call(path, self.numbers[path], id(module) not in self.announced)
            self.announced.discard(id(module))
            self.numbers[path] += 1
            self.names |= dict.fromkeys(names, path) if len(names) > 1 else {}
            self.running.append(call)
            self._see(module, call, _inputs(arguments, args, kwargs))
            result = original(*args, **kwargs)
            while self.running and self.running.pop() is not call:
                pass
            if self.running:  # what the outer module gives back is no longer its own operator's
                self.running[-1].own = False
            self.called.setdefault(path, []).append(BETWEEN if call.own else max(self.cutter.piece, 0))
            values = result if isinstance(result, (tuple, list)) else (result,)
            self._see(module, call, ((f"output.{i}", i, value) for i, value in enumerate(values)))
            return result

        return forward

    def _see(self, module: torch.nn.Module, call: _Call, found: Any) -> None:
        for role, at, value in found:
            if (
                isinstance(value, torch.Tensor)
                and value.layout is torch.strided
                and value.dtype in DTYPE_NAMES
                and value.dim() > 1
            ):
                form = (tuple(value.shape[1:]), value.dtype)
                one = Sighting(call.path, type(module).__name__, module, role, at, *form, call.number, call.bypassed)
                self.seen.append((int(value.shape[0]), one, call))
                product = None if one.goes_in else self.cutter.sums.number(value)
                if product is not None:
                    self.products.setdefault(one.tap, product)


@contextmanager
def watching(
    model: torch.nn.Module, regions: Sequence[str], splitting: Sequence[str] = (), opaque: Sequence[str] = ()
) -> Iterator[Sightings]:
    """While the context lasts, one forward of ``model`` is observed; what was seen is there when it has ended.

    regions: paths of the modules that will be compiled; those inside them are seen. splitting, opaque: names of the
    operators at which they will be cut, and of others that no compiler looks into. Rows are along dimension 0, as many
    as most tensors have: an engine may compute more rows than requested.
    """
    sightings = Sightings()
    watch = _Watch(splitting, opaque)
    watched: list[str] = []
    with ExitStack() as stack:
        for module, paths in instances(model):
            inside = any(path and (not region or path.startswith(region + ".")) for path in paths for region in regions)
            if inside and not isinstance(module, (torch.jit.ScriptModule, *CONTAINERS)):
                announce = module.register_forward_pre_hook(lambda module, args: watch.announced.add(id(module)))
                stack.callback(announce.remove)
                stack.callback(override(module, "forward", watch.wrapped(module, paths)))
                watched += paths
        with watch.cutter:
            yield sightings
    _sort(watch, sightings)
    called = {*watch.called, *watch.names}
    sightings.unfit |= {path: UNCALLED for path in watched if path not in called}


def _sort(watch: _Watch, sightings: Sightings) -> None:
    """What was seen, with a reason for what is of no use."""
    sightings.pieces, sightings.names = watch.called, watch.names
    outputs = Counter(rows for rows, one, _ in watch.seen if not one.goes_in)
    most = outputs.most_common(1)[0][0] if outputs else 0
    forms: dict[tuple[int, str], set[Any]] = {}
    for rows, one, _ in watch.seen:
        forms.setdefault(one.tap, set()).add((one.shape, one.dtype, one.at, one.bypassed, rows == most))
    fits = set()
    for rows, one, call in watch.seen:
        if rows == most and len(forms[one.tap]) == 1:
            folded = watch.products.get(one.tap) in watch.cutter.sums.folded
            sightings.found.append(replace(one, boundary=one.goes_in and call.boundary, folded=folded))
            if not one.goes_in:
                fits.add(one.path)
        elif not one.goes_in and len(forms[one.tap]) > 1:
            sightings.unfit[one.path] = SHAPES
    for path in watch.called:
        if path not in fits:
            sightings.unfit.setdefault(path, NO_ROWS)
        else:
            sightings.unfit.pop(path, None)


def _inputs(
    names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, int | str, Any]]:
    """(role, where it is, value) of each argument that has a name."""
    for position, (name, value) in enumerate(zip(names, args, strict=False)):
        yield f"input.{name}", position, value
    for name, value in kwargs.items():
        yield f"input.{name}", name, value


_IN, _OUT, _FORWARD = "_accprobe_in", "_accprobe_out", "_accprobe_forward"


class ModuleTaps:
    """The taps of ``module``; ``remove`` takes its hooks off and leaves the buffers, which graphs may know."""

    def __init__(self, module: torch.nn.Module):
        self._module = module
        self._undo: list[Callable[[], None]] = []
        self._n = 0

    def add(
        self, one: Sighting, buffer: torch.Tensor, select: torch.Tensor, cursor: torch.Tensor | None, measured: bool
    ) -> None:
        """Places the tap at ``one``: what it writes to and what it asks. cursor: None where it is called once in a
        forward, and ``buffer`` then holds that call alone. measured: statistics are kept, and no rows."""
        module = self._module
        if not self._undo:
            module.__dict__[_IN] = module.__dict__[_OUT] = ()
            self._stand(one.bypassed)
        names = []
        for kind, tensor in (("tap", buffer), ("select", select), ("cursor", cursor)):
            names.append("" if tensor is None else f"accprobe_{kind}_{self._n}")
            if tensor is not None:
                module.register_buffer(names[-1], tensor, persistent=False)
        side = _IN if one.goes_in else _OUT
        module.__dict__[side] = (*module.__dict__[side], (one.at, *names, measured))
        self._n += 1

    def remove(self) -> None:
        """The module calls no tap any more."""
        while self._undo:
            self._undo.pop()()

    def _stand(self, bypassed: bool) -> None:
        module = self._module
        if bypassed:
            module.__dict__[_FORWARD] = module.forward
            self._undo.append(override(module, "forward", MethodType(_forward, module)))
        else:
            self._undo.append(module.register_forward_pre_hook(_tap_inputs, with_kwargs=True).remove)
            self._undo.append(module.register_forward_hook(_tap_outputs).remove)


def _forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """In place of a forward that is called directly."""
    _tap_inputs(module, args, kwargs)
    output = getattr(module, _FORWARD)(*args, **kwargs)
    _tap_outputs(module, args, output)
    return output


def _tap_inputs(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
    """A forward pre-hook."""
    for at, *names in getattr(module, _IN):
        if isinstance(at, str):
            _tap(module, kwargs.get(at), *names)
        elif at < len(args):
            _tap(module, args[at], *names)


def _tap_outputs(module: torch.nn.Module, args: Any, output: Any) -> None:
    """A forward hook."""
    values = output if isinstance(output, (tuple, list)) else (output,)
    for at, *names in getattr(module, _OUT):
        if at < len(values):
            _tap(module, values[at], *names)


def _tap(module: torch.nn.Module, value: Any, buffer: str, select: str, cursor: str, measured: bool) -> None:
    if isinstance(value, torch.Tensor):
        if cursor:
            each = tap_stats_each if measured else tap_each
            each(value, getattr(module, buffer), getattr(module, cursor), getattr(module, select))
        else:
            once = tap_stats if measured else tap
            once(value, getattr(module, buffer), getattr(module, select))


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
        folds: whether the compiler folds sums into products: those are not of the default set then.
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
    for path, calls in taps.items():
        need, numbers = needs[path], STATS_BYTES * len(calls)
        behind -= min(need, numbers)
        if not only_stats and used + need + behind * kept <= budget:
            used += need
        elif used + numbers <= budget:
            used += numbers
            measured.add(path)
        else:
            left += [(one, TOO_LARGE) for one in calls]
            continue
        placed.add(path)
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
                # A tensor object for each tap: a compiler that got one object for all of them would read the
                # first one's place in a later process, too, where that module may not be chosen.
                chosen, not_chosen = (self.stats_select, stats_off) if measured else (self.select, off)
                taps_of = modules.setdefault(id(first.module), ModuleTaps(first.module))
                taps_of.add(first, buffer, (chosen if on else not_chosen)[:], cursor, measured)
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
