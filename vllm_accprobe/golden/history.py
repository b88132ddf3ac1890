"""Packs of one model in order: when, and where, it began to compute other numbers.

The problem: a collection has a pack of each release and each card; which of them changed the numbers? The idea: packs
of one model (class, dtype, config and weights' kind) are sorted by vLLM's version and their date, and each is compared
with the one before, full rows and sketches, without a replay: packs hold no calls. Not here: the comparison
(comparison/engine.py, estimated.py).
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.comparison.pair import was_compared
from vllm_accprobe.comparison.result import FAIL, CompareError, Comparison
from vllm_accprobe.dump.decode import object_at, object_in, value_at
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.formats.io.pack_file import is_pack, verify
from vllm_accprobe.golden.estimated import ESTIMATED, OTHER_MATRIX, compared_sides

ENDING = ".golden"
COLLECTION = "index.json"
"""The index of a folder of packs."""
_MOST_INDEX = 64 << 20
FIRST, EQUAL, WITHIN, DIFFERS, UNREADABLE = "first", "equal", "within limits", "differs", "cannot be compared"
ONLY_SKETCHED = "equal in full rows; sketches show no difference"
_TEXT = 60
_NO_PART_OF_A_MODEL = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
"""Keys of a config that depend on who saved it; the dtype is the run's."""
_Found = tuple[Any, Path, Mapping[str, Any]]
"""What a pack is sorted by, its file, its manifest."""


@dataclass(frozen=True)
class HistoryLine:
    """One pack. model: its name; found: against the pack before it, of the words above; where: the module that begins
    to differ, or why nothing is known; error, limit: relative L2 errors there."""

    pack: str
    model: str
    vllm: str
    device: str
    date: str
    found: str
    where: str = ""
    error: float | None = None
    limit: float | None = None


def history(folder: Path, progress: Callable[[str], None] = lambda line: None) -> list[HistoryLine]:
    """Of all packs in a folder and the folders in it, model by model. progress: gets a line for each comparison. Raises
    DumpError where there is none."""
    packs = packs_in(folder)
    lines: list[HistoryLine] = []
    models: dict[tuple[str, str], list[_Found]] = defaultdict(list)
    for path in packs:
        try:
            manifest, _ = verify(path)
        except DumpError as e:
            lines.append(HistoryLine(str(path.relative_to(folder)), "", "", "", "", UNREADABLE, str(e)))
            continue
        models[_model(manifest)].append((_order(manifest, path), path, manifest))
    for of in _joined(models):
        before: Path | None = None
        for _, path, about in sorted(of, key=lambda p: p[0]):
            if before is not None:
                progress(f"{before.name} and {path.name}")
            lines.append(_line(folder, before, path, about))
            before = path
    return lines


def packs_in(folder: Path) -> list[Path]:
    """Of a folder and the folders in it. Raises DumpError where there is none."""
    try:
        with os.scandir(folder):  # rglob passes over what it may not read
            found = sorted(p for p in folder.rglob(f"*{ENDING}") if is_pack(p))
    except OSError as e:
        raise DumpError(f"cannot read the folder {folder}: {e.strerror or e}") from None
    if not found:
        raise DumpError(f"{folder} has no pack: name a folder with files *{ENDING}")
    return found


def index_entry(manifest: Mapping[str, Any], digest: str, size: int) -> dict[str, Any]:
    """What a collection's index says of a pack. digest: of its manifest; size: of the file."""
    about = {"model": ("model", "path"), "class": ("model", "class"), "dtype": ("model", "dtype"),
             "vllm": ("versions", "vllm"), "device": ("device", "name"), "date": ("start_time",)}  # fmt: skip
    found = {name: manifest_text(manifest, *keys) for name, keys in about.items()}
    return {"sha256": digest, "bytes": size, **{k: v for k, v in found.items() if v}}


def read_index(folder: Path) -> dict[str, str]:
    """Pack, by its path in the folder → the digest that the collection's index has; {} where there is none. Raises
    DumpError."""
    path = folder / COLLECTION
    if not path.is_file():
        return {}
    found = object_in(path, _MOST_INDEX)
    hashed = all(
        isinstance(of, dict) and isinstance(of.get("sha256"), str) and re.fullmatch("[0-9a-f]{64}", of["sha256"])
        for of in found.values()
    )
    if not (found and hashed and all(map(_is_inside, found))):
        raise DumpError(f"{path} is no index of packs: write it again with `accprobe golden verify {folder} --index`")
    return {name: of["sha256"] for name, of in found.items()}


def _is_inside(name: str) -> bool:
    """Whether it can be a file's path in a folder."""
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return "\0" not in name and not Path(name).is_absolute() and ".." not in Path(name).parts


def _model(manifest: Mapping[str, Any]) -> tuple[str, str]:
    """What is one model whatever computes it: (class, dtype and quantisation, config), the last "" where there is
    none."""
    model = object_at(manifest, "model") or {}
    config = model.get("config")
    if isinstance(config, dict):
        config = {k: v for k, v in config.items() if k not in _NO_PART_OF_A_MODEL}
    known = {k: model.get(k) for k in ("class", "dtype", "quantization")}
    return json.dumps(known, sort_keys=True, default=str), json.dumps(config, sort_keys=True) if config else ""


def _joined(models: dict[tuple[str, str], list[_Found]]) -> list[list[_Found]]:
    """The packs of each model. Packs without a config are of the one model that their other words fit, where it is
    one."""
    for key in [key for key in models if not key[1]]:
        others = [other for other in models if other[0] == key[0] and other[1]]
        if len(others) == 1:
            models[others[0]] += models.pop(key)
    return list(models.values())


def manifest_text(manifest: object, *keys: str) -> str:
    """A text in a manifest, which a stranger wrote: "" where it is none, cut at 60 characters."""
    text = value_at(manifest, *keys)
    return text[:_TEXT] if isinstance(text, str) and text.isprintable() else ""


_VERSION = re.compile(r"v?(\d+(?:\.\d+)*)(?:[._-]?(a|b|rc|post|dev)(\d*))?", re.I)


def _order(manifest: Mapping[str, Any], path: Path) -> tuple[Any, ...]:
    return _release(manifest_text(manifest, "versions", "vllm")), manifest_text(manifest, "start_time"), path.name


def _release(version: str) -> tuple[Any, ...]:
    """Sorts versions as PEP 440 does: 0.9, 0.10.0rc1, 0.10.0, 0.10.0.post1; what is none comes first."""
    found = _VERSION.match(version)
    if found is None:
        return ()
    numbers = [int(n) for n in found[1].split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    kind = ("dev", "a", "b", "rc", "", "post").index((found[2] or "").lower())
    return numbers, kind, int(found[3] or 0)


def _line(folder: Path, before: Path | None, path: Path, manifest: Mapping[str, Any]) -> HistoryLine:
    of = ("versions", "vllm"), ("device", "name"), ("start_time",)
    vllm, device, date = (manifest_text(manifest, *keys) for keys in of)
    model = Path(manifest_text(manifest, "model", "path")).name
    about = str(path.relative_to(folder)), model, vllm, device, date[:10]
    if before is None:
        return HistoryLine(*about, FIRST)
    try:
        with compared_sides(before, path) as sides:
            result = sides.judged(compare(sides.golden, sides.mine))
    except (CompareError, DumpError) as e:
        return HistoryLine(*about, UNREADABLE, str(e))
    return HistoryLine(*about, *_found(result))


def _found(result: Comparison) -> tuple[str, str, float | None, float | None]:
    if result.verdict == FAIL:
        at = result.origins[0] if result.origins else result.first_divergence or {}
        error = at.get("created", at.get("value"))
        return DIFFERS, f"{at.get('module', '')}/{at.get('role', '')}", error, at.get("floor", at.get("limit"))
    compared = [p for p in result.pairs if was_compared(p) and not p.identical]
    differ = [p for p in compared if not p.message.startswith(ESTIMATED) or p.worst_row_rel_l2]
    if not differ:
        unsure = compared or result.coverage.get("skipped", {}).get(OTHER_MATRIX)
        return (WITHIN, ONLY_SKETCHED, None, None) if unsure else (EQUAL, "", None, None)
    first = min(differ, key=lambda p: (p.order, p.step or 0))
    return WITHIN, f"{first.tap}/{first.role}", first.worst_row_rel_l2, first.limit
