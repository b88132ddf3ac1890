"""Calls of the model's parts whose rows are not the step's: they are not recorded, and are counted.

The problem: with prompt log-probabilities the head runs again, over rows of a prompt, and with prompt embeddings the
embedding runs over the rows that are tokens only. By its shape such a tensor may be taken for one of the step's: two
rows of a prompt for two requests' last rows, or a width for a number of rows. The idea: both go through a method of the
model that is called with those rows. What they compute is a function of each row alone whose rows are captured
elsewhere: the root's output, and the root's ``inputs_embeds``. Not here: the sampled rows' logits (sampling.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_accprobe.capture.core.put_over import put_over
from vllm_accprobe.capture.core.session import Session
from vllm_accprobe.capture.vllm.batch import EngineBatch
from vllm_accprobe.dump.schema import ROOT_TAP

AGAIN = "rows of logits for prompt log-probabilities: the rows before the head are in the model's output"
TOKENS_ONLY = "rows embedded apart from prompt embeddings: they are in the model's input"


class OtherRows:
    """Stands around ``model.compute_logits`` and ``model.embed_input_ids``, where it has them."""

    def __init__(self, session: Session, model: Any, batch: EngineBatch):
        self._session = session
        self._batch = batch
        self._undo: list[Callable[[], None]] = []
        for name, around in (("compute_logits", self._logits), ("embed_input_ids", self._embed)):
            original = getattr(model, name, None)
            if callable(original):
                self._undo.append(put_over(model, name, self._around(original, around)))

    def close(self) -> None:
        """Both are as they were."""
        while self._undo:
            self._undo.pop()()

    def _around(self, original: Callable[..., Any], other: Callable[[int], str]) -> Callable[..., Any]:
        session = self._session

        def around(*args: Any, **kwargs: Any) -> Any:
            state = session.state
            if state is None:
                return original(*args, **kwargs)
            rows = next((len(v) for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor) and v.dim()), 0)
            why = other(rows)
            if not why:
                return original(*args, **kwargs)
            session.sink.skip(ROOT_TAP, why, count=rows)
            session.state = None
            try:
                return original(*args, **kwargs)
            finally:
                session.state = state if session.dead is None else None

        return around

    def _logits(self, _: int) -> str:
        """The first call of a step is for the rows that are sampled."""
        assert self._session.state is not None
        calls = self._session.state.calls
        calls["head"] = calls.get("head", 0) + 1
        return AGAIN if calls["head"] > 1 else ""

    def _embed(self, rows: int) -> str:
        return TOKENS_ONLY if rows < self._batch.total else ""
