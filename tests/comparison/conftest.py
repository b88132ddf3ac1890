"""A synthetic model's run in memory; and two dumps: mine is chunked otherwise, and one product is off by a tenth."""

from pathlib import Path

import pytest
from synthetic_model import MemoryDump, capture, scaled, write


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("dumps")
    fault = {"model.layers.1.mlp.down_proj": scaled(1.1)}
    return write(capture(together=False), root / "golden"), write(capture(chunk=4, faults=fault), root / "mine")


@pytest.fixture(scope="session")
def golden() -> MemoryDump:
    """Requests one at a time. Nobody changes it."""
    return capture(together=False)
