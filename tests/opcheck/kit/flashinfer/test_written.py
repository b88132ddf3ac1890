"""Calls written as FlashInfer's folders: read again, the right ones pass and the wrong ones fail, as before."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from opcheck.layer_dumps import build
from reference_calls import TABLE

from vllm_accprobe.cli import main
from vllm_accprobe.formats import open_dump
from vllm_accprobe.opcheck.calls.case import CachedRun, StoredCache
from vllm_accprobe.opcheck.calls.records import Calls, Captured
from vllm_accprobe.opcheck.kit.flashinfer.from_modules import MODULES
from vllm_accprobe.opcheck.kit.flashinfer.from_operators import OPERATORS
from vllm_accprobe.opcheck.kit.flashinfer.recorder import NotFlashInfers
from vllm_accprobe.opcheck.kit.flashinfer.signatures import WORKSPACE
from vllm_accprobe.opcheck.kit.flashinfer.written import FlashFolders, flash_calls
from vllm_accprobe.opcheck.reference import Call, Declined
from vllm_accprobe.opcheck.run.replay import Options, check_tap

G = torch.Generator().manual_seed(4)


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=G).to(dtype)


X, W = draw(6, 32), draw(32).abs() + 0.5
POSITIONS = torch.tensor([3, 9, 0, 40, 7, 7])
ANGLE = torch.arange(64)[:, None] * 100.0 ** (-torch.arange(4) / 4)
CACHES = tuple(draw(9, 4, 2, 16) for _ in range(2))
PAGES = torch.tensor([[5, 2, 7], [8, 1, -1], [3, -1, -1]], dtype=torch.int32)
LENGTHS, STARTS = torch.tensor([11, 6, 4]), torch.tensor([0, 3, 4, 8])
CODES = [draw(5, 32, dtype=torch.float8_e4m3fn), draw(32, 7, dtype=torch.float8_e4m3fn)]


def flash(q: torch.Tensor, starts: torch.Tensor, window: int = -1, cap: float = 0.0) -> tuple[Any, ...]:
    return (q, *CACHES, None, starts, None, LENGTHS, None, PAGES, None, 4, 11, 0.0, 0.25, False, True, window, -1, cap)


def on_cpu() -> tuple[Any, ...]:
    """Keys [blocks, kv, width, slots] in the shape [blocks, kv, slots, width], as vLLM's kernels without AMX; blocks
    that those with AMX could have, too."""
    k, v = (draw(9, 16, 2, 16) for _ in range(2))
    keys = k.permute(0, 2, 3, 1).contiguous().reshape(9, 2, 16, 16)
    q = draw(8, 4, 16)
    return (q, keys, v.transpose(1, 2).contiguous(), torch.zeros_like(q), STARTS, LENGTHS, 0.25, True, None, -1, PAGES,
            0.0, torch.zeros(8), None, None)  # fmt: skip


def ask(cls: str, roles: str, shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.bfloat16, **more: Any) -> Call:
    outputs = {r: torch.zeros(s, dtype=dtype) for r, s in zip(roles.split(), shapes, strict=True)}
    return Call("x", cls, outputs=outputs, **more)


def tiles(rows: int, columns: int) -> torch.Tensor:
    return (torch.rand(-(-rows // 128) * 128, -(-columns // 4) * 4, generator=G) + 0.5).to(torch.float8_e4m3fn)


def asked() -> dict[str, Call]:
    """By name, calls whose results are still to be filled in."""
    q2, k2 = draw(6, 32), draw(6, 16)
    table = torch.cat((ANGLE.cos(), ANGLE.sin()), -1).bfloat16()
    rope = {"inputs": {"positions": POSITIONS, "query": q2, "key": k2}, "attrs": {"head_size": 8, "base": 1e4}}
    past = {"key": draw(9, 16), "value": draw(9, 16)}
    runs = [CachedRun(torch.arange(5), torch.arange(4, 9), past), CachedRun(torch.tensor([5]), torch.tensor([8]), past)]
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_size": 8}
    scales = (torch.tensor([0.5]), torch.tensor([0.02]))
    four = [torch.randint(0, 256, (n, 32), generator=G, dtype=torch.uint8) for n in (5, 7)]
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 32}  # fmt: skip
    norm = {"attrs": {"variance_epsilon": 1e-5}, "params": {"weight": W}}
    two = "output.0 output.1"
    return {
        "norm": ask("RMSNorm", "output.0", [(6, 32)], inputs={"x": X}, **norm),
        "norm of a sum": ask("RMSNorm", two, [(6, 32)] * 2, inputs={"x": X, "residual": draw(6, 32)}, **norm),
        "Gemma's": ask("GemmaRMSNorm", "output.0", [(6, 32)], inputs={"x": X}, **norm),
        "layer norm": ask("LayerNorm", "output.0", [(6, 32)], inputs={"x": X}, attrs={"eps": 1e-5},
                          params={"weight": W, "bias": draw(32)}),
        "silu": ask("SiluAndMul", "output.0", [(6, 16)], inputs={"x": X}),
        "gelu": ask("GeluAndMul", "output.0", [(6, 16)], inputs={"x": X}, attrs={"approximate": "tanh"}),
        "rope": ask("RotaryEmbedding", two, [(6, 32), (6, 16)], **rope),
        "rope by a table": ask("RotaryEmbedding", two, [(6, 32), (6, 16)],
                               params={"cos_sin_cache": rope_table(8)}, **rope),
        "Llama 3's rope": ask("Llama3RotaryEmbedding", two, [(6, 32), (6, 16)],
                              config={"rope_scaling": llama3}, **rope),
        "linear": ask("ColumnParallelLinear", "output.0", [(6, 8)], inputs={"input_": X},
                      params={"weight": draw(8, 32), "bias": draw(8)}),
        "attention": ask("Attention", "output.0", [(6, 32)], inputs={"query": q2, "key": k2, "value": k2}, attrs=heads,
                         extra={"cache": StoredCache(runs, "")}),
        "sampler": ask("TopKTopPSampler", "output.0", [(6,)], torch.int64,
                       inputs={"logits": draw(6, 40, dtype=torch.float32), "k": torch.tensor([3, 5, 1, 9, 2, 4])}),
        "rms_norm": ask("torch.ops._C.rms_norm", "inplace.input.0", [(6, 32)], args=(X * 0, X, W, 1e-5)),
        "fused_add": ask("torch.ops._C.fused_add_rms_norm", "inplace.input.0 inplace.input.1", [(6, 32)] * 2,
                         args=(X, draw(6, 32), W, 1e-5)),
        "silu_and_mul": ask("torch.ops._C.silu_and_mul", "inplace.input.0", [(6, 16)], args=(X[:, :16] * 0, X)),
        "rotary_embedding": ask("torch.ops._C.rotary_embedding", "inplace.input.1 inplace.input.2", [(6, 32), (6, 16)],
                                args=(POSITIONS, q2, k2, 8, table, True)),
        "flash, prefill": ask("torch.ops._vllm_fa2_C.varlen_fwd", "output.0", [(8, 4, 16)],
                              args=flash(draw(8, 4, 16), STARTS, 5, 3.0)),
        "flash, decode": ask("torch.ops._vllm_fa2_C.varlen_fwd", "output.0", [(3, 4, 16)],
                             args=flash(draw(3, 4, 16), torch.arange(4))),
        "attention on a CPU": ask("torch.ops._C.cpu_attention_with_kv_cache", "inplace.input.3", [(8, 4, 16)],
                                  args=on_cpu()),
        "aten.linear": ask("aten.linear.default", "output.0", [(6, 5)], args=(X, draw(5, 32), draw(5))),
        "mm": ask("aten.mm.default", "output.0", [(6, 5)], args=(X, draw(32, 5))),
        "addmm": ask("aten.addmm.default", "output.0", [(6, 5)], args=(draw(5), X, draw(32, 5))),
        "bmm": ask("aten.bmm.default", "output.0", [(2, 3, 5)], args=(draw(2, 3, 8), draw(2, 8, 5))),
        "softmax": ask("aten._softmax.default", "output.0", [(6, 9)], torch.float32,
                       args=(draw(6, 9, dtype=torch.float32), -1, False)),
        "fp8": ask("torch.ops._C.cutlass_scaled_mm", "inplace.input.0", [(5, 7)],
                   args=(draw(5, 7), *CODES, *scales, None)),
        "fp4": ask("torch.ops._C.cutlass_scaled_fp4_mm", "inplace.input.0", [(5, 7)],
                   args=(draw(5, 7), *four, tiles(5, 4), tiles(7, 4), torch.tensor(0.3))),
        "filter": ask("torch.ops.vendor.apply_top_k_top_p", "output.0", [(6, 12)], torch.float32,
                      args=(draw(6, 12, dtype=torch.float32), torch.tensor([3, 2, 5, 1, 7, 4]), None)),
    }  # fmt: skip


def rope_table(dim: int) -> torch.Tensor:
    angle = torch.arange(64, dtype=torch.float64)[:, None] * 1e4 ** (-torch.arange(0, dim, 2) / dim)
    return torch.cat((angle.cos(), angle.sin()), -1).bfloat16()


def answered(call: Call, wrong: bool) -> Call:
    """With results by the call's own reference, or with a wrong one."""
    found = TABLE.evaluate(call)
    assert not isinstance(found, Declined), found.reason
    outputs = {}
    for role, like in call.outputs.items():
        y = found[role].value.reshape(like.shape)
        if wrong and not like.dtype.is_floating_point:
            y = call.tensor("logits").argmin(-1)
        elif wrong:
            y = torch.where(torch.isfinite(y), y * 1.06, y)
        outputs[role] = y.to(like.dtype)
    return replace(call, outputs=outputs)


def statuses(root: Path) -> list[str]:
    calls = Calls(open_dump(root), None)
    taps = [(rank, tap) for rank, tap, _ in calls.taps()]
    rows = [r for of in taps for r in check_tap(calls, *of, lambda c: TABLE.evaluate(c.what), Options())]
    return [r.status for r in rows]


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("name", asked())
def test_what_was_written_is_judged_as_it_was(name: str, wrong: bool, tmp_path: Path) -> None:
    call = answered(asked()[name], wrong)
    folders = FlashFolders(tmp_path / "f")
    assert folders.add(Captured("x", 0, 3, 0, call, {})), folders.lines()
    found = statuses(tmp_path / "f")
    assert found
    assert set(found) == {"fail" if wrong else "pass"}
    for folder in (p for p in (tmp_path / "f").iterdir() if p.is_dir()):
        first, last = (json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines())
        assert (first["execution_status"], last["execution_status"]) == ("inputs_saved", "completed")
        assert last["accprobe"]["step"] == 3


def test_every_function_that_is_written_is_tried_above(tmp_path: Path) -> None:
    tried = {glob_of(c.cls) for c in asked().values()}
    untried = {"torch.ops._C.gelu_and_mul", "torch.ops._C.gelu_tanh_and_mul", "torch.ops._C.onednn_mm",
               "torch.ops._C.weight_packed_linear", "torch.ops._C.paged_attention_v1", "torch.ops.aten.topk",
               "torch.ops._C.paged_attention_v2", "torch.ops.*._npu_paged_attention", "flashinfer.*", "ParallelLMHead",
               "EncoderOnlyAttention"}  # fmt: skip
    assert {*MODULES, *OPERATORS} - tried == untried


def glob_of(cls: str) -> str:
    from fnmatch import fnmatchcase

    bare = "torch.ops." + ".".join(cls.removeprefix("torch.ops.").split(".")[:2]) if "." in cls else cls
    return max((g for g in (*MODULES, *OPERATORS) if fnmatchcase(bare, g)), key=len)


def test_a_workspace_costs_a_byte_and_is_whole_when_it_is_loaded(tmp_path: Path) -> None:
    FlashFolders(tmp_path / "f").add(Captured("x", 0, 0, 0, answered(asked()["flash, decode"], False), {}))
    (made,) = (tmp_path / "f").glob("*__init___call0001")
    assert (made / "inputs.pt").stat().st_size < 4000
    held = torch.load(made / "inputs.pt", weights_only=True)
    assert held["arg_1"].shape == (WORKSPACE,)
    assert held["arg_1"].to("meta", torch.int8).is_contiguous()  # what a copy to a device makes of it


REFUSED: dict[str, tuple[Callable[[Call], Call], str]] = {
    "norm": (lambda c: replace(c, inputs={"x": X.float()}), "bfloat16 and float16"),
    "flash, decode": (lambda c: replace(c, args=(*c.args[:9], torch.ones(4), *c.args[10:])), "ALiBi"),
    "linear": (lambda c: replace(c, params={"weight": torch.zeros(0)}), "packed"),
    "attention on a CPU": (
        lambda c: replace(c, args=(*c.args[:10], torch.full_like(PAGES, 77), *c.args[11:])), "outside of|not captured"),
    "fp8": (lambda c: replace(c, args=(*c.args[:3], torch.ones(5), *c.args[4:])), "one scale"),
    "mm": (lambda c: replace(c, args=(1, 2)), "cannot be told"),
    "silu": (lambda c: replace(c, cls="NobodyKnows"), "no function"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_flashinfer_has_not_is_refused_by_name(name: str, tmp_path: Path) -> None:
    change, why = REFUSED[name]
    call = change(answered(asked()[name], False))
    with pytest.raises(NotFlashInfers, match=why):
        flash_calls(call)
    folders = FlashFolders(tmp_path / "f")
    for _ in range(2):
        assert not folders.add(Captured("x", 0, 0, 0, call, {}))
    (line,) = folders.lines()
    assert line.startswith(f"2 calls of {call.cls} not written: ")
    assert not (tmp_path / "f").exists()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(tmp_path / "d", "layers.0.self_attn.attn")
    dump, out = str(tmp_path / "d"), str(tmp_path / "f")
    assert main(["gentest", dump, "--ops", "*", "--flashinfer", "--out", out]) == 0
    said = capsys.readouterr()
    assert "flashinfer replay --dir" in said.out
    assert "3 calls of NobodyKnows not written: FlashInfer has no function for it" in said.err
    # the zeroed slot is seen in the same requests: two of three calls, by one of the two kinds of FlashInfer's
    assert main(["opcheck", out, "--out", str(tmp_path / "o")]) == 1
    assert main(["gentest", dump, "--ops", "*", "--flashinfer", "--out", out]) == 2  # it exists
    assert main(["gentest", dump, "--ops", "NobodyKnows", "--flashinfer", "--out", str(tmp_path / "g")]) == 3
    # its own folders are written again, and are judged alike
    again = str(tmp_path / "again")
    assert main(["gentest", out, "--failed", "--flashinfer", "--out", again]) == 0
    assert set(statuses(Path(again))) == {"fail"}
