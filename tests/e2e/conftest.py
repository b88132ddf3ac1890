"""Fixtures of the end-to-end tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.captures import Engines
from support.engine import Run


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here")
    engines = Engines(tmp_path_factory.mktemp("engines"))
    yield engines
    engines.close()


@pytest.fixture(scope="session")
def compared() -> Callable[[Run, Run], Any]:
    done: dict[tuple[Path | None, Path | None], Any] = {}

    def once(golden: Run, mine: Run) -> Any:
        key = (golden.dump, mine.dump)
        assert golden.dump is not None
        assert mine.dump is not None
        if key not in done:
            from vllm_accprobe.comparison.engine import compare

            done[key] = compare(golden.dump, mine.dump)
        return done[key]

    return once
