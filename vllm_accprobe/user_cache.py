"""The user's cache directory, where compiled code is kept.

The problem: compiling takes seconds, and an installed package's directory is its installer's business: it may be
read-only, shared, or checked against a list of files. The idea: ``vllm-accprobe`` in XDG_CACHE_HOME, else in ~/.cache,
is the only place where anything is kept; where it cannot be made, or others may write into it, nothing is. What lies
there is as trusted as Python's own compiled files. Not here: what is kept (machine_code.py, dump/stats_kernels.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def directory() -> Path | None:
    """The directory, made (0700) where it is missing; None where there is none that only this user writes into."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    if not home.is_absolute():
        return None
    path = home / "vllm-accprobe"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = path.stat()
    except OSError:
        return None
    return path if is_own(about) else None


def is_own(about: os.stat_result) -> bool:
    """Whether only this user, and root, may write what ``about`` is of."""
    return about.st_uid in (0, os.geteuid()) and not about.st_mode & 0o022


def numba_kept(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """``numba.njit(**options)`` whose machine code is kept here, or where NUMBA_CACHE_DIR says; else compiled in each
    process. By itself numba keeps it next to the module."""
    from numba import config, njit

    place = directory()
    writable = place is not None and os.access(place, os.W_OK)

    def compiled(function: Callable[..., Any]) -> Any:
        before = config.CACHE_DIR
        if not before and not writable:
            return njit(**options)(function)
        config.CACHE_DIR = before or str(place)  # read once, when a function is decorated
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError:  # no place to cache in after all
            return njit(**options)(function)
        finally:
            config.CACHE_DIR = before

    return compiled
