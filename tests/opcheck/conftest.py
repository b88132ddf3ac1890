"""Dumps of msprobe's own, with gradients: made once."""

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
        if not made:
            homes = {task: tmp_path_factory.mktemp(f"recorded-{task}") / "dump" for task in ("tensor", "statistics")}
            command = [sys.executable, str(MAKER), *(str(word) for both in homes.items() for word in both)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            assert done.returncode == 0, done.stderr[-2000:]
            made.update({task: next(home.rglob("dump.json")) for task, home in homes.items()})
        return made[task]

    return of
