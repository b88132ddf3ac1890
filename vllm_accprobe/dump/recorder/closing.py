"""Whether somebody still writes to a dump that is about to be closed, and waiting for them.

The problem: a front end that ends its engine must not kill it while a rank is writing its last lines, nor wait for half
a minute for an engine that hangs and has nothing to write any more. The idea: a writer holds a lock on its journal
until it has closed it or died, and a rank of errcheck says in its report that it has closed it. Not here: what is in a
journal (lines.py) or in a report (findings.py).
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_accprobe.dump.files import beside
from vllm_accprobe.dump.findings import ErrcheckError, alive, read
from vllm_accprobe.dump.recorder.lines import lock
from vllm_accprobe.dump.schema import JOURNAL

GRACE_S = 30.0
"""How long a front end waits for an engine that has been told to end and still writes its dump, at least."""
SETTLE_S = 5.0
"""How long it waits for one that has closed its dump, or never had one, at least."""


def end(procs: Sequence[Any], timeout: float, root: str) -> None:
    """Tells processes (multiprocessing's) to end and waits for them: ``timeout`` seconds, and longer while they write
    to the dump ``root`` ("" for none)."""
    begin = time.monotonic()
    for process in procs:
        if process.is_alive():
            process.terminate()
    while (running := [process for process in procs if process.is_alive()]) and time.monotonic() - begin < max(
        timeout, GRACE_S
    ):
        if time.monotonic() - begin >= max(timeout, SETTLE_S) and not (root and writing(Path(root))):
            return
        running[0].join(0.2)


def writing(root: Path) -> bool:
    """Whether a rank's journal or report is open below ``root``, its ``errcheck``, or the dumps of further engines
    beside it (``root.2`` ...). Never raises."""
    dumps = itertools.takewhile(lambda dump: dump == root or dump.is_dir(), beside(root))
    return any(_written(place) for dump in dumps for place in (dump, dump / "errcheck"))


def _written(dump: Path) -> bool:
    try:
        journals = list(dump.glob(f"rank*/{JOURNAL}"))
        return any(map(_locked, journals)) or alive(read(dump))
    except (OSError, ErrcheckError):
        return False


def _locked(journal: Path) -> bool:
    fd = os.open(journal, os.O_RDONLY)
    try:
        return not lock(fd)
    finally:
        os.close(fd)
