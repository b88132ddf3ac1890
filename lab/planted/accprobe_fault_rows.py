"""Which rows of a batch a planted fault spoils.

The problem: a bad kernel is often bad only for some rows: the decode path, one tile, one position, small batches. A
module sees a tensor without knowing whose rows these are. The idea: a `Rows` notes the root forward's arguments at
every step and reads the batch's layout from vLLM's forward context; each condition is a small function of them.

A condition is one of these, or several joined by ``&``:

    all  prefill  decode            a request that has one row in this step is decoding; so is, wrongly, the last chunk
                                    of a prompt when it is one token long
    position:7  position>=7         position within the request (first line for M-RoPE)
    token:57                        rows whose input token is 57
    batch:1  batch>=4               steps with so many requests
    chunk>=2                        rows of a prompt's second and later chunks
    hit                             rows of requests that began with rows from the prefix cache (V1 runner)
    row:3  row>=64                  place in the step's batch, whoever's row it is: a tile of a kernel
    patch>=64                       row of the tensor, of a vision tower, which runs before the step's batch is known

Not here: what is done to the rows (accprobe_fault_kinds.py).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

_PHASES = ("all", "prefill", "decode", "hit")
_NUMBERED = re.compile(r"(position|token|batch|chunk|row)(:|>=)(\d+)")


class Engine:
    """What the runner that is computing now says of its requests; noted where the V1 runner takes a step's changes."""

    def __init__(self) -> None:
        self.runner: Any = None
        self.begun: dict[str, int] = {}
        self.watches = False

    def watch(self) -> None:
        """In a worker, when a model is loaded: a method that nobody else has wrapped or bound by then."""
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        if self.watches:
            return
        self.watches, update = True, GPUModelRunner._update_states

        @functools.wraps(update)
        def noted(runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self.runner = runner
            for new in scheduler_output.scheduled_new_reqs:
                self.begun[new.req_id] = int(new.num_computed_tokens)
            return update(runner, scheduler_output, *args, **kwargs)

        GPUModelRunner._update_states = noted

    def starts(self, requests: int) -> Any:
        """int64 [requests]: how many rows each had from the prefix cache when it began; 0 where nobody knows."""
        import torch

        batch = getattr(self.runner, "input_batch", None)
        names = list(getattr(batch, "req_ids", ()))[:requests]
        known = [self.begun.get(name, 0) for name in names]
        return torch.tensor(known + [0] * (requests - len(known)))


ENGINE = Engine()


class Rows:
    """Chooses the rows of a tensor by what the model is running now. Raises ValueError for an unknown condition."""

    def __init__(self, model: Any, condition: str) -> None:
        self.first = int(condition.partition("patch>=")[2] or 0)
        parts = condition.split("&") if condition != "all" and not self.first else []
        self.tests = [self._test(part) for part in parts]
        self.positions: Any = None
        self.tokens: Any = None
        self.starts: Any = None
        if self.tests:
            wrap_forward(model, self._note)

    def mask(self, rows: int) -> Any:
        """Boolean tensor of ``rows`` entries. Fewer rows than tokens: the last row of each request (the logits)."""
        import torch

        if not self.tests:
            return torch.arange(rows) >= self.first
        now = _query_starts()
        self.starts = self.starts if now is None else now.cpu().long()
        starts = self.starts
        if starts is None:  # a profile run
            return torch.zeros(rows, dtype=torch.bool)
        lengths = starts.diff()
        mask = torch.ones(int(starts[-1]), dtype=torch.bool)
        for test in self.tests:
            mask = mask & test(starts, lengths)
        mask = torch.nn.functional.pad(mask, (0, max(0, rows - len(mask))))
        return mask[starts[1:] - 1] if rows == len(lengths) and rows != len(self.positions) else mask[:rows]

    def _note(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        positions = kwargs.get("positions", args[1] if len(args) > 1 else None)
        self.positions = (positions[0] if positions.dim() == 2 else positions).cpu()
        tokens = kwargs.get("input_ids", args[0] if args else None)
        self.tokens = None if tokens is None else tokens.cpu()
        return forward(*args, **kwargs)

    def _test(self, part: str) -> Callable[[Any, Any], Any]:
        import torch

        if part == "decode":
            return lambda starts, lengths: torch.repeat_interleave(lengths == 1, lengths)
        if part == "prefill":
            return lambda starts, lengths: torch.repeat_interleave(lengths != 1, lengths)
        if part == "hit":
            return lambda starts, lengths: torch.repeat_interleave(ENGINE.starts(len(lengths)) > 0, lengths)
        match = _NUMBERED.fullmatch(part)
        if not match:
            raise ValueError(f"rows {part!r} is none of {', '.join(_PHASES)}, (position|token|batch|chunk|row)(:|>=)N")
        what, n = match[1], int(match[3])
        holds = (lambda v: v == n) if match[2] == ":" else (lambda v: v >= n)

        def test(starts: Any, lengths: Any) -> Any:
            total = int(starts[-1])
            if what == "batch":
                return torch.full((total,), bool(holds(len(lengths))))
            if what == "chunk":
                # A chunk's number is not known here, only that the prompt began in an earlier step: 1 or "2 and later".
                later = (self.positions[starts[:-1]] > ENGINE.starts(len(lengths))) & (lengths > 1)
                return torch.repeat_interleave(holds(torch.where(later, 2, 1)), lengths)
            values = {"position": self.positions, "token": self.tokens, "row": torch.arange(total)}[what]
            return holds(values[:total])

        return test


def wrap_forward(module: Any, around: Callable[..., Any]) -> None:
    """``around(forward, *args, **kwargs)`` replaces the forward of this instance; its signature stays readable."""
    forward = module.forward

    @functools.wraps(forward)  # probes name inputs by it
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(forward, *args, **kwargs)

    module.forward = wrapped


def _query_starts() -> Any:
    """The first row of each request, and one past the last; None after the forward (logits) and in a profile run."""
    from vllm.forward_context import get_forward_context, is_forward_context_available

    if not is_forward_context_available():
        return None
    metadata = get_forward_context().attn_metadata
    entries = list(metadata.values()) if isinstance(metadata, dict) else [metadata]
    return entries[0].query_start_loc if entries and entries[0] is not None else None
