"""Calls built from a dump: missing histories, a checkpoint's parameters, formulas that no block follows. What is said
of right and wrong calls, NaN and packed parameters is frozen (tests/freeze, ``opcheck-calls*``)."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from opcheck.layer_dumps import HEAD, HEADS, KV, SPANS, build, honest
from opcheck.opcheck_dumps import Maker
from support.opchecked import rows_of

from vllm_accprobe.dump.journal import StateFinding
from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.schema import REPLICATED, Record
from vllm_accprobe.opcheck.calls.records import Captured
from vllm_accprobe.opcheck.reference import Call
from vllm_accprobe.opcheck.run.check_calls import cache_rows, check_calls
from vllm_accprobe.opcheck.run.judged_row import without_verdict
from vllm_accprobe.opcheck.run.result_row import FAIL, OWN_CODE, SKIP, CheckResult, unchecked, without_unknown_blocks
from vllm_accprobe.opcheck.run.table import lines, totals


def test_rows_without_their_history_are_skipped_and_counted(tmp_path: Path) -> None:
    """Request 0 jumps over a position, request 1 goes on. Where no row has its history: opcheck-calls-headless."""
    fresh = (*SPANS[:1], [(1, 6, 1), (0, 15, 2)])
    rows = [r for r in rows_of(build(tmp_path / "e", spans=fresh)) if r.cls == "Attention"]
    assert [(r.status, r.checked, r.rows) for r in rows] == [("pass", 15, 15), ("pass", 1, 3)]
    assert totals(rows).rows_skipped == {
        "its request's earlier rows are not in the dump (prefix hit, or capture began late)": 2
    }


def test_outputs_of_one_shape_whose_rows_lie_along_other_dimensions(tmp_path: Path) -> None:
    """They are not judged together."""
    m, x = Maker(tmp_path / "d"), torch.arange(1.0, 17.0).reshape(4, 4).bfloat16()
    m.module("act", "SiLU")
    m.request(0, 8)
    y = torch.nn.functional.silu(x.double()).bfloat16()
    y[1, 3] *= 1.5
    for step in (0, 1):
        m.step(step, [(0, 4 * step, 4)])
        for seq, (role, tensor) in enumerate((("input.x", x), ("output.0", y))):
            m._put({"event": "tensor", "step": step, "tap": "act", "class": "SiLU", "role": role, "seq": seq,
                    "rows": "tokens", "row_dim": step}, tensor)  # fmt: skip
    assert [(r.status, r.position) for r in rows_of(m.close())] == [(FAIL, 1), (FAIL, 4 + 3)]


def test_the_checkpoint_stands_in_for_packed_parameters(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    made = honest()
    parts = made["qkv"].split([HEADS * HEAD, KV * HEAD, KV * HEAD])
    names = [f"layers.0.self_attn.{n}_proj.weight" for n in "qkv"]
    (tmp_path / "model").mkdir()
    save_file({n: p.contiguous() for n, p in zip(names, parts, strict=True)}, tmp_path / "model/model.safetensors")
    rows = rows_of(build(tmp_path / "d", weights=False), tmp_path / "model", ops=["QKV*"])
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


def record(*shape: int) -> Record:
    return Record(0, 0, "t", "T", "input.0", 0, 0, "float32", shape, None, 0, None, None, REPLICATED, None)


@pytest.mark.parametrize(("shape", "most"), [((1 << 20,), 4), ((152_000,), 28), ((), 4096)])
def test_few_calls_wait_whatever_they_read_and_however_little_they_give(shape: tuple[int, ...], most: int) -> None:
    calls, read, waited, events = 10_000, 0, 0, []

    def each() -> Iterator[tuple[Captured, Any]]:
        nonlocal read
        for n in range(calls):
            c = Captured("sampler", 0, 0, n, Call("sampler", "Sampler"), {"input.0": record(*shape)})
            read += 1
            events.append("read")
            yield c, [without_verdict(c, "", None, SKIP, "no reference")]

    found = []
    for c, rows in check_calls(None, each(), lambda: events.append("together")):  # type: ignore[arg-type]
        assert len(rows) == 1
        found.append(c.call)
        waited = max(waited, read - len(found))
    assert found == list(range(calls))
    assert most // 2 <= waited <= most


def test_a_crash_while_one_is_judged_is_not_the_next_ones() -> None:
    events: list[str] = []

    def each() -> Iterator[tuple[Captured, Any]]:
        for n in range(3):
            events.append(f"begins {n}")
            c = Captured("t", 0, 0, n, Call("t", "T"), {"input.0": record(1 << 23)})
            yield c, [without_verdict(c, "", None, SKIP, "no reference")]

    for c, _ in check_calls(None, each(), lambda: events.append("together")):  # type: ignore[arg-type]
        events.append(f"judged {c.call}")
    assert events == ["begins 0", "begins 1", "together", "judged 0", "begins 2", "together", "judged 1", "together",
                      "judged 2"]  # fmt: skip


def test_a_finding_is_a_failing_row_of_the_first_layer() -> None:
    dump = Dump(Path("somewhere"), {})
    how = "request 'b' (adapter a2) reads block 0 (positions 0 to 31), which request 'a' (adapter a1) wrote"
    found = StateFinding(8, "foreign", "kv", 0, "", 4, 1, "b", how, None, 0, 31, "a", first="layers.0.attn")
    dump.states = [(1, found)]
    (row,) = cache_rows(dump)
    assert (row.tap, row.cls, row.role, row.status, row.rank) == ("layers.0.attn", "cache", "cache", FAIL, 1)
    assert (row.request, row.position) == ("b", 0)
    assert row.message.startswith("the cache, not the kernel: ")
    assert row.message.endswith(how)
    assert totals([row]).statuses[FAIL] == 1
    first, second, *_ = lines([row], totals([row]))
    assert first.startswith("FAIL: the cache, not the kernel: a prefix hit of another context: step 8")
    assert second.startswith("  layers.0.attn  cache: the cache, not the kernel")
    assert not any("as loaded" in line for line in (first, second))
