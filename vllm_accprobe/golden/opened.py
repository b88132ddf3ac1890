"""Reads a golden pack, which a stranger may have made.

The problem: a pack is downloaded; it may be a zip bomb, name paths outside of its place, or hold other bytes than its
manifest says. The idea: nothing is inflated before the central directory is known: only names that a pack has, each
once, with sizes that fit the manifest and the limits; each member is then inflated to its size and no further, and its
hash is compared. The rows lie in a folder that dump/reader.py opens as a dump, which trusts nothing either; sketches
are checked here, as their index names places in arrays. Not here: what a pack holds (pack.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from vllm_accprobe.dump.decode import Count, DecodeError, between, decode, exactly
from vllm_accprobe.dump.files import DumpError, open_regular
from vllm_accprobe.dump.schema import JOURNAL, RUN_JSON
from vllm_accprobe.formats.io.plain_file import FileProblem
from vllm_accprobe.formats.io.tensor_file import items
from vllm_accprobe.formats.io.zipindex import DEFLATED, Unpacker, ZipMember, index, too_much
from vllm_accprobe.golden.pack import INDEX, KIND, MANIFEST, PROMPTS, SKETCHES, VERSION, SketchPlace
from vllm_accprobe.golden.sketch import NUMBERS, STEP, Sketch, signs_of

MOST_BYTES = 1 << 30
"""Of a pack, and of what is in it: a hundred times what one should have."""
MOST_TEXT = 256 << 20
"""Of a member of text, and of all of them together."""
_MOST_MANIFEST = 4 << 20
_HEAD = 64
_MEMBER = re.compile(
    rf"rank\d{{4,9}}/(?:{re.escape(JOURNAL)}|seg-\d{{5}}\.safetensors)|"
    rf"{'|'.join(map(re.escape, (RUN_JSON, INDEX, SKETCHES, PROMPTS)))}", re.ASCII,
)  # fmt: skip
_DUMP = "dump"


def is_pack(path: Path | None) -> bool:
    """Whether a file begins as a pack does: a zip whose first member is its manifest."""
    if path is None or not path.is_file():
        return False
    try:
        with path.open("rb") as f:
            head = f.read(_HEAD)
    except OSError:
        return False
    name = MANIFEST.encode()
    return head.startswith(b"PK\x03\x04") and head[30 : 30 + len(name)] == name


@dataclass(frozen=True)
class MemberHash:
    """bytes: when inflated; sha256: of these."""

    bytes: Count
    sha256: str


@dataclass(frozen=True)
class GoldenPack:
    """An opened pack. path: its file; manifest: as it is, checked only as far as `members` and ``seed`` go; home: where
    its members lie; dump: the folder of its rows."""

    path: Path
    manifest: Mapping[str, Any]
    home: Path

    @property
    def dump(self) -> Path:
        return self.home / _DUMP

    @property
    def seed(self) -> int:
        return int(self.manifest["seed"])

    @cached_property
    def sketches(self) -> PackedSketches:
        """Raises DumpError."""
        return PackedSketches(self)


def opened(path: Path, into: Path) -> Path:
    """A folder in ``into`` that dump/reader opens as an ordinary dump, of the full rows only, checked against the
    manifest. Raises DumpError."""
    return open_pack(path, into).dump


def open_pack(path: Path, into: Path) -> GoldenPack:
    """Writes the members to a new folder in ``into``. Raises DumpError for what is no pack, or is not what its manifest
    says."""
    home = into / path.name.replace(os.sep, "_")
    number = 1
    while home.exists():
        number += 1
        home = into / f"{path.name}.{number}"
    with _checked(path) as (fd, manifest, members):
        home.mkdir(mode=0o700, parents=True)
        for name, member in members.items():
            target = home / (name if name in (INDEX, SKETCHES, PROMPTS) else f"{_DUMP}/{name}")
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            out = os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with os.fdopen(out, "wb") as f:
                for piece in _pieces(path, fd, member, manifest):
                    f.write(piece)
    return GoldenPack(path, manifest, home)


def verify(path: Path) -> dict[str, Any]:
    """The manifest of a pack whose members all have the hashes that it says. Writes nothing. Raises DumpError."""
    with _checked(path) as (fd, manifest, members):
        for member in members.values():
            for _ in _pieces(path, fd, member, manifest):
                pass
    return manifest


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
        members = index(fd, size, once=True)
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
            raise DecodeError(f"it is not one of a {KIND}")
        if found.get("schema") != VERSION:
            raise DecodeError(f"its schema is {str(found.get('schema'))[:20]}, and this accprobe reads {VERSION}: "
                              "upgrade it")  # fmt: skip
        decode(dict[str, MemberHash], found.get("members"), "members")
        decode(Annotated[int, between(-(2.0**63), 2.0**63)], found.get("seed"), "seed")
        sketch = found.get("sketch")
        if not isinstance(sketch, dict) or (sketch.get("numbers"), sketch.get("step")) != (NUMBERS, STEP):
            raise DecodeError("its sketches are of another kind than this accprobe reads: upgrade it")
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
        raise DumpError(f"{path}: {other[0][:80]!r} {where}: download it again")
    if missing := [n for n in (RUN_JSON, INDEX, SKETCHES) if n not in members]:
        raise DumpError(f"{path} has no {missing[0]}: not all of a pack is there")
    text = 0
    for name, m in members.items():
        if m.size != listed[name]["bytes"]:
            raise DumpError(f"{path}: {name} has {m.size:,} bytes, and its manifest says {listed[name]['bytes']:,}")
        text += m.size if m.method == DEFLATED else 0
        if too_much(m.packed, m.size) or text > MOST_TEXT or m.size > MOST_BYTES:
            raise DumpError(f"{path}: {name} would inflate to {m.size:,} bytes, more than a pack has: it is not used")
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
        raise DumpError(f"{path}: {member.name} is not what its manifest says (another hash): download it again")


@dataclass(frozen=True)
class _Index:
    """sketches.json: places: place → [matrix's name, width, first row, list of rows]; lists: [first, n] of the tensor
    ``rows``; requests: [rank, number]."""

    places: dict[str, Annotated[list[Any], exactly(4)]]
    lists: list[tuple[Count, Count]]
    requests: list[tuple[Count, Count]]


class PackedSketches:
    """A pack's sketches. places: by place; requests: (rank, number in its journal) of each request."""

    def __init__(self, pack: GoldenPack):
        self._pack = pack
        try:
            found = decode(_Index, json.loads((pack.home / INDEX).read_bytes()))
            self.requests = found.requests
            self._lists = found.lists
            tensors = {t.key: t for t in items(pack.home / SKETCHES)}
            if bad := next((t.problem for t in tensors.values() if t.problem), ""):
                raise DecodeError(bad)
            wanted = {"numbers": "int16", "norm": "float32", "rows": "int32"}
            if {k: t.dtype for k, t in tensors.items()} != wanted:
                raise DecodeError(f"{SKETCHES} has not the tensors {', '.join(wanted)}")
            self._numbers, self._norm, self.rows = (np.asarray(tensors[k].read()) for k in wanted)
            if self._numbers.shape != (len(self._norm), NUMBERS) or self.rows.shape != (len(self.rows), 2):
                raise DecodeError(f"{SKETCHES} has tensors of other shapes than a pack's")
            self.places = {name: self._place(p) for name, p in found.places.items()}
            if any(first + n > len(self.rows) for first, n in self._lists):
                raise DecodeError(f"{INDEX} has a list of rows that are not there")
            if len(self.rows) and not (self.rows[:, 0].min() >= 0 and self.rows[:, 0].max() < len(self.requests)):
                raise DecodeError(f"{SKETCHES} names a request that is not there")
        except (ValueError, RecursionError, DumpError) as e:
            raise DumpError(f"{pack.path}: its sketches cannot be used: {' '.join(str(e).split())[:200]}") from None

    def _place(self, plain: list[Any]) -> SketchPlace:
        name, *numbers = plain
        if not isinstance(name, str) or any(type(n) is not int or n < 0 for n in numbers):
            raise DecodeError(f"{INDEX} has the place {str(plain)[:60]}")
        place = SketchPlace(name, *numbers)
        if place.rows >= len(self._lists) or place.first + self._lists[place.rows][1] > len(self._norm):
            raise DecodeError(f"{INDEX} has a place of rows that are not there")
        if not 0 < place.width <= 1 << 24:
            raise DecodeError(f"{INDEX} has rows of {place.width} elements")
        return place

    def of(self, place: SketchPlace) -> tuple[np.ndarray, Sketch]:
        """(int32 [n, 2], request and position of each row; their sketches)."""
        first, n = self._lists[place.rows]
        at = slice(place.first, place.first + n)
        return self.rows[first : first + n], Sketch.unpacked(self._norm[at], self._numbers[at])

    def signs(self, place: SketchPlace) -> np.ndarray:
        """By which another side's rows are sketched, too."""
        return signs_of(self._pack.seed, place.name, place.width)
