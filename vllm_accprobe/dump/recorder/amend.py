"""Adds to run.json what is known only afterwards, in one piece: a reader sees the old file or the new one.

Not here: writing it the first time (writer.py).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vllm_accprobe.dump.schema import RUN_JSON


def amend_graphs(root: Path, facts: dict[str, Any]) -> None:
    """Sets ``facts`` in ``engine.graphs`` of the dump at ``root``. Raises OSError; ValueError: run.json is damaged."""
    path = root / RUN_JSON
    run = json.loads(path.read_text(encoding="utf-8"))
    run.setdefault("engine", {}).setdefault("graphs", {}).update(facts)
    part = root / f".{RUN_JSON}.{os.getpid()}"
    with os.fdopen(os.open(part, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "w", encoding="utf-8") as file:
        file.write(json.dumps(run, indent=1) + "\n")
    os.replace(part, path)
