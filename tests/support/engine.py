"""Runs real vLLM engines for the tests and brings back what they said and where their dump lies.

The problem: importing vLLM takes ten seconds and fills a process with state, and a crash inside an engine must not end
the test session. The idea: an ``EngineHost`` is a child process (engine_worker.py) that builds one engine after another
in its own process, single-process and eager, and talks JSON lines; the second engine of a host takes a few seconds.
What must be set before vLLM is imported (the V2 runner, CPU binding for TP) belongs to the host's environment.
Not here: what an engine does with the requests (engine_worker.py); HTTP servers (server.py).
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from preloaded_vllm import FORKED
from support import kernels

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 420


class EngineError(RuntimeError):
    """The engine failed; the message ends with the last lines of its log."""


@dataclass(frozen=True)
class Ask:
    """One request. ``image``: (width, height, seed) of a made-up picture, for the image token in the prompt;
    ``images``: several. ``audio``: (seconds, seed) of noise, for an encoder-decoder model, whose decoder gets ``ids``.
    ``sampling``: further arguments of vllm.SamplingParams; ``structured``: those of its StructuredOutputsParams.
    ``adapter``: (name, number, directory) of a LoRA adapter. ``embeds``: (rows, width, seed) of made-up embeddings, in
    place of the token ids."""

    ids: Sequence[int]
    max_tokens: int = 8
    id: str | None = None
    image: tuple[int, int, int] | None = None
    images: Sequence[tuple[int, int, int]] = ()
    audio: tuple[float, int] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    structured: Mapping[str, Any] | None = None
    adapter: tuple[str, int, str] | None = None
    embeds: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Run:
    """What one engine left: ``dump`` (None where nothing was written), sampled ids per request, counters, and for a
    pooling model its embedding of each request. logprobs: per request and token, where ``sampling`` asked for them,
    [token, log-probability] of each candidate.

    metrics: preemptions, prefix_hits (tokens), drafted and accepted (speculative tokens), steps, widest (most requests
    in one step), ahead (steps made before the tokens of the first are known; 1 without asynchronous scheduling),
    build_s and serve_s (seconds).
    """

    dump: Path | None
    tokens: list[list[int]]
    metrics: dict[str, float] = field(default_factory=dict)
    vectors: list[list[float]] = field(default_factory=list)
    logprobs: list[list[list[list[float]]]] = field(default_factory=list)


class EngineHost:
    """A child process that builds engines one after another. ``extra_env`` is set before vLLM is imported.

    probe: False for a bare engine, VLLM_ACCPROBE unset. forced: the kernels it computes with, see kernels.py. python:
    the interpreter of another environment, whose vLLM it is then; no faults can be planted in it, which know 0.32's;
    or FORKED of preloaded_vllm.py, where ``extra_env`` has nothing that vLLM reads when it is imported. worker: the
    program, where it is not engine_worker.py: one that answers each of its jobs by `call` (engine_worker.main).
    """

    def __init__(
        self,
        log: Path,
        extra_env: Mapping[str, str] | None = None,
        *,
        probe: bool = True,
        forced: str = kernels.NATIVE,
        python: str | Path = sys.executable,
        worker: Path = ROOT / "tests" / "support" / "engine_worker.py",
    ) -> None:
        self.log, self.python, self.worker = log, python, worker
        self.forced = forced
        self.extra_env = {"VLLM_ACCPROBE": "1"} if probe else {}
        self.extra_env |= extra_env or {}
        self._process: subprocess.Popen[str] | None = None

    def capture(
        self,
        model: str | Path,
        asks: Sequence[Ask | Sequence[int]],
        *,
        out: Path,
        fault: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        how: str = "together",
        env: Mapping[str, str] | None = None,
        sabotage: bool = False,
        dummies: bool = False,
        during: Mapping[int, Sequence[Any]] | None = None,
        **engine: Any,
    ) -> Run:
        """Build an engine for ``model`` with the probe writing to ``out``, send ``asks``, shut it down.

        how: ``together`` (all at once), ``serial`` (each when the one before has finished), ``staggered`` (a new one
        every second step), ``beams`` (each by a search with two beams). env: VLLM_ACCPROBE_* of this engine.
        sabotage: the probe fails at its first tap. dummies: an invented batch after every step, as a replica computes
        that has nothing to do. during: before that step of the loop, [method of the worker, its arguments].
        engine: arguments of vllm.LLM, over small defaults; ``runner="pooling"`` asks for embeddings.
        Raises EngineError.
        """
        job = {
            "model": str(model), "out": str(out), "fault": json.dumps(fault) if fault else None, "how": how,
            "asks": [asdict(a if isinstance(a, Ask) else Ask(a)) for a in asks], "env": dict(env or {}),
            "engine": engine, "sabotage": sabotage, "dummies": dummies,
            "during": {str(step): list(what) for step, what in (during or {}).items()},
        }  # fmt: skip
        answer = self.call(job)
        written = out if (out / "run.json").exists() else None
        return Run(written, answer["tokens"], answer["metrics"], answer["vectors"], answer["logprobs"])

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin:
            process.stdin.close()  # the worker leaves its loop at end of file
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def call(self, job: dict[str, Any], timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """The worker's answer to a job. Raises EngineError."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        end = time.monotonic() + timeout_s
        while not select.select([process.stdout], [], [], 1.0)[0]:
            if time.monotonic() > end:
                os.killpg(process.pid, signal.SIGKILL)
                raise EngineError(f"no answer in {timeout_s} s\n{self._tail()}")
        line = process.stdout.readline()
        if not line:
            raise EngineError(f"the engine's process ended with code {process.wait()}\n{self._tail()}")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{answer['error']}\n{self._tail()}")
        return answer

    def _start(self) -> None:
        faults = ROOT / "lab" / "planted"
        old, places = os.environ.get("PYTHONPATH"), []
        if self.python == sys.executable or Path(self.python).name == FORKED:
            places = [str(faults), str(faults.parent)]
        env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_ACCPROBE")}
        env |= {
            "PYTHONPATH": os.pathsep.join([*places, *([old] if old else [])]), "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "INFO", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": self._threads(),
        }  # fmt: skip
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(self.python), str(self.worker)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=env | kernels.environment(self.forced, env) | self.extra_env,
                start_new_session=True,  # so that a stuck engine can be killed with all of its ranks
            )

    def _threads(self) -> str:
        """One: of two, on cores that the other half of the suite uses, each mostly waits for the other (twice as slow,
        measured). Lesser kernels compute with as many as the machine has: there, too, sums are split over threads."""
        return os.environ.get("OMP_NUM_THREADS", "1") if self.forced == kernels.NATIVE else str(os.cpu_count())

    def mapped(self) -> list[str]:
        """Files that the child has mapped, its libraries among them; none where it does not run or nobody can tell."""
        try:
            lines = Path(f"/proc/{self._process.pid}/maps").read_text().splitlines() if self._process else []
        except OSError:
            return []
        return sorted({line[line.index("/") :] for line in lines if "/" in line})

    def _tail(self, lines: int = 25) -> str:
        text = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join([f"--- end of {self.log} ---", *text[-lines:]])


TP2_ENV = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
V2_ENV = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1", "ACCPROBE_TEST_V2": "1"}
