"""What a capture puts on for vLLM's modes, in one place: adapters, a draft model, rows that are not the step's.

Not here: what each of them does (adapters.py, drafters.py, other_rows.py).
"""

from __future__ import annotations

from typing import Any

from vllm_accprobe.capture.core.session import Session
from vllm_accprobe.capture.taps.params import ParameterLines
from vllm_accprobe.capture.vllm.batch import EngineBatch
from vllm_accprobe.capture.vllm.modes.adapters import Adapters
from vllm_accprobe.capture.vllm.modes.drafters import record_draft
from vllm_accprobe.capture.vllm.modes.other_rows import OtherRows


class AttachedModes:
    """All of them, on a model that is loaded. ``close`` takes them off."""

    def __init__(self, session: Session, parameters: ParameterLines, runner: Any, model: Any, batch: EngineBatch):
        self._adapters = Adapters(session, parameters, runner)
        self._other_rows = OtherRows(session, model, batch)
        record_draft(session, parameters, runner, model)

    def close(self) -> None:
        """As it was before."""
        self._other_rows.close()
        self._adapters.close()
