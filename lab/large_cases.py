"""The pairs of the large laboratory: which model, kernels, golden and fault each has, drawn with a fixed seed.

The problem: a judge that replays a part of a large pair has to be measured on faults that its choice could miss. The
idea: as lab/generated.py draws, from tables of operators and of what can be wrong with each, with faults
that are visible at this width, and with those that large pairs were once passed with. The name of a pair says all that
it has, and the hash of its name the half it is in. Groups:

    issue       six faults that the default settings passed; all of the tuned half
    drawn       one fault in one layer
    everywhere  the same fault in all layers; the first layer's is to be named
    clean       no fault: other batches and chunks, another dtype, other kernels
    real        4 layers with the shapes of a model of 7 billion parameters, 2,000 rows, weights in the checkpoint only

Not here: the models (large_models.py), engines (large_runs.py), judging (large_judge.py).
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from support.engine import Ask
from support.prompts import prompts

from lab.cases import HANDWRITTEN, HELD_OUT, TUNED, half
from lab.generated import draws
from lab.large_models import EXPERTS, HEAD, INNER, LAYERS, REAL, SOFT_CAP, WIDTH, WINDOW
from lab.options import at, block, column, expert, one_of
from lab.places import Fault, Place, attention, dense_model, ends, experts, mlp
from lab.ways import TEXT

KERNELS = ("native", "avx2")
ASKS = TEXT
"""481 prompt tokens and 42 that are decoded, as in the small laboratory: a pair with a float32 golden has 1.6 GB."""
REAL_ASKS = [Ask(ids, 8) for ids in prompts(900, 500, 300, 150, 70, 31)]
"""1,951 prompt tokens and 42 that are decoded."""
_ROWS = ("prefill", "decode", "position>=100", "position>=200", "position:45", "chunk>=2", "row>=64", "batch>=4")
SIZES = {TUNED: 24, HELD_OUT: 32}
"""Drawn faults by half. Chosen: 60 and a few more in all, half of them held out."""


@dataclass(frozen=True)
class Way:
    """How requests reach an engine, the engine's arguments, and its environment."""

    how: str = "serial"
    engine: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


_REAL_CACHE = {"kv_cache_memory_bytes": 1 << 29, "max_model_len": 1024}
_ACTIVATIONS = {"VLLM_ACCPROBE_PARTS": "input,output"}
WAYS = {
    "float32": Way(engine={"dtype": "float32"}),
    "serial": Way(),
    "mixed": Way("together", {"max_num_batched_tokens": 96}),
    "chunks": Way("staggered", {"max_num_batched_tokens": 48}),
    "real-float32": Way(engine={"dtype": "float32", **_REAL_CACHE}, env=_ACTIVATIONS),
    "real": Way("together", {"max_num_batched_tokens": 512, **_REAL_CACHE}, _ACTIVATIONS),
}
GOLDENS = ("float32", "serial")


@dataclass(frozen=True)
class Run:
    """One engine: a model of large_models.MODELS, one of `KERNELS`, one of `WAYS`, and what is planted in it."""

    model: str
    kernels: str
    way: str
    faults: tuple[Fault, ...] = ()
    fault_name: str = ""

    @property
    def asks(self) -> list[Ask]:
        return REAL_ASKS if self.model == REAL else ASKS

    @property
    def name(self) -> str:
        return self.fault_name or f"{self.model}-{self.kernels}-{self.way}"


@dataclass(frozen=True)
class Pair:
    """expected: modules that may rightly be named first; none for a clean pair."""

    name: str
    group: str
    golden: Run
    mine: Run
    expected: tuple[str, ...] = ()

    @property
    def half(self) -> str:
        return half(self.name, HANDWRITTEN if self.group == "issue" else self.group)

    @property
    def clean(self) -> bool:
        return not self.expected


# --- places ----------------------------------------------------------------------------------------------------------

_L = "model.layers"
_EVERY = tuple(range(LAYERS))


def _large(places: Sequence[Place]) -> list[Place]:
    """With this laboratory's rows, and one head or a sixteenth of the columns as a block."""
    blocks = {"qkv_proj": HEAD, "attn": HEAD, "o_proj": HEAD}
    return [replace(p, rows=_ROWS if p.rows else (), block=blocks.get(p.op, max(1, p.columns // 16))) for p in places]


def _experts() -> list[Place]:
    moe = f"{_L}.{{}}.block_sparse_moe"
    return [
        Place("mixtral", "router", f"{moe}.gate", "router", _EVERY, EXPERTS, rows=_ROWS),
        *experts("mixtral", moe, _EVERY, EXPERTS, WIDTH, _ROWS),
    ]


def _gemma2() -> list[Place]:
    """Without its activation, which vLLM keeps in a registry for all layers."""
    operators = ("qkv_proj", "o_proj", "attn", "rotary_emb", "gate_up_proj", "down_proj")
    found = attention("gemma2", _L, _EVERY, WIDTH, _ROWS, False) + mlp("gemma2", _L, _EVERY, WIDTH, INNER, _ROWS)
    found = [p for p in found if p.op in operators]
    windowed = [replace(p, sort="windowed", layers=_EVERY[::2]) for p in found if p.op == "attn"]
    capped = [replace(p, sort="capped") if p.op == "attn" else p for p in found]
    norms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    return [
        *capped,
        *windowed,
        *[Place("gemma2", norm, f"{_L}.{{}}.{norm}", "norm", _EVERY, WIDTH, rows=_ROWS) for norm in norms],
    ]


PLACES: dict[str, list[Place]] = {
    "llama": _large(dense_model("llama", LAYERS, WIDTH, INNER, False)),
    "qwen2": _large(dense_model("qwen2", LAYERS, WIDTH, INNER, True)),
    "mixtral": _large([*attention("mixtral", _L, _EVERY, WIDTH, _ROWS, False), *ends("mixtral", WIDTH, _ROWS)]),
    "experts": _large(_experts()),
    "gemma2": _large(_gemma2()),
}
"""What is drawn from, in turn; ``experts`` are Mixtral's, which would else come too seldom."""

# --- what can be wrong there -----------------------------------------------------------------------------------------


def _any(kind: str, *factors: float, rows: bool = True, **more: Any) -> Any:
    """In all rows, or in half of the draws in some."""

    def option(place: Place) -> Any:
        def fault(rng: random.Random) -> Fault:
            where = {"rows": rng.choice(place.rows)} if rows and place.rows and rng.random() < 0.5 else {}
            return {"kind": kind, "factor": rng.choice(factors), **more, **where}

        return fault

    return option


_SCALE = _any("scale", 1.02, 1.03, 1.05, 0.97)
_STALE = at("stale", 1.0, "position:10", "position:30", "position:200")
_LINEAR = (
    _SCALE, column("scale", 0.012, 0.03), block(1.06, 1.1), _any("product", 0.03, 0.05), one_of("product", 0.5),
    _any("short", 1, 4, rows=False), _any("low_sum", 32, 88, rows=False), _any("coarse_input", 4, 5),
    _any("coarse", 5, 6), _STALE,
)  # fmt: skip
_NORM = (
    _SCALE, column("scale", 0.012, 0.03), column("weight", 0.012, 0.03), _any("coarse", 5, 6), _any("add", 0.02, 0.05),
    _any("low_variance", 4, 8),
)  # fmt: skip
_ATTENTION = (
    _any("attn", 1.02, 1.03, 0.97, rows=False), _any("kernel_scale", 1.02, 1.03, 0.97),
    _any("coarse_values", 127, 63, rows=False), block(1.03, 1.06), _SCALE,
    at("cache", 0.0, "position:5", "position:12", "position:21"), _any("cache", 1.05, 1.1), _STALE,
)  # fmt: skip
OPTIONS: dict[str, tuple[Any, ...]] = {
    "linear": _LINEAR,
    "linear with bias": (*_LINEAR, _any("bias", 1.0)),
    "norm": _NORM,
    "first norm": (*_NORM, _any("eps", 0.02, 0.05, rows=False)),
    "later norm": (*_NORM, _any("eps", 0.5, 1.0, rows=False)),
    "attention": (*_ATTENTION, _any("setting", 100, 200, rows=False, param="impl.sliding_window"),
                  _any("setting", SOFT_CAP, rows=False, param="impl.logits_soft_cap")),
    "capped": (*_ATTENTION, _any("setting", 0.0, 2 * SOFT_CAP, rows=False, param="impl.logits_soft_cap")),
    "windowed": (_any("setting", WINDOW - 1, WINDOW + 1, rows=False, param="impl.sliding_window"),),
    "activation": (_any("act", 1.02, 1.05), _any("coarse_sigmoid", 13, 17), _SCALE, column("scale", 0.012, 0.03)),
    "rotation": (_any("angle", 1.0005, 1.002, rows=False), _any("coarse_table", 4, 5, rows=False)),
    "router": (column("scale", 0.03), _any("coarse", 5), _SCALE),
    "experts": (lambda place: lambda rng: {"kind": "route", "factor": 1, "rows": rng.choice(place.rows)},),
    "expert": (expert("expert", 1.03, 1.06), _SCALE),
    "expert weights": (expert("noise", 0.05, 0.1, param="w2_weight"), expert("noise", 0.05, 0.1, param="w13_weight")),
    "embedding": (_any("scale", 1.02, 1.05, rows=False), column("scale", 0.012), _any("coarse", 5, rows=False)),
    "residual": (_any("scale", 1.02, 1.05, output=1),),
    "head": (lambda place: lambda rng: {"kind": "logits", "factor": 1.25, "features": [rng.randrange(512)]},
             lambda place: lambda rng: {"kind": "head", "factor": 1.0, "features": [rng.randrange(512)]}),
    "logits": (_any("scale", 1.02, 1.05, rows=False),),
}  # fmt: skip

# --- pairs -----------------------------------------------------------------------------------------------------------


def _pair(
    group: str, name: str, model: str, kernels: str, golden: str, faults: Sequence[Fault], expected: tuple[str, ...]
) -> Pair:
    name = f"{model}-{name}-{kernels}-{golden}"
    mine = Run(model, kernels, "mixed", tuple(faults), name)
    return Pair(name, group, Run(model, kernels, golden), mine, expected or (faults[0]["module"],))


def _issue(name: str, kind: str, module: str, factor: float) -> Pair:
    fault = {"kind": kind, "module": f"{_L}.{module}", "factor": factor}
    return _pair("issue", name, "llama", "native", "float32", [fault], ())


ISSUE = [
    _issue("softmax-scale", "attn", "7.self_attn.attn", 1.02),
    _issue("coarse-table", "coarse_table", "0.self_attn.rotary_emb", 5),
    _issue("int8-values", "coarse_values", "9.self_attn.attn", 127),
    _issue("sums-in-32-parts", "low_sum", "5.mlp.down_proj", INNER // 32),
    _issue("inputs-of-5-bits", "coarse_input", "11.self_attn.qkv_proj", 5),
    _issue("cheap-sigmoid", "coarse_sigmoid", "3.mlp.act_fn", 17),
]
"""What the default settings passed at 462cbe3, where all of a large pair was compared and nothing of it replayed."""


def _in_all(name: str, model: str, kernels: str, golden: str, path: str, kind: str, factor: float) -> Pair:
    faults = [{"kind": kind, "module": f"{_L}.{i}.{path}", "factor": factor} for i in _EVERY]
    return _pair("everywhere", f"all-{name}", model, kernels, golden, faults, ())


EVERYWHERE = [
    _in_all("softmax-scale", "qwen2", "native", "float32", "self_attn.attn", "attn", 1.03),
    _in_all("scale", "llama", "avx2", "float32", "mlp.down_proj", "scale", 1.03),
    _in_all("cheap-sigmoid", "qwen2", "avx2", "float32", "mlp.act_fn", "coarse_sigmoid", 13),
    _in_all("eps", "llama", "native", "serial", "post_attention_layernorm", "eps", 0.5),
]

_TURN = ("llama", "qwen2", "experts", "llama", "qwen2", "gemma2", "llama", "qwen2", "mixtral")
"""Of `PLACES`."""


def _drawn() -> Iterator[Pair]:
    """Endless; each of `PLACES` meets both kernels and both goldens once in four."""
    rng = random.Random("large")
    decks: dict[str, list[tuple[str, str]]] = {}
    sources = {source: draws({source: places}, f"large {source}", OPTIONS) for source, places in PLACES.items()}
    while True:
        for source in _TURN:
            if not decks.get(source):
                decks[source] = rng.sample([(k, g) for k in KERNELS for g in GOLDENS], 4)
            kernels, golden = decks[source].pop()
            place, layer, fault, name = next(sources[source])
            yield _pair("drawn", name, place.model, kernels, golden, [fault], place.expected(layer))


def _filled() -> list[Pair]:
    """The first pairs of each half, as many as the half should have."""
    left, pairs = dict(SIZES), {}
    for pair in _drawn():
        if pair.name not in pairs and left[pair.half]:
            left[pair.half] -= 1
            pairs[pair.name] = pair
        if not any(left.values()):
            return list(pairs.values())
    raise AssertionError("the draw is endless")


def _clean(golden: Run, mine: Run) -> Pair:
    return Pair(f"clean-{golden.name}-to-{mine.kernels}-{mine.way}", "clean", golden, mine)


def _cleans(model: str, ways: Sequence[tuple[str, str, str, str]]) -> list[Pair]:
    return [_clean(Run(model, a, golden), Run(model, b, mine)) for a, golden, b, mine in ways]


_FEW = [
    ("native", "float32", "native", "mixed"),
    ("native", "serial", "native", "mixed"),
    ("avx2", "float32", "avx2", "mixed"),
    ("native", "serial", "avx2", "mixed"),
]
_MORE = [
    ("avx2", "serial", "avx2", "mixed"),
    ("native", "float32", "native", "chunks"),
    ("native", "serial", "native", "chunks"),
    ("avx2", "float32", "native", "mixed"),
]
CLEAN = [
    *[pair for model in ("llama", "qwen2") for pair in _cleans(model, [*_FEW, *_MORE])],
    *[pair for model in ("mixtral", "gemma2") for pair in _cleans(model, _FEW)],
]


def _real(name: str, faults: Sequence[Fault], expected: tuple[str, ...]) -> Pair:
    mine = Run(REAL, "native", "real", tuple(faults), name if faults else "")
    return Pair(name, "real", Run(REAL, "native", "real-float32"), mine, expected)


_SCALED = f"{_L}.2.self_attn.attn"
REAL_SHAPES = [
    _real("real-clean", [], ()),
    _real("real-softmax-scale", [{"kind": "attn", "module": _SCALED, "factor": 1.02}], (_SCALED,)),
]
PAIRS: list[Pair] = [*ISSUE, *EVERYWHERE, *_filled(), *CLEAN, *REAL_SHAPES]
