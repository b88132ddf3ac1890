"""Libraries that a release of vLLM wants in ``LD_PRELOAD`` before its worker starts.

The problem: 0.18's worker on a CPU refuses to start unless ``LD_PRELOAD`` names libtcmalloc and libiomp; pip brings the
second only, and a machine without the first would show vLLM as broken. The idea: what the system or the suite's
environment has is taken; else Debian's own package is unpacked below the environments' folder, which needs no root.
Where neither can be had, that is said as what it is: a lack of the environment.
Not here: Python packages (matrix_envs.py).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PACKAGES = {"libtcmalloc": ("libtcmalloc-minimal4", "libtcmalloc-minimal4t64")}
"""Debian's, by library: of version 12, and of those after it."""
APT_S = 120
_PLACES = (Path(sys.prefix) / "lib", Path("/usr/lib"), Path("/usr/local/lib"))


class PreloadError(RuntimeError):
    """A library cannot be had; the message is one line."""


def preload(names: tuple[str, ...], folder: Path) -> str:
    """The value of LD_PRELOAD for these libraries. Raises PreloadError."""
    return ":".join(str(_library(name, folder)) for name in names)


def _library(name: str, folder: Path) -> Path:
    for place in (*_PLACES, folder):
        if found := _below(place, name):
            return found
    for package in PACKAGES.get(name, ()):
        if _unpacked(package, folder) and (found := _below(folder, name)):
            return found
    raise PreloadError(f"{name} is neither on this system nor to be had as a Debian package: install it")


def _below(place: Path, name: str) -> Path | None:
    """The shortest name: libiomp5.so, not libiomp5_db.so."""
    found = [p for depth in ("", "*/", "usr/lib/*/") for p in place.glob(f"{depth}{name}*.so*") if p.is_file()]
    return min(found, key=lambda p: (len(p.name), str(p)), default=None)


def _unpacked(package: str, folder: Path) -> bool:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        get = subprocess.run(
            ["apt-get", "download", package], cwd=folder, capture_output=True, check=False, timeout=APT_S
        )
        archive = next(folder.glob(f"{package}_*.deb"), None) if get.returncode == 0 else None
        return (
            archive is not None
            and not subprocess.run(
                ["dpkg-deb", "-x", archive, folder], capture_output=True, check=False, timeout=APT_S
            ).returncode
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
