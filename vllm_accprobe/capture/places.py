"""A place for one rank's dump where the directory that was named may be taken.

Scripts of other tools are run again and again with one path, and so find their last run's dump there. It is never
written over, and never mixed with: the next free directory beside it is taken, and said.
"""

from __future__ import annotations

from pathlib import Path

from vllm_accprobe.capture.say import say
from vllm_accprobe.config import ConfigError
from vllm_accprobe.dump.schema import rank_dir

_MOST = 1000


def free_directory(root: Path, rank: int, what: str) -> Path:
    """``root``, or ``root.2``, ``root.3`` ... where it already has a dump of ``rank``. what: what goes there, for
    the line that says so. Raises ConfigError when all are taken."""
    for number in range(1, _MOST):
        place = root if number == 1 else root.with_name(f"{root.name}.{number}")
        if not (place / rank_dir(rank)).exists():
            if number > 1:
                say(f"{root} already holds rank {rank}; {what} to {place}")
            return place
    raise ConfigError(f"{root} and {_MOST - 2} directories beside it already hold rank {rank}; remove some")
