"""A real engine's capture of modules, parameters and operators through an export and back.

The other containers: tests/formats/test_export_round_trip.py."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from formats.test_export_round_trip import NOTED, hold
from support.captures import VISION, Engines
from support.opchecked import check

from vllm_accprobe.cli import main
from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.formats import open_dump
from vllm_accprobe.opcheck.calls.records import Calls
from vllm_accprobe.opcheck.registry import default_references

pytestmark = pytest.mark.engine


ASKS = [replace(ask, max_tokens=2) for ask in VISION]


@pytest.fixture(scope="module")
def dump(engines: Engines) -> Path:
    """Pictures go through a Conv3d, text through attention with a cache."""
    run = engines.run("qwen2.5-vl-converted", "qwen2.5-vl", ASKS, env={"VLLM_ACCPROBE_OPS": "1"})
    assert run.dump is not None
    return run.dump


Row = tuple[object, ...]


def replayed(dump: Dump) -> set[Row]:
    """What a replay says of each output of each call, but for attention, which needs earlier steps."""
    rows = check(Calls(dump, None), default_references(), ops=["!*Attention*", "!*attention*"])
    return {(r.tap, r.step, r.call, r.role, r.status) for r in rows if r.status in ("pass", "fail")}


def test_nothing_is_lost(dump: Path, tmp_path: Path) -> None:
    out = tmp_path / NOTED
    assert main(["convert", str(dump), str(out), "--to", NOTED]) == 0
    own, theirs = open_dump(dump), open_dump(out)
    assert hold(own, theirs, NOTED) > 2000
    calls = [Counter((o.op, o.step) for o in d.ops) for d in (own, theirs)]
    assert not calls[1] - calls[0]
    before, after = replayed(own), replayed(theirs)
    conv = {c for c in before if "patch_embed" in c[0] and c[3] == "output.0"}
    assert conv
    assert conv <= after
    lost = Counter(c[0].rpartition("::")[2] for c in before - after if "::" in c[0])
    assert not lost, lost
    assert not [c for c in after if c[4] == "fail" and (*c[:4], "fail") not in before]


def test_errcheck_leaves_no_operator_in_a_capture(engines: Engines) -> None:
    """The same calls with and without errcheck beside the capture."""
    env = {"VLLM_ACCPROBE_OPS": "1"}
    runs = [
        engines.run(name, "qwen2.5-vl", ASKS, env=env | more)
        for name, more in (
            ("qwen2.5-vl-converted", {}), ("qwen2.5-vl-watched", {"VLLM_ACCPROBE_ERRCHECK": "nan,overflow"}),
        )
    ]  # fmt: skip
    ops = [[(o.step, o.tap, o.call) for o in open_dump(run.dump).ops] for run in runs if run.dump is not None]
    assert len(ops) == 2
    assert Counter(ops[1]) == Counter(ops[0])
