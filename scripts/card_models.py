"""``scripts/card.sh --models``: whole models of transformers on this machine's device, captured and judged.

The problem: taps, copies from the device and the judgement of real kernels cannot be tried where there is no device.
The idea: tiny models with random weights run on the CPU (golden) and on the device, in each dtype and kind of
attention, compiled, and with one planted fault each; `accprobe compare` must pass the clean ones and name the fault
first. Their operator calls are captured too, for `accprobe opcheck`, and the forward of a wider model is timed with the
probe and without it. Not here: vLLM (card.py), taps in graphs (card_torch.py).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import transformers

from vllm_accprobe import Probe, begin_dump, end_dump

_BASE = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False, "rope_theta": 10000.0,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3_moe": ("Qwen3Moe", {**_EXPERTS, "head_dim": 32, "decoder_sparse_step": 1}),
    "deepseek_v2": ("DeepseekV2", {
        "num_key_value_heads": 4, "kv_lora_rank": 64, "q_lora_rank": 48, "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32, "v_head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "moe_intermediate_size": 96, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "head_dim": 16, "topk_method": "greedy",
    }),
    "qwen3_next": ("Qwen3Next", {
        **_EXPERTS, "head_dim": 32, "shared_expert_intermediate_size": 96, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    }),
}  # fmt: skip
LAYER = "model.layers.1"
PROMPTS = ([5, 17, 301, 44, 260, 9, 77, 500, 123, 31, 8, 402, 19, 66, 350, 210, 12], [7, 99, 208, 411, 3, 64, 150])
FORCED = ([11, 87, 300], [45, 12, 499])
"""The tokens of three decode steps: the same on all machines, whatever they would have chosen."""


def build(name: str, dtype: torch.dtype, attention: str, changes: dict[str, Any] | None = None) -> torch.nn.Module:
    """A model on the CPU; the same weights for the same name. Linear layers keep the size of what goes through them."""
    family, more = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**_BASE, **more, **(changes or {})})
    config._attn_implementation = attention
    torch.manual_seed(0)
    made = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for path, weight in made.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            if weight.dim() == 1:
                plain = weight.detach().clone()  # a norm's gain, some about 0; what a recurrence starts from
                weight.copy_(plain + 0.1 * drawn)
            else:
                gain = 4.0 if "head" in path else 1.0
                weight.copy_(drawn * (1.0 if "embed" in path else gain * drawn.shape[-1] ** -0.5))
    return made.to(dtype)


# --- faults: each changes one place of layer 1 ------------------------------------------------------------


def _wrong_scale(model: Any) -> None:
    for module in model.get_submodule(f"{LAYER}.self_attn").modules():
        if hasattr(module, "scaling"):
            module.scaling *= 1.1


def _no_residual(model: Any) -> None:
    layer, seen = model.get_submodule(LAYER), {}
    layer.mlp.register_forward_hook(lambda module, args, out: seen.update(out=out))
    forward = layer.forward

    def without(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        part = seen["out"][0] if isinstance(seen["out"], tuple) else seen["out"]
        return (part, *out[1:]) if isinstance(out, tuple) else part

    layer.forward = without


def _wrong_epsilon(model: Any) -> None:
    norm = model.get_submodule(f"{LAYER}.post_attention_layernorm")
    name = "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps"
    forward = norm.forward

    def other(x: torch.Tensor) -> torch.Tensor:
        kept = getattr(norm, name)
        setattr(norm, name, 1e-2)
        try:
            return forward(x)
        finally:
            setattr(norm, name, kept)

    norm.forward = other


def _exchanged(model: Any) -> None:
    for weight in model.get_submodule(f"{LAYER}.mlp.experts").parameters():
        if weight.dim() == 3:
            weight.data[[0, 1]] = weight.data[[1, 0]]


def _positions(model: Any) -> None:
    rope = model.get_submodule("model.rotary_emb")
    forward = rope.forward
    rope.forward = lambda x, position_ids, *args, **kwargs: forward(x, position_ids + 1, *args, **kwargs)


def _few_bits(model: Any) -> None:
    """Sums of 16 products are rounded to the model's dtype before they are added up."""
    linear = model.get_submodule(f"{LAYER}.self_attn.o_proj")

    def forward(x: torch.Tensor) -> torch.Tensor:
        total = None
        for part, weight in zip(x.split(16, -1), linear.weight.split(16, -1), strict=True):
            product = torch.nn.functional.linear(part, weight)
            total = product if total is None else total + product
        return total

    linear.forward = forward


FAULTS: dict[str, tuple[Callable[[Any], None], str, tuple[str, ...]]] = {
    "softmax scale": (_wrong_scale, f"{LAYER}.self_attn*", ("llama", "qwen3_moe", "deepseek_v2", "qwen3_next")),
    "no residual": (_no_residual, LAYER, ("llama", "qwen3_moe", "qwen3_next")),
    "epsilon": (_wrong_epsilon, f"{LAYER}.post_attention_layernorm", ("llama", "deepseek_v2")),
    "experts exchanged": (_exchanged, f"{LAYER}.mlp*", ("qwen3_moe", "deepseek_v2", "qwen3_next")),
    "rope off by one": (_positions, "model.rotary_emb", ("llama", "deepseek_v2")),
    "few bits": (_few_bits, f"{LAYER}.self_attn.o_proj", ("llama", "qwen3_next")),
}
"""What is done, where it must be named, and in which models."""


def compile_leaves(model: torch.nn.Module) -> None:
    """Each module without children computes what torch.compile makes of its class's forward; taps lie outside of it."""
    torch._dynamo.reset()
    torch._dynamo.config.cache_size_limit = 256
    forwards: dict[type, Any] = {}
    for module in model.modules():
        kind = type(module)
        if not any(True for _ in module.children()) and kind.__name__ not in ("Embedding", "ModuleList"):
            compiled = forwards.setdefault(kind, torch.compile(kind.forward, dynamic=False))
            module.forward = types.MethodType(compiled, module)  # type: ignore[method-assign]


def run(model: Any, device: torch.device) -> torch.Tensor:
    """Two prompts, one padded on the left, and three decode steps with the cache; the logits of the last one."""
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in PROMPTS])
    cache, out = None, None
    with torch.no_grad():
        for forced in (None, *zip(*FORCED, strict=True)):
            if forced is not None:
                ids = torch.tensor(forced)[:, None]
                mask = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], 1)
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            out = model(
                input_ids=ids.to(device), attention_mask=mask.to(device), position_ids=positions.to(device),
                past_key_values=cache, use_cache=True,
            )  # fmt: skip
            cache = out.past_key_values
    assert out is not None
    return out.logits


def capture(
    where: Path, name: str, dtype: torch.dtype, device: torch.device, attention: str = "sdpa", compiled: bool = False,
    fault: str | None = None, **settings: Any,
) -> bool:  # fmt: skip
    """Writes one dump; whether the probe changed no bit of the last logits."""
    model = build(name, dtype, attention).to(device)
    if fault:
        FAULTS[fault][0](model)
    if compiled:
        compile_leaves(model)
    bare = run(model, device)
    with Probe(model, dir=str(where), **settings):
        tapped = run(model, device)
    return torch.equal(bare, tapped)


WAYS: dict[str, dict[str, Any]] = {
    "eager": {"attention": "eager"}, "sdpa": {}, "compiled": {"compiled": True},
}  # fmt: skip


def cases(names: list[str], dtypes: list[str]) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """(model, dtype, the dump's name, what `capture` gets)."""
    faults = {fault.replace(" ", "-"): {"fault": fault} for fault in FAULTS}
    for name, dtype, (run, how) in itertools.product(names, dtypes, [*WAYS.items(), *faults.items()]):
        if run in WAYS or name in FAULTS[how["fault"]][2]:
            yield name, dtype, run, how


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm_accprobe", *arguments], capture_output=True, text=True, check=False
    )


def compared(golden: Path, mine: Path, out: Path) -> dict[str, Any]:
    done = cli("compare", str(golden), str(mine), "--out", str(out))
    found: dict[str, Any] = {"code": done.returncode, "text": (done.stdout + done.stderr)[-4000:]}
    with contextlib.suppress(OSError, ValueError):
        report = json.loads((out / "compare.json").read_text(encoding="utf-8"))
        origins = report["origins"]
        found |= {"verdict": report["verdict"], "pairs": report["coverage"]["pairs"]}
        found["first"] = origins[0]["module"] if origins else None
    return found


def models_part(
    out: Path, device: torch.device, names: list[str], dtypes: list[str], runs: str, judge: bool
) -> list[dict[str, Any]]:
    """A row for each case; judged in processes next to the captures that follow. The slow ones come last."""
    rows: list[dict[str, Any]] = []
    for name, dtype in itertools.product(names, dtypes):
        capture(out / name / dtype / "golden", name, getattr(torch, dtype), torch.device("cpu"), "eager")
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 4)) as pool:
        for name, dtype, dump, how in sorted(cases(names, dtypes), key=lambda case: "compiled" in case[3]):
            if runs and dump not in runs.split(","):
                continue
            row: dict[str, Any] = {"model": name, "dtype": dtype, "dump": dump, "fault": how.get("fault")}
            rows.append(row)
            try:
                row["same bits"] = capture(out / name / dtype / dump, name, getattr(torch, dtype), device, **how)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:300]
            if judge:
                pool.submit(judge_row, out, row)
    return rows


def judge_row(out: Path, row: dict[str, Any]) -> None:
    """Adds what `accprobe compare` says of a row's dump, and whether that is right."""
    folder = out / row["model"] / row["dtype"]
    if "error" in row:
        return
    row |= compared(folder / "golden", folder / row["dump"], folder / f"report-{row['dump']}")
    if row["fault"]:
        row["right"] = row["code"] == 1 and fnmatchcase(row.get("first") or "", FAULTS[row["fault"]][1])
    else:
        row["right"] = row["code"] == 0
    print(page([row]).splitlines()[-1], file=sys.stderr, flush=True)


# --- operator calls ------------------------------------------------------------

Draw = Callable[..., torch.Tensor]
F = torch.nn.functional
HALF = (torch.bfloat16, torch.float16)
FLOATS = (*HALF, torch.float32)


def _products(x: Draw) -> None:
    for m, k, n in ((1, 4096, 48), (16, 4096, 32), (64, 1024, 64), (7, 333, 129), (300, 64, 96)):
        a, b = x(m, k), x(n, k, size=k**-0.5)
        F.linear(a, b)
        F.linear(a, b, x(n))
    torch.bmm(x(4, 33, 512), x(4, 512, 64, size=0.05))
    torch.baddbmm(x(4, 33, 64), x(4, 33, 512), x(4, 512, 64, size=0.05), alpha=0.5)
    torch.einsum("bhqd,bhkd->bhqk", x(2, 4, 17, 64), x(2, 4, 17, 64))
    F.conv1d(x(2, 64, 40), x(64, 1, 4), padding=3, groups=64)
    F.conv2d(x(2, 3, 32, 32), x(16, 3, 8, 8, size=0.1), stride=8)


def _attention(x: Draw) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = x(1, 4, 100, 64), x(1, 4, 100, 64), x(1, 4, 100, 64)
    backends = [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    for backend in backends:
        for causal, rows in ((True, 100), (False, 100), (False, 1)):
            with contextlib.suppress(RuntimeError), sdpa_kernel(backend):
                F.scaled_dot_product_attention(q[:, :, :rows], k, v, is_causal=causal)


def _elementwise(x: Draw) -> None:
    a, b = x(17, 384), x(17, 384)
    w = 1.0 + x(384, size=0.1)
    for function in (
        F.silu, F.gelu, torch.exp, torch.tanh, torch.sigmoid, torch.erf, torch.sin, torch.cos, F.softplus, torch.relu,
        torch.neg, torch.square, torch.abs,
    ):  # fmt: skip
        function(a)
    F.gelu(a, approximate="tanh")
    for function in (torch.rsqrt, torch.sqrt, torch.log, torch.reciprocal):
        function(b.abs() + 0.01)
    for function in (torch.add, torch.mul, torch.div, torch.sub, torch.maximum):
        function(a, b)
    torch.pow(b.abs() + 0.01, 1.7)
    torch.addcmul(a, a, b)
    torch.softmax(a, -1)
    torch.log_softmax(4 * a, -1)
    torch.softmax(a, -1, dtype=torch.float32)
    for function in (torch.sum, torch.mean, torch.amax, torch.var, torch.logsumexp, torch.linalg.vector_norm):
        function(a, dim=-1)
    torch.cumsum(a, -1)
    F.rms_norm(a, (384,), w, 1e-6)
    F.layer_norm(a, (384,), w, b[0], 1e-5)
    F.group_norm(x(2, 64, 30), 8)
    torch.topk(a, 8)
    torch.sort(a, -1)
    F.embedding(torch.arange(17, device=a.device), a)
    torch.zeros_like(a).index_add_(0, torch.arange(17, device=a.device) % 7, b)
    torch.zeros_like(a).scatter_add_(1, torch.arange(384, device=a.device).expand(17, -1) % 100, b)
    a.to(torch.float32).to(torch.bfloat16)
    a.to(torch.float8_e4m3fn)
    torch.where(a > 0, a, b)
    F.normalize(a, dim=-1)
    torch.clamp(a, -1, 1)
    torch.lerp(a, b, 0.3)


def _eight_bits(x: Draw) -> None:
    a, b = x(32, 512).to(torch.float8_e4m3fn), x(64, 512).to(torch.float8_e4m3fn)
    one = torch.ones((), device=a.device)
    for fast in (False, True):
        torch._scaled_mm(a, b.t(), one * 0.5, one * 0.25, out_dtype=torch.bfloat16, use_fast_accum=fast)
        rows, columns = x(32, 1).abs().float(), x(1, 64).abs().float()
        torch._scaled_mm(a, b.t(), rows, columns, out_dtype=torch.bfloat16, use_fast_accum=fast)
    integers = [(8 * x(64, 128)).to(torch.int8), (8 * x(128, 64)).to(torch.int8)]
    torch._int_mm(*integers)


def _grouped(x: Draw) -> None:
    offsets = torch.tensor([16, 48, 48, 64], dtype=torch.int32, device=x(1).device)
    torch._grouped_mm(x(64, 128), x(4, 128, 96, size=0.1), offs=offsets)


def _set(path: str, value: Any) -> None:
    owner, _, name = path.rpartition(".")
    target = torch.backends
    for part in owner.split("."):
        target = getattr(target, part)
    setattr(target, name, value)


MATMUL = "cuda.matmul."
SPLIT = (f"{MATMUL}allow_bf16_reduced_precision_reduction", f"{MATMUL}allow_fp16_reduced_precision_reduction")
KERNELS: dict[str, tuple[tuple[Callable[[Draw], None], ...], tuple[torch.dtype, ...], dict[str, Any]]] = {
    "default": ((_products, _attention, _elementwise), FLOATS, {}),
    "whole-sums": ((_products, _attention), HALF, dict.fromkeys(SPLIT, False)),
    "tf32": ((_products, _attention), FLOATS[2:], {f"{MATMUL}allow_tf32": True, "cudnn.allow_tf32": True}),
    "fp16-sums": ((_products,), HALF[1:], {f"{MATMUL}allow_fp16_accumulation": True}),
    "fp8": ((_eight_bits, _grouped), HALF[:1], {}),
}
"""By name of a dump: what is called, with which dtypes, and the settings of torch.backends under which."""


def kernels_part(out: Path, device: torch.device) -> dict[str, Any]:
    """Operator calls with drawn inputs, one dump for each row of KERNELS; what could not be called."""
    failed: dict[str, Any] = {}
    for name, (functions, dtypes, settings) in KERNELS.items():
        before = {path: _get(path) for path in settings}
        generator = torch.Generator().manual_seed(1)
        begin_dump(out / "kernels" / name, mode="full", max_mb=64)
        try:
            for path, value in settings.items():
                _set(path, value)
            for dtype, function in itertools.product(dtypes, functions):
                try:
                    function(functools.partial(_drawn, generator, dtype, device))
                except Exception as error:
                    failed[f"{name} {dtype} {function.__name__}"] = f"{type(error).__name__}: {error}"[:300]
        finally:
            end_dump(close=True)
            for path, value in before.items():
                if value is not None:
                    _set(path, value)
    return failed


def _drawn(
    generator: torch.Generator, dtype: torch.dtype, device: torch.device, *shape: int, size: float = 1.0
) -> torch.Tensor:
    return (size * torch.randn(shape, generator=generator)).to(dtype).to(device)


def _get(path: str) -> Any:
    target: Any = torch.backends
    for part in path.split("."):
        target = getattr(target, part, None)
    return target


def calls_part(out: Path, device: torch.device, names: list[str]) -> dict[str, Any]:
    """The operators that the tiny models call on the device."""
    failed: dict[str, Any] = {}
    for name, (dtype, how) in itertools.product(names, OPERATORS.items()):
        try:
            capture(out / "calls" / f"{name}-{dtype}", name, getattr(torch, dtype), device, **how,
                    ops=True, ops_mode="sample", ops_calls=6)  # fmt: skip
        except Exception as error:
            failed[f"{name} {dtype}"] = f"{type(error).__name__}: {error}"[:300]
    return failed


OPERATORS: dict[str, dict[str, Any]] = {"bfloat16": {}, "float16": {"attention": "eager"}}


# --- cost ------------------------------------------------------------


def cost_part(out: Path, device: torch.device, wide: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a forward, bare and captured, and whether a tap waits for the device."""
    model = build("llama", torch.bfloat16, "sdpa", wide).to(device)
    found: dict[str, Any] = {}
    ids = torch.randint(3, 500, (1, 512), generator=torch.Generator().manual_seed(2))

    def prefill() -> Any:
        return model(input_ids=ids.to(device), use_cache=True)

    def timed(times: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for kind, rows in (("decode", 1), ("prefill", 512)):
            seconds = []
            for _ in range(times):
                cache = transformers.DynamicCache(config=model.config) if kind == "decode" else None
                _wait(device)
                begin = time.perf_counter()
                out = model(input_ids=ids[:, :rows].to(device), use_cache=True, past_key_values=cache)
                _wait(device)
                seconds.append(time.perf_counter() - begin)
            result[kind] = {"median_ms": statistics.median(seconds) * 1e3, "min_ms": min(seconds) * 1e3}
            result[f"{kind} bits"] = out.logits.float().sum().item(), out.logits.float().square().sum().item()
        return result

    with torch.no_grad():
        prefill()
        found["bare"] = timed(10)
        for task in ("stats", "tensor"):
            settings = {"task": task, "max_gb": 30, "parts": "input,output"}
            with Probe(model, dir=str(out / "cost" / task), **settings):
                model(input_ids=ids[:, :1].to(device))
                found[f"{task} waits"] = _waits(model, prefill, device)
                found[task] = timed(4)
        found["bare again"] = timed(10)
    return found


def _waits(model: Any, forward: Callable[[], Any], device: torch.device) -> str:
    """The first wait for the device inside a layer, "" where there is none."""
    if device.type != "cuda":
        return "not tried"
    undo, waits = [], ""

    def strict(inner: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return inner(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return run

    for layer in model.model.layers:
        undo.append((layer, layer.forward))
        layer.forward = strict(layer.forward)
    try:
        forward()
    except RuntimeError as error:
        waits = str(error)[:300]
    for layer, inner in undo:
        layer.forward = inner
    return waits


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


WIDE = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 16,
    "num_key_value_heads": 8, "max_position_embeddings": 1024,
}  # fmt: skip


def page(rows: list[dict[str, Any]]) -> str:
    lines = ["| model | dtype | run | verdict | named first | same bits with the probe | |", "| --- " * 7 + "|"]
    for r in rows:
        lines.append(
            f"| {r['model']} | {r['dtype']} | {r['dump']} | {r.get('verdict', r.get('error', '-'))} | "
            f"{r.get('first') or '-'} | {r.get('same bits')} | {'right' if r.get('right') else 'WRONG'} |"
        )
    return "\n".join(lines) + "\n"


PARTS = ("models", "calls", "kernels", "cost")


def main() -> int:
    parser = argparse.ArgumentParser(prog="card.sh --models", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("accprobe-card"), help="folder of the dumps and models.json")
    parser.add_argument("--device", help="cpu, cuda, npu, ...; by default the accelerator, else cpu")
    parser.add_argument("--models", default=",".join(MODELS), help="of " + ", ".join(MODELS))
    parser.add_argument("--dtypes", default="bfloat16,float16")
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    parser.add_argument("--runs", default="", help="some of: eager, sdpa, compiled, and faults (softmax-scale, ...)")
    parser.add_argument("--layers", type=int, default=16, help="of the model that is timed")
    parser.add_argument("--captures-only", action="store_true", help="judge nothing, to do it on another machine")
    args = parser.parse_args()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = torch.device(args.device) if args.device else accelerator or torch.device("cpu")
    names, parts = args.models.split(","), args.parts.split(",")
    found: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__}
    if "cost" in parts:
        found["cost"] = cost_part(args.out, device, WIDE | {"num_hidden_layers": args.layers})
    if "kernels" in parts:
        found["kernels failed"] = kernels_part(args.out, device)
    if "calls" in parts:
        found["calls failed"] = calls_part(args.out, device, names)
    rows = found["rows"] = []
    if "models" in parts:
        rows += models_part(args.out, device, names, args.dtypes.split(","), args.runs, not args.captures_only)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "models.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(json.dumps({k: v for k, v in found.items() if k != "rows"}, indent=1))
    print(page(rows))
    return 0 if all(r.get("right") for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
