"""Teacher forcing inside vLLM: a request names the tokens of its answer.

The problem: the next step must read the named token, and the answer must have its log-probability under this server's
distribution, from a sampler that knows no requests; a client also needs to know in which batch and chunk each token was
computed. The idea: an observer on every rank (each rank of a tensor-parallel group samples for itself) replaces the
result of the sampler's ``sample``, from which both generations of runners gather log-probabilities. Which token a row
gets follows from the scheduler's numbers alone. Where forcing is impossible a request is answered as any other, and its
client sees other tokens. A thread writes a line per step: requests, where they began, how many tokens; no token ids.

Not here: what a request asks for (vllm/sampling.py), reading the lines (gate/sending/replies.py).
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_accprobe.capture.core import say
from vllm_accprobe.capture.core.attribute_override import wrap_method
from vllm_accprobe.capture.core.recording import at_exit
from vllm_accprobe.capture.core.rows import Scheduled, external_ids
from vllm_accprobe.capture.vllm.names_by_release import unsampled
from vllm_accprobe.capture.vllm.runner import RunnerAdapter
from vllm_accprobe.capture.vllm.sampling import NamedTokens, named_tokens
from vllm_accprobe.capture.vllm.step_observer import EngineStep, StepObserver
from vllm_accprobe.capture.vllm.vllm_compat import guesses
from vllm_accprobe.config import ProbeConfig

_WAIT_S = 0.1
"""chosen: lines come together for so long; what kill -9 may cost."""


def log_name(rank: int) -> str:
    return f"steps-rank{rank}.jsonl"


class StepLog:
    """Adds lines to a file, 0600, that may have lines of an earlier engine. Raises OSError where it cannot be made."""

    def __init__(self, path: Path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = path
        self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
        self._lines: list[str] = []
        self._some = threading.Event()
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._broken = False
        self._thread: threading.Thread | None = None
        at_exit(self.close)

    def add(self, step: int, requests: Sequence[tuple[str, int, int]]) -> None:
        """requests: (the client's id, tokens computed before, tokens of this step)."""
        if self._broken or self._end.is_set():
            return
        self._lines.append(json.dumps({"step": step, "requests": requests}, separators=(",", ":")) + "\n")
        if self._thread is None:  # only now: a thread would not survive a fork
            self._thread = threading.Thread(target=self._work, name="accprobe-steps", daemon=True)
            self._thread.start()
        self._some.set()

    def close(self) -> None:
        """What was added is in the file. Safe to call twice; never raises."""
        self._end.set()
        self._some.set()
        self._write()

    def _work(self) -> None:
        while not self._end.is_set():
            self._some.wait()
            self._end.wait(_WAIT_S)
            self._some.clear()
            self._write()

    def _write(self) -> None:
        with self._lock:
            taken, self._lines = self._lines, []
            left = memoryview("".join(taken).encode())
            try:
                while left and not self._broken:
                    left = left[os.write(self._file, left) :]
            except OSError as error:
                self._broken = True
                say(f"{self.path}: {error.strerror or error}: no steps are written any more; serving goes on")


def tokens_of_rows(rows: Sequence[Scheduled], named_tokens: dict[str, NamedTokens]) -> list[int]:
    """The token that each row is to get, -1 where the sampled one stays."""
    found = ((row, named_tokens.get(row.internal)) for row in rows)
    return [-1 if one is None else one.at(row.start + row.n) for row, one in found]


def replaced(result: Any, tokens: Sequence[int]) -> Any:
    """``result`` of a sampler (token ids [rows], or a tuple that begins with them) with ``tokens`` in place.

    Raises RuntimeError where there are not as many rows.
    """
    sampled = result if isinstance(result, torch.Tensor) else result[0]
    if sampled.numel() != len(tokens):
        raise RuntimeError(f"the sampler has {sampled.numel()} rows, the batch {len(tokens)}")
    wanted = _on(torch.tensor(tokens, dtype=sampled.dtype), sampled.device).view(sampled.shape)
    changed = torch.where(wanted >= 0, wanted, sampled)
    return changed if isinstance(result, torch.Tensor) else (changed, *result[1:])


def _on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the device, without waiting for it."""
    if device.type == "cpu":
        return tensor
    try:
        tensor = tensor.pin_memory()
    except RuntimeError:  # a device whose host memory cannot be pinned
        return tensor.to(device)
    return tensor.to(device, non_blocking=True)


class ForcingObserver(StepObserver):
    """The forced requests of one rank, and its steps where it is the first of a replica."""

    without = "no request can be forced"
    unattached = "forcing could not attach ({}): it is off on this rank; serving goes on"

    @classmethod
    def left_out(cls, config: ProbeConfig, adapter: RunnerAdapter) -> StepObserver:
        return cls(config, adapter)

    def __init__(self, config: ProbeConfig, adapter: RunnerAdapter):
        self._adapter = adapter
        self._named: dict[str, NamedTokens] = {}
        self._names: dict[str, str] = {}
        self._in_step = self._wrapped = self._reported = False
        self._why = "its model is not loaded"
        self._log: StepLog | None = None
        if config.force_dir and first_of_replica(adapter.parallel):
            self._log = StepLog(Path(config.force_dir) / log_name(adapter.parallel["rank"]))

    @property
    def awake(self) -> bool:
        return self._wrapped

    def loaded(self) -> None:
        if self._wrapped:
            return  # weights were loaded anew
        self._wrapped, self._why = True, ""
        if guesses(getattr(self._adapter.runner, "vllm_config", None)):
            self._why = "with speculative decoding the tokens of a step depend on what was guessed"
        elif unsampled(self._adapter.runner):
            self._why = unsampled(self._adapter.runner)
        elif wrap_method(getattr(self._adapter.runner, "sampler", None), "sample", self._sample) is None:
            self._why = f"the sampler of {type(self._adapter.runner).__name__} has no method `sample`"

    def begin_step(self, step: EngineStep) -> None:
        self._in_step = step.number is not None
        for new in step.new:
            try:
                one = named_tokens(new.extra, new.length)
            except ValueError as error:
                self._refuse(str(error))
                continue
            if one is not None and self._why:
                self._refuse(self._why)
            elif one is not None:
                self._named[new.name] = one
        if self._log is not None and step.number is not None:
            begins = step.starts()
            self._log.add(step.number, [(self._sent(name), begins.get(name, 0), n) for name, n in step.counts.items()])
        for name in step.finished:
            self._named.pop(name, None)
            self._names.pop(name, None)

    def end_step(self) -> None:
        self._in_step = False

    def _sent(self, name: str) -> str:
        """As the client calls the request."""
        known = self._names.get(name)
        if known is None:
            known = self._names[name] = external_ids(name)[-1]
        return known

    def _sample(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not self._named or not self._in_step or self._why:
            return result
        try:
            logits = args[0] if args else kwargs["logits"]
            tokens = tokens_of_rows(self._adapter.batch.rows(), self._known(int(logits.shape[-1])))
            return replaced(result, tokens) if max(tokens, default=-1) >= 0 else result
        except Exception as error:
            self.failed("forcing", error)
            return result

    def _known(self, vocabulary: int) -> dict[str, NamedTokens]:
        """The requests whose tokens this model has: another id would be read from beyond its embedding."""
        for name in [name for name, one in self._named.items() if one.largest >= vocabulary]:
            del self._named[name]
            self._refuse(f"it names a token that this model, with {vocabulary} of them, does not have")
        return self._named

    def _refuse(self, why: str) -> None:
        if not self._reported:
            self._reported = True
            say(f"a request that names its tokens is answered as any other: {why} (reported once)")

    def failed(self, where: str, error: BaseException) -> None:
        if not self._why:
            self._why = f"{where} failed ({type(error).__name__}: {error})"
            say(f"{self._why}: no request is forced any more; serving goes on")

    def close(self, reason: str) -> None:
        if self._log is not None:
            self._log.close()


def first_of_replica(parallel: dict[str, Any]) -> bool:
    """Whether no other rank of this replica is before it: all of them have the same steps."""
    replica, replicas = parallel["dp"]
    ranks = parallel["world_size"] // max(replicas, 1)
    return bool(parallel["rank"] == replica * ranks)
