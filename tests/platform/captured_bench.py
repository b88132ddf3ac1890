"""How a test gets an engine on the captured platform (accprobe_captured.py), and reads what its graphs did.

Through support/engine.py: an EngineHost with ``environment``, and ``engine`` as arguments of ``capture``::

    host = EngineHost(folder / "log", environment(folder), probe=False)
    run = host.capture(model, asks, out=folder / "dump", env=options(log=folder / "steps"), **engine())
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SIZES = (1, 2, 4, 8)


def environment(folder: Path) -> dict[str, str]:
    """What must be set before vLLM is imported. folder: gets the compiled engine's cache."""
    old = os.environ.get("PYTHONPATH")
    return {
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1] / "lab" / "planted"), *([old] if old else [])]),
        "ACCPROBE_CAPTURED": "1", "VLLM_CACHE_ROOT": str(folder / "cache"), "VLLM_USE_V2_MODEL_RUNNER": "0",
    }  # fmt: skip


def options(
    *, log: Path | None = None, faults: Sequence[Mapping[str, Any]] = (), fill: float | None = None
) -> dict[str, str]:
    """What one engine of a host reads: always all of it, because the next engine inherits the environment."""
    names = {"ACCPROBE_CAPTURED_FILL": "" if fill is None else str(fill)}
    return names | {"ACCPROBE_CAPTURED_LOG": str(log or ""), "ACCPROBE_CAPTURED_FAULT": json.dumps(list(faults))}


def engine(*, graphs: bool = True) -> dict[str, Any]:
    """Arguments of vllm.LLM. graphs: False compiles the same pieces, but neither pads nor captures."""
    compilation: dict[str, Any] = {"mode": 3, "backend": "eager", "cudagraph_mode": "NONE"}
    if graphs:
        compilation |= {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": list(SIZES)}
    return {"enforce_eager": False, "compilation_config": compilation}


@dataclass(frozen=True)
class PieceCall:
    """A line of the log; see CapturedWrapper._note."""

    rank: int
    piece: int
    did: str
    size: int
    real: int
    bodies: int
    at: list[int]
    rows: str
    padding: str
    zero: bool
    nan: bool


def calls(log: Path) -> list[PieceCall]:
    """What the pieces did, in order. An engine without graphs wraps no piece, and there is no log."""
    if not log.exists():
        return []
    return [PieceCall(**json.loads(line)) for line in log.read_text(encoding="utf-8").splitlines()]
