"""torch_xray's files next to a dump that has just been closed: ``VLLM_ACCPROBE_EXPORT=h5``.

The problem: torch_xray leaves an h5 and a csv when its capture ends, and scripts go on from there; to write gigabytes
again where a worker closes its dump would keep it from serving, or from ending. The idea: who closed the dump starts
`accprobe convert DUMP --at-end --ranks R` as a process of its own, of low priority, which outlives its parent, reads
one tensor at a time, and writes what it says to ``rank<R>/export.log``. Nothing here raises. A script of its own that
ends by itself waits for the files; a worker does not. After a kill -9 `accprobe convert DUMP` makes them, in DUMP-h5.
Not here: the files (cli/convert.py).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import sys
from pathlib import Path

from vllm_accprobe.children import HOME, ONE_THREAD
from vllm_accprobe.dump.schema import rank_dir

LOG = "export.log"
_WAIT_S = 3600.0
"""A script waits for its files, but not for a disk that hangs."""


def start(root: Path, rank: int, kind: str) -> subprocess.Popen[bytes] | None:
    """Starts the export of one rank. kind: ``h5``, or "" for none. None where it could not be started, which is
    reported in the log."""
    if not kind:
        return None
    log = root / rank_dir(rank) / LOG
    here = os.pathsep.join(filter(None, (str(HOME.parent), os.environ.get("PYTHONPATH", ""))))
    env = {**os.environ, **ONE_THREAD, "PYTHONPATH": here, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "vllm_accprobe.cli", "convert", str(root), "--at-end", "--to", kind]
    command += ["--ranks", str(rank)]
    try:
        with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as log_file:
            # "/": what lies in the current directory, a stranger's numpy.py perhaps, is not run
            process = subprocess.Popen(
                command, env=env, cwd="/", stdin=subprocess.DEVNULL, stdout=log_file, stderr=log_file,
                start_new_session=True,
            )
    except OSError as why:
        with contextlib.suppress(OSError):
            log.write_text(f"the export could not be started: {why.strerror or why}\n", encoding="utf-8")
        return None
    with contextlib.suppress(OSError, AttributeError):  # the server's next steps first
        os.setpriority(os.PRIO_PROCESS, process.pid, 10)
    atexit.register(_wait, process, log)
    return process


def _wait(process: subprocess.Popen[bytes], log: Path) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
        if code := process.wait(_WAIT_S):
            print(f"accprobe: the export ended with {code}, see {log}; the dump itself is there", file=sys.stderr)
