"""What a rank does with the control file's words: windows in which rows are taken, each with a selection of its own.

The problem: a capture's selection was fixed when the server started, and is known in several places (requests, rows,
modules, what may be stored whole). The idea: words that came with a step (with_the_step.py) become a selection, once,
when they change; whoever selects is told the settings that hold from this step on, None while nothing is taken. Each
window is a line in the journal, and one in which nothing was taken is said, as for a whole capture.
Not here: taking rows (vllm/capturing.py), the file (arm_file.py).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from vllm_accprobe import arm_file
from vllm_accprobe.config import ProbeConfig, in_ranges
from vllm_accprobe.dump.schema import Armed

NOT_CARRIED = "this engine's scheduler does not look at a control file, and the capture began disarmed"


class Windows:
    """The selection that holds on one rank.

    aim: told the settings from now on, None for nothing, and globs of modules, None for all that are tapped. note: gets
    each window for the journal. refuse: gets why a control file is not believed. say: a line to the person who serves.
    """

    def __init__(
        self,
        config: ProbeConfig,
        aim: Callable[[ProbeConfig | None, tuple[str, ...] | None], None],
        note: Callable[[Armed], None],
        refuse: Callable[[str], None],
        say: Callable[[str], None],
    ):
        self._config, self._aim, self._note, self._refuse, self._say = config, aim, note, refuse, say
        self._words: bytes | None = None
        self._selection = arm_file.ArmSelection(on=config.armed)
        self._serial = self._began = self._steps = self._taken = 0
        self._told = False
        self.count = 0
        if not config.armed:
            aim(None, None)

    def told(self, words: bytes | None, step: int | None) -> None:
        """The words that came with a batch; ``step``: its number, None where it is none, and nothing changes then."""
        if step is None:
            return
        if words != self._words:
            self._words = words
            if words is not None:
                self._change(json.loads(words), step)
        elif words is None and not self._told and not self._config.armed:
            self._told = True
            self._refuse(NOT_CARRIED)
            self._say(NOT_CARRIED)
        self._steps += 1

    def _change(self, said: dict[str, Any], step: int) -> None:
        if said["refused"] is not None:
            self._refuse(said["refused"])
            return
        if said["serial"] == self._serial:
            return
        self._serial = said["serial"]
        as_started = arm_file.ArmSelection(on=self._config.armed)
        selection = as_started if said["selection"] is None else arm_file.understood(said["selection"])
        self.close()
        self._selection, self._began, self._steps, self._taken = selection, step, 0, 0
        self._note(Armed(step, int(selection.on), selection.to_json()))
        if not selection.on:
            self._aim(None, None)
            return
        self.count += 1
        config = self._config
        if selection.requests is not None:
            config = dataclasses.replace(config, requests=selection.requests)
        if selection.tokens is not None:
            config = dataclasses.replace(config, tokens=selection.tokens)
        self._aim(config, selection.modules)

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
