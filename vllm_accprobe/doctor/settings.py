"""The environment's settings and the disk that the dump would go to.

The problem: a mistyped setting stops the server minutes into its start, and a slow or full disk slows every step. The
idea: read the settings as the server would, and write a little where the dump would lie. The dump directory itself is
not created. Not here: what the settings mean (config.py).
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from vllm_accprobe.config import ENV, PREFIX, ConfigError, ProbeConfig, default_dir
from vllm_accprobe.doctor.finding import ERROR, OK, WARNING, Finding

SLOW = 200e6
"""Bytes per second under which a capture of whole tensors is held up by the disk."""

PROBE_BYTES = 64 << 20
BLOCK = 8 << 20


def _config(environ: Mapping[str, str]) -> ProbeConfig | ConfigError:
    try:
        return ProbeConfig.from_env(environ)
    except ConfigError as error:
        return error


def switch(environ: Mapping[str, str]) -> list[Finding]:
    """Is the probe on."""
    config = _config(environ)
    if isinstance(config, ConfigError):
        return []  # configuration() says so
    if config.enabled:
        return [Finding(OK, "switch", f"{ENV}={environ.get(ENV, '')}: the probe is on")]
    return [Finding(WARNING, "switch", "the probe is off: nothing is captured", f"{ENV}=1 turns it on")]


def configuration(environ: Mapping[str, str]) -> list[Finding]:
    """Would the server accept the settings."""
    config = _config(environ)
    if isinstance(config, ConfigError):
        return [Finding(ERROR, "settings", str(config), "the server would not start with the probe on")]
    given = sorted(name for name in environ if name.startswith(PREFIX))
    text = ", ".join(f"{name}={environ[name]}" for name in given) if given else "all at their defaults"
    out = [Finding(OK, "settings", text)]
    if config.graphs:
        text = f"{PREFIX}GRAPHS=1: inside compiled or captured graphs taps see some modules, the rest counts as skipped"
        out.append(Finding(WARNING, "settings", text, f"unset {PREFIX}GRAPHS to see every module"))
    return out


def directory(environ: Mapping[str, str]) -> list[Finding]:
    """Can the dump directory be made and written, how fast is it, and how much is free."""
    config = _config(environ)
    if isinstance(config, ConfigError):
        return []
    path = Path(os.path.abspath(config.dir or default_dir()))
    other = f"name another with {PREFIX}DIR"
    if (path / "run.json").exists():
        return [Finding(ERROR, "directory", f"{path} already holds a dump", f"{other}, or remove it")]
    place = path
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    if not place.is_dir():
        return [Finding(ERROR, "directory", f"{place} is in the way: it is not a directory", other)]
    if not os.access(place, os.W_OK | os.X_OK):
        return [Finding(ERROR, "directory", f"{place} cannot be written by this user", other)]
    return [*free_space(place, config.budget_bytes), *disk_speed(place)]


def free_space(place: Path, budget: int) -> list[Finding]:
    """Free bytes against the budget of one rank."""
    free = shutil.disk_usage(place).free
    text = f"{free / 1e9:.1f} GB free at {place}, budget {budget / 1e9:g} GB per rank"
    if free < PROBE_BYTES * 4:
        return [Finding(ERROR, "free space", text, f"free some, or name another disk with {PREFIX}DIR")]
    if free < budget:
        todo = f"capture ends when the disk is full: name another with {PREFIX}DIR, or lower {PREFIX}MAX_GB"
        return [Finding(WARNING, "free space", text, todo)]
    return [Finding(OK, "free space", text)]


def disk_speed(place: Path, nbytes: int = PROBE_BYTES, seconds: float = 3.0) -> list[Finding]:
    """Bytes per second of writing up to ``nbytes`` in ``place``, past the page cache where the file system lets us."""
    try:
        rate, direct = write_rate(place, nbytes, seconds)
    except OSError as error:
        todo = f"name another directory with {PREFIX}DIR"
        return [Finding(ERROR, "disk speed", f"{place}: {error.strerror or error}", todo)]
    how = "direct" if direct else "buffered and synced"
    text = f"{rate / 1e6:,.0f} MB/s at {place} ({how})"
    if rate < SLOW:
        todo = f"steps wait for the disk: a faster one with {PREFIX}DIR, fewer modules, or {PREFIX}TASK=stats"
        return [Finding(WARNING, "disk speed", text, todo)]
    return [Finding(OK, "disk speed", text)]


def write_rate(place: Path, nbytes: int, seconds: float) -> tuple[float, bool]:
    """(bytes per second, whether O_DIRECT was used). Writes a file in ``place`` and removes it. Raises OSError."""
    fd, name = tempfile.mkstemp(prefix=".accprobe-doctor-", dir=place)
    os.close(fd)
    try:
        for flag in (getattr(os, "O_DIRECT", 0), 0):
            try:
                return _timed_write(name, os.O_WRONLY | flag, nbytes, seconds), bool(flag)
            except OSError:
                if not flag:  # file systems without O_DIRECT refuse at open or at the first write
                    raise
        raise AssertionError("unreachable: the last try returns or raises")
    finally:
        os.unlink(name)


def _timed_write(name: str, flags: int, nbytes: int, seconds: float) -> float:
    # An anonymous map is aligned to pages, as O_DIRECT demands; random bytes, because some disks compress.
    with mmap.mmap(-1, BLOCK) as block:
        block[:] = os.urandom(1 << 20) * (BLOCK >> 20)
        fd = os.open(name, flags)
        try:
            start, written = time.perf_counter(), 0
            while written < nbytes and time.perf_counter() - start < seconds:
                written += os.write(fd, block)
            os.fsync(fd)
            return written / max(time.perf_counter() - start, 1e-9)
        finally:
            os.close(fd)
