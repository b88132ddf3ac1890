"""Fixtures of the end-to-end tests."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import counts, kernels
from support.captures import Engines
from support.engine import Run


@pytest.fixture(scope="session")
def engines_by_kernels(tmp_path_factory, preloads):
    """Engines that compute with the kernels of that name (support/kernels.py); made when first asked for."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here")
    made: dict[str, Engines] = {}

    def of(name: str) -> Engines:
        if name not in made:
            forks = preloads if name == kernels.NATIVE else None
            made[name] = Engines(tmp_path_factory.mktemp(f"engines-{name}"), name, forks)
        return made[name]

    yield of
    for engines in made.values():
        engines.close()


@pytest.fixture(scope="session")
def engines(engines_by_kernels: Callable[[str], Engines]) -> Engines:
    """With this machine's kernels, or those that the whole suite is forced to."""
    return engines_by_kernels(kernels.NATIVE)


@pytest.fixture(scope="session", params=[kernels.NATIVE, pytest.param("avx2", marks=pytest.mark.extra("as native"))])
def each_engines(request: pytest.FixtureRequest, engines_by_kernels: Callable[[str], Engines]) -> Engines:
    """This machine's kernels, and the least that vLLM has: what passes here must pass where those are the best."""
    name = request.param
    if name != kernels.NATIVE and (kernels.current() == name or kernels.best() == name):
        pytest.skip(f"{name} is what this suite computes with anyway")
    if not kernels.possible(name):
        pytest.skip(f"this processor has no {name}")
    return engines_by_kernels(name)


@pytest.fixture(scope="session")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Run, Run], Any]:
    """Two runs' Comparison, made once; what is shown of it adds up (support/counts.py)."""
    done: dict[tuple[Path | None, Path | None], Any] = {}

    def once(golden: Run, mine: Run) -> Any:
        key = (golden.dump, mine.dump)
        assert golden.dump is not None
        assert mine.dump is not None
        if key not in done:
            from vllm_accprobe.comparison.engine import compare

            done[key] = compare(golden.dump, mine.dump)
            counts.check(done[key], tmp_path_factory.mktemp("counts"))
        return done[key]

    return once
