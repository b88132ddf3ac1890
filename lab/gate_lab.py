"""Runs the cases of the gate's laboratory and judges them as `accprobe gate` does.

The problem: forty servers, of which most are goldens and floors of several cases, and a run that must go on where it
ended. The idea: a folder for each (model, way, dtype, fault), made when first asked for and kept; a process for each
host, which builds engines one after another. Not here: the cases (gate_pairs.py), what is sent (gate_worker.py).
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.engine import EngineError, EngineHost
from tiny_model import make

from lab.gate_pairs import BASE, HOSTS, WAYS, GateCase, prompts
from vllm_accprobe.gate.measure.gating import Gate, compare
from vllm_accprobe.gate.sending import replies

__all__ = ["EngineError", "GateBench", "GateOutcome"]
ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 1200


@dataclass(frozen=True)
class GateOutcome:
    """named: whether the condition's axis is the planted one, None where none was planted; first: whether it comes
    before the others that explain it as well."""

    case: GateCase
    gate: Gate

    @property
    def right(self) -> bool:
        return (self.gate.verdict == "fail") == (self.case.fault is not None)

    @property
    def named(self) -> bool | None:
        condition = self.gate.condition
        if self.case.axis is None:
            return None
        every = (condition, *condition.also) if condition else ()
        return any(c.axis == self.case.axis for c in every)

    @property
    def first(self) -> bool | None:
        condition = self.gate.condition
        return None if self.case.axis is None else condition is not None and condition.axis == self.case.axis


class GateBench:
    """Folders under ``root``, and the processes that fill them, one at a time. prompts_of: a seed's."""

    def __init__(self, root: Path, prompts_of: Callable[[int], list[dict[str, Any]]] = prompts):
        self.root, self._prompts = root, prompts_of
        self._name = ""
        self._host: EngineHost | None = None

    def judged(self, case: GateCase, floors: bool = True, heal: str = "") -> GateOutcome:
        golden = self.folder(case.model, case.golden, None, None, None, case.prompts)
        mine = self.folder(case.model, case.mine, None, case.fault, golden, case.prompts, heal)
        floor = self.folder(case.model, case.golden, case.floor, None, golden, case.prompts) if floors else None
        right = [replies.read(floor)] if floor else []
        return GateOutcome(case, compare(replies.read(golden), replies.read(mine), right))

    def folder(
        self, model: str, way: str, dtype: str | None, fault: Any, golden: Path | None, seed: int, heal: str = ""
    ) -> Path:
        """Of an engine with this fault, along golden's tokens; dtype: another than the way's, of a floor; heal: globs
        over modules that compute with their references."""
        text = json.dumps(fault) if fault else ""
        told = hashlib.sha256(text.encode()).hexdigest()[:8] if text else "clean"
        told += "-healed-" + hashlib.sha256(heal.encode()).hexdigest()[:8] if heal else ""
        name = "-".join(filter(None, (model, way, dtype, told, str(seed), golden and f"along-{golden.name}")))
        out = self.root / name
        if replies.exists(out) and replies.read_about(out).get("complete"):
            return out
        shutil.rmtree(out, ignore_errors=True)
        asked = self.root / f"prompts-{seed}.jsonl"
        self.root.mkdir(parents=True, exist_ok=True)
        asked.write_text("".join(json.dumps(line) + "\n" for line in self._prompts(seed)))
        engine = BASE | dict(WAYS[way].engine) | ({"dtype": dtype} if dtype else {})
        self._do(
            WAYS[way].host,
            {
                "model": str(make(model, self.root / f"model-{model}")), "engine": engine, "fault": text,
                "env": {"VLLM_ACCPROBE_HEAL": heal, "VLLM_ACCPROBE_DIR": f"{out}-outcome"} if heal else {},
                "prompts": str(asked), "golden": str(golden) if golden else "", "out": str(out),
            },
        )  # fmt: skip
        return out

    def _do(self, host: str, job: dict[str, Any]) -> None:
        if self._name != host:
            self.close()
            log, worker = self.root / f"{host}.log", ROOT / "lab" / "gate_worker.py"
            self._host, self._name = EngineHost(log, HOSTS[host], probe=False, worker=worker), host
        assert self._host is not None
        self._host.call(job, TIMEOUT_S)

    def close(self) -> None:
        if self._host is not None:
            self._host.close()
        self._host, self._name = None, ""
