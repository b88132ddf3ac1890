"""Sizes that a module of tests has as constants, drawn anew for each of a few seeds: a definition at random shapes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

SEEDS = 4


def drawn_sizes(module: str, **ranges: tuple[int, ...] | Callable[[Any, Mapping[str, Any]], Any]) -> Any:
    """A fixture for all tests of ``module``: as they are, then with each constant between two numbers (the second one
    never), in steps of the third, or what a function makes of the generator and the sizes before it."""

    @pytest.fixture(autouse=True, params=range(SEEDS), ids=lambda seed: f"sizes{seed}")
    def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        if not request.param:
            return
        r = np.random.default_rng(request.param)
        found: dict[str, Any] = {}
        for name, of in ranges.items():
            if callable(of):
                found[name] = of(r, found)
            else:
                first, stop, step = (*of, 1)[:3]
                found[name] = first + step * int(r.integers(0, (stop - first + step - 1) // step))
            monkeypatch.setattr(sys.modules[module], name, found[name])

    return sizes
