"""What goes into the modules of a compiled region and what they give back, seen in one forward that is not compiled.

The problem: a tap's buffer must exist before anything is compiled, and how many tensors a module gives back, how wide
they are and of which dtype, whether it is called at all or once per layer, under which of its names, and which modules
hand their inputs to an operator that no compiler looks into, is only known when it runs. The idea: one small forward of
invented tokens with every module's forward watched; what was seen decides what can be tapped, and what cannot has a
reason. Not here: who runs that forward (vllm/compiled.py), what is made of it (placement.py), pieces (pieces.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any

import torch

from vllm_accprobe.capture.core.memory import DTYPE_NAMES
from vllm_accprobe.capture.core.put_over import put_over
from vllm_accprobe.capture.graphs.pieces import Cutter
from vllm_accprobe.capture.taps.arguments import argument_names

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
    folded: it is a product that is added to something, see folded_sums.py.
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
    """The forward that is looked at: which modules run, and what was seen so far."""

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

    def around(self, module: torch.nn.Module, names: Sequence[str]) -> Callable[..., Any]:
        """What stands in place of ``module.forward``."""
        original = module.forward
        arguments = argument_names(MethodType(type(module).forward, module))[0]  # of ours has none to tell

        def forward(*args: Any, **kwargs: Any) -> Any:
            path = name_of(names, [call.path for call in self.running])
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
    """While the context lasts, one forward of ``model`` is looked at; what was seen is there when it has ended.

    regions: paths of the modules that will be compiled; those inside them are seen. splitting, opaque: names of the
    operators at which they will be cut, and of others that no compiler looks into. Rows are along dimension 0, as many
    as most tensors have: an engine may compute more than it was asked for.
    """
    sightings = Sightings()
    watch = _Watch(splitting, opaque)
    names: dict[int, list[str]] = {}
    watched: list[str] = []
    for path, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(path)
    with ExitStack() as stack:
        for paths, module in [(names[id(module)], module) for module in model.modules()]:
            inside = any(path and (not region or path.startswith(region + ".")) for path in paths for region in regions)
            if inside and not isinstance(module, (torch.jit.ScriptModule, *CONTAINERS)):
                announce = module.register_forward_pre_hook(lambda module, args: watch.announced.add(id(module)))
                stack.callback(announce.remove)
                stack.callback(put_over(module, "forward", watch.around(module, paths)))
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


def name_of(names: Sequence[str], running: Sequence[str]) -> str:
    """Of a module's several ``names`` the one that lies in the innermost module that runs, as in an eager dump."""
    for path in reversed(running):
        for name in names:
            if len(names) > 1 and name.startswith(path + "."):
                return name
    return names[0]


def _inputs(
    names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, int | str, Any]]:
    """(role, where it is, value) of each argument that has a name."""
    for position, (name, value) in enumerate(zip(names, args, strict=False)):
        yield f"input.{name}", position, value
    for name, value in kwargs.items():
        yield f"input.{name}", name, value
