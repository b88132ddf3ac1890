"""A dump for the labels of a plain script, which has neither vLLM nor a Probe.

The problem: ait's example is a chat loop that calls ``set_task_id`` and a patched model file that labels tensors;
nobody attaches anything to the model. The idea: a session without a model, whose steps are the tasks. Settings come
from the environment. Not here: the public functions (taker.py), what a label does (taker.py of this room).
"""

from __future__ import annotations

import atexit
import os
import platform
import socket
import sys
import time
from datetime import datetime, timezone
from multiprocessing import util as mp_util
from pathlib import Path
from typing import Any

import torch

from vllm_accprobe import __version__, labels
from vllm_accprobe.capture.core.dump_dir import announce, free_directory
from vllm_accprobe.capture.core.layout import Layouts
from vllm_accprobe.capture.core.say import say
from vllm_accprobe.capture.core.session import Session
from vllm_accprobe.capture.core.sink import Sink
from vllm_accprobe.capture.labels.taker import Labels
from vllm_accprobe.config import ConfigError, ProbeConfig, default_dir, in_ranges
from vllm_accprobe.dump.recorder.writer import write_run_json
from vllm_accprobe.dump.schema import Step


class PlainLabels:
    """This process's labels outside of vLLM and Probe: a step for each task. The dump is opened by the first label,
    because a script that calls ``set_task_id`` may yet build an engine, whose own dump then has the labels."""

    def __init__(self) -> None:
        self.root: Path | None = None
        self._tasks = -1
        self._session: Session | None = None
        self._labels: Labels | None = None
        self._closed = False
        self._first: labels.Taker = self._open_first
        labels.bind(self._first)
        atexit.register(self.close)
        mp_util.Finalize(None, self.close, exitpriority=100)

    def begin_task(self) -> None:
        self._tasks += 1
        if self._session is not None and self._labels is not None:
            self._session.end()
            try:
                self._labels.collect()
            except Exception as error:
                self._session.fail("collecting the labels' files", error)
            self._begin()

    def close(self) -> None:
        labels.unbind(self._first)
        if self._closed or self._session is None or self._labels is None:
            return
        self._closed = True
        session = self._session
        session.end()
        self._labels.close()
        session.dead = session.dead or "closed"
        session.sink.close("closed")
        if not session.fired:
            say(f"NO label was captured in {self._tasks + 1} tasks; the dump in {self.root} is empty")

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
        root = Path(os.path.abspath(config.dir or default_dir()))
        self.root = root = free_directory(root, rank, "these labels go")
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        parallel = {"world_size": world, "tp": [0, 1], "pp": [0, 1], "dp": [0, 1], "ep": [0, 1]}
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        write_run_json(
            root,
            {
                "tool": "accprobe",
                "versions": {"accprobe": __version__, "python": platform.python_version(), "torch": torch.__version__},
                "platform": {"system": platform.platform(), "machine": platform.machine()},
                "model": {"path": "", "class": Path(sys.argv[0] or "python").name, "dtype": ""},
                "parallel": parallel,
                "engine": {"runner": "accprobe.labels", "eager": True},
                "probe": config.to_json(),
                "start_time": now,
            },
        )
        start = {
            "schema": 1, "rank": rank, **parallel, "pid": os.getpid(), "host": socket.gethostname(), "device": "",
            "time": time.time(),
        }  # fmt: skip
        sink = Sink(config, root, rank, start, self._stopped)
        self._session = Session(config, sink, Layouts({}, 0, 1), say, lambda part, rows: None)
        self._labels = Labels(self._session, root, rank)
        self._labels.open()
        self._begin()
        announce(root)
        say(f"labels go to {root}")

    def _begin(self) -> None:
        session = self._session
        if session is not None and in_ranges(session.config.steps, self._tasks):
            session.begin(Step(self._tasks, {}, time.time()), [], self._tasks == 0)

    def _stopped(self, reason: str) -> None:
        if self._session is not None:
            self._session.stop(reason)


def _place() -> tuple[int, int]:
    """(rank, world size) of this process: torch.distributed's, else torchrun's."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(world)) if rank.isdecimal() and world.isdecimal() else (0, 1)

