"""vLLM's own graph wrapper, with recorded calls (captured_calls.py) in place of CUDA graphs, and a log of what it did.

The problem: what is to be tried is how vLLM captures and replays, so that the less of it is rewritten the better.
The idea: CUDAGraphWrapper asks torch.cuda for two things only, a graph and a context that captures into it; its module
is given ours. Entries per batch descriptor, replay, the check that inputs lie where they lay at capture (which vLLM
makes at log level DEBUG; here always) and the outputs, which are the capture's tensors each time, are vLLM's.

``ACCPROBE_CAPTURED_LOG`` names a file for JSON lines, one for each call of a piece: see ``_note``.
``ACCPROBE_CAPTURED_FAULT``: see captured_faults.py. ``ACCPROBE_CAPTURED_FILL``: a number (``nan``) that stands at
capture wherever a piece allocates without writing, so that the padding of what attention returns is not left to chance.
All three are read when a piece is wrapped, so for each engine anew.
"""

import hashlib
import json
import os
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import captured_faults
import torch
from captured_calls import CallGraph, capture, tensors
from torch.fx._lazy_graph_module import _LazyGraphModule
from vllm.compilation import cuda_graph
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.logger import init_logger

logger = init_logger("vllm.captured")
LOG = "ACCPROBE_CAPTURED_LOG"
FILL = "ACCPROBE_CAPTURED_FILL"


class _Torch:
    """The module torch as cuda_graph.py sees it."""

    cuda = SimpleNamespace(CUDAGraph=CallGraph, graph=capture)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _install() -> None:
    """Weak references are for a pool's memory, which we do not have: the graph's outputs are kept."""
    cuda_graph.torch = _Torch()
    cuda_graph.weak_ref_tensors = lambda output: output
    cuda_graph.capture_pool = lambda pool, config: nullcontext(pool)
    cuda_graph.current_stream = lambda: None


_install()


class CapturedWrapper(cuda_graph.CUDAGraphWrapper):
    """Around one piece (a PiecewiseBackend). bodies: how often the piece's Python has run. outputs: by piece and size,
    of the pieces that were captured last with a fault planted."""

    outputs: ClassVar[dict[tuple[int, int], tuple[torch.Tensor, ...]]] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_debugging_mode, self._runnable_str = True, str(self.runnable)
        self.piece: int = self.runnable.piecewise_compile_index
        self.bodies = 0
        self.names = tuple(node.name for node in self.runnable.graph.graph.find_nodes(op="placeholder"))
        self.faults = captured_faults.from_env()
        miscounts = [fault for fault in self.faults if (fault.kind, fault.piece) == ("count", self.piece)]
        self.miscount = captured_faults.Miscount(miscounts[0]) if miscounts else None
        self.log = os.environ.get(LOG)
        fill = os.environ.get(FILL)
        cuda_graph.torch.cuda.graph = partial(capture, fill=float(fill) if fill else None)
        _LazyGraphModule.force_recompile(self.runnable.graph)  # or its first call would be two
        self.runnable.graph.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.bodies += 1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not is_forward_context_available():
            return super().__call__(*args, **kwargs)
        context, before = get_forward_context(), self.bodies
        graphs = self.concrete_cudagraph_entries
        known = context.batch_descriptor in graphs
        if known and self.faults:
            args = captured_faults.moved(self.faults, self.piece, self.names, args)
            if self.miscount is not None:
                self.miscount.spoil(self.names, args, context.is_padding)
        output = super().__call__(*args, **kwargs)
        did = "plain"
        if context.cudagraph_runtime_mode == self.runtime_mode:
            did = "replay" if known else "capture"
        if did == "capture" and self.faults:
            self._plant(graphs[context.batch_descriptor].cudagraph, args, output, context)
        if self.log:
            self._note(did, self.bodies - before, output, context)
        return output

    def _plant(self, graph: CallGraph, args: Any, output: Any, context: Any) -> None:
        size = context.batch_descriptor.num_tokens
        outputs, previous = tuple(tensors(output)), self.outputs.get((self.piece - 1, size), ())
        self.outputs[self.piece, size] = outputs
        captured = captured_faults.Captured(
            graph, self.piece, size, self.names, args, outputs, previous, context.is_padding
        )
        for fault in self.faults:
            if captured_faults.plant(fault, captured):
                logger.warning("planted in piece %d at size %d: %s", self.piece, size, fault)

    def _note(self, did: str, bodies: int, output: Any, context: Any) -> None:
        """One line: rank, piece, did (plain, capture, replay), size (rows), real (those that are no padding; 0 in a
        dummy run), bodies (runs of the piece's Python), at (the outputs' addresses), rows and padding (hashes of the
        first output's real and padded rows), zero and nan (whether the padded ones are all zero, or some NaN)."""
        outputs = tensors(output)
        size = context.batch_descriptor.num_tokens if context.batch_descriptor else len(outputs[0])
        real = int((~context.is_padding).sum()) if context.is_padding is not None else size
        rank = self.vllm_config.parallel_config.rank
        line = {"rank": rank, "piece": self.piece, "did": did, "size": size, "real": real, "bodies": bodies}
        line |= {"at": [t.data_ptr() for t in outputs], "rows": _digest(outputs[0][:real])}
        line |= {"padding": _digest(outputs[0][real:]), "zero": not outputs[0][real:].any()}
        line["nan"] = bool(outputs[0][real:].isnan().any())
        with open(str(self.log), "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
