"""Calls built from a dump, judged, counted, and said by the command."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from opcheck.opcheck_dumps import Maker

from vllm_accprobe.cli import main
from vllm_accprobe.formats import open_dump
from vllm_accprobe.opcheck.calls.records import Calls
from vllm_accprobe.opcheck.registry import default_references
from vllm_accprobe.opcheck.run.replay import check
from vllm_accprobe.opcheck.run.result_row import Checked
from vllm_accprobe.opcheck.run.totals import totals

HEADS, KV, HEAD, WIDTH = 4, 2, 8, 32
SPANS = ([(0, 0, 9), (1, 0, 6)], [(0, 9, 5), (1, 6, 1)], [(0, 14, 1), (1, 7, 1)])
"""Chunked prefill of request 0 beside a whole prompt, then decode steps."""


def honest(seed: int = 0) -> dict[str, torch.Tensor]:
    """One layer's tensors for all positions of both requests, bfloat16."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).bfloat16()

    return {
        "x": draw(2, 20, WIDTH), "norm": draw(WIDTH).abs() + 0.5,
        "qkv": draw(HEADS * HEAD + 2 * KV * HEAD, WIDTH) * 0.2, "o": draw(WIDTH, HEADS * HEAD) * 0.2,
    }  # fmt: skip


def build(
    root: Path, fault: str = "", first: int = 0, weights: bool = True, spans: tuple = SPANS
) -> Path:  # fmt: skip
    """A norm, a qkv projection, attention and an output projection over SPANS. fault: a tap that goes wrong."""
    made, m = honest(), Maker(root)
    weight, wide = made["norm"], {k: v.double() for k, v in made.items()}
    m.module("<root>", "TinyForCausalLM")
    m.module("layers.0.self_attn", "TinyAttention", scaling=HEAD**-0.5)
    m.module("layers.0.norm", "RMSNorm", variance_epsilon=1e-5)
    m.module("layers.0.self_attn.qkv_proj", "QKVParallelLinear", tp_size=1)
    m.module("layers.0.self_attn.attn", "Attention", num_heads=HEADS, num_kv_heads=KV, head_size=HEAD)
    m.module("layers.0.self_attn.o_proj", "RowParallelLinear", tp_size=1, reduce_results=True)
    m.module("layers.0.odd", "NobodyKnows")
    m.request(0, 14)
    m.request(1, 7)
    empty = torch.zeros(0, dtype=torch.bfloat16)
    m.param("layers.0.norm", "RMSNorm", weight=weight)
    m.param("layers.0.self_attn.qkv_proj", "QKVParallelLinear", weight=made["qkv"] if weights else empty)
    m.param("layers.0.self_attn.o_proj", "RowParallelLinear", weight=made["o"])
    normed = (wide["x"] / (wide["x"].pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * wide["norm"]).bfloat16()
    q, k, v = (normed.double() @ wide["qkv"].T).bfloat16().split([HEADS * HEAD, KV * HEAD, KV * HEAD], -1)
    for step, span in enumerate(spans):
        if step < first:
            continue
        m.step(step, span)

        def rows(t: torch.Tensor, span: list = span) -> torch.Tensor:
            return torch.cat([t[r, p : p + n] for r, p, n in span]).clone()

        out = []
        for r, p, n in span:
            qh = q[r, p : p + n].double().reshape(n, HEADS, HEAD).transpose(0, 1)
            kh, vh = (t[r, : p + n].double().reshape(p + n, KV, HEAD).transpose(0, 1) for t in (k, v))
            if fault == "layers.0.self_attn.attn" and p + n > 12:
                vh = vh.clone()
                vh[0, 3] = 0  # a zeroed slot of the cache
            mask = torch.ones(n, p + n, dtype=torch.bool).tril(p)
            y = torch.nn.functional.scaled_dot_product_attention(qh, kh, vh, mask, enable_gqa=True)
            out.append(y.transpose(0, 1).reshape(n, -1))
        attended = torch.cat(out).bfloat16()
        projected = (attended.double() @ wide["o"].T).bfloat16()
        first_output = rows(normed)
        if fault == "layers.0.norm":
            first_output[:, 7] *= 1.06
        if fault == "layers.0.self_attn.o_proj":
            projected = (projected.double() * 1.02).bfloat16()
        if fault == "nan":
            projected[0, 0] = float("nan")
        m.call("layers.0.norm", "RMSNorm", {"x": rows(made["x"])}, first_output)
        m.call("layers.0.self_attn.qkv_proj", "QKVParallelLinear", {"input_": rows(normed)},
               torch.cat([rows(t) for t in (q, k, v)], -1))  # fmt: skip
        m.call("layers.0.self_attn.attn", "Attention", {"query": rows(q), "key": rows(k), "value": rows(v)}, attended)
        m.call("layers.0.self_attn.o_proj", "RowParallelLinear", {"input_": attended}, projected)
        m.call("layers.0.odd", "NobodyKnows", {"x": rows(normed)}, rows(normed))
    return m.close()


def checked(root: Path) -> list[Checked]:
    return list(check(Calls(open_dump(root), None), default_references()))


def test_an_honest_engine_passes_and_what_is_unknown_is_counted(tmp_path: Path) -> None:
    rows = checked(build(tmp_path / "d"))
    found = totals(rows)
    assert (found.calls, found.checked) == (15, 12)
    assert found.skipped == {"no reference for NobodyKnows": 3}
    assert found.statuses == {"pass": 12, "skip": 3}
    assert max(r.severity for r in rows) < 0.8


@pytest.mark.parametrize("tap", ["layers.0.norm", "layers.0.self_attn.o_proj", "layers.0.self_attn.attn"])
def test_a_fault_is_found_where_it_is_and_nowhere_else(tmp_path: Path, tap: str) -> None:
    rows = checked(build(tmp_path / "d", tap))
    assert {r.tap for r in rows if r.status == "fail"} == {tap}


def test_a_zeroed_cache_slot_is_told_by_request_and_position(tmp_path: Path) -> None:
    rows = [r for r in checked(build(tmp_path / "d", "layers.0.self_attn.attn")) if r.status == "fail"]
    assert [r.step for r in rows] == [1, 2]
    assert rows[1].request == "r0"
    assert rows[1].position == 14
    assert "at position 14 of request r0" in rows[1].message


def test_a_column_is_named(tmp_path: Path) -> None:
    worst = max(checked(build(tmp_path / "d", "layers.0.norm")), key=lambda r: r.severity)
    assert (worst.measure, worst.column) == ("column", 7)


def test_nan_never_passes(tmp_path: Path) -> None:
    rows = [r for r in checked(build(tmp_path / "d", "nan")) if r.status == "fail"]
    found = {(r.tap, r.measure, r.measures.nonfinite_mismatch) for r in rows}
    assert found == {("layers.0.self_attn.o_proj", "nonfinite", 1)}


def test_rows_without_their_history_are_skipped_and_counted(tmp_path: Path) -> None:
    """Capture begins at step 1: request 0 has no positions 0 to 8, request 1 none before 6."""
    rows = [r for r in checked(build(tmp_path / "d", first=1)) if r.cls == "Attention"]
    assert [r.status for r in rows] == ["skip", "skip"]
    assert "earlier rows are not in the dump" in rows[0].message
    fresh = (*SPANS[:1], [(1, 6, 1), (0, 15, 2)])  # request 0 jumps over a position, request 1 goes on
    rows = [r for r in checked(build(tmp_path / "e", spans=fresh)) if r.cls == "Attention"]
    assert [(r.status, r.checked, r.rows) for r in rows] == [("pass", 15, 15), ("pass", 1, 3)]
    assert totals(rows).rows_skipped == {
        "its request's earlier rows are not in the dump (prefix hit, or capture began late)": 2
    }


def test_a_packed_parameter_is_declined_by_name(tmp_path: Path) -> None:
    rows = [r for r in checked(build(tmp_path / "d", weights=False)) if r.cls == "QKVParallelLinear"]
    assert {(r.status, r.message) for r in rows} == {
        ("skip", "parameter weight was packed by a kernel before it could be captured")
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


@pytest.mark.parametrize(("fault", "code"), [("", 0), ("layers.0.self_attn.o_proj", 1)])
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str, code: int) -> None:
    build(tmp_path / "d", fault)
    assert main(["opcheck", str(tmp_path / "d"), "--out", str(tmp_path / "out")]) == code
    said = capsys.readouterr().out
    assert said.startswith("fail: 12 of 15 calls checked" if code else "pass: 12 of 15 calls checked")
    assert "no reference for NobodyKnows" in said
    with (tmp_path / "out/opcheck.csv").open(newline="") as f:
        table = list(csv.DictReader(f))
    assert len(table) == 15
    assert [r["status"] for r in table].count("fail") == (3 if code else 0)
    if code:
        assert "first layers.0.self_attn.o_proj (RowParallelLinear)" in said


def test_the_command_says_what_it_cannot_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(tmp_path / "d")
    assert main(["opcheck", str(tmp_path / "d"), "--ops", "Nothing*", "--out", str(tmp_path / "o")]) == 3
    assert main(["opcheck", str(tmp_path / "gone")]) == 2
    assert main(["opcheck", str(tmp_path / "d"), "--weights", str(tmp_path / "no")]) == 2
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == 3
    assert "no call matches" in said.err
    assert not (tmp_path / "o").exists()
