"""Options of opcheck that msprobe's acc_check, multi_acc_check and run_ut have, in msprobe's spelling.

The problem: a script says ``-api_info ./dump.json -d 0 1 2 3 -n 32 -j``, where one hyphen begins a whole word, a list
has no commas and ``-j`` is a flag, which here is a number of processes. The idea: their meaning is msprobe's own: its
limits, its files, and with ``-d`` what the operators compute here.
Not here: the options' names (cli/aliases.py), config.json's keys (opcheck/precheck/check_config.py).
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_accprobe.opcheck.compat import CompatError

if TYPE_CHECKING:
    from vllm_accprobe.opcheck.precheck.check_config import CheckConfig

_MOST_DEVICES = 64


@dataclass(frozen=True)
class Precheck:
    """What msprobe's words ask for. msprobe: whether its limits and files are meant where nothing else is
    named; stamp: the time in the names of its files; out: where those are that are continued, None for a new check;
    save: where failed calls go, None for nowhere."""

    dump: Path | None
    msprobe: bool = False
    devices: tuple[str, ...] = ()
    once: bool = False
    stamp: str = ""
    out: Path | None = None
    save: Path | None = None
    jit: bool = False
    config: CheckConfig | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def resumed(self) -> bool:
        return self.out is not None


def read(
    dump: Path | None, api_info: Path | None, config: Path | None, once: bool, device: str, csv_path: Path | None,
    save: bool, jit: bool,
) -> Precheck:  # fmt: skip
    """Raises CompatError."""
    from vllm_accprobe.opcheck.precheck import check_config, check_csv

    if api_info is not None:
        if dump is not None:
            raise CompatError("-api_info and DUMP: name the dump once")
        dump = api_info
    stamp, out = time.strftime("%Y%m%d%H%M%S"), None
    if csv_path is not None:
        found = check_csv.stamp_of(csv_path)
        if found is None:
            raise CompatError(f"-csv_path: {csv_path} is not called accuracy_checking_result_<14 digits>.csv")
        if not csv_path.is_file():
            raise CompatError(f"-csv_path: {csv_path} does not exist")
        stamp, out = found, csv_path.parent
    try:
        found_config = check_config.read(config) if config is not None else None
    except check_config.CheckConfigError as why:
        raise CompatError(str(why)) from None
    where = None
    if save:
        where = Path(found_config.error_data_path if found_config else "./") / f"ut_error_data{stamp}"
    notes = [f"-config: {note}" for note in (found_config.notes if found_config else ())]
    msprobe = api_info is not None or csv_path is not None
    return Precheck(dump, msprobe, _devices(device), once, stamp, out, where, jit, found_config, tuple(notes))


def _devices(text: str) -> tuple[str, ...]:
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if text and not found:
        raise CompatError("--device: name devices, e.g. cpu, cuda:1, or 0,1")
    for name in found:
        if not re.fullmatch(r"\d{1,4}|[a-z]+(?::\d{1,4})?", name, re.ASCII):
            raise CompatError(f"--device: {name[:40]!r} is no device: cpu, cuda:1, or a number")
    if len(set(found)) != len(found) or len(found) > _MOST_DEVICES:
        raise CompatError(f"--device: each device once, and at most {_MOST_DEVICES} of them")
    return found
