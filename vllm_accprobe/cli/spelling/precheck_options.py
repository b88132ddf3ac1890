"""Options of opcheck that msprobe's acc_check, multi_acc_check and run_ut have, in msprobe's spelling.

The problem: a script says ``-api_info ./dump.json -d 0 1 2 3 -n 32 -j``, where one hyphen begins a whole word, a list
has no commas and ``-j`` is a flag, which here is a number of processes. The idea: these spellings are options like any
other (what the command line's library cannot read is rewritten first, old_spellings.py), and their meaning is
msprobe's own: its limits, its files, and with ``-d`` what the operators give here.
Not here: the check (cli/opcheck.py), config.json's keys (opcheck/precheck/check_config.py).
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vllm_accprobe.cli.common.options import CommandError

if TYPE_CHECKING:
    from vllm_accprobe.opcheck.precheck.check_config import CheckConfig

API_INFO = typer.Option(
    None, "-api_info", "--api_info_file", metavar="FILE", help="DUMP as msprobe says it: by its limits, in its files."
)
CONFIG = typer.Option(
    None, "-config", "--config", "--config_path", metavar="FILE", help="msprobe's config.json or config.yaml."
)
FILTER = typer.Option(False, "-f", "--filter_api", help="Calls that differ in values alone are checked once.")
DEVICE = typer.Option(
    "",
    "-d",
    "--device",
    metavar="DEVICES",
    help="Run the calls here and judge that: cpu, cuda:1, or numbers, e.g. 0,1.",
)
SPLITS = typer.Option(None, "-n", "--num_splits", min=1, max=64, metavar="N", help="As --jobs.")
CSV_PATH = typer.Option(
    None, "-csv_path", "--result_csv_path", metavar="FILE", help="As --resume: accuracy_checking_result_<time>.csv."
)
SAVE = typer.Option(
    False, "-save_error_data", "--save_error_data", help="As --save-failed ut_error_data<time>, see -config."
)
JIT = typer.Option(False, "--jit_compile", help="An NPU compiles its operators (-j alone is the same).")
_MOST_DEVICES = 64


@dataclass(frozen=True)
class Precheck:
    """What was asked for in msprobe's words. msprobe: whether its limits and files are meant where nothing else is
    said; stamp: the time in the names of its files; out: where those are that are gone on with, None for a new check;
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


def asked(
    dump: Path | None, api_info: Path | None, config: Path | None, once: bool, device: str, csv_path: Path | None,
    save: bool, jit: bool,
) -> Precheck:  # fmt: skip
    """Raises CommandError."""
    from vllm_accprobe.opcheck.precheck import check_config, check_csv

    if api_info is not None:
        if dump is not None:
            raise CommandError("-api_info and DUMP: name the dump once")
        dump = api_info
    stamp, out = time.strftime("%Y%m%d%H%M%S"), None
    if csv_path is not None:
        found = check_csv.stamp_of(csv_path)
        if found is None:
            raise CommandError(f"-csv_path: {csv_path} is not called accuracy_checking_result_<14 digits>.csv")
        if not csv_path.is_file():
            raise CommandError(f"-csv_path: {csv_path} does not exist")
        stamp, out = found, csv_path.parent
    try:
        read = check_config.read(config) if config is not None else None
    except check_config.CheckConfigError as why:
        raise CommandError(str(why)) from None
    where = None
    if save:
        where = Path(read.error_data_path if read else "./") / f"ut_error_data{stamp}"
    notes = [f"-config: {note}" for note in (read.notes if read else ())]
    msprobe = api_info is not None or csv_path is not None
    return Precheck(dump, msprobe, _devices(device), once, stamp, out, where, jit, read, tuple(notes))


def _devices(text: str) -> tuple[str, ...]:
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if text and not found:
        raise CommandError("--device: name devices, e.g. cpu, cuda:1, or 0,1")
    for name in found:
        if not re.fullmatch(r"\d{1,4}|[a-z]+(?::\d{1,4})?", name, re.ASCII):
            raise CommandError(f"--device: {name[:40]!r} is no device: cpu, cuda:1, or a number")
    if len(set(found)) != len(found) or len(found) > _MOST_DEVICES:
        raise CommandError(f"--device: each device once, and at most {_MOST_DEVICES} of them")
    return found
