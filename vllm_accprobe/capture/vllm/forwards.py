"""Where the forward of a step begins and ends in a compiled engine.

The problem: taps in graphs must be aimed before and drained after it, with its number of rows; the root's Python runs
when pieces are replayed, and does not when the whole forward is. The idea: everything that a runner may call is
wrapped: the root's own forward, which comes first where it runs, so that the root's output comes after those of its
parts; V1's ``_model_forward``; and V2's replays. The first to begin and the first to end count. Where the root did not
run, what it would have been given and has given is told. Not here: the taps (compiled.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_accprobe.capture.core.put_over import put_over
from vllm_accprobe.capture.vllm.vllm_compat import step_graph
from vllm_accprobe.dump.schema import StepGraph

Begins = Callable[["int", "StepGraph | None"], None]
Ends = Callable[["dict[str, Any] | None", Any], None]
_REPLAYS = ("run_fullgraph", "run_pw_graph")


class Forwards:
    """The wrapped forwards of one engine.

    begins(rows, graph): a forward begins; rows: of its tensors, padding included; graph: that replays it. ends(named,
    result): it has returned; named: its arguments by name where it is not the root's own, else None. Both are called
    several times for one forward and must not raise; only while ``armed()``.
    """

    def __init__(self, armed: Callable[[], bool], begins: Begins, ends: Ends):
        self._armed = armed
        self._begins = begins
        self._ends = ends
        self._undo: list[Callable[[], None]] = []
        self._manager: Any = None

    def root(self, model: torch.nn.Module) -> None:
        """The root's own forward."""
        original = model.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not self._armed():
                return original(*args, **kwargs)
            self._begins(rows_of(args, kwargs), step_graph())
            result = original(*args, **kwargs)
            self._ends(None, result)
            return result

        self._undo.append(put_over(model, "forward", forward))

    def runner(self, runner: Any) -> None:
        """What the runner calls around it."""
        original = getattr(runner, "_model_forward", None)
        if callable(original):
            self._undo.append(put_over(runner, "_model_forward", self._around(original)))

    def step(self, runner: Any) -> None:
        """A step begins: V2's replays, which are made when its graphs are."""
        manager = getattr(runner, "cudagraph_manager", None)
        if manager is None or manager is self._manager:
            return
        self._manager = manager
        for name in _REPLAYS:
            original = getattr(manager, name, None)
            if callable(original):
                self._undo.append(put_over(manager, name, self._around(original)))

    def close(self) -> None:
        """All of them are as they were."""
        while self._undo:
            self._undo.pop()()

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def around(*args: Any, **kwargs: Any) -> Any:
            if not self._armed():
                return original(*args, **kwargs)
            told = _told(args)
            named = next((value for value in args if isinstance(value, dict)), kwargs)
            self._begins(told.size if told is not None else rows_of((), named), told or step_graph())
            result = original(*args, **kwargs)
            self._ends(named, result)
            return result

        return around


def _told(args: tuple[Any, ...]) -> StepGraph | None:
    """The graph that a replay is asked for (V2: BatchExecutionDescriptor)."""
    for value in args:
        mode = getattr(getattr(value, "cg_mode", None), "name", "NONE")
        if mode != "NONE":
            return StepGraph(mode, int(value.num_tokens))
    return None


def rows_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many rows the model is about to compute, padding included: those of its first tensor."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.dim():
            return int(value.shape[-1] if value.dtype in (torch.int32, torch.int64) else value.shape[0])
    return 0
