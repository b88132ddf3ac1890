"""Operators of the real engine: each captured call of PyTorch, made again from the dump, gives the same bits.

One engine per kind of model (dense, experts, latent attention, pictures) with VLLM_ACCPROBE_OPS=1. Making a call again
proves its arguments, their strides and what it changed in place, without any word of the tap about itself; the cache's
blocks that an operator touches are there, and opcheck judges attention and writes by them.
"""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.captures import FIVE, VISION, Engines, explain
from support.kernels import amx
from support.opchecked import check

from vllm_accprobe.dump.journal import inputs
from vllm_accprobe.dump.reader import Dump, open_dump
from vllm_accprobe.dump.schema import OpCall, Record
from vllm_accprobe.opcheck.calls.operator_calls import Renumbered, numbered
from vllm_accprobe.opcheck.calls.records import Calls
from vllm_accprobe.opcheck.registry import default_references
from vllm_accprobe.opcheck.run.result_row import CheckResult

pytestmark = pytest.mark.engine

MODELS = {
    "qwen2": {"_C.rotary_embedding.default", "vllm.unified_attention_with_output.default"},
    "qwen2-moe": {"_C.cpu_fused_moe.default", "aten.topk.default", "aten.softmax.int"},
    "deepseek-v2": {"vllm.unified_mla_attention_with_output.default", "_C.mla_decode_kvcache.default", "aten.bmm.out"},
    "qwen2.5-vl": {"aten.scaled_dot_product_attention.default", "vllm.torch_sdpa_wrapper.default", "aten.gelu.default"},
}
"""Operators that only a capture of this kind of model, opened opaque operators included, can show."""
NOT_WITH_AMX = {"_C.mla_decode_kvcache.default", "aten.bmm.out"}
PRODUCTS = {"_C.onednn_mm.default", "_C.weight_packed_linear.default", "aten.linear.default"}
"""What vLLM takes for a linear module, by what the processor has (layers/utils.py: dispatch_cpu_unquantized_gemm)."""
EACH = [
    "qwen2", pytest.param("qwen2-moe", marks=pytest.mark.extra("as qwen2; experts: test_patches_engine.py")),
    "deepseek-v2", pytest.param("qwen2.5-vl", marks=pytest.mark.extra("as qwen2; pictures: test_convert_engine.py")),
]  # fmt: skip


@pytest.fixture(scope="module")
def dumps(engines: Engines) -> Any:
    """By model: the run, and its dump."""
    done: dict[str, Any] = {}

    def of(model: str) -> Any:
        if model not in done:
            asks = VISION if model == "qwen2.5-vl" else FIVE
            run = engines.run(f"{model}-operators", model, asks, env={"VLLM_ACCPROBE_OPS": "1"})
            done[model] = run, open_dump(run.dump)
        return done[model]

    return of


def products(engines: Engines) -> set[str]:
    """The operators that are to be expected of linear modules: where oneDNN has no kernel for bfloat16 (no AVX-512),
    vLLM tells in its log that it takes torch's; where the processor has AMX, it packs small weights its own way."""
    if "fallback to torch linear" in engines.host().log.read_text(errors="replace"):
        return {"aten.linear.default"}
    return PRODUCTS - {"aten.linear.default"} if torch.cpu._is_amx_tile_supported() else {"_C.onednn_mm.default"}


class Again:
    """Makes captured calls again."""

    def __init__(self, dump: Dump) -> None:
        self.dump = dump
        self.numbers: dict[str, Renumbered] = {}
        taps = {call.tap for call in dump.ops}
        self.records = {(r.step, r.tap, r.call, r.role): r for r in dump.records if r.tap in taps}

    def tensor(self, record: Record, stride: list[int]) -> torch.Tensor:
        bits = self.dump.read(record).copy()
        flat = torch.from_numpy(bits.reshape(-1).view("u1")).view(getattr(torch, record.dtype))
        dense = flat.view(record.shape)
        span = 1 + sum((n - 1) * s for n, s in zip(record.shape, stride, strict=True)) if dense.numel() else 0
        out = torch.zeros(span, dtype=dense.dtype).as_strided(record.shape, stride)
        return out.copy_(dense) if 0 not in stride else dense

    def value(self, call: OpCall, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if "tensor" in value:
            t = value["tensor"]
            record = self.records.get((call.step, call.tap, call.call, t["role"]))
            if record is None:
                assert t.get("fresh"), (call.tap, t)
                return torch.empty_strided(t["shape"], t["stride"], dtype=getattr(torch, t["dtype"]))
            if t.get("blocks"):  # the touched blocks are the whole cache now
                return self.tensor(record, [math.prod(record.shape[n + 1 :]) for n in range(len(record.shape))])
            found = self.tensor(record, t["stride"])
            return self.numbers[t["role"]](found) if t["role"] in self.numbers else found
        if "list" in value:
            return [self.value(call, v) for v in value["list"]]
        if "float" in value:
            return float(value["float"])
        if "skipped" in value:
            raise LookupError(value["skipped"])
        ((kind, word),) = value.items()
        return torch.device(word) if kind == "device" else getattr(torch, word)

    def differs(self, call: OpCall) -> str | None:
        """Runs ``call``; what came out otherwise than in the dump, or None. LookupError: an argument was not kept."""
        namespace, name, overload = call.op.split(".")
        held = {role: r for (*place, role), r in self.records.items() if place == [call.step, call.tap, call.call]}
        self.numbers = numbered(call, held, lambda r: self.tensor(r, [1]))
        args = [self.value(call, v) for v in call.args]
        kwargs = {k: self.value(call, v) for k, v in call.kwargs.items()}
        result = getattr(getattr(getattr(torch.ops, namespace), name), overload)(*args, **kwargs)
        found = {f"output.{i}": t for i, t in enumerate(result if isinstance(result, (tuple, list)) else [result])}
        for role in call.mutates:
            key = role.partition(".")[2]
            found[f"inplace.{role}"] = args[int(key)] if key.isdigit() else kwargs[key]
        for role, mine in found.items():
            record = self.records.get((call.step, call.tap, call.call, role))
            if record is None:
                continue
            bits = mine.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if mine.numel() else b""
            if bits != self.dump.read(record).tobytes():
                return role
        return None


@pytest.mark.parametrize("model", EACH)
def test_pytorchs_operators_give_the_same_bits_again(dumps: Any, model: str) -> None:
    _, dump = dumps(model)
    assert dump.problems == []
    assert dump.errors == []
    again = Again(dump)
    seen: Counter[str] = Counter()
    odd: dict[str, str] = {}
    with torch.inference_mode():
        for call in dump.ops:
            # One call of each operator in each module and step is proof enough, and takes seconds.
            if not call.op.startswith("aten.") or call.call or call.step not in (0, 3):
                continue
            try:
                role = again.differs(call)
            except LookupError as why:
                seen[str(why)] += 1
                continue
            seen["made again"] += 1
            # oneDNN's product with AMX gave other bits in this process than in the engine (the pictures' patches).
            if role is not None and not (amx() and call.op == "aten.linear.default"):
                odd[f"{call.tap} step {call.step}"] = role
    assert odd == {}
    assert seen["made again"] > 100
    assert sum(seen.values()) - seen["made again"] == seen["the KV cache"], seen


def checked(dump: Dump) -> list[CheckResult]:
    """What opcheck says of the operators that read or write the cache."""
    return list(check(Calls(dump, None), default_references(), ops=["_C.*cache*", "_C.*attention*"]))


@pytest.mark.parametrize("model", EACH)
def test_what_a_model_calls_is_there_with_its_place(engines: Engines, dumps: Any, model: str) -> None:
    run, dump = dumps(model)
    ops = {call.op for call in dump.ops}
    assert MODELS[model] - (NOT_WITH_AMX if amx() else set()) <= ops
    # latent attention needs kv_b_proj's weight as it is, so vLLM packs it nowhere
    linear = {m.tap for m in dump.modules[0] if m.cls.endswith("ParallelLinear") and not m.tap.endswith("kv_b_proj")}
    by_module: dict[str | None, set[str]] = {}
    for call in dump.ops:
        if call.op in PRODUCTS and call.module in linear:
            by_module.setdefault(call.module, set()).add(call.op)
    assert len(by_module) >= len(linear) / 4  # the others are called by another path of the same module
    assert all(len(found) == 1 and found <= products(engines) for found in by_module.values()), by_module
    assert {call.step for call in dump.ops} == set(range(int(run.metrics["steps"])))
    modules = {m.tap for m in dump.modules[0]}
    assert {call.module for call in dump.ops} <= {None, *modules}
    by_step = Counter(call.step for call in dump.ops if call.step)
    assert len(set(by_step.values())) == 1, by_step  # every decode step calls the same operators
    reasons: Counter[str] = Counter()
    for skip in dump.skips:
        reasons[skip.reason] += skip.count
    attention = [call for call in dump.ops if call.op.startswith("vllm.unified") and "attention" in call.op]
    layers = len({call.module for call in attention})
    assert layers == {"qwen2": 4, "qwen2-moe": 3, "deepseek-v2": 3, "qwen2.5-vl": 3}[model]
    assert len(attention) == layers * run.metrics["steps"]
    assert all("output" in {r.split(".")[0] for r in c.mutates} or c.mutates for c in attention)
    blocks = [t["blocks"] for call in dump.ops for t in inputs(call) if t.get("blocks")]
    assert len(blocks) >= len(attention)  # each layer writes to its cache or reads it in every step
    judged = {c.tap: c.status for c in checked(dump) if "::_C." in c.tap and ("cache" in c.tap or "attention" in c.tap)}
    assert judged
    # Writing and reading the cache of latent attention with AMX has operators of its own, without references.
    assert set(judged.values()) == ({"skip"} if model == "deepseek-v2" and amx() else {"pass"}), judged
    assert reasons["a view, computes nothing"] > len(dump.ops) / 2


def test_modules_and_tokens_are_what_they_are_without(engines: Engines, dumps: Any, compared: Any) -> None:
    run, _ = dumps("qwen2")
    plain = engines.run("plain")
    assert run.tokens == plain.tokens
    result = compared(plain, run)
    assert result.verdict == "pass", explain(result)
    assert all(pair.identical for pair in result.pairs)
    assert result.coverage["skipped"]["operator calls are in one of the dumps only"] > 1000


def test_a_sample_is_small_and_complete_and_another_run_is_clean(engines: Engines, dumps: Any, compared: Any) -> None:
    full, _ = dumps("qwen2")
    env = {"VLLM_ACCPROBE_OPS": "1", "VLLM_ACCPROBE_OPS_MODE": "sample", "VLLM_ACCPROBE_OPS_CALLS": "2"}
    run = engines.run("qwen2-operators-sample", "qwen2", FIVE, env=env)
    dump = open_dump(run.dump)
    kept: dict[str, set[tuple[int, str, int]]] = {}
    for r in dump.records:
        if "::" in r.tap and r.step is not None:
            kept.setdefault(r.cls, set()).add((r.step, r.tap, r.call))
    calls = Counter(call.op for call in dump.ops)
    assert {op: len(found) for op, found in kept.items()} == {op: min(n, 2) for op, n in calls.items() if op in kept}
    assert set(calls) - set(kept) <= {"aten.fill_.Tensor"}
    assert all("min" in t for c in dump.ops for t in inputs(c) if t["shape"] and 0 not in t["shape"]
               and not t.get("fresh"))  # fmt: skip
    without = _stored(engines.run("plain").dump)
    # each weight is stored where aten.linear takes it, in a sample as in the whole; of the rest a quarter is left
    assert _stored(run.dump) - without < 0.6 * (_stored(full.dump) - without)
    result = compared(full, run)
    assert result.verdict == "pass", explain(result)
    assert {p.tap for p in result.pairs if p.cls == "aten.silu.default"} == {
        tap for _, tap, _ in kept["aten.silu.default"]
    }
    assert all(p.identical for p in result.pairs if "::" in p.tap)


def _stored(dump: Path) -> int:
    return sum(file.stat().st_size for file in dump.rglob("*.safetensors"))
