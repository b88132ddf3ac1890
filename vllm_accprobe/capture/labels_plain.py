"""A dump for the labels of a plain script, which has neither vLLM nor a Probe.

The problem: the seed's example is a chat loop that calls ``set_task_id`` and a patched model file that labels tensors;
nobody attaches anything to the model. The idea: a session without a model, whose steps are the tasks. Settings come
from the environment. Not here: the public functions (labels.py), what a label does (labels.py of this room).
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

import torch

from vllm_accprobe import __version__
from vllm_accprobe.capture.labels import Labels
from vllm_accprobe.capture.layout import Layouts
from vllm_accprobe.capture.places import free_directory
from vllm_accprobe.capture.say import say
from vllm_accprobe.capture.session import Session
from vllm_accprobe.capture.sink import Sink
from vllm_accprobe.config import ConfigError, ProbeConfig, default_dir, in_ranges
from vllm_accprobe.dump.schema import Step
from vllm_accprobe.dump.writer import write_run_json


class PlainLabels:
    """The open dump of this process's labels: a step for each task."""

    @staticmethod
    def start() -> PlainLabels | None:
        """Opens it; None, with one line said, where a setting is wrong or the directory cannot be used."""
        try:
            config = ProbeConfig.from_env()
            rank, world = _place()
            return PlainLabels(config, rank, world) if in_ranges(config.ranks, rank) else None
        except ConfigError as error:
            say(str(error))
        except Exception as error:
            say(f"labels: {type(error).__name__}: {error}; they are NOT captured")
        return None

    def __init__(self, config: ProbeConfig, rank: int, world: int):
        self.root = free_directory(Path(os.path.abspath(config.dir or default_dir())), rank, "these labels go")
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        parallel = {"world_size": world, "tp": [0, 1], "pp": [0, 1], "dp": [0, 1], "ep": [0, 1]}
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        write_run_json(
            self.root,
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
        sink = Sink(config, self.root, rank, start, self._stopped)
        self.session = Session(config, sink, Layouts({}, 0, 1), say, lambda state, part, rows: None)
        self.labels = Labels(self.session, self.root, rank)
        self.labels.open()
        self._tasks = -1
        self._closed = False
        atexit.register(self.close)
        mp_util.Finalize(None, self.close, exitpriority=100)
        say(f"labels go to {self.root}")

    def begin_task(self) -> None:
        self.session.end()
        try:
            self.labels.collect()
        except Exception as error:
            self.session.fail("collecting the labels' files", error)
        self._tasks += 1
        if in_ranges(self.session.config.steps, self._tasks):
            self.session.begin(Step(self._tasks, {}, time.time()), [], self._tasks == 0)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.session.end()
        self.labels.close()
        self.session.dead = self.session.dead or "closed"
        self.session.sink.close("closed")
        if not self.session.fired:
            say(f"NO label was captured in {self._tasks + 1} tasks; the dump in {self.root} is empty")

    def _stopped(self, reason: str) -> None:
        self.session.stop(reason)


def _place() -> tuple[int, int]:
    """(rank, world size) of this process: torch.distributed's, else torchrun's."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(world)) if rank.isdecimal() and world.isdecimal() else (0, 1)

