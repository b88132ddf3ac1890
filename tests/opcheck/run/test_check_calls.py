"""Calls built from a dump: missing histories, a checkpoint's parameters, formulas that no block follows. What is said
of right and wrong calls, NaN and packed parameters is frozen (tests/freeze, ``opcheck-calls*``)."""

from dataclasses import replace
from pathlib import Path

import pytest
from opcheck.layer_dumps import HEAD, HEADS, KV, SPANS, build, checked, honest
from support.opchecked import check

from vllm_accprobe.formats import open_dump
from vllm_accprobe.opcheck.calls.records import Calls
from vllm_accprobe.opcheck.registry import default_references
from vllm_accprobe.opcheck.run.result_row import OWN_CODE, CheckResult, unchecked, without_unknown_blocks
from vllm_accprobe.opcheck.run.table import totals


def test_rows_without_their_history_are_skipped_and_counted(tmp_path: Path) -> None:
    """Request 0 jumps over a position, request 1 goes on. Where no row has its history: opcheck-calls-headless."""
    fresh = (*SPANS[:1], [(1, 6, 1), (0, 15, 2)])
    rows = [r for r in checked(build(tmp_path / "e", spans=fresh)) if r.cls == "Attention"]
    assert [(r.status, r.checked, r.rows) for r in rows] == [("pass", 15, 15), ("pass", 1, 3)]
    assert totals(rows).rows_skipped == {
        "its request's earlier rows are not in the dump (prefix hit, or capture began late)": 2
    }


def test_the_checkpoint_stands_in_for_packed_parameters(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    made = honest()
    parts = made["qkv"].split([HEADS * HEAD, KV * HEAD, KV * HEAD])
    names = [f"layers.0.self_attn.{n}_proj.weight" for n in "qkv"]
    (tmp_path / "model").mkdir()
    save_file({n: p.contiguous() for n, p in zip(names, parts, strict=True)}, tmp_path / "model/model.safetensors")
    calls = Calls(open_dump(build(tmp_path / "d", weights=False)), tmp_path / "model")
    rows = list(check(calls, default_references(), ops=["QKV*"]))
    assert [r.status for r in rows] == ["pass"] * 3


LAYER = "XDecoderLayer"


def of(tap: str, cls: str, status: str, step: int = 0) -> CheckResult:
    row = unchecked(tap, cls, 0, step, 0, 0, "", status=status, role="output.0")
    # a message as another standard writes it
    return replace(row, by_name=cls == LAYER and status == "fail", message="cosine 0.5 below 0.99")


@pytest.mark.parametrize(("rows", "unknown"), [
    ([of("m.0", LAYER, "fail"), of("m.1", LAYER, "fail")], {"m.0", "m.1"}),
    ([of("m.0", LAYER, "fail"), of("m.1", LAYER, "pass")], set()),
    ([of("m.0", LAYER, "fail"), of("m.1", LAYER, "fail"), of("m.1", LAYER, "pass", 1)], set()),
    ([of("m.0", LAYER, "fail"), of("m.0", LAYER, "fail", 1)], set()),
    ([of("m.0.down", "Linear", "fail"), of("m.1.down", "Linear", "fail")], set()),
    ([replace(of(f"m.{i}", LAYER, "fail"), by_name=False) for i in range(2)], set()),
    ([of("m.0", "QKVLinear", "fail"), of("m.1", "QKVLinear", "fail")], set()),
], ids=["every one", "one is right", "right in a step", "one layer", "none", "by its code", "computed"])  # fmt: skip
def test_a_formula_that_no_block_of_a_class_follows_proves_none_wrong(rows, unknown):
    parts = [of(f"m.{i}.down", "Linear", "pass") for i in range(2)] if rows[0].tap in ("m.0", "m.1") else []
    found = without_unknown_blocks([*rows, *parts])
    assert {r.tap for r in found if r.status == "skip" and r.message == OWN_CODE} == unknown
    assert [r for r in found if r.tap not in unknown] == [r for r in [*rows, *parts] if r.tap not in unknown]
