"""Capture switched on and off while the server runs: the control file, and how its words reach every rank.

The problem: ranks of one engine that each read a file do so at different moments, and a step that only some of them
capture can be compared with nothing. The idea: one process schedules the steps of an engine for all its ranks. It looks
at the file once before each step (one lstat where nothing changed) and puts the words on the scheduler's output, so
that every rank gets the same words with the same step, whatever executor carries it. Each rank turns words that changed
into a selection: whoever selects rows gets the settings that hold from this step on, or None while nothing is taken.
Each window is a line in the journal.

Not here: taking rows (vllm/capturing.py), the file's format and what it may say (arm_file.py).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vllm_accprobe import arm_file
from vllm_accprobe.capture.core import say
from vllm_accprobe.config import PREFIX, ProbeConfig, Ranges, in_ranges
from vllm_accprobe.dump.schema import Armed

NOT_CARRIED = "this engine's scheduler does not look at a control file, and the capture began disarmed"


class Windows:
    """The selection that holds on one rank.

    aim: gets the settings that hold from now on, None for nothing; globs of modules, None for all that are tapped; and
    the positions of requests that are captured in part (ArmSelection.rows).
    note: gets each window for the journal. refuse: gets why a control file is not believed. say: a line to the person
    who serves.
    """

    def __init__(
        self,
        config: ProbeConfig,
        aim: Callable[[ProbeConfig | None, tuple[str, ...] | None, Mapping[str, Ranges]], None],
        note: Callable[[Armed], None],
        refuse: Callable[[str], None],
        say: Callable[[str], None],
    ):
        self._config, self._aim, self._note, self._refuse, self._say = config, aim, note, refuse, say
        self._words: bytes | None = None
        self._selection = arm_file.ArmSelection(on=config.armed)
        self._serial = self._began = self._steps = self._taken = 0
        self._reported = False
        self.count = 0
        if not config.armed:
            aim(None, None, {})

    def update(self, words: bytes | None, step: int | None) -> None:
        """The words that came with a batch; ``step``: its number, None where it is none, and nothing changes then."""
        if step is None:
            return
        if words != self._words:
            self._words = words
            if words is not None:
                self._change(json.loads(words), step)
        elif words is None and not self._reported and not self._config.armed:
            self._reported = True
            self._refuse(NOT_CARRIED)
            self._say(NOT_CARRIED)
        self._steps += 1

    def _change(self, words: dict[str, Any], step: int) -> None:
        if words["refused"] is not None:
            self._refuse(words["refused"])
            return
        if words["serial"] == self._serial:
            return
        self._serial = words["serial"]
        as_started = arm_file.ArmSelection(on=self._config.armed)
        selection = as_started if words["selection"] is None else arm_file.parse_selection(words["selection"])
        self.close()
        self._selection, self._began, self._steps, self._taken = selection, step, 0, 0
        self._note(Armed(step, int(selection.on), selection.to_json()))
        if not selection.on:
            self._aim(None, None, {})
            return
        self.count += 1
        config = self._config
        if selection.requests is not None:
            config = dataclasses.replace(config, requests=selection.requests)
        if selection.tokens is not None:
            config = dataclasses.replace(config, tokens=selection.tokens)
        self._aim(config, selection.modules, selection.rows)

    def wants(self, step: int) -> bool:
        """Whether rows of this step may be taken."""
        chosen = self._selection
        if not chosen.on:
            return False
        if chosen.steps is None:
            return in_ranges(self._config.steps, step)
        return in_ranges(chosen.steps, step - self._began)

    def took(self) -> None:
        """Rows of a step are taken."""
        self._taken += 1

    def close(self) -> None:
        """The window ends. Says it where nothing was taken in it."""
        if self.count and self._selection.on and not self._taken:
            seen = f"{self._steps} step{'s' * (self._steps != 1)}"
            self._say(f"armed from step {self._began} on, for {seen}: NOTHING was captured; check {arm_file.NAME}")


WORDS = "accprobe_arming"
"""The attribute of a SchedulerOutput. Bytes, json: serial (how often the file has changed), selection (null: as the
server was started), refused (why the newest file is not believed, null where it is)."""
SALTS = "accprobe_salts"
"""Another one: by new request, a hash of its cache salt. Only the scheduler knows salts, and they decide who may read
whose cache (capture/states/schedule.py)."""
_STEPS = ("step", "step_with_batch_queue")


class ControlFile:
    """The file of one engine, looked at between steps. ``current_words`` never raises."""

    def __init__(self, path: Path):
        self.path = path
        self._seen: tuple[int, ...] | None = None
        self._serial = 0
        self._selection: dict[str, Any] | None = None
        self._words = self._as_words(None)

    def current_words(self) -> bytes:
        """The words for the step that is scheduled next."""
        now: tuple[int, ...] = ()
        try:
            about = os.lstat(self.path)
            now = (about.st_ino, about.st_mtime_ns, about.st_ctime_ns, about.st_size)
        except OSError:
            pass
        if now != self._seen and not (now == () and self._seen is None):
            self._seen = now
            self._change()
        return self._words

    def _change(self) -> None:
        self._serial += 1
        refused: str | None = None
        try:
            self._selection = arm_file.read(self.path).to_json()
        except FileNotFoundError:
            self._selection = None
        except Exception as error:  # whatever a stranger's file does to a reader must not end the engine
            refused = f"{arm_file.NAME} is refused: {error}; the earlier selection goes on"
            say(f"{self.path}: {error}: refused; the earlier selection goes on")
        self._words = self._as_words(refused)

    def _as_words(self, refused: str | None) -> bytes:
        return json.dumps({"serial": self._serial, "selection": self._selection, "refused": refused}).encode()


def control_file() -> Path:
    """Where the control file of this process's dump lies: in the directory that was settled for all processes, also
    where a second engine's dump goes beside it."""
    return Path(os.environ.get(PREFIX + "DIR", "")) / arm_file.NAME


def patch_engines() -> bool:
    """`patch` for this vLLM's engines; False where it has none that step: its ranks say so where it matters."""
    try:
        from vllm.v1.engine.core import EngineCore
    except ImportError:
        return False
    return patch(EngineCore, control_file)


def patch(core: Any, path: Callable[[], Path]) -> bool:
    """Attaches the control file to the scheduler of every engine of vLLM's class ``core`` (EngineCore), when it first
    steps; False where the class has no method that steps. path: where the control file of this process's dump lies."""
    found = False
    for name in _STEPS:
        original = getattr(core, name, None)
        if callable(original):
            setattr(core, name, _stepping(original, path))
            found = True
    return found


def _stepping(original: Callable[..., Any], path: Callable[[], Path]) -> Callable[..., Any]:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "_accprobe_arming" not in self.__dict__:
            self._accprobe_arming = True
            try:
                attach_control_file(self.scheduler, ControlFile(path()))
            except Exception as error:
                say(f"this engine cannot be armed ({type(error).__name__}: {error}); it captures as it was started")
        return original(self, *args, **kwargs)

    step.__name__ = original.__name__
    return step


def attach_control_file(scheduler: Any, control: ControlFile) -> None:
    """``scheduler.schedule`` gives outputs that have the control file's words."""
    schedule = scheduler.schedule

    def scheduled(*args: Any, **kwargs: Any) -> Any:
        words = control.current_words()
        out = schedule(*args, **kwargs)
        try:
            setattr(out, WORDS, words)
            if found := salts_of(scheduler, out):
                setattr(out, SALTS, found)
        except (AttributeError, TypeError):  # a vendor's class with slots: its ranks say that they cannot be armed
            pass
        return out

    scheduler.schedule = scheduled


def salts_of(scheduler: Any, out: Any) -> dict[str, str]:
    """By request that ``out`` names for the first time, the hash of its salt; those without one are left out."""
    known = getattr(scheduler, "requests", None) or {}
    salts = {new.req_id: getattr(known.get(new.req_id), "cache_salt", None) for new in out.scheduled_new_reqs}
    return {
        name: hashlib.blake2b(str(salt).encode(), digest_size=8).hexdigest() for name, salt in salts.items() if salt
    }
