"""A measured comparison as one file, also as earlier releases wrote it."""

import json

import numpy as np
from synthetic_model import capture, scaled

from vllm_accprobe.comparison import engine, store


def test_a_file_of_earlier_releases_is_read(tmp_path):
    """They kept two sums of each unit, of which one is read."""
    result = engine.compare(capture(), capture(faults={"model.layers.1.mlp.down_proj": scaled(1.1)}))
    path = store.save(result.measured, tmp_path)
    with np.load(path) as data:
        members = dict(data)
    meta = json.loads(members["meta"].tobytes())
    assert [len(sums) for _, _, sums in meta["units"]] == [2] * len(meta["units"])
    assert all(far is None for _, _, (_, far) in meta["units"])
    for unit in meta["units"]:
        unit[2][1] = unit[2][0]
    members["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    np.savez(tmp_path / "measured", **members)
    assert engine.rejudge(store.load(tmp_path)).pairs == result.pairs
