"""A dump of msprobe's own, with gradients: made once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

MAKER = Path(__file__).with_name("backward_model.py")


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The dump.json of a task, ``tensor`` or ``statistics``."""
    made: dict[str, Path] = {}

    def of(task: str) -> Path:
        if task not in made:
            home = tmp_path_factory.mktemp(f"recorded-{task}") / "dump"
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, str(MAKER), task, str(home)]
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
            assert done.returncode == 0, done.stderr[-2000:]
            made[task] = next(home.rglob("dump.json"))
        return made[task]

    return of
