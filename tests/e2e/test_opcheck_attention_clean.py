"""Attention of clean real engines, in every phase, is right against the cache that is put together from the dump."""

from pathlib import Path

import pytest
from e2e.test_clean_pairs import SHARED_START
from support.captures import Engines
from support.csv_rows import csv_rows

from vllm_accprobe.cli import main
from vllm_accprobe.dump.reader import open_dump

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("way", ["chunked", "prefix"])
def test_attention_of_chunks_hits_and_decode_passes(each_engines: Engines, tmp_path: Path, way: str) -> None:
    """Both captures are those of test_clean_pairs.py."""
    if way == "chunked":
        run = each_engines.run("chunk16", how="together", max_num_batched_tokens=16)
    else:
        run = each_engines.run("prefix", asks=SHARED_START, how="serial", enable_prefix_caching=True, block_size=32)
        assert run.metrics["prefix_hits"] == 2 * 64
    assert main(["opcheck", str(run.dump), "-j", "0", "--ops", "Attention", "--out", str(tmp_path)]) == 0
    rows = csv_rows(tmp_path / "opcheck.csv")
    dump = open_dump(run.dump)
    spaces = [s for (_, _, name), s in dump.rows.items() if name == "tokens"]
    assert {r["status"] for r in rows} == {"pass"}
    assert len(rows) == 4 * len(spaces)  # four layers, and no step without its row
    assert all(r["rows"] == r["checked"] for r in rows)
    assert {s.phase for space in spaces for s in space.segments} == {"prefill", "decode"}
    later = [s for space in spaces for s in space.segments if s.phase == "prefill" and s.pos]
    assert len(later) >= 2  # prompts that went on behind a chunk or a hit
