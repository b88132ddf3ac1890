"""Runs the cases of the gate's laboratory and judges them as `accprobe gate` does.

The problem: forty servers, of which most are goldens and floors of several cases, and a run that must go on where it
ended. The idea: a folder for each (model, way, dtype, fault), made when first asked for and kept; a process for each
host, which builds engines one after another. Not here: the cases (gate_pairs.py), what is sent (gate_worker.py).
"""

import hashlib
import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny_model import make

from lab.gate_pairs import BASE, HOSTS, WAYS, GateCase, prompts
from vllm_accprobe.gate.measure.gating import Gate, compare
from vllm_accprobe.gate.sending import replies

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 1200


class LabError(RuntimeError):
    """An engine that did not do its job."""


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
        self._process: subprocess.Popen[str] | None = None

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
            self._start(host)
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], TIMEOUT_S)
        line = process.stdout.readline() if ready else ""
        if not line:
            self.close()
            raise LabError(f"no answer; see {self.root}/{host}.log")
        answer = json.loads(line)
        if "error" in answer:
            raise LabError(answer["error"])

    def _start(self, host: str) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_ACCPROBE")}
        env |= {
            "PYTHONPATH": os.pathsep.join([str(ROOT / "lab" / "planted"), str(ROOT)]),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1",
        } | HOSTS[host]  # fmt: skip
        with (self.root / f"{host}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(ROOT / "lab" / "gate_worker.py")], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=log, text=True, env=env, start_new_session=True,
            )  # fmt: skip
        self._name = host

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process, self._name = None, ""
