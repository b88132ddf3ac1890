"""Where one rank's dump goes when the directory that was named may be taken, and who is told of it.

Scripts of other tools are run again and again with one path, and so find their last run's dump there. It is never
written over, and never mixed with: the next free directory beside it is taken, and said. `accprobe run` learns of dumps
that a script puts elsewhere than it was told from a file that it names in the environment.
"""

from __future__ import annotations

import os
from pathlib import Path

from vllm_accprobe.capture.core.say import say
from vllm_accprobe.config import ConfigError
from vllm_accprobe.dump.files import beside
from vllm_accprobe.dump.schema import rank_dir

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
    for place in beside(root):
        if not (place / rank_dir(rank)).exists():
            if place != root:
                say(f"{root} already holds rank {rank}; {what} to {place}")
            return place
    raise ConfigError(f"{root} and 998 directories beside it already hold rank {rank}; remove some")
