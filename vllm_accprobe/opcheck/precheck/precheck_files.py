"""Whether a check leaves msprobe's files, and their life: begun with it, whole at its end.

The problem: which files a check writes follows from what it was asked for, and from the dump's framework. The idea: one
small object that the command asks at the beginning and at the end; it is empty where no file of msprobe's is meant.
Not here: the files (check_csv.py).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_accprobe.opcheck.precheck import check_csv
from vllm_accprobe.opcheck.precheck.check_config import DIGITS

STANDARDS = ("msprobe", "msprobe-1.0", "mindspore")
_HEAD = 1 << 20


@dataclass(frozen=True)
class PrecheckFiles:
    """dump: its path, "" for no files; mindspore: whether they are MindSpore's."""

    dump: str = ""
    stamp: str = ""
    digits: int = DIGITS
    mindspore: bool = False

    @contextlib.contextmanager
    def begun(self, out: Path, going_on: Path) -> Iterator[None]:
        """The files' headers while a check runs. A check that is refused before it has begun leaves none of them: a
        header alone would be taken for a check to go on with. going_on: what a begun check has left. Raises OSError."""
        if not self.dump:
            yield
            return
        new = not out.exists()
        out.mkdir(parents=True, exist_ok=True)
        made = check_csv.begin(out, self.stamp, self.mindspore)
        try:
            yield
        except BaseException:
            if not going_on.exists():
                for path in made:
                    path.unlink(missing_ok=True)
                if new:
                    with contextlib.suppress(OSError):  # not empty: something else came
                        out.rmdir()
            raise

    def write(self, out: Path) -> list[Path]:
        """What was written. Raises OSError, DumpError."""
        if not self.dump:
            return []
        from vllm_accprobe.formats import open_dump

        names = check_csv.recorded_names(open_dump(Path(self.dump)).records)
        check_csv.write(out / "opcheck.csv", out, self.stamp, names, self.digits, self.mindspore)
        return list(check_csv.paths(out, self.stamp))


def of(check: Any, standard: str, dump: str) -> PrecheckFiles:
    """check: cli/spelling/precheck_options.Precheck; dump: the dump's path, "" where there is none."""
    if standard not in STANDARDS or not dump:
        return PrecheckFiles()
    digits = check.config.precision if check.config is not None else DIGITS
    return PrecheckFiles(dump, check.stamp, digits, standard == "mindspore")


def framework_of(dump: Path | None) -> str:
    """``pytorch`` or ``mindspore``, as the first dump.json says; "" where there is none that says so."""
    if dump is None:
        return ""
    file = dump if dump.is_file() else next(iter(sorted(dump.rglob("dump.json"))), None)
    try:
        if file is None:
            return ""
        with file.open(encoding="utf-8", errors="replace") as f:
            head = f.read(_HEAD)
        at = head.find('"framework"')
        return str(json.JSONDecoder().raw_decode(head[head.index(":", at) + 1 :].lstrip())[0]) if at >= 0 else ""
    except (OSError, ValueError, StopIteration):
        return ""
