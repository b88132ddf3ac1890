"""A rank's healed modules, on a toy whose operators are wrong by half: outputs, what stays, and what is reported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from vllm_accprobe.capture.vllm.step_observer import BlockMoves, EngineStep
from vllm_accprobe.capture.vllm.vllm_compat import LayerBatch
from vllm_accprobe.config import ConfigError, ProbeConfig
from vllm_accprobe.heal import outcome
from vllm_accprobe.heal.healing import HealObserver
from vllm_accprobe.heal.live_calls import rounded_once, same_path, with_right_experts
from vllm_accprobe.heal.written_rows import UNWRITTEN, WrittenRows
from vllm_accprobe.opcheck.reference import Call, Declined

HEADS, KV, HEAD, WIDTH, VOCABULARY = 4, 2, 8, 32, 24
B16 = torch.bfloat16


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(B16)


class RMSNorm(nn.Module):
    """Adds in place where it gets a residual, as vLLM's kernel does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(drawn(WIDTH, seed=1)), 1e-5

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return x  # the fault: it hands on what its caller still needs
        residual.add_(x)
        return x.mul_(1.5), residual


class RowParallelLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(drawn(WIDTH, WIDTH, seed=2))
        self.tp_size, self.reduce_results = 1, True

    def forward(self, input_: torch.Tensor) -> Any:
        return 1.5 * input_ @ self.weight.T, None


class SiluAndMul(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[..., : WIDTH // 2] * 0


class RotaryEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.rotary_dim, self.head_size, self.is_neox_style = 10000.0, HEAD, HEAD, True

    def forward(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> Any:
        query.mul_(1.5)
        return query, key.mul_(1.5)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_size, self.scale = HEADS, KV, HEAD, HEAD**-0.5
        self.layer_name, self.sliding_window = "attn", None

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return query * 0


class ParallelLMHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(drawn(VOCABULARY, WIDTH, seed=3))
        self.quant_method = SimpleNamespace(apply=self.apply_)

    @staticmethod
    def apply_(layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        return 1.5 * x @ layer.weight.T


class LogitsProcessor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.soft_cap = 0.5, None

    def forward(self, lm_head: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return lm_head.quant_method.apply(lm_head, hidden_states) * 0.75


class Block(nn.Module):
    """No operator: it has no reference."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.proj, self.act = RMSNorm(), RowParallelLinear(), SiluAndMul()
        self.rope, self.attn = RotaryEmbedding(), Attention()

    def forward(self, run: Callable[[Block], Any]) -> Any:
        return run(self)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block()])
        self.lm_head, self.logits_processor = ParallelLMHead(), LogitsProcessor()

    def forward(self, run: Callable[[Model], Any]) -> Any:
        return run(self)


def observer(words: str, path: Path | None = None, *, level: int = 0, sampler: Any = None) -> HealObserver:
    """Of a loaded toy, in a step."""
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(mode=level, cudagraph_mode=None), cache_config=SimpleNamespace(block_size=4),
        model_config=SimpleNamespace(enforce_eager=not level, model="", hf_config=None),
    )  # fmt: skip
    model = Model()
    runner = SimpleNamespace(vllm_config=config, sampler=sampler)
    adapter: Any = SimpleNamespace(parallel={"rank": 0}, runner=runner, model=lambda: model)
    made = HealObserver(ProbeConfig(heal=tuple(words.split(",")), dir=str(path) if path else ""), adapter)
    made.loaded()
    made.begin_step(EngineStep(0, {}, 0, [], [], dict))
    return made


def model_of(made: HealObserver) -> Model:
    found = made._adapter.model()
    assert isinstance(found, Model)
    return found


def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w.double()


def turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    x = x.double().reshape(len(x), -1, HEAD)
    angle = positions.double()[:, None, None] * 10000.0 ** (-torch.arange(0, HEAD, 2).double() / HEAD)
    a, b = x.chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1).flatten(1)


X, Y, POSITIONS = drawn(6, WIDTH, seed=4), drawn(6, WIDTH, seed=5), torch.arange(3, 9)


def plain_norm(m: Model) -> Any:
    x = X.clone()
    y = m.layers[0].norm(x)
    assert torch.equal(x, X)  # the caller's residual
    return [(y, norm(X, m.layers[0].norm.weight))]


def fused_norm(m: Model) -> Any:
    x, residual = X.clone(), Y.clone()
    y, total = m.layers[0].norm(x, residual)
    assert y is x
    assert total is residual  # in place, as the kernel has it
    right = norm(X.double() + Y.double(), m.layers[0].norm.weight)
    return [(y, right), (total, X.double() + Y.double())]


def linear(m: Model) -> Any:
    y, bias = m.layers[0].proj(X)
    assert bias is None
    return [(y, X.double() @ m.layers[0].proj.weight.double().T)]


def activation(m: Model) -> Any:
    gate, up = X.double().chunk(2, -1)
    return [(m.layers[0].act(X), gate * gate.sigmoid() * up)]


def rotary(m: Model) -> Any:
    both = torch.cat((X, Y), -1)
    q, k = both[:, :WIDTH], both[:, WIDTH:]
    y, z = m.layers[0].rope(POSITIONS, q, k)
    assert y.data_ptr() == both.data_ptr()
    return [(y, turned(X, POSITIONS)), (k, turned(Y, POSITIONS)), (z, turned(Y, POSITIONS))]


def head(m: Model) -> Any:
    y = m.lm_head.quant_method.apply(m.lm_head, X)
    return [(y, X.double() @ m.lm_head.weight.double().T)]


def logits(m: Model) -> Any:
    """From the head's own output, which is wrong by half."""
    return [(m.logits_processor(m.lm_head, X), 0.5 * (1.5 * X @ m.lm_head.weight.T).double())]


CASES: dict[str, tuple[str, Callable[[Model], Any]]] = {
    "norm": ("layers.*.norm", plain_norm), "fused norm": ("RMSNorm", fused_norm), "linear": ("layers.0.proj", linear),
    "activation": ("*.act", activation), "rotary": ("layers.0.rope", rotary), "head": ("lm_head", head),
    "logits": ("logits_processor", logits),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_an_output_is_its_reference_rounded_once(name: str) -> None:
    words, run = CASES[name]
    made = observer(words)
    assert all(torch.equal(got, rounded_once(right, B16).reshape(got.shape)) for got, right in model_of(made)(run))
    made.end_step()
    assert sum(made.outcome.healed.values()) == 1
    assert made.outcome.left == {}
    outside = [torch.equal(got, rounded_once(right, B16).reshape(got.shape)) for got, right in model_of(made)(run)]
    assert not any(outside[:1])  # there, the fault is


def test_rounding_is_one() -> None:
    """Just above the middle of two numbers of bfloat16, where float32 lies on the middle itself."""
    for sign in (1.0, -1.0):
        x = sign * (1.0 + 2.0**-8 + torch.tensor([2.0**-40, -(2.0**-40), 0.0], dtype=torch.float64))
        assert rounded_once(x, B16).tolist() == [sign * (1 + 2.0**-7), sign, sign]
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), 1e300, 65504.0], dtype=torch.float64)
    for dtype in (B16, torch.float16, torch.float32):
        assert torch.equal(rounded_once(special, dtype), special.to(dtype))
    assert bool(rounded_once(torch.tensor([float("nan")], dtype=torch.float64), B16).isnan())


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The engine's forward context, whose metadata a test sets."""
    context = ModuleType("vllm.forward_context")
    now = SimpleNamespace(attn_metadata={}, slot_mapping={})
    context.get_forward_context = lambda: now  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.forward_context", context)

    def put(begins: list[int], lengths: list[int], table: list[list[int]]) -> LayerBatch:
        tensors = (torch.tensor(t) for t in (begins, lengths, table))
        b, n, blocks = tensors
        batch = LayerBatch(torch.zeros(0), blocks, b, n)
        requests, at = batch.rows()
        slots = blocks[requests, at // 4] * 4 + at % 4
        now.attn_metadata["attn"] = SimpleNamespace(query_start_loc=b.int(), seq_lens=n.int(), block_table=blocks.int())
        now.slot_mapping["attn"] = torch.cat((slots, torch.tensor([-1])))  # a row of padding
        return LayerBatch(slots, blocks, b, n)

    return put


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The last rows of a sequence: q [n, width], k and v [m, kv width]."""
    q, k, v = q.double().reshape(-1, HEADS, HEAD), *(t.double().reshape(-1, KV, HEAD) for t in (k, v))
    k, v = (t.repeat_interleave(HEADS // KV, 1) for t in (k, v))
    s = torch.einsum("nhd,mhd->hnm", q, k) * HEAD**-0.5
    at = torch.arange(len(k) - len(q), len(k))
    s = s.masked_fill(torch.arange(len(k))[None, :] > at[:, None], float("-inf"))
    return torch.einsum("hnm,mhd->nhd", s.softmax(-1), v).flatten(1)


@torch.inference_mode()
def test_attention_looks_back_through_blocks(batches: Any) -> None:
    """A prompt of 6 in two chunks; then its next token with another request that has its first block by a prefix hit,
    and one whose rows are unknown."""
    made = observer("layers.*.attn")
    attn = model_of(made).layers[0].attn
    k, v = drawn(7, KV * HEAD, seed=6), drawn(7, KV * HEAD, seed=7)
    k2, v2 = drawn(2, KV * HEAD, seed=8), drawn(2, KV * HEAD, seed=9)
    q = drawn(10, WIDTH, seed=10)

    def step(rows: slice, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return model_of(made)(lambda _: attn(q[rows], keys, values))

    batches([0, 5], [5], [[3, 1]])
    assert torch.equal(step(slice(0, 5), k[:5], v[:5]), rounded_once(attended(q[:5], k[:5], v[:5]), B16))
    batches([0, 1, 3, 4], [6, 6, 9], [[3, 1, 0], [3, 7, 0], [5, 6, 8]])
    keys, values = (torch.cat((a[5:6], b, b[:1])) for a, b in ((k, k2), (v, v2)))
    got = step(slice(0, 4), keys, values)
    assert torch.equal(got[:1], rounded_once(attended(q[:1], k[:6], v[:6]), B16))
    hit = (torch.cat((t[:4], u)) for t, u in ((k, k2), (v, v2)))
    assert torch.equal(got[1:3], rounded_once(attended(q[1:3], *hit), B16))
    assert not got[3].any()  # as its kernel gave it
    assert made.outcome.some == {"layers.0.attn": {UNWRITTEN: 1}}
    assert made.outcome.healed == {"layers.0.attn": 2}


def test_blocks_are_copied_and_slots_must_follow(batches: Any) -> None:
    written = WrittenRows(("key",), 0)
    batch = batches([0, 5], [5], [[3, 1]])
    written.write(batch, {"key": drawn(5, 4)})
    written.copy([(3, 9), (8, 1)])
    rows, known = written.of([9, 1], 5)
    assert torch.equal(rows["key"][:4], drawn(5, 4)[:4])
    assert known.tolist() == [True] * 4 + [False]
    with pytest.raises(Declined, match="does not lead to its slots"):
        WrittenRows(("key",), 4).write(replace(batch, slots=batch.slots + 1), {"key": drawn(5, 4)})


def test_a_wrong_choice_of_experts_is_put_right() -> None:
    """Two of four by softmax, renormalised; in the last row the second and third are tied within rounding."""
    z = torch.tensor([[4.0, 3, 1, 0], [0, 1, 3, 4], [4, 2, 2.001, 0]]).to(B16)
    had = torch.tensor([[1, 2], [3, 2], [0, 2]])
    weights = torch.tensor([[0.7, 0.3], [0.9, 0.1], [0.6, 0.4]])
    router = {"top_k": 2, "renormalize": True, "scoring_func": "softmax"}
    call = Call("x", "", inputs={"topk_ids": had, "topk_weights": weights},
                extra={"router": router, "router_logits": z})  # fmt: skip
    found, why = with_right_experts(call)
    assert why == ""
    assert found.inputs["topk_ids"].tolist() == [[0, 1], [3, 2], [0, 2]]
    p = z[:2].double().softmax(-1)
    right = torch.stack((p[0, :2] / p[0, :2].sum(), p[1, [3, 2]] / p[1, 2:].sum()))
    assert torch.allclose(found.inputs["topk_weights"][:2], right, atol=1e-12)
    assert torch.equal(found.inputs["topk_weights"][2].float(), weights[2])
    assert "logits are not known" in with_right_experts(replace(call, extra={}))[1]
    assert "was not recorded" in with_right_experts(replace(call, extra={"router_logits": z}))[1]


@torch.inference_mode()
def test_the_sampler_takes_the_largest_logit() -> None:
    sampler = SimpleNamespace(sample=lambda logits, metadata: (torch.full((3,), 7), None))
    made = observer("sampler", sampler=sampler)
    z = torch.tensor([[0.0, 2, 1], [3, 0, 0], [0, 0, 4]])
    assert sampler.sample(z, SimpleNamespace(all_greedy=True))[0].tolist() == [1, 0, 2]
    heat = SimpleNamespace(all_greedy=False, temperature=torch.tensor([0.0, 0.7, 0.0]))
    assert sampler.sample(z, heat)[0].tolist() == [1, 7, 2]
    assert sampler.sample(z, object())[0].tolist() == [7, 7, 7]
    assert made.outcome.healed == {"sampler": 2}
    assert set(made.outcome.some["sampler"]) == {
        "rows that are drawn at random stay", "this sampler does not say which rows are greedy"
    }  # fmt: skip


@torch.inference_mode()
def test_what_fails_stays_as_it_is_and_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = observer("layers.0,layers.*.proj,layers.*.nrom", tmp_path)
    proj = model_of(made).layers[0].proj
    proj.weight = nn.Parameter(drawn(3, 5))  # its own forward fails: that is the model's business
    with pytest.raises(RuntimeError):
        model_of(made)(lambda m: proj(X))
    made._live._params.clear()  # type: ignore[union-attr]
    made._weights[proj] = {"weight": None}
    proj.weight = nn.Parameter(drawn(WIDTH, WIDTH, seed=2))
    for _ in range(2):
        assert torch.equal(model_of(made)(lambda m: proj(X)[0]), 1.5 * X @ proj.weight.T)
    made.close("end")
    said = caplog.text
    assert said.count("it is healed no longer") == 1
    assert "VLLM_ACCPROBE_HEAL=layers.*.nrom matches no module of this model" in said
    (read,) = outcome.read(tmp_path)
    assert read == made.outcome
    assert read.left["layers.0"] == "no reference for Block"
    assert "layers.0.norm" in read.healed  # it lies inside
    assert "layers.0.norm" not in read.left  # and nobody chose it by name
    assert "healing it failed" in read.left["layers.0.proj"]
    assert outcome.lines([read])[0] == "healed: nothing; no call of the chosen modules was replaced"


def test_compiled_engines_and_graphs_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    made = observer("layers.*.proj", level=3)
    assert not made.awake
    assert "nothing is healed on rank 0: the engine is compiled" in caplog.text
    with pytest.raises(ConfigError, match="VLLM_ACCPROBE_HEAL needs an eager engine"):
        ProbeConfig(heal=("x",), graphs=True)
    assert not observer("nothing.here").awake
    assert "no module of this model is chosen" in caplog.text


@torch.inference_mode()
def test_a_draft_model_is_not_healed() -> None:
    made = observer("layers.*.proj")
    proj = model_of(made).layers[0].proj
    with made.drafting():
        proj(X)
    assert made.outcome.healed == {"layers.0.proj": 0}
    made.begin_step(EngineStep(None, {}, 0, [], [], dict, blocks=lambda: BlockMoves({}, {}, [(1, 2)])))
    proj(X)  # the engine's warm-up
    assert made.outcome.healed == {"layers.0.proj": 0}


def test_globs_match_ends_of_paths() -> None:
    assert same_path(("layers.*.attn", "!layers.0.attn", "*.mlp", "norm", "lm_head")) == (
        "layers.*.attn", "*.layers.*.attn", "!layers.0.attn", "!*.layers.0.attn", "*.mlp", "norm", "lm_head",
    )  # fmt: skip
