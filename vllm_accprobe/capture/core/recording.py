"""One rank's dump while it is written: its directory, run.json, the journal's first line and its end.

The problem: a vLLM worker, a Probe, the labels of a plain script, ``begin_dump`` and an alarm of errcheck each write a
dump, and a dump has small duties that are forgotten one at a time: a directory in which no other run lies (scripts of
other tools run again and again with one path), run.json, a way from a full disk or a spent budget back to the taps, an
end however the process ends. The idea: one type has them all. Whoever starts it brings what it alone knows (settings,
layouts, where rows are) and gets a Session to take tensors with.

Not here: what is taken in a step, lines and bytes (session.py); what is put on a model (taps/).
"""

from __future__ import annotations

import atexit
import os
import platform
import socket
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from multiprocessing import util as mp_util
from pathlib import Path
from typing import Any

import torch

from vllm_accprobe import __version__, export_at_end
from vllm_accprobe.capture.core import say
from vllm_accprobe.capture.core.layout import Layouts
from vllm_accprobe.capture.core.rows import Space
from vllm_accprobe.capture.core.session import Session, Sink
from vllm_accprobe.config import ConfigError, ProbeConfig, default_dir
from vllm_accprobe.dump.files import numbered_siblings
from vllm_accprobe.dump.journal_writer import write_run_json
from vllm_accprobe.dump.schema import rank_dir
from vllm_accprobe.dump.writer import DumpCheckpoint

REGISTER = "ACCPROBE_RUN_REGISTER"
"""Environment variable: a file to which each dump's directory is appended, a line each. Not for users."""


def announce(root: Path) -> None:
    """Tells `accprobe run`, if this process is its command's, that ``root`` is a dump. Never raises."""
    register = os.environ.get(REGISTER)
    if register:
        try:
            fd = os.open(register, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(fd, f"{root}\n".encode(errors="surrogateescape"))
            finally:
                os.close(fd)
        except OSError:
            return


def free_directory(root: Path, rank: int, what: str) -> Path:
    """``root``, or ``root.2``, ``root.3`` ... where it already has a dump of ``rank``. what: what goes there, for
    the line that says so. Raises ConfigError when all are taken."""
    for place in numbered_siblings(root):
        if not (place / rank_dir(rank)).exists():
            if place != root:
                say(f"{root} already holds rank {rank}; {what} to {place}")
            return place
    raise ConfigError(f"{root} and 998 directories beside it already hold rank {rank}; remove some")


def root_of(config: ProbeConfig) -> Path:
    """The directory that the settings name, or the default one; absolute."""
    return Path(os.path.abspath(config.dir or default_dir()))


def distributed() -> bool:
    """Whether torch.distributed knows this process's rank."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def process_rank() -> tuple[int, int]:
    """(rank, world size) of this process as torch.distributed has them; (0, 1) without it."""
    return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if distributed() else (0, 1)


def unsplit(world_size: int) -> dict[str, Any]:
    """``parallel`` of a process whose model no engine has split."""
    return {"world_size": world_size, "tp": [0, 1], "pp": [0, 1], "dp": [0, 1], "ep": [0, 1]}


def run_facts(
    probe: Mapping[str, Any],
    *,
    versions: Mapping[str, str] | None = None,
    system: Mapping[str, str] | None = None,
    **sections: Any,
) -> dict[str, Any]:
    """run.json.

    Args:
        probe: the settings, as ``ProbeConfig.to_json`` gives them.
        versions, system: what is added to the versions of accprobe, Python and torch, and to the platform.
        sections: ``device``, ``model``, ``parallel``, ``engine`` and what else is known, in the file's order.
    """
    return {
        "tool": "accprobe",
        "versions": {
            "accprobe": __version__, "python": platform.python_version(), "torch": str(torch.__version__),
            **(versions or {}),
        },
        "platform": {"system": platform.platform(), "machine": platform.machine(), **(system or {})},
        **sections,
        "probe": probe,
        "start_time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }  # fmt: skip


def at_exit(close: Callable[..., None], *args: Any, priority: int = 100) -> None:
    """Calls ``close(*args)``, which must bear to be called twice, when this process ends by itself: the interpreter's
    way, or multiprocessing's, which leaves out the interpreter's. priority: higher ones are closed earlier."""
    atexit.register(close, *args)
    mp_util.Finalize(None, close, args=args, exitpriority=priority)


class Recording:
    """A rank's dump from its directory to its last line; ``session`` takes what goes into it.

    Args:
        root: absolute; created, 0700, where it is missing. It is ``self.root`` unless ``contents`` is given.
        run: what run.json says, where this rank is the first to write it; see ``run_facts``.
        rank: the global one. parallel: what the journal's first line says of the others.
        layouts, find_space: see Session.
        device: where the model computes; None: unknown, and tensors are in host memory.
        contents: what goes into this dump, for the line that is printed where ``root`` has a dump of this rank and the
            next free directory (``root.2`` ...) is taken. Without it the directory is taken as it is.
        setting: what the user calls the directory: an OSError then becomes a ConfigError that begins with it.
        announced: `accprobe run` learns of the dump.
        on_stop: called instead of the session's ``stop`` when nothing more can be written, with the reason.
        begun: of a dump that is continued, see RankWriter.

    Raises:
        ConfigError: no directory is free, or, with ``setting``, it cannot be written.
        OSError: without ``setting``: it cannot be written.
    """

    def __init__(
        self,
        config: ProbeConfig,
        root: Path,
        run: Mapping[str, Any],
        layouts: Layouts,
        find_space: Callable[[str, int], Space | None],
        *,
        rank: int,
        parallel: Mapping[str, Any],
        device: torch.device | None = None,
        contents: str = "",
        setting: str | None = None,
        announced: bool = False,
        on_stop: Callable[[str], None] | None = None,
        begun: DumpCheckpoint | None = None,
    ):
        self.root = free_directory(root, rank, contents) if contents else root
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_run_json(self.root, run)
        except OSError as error:
            if setting is None:
                raise
            what = f"{setting}{self.root}: {error.strerror or error}"
            raise ConfigError(f"{what}; name a directory that can be written") from None
        if announced:
            announce(self.root)
        start = {
            "schema": 1, "rank": rank, **parallel, "pid": os.getpid(), "host": socket.gethostname(),
            "device": "" if device is None else str(device), "time": time.time(),
        }  # fmt: skip
        self._rank, self._export, self._exported = rank, config.export, False
        self._session: Session | None = None  # while the sink is made, which may stop at once
        sink = Sink(config, self.root, rank, start, on_stop or self._stopped, device, begun=begun)
        self._session = self.session = Session(config, sink, layouts, say, find_space)

    def _stopped(self, reason: str) -> None:
        if self._session is not None:
            self._session.stop(reason)
        else:
            say(f"capture stopped: {reason}; serving goes on")

    def end(self, reason: str) -> None:
        """Taps let everything pass from now on; what they have taken, and lines, are still written."""
        self.session.end()
        self.session.dead = self.session.dead or reason

    def close(self, reason: str) -> None:
        """Writes what is still queued and the last line. Safe to call twice."""
        self.end(reason)
        self.session.sink.close(reason)
        if not self._exported:
            self._exported = True
            export_at_end.start(self.root, self._rank, self._export)
