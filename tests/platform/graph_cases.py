"""The faults of compiled and captured engines: what is planted, in which engine, who is to blame, which words are due.

The problem: whether the taps in graphs find what only graphs get wrong is known from such faults only, and whether they
still find everything else, from faults of modules in the same engines. The idea: a case is a declaration, as in
faults/cases.py, whose type and halves these use; what a `Way` of client.py is there, is an engine here:
``eager``, ``plain`` (pieces without graphs), ``captured`` (sizes 1, 2, 4, 8), ``other-sizes`` (2 and 8), ``inductor``.
A fault of a recording is seen at the first tap behind it, since taps stand where kernels end. Not here: running
(graph_lab.py), what the kinds do (captured_faults.py, captured_fusion.py, lab/planted/accprobe_fault_kinds.py).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import captured_bench as bench
import captured_fusion
from support.engine import Ask
from support.prompts import prompts

from lab.cases import Case
from lab.ways import TRANSFORMERS

GROUP = "graphs"
ASKS = [
    Ask(ids, tokens)
    for ids, tokens in zip(prompts(1, 3, 12, 2, 5, 8, 4, 7, 6, 9), (20, 18, 22, 14, 16, 12, 6, 8, 3, 5), strict=True)
]
"""A new one every second step: steps of each number of rows up to the largest captured size, and a few beyond it."""
FULL = {"VLLM_ACCPROBE_MODULES": "all"}
"""All taps: what is not a kernel's output is wanted."""
NAMED = {"VLLM_ACCPROBE_GRAPH_TAPS": "*"}
"""As a user names every module: outputs of all of them, and no inputs."""


@dataclass(frozen=True)
class GraphWay:
    """How an engine is built. captured: on the captured platform, else on the CPU's own. how: as EngineHost.capture.
    engine: arguments of vllm.LLM. env: of the engine."""

    captured: bool = True
    how: str = "staggered"
    engine: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


_GRAPHS = {"VLLM_ACCPROBE_GRAPHS": "1"}
_OTHER = bench.engine()
_OTHER["compilation_config"] |= {"cudagraph_capture_sizes": [2, 8]}
WAYS: dict[str, GraphWay] = {
    "eager": GraphWay(captured=False, how="serial"),
    TRANSFORMERS: GraphWay(captured=False),
    "plain": GraphWay(engine=bench.engine(graphs=False), env=_GRAPHS),
    "captured": GraphWay(engine=bench.engine(), env=_GRAPHS),
    "captured-full": GraphWay(engine=bench.engine(), env=_GRAPHS | FULL),
    "other-sizes": GraphWay(engine=_OTHER, env=_GRAPHS),
    "inductor": GraphWay(captured=False, engine={"enforce_eager": False}, env=_GRAPHS),
    "inductor-taps": GraphWay(captured=False, engine={"enforce_eager": False}, env=_GRAPHS | NAMED),
    "inductor-fused": GraphWay(captured=False, engine={"enforce_eager": False} | captured_fusion.passes(), env=_GRAPHS),
}
CLEAN: list[tuple[str, str, str]] = [
    *[
        (model, golden, "captured")
        for model in ("qwen2", "llama", "qwen2-moe")
        for golden in ("eager", "plain", "other-sizes")
    ],
    ("qwen2-moe", "eager", "captured-full"),
    ("llama", TRANSFORMERS, "captured-full"),
    ("qwen2", "eager", "inductor"),
]
"""(model, golden, mine) that differ honestly."""

_LAYER = "model.layers.{}."


@dataclass(frozen=True)
class GraphCase(Case):
    """recorded: faults of captured_faults.py, instead of ``fault``'s of modules. fill: what stands at capture where
    nothing was written. only_there: nothing is planted in a module."""

    recorded: tuple[Mapping[str, Any], ...] = ()
    fill: float | None = None
    only_there: bool = False

    @property
    def faults(self) -> list[dict[str, Any]]:
        return [] if self.only_there else super().faults


def _there(name: str, model: str, tap: str, words: tuple[str, ...], mine: str = "captured", fill: float | None = 1.0,
           **recorded: Any) -> GraphCase:  # fmt: skip
    """A fault that only the compiled or captured engine has; ``tap`` is the first behind it."""
    goldens: dict[str, Any] = {"golden": "eager", "also": ("plain",) if mine == "captured" else ()}
    faults = (recorded,) if recorded else ()
    return GraphCase(name, model, {}, culprits=(tap,), mine=mine, words=words, group=GROUP, recorded=faults, fill=fill,
                     only_there=True, **goldens)  # fmt: skip


def _module(name: str, model: str, culprit: str, mine: str = "captured", **fault: Any) -> GraphCase:
    """A fault of a module or an operator, inside the captured engine, whose kind a compiler can trace: not ``angle``,
    which changes a buffer in the forward."""
    return GraphCase(name, model, fault, golden="eager", mine=mine, culprits=(culprit,), group=GROUP)


ONLY_THERE: list[GraphCase] = [
    _there("padding-leaks", "qwen2", _LAYER.format(1) + "self_attn.o_proj", ("only in steps with padding", "piece 2"),
           kind="leak", piece=2, at="product#0", factor=0.5),
    _there("padding-not-written", "llama", _LAYER.format(0) + "self_attn.o_proj", ("only in steps with padding",
           "piece 1"), fill=math.nan, kind="leak", piece=1, at="product#0", factor=1.0),
    _there("stale-positions", "qwen2", _LAYER.format(2) + "self_attn", ("replayed", "piece 2"),
           kind="stale", piece=2, input="positions"),
    _there("one-size", "llama", _LAYER.format(2) + "mlp.down_proj", ("only in steps replayed at size 4", "piece 3"),
           kind="size", piece=3, at="product#2", size=4, factor=1.05),
    _there("recycled-buffer", "qwen2", _LAYER.format(1) + "mlp.gate_up_proj", ("replayed", "piece 2"),
           kind="share", piece=2),
    _there("a-request-too-few", "llama", _LAYER.format(1) + "self_attn.attn", ("only in steps with padding",
           "piece 1"), kind="count", piece=2, input="output"),
    _there("residual-twice-in-a-fusion", "qwen2", _LAYER.format(1) + "mlp.gate_up_proj", (), mine="inductor-fused"),
]  # fmt: skip
"""Where rotation is wrong, the first taps behind it are attention's inputs, which lie in the body of ``self_attn``.
Two of padding, one of a stale buffer, of a size, of a recycled buffer, of the request count, and a wrong fusion."""
ANYWHERE: list[GraphCase] = [
    _module("scale", "qwen2", _LAYER.format(2) + "mlp.down_proj", kind="scale",
            module=_LAYER.format(2) + "mlp.down_proj", factor=1.05),
    _module("attention-factor", "llama", _LAYER.format(1) + "self_attn.attn", kind="attn",
            module=_LAYER.format(1) + "self_attn.attn", factor=1.3),
    _module("norm-eps", "qwen2", _LAYER.format(2) + "mlp.gate_up_proj", kind="eps",
            module=_LAYER.format(2) + "post_attention_layernorm", factor=0.05),
    _module("wrong-expert", "qwen2-moe", _LAYER.format(1) + "mlp.experts", mine="captured-full", kind="expert",
            module=_LAYER.format(1) + "mlp.experts", expert=3, factor=1.3),
    _module("rope", "llama", _LAYER.format(0) + "self_attn", kind="rope",
            module=_LAYER.format(0) + "self_attn.rotary_emb", factor=1.5),
    _module("one-column", "llama", _LAYER.format(0) + "mlp.gate_up_proj", kind="scale",
            module=_LAYER.format(0) + "mlp.gate_up_proj", features=[17], factor=1.5),
]  # fmt: skip
CASES: list[GraphCase] = [*ONLY_THERE, *ANYWHERE]
