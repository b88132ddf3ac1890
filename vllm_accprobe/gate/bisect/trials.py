"""One trial: the command with some settings made plain is served, asked, and ended; and what was tried is kept.

The problem: a trial costs a server's start, a bisection is hours, and terminals close. The idea: a trial's folder has
a name made of all that decides its numbers: words, environment, prompts, how they are sent, versions. What is there and
complete is not run again, by whatever bisection asks for it; what was begun goes on. A command that ends before it
serves is kept as one that does not start; a server that is lost twice in the middle, too.
Not here: what is tried (search.py), what it means (judging.py).
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_accprobe.gate.bisect.edits import BisectError, ServeCommand
from vllm_accprobe.gate.sending import passes, prompts, replies
from vllm_accprobe.gate.sending.arrival import Arrival
from vllm_accprobe.gate.sending.client import Sender, SendError, ServerLost
from vllm_accprobe.gate.sending.prompts import PromptLine
from vllm_accprobe.gate.sending.serving import served
from vllm_accprobe.whole_file import write_private

TRIAL, FOLDER = "trial.json", "sent"
_DECIDES = re.compile(
    r"(VLLM|ACCPROBE|CUDA|NCCL|NVIDIA|HIP|HSA|ROC|MIOPEN|ASCEND|HCCL|NPU|XPU|XRE|XMLIR|XTORCH|BKCL|KUNLUN|MLU|MUSA|MACA"
    r"|TORCH|PYTORCH|TRITON|INDUCTOR|FLASHINFER|OMP|MKL|KMP|OPENBLAS|ONEDNN|DNNL|GLOO|HF|TRANSFORMERS|LD)_|PYTHONPATH$"
)
"""Chosen: variables that may change numbers; the rest of an environment differs from terminal to terminal."""
_NOT = re.compile(r"VLLM_API_KEY$|HF_TOKEN$|ACCPROBE_TRACEBACK$|VLLM_LOGGING|VLLM_ACCPROBE_RUN_ID$")


@dataclass(frozen=True)
class TrialPrompts:
    """What every trial is sent. source: what the prompts came from, for send.json."""

    lines: tuple[PromptLine, ...] = field(repr=False)
    arrive: tuple[Arrival, ...]
    concurrency: int
    top: int
    max_tokens: int
    timeout: float
    ready: float
    source: str = ""
    model: str = ""

    def digest(self) -> str:
        how = [[a.word for a in self.arrive], self.concurrency, self.top, self.max_tokens, self.model]
        return prompts.digest(list(self.lines)) + json.dumps(how)


@dataclass(frozen=True)
class Tried:
    """sent: the folder, None where there is no server to ask: then ``why`` says it. log: its last engine's. seconds:
    of the run, of all its starts. kept: nothing was started for it now."""

    key: str
    sent: Path | None
    log: Path | None
    seconds: float
    kept: bool = False
    why: str = ""


class Trials:
    """OUT/trials/. versions: of the vLLM that runs, and ours. made: for send.json. variables: those of a vendor's
    switches, which decide, too."""

    def __init__(
        self, out: Path, asked: TrialPrompts, versions: Mapping[str, str], made: Mapping[str, Any],
        variables: Iterable[str] = (),
    ):  # fmt: skip
        self._variables = frozenset(variables)
        self._out, self._asked, self._versions, self._made = out / "trials", asked, dict(versions), dict(made)
        self._ran: set[str] = set()

    def key(self, command: ServeCommand, again: int = 0) -> str:
        """Of everything that decides a trial's numbers; again: counts repetitions of the same."""
        named = self._variables | {name for name, _ in command.environ}
        environ = {k: v for k, v in command.full().items() if k in named or (_DECIDES.match(k) and not _NOT.match(k))}
        what = [command.words, sorted(environ.items()), self._asked.digest(), sorted(self._versions.items()), again]
        return hashlib.sha256(json.dumps(what).encode("utf-8", "backslashreplace")).hexdigest()[:16]

    def known(self, command: ServeCommand, again: int = 0) -> Tried | None:
        """What is kept of it, None where it must be run."""
        key = self.key(command, again)
        return self._known(key, self._out / key)

    def run(self, command: ServeCommand, again: int = 0) -> Tried:
        """Raises ServerLost where it was lost for the first time, SendError where it cannot be asked, OSError; what was
        answered is kept then, and the next call goes on."""
        key = self.key(command, again)
        place = self._out / key
        if (known := self._known(key, place)) is not None:
            return known
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = _read(place)
        began = time.monotonic()
        about |= {"schema": 1, "command": command.line(), "lost": about.get("lost", 0)}
        try:
            self._serve(command, place)
        except _NotServed as e:
            about["why"] = str(e)
        except ServerLost as e:
            about["lost"] += 1
            if about["lost"] < 2:
                raise
            about["why"] = f"the server was lost twice in the middle ({e})"
        finally:
            about["seconds"] = round(about.get("seconds", 0.0) + time.monotonic() - began, 3)
            write_private(place / TRIAL, json.dumps(about, indent=1) + "\n")
        self._ran.add(key)
        found = self._known(key, place)
        if found is None:
            raise BisectError(f"{place} has no complete answers after a run: is somebody else writing there?")
        return found

    def _serve(self, command: ServeCommand, place: Path) -> None:
        asked, environ = self._asked, command.full()
        # The custom operators of the model are told at this level alone; with --enable-log-requests it tells prompts.
        if command.flag("--enable-log-requests") is not True:
            environ.setdefault("VLLM_LOGGING_LEVEL", "DEBUG")
        try:
            server = served(shlex.join(command.words), environ, place, asked.ready)
            url, key = server.__enter__()
        except SendError as e:
            raise _NotServed(str(e).removeprefix("--engine: ")) from None
        try:
            how: dict[str, Any] = {"timeout": asked.timeout, "top": asked.top, "max_tokens": asked.max_tokens}
            sender, told = Sender(url, key, model=asked.model, **how).introduced()
            lines, arrive = list(asked.lines), list(asked.arrive)
            out = place / FOLDER
            passes.send(sender, told, lines, arrive, asked.concurrency, out, self._made | {"source": asked.source})
        finally:
            server.__exit__(None, None, None)

    def _known(self, key: str, place: Path) -> Tried | None:
        about = _read(place)
        logs = sorted(place.glob("engine-*.log"), key=lambda p: p.stat().st_mtime)
        log, seconds = logs[-1] if logs else None, float(about.get("seconds", 0.0))
        if about.get("why"):
            return Tried(key, None, log, seconds, key not in self._ran, str(about["why"]))
        sent = place / FOLDER
        if not replies.exists(sent) or not replies.read_about(sent).get("complete"):
            return None
        return Tried(key, sent, log, seconds, key not in self._ran)


class _NotServed(Exception):
    """It ended before it served, or does not answer in time."""


def _read(place: Path) -> dict[str, Any]:
    try:
        value = json.loads((place / TRIAL).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) and value.get("schema") == 1 else {}
