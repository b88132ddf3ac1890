"""Opens a dump.

The problem: the files may come from a run that was killed, is still running, or was made up by somebody to do harm. The
idea: the journals are read line by line, what cannot be understood is counted and named, and a tensor is offered for
reading only when the file that its line names is there and long enough, so that no size is ever taken on trust.
Not here: reading tensors (face.py), what a line must look like (journal/), mending (repair.py).
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from vllm_accprobe.dump.face import Dump, reopen
from vllm_accprobe.dump.files import DumpError, open_regular
from vllm_accprobe.dump.journal.reading import RankReader, check_schema
from vllm_accprobe.dump.schema import RUN_JSON, rank_dir

__all__ = ["Dump", "DumpError", "open_dump", "reopen"]

_MAX_RUN_JSON = 16 << 20
_MAX_RANKS = 1 << 16
"""Ranks that a run may claim to have had: more is no run, and a set of them should not fill the memory."""
_RANK = re.compile(r"rank(\d{4,9})", re.ASCII)


def open_dump(path: str | Path) -> Dump:
    """Opens the dump at ``path`` and reads all journals, no payload. Raises DumpError, one clear line."""
    path = Path(path)
    if not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        raise DumpError(f"{path} {what}: expected the directory that VLLM_ACCPROBE_DIR named")
    run, missing_run = _read_run(path)
    dump = Dump(path, run)
    ranks: list[int] = []
    odd: list[int] = []
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                match = _RANK.fullmatch(entry.name)
                if match and entry.name == rank_dir(int(match[1])):
                    (ranks if entry.is_dir(follow_symlinks=False) else odd).append(int(match[1]))
    except OSError as e:
        raise DumpError(f"cannot list {path}: {e.strerror or e}") from None
    if missing_run and not ranks:
        raise DumpError(f"{path} is no dump of accprobe: it has neither {RUN_JSON} nor a rank directory; "
                        "name the directory that VLLM_ACCPROBE_DIR named")  # fmt: skip
    if missing_run:
        dump.problems.append(f"{RUN_JSON} is missing: versions and settings of the run are not known")
    for r in sorted(odd):
        dump.problems.append(f"{rank_dir(r)} is not a directory of the dump itself (a link?): not read")
    dump.ranks = tuple(sorted(ranks))
    for rank in dump.ranks:
        RankReader(dump, rank).read()
    if not ranks:
        dump.problems.append("no rank has written anything")
    elif absent := _absent_ranks(dump):
        dump.problems.append(absent)
    return dump


def _absent_ranks(dump: Dump) -> str:
    """A sentence about ranks that the run had and the dump has not; "" where none is missing, or nobody can know."""
    sizes = [n for start in dump.starts.values() if type(n := start.get("world_size")) is int and 0 < n <= _MAX_RANKS]
    absent = sorted(set(range(max(sizes, default=0))) - set(dump.ranks))
    if not absent:
        return ""
    probe = dump.run.get("probe")
    chosen = probe.get("ranks") if isinstance(probe, dict) else None
    why = "others were chosen" if chosen else "never started, or written elsewhere?"
    named = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
    ranks, are = ("rank", "is") if len(absent) == 1 else ("ranks", "are")
    return f"{ranks} {named} of {max(sizes)} {are} missing ({why}): nothing of what was computed there is compared"


def _read_run(path: Path) -> tuple[dict[str, Any], bool]:
    file = path / RUN_JSON
    try:
        fd = open_regular(file)
    except FileNotFoundError:
        return {}, True
    except OSError as e:
        raise DumpError(f"cannot read {file}: {e.strerror or e}") from None
    with os.fdopen(fd, "rb") as f:
        text = f.read(_MAX_RUN_JSON + 1)
    try:
        run = json.loads(text) if len(text) <= _MAX_RUN_JSON else None
    except (ValueError, RecursionError):
        run = None
    if not isinstance(run, dict):
        raise DumpError(f"{file} is damaged: not the JSON object it should be; restore it, or delete it to go without")
    check_schema(run, file)
    return run, False
