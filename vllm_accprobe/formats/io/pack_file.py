"""The file of a golden pack, which a stranger may have made: checked, and opened as the dump that it holds.

The problem: a pack is downloaded; it may be a zip bomb, name paths outside of its place, or hold other bytes than its
manifest says. The idea: nothing is inflated before the central directory is known: only names that a pack has, each
once, with sizes that fit the manifest and the limits; each member is then inflated to its size and no further, and its
hash is compared. The rows lie in a folder that dump/reader.py opens as a dump, which trusts nothing either. Not here:
what a pack holds (golden/pack.py), its sketches (golden/pack_sketches.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vllm_accprobe.dump.decode import Count, DecodeError, decode
from vllm_accprobe.dump.files import DumpError, open_regular
from vllm_accprobe.dump.reader import Dump, open_dump as open_own
from vllm_accprobe.dump.schema import JOURNAL, RUN_JSON
from vllm_accprobe.formats.io.plain_file import FileProblem
from vllm_accprobe.formats.io.zipindex import Unpacker, ZipMember, index, too_much

KIND = "accprobe golden pack"
VERSION = 1
MANIFEST, INDEX, SKETCHES, PROMPTS = "manifest.json", "sketches.json", "sketches.safetensors", "prompts.jsonl"
MOST_BYTES = 1 << 30
"""Of a pack, and of what is in it: a hundred times what one should have."""
MOST_TEXT = 256 << 20
"""Of all members of text together."""
MOST = {RUN_JSON: 4 << 20, INDEX: 8 << 20, PROMPTS: 64 << 20, JOURNAL: 64 << 20}
"""Of a member of text, by the last part of its name: decoded JSON takes many times its bytes."""
_MOST_MANIFEST = 4 << 20
_MOST_DIRECTORY = 1 << 20
_HEAD = 64
_MEMBER = re.compile(
    rf"rank\d{{4,9}}/(?:{re.escape(JOURNAL)}|seg-\d{{5}}\.safetensors)|"
    rf"{'|'.join(map(re.escape, (RUN_JSON, INDEX, SKETCHES, PROMPTS)))}", re.ASCII,
)  # fmt: skip
_DUMP = "dump"
"""Where the dump lies among a pack's members, once they are files."""


def begins_as_pack(head: bytes) -> bool:
    """Whether these are the first bytes of a pack: a zip whose first member is its manifest."""
    name = MANIFEST.encode()
    return head.startswith(b"PK\x03\x04") and head[30 : 30 + len(name)] == name


def is_pack(path: Path | None) -> bool:
    """Whether a file begins as a pack does."""
    if path is None or not path.is_file():
        return False
    try:
        with path.open("rb") as f:
            return begins_as_pack(f.read(_HEAD))
    except OSError:
        return False


class PackAltered(DumpError):
    """A pack that is not what its manifest says."""


@dataclass(frozen=True)
class MemberHash:
    """bytes: when inflated; sha256: of these."""

    bytes: Count
    sha256: str


def verify(path: Path) -> tuple[dict[str, Any], str]:
    """(the manifest of a pack whose members all have the hashes that it says, the manifest's own SHA-256, which a
    publisher may publish apart). Writes nothing. Raises PackAltered where they have others, DumpError for what is no
    pack or cannot be read."""
    with _checked(path) as (fd, manifest, members):
        for member in members.values():
            for _ in _pieces(path, fd, member, manifest):
                pass
        text = index(fd, os.fstat(fd).st_size)[MANIFEST].read(fd, _MOST_MANIFEST)
    return manifest, hashlib.sha256(text).hexdigest()


@contextlib.contextmanager
def _checked(path: Path) -> Iterator[tuple[int, dict[str, Any], dict[str, ZipMember]]]:
    """(the open file, the manifest, all other members), whose names and sizes fit. Raises DumpError."""
    try:
        fd = open_regular(path)
    except OSError as e:
        raise DumpError(f"cannot read {path}: {e.strerror or e}") from None
    try:
        size = os.fstat(fd).st_size
        if size > MOST_BYTES:
            raise DumpError(f"{path} has {size:,} bytes: a pack has {MOST_BYTES:,} at most")
        if os.pread(fd, 4, 0) != b"PK\x03\x04":  # no zip
            raise DumpError(f"{path} is no golden pack: name a file that `accprobe golden pack` or `make` wrote")
        members = index(fd, size, once=True, most=_MOST_DIRECTORY)
        if MANIFEST not in members:
            raise DumpError(f"{path} is no golden pack: it has no {MANIFEST}")
        manifest = _manifest(path, members.pop(MANIFEST).read(fd, _MOST_MANIFEST))
        _check_names(path, members, manifest)
        yield fd, manifest, members
    except FileProblem as e:
        raise DumpError(f"{path} is damaged: {e}; download it again") from None
    except OSError as e:
        raise DumpError(f"cannot read {path}: {e.strerror or e}") from None
    finally:
        os.close(fd)


def _manifest(path: Path, text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
        if not isinstance(found, dict) or found.get("kind") != KIND:
            raise DecodeError("this is not the manifest of a golden pack")
        if found.get("schema") != VERSION:
            raise DecodeError(f"its schema is {str(found.get('schema'))[:20]}, and this accprobe reads {VERSION}: "
                              "upgrade it")  # fmt: skip
        decode(dict[str, MemberHash], found.get("members"), "members")
        if type(found.get("seed")) is not int:
            raise DecodeError("it has no seed")
    except (ValueError, RecursionError) as e:
        why = "it is nested too deep" if isinstance(e, RecursionError) else " ".join(str(e).split())[:200]
        raise DumpError(f"{path}: {MANIFEST} cannot be used: {why}") from None
    return found


def _check_names(path: Path, members: Mapping[str, ZipMember], manifest: Mapping[str, Any]) -> None:
    """Only members of a pack, all that the manifest names, of the sizes that it says."""
    listed = manifest["members"]
    strange = next((n for n in members if not _MEMBER.fullmatch(n)), None)
    if strange is not None:
        raise DumpError(f"{path} has a member {strange[:80]!r}, which no pack has: it is not used")
    if other := sorted(set(members) ^ set(listed)):
        where = "is not in its manifest" if other[0] in members else "is missing"
        raise PackAltered(f"{path}: {other[0][:80]!r} {where}: download it again")
    if missing := [n for n in (RUN_JSON, INDEX, SKETCHES) if n not in members]:
        raise DumpError(f"{path} has no {missing[0]}: not all of a pack is there")
    text = 0
    for name, m in members.items():
        if m.size != listed[name]["bytes"]:
            raise PackAltered(f"{path}: {name} has {m.size:,} bytes, and its manifest says {listed[name]['bytes']:,}")
        most = MOST.get(name.rpartition("/")[2])
        text += m.size if most is not None else 0
        if too_much(m.packed, m.size) or text > MOST_TEXT or m.size > (most or MOST_BYTES):
            raise DumpError(f"{path}: {name} has {m.size:,} bytes, more than a pack has: it is not used")
    if sum(m.size for m in members.values()) > MOST_BYTES:
        raise DumpError(f"{path} holds more than {MOST_BYTES:,} bytes: it is not used")


def _pieces(path: Path, fd: int, member: ZipMember, manifest: Mapping[str, Any]) -> Iterator[bytes]:
    """A member's bytes. Raises DumpError behind the last where their hash is another."""
    found, left, unpacker = hashlib.sha256(), member.size, Unpacker(member, fd)
    while left:
        piece = unpacker.read(min(left, 1 << 20))
        left -= len(piece)
        found.update(piece)
        yield piece
    if found.hexdigest() != manifest["members"][member.name]["sha256"]:
        raise PackAltered(f"{path}: {member.name} is not what its manifest says (another hash): download it again")


def unpack(path: Path, into: Path) -> tuple[dict[str, Any], Path]:
    """Writes the members to a new folder in ``into``; returns the manifest and the folder. Raises DumpError for what is
    no pack, or is not what its manifest says."""
    home = into / "pack"
    number = 1
    while home.exists():
        number += 1
        home = into / f"pack.{number}"
    with _checked(path) as (fd, manifest, members):
        try:
            home.mkdir(mode=0o700, parents=True)
            for name, member in members.items():
                target = home / (name if name in (INDEX, SKETCHES, PROMPTS) else f"{_DUMP}/{name}")
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                out = os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
                with os.fdopen(out, "wb") as f:
                    for piece in _pieces(path, fd, member, manifest):
                        f.write(piece)
        except BaseException as e:
            shutil.rmtree(home, ignore_errors=True)
            if isinstance(e, OSError) and not isinstance(e, DumpError):
                raise DumpError(f"cannot unpack {path} into {into}: {e.strerror or e}") from None
            raise
    return manifest, home


def dump_in(home: Path) -> Path:
    """The dump in a folder that `unpack` made."""
    return home / _DUMP


def open_rows(path: Path) -> Dump:
    """The dump of a pack's full rows, whose files go when it does. Raises DumpError."""
    home = TemporaryDirectory(prefix="accprobe-pack-")
    try:
        dump = open_own(dump_in(unpack(path, Path(home.name))[1]))
    except BaseException:
        home.cleanup()
        raise
    weakref.finalize(dump, home.cleanup)
    dump.problems.insert(0, f"{path} is a golden pack: only its full rows are read, not its sketches")
    return dump
