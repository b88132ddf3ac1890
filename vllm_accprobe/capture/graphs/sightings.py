"""What the modules of a compiled region give back, seen in one forward that is not compiled.

The problem: a tap's buffer must exist before anything is compiled, and how many tensors a module gives back, how wide
they are and of which dtype, whether it is called at all or once per layer, is only known when it runs. The idea: one
small forward of invented tokens with a hook on each module; what was seen decides what can be tapped, and what cannot
has a reason. Not here: who runs that forward (vllm/compiled.py), what is made of it (placement.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_accprobe.capture.core.memory import DTYPE_NAMES

SEVERAL = "inside compiled code: called several times in one forward, and a tap's buffer holds one call"
NO_ROWS = "inside compiled code: it gives back no tensor with a row for each token"


@dataclass(frozen=True)
class Sighting:
    """One tensor that a module gave back: ``shape`` behind its rows, at place ``index`` of the module's outputs."""

    path: str
    cls: str
    module: torch.nn.Module
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def role(self) -> str:
        """As the dump calls it."""
        return f"output.{self.index}"


@dataclass
class Sightings:
    """``found``: in the order in which the modules returned. ``unfit``: by module path, why it cannot be tapped."""

    found: list[Sighting] = field(default_factory=list)
    unfit: dict[str, str] = field(default_factory=dict)


@contextmanager
def watching(model: torch.nn.Module, regions: Sequence[str]) -> Iterator[Sightings]:
    """While the context lasts, one forward of ``model`` is looked at; what was seen is there when it has ended.

    regions: paths of the modules that will be compiled; those inside them are seen. Rows are along dimension 0, as many
    as most tensors have: an engine may compute more than it was asked for.
    """
    seen = Sightings()
    names: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(path)
    tensors: dict[str, list[tuple[int, Sighting]]] = {}
    handles = []

    def hook_of(path: str, shared: bool) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            if shared or path in tensors:
                seen.unfit[path] = SEVERAL
            else:
                tensors[path] = list(_tensors(path, module, output))

        return hook

    try:
        for paths, module in ((names[id(module)], module) for module in model.modules()):
            if any(path and (not region or path.startswith(region + ".")) for path in paths for region in regions):
                handles.append(module.register_forward_hook(hook_of(paths[0], len(paths) > 1)))
        yield seen
    finally:
        for handle in handles:
            handle.remove()
    most = Counter(n for found in tensors.values() for n, _ in found).most_common(1)
    for path, found in tensors.items():
        if path not in seen.unfit:
            fit = [one for n, one in found if n == most[0][0]]
            seen.found += fit
            if not fit:
                seen.unfit[path] = NO_ROWS


def _tensors(path: str, module: torch.nn.Module, output: Any) -> Iterator[tuple[int, Sighting]]:
    """(rows, what was seen) of each plain tensor of a module's outputs."""
    for index, value in enumerate(output if isinstance(output, (tuple, list)) else (output,)):
        if (
            isinstance(value, torch.Tensor)
            and value.layout is torch.strided
            and value.dtype in DTYPE_NAMES
            and value.dim() > 1
        ):
            one = Sighting(path, type(module).__name__, module, index, tuple(value.shape[1:]), value.dtype)
            yield int(value.shape[0]), one
