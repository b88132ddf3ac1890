"""FlashInfer's flight recorder: folders laid out as its api_logging.py lays them out, read, compared and judged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.formats import flashinfer, open_dump
from vllm_accprobe.opcheck.calls.records import Calls
from vllm_accprobe.opcheck.registry import default_references
from vllm_accprobe.opcheck.run.replay import Options, check_tap

NORM = "(input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-06, out: Optional[torch.Tensor] = None) -> None"
GATED = "(input: torch.Tensor, out: torch.Tensor = None, enable_pdl: Optional[bool] = None) -> torch.Tensor"


def record(
    root: Path, name: str, signature: str, inputs: Mapping[str, Any], outputs: Mapping[str, Any], *,
    call: int = 1, pid: int = 77, safetensors: bool = False, **more: Any,
) -> Path:  # fmt: skip
    """One call's folder, with both lines of its metadata."""
    folder = root / f"20260102_030405_{call:03d}_pid{pid}_{name}_call{call:04d}"
    folder.mkdir(parents=True)
    given = {k: v for k, v in inputs.items() if isinstance(v, torch.Tensor)}
    for side, held in (("inputs", given), ("outputs", dict(outputs))):
        if held and safetensors:
            save_file({k: v.contiguous() for k, v in held.items()}, str(folder / f"{side}.safetensors"))
        elif held:
            torch.save(held, folder / f"{side}.pt")
    told = {
        "function_name": name, "module": "flashinfer.x", "call_sequence": call, "process_id": pid,
        "input_metadata": {k: v for k, v in inputs.items() if not isinstance(v, torch.Tensor)}, "output_metadata": {},
        "tensor_info": {"input_tensor_keys": list(given)}, "tensor_format": "safetensors" if safetensors else "torch",
        "function_signature": signature, "execution_status": "inputs_saved", "graph_capture": False,
    }  # fmt: skip
    lines = [told, {**told, "execution_status": "completed", **more}]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)


def made(root: Path, wrong: float = 1.0, safetensors: bool = False) -> Path:
    g = torch.Generator().manual_seed(5)
    x, w = torch.randn(6, 64, generator=g).bfloat16(), (torch.rand(64, generator=g) + 0.5).bfloat16()
    garbage = torch.full_like(x, 7.0 if wrong == 1.0 else -7.0)
    some = {"safetensors": safetensors}
    record(root, "rmsnorm", NORM, {"arg_0": x, "arg_1": w, "arg_2": 1e-5}, {"result": normed(x, w, 1e-5)}, **some)
    record(root, "rmsnorm", NORM, {"arg_0": x, "arg_1": w, "kwarg_eps": 1e-3, "kwarg_out": garbage},
           {"result": normed(x, w, 1e-3)}, call=2, **some)  # fmt: skip
    gate, up = x.float().chunk(2, -1)
    y = (torch.nn.functional.silu(gate) * up * wrong).bfloat16()
    record(root, "silu_and_mul", GATED, {"arg_0": x, "arg_1": garbage[:, :32].clone()}, {"result": y}, call=3, **some)
    record(root, "fused_add_rmsnorm", NORM, {"arg_0": x, "arg_1": x, "arg_2": w} if not safetensors else
           {"arg_0": x, "arg_1": x.clone(), "arg_2": w}, {}, call=4, **some)  # fmt: skip
    return root


def judged(path: Path) -> dict[str, list[tuple[str, str]]]:
    calls, references = Calls(open_dump(path), None), default_references()
    return {
        tap: [
            (r.status, r.message) for r in check_tap(calls, rank, tap, lambda c: references.evaluate(c.what), Options())
        ]
        for rank, tap, _ in calls.taps([])
    }


@pytest.mark.parametrize("safetensors", [False, True])
def test_calls_are_judged(tmp_path: Path, safetensors: bool) -> None:
    found = judged(made(tmp_path / "d", wrong=1.1, safetensors=safetensors))
    assert [s for s, _ in found["::flashinfer.rmsnorm"]] == ["pass", "pass"]
    assert [s for s, _ in found["::flashinfer.silu_and_mul"]] == ["fail"]
    assert not {s for s, _ in found.get("::flashinfer.fused_add_rmsnorm", [])} & {"pass", "fail"}
    assert [s.tap for s in open_dump(tmp_path / "d").skips if s.reason == flashinfer._IN_PLACE] == [
        "::flashinfer.fused_add_rmsnorm"
    ]


@pytest.mark.parametrize("wrong", [False, True])
def test_each_function_by_its_own_formula(tmp_path: Path, wrong: bool) -> None:
    """Against torch's own functions in float32; ``wrong`` gives each function the result of another one."""
    g = torch.Generator().manual_seed(9)
    x, w, b = torch.randn(8, 64, generator=g), torch.rand(64, generator=g) + 0.5, torch.randn(64, generator=g)
    x, root, signature = x.bfloat16(), tmp_path / "d", "(a, b, c, d)"
    m = torch.randn(64, 48, generator=g).bfloat16()
    heat = torch.linspace(0.5, 2.0, 8)
    f, gate, up = torch.nn.functional, *x.float().chunk(2, -1)
    rows = {
        "gemma_rmsnorm": ({"arg_0": x, "kwarg_weight": w}, normed(x, w if wrong else 1 + w, 1e-6)),
        "layernorm": ({"arg_0": x, "arg_1": w, "arg_2": b},
                      f.layer_norm(x.float(), (64,), w, None if wrong else b, 1e-6).bfloat16()),
        "gelu_and_mul": ({"arg_0": x}, (f.gelu(up if wrong else gate) * (gate if wrong else up)).bfloat16()),
        "gelu_tanh_and_mul": ({"arg_0": x},
                              ((f.silu(gate) if wrong else f.gelu(gate, approximate="tanh")) * up).bfloat16()),
        "softmax": ({"arg_0": x.float(), "kwarg_temperature": heat},
                    torch.softmax(x.float() / (1.0 if wrong else heat[:, None]), -1)),
        "mm_bf16": ({"arg_0": x, "arg_1": m}, (x.float() @ m.float() * (1.05 if wrong else 1.0)).bfloat16()),
    }  # fmt: skip
    for name, (inputs, y) in rows.items():
        record(root, name, signature, inputs, {"result": y})
    found = judged(root)
    assert {tap: [s for s, _ in r] for tap, r in found.items()} == {
        f"::flashinfer.{name}": ["fail" if wrong else "pass"] for name in rows
    }


def test_buffers_are_not_compared(tmp_path: Path) -> None:
    assert compare(made(tmp_path / "a"), made(tmp_path / "a2")).verdict == "pass"
    differ = compare(tmp_path / "a", made(tmp_path / "b", wrong=1.1))
    assert {o["module"] for o in differ.origins} == {"::flashinfer.silu_and_mul"}
    assert sum(s.reason == flashinfer._BUFFER for s in open_dump(tmp_path / "a").skips) == 2


def test_inside_a_graph_is_not_judged(tmp_path: Path) -> None:
    """A result that would fail is skipped, and says why; outside of a graph it fails; `compare` has its tensors."""
    x, w = torch.randn(4, 32).bfloat16(), torch.ones(32).bfloat16()
    for root, graph in ((tmp_path / "in", True), (tmp_path / "out", False)):
        record(root, "rmsnorm", NORM, {"arg_0": x, "arg_1": w}, {"result": x * 9}, graph_capture=graph)
        record(root, "rmsnorm", NORM, {"arg_0": x, "arg_1": w}, {"result": normed(x, w, 1e-6)}, call=2)
    inside, outside = (judged(tmp_path / n)["::flashinfer.rmsnorm"] for n in ("in", "out"))
    assert [s for s, _ in outside] == ["fail", "pass"]
    assert [s for s, _ in inside] == ["skip", "pass"]
    assert flashinfer._GRAPH in inside[0][1]
    roles = {r.role for r in open_dump(tmp_path / "in").records if r.call == 0}
    assert roles == {"input.0", "input.1", "output.0"}


PLAN = "(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, heads: int, *, causal=False)"


def attention(root: Path, *, wrong: bool = False, plan: bool = True) -> Path:
    """An object made, planned twice and run twice; another object at another address between."""
    g = torch.Generator().manual_seed(3)
    cls, workspace = "BatchPrefillWithPagedKVCacheWrapper", torch.full((64,), 7, dtype=torch.uint8)
    of = {"arg_0": {"type": cls, "repr": "<x>"}}
    call = 0

    def one(method: str, who: int, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        nonlocal call
        call += 1
        signature = PLAN if method == "plan" else "(self, float_workspace_buffer, kv_layout='NHD')"
        record(root, f"{cls}.{method}", signature, {**of, **inputs}, outputs, call=call, self_id=who, process_id=77)

    for who in (1, 2):
        one("__init__", who, {"arg_1": workspace, "arg_2": "NHD"}, {})
    for length in (5, 7):
        q, k, v = (torch.randn(s, h, 8, generator=g).bfloat16() for s, h in ((2, 4), (8, 2), (8, 2)))
        told = [torch.tensor(t, dtype=torch.int32) for t in ([0, 2], [0, 2], [1, 0], [length - 4])]
        if plan:
            one("plan", 1, {**{f"arg_{n + 1}": t for n, t in enumerate(told)}, "arg_5": 4, "kwarg_causal": True}, {})
        one("plan", 2, {f"arg_{n + 1}": t * 0 for n, t in enumerate(told)}, {})
        pages = [t.reshape(2, 4, 2, 8) for t in (k, v)]
        rows = [t[[1, 0]].reshape(8, 2, 8)[:length].float().repeat_interleave(2, 1) for t in pages]
        scores = torch.einsum("nhd,mhd->hnm", q.float(), rows[0]) * 8**-0.5
        hidden = torch.arange(length)[None] > length - 2 + torch.arange(2)[:, None]
        p = torch.softmax(scores if wrong else scores.masked_fill(hidden, -torch.inf), -1)
        y = torch.einsum("hnm,mhd->nhd", p, rows[1]).bfloat16()
        cache = {"type": "tuple", "length": 2, "truncated": False,
                 "items": [{"type": "torch.Tensor", "tensor_key": f"arg_2__{n}"} for n in range(2)]}  # fmt: skip
        one("run", 1, {"arg_1": q, "arg_2": cache, **{f"arg_2__{n}": t for n, t in enumerate(pages)}}, {"result": y})
    return root


def test_a_run_is_judged_by_its_own_plan(tmp_path: Path) -> None:
    """The last plan of its own object, not another object's and not an earlier one."""
    tap = "::flashinfer.BatchPrefillWithPagedKVCacheWrapper.run"
    assert [s for s, _ in judged(attention(tmp_path / "a"))[tap]] == ["pass", "pass"]
    assert [s for s, _ in judged(attention(tmp_path / "b", wrong=True))[tap]] == ["fail", "fail"]
    unplanned = judged(attention(tmp_path / "c", plan=False))[tap]
    assert [s for s, _ in unplanned] == ["skip", "skip"]
    assert "no plan" in unplanned[0][1]
    dump = open_dump(tmp_path / "a")
    assert sum(s.reason == flashinfer._TOLD for s in dump.skips) == 6
    assert {r.role for r in dump.records} >= {"input.plan.qo_indptr", "input.2.0", "output.0"}
    assert not any("workspace" in r.role for r in dump.records)
    assert compare(tmp_path / "a", attention(tmp_path / "a2")).verdict == "pass"


def test_hostile(tmp_path: Path) -> None:
    """Each is one line, and leaves the others as they are."""
    root = made(tmp_path / "d")
    whole = len(open_dump(root).records)
    x = torch.ones(2, 8)
    bad = [record(root, "rmsnorm", NORM, {"arg_0": x}, {"result": x}, call=k) for k in range(10, 15)]
    (bad[0] / "metadata.jsonl").write_text("{" * 5000)
    (bad[1] / "metadata.jsonl").write_text("")
    (bad[2] / "metadata.jsonl").write_text(json.dumps({"function_name": "../../etc", "execution_status": "completed"}))
    (bad[3] / "inputs.pt").unlink()
    (bad[3] / "inputs.pt").symlink_to(root)
    (bad[4] / "inputs.pt").write_bytes((bad[4] / "inputs.pt").read_bytes()[:40])
    (root / "20260102_030405_999_pid77_rmsnorm_call0099").symlink_to(tmp_path)
    dump = open_dump(root)
    assert len(dump.records) == whole
    assert sum(s.reason == "file that cannot be read" for s in dump.skips) == 6
    assert all("\n" not in line for line in dump.problems)


def test_no_code_of_a_pickle_runs(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    folder = record(tmp_path / "d", "rmsnorm", NORM, {"arg_0": torch.ones(2)}, {"result": torch.ones(2)})
    torch.save({"arg_0": Evil()}, folder / "inputs.pt")
    made(tmp_path / "d2")
    folder.rename(tmp_path / "d2" / folder.name.replace("0001", "0009"))
    assert open_dump(tmp_path / "d2").skips
    assert not (tmp_path / "ran").exists()
