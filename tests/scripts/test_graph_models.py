"""The table of six models remembers each run by itself, also of a model whose name has a dot."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
import graph_models


def test_each_way_of_each_model_has_its_own_dump_and_marker(tmp_path: Path) -> None:
    hosts = graph_models.Hosts(tmp_path, quick=True)
    try:
        runs = [graph_models.Runs(tmp_path, name, hosts) for name in graph_models.MODELS]
        files = [of(way) for r in runs for way in graph_models.WAYS for of in (r.path, r.marker)]
    finally:
        hosts.close()
    assert len(set(files)) == len(files)
