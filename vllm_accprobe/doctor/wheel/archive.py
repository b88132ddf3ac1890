"""The Python files of a wheel or a source distribution, read where it lies: nothing is unpacked, nothing is run.

The problem: a vendor's wheel comes from anywhere, and may be a bomb, name files outside, or be no archive at all. The
idea: only regular ``*.py`` files and the metadata are read, each and all of them up to a limit that is counted while
bytes come out, whatever the headers say; one strange name refuses the whole. Not here: what the files say (sources.py).
"""

from __future__ import annotations

import gzip
import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

MOST_FILES = 60_000
"""chosen: vLLM 0.33's wheel has about 6,000 entries."""
MOST_OF_ONE = 8 << 20
"""chosen: bytes of one file; the largest of vLLM 0.33 has 0.4 MB."""
MOST_OF_ALL = 512 << 20
"""chosen: bytes of all Python files; those of vLLM 0.33 have 40 MB."""
_MOST_STREAMED = 4 << 30
"""chosen: bytes that a compressed tar may unfold to while it is passed by."""
_BROKEN = (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, ValueError, RuntimeError)


class WheelError(Exception):
    """One line: what cannot be read, where, what to do."""


@dataclass(frozen=True)
class Package:
    """path: of the file. name, version: as its metadata says, "" where it does not. files: a file's path inside (the
    package's directory first, such as ``vllm/envs.py``) → its bytes."""

    path: Path
    name: str
    version: str
    files: dict[str, bytes] = field(repr=False)

    def __str__(self) -> str:
        return f"{self.name} {self.version}".strip() or self.path.name


def read(path: Path) -> Package:
    """The package in the wheel or ``.tar.gz`` at ``path``. Raises WheelError."""
    try:
        if path.name.endswith((".whl", ".zip")):
            files, metadata = _taken(path, _zipped(path))
        elif path.name.endswith((".tar.gz", ".tgz")):
            files, metadata = _taken(path, _tarred(path))
            files = {_without_top(name): data for name, data in files.items() if "/" in name}
        else:
            raise WheelError(f"{path}: neither a wheel (.whl) nor a source distribution (.tar.gz)")
    except OSError as error:
        raise WheelError(f"{path}: {error.strerror or error}") from None
    except _BROKEN as error:
        said = " ".join(str(error).split())[:200]
        raise WheelError(f"{path}: not a readable archive ({said}); download it again") from None
    if not files:
        raise WheelError(f"{path}: no Python file is in it")
    return Package(path, _header(metadata, "Name"), _header(metadata, "Version"), files)


_Entry = tuple[str, bool, "IO[bytes] | None"]
"""A file's path inside, whether it is a link or a device, and its content where it is a file."""


def _taken(path: Path, entries: Iterator[_Entry]) -> tuple[dict[str, bytes], bytes]:
    files: dict[str, bytes] = {}
    metadata, total, n = b"", 0, 0
    for name, strange, content in entries:
        n += 1
        if n > MOST_FILES:
            raise WheelError(f"{path}: more than {MOST_FILES} files: refused")
        parts = name.split("/")
        if name.startswith("/") or ".." in parts or "\\" in name or "\0" in name or re.match(r"[A-Za-z]:", name):
            raise WheelError(f"{path}: {name[:100]!r} leads out of the archive: refused")
        about = parts[-1] in ("METADATA", "PKG-INFO") and len(parts) == 2
        if not (name.endswith(".py") or about):
            continue
        if strange or content is None:
            raise WheelError(f"{path}: {name[:100]!r} is a link or a device: refused")
        data = content.read(MOST_OF_ONE + 1)
        total += len(data)
        if len(data) > MOST_OF_ONE or total > MOST_OF_ALL:
            raise WheelError(f"{path}: {name[:100]!r} is larger than any source file: refused")
        if about:
            metadata = metadata or data
        elif name in files:
            raise WheelError(f"{path}: {name[:100]!r} is in it twice: refused")
        else:
            files[name] = data
    return files, metadata


def _zipped(path: Path) -> Iterator[_Entry]:
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if info.is_dir():
                continue
            strange = info.external_attr >> 28 not in (0, 8)  # the upper half is a Unix mode, 8 a regular file
            wanted = info.filename.endswith((".py", "METADATA"))
            if wanted and not strange:
                with archive.open(info) as content:
                    yield info.filename, False, content
            else:
                yield info.filename, strange, None


def _tarred(path: Path) -> Iterator[_Entry]:
    with gzip.open(path) as unfolded, tarfile.open(fileobj=cast(Any, _Limited(path, unfolded)), mode="r|") as archive:
        for info in archive:
            if not info.isdir():
                yield info.name, not info.isreg(), archive.extractfile(info) if info.isreg() else None


class _Limited:
    """A stream that ends in a refusal when it has given too much."""

    def __init__(self, path: Path, stream: gzip.GzipFile):
        self._path, self._stream, self._left = path, stream, _MOST_STREAMED

    def read(self, n: int = -1) -> bytes:
        data = self._stream.read(n)
        self._left -= len(data)
        if self._left < 0:
            raise WheelError(f"{self._path}: it unfolds to more than {_MOST_STREAMED >> 30} GB: refused")
        return data


def _without_top(name: str) -> str:
    rest = name.partition("/")[2]
    return rest[4:] if rest.startswith("src/") else rest


def _header(metadata: bytes, name: str) -> str:
    found = re.search(rf"^{name}: *([A-Za-z0-9._+!-]{{1,80}})\s*$", metadata.decode("utf-8", "replace"), re.MULTILINE)
    return found[1] if found else ""
