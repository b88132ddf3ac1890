"""One process that builds the engines on the captured platform, for both files of tests."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import captured_bench as bench
import pytest
from support.engine import EngineHost


@pytest.fixture(scope="session")
def captured_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineHost, Path]]:
    """The process, without the probe until an engine asks for it, and the folder of its runs and its cache."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here")
    folder = tmp_path_factory.mktemp("captured")
    host = EngineHost(folder / "log", bench.environment(folder), probe=False)
    yield host, folder
    host.close()
