"""Whether a process still runs: one that is dead and not waited for yet does not."""

import time
from pathlib import Path


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def gone(pid: int) -> bool:
    """Whether it ends in time: a kill is sent at once, and a process on a busy machine dies when its turn comes."""
    end = time.monotonic() + 30
    while runs(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not runs(pid)
