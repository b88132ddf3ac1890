"""run.json: what is true of all ranks of a run, written once.

Not here: what stands in it (the capture room).
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_accprobe.dump.recorder.lines import plain
from vllm_accprobe.dump.schema import RUN_JSON, SCHEMA


def write_run_json(root: Path, run: Mapping[str, Any]) -> bool:
    """Creates ``root/run.json`` in one piece, 0600, with ``schema`` added; True if this call made it, False if it was
    there (of several ranks the first wins). Raises OSError where it cannot be written."""
    root = Path(root)
    if not root.is_dir():
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = json.dumps(plain({"schema": SCHEMA, **run}), indent=1) + "\n"
    temporary = root / f".{RUN_JSON}.{secrets.token_hex(4)}"
    fd = os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    try:
        with os.fdopen(fd, "w") as f:
            f.write(text)
            f.flush()
            os.fsync(fd)
        try:
            os.link(temporary, root / RUN_JSON)  # unlike rename, this fails where somebody was faster
        except FileExistsError:
            return False
        except OSError:  # no hard links on this file system
            fd = os.open(root / RUN_JSON, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with os.fdopen(fd, "w") as f:
                f.write(text)
        return True
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
