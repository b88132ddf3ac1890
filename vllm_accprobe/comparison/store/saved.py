"""A measured comparison as one file, and back: DIR/measured.npz.

The problem: a hundred thousand small arrays are slow as a hundred thousand members of an archive, and a pickle may
run anything. The idea: all arrays of one kind lie one after the other in one long array; a JSON text, stored as bytes
beside them, says which stretch belongs where. Equal arrays (the row keys of one step) are stored once. Read with
allow_pickle=False.
Not here: what the fields mean (measured.py).
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable
from dataclasses import fields as names_of
from pathlib import Path
from typing import Any

import numpy as np

from vllm_accprobe.align.row_set import RowSet
from vllm_accprobe.comparison.measure.measured import Measured, Setting
from vllm_accprobe.comparison.plan.untapped import NOTHING, Untapped
from vllm_accprobe.comparison.result import CompareError
from vllm_accprobe.comparison.store import fields
from vllm_accprobe.judge.flow import Key

NAME = "measured.npz"
VERSION = 5
_OFTEN = 32 << 20
_POOLS = {"f": np.float64, "i": np.int64, "b": np.bool_}


class _Writer:
    """Says where each array will lie, and remembers which; nothing is copied before `write`."""

    def __init__(self) -> None:
        self.pools: dict[str, list[np.ndarray]] = {k: [] for k in _POOLS}
        self.ends = dict.fromkeys(_POOLS, 0)
        self.known: dict[tuple[str, bytes], list[Any]] = {}

    def put(self, array: np.ndarray | None) -> list[Any] | None:
        """[kind, start, shape] of an array, or None for none."""
        if array is None:
            return None
        kind = {"f": "f", "i": "i", "b": "b"}[array.dtype.kind]
        flat: np.ndarray = np.ascontiguousarray(array, _POOLS[kind]).reshape(-1)
        name = (kind, hashlib.blake2b(flat.tobytes(), digest_size=16).digest()) if kind != "f" else None
        if name is not None and name in self.known:
            return [*self.known[name][:2], list(array.shape)]
        where = [kind, self.ends[kind], list(array.shape)]
        self.pools[kind].append(flat)
        self.ends[kind] += len(flat)
        if name is not None:
            self.known[name] = where
        return where

    def write(self, archive: zipfile.ZipFile, rest: Callable[[], None]) -> None:
        """Each pool as a member, array by array, as numpy.savez would write it. rest: called now and then."""
        for kind, arrays in self.pools.items():
            head = {"descr": np.dtype(_POOLS[kind]).str, "fortran_order": False, "shape": (self.ends[kind],)}
            with archive.open(f"{kind}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(member, head)
                written = 0
                for array in arrays:
                    member.write(array.data.cast("B") if len(array) else b"")
                    written += array.nbytes
                    if written > _OFTEN:
                        written = 0
                        rest()


def save(measured: Measured, directory: Path) -> Path:
    """Writes ``directory``/measured.npz (replacing an older one whole) and returns its path."""
    out = _Writer()
    s = measured.setting
    setting = {f.name: getattr(s, f.name) for f in names_of(Setting) if f.name not in ("places", "moments")}
    setting |= {
        # JSON's keys are text: tables whose keys are not are lists of pairs.
        "children": list(s.children.items()),
        "names": list(s.names.items()),
        "images": list(s.images.items()),
        "batches": list(s.batches.items()),
        "graphs": list(s.graphs.items()),
        "places": [out.put(a) for a in s.places],
        "links": list(s.links.items()),
        "untapped": s.untapped.plain(),
        "moments": [[list(m), out.put(keys)] for m, keys in s.moments.items()],
    }
    units = [said for u in measured.each() for said in fields.say([u], out.put)]
    text = json.dumps(
        {"version": VERSION, "plain": fields.PLAIN, "setting": setting, "units": units}, default=fields.plain
    )
    path, part = directory / NAME, directory / (NAME + ".part")
    shelf = measured.shelf
    with zipfile.ZipFile(part, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        with archive.open("meta.npy", "w", force_zip64=True) as member:
            np.lib.format.write_array(member, np.frombuffer(text.encode(), np.uint8), allow_pickle=False)
        out.write(archive, shelf.rest if shelf is not None else lambda: None)
    part.replace(path)
    return path


def load(directory: Path) -> Measured:
    """What `save` wrote. Raises CompareError, one line, for anything else."""
    path = directory / NAME if directory.is_dir() else directory
    again = "; compare the dumps again"
    try:
        with np.load(path, allow_pickle=False) as data:
            pools = {k: data[k] for k in _POOLS}
            meta = json.loads(data["meta"].tobytes())
        if meta.get("version") != VERSION or tuple(meta["plain"]) != fields.PLAIN:
            raise CompareError(f"{path} was written by another version of accprobe{again}")
        return _measured(meta, pools)
    except FileNotFoundError:
        raise CompareError(
            f"{path} does not exist: --rejudge takes a directory that `accprobe compare` wrote"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, zipfile.BadZipFile) as e:
        why = f" ({str(e)[:100]})" if isinstance(e, OSError) else ""
        raise CompareError(f"{path} is no whole measured.npz of `accprobe compare`{why}{again}") from None


def _measured(meta: dict[str, Any], pools: dict[str, np.ndarray]) -> Measured:
    def get(where: list[Any] | None) -> Any:
        if where is None:
            return None
        kind, start, shape = where
        size = int(np.prod(shape, dtype=np.int64))
        if start < 0 or start + size > len(pools[kind]):
            raise ValueError("an array lies outside the file")
        return pools[kind][start : start + size].reshape(shape)

    raw = dict(meta["setting"])
    raw["children"] = {k: list(v) for k, v in raw["children"]}
    raw["names"] = {int(k): (v[0], v[1]) for k, v in raw["names"]}
    raw["images"] = {int(k): [tuple(x) for x in v] for k, v in raw["images"]}
    raw["batches"] = {int(k): (v[0], v[1]) for k, v in raw["batches"]}
    raw["graphs"] = {int(k): (v[0], v[1]) for k, v in raw.get("graphs", [])}
    raw["links"] = {_key(to): (_key(maker), str(side)) for to, (maker, side) in raw.get("links", [])}
    raw["sources"] = {str(tap): _sources(*both) for tap, both in raw.get("sources", {}).items()}
    raw["untapped"] = Untapped.of_plain(raw["untapped"]) if "untapped" in raw else NOTHING
    raw["places"] = tuple(get(a) for a in raw["places"])
    raw["moments"] = {(m[0], m[1]): get(keys) for m, keys in raw["moments"]}
    known: dict[str, RowSet] = {}

    def rows_at(where: list[Any]) -> RowSet:
        name = str(where)
        if name not in known:
            known[name] = fields.rows_of(*map(get, where))
        return known[name]

    return Measured(Setting(**raw), fields.hear(meta["units"], get, rows_at))


def _sources(golden: Any, mine: Any) -> tuple[str | None, str | None]:
    return (None if golden is None else str(golden)), (None if mine is None else str(mine))


def _key(value: Any) -> Key:
    tap, role, call = value
    return str(tap), str(role), int(call)
