"""Labels in a dump: their words, and where an accelerator's library has put the file that one names.

The problem: a label gives the end of a path (``0_Model/0_Layer/3_Attention/after/outTensor0.bin``); the library puts
directories of its own choice in front of it: process id, task id, device and process, number of the execution. The
idea: in every directory below the roots the path is looked up, and of the places found the one
is taken whose directories name this task, else this process, and then this execution. Nothing outside the roots is ever
examined, whatever the path says. Roots may lie in one another (the library's directory below the current one): a file
that is found from several is one file. Not here: copying (capture/labels.py), reading
(comparison/labelled_pairs.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

LABEL_TAP = "label:"
"""Begins the tap of a label; the id follows. Roles are PTA and ACL."""
PTA, ACL = "pta", "acl"
_DEPTH = 5
"""Directories that a library may put in front: dump, "tensors", device and process, task, execution."""
_MOST = 20_000
"""Directories that are examined."""


def label_file(number: int, ending: str) -> str:
    """Name, in the rank's directory, of a file that was collected for a label."""
    return f"label-{number:05d}.{ending}"


@dataclass(frozen=True, slots=True)
class Label:
    """``{"event": "label"}``: a labelled tensor that lies in a file of its own, written by an accelerator's library.

    path: as ``set_label`` got it. pid and task: the process and its AIT_CMP_TASK_ID, which such libraries name
    directories after; execution: how often this path was labelled before in this process. file and ending: number and
    kind of the copy in the dump (`label_file`), None while there is none; reason: why there is none.
    """

    rank: int
    step: int
    tap: str
    role: str
    call: int
    path: str
    pid: int = 0
    task: str = ""
    execution: int = 0
    file: int | None = None
    ending: str = ""
    reason: str = ""


def locate(label: Label, roots: Sequence[Path]) -> tuple[Path | None, str]:
    """(the file, "") or (None, why not) for a label whose file lies below one of ``roots``."""
    wanted = PurePosixPath(label.path)
    if not label.path or "\0" in label.path or ".." in wanted.parts:
        return None, "its path is no path of a file below a directory"
    found = [file for root in roots if _is_file(file := _spelled(root, wanted), root)]
    if wanted.is_absolute():
        return (found[0], "") if found else (None, "its file lies outside the directories that were named")
    if found:
        return found[0], ""
    places = _once([(root, front) for root in roots for front in _parents(root, wanted)], wanted)
    process = str(label.pid)
    for named in (lambda part: label.task and part == label.task, lambda part: part.split("_")[-1] == process):
        if chosen := [p for p in places if any(map(named, p[1].parts))]:
            return _of_execution(label, chosen, wanted)
    if any(_OWNED.fullmatch(part) for _, front in places for part in front.parts):
        return None, f"only other processes than {label.pid} have written such a file"
    return _of_execution(label, places, wanted) if places else (None, "its file was not found")


def _once(places: Sequence[tuple[Path, Path]], wanted: PurePosixPath) -> list[tuple[Path, Path]]:
    """Each real file once, by the place with the most directories in front of it: these tell whose it is."""
    found: dict[tuple[int, int], tuple[Path, Path]] = {}
    for root, front in places:
        file = _spelled(root / front, wanted)
        if file is None:  # gone since
            continue
        state = file.stat()
        before = found.get((state.st_dev, state.st_ino))
        if before is None or len(front.parts) > len(before[1].parts):
            found[state.st_dev, state.st_ino] = (root, front)
    return list(found.values())


_OWNED = re.compile(r"\d+_\d+")
"""``device_pid`` or ``pid_task``."""


def _of_execution(label: Label, places: Sequence[tuple[Path, Path]], wanted: PurePosixPath) -> tuple[Path | None, str]:
    """Of several places the one whose innermost directory is the number of the label's execution."""
    numbered = {
        int(front.name): (root, front)
        for root, front in places
        if re.fullmatch(r"\d{1,9}", front.name, re.ASCII) and front.name != str(label.pid)
    }
    if label.execution in numbered:
        root, front = numbered[label.execution]
        return _spelled(root / front, wanted), ""
    if numbered and (len(numbered) > 1 or label.execution):
        known = ", ".join(str(n) for n in sorted(numbered)[:8])
        return None, f"executions {known} were written, this is number {label.execution}"
    if len(places) > 1:
        return None, f"{len(places)} files fit: {places[0][1]}, {places[1][1]} ..."
    root, front = places[0]
    return _spelled(root / front, wanted), ""


def _parents(root: Path, wanted: PurePosixPath) -> Iterator[Path]:
    """Directories below ``root``, relative to it, in which ``wanted`` continues; breadth first, links not followed."""
    level, seen = [Path()], 0
    for _ in range(_DEPTH):
        deeper: list[Path] = []
        for front in level:
            try:
                with os.scandir(root / front) as entries:
                    names = sorted(e.name for e in entries if e.is_dir(follow_symlinks=False))
            except OSError:
                continue
            for name in names:
                seen += 1
                if seen > _MOST:
                    return
                place = front / name
                if name != wanted.parts[0]:
                    deeper.append(place)
                if _is_file(_spelled(root / place, wanted), root):
                    yield place
        level = deeper


def _spelled(directory: Path, wanted: PurePosixPath) -> Path | None:
    """The file of this name, or with its name in small letters: ``outTensor0.bin`` became ``outtensor0.bin``."""
    for name in dict.fromkeys((wanted.name, wanted.name.lower())):
        path = directory / wanted.parent / name
        if path.is_file():
            return path
    return None


def _is_file(path: Path | None, root: Path) -> bool:
    """Whether it really lies below ``root``, also when a directory on the way is a link."""
    return path is not None and path.resolve().is_relative_to(root.resolve())
