"""The sketches of a golden pack, and the pack opened with its dump.

Sketches are checked here, as their index names places in arrays. Not here: the file (formats/io/pack_file.py), what a
pack holds (pack.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from vllm_accprobe.dump.decode import Count, DecodeError, decode, exactly
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.formats.io.pack_file import INDEX, SKETCHES, dump_in, unpack
from vllm_accprobe.formats.io.tensor_file import items
from vllm_accprobe.golden.pack import SketchPlace
from vllm_accprobe.golden.sketch import KIND, NUMBERS, Sketch, signs_of


@dataclass(frozen=True)
class GoldenPack:
    """An opened pack. path: its file; manifest: as it is, checked only as far as `members` and ``seed`` go; home: where
    its members lie; dump: the folder of its rows."""

    path: Path
    manifest: Mapping[str, Any]
    home: Path

    @property
    def dump(self) -> Path:
        return dump_in(self.home)

    @property
    def seed(self) -> int:
        return int(self.manifest["seed"])

    @cached_property
    def sketches(self) -> PackedSketches:
        """Raises DumpError."""
        return PackedSketches(self)


def open_pack(path: Path, into: Path) -> GoldenPack:
    """The pack, its members in a new folder in ``into``. Raises DumpError."""
    return GoldenPack(path, *unpack(path, into))


@dataclass(frozen=True)
class _Index:
    """sketches.json: places: place → [matrix's name, width, first row, list of rows]; lists: [first, n] of the tensor
    rows``, whose first column counts requests, then images; requests: [rank, number]; images: [rank, number, image]."""

    places: dict[str, Annotated[list[Any], exactly(4)]]
    lists: list[tuple[Count, Count]]
    requests: list[tuple[Count, Count]]
    images: list[tuple[Count, Count, Count]] = field(default_factory=list)


class PackedSketches:
    """A pack's sketches. places: by place; subjects: (rank, number in its journal, None) of each request, then (rank,
    number, image) of each image."""

    def __init__(self, pack: GoldenPack):
        self._pack = pack
        try:
            sketch = pack.manifest.get("sketch")
            if not isinstance(sketch, dict) or tuple(map(sketch.get, KIND)) != tuple(KIND.values()):
                raise DecodeError("they are of another kind than this accprobe reads: upgrade it")
            found = decode(_Index, json.loads((pack.home / INDEX).read_bytes()))
            self.subjects = [*((*at, None) for at in found.requests), *found.images]
            self._lists = found.lists
            tensors = {t.key: t for t in items(pack.home / SKETCHES)}
            if bad := next((t.problem for t in tensors.values() if t.problem), ""):
                raise DecodeError(bad)
            wanted = {"numbers": "int16", "norm": "float32", "rows": "int32"}
            if {k: t.dtype for k, t in tensors.items()} != wanted:
                raise DecodeError(f"{SKETCHES} has not the tensors {', '.join(wanted)}")
            self._numbers, self._norm, self.rows = (np.asarray(tensors[k].read()) for k in wanted)
            n, rows = self._norm.shape[:1], self.rows.shape[:1]
            if (self._norm.shape, self._numbers.shape, self.rows.shape) != (n, (*n, NUMBERS), (*rows, 2)):
                raise DecodeError(f"{SKETCHES} has tensors of other shapes than a pack's")
            if (self._norm < 0).any():
                raise DecodeError(f"{SKETCHES} has a negative norm")
            self.places = {name: self._place(p) for name, p in found.places.items()}
            if any(first + n > len(self.rows) for first, n in self._lists):
                raise DecodeError(f"{INDEX} has a list of rows that are not there")
            if len(self.rows) and not (self.rows[:, 0].min() >= 0 and self.rows[:, 0].max() < len(self.subjects)):
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

    @property
    def count(self) -> int:
        """Rows of which some tensor has a sketch."""
        return len(np.unique(self.rows, axis=0))

    @property
    def places_rows(self) -> int:
        """Rows of all tensors, each tensor's counted apart."""
        return sum(self._lists[place.rows][1] for place in self.places.values())

    def signs(self, place: SketchPlace) -> np.ndarray:
        """By which another side's rows are sketched, too."""
        return signs_of(self._pack.seed, place.name, place.width)
