"""A dump for the labels of a plain script, which has neither vLLM nor a Probe.

The problem: ait's example is a chat loop that calls ``set_task_id`` and a patched model file that labels tensors;
nobody attaches anything to the model. The idea: a session without a model, whose steps are the tasks. Settings come
from the environment. Not here: the public functions (vllm_accprobe/labels.py), what a label does (labels.py).
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from vllm_accprobe.capture import labels
from vllm_accprobe.capture.core.layout import Layouts
from vllm_accprobe.capture.core.recording import (
    Recording,
    at_exit,
    distributed,
    process_rank,
    root_of,
    run_facts,
    unsplit,
)
from vllm_accprobe.capture.core.say import say
from vllm_accprobe.capture.core.session import Session
from vllm_accprobe.capture.labels import Labels
from vllm_accprobe.config import ConfigError, ProbeConfig, in_ranges
from vllm_accprobe.dump.schema import Step


class PlainLabels:
    """This process's labels outside of vLLM and Probe: a step for each task. The dump is opened by the first label,
    because a script that calls ``set_task_id`` may yet build an engine, whose own dump then has the labels."""

    def __init__(self) -> None:
        self._tasks = -1
        self._recording: Recording | None = None
        self._labels: Labels | None = None
        self._closed = False
        self._first: labels.Taker = self._open_first
        labels.bind(self._first)
        at_exit(self.close)

    @property
    def opened(self) -> bool:
        """Whether a label has opened the dump."""
        return self._recording is not None

    def begin_task(self) -> None:
        self._tasks += 1
        if self._recording is not None and self._labels is not None:
            session = self._recording.session
            session.end()
            try:
                self._labels.collect()
            except Exception as error:
                session.fail("collecting the labels' files", error)
            self._begin(session)

    def close(self) -> None:
        labels.unbind(self._first)
        recording = self._recording
        if self._closed or recording is None or self._labels is None:
            return
        self._closed = True
        recording.session.end()
        self._labels.close()
        recording.close("closed")
        if not recording.session.fired:
            say(f"NO label was captured in {self._tasks + 1} tasks; the dump in {recording.root} is empty")

    # --- the first label ---------------------------------------------------------------------------------------

    def _open_first(self, source: str, name: str, value: Any, path: str | None) -> None:
        if labels.others(self._first):
            return
        labels.unbind(self._first)  # whatever comes of it, it is tried once
        try:
            config = ProbeConfig.from_env()
            rank, world = _place()
            if in_ranges(config.ranks, rank):
                self._open(config, rank, world)
        except ConfigError as error:
            say(str(error))
        except Exception as error:
            say(f"labels: {type(error).__name__}: {error}; they are NOT captured")
        if self._labels is not None:
            self._labels.take(source, name, value, path)

    def _open(self, config: ProbeConfig, rank: int, world: int) -> None:
        parallel = unsplit(world)
        run = run_facts(
            config.to_json(),
            model={"path": "", "class": Path(sys.argv[0] or "python").name, "dtype": ""},
            parallel=parallel,
            engine={"runner": "accprobe.labels", "eager": True},
        )
        self._recording = recording = Recording(
            config, root_of(config), run, Layouts({}, 0, 1), lambda part, rows: None,
            rank=rank, parallel=parallel, beside="these labels go", announced=True,
        )  # fmt: skip
        self._labels = Labels(recording.session, recording.root, rank)
        self._labels.open()
        self._begin(recording.session)
        say(f"labels go to {recording.root}")

    def _begin(self, session: Session) -> None:
        if in_ranges(session.config.steps, self._tasks):
            session.begin(Step(self._tasks, {}, time.time()), [], self._tasks == 0)


def _place() -> tuple[int, int]:
    """(rank, world size) of this process: torch.distributed's, else torchrun's."""
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not distributed() and rank.isdecimal() and world.isdecimal():
        return int(rank), int(world)
    return process_rank()
