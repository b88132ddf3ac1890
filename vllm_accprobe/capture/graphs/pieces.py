"""Which piece of a compiled model a module's results are computed in.

The problem: vLLM cuts a model's graph at its splitting operators (attention and its like) and compiles and captures
what lies between them piece by piece; its logs and faults speak of pieces, people of modules. The idea: in one forward
that is not compiled, the operators and the modules are seen in the order in which the graph will have them, and cutting
is counting: a piece begins with the first operator that does not split after one that does. Allocations without content
begin none: vLLM moves such a piece of one node into the one before. Not here: the modules (sightings.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from vllm_accprobe.capture.graphs.folded_sums import FoldedSums

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
