"""The plants of the laboratory of causes, by a formula, each with the cause that would be right.

The problem: whoever writes the sentence after seeing the answer grades himself. The idea: a `Plant` is a family, an
operator's variant (planted/accprobe_cause_kinds.py), its numbers, and the words and the number that a right cause has;
which architectures, layers and numbers it gets is drawn with a seed. A cause is right if one of its clauses has the
words and the number, and, where it says only one, is of the family. A plant of no family must have no cause.

Not here: the models (cause_models.py), running and judging (causes.py).
"""

import math
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lab.cases import Case, half

SETTING, ADDRESS, PRECISION, FACTOR, NONE = "setting", "address", "precision", "factor", "no family"
FAMILIES = (SETTING, ADDRESS, PRECISION, FACTOR)
SEED = 27
GOLDENS = ("serial", "float32")
WIDTH, INNER, HEADS, KV, HEAD = 128, 256, 4, 2, 32
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


# --- architectures ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Architecture:
    """What a model has. layers: how many; dense: layers without a router; bias: q, k and v have biases; norm: rms (its
    later ones add a residual), plain (they do not), gemma, layer, layer with bias; act: SiluAndMul; head_norms: q and k
    are normed by head; experts: number, 0 for none; moe: their block's path in a layer; corrected: the router's scores;
    rotary: channels that turn, 0 for MLA's; window, windowed: size and layers; scale: of the softmax."""

    layers: int = 3
    dense: tuple[int, ...] = (0, 1, 2)
    bias: bool = False
    norm: str = "rms"
    act: bool = True
    head_norms: bool = False
    experts: int = 0
    top: int = 2
    moe: str = "mlp"
    corrected: bool = False
    plain_experts: bool = True
    rotary: int = HEAD
    halves: bool = True
    scaled_angles: bool = False
    window: int = 0
    windowed: tuple[int, ...] = ()
    cap: bool = False
    logits_cap: bool = False
    logits_scale: float = 1.0
    sinks: bool = False
    scale: float = HEAD**-0.5
    paged: bool = True
    attn: str = "self_attn"

    @property
    def routed(self) -> tuple[int, ...]:
        return tuple(i for i in range(self.layers) if i not in self.dense) if self.experts else ()


_ALL_ROUTED: dict[str, Any] = {"dense": (), "act": False}
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(),
    "qwen2": Architecture(layers=4, dense=(0, 1, 2, 3), bias=True),
    "qwen3": Architecture(head_norms=True),
    "gemma2": Architecture(
        layers=4, dense=(0, 1, 2, 3), norm="gemma", act=False, window=24, windowed=(0, 2), cap=True, logits_cap=True
    ),
    "gemma3": Architecture(
        layers=4, dense=(0, 1, 2, 3), norm="gemma", act=False, head_norms=True, window=24, windowed=(0, 1, 3)
    ),
    "mistral": Architecture(window=40, windowed=(0, 1, 2)),
    "llama3": Architecture(scaled_angles=True),
    "granite": Architecture(norm="plain", scale=0.25, logits_scale=0.5),
    "phi3": Architecture(rotary=16),
    "cohere": Architecture(norm="layer", halves=False, logits_scale=0.25),
    "stablelm": Architecture(norm="layer with bias", bias=True, rotary=16),
    "qwen2-moe": Architecture(**_ALL_ROUTED, bias=True, experts=8),
    "qwen3-moe": Architecture(**_ALL_ROUTED, head_norms=True, experts=8),
    "mixtral": Architecture(**_ALL_ROUTED, layers=2, experts=4, moe="block_sparse_moe"),
    "deepseek-v2": Architecture(dense=(0,), experts=8, rotary=0, halves=False, scaled_angles=True, paged=False,
                                attn="self_attn.mla_attn"),
    "glm4-moe": Architecture(dense=(0,), bias=True, head_norms=True, experts=8, top=3, corrected=True, rotary=16),
    "gpt-oss": Architecture(
        **_ALL_ROUTED, layers=2, bias=True, experts=4, plain_experts=False, window=24, windowed=(0,), sinks=True,
        attn="attn",
    ),
}


@dataclass(frozen=True)
class Place:
    """An operator of a model. sort: what may be planted there; width: of its output; culprits: where it is called, if
    elsewhere."""

    sort: str
    name: str
    path: str
    layer: int = 0
    width: int = WIDTH
    culprits: tuple[str, ...] = ()


def places(a: Architecture) -> list[Place]:
    """All operators of an architecture in which something is planted."""
    found = []
    for i in range(a.layers):
        layer = f"model.layers.{i}"
        attn = f"{layer}.{a.attn}"

        def add(sort: str, name: str, path: str, width: int = WIDTH, *culprits: str, i: int = i) -> None:
            found.append(Place(sort, name, path, i, width, culprits))

        if a.paged:
            add("qkv", "qkv_proj", f"{attn}.qkv_proj", (HEADS + 2 * KV) * HEAD)
            add("attention", "attn", f"{attn}.attn")
        else:
            add("linear", "q_proj", f"{attn}.q_proj", 384)
        add("square", "o_proj", f"{attn}.o_proj")
        if i == 0 and not (a.norm == "gemma" and a.head_norms):  # gemma3 has two, which are shared otherwise
            add("rotary", "rotary_emb", f"{attn}.rotary_emb")
        if a.head_norms:
            add("head norm", "q_norm", f"{attn}.q_norm", HEAD)
        if i:
            add("norm", "input_layernorm", f"{layer}.input_layernorm")
        if a.norm in ("rms", "plain"):
            add("norm", "post_attention_layernorm", f"{layer}.post_attention_layernorm")
        if i in a.dense:
            add("wide", "gate_up_proj", f"{layer}.mlp.gate_up_proj", 2 * INNER)
            add("long", "down_proj", f"{layer}.mlp.down_proj")
            if a.act:
                add("act", "act_fn", f"{layer}.mlp.act_fn", INNER)
        if i in a.routed:
            block = f"{layer}.{a.moe}.experts"
            inside = f"{block}.routed_experts.quant_method"
            if a.plain_experts:
                add("experts", "experts", inside, WIDTH, inside, block)
                add("router", "router", block, WIDTH, f"{block}.routed_experts", block, inside)
    found.append(Place("logits", "logits_processor", "logits_processor", width=512))
    return found


# --- what is right ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Right:
    """A cause that would be right. words: a regular expression that a clause of it has; values: of which that clause or
    its parameter has one, within the share ``within`` (none: any); where: numbers of a head, a column or an expert,
    of which it has one exactly; families: of a cause with one clause."""

    families: tuple[str, ...]
    words: str
    values: tuple[float, ...] = ()
    within: float = 0.03
    where: tuple[int, ...] = ()

    def accepts(self, cause: Mapping[str, Any]) -> bool:
        """cause: compare.json's ``origins[].cause``."""
        text = str(cause.get("text", ""))
        clauses = re.split(r", or (?=with|if|of|moved|multiplied|one|in )", text.partition(" gives ")[2] or text)
        fitting = [c for c in clauses if re.search(self.words, c)]
        if not fitting or (len(clauses) == 1 and cause.get("family") not in self.families):
            return False
        said = [float(x) for c in fitting for x in _NUMBER.findall(re.sub(r"(?<=[a-z])\d\w*", "", c))]
        said += _numbers(cause.get("parameter")) if len(clauses) == 1 else []
        near = any(math.isclose(x, value, rel_tol=self.within) for x in said for value in self.values)
        return (near or not self.values) and (any(x in self.where for x in said) or not self.where)


def _numbers(parameter: Any) -> list[float]:
    if isinstance(parameter, (list, tuple)):
        return [x for p in parameter for x in _numbers(p)]
    return [float(parameter)] if isinstance(parameter, (int, float)) and not isinstance(parameter, bool) else []


# --- plants ----------------------------------------------------------------------------------------------------------

Values = Callable[[Architecture, Place, float], tuple[float, ...]]
Fits = Callable[[Architecture, Place], bool]


def _same(a: Architecture, p: Place, n: float) -> tuple[float, ...]:
    return (n,)


def _any(a: Architecture, p: Place, n: float) -> tuple[float, ...]:
    return ()


def _everywhere(a: Architecture, p: Place) -> bool:
    return True


@dataclass(frozen=True)
class Plant:
    """family, kind, variant: as above; sorts: of `Place`; words: of the right cause; numbers: one is drawn; values:
    that the right cause names; fits: where it shows; times: in how many architectures; features: which columns are
    spoiled; also: families that are as right; within: as in `Right`."""

    family: str
    kind: str
    variant: str
    sorts: tuple[str, ...]
    words: str
    numbers: tuple[float, ...] = (1.0,)
    values: Values = _any
    fits: Fits = _everywhere
    times: int = 1
    features: Callable[[random.Random, Place], list[int]] | None = None
    also: tuple[str, ...] = ()
    within: float = 0.03


LINEARS = ("qkv", "linear", "square", "wide", "long")
_FP8 = r"(float8_e4m3fn|\b4 bits)"


def _bits(what: str, n: int) -> str:
    return rf"{what}.*\b{n} bits"


def _rms(a: Architecture, p: Place) -> bool:
    return a.norm in ("rms", "plain", "gemma")


def _adds(a: Architecture, p: Place) -> bool:
    return a.norm == "rms"


def _biased(a: Architecture, p: Place) -> bool:
    return a.bias


def _in_window(a: Architecture, p: Place) -> bool:
    return p.layer in a.windowed


def _without_window(a: Architecture, p: Place) -> bool:
    return p.layer not in a.windowed and not a.cap and not a.sinks


def _last(share: int) -> Callable[[random.Random, Place], list[int]]:
    return lambda rng, p: list(range(p.width - p.width // share, p.width))


def _head(rng: random.Random, p: Place) -> list[int]:
    n = rng.randrange(p.width // HEAD)
    return list(range(n * HEAD, n * HEAD + HEAD))


def _column(rng: random.Random, p: Place) -> list[int]:
    return [rng.randrange(p.width)]


_SETTINGS = (
    Plant(SETTING, "attention_as", "scale", ("attention",), r"softmax scale|scale of .*softmax", (0.9, 1.06, 5.65685),
          lambda a, p, n: (a.scale * n,), times=3),
    Plant(SETTING, "attention_as", "no cap", ("attention",), r"without its soft cap", fits=lambda a, p: a.cap),
    Plant(SETTING, "attention_as", "cap", ("attention",), r"soft cap of", (1.5, 3.0), _same, _without_window),
    Plant(SETTING, "attention_as", "no window", ("attention",), r"without its sliding window", fits=_in_window),
    Plant(SETTING, "attention_as", "window", ("attention",), r"sliding window of", (20, 33), _same, _without_window,
          within=1e-6),
    Plant(SETTING, "attention_as", "window off", ("attention",), r"sliding window of", (1, -1),
          lambda a, p, n: (a.window + n,), _in_window, within=1e-6),
    Plant(SETTING, "attention_as", "no sinks", ("attention",), r"without its attention sinks",
          fits=lambda a, p: a.sinks),
    Plant(SETTING, "norm_as", "epsilon", ("norm",), r"epsilon", (0.3, 0.8), _same, within=0.1),
    Plant(SETTING, "norm_as", "no weight", ("norm",), r"without its weight"),
    Plant(SETTING, "norm_as", "weight and one", ("norm",), r"with 1 \+ its weight", fits=_adds),
    Plant(SETTING, "norm_as", "weight without one", ("norm",), r"its weight instead of 1 \+",
          fits=lambda a, p: a.norm == "gemma"),
    Plant(SETTING, "norm_as", "skipped", ("norm",), r"without its norm|only weighed", fits=_adds),
    Plant(SETTING, "norm_as", "by parts", ("norm",), r"mean over each of", (2, 4), _same, _rms, within=1e-6),
    Plant(SETTING, "norm_as", "divisor", ("norm",), r"divided by|multiplied by", (96, 160),
          lambda a, p, n: (n, (n / WIDTH) ** 0.5), _rms, also=(FACTOR,)),
    Plant(SETTING, "norm_as", "centred", ("norm",), r"mean taken off", fits=_rms),
    Plant(SETTING, "norm_as", "not centred", ("norm",), r"without taking its mean off",
          fits=lambda a, p: a.norm.startswith("layer")),
    Plant(SETTING, "norm_as", "no bias", ("norm",), r"without its bias", fits=lambda a, p: "bias" in a.norm),
    Plant(SETTING, "norm_as", "residual left out", ("norm",), r"without adding its residual|of its input alone",
          fits=_adds),
    Plant(SETTING, "norm_as", "residual twice", ("norm",), r"residual added twice", fits=_adds),
    Plant(SETTING, "linear_as", "no bias", ("qkv",), r"without its bias", fits=_biased),
    Plant(SETTING, "linear_as", "bias twice", ("qkv",), r"bias added twice|bias times", fits=_biased),
    Plant(SETTING, "rotary_as", "base", ("rotary",), r"with the base", (3e4, 5e5), _same,
          lambda a, p: not a.scaled_angles and not a.sinks),
    Plant(SETTING, "rotary_as", "pairs", ("rotary",), r"for pairs", fits=lambda a, p: a.rotary > 0),
    Plant(SETTING, "rotary_as", "width", ("rotary",), r"channels turned", (HEAD,), _same,
          lambda a, p: 0 < a.rotary < HEAD, within=1e-6),
    Plant(SETTING, "rotary_as", "unscaled", ("rotary",), r"without its scaling|[Ll]lama3|with the frequencies of Rot",
          fits=lambda a, p: a.scaled_angles),
    Plant(SETTING, "rotary_as", "angles", ("rotary",), r"angles", (0.25, 1.04), _same),
    Plant(SETTING, "rotary_as", "key as it was", ("rotary",), r"without turning its key"),
    Plant(SETTING, "rotary_as", "positions further", ("rotary",), r"positions \+?\d", (1, 2), _same,
          also=(ADDRESS,), within=1e-6),
    Plant(SETTING, "activation_as", "gelu", ("act",), r"\bgelu on its gate"),
    Plant(SETTING, "activation_as", "quick gelu", ("act",), r"quick gelu|1\.702"),
    Plant(SETTING, "activation_as", "exchanged", ("act",), r"gate and up exchanged"),
    Plant(SETTING, "activation_as", "gate left out", ("act",), r"without its gate"),
    Plant(SETTING, "activation_as", "not activated", ("act",), r"no activation"),
    Plant(SETTING, "activation_as", "limit", ("act",), r"cut at", (1.0, 2.0), _same),
    Plant(SETTING, "router_as", "other scores", ("router",), r"(sigmoid|softmax) scores"),
    Plant(SETTING, "router_as", "other sum", ("router",), r"renormalised"),
    Plant(SETTING, "router_as", "factor left out", ("router",), r"routed scaling factor", (1.0,), _same,
          fits=lambda a, p: a.corrected),
    Plant(SETTING, "router_as", "not corrected", ("router",), r"without the bias that corrects",
          fits=lambda a, p: a.corrected),
    Plant(SETTING, "experts_as", "gelu", ("experts",), r"\bgelu( by tanh)? in its experts"),
    Plant(SETTING, "experts_as", "exchanged", ("experts",), r"gate and up exchanged"),
    Plant(SETTING, "experts_as", "counted 1", ("experts",), r"without its router's weights"),
    Plant(SETTING, "experts_as", "weights on input", ("experts",), r"weights on the experts' inputs"),
    Plant(SETTING, "experts_as", "first alone", ("experts",), r"first \d of its chosen", (1,), _same, within=1e-6),
    Plant(SETTING, "logits_as", "scale", ("logits",), r"logits' scale|multiplied by", (1.0,),
          lambda a, p, n: (1.0, 1.0 / a.logits_scale), lambda a, p: a.logits_scale != 1.0, also=(FACTOR,)),
    Plant(SETTING, "logits_as", "no cap", ("logits",), r"without its soft cap", fits=lambda a, p: a.logits_cap),
)  # fmt: skip
_ADDRESSES = (
    Plant(ADDRESS, "attention_as", "heads in turn", ("attention",), r"dealt out in turn|modulo"),
    Plant(ADDRESS, "attention_as", "heads further", ("attention",), r"heads' results", (1, 2), _same, within=1e-6),
    Plant(ADDRESS, "attention_as", "key heads further", ("attention",), r"key head \d further", (1,), _same),
    Plant(ADDRESS, "attention_as", "keys for values", ("attention",), r"keys taken for values"),
    Plant(ADDRESS, "attention_as", "keys and values exchanged", ("attention",), r"keys and values exchanged"),
    Plant(ADDRESS, "attention_as", "one position late", ("attention",), r"one position late"),
    Plant(ADDRESS, "attention_as", "step not written", ("attention",), r"nothing of this step"),
    Plant(ADDRESS, "attention_as", "position lost", ("attention",), r"keys and values of position", (5, 12), _same,
          _without_window, within=1e-6),
    Plant(ADDRESS, "attention_as", "block of another", ("attention",), r"read from request", fits=_without_window),
    Plant(ADDRESS, "attention_as", "tail of keys", ("attention",), r"last whole block of", (16, 32), _same,
          _without_window, within=1e-6),
    Plant(ADDRESS, "linear_as", "tail left out", LINEARS, r"last \d+ of its inputs", (8, 16, 32), _same, within=1e-6),
    Plant(ADDRESS, "linear_as", "transposed", ("square",), r"weight transposed"),
    Plant(ADDRESS, "linear_as", "memory transposed", ("wide", "long"), r"memory read as"),
    Plant(ADDRESS, "linear_as", "input turned", ("square", "long"), r"input's columns \d+", (32, 64), _same,
          within=1e-6),
    Plant(ADDRESS, "linear_as", "heads and channels", ("square",), r"heads and channels exchanged", (HEAD,),
          fits=lambda a, p: a.paged),
    Plant(ADDRESS, "linear_as", "k and v exchanged", ("qkv",), r"k and v", (HEADS * HEAD,)),
    Plant(ADDRESS, "linear_as", "halves exchanged", ("wide",), r"halves"),
    Plant(ADDRESS, "norm_as", "tail left out", ("norm",), r"last \d+ columns left out", (16, 32), _same, _rms,
          within=1e-6),
    Plant(ADDRESS, "norm_as", "view", ("head norm",), r"read as if it were contiguous",
          fits=lambda a, p: a.norm == "rms" and not a.corrected),
    Plant(ADDRESS, "rotary_as", "positions of rows", ("rotary",), r"position of a row in the batch|one run"),
    Plant(ADDRESS, "rotary_as", "positions of chunks", ("rotary",), r"begin at 0 in each chunk"),
    Plant(ADDRESS, "rotary_as", "positions of neighbours", ("rotary",), r"positions of the row before"),
    Plant(ADDRESS, "rotary_as", "key further", ("rotary",), r"positions \+1 key"),
    Plant(ADDRESS, "activation_as", "interleaved", ("act",), r"interleaved", also=(SETTING,)),
    Plant(ADDRESS, "experts_as", "experts further", ("experts",), r"experts (whose numbers are )?-?\d", (1,)),
    Plant(ADDRESS, "experts_as", "weights reversed", ("experts",), r"reverse order"),
    Plant(ADDRESS, "router_as", "numbers further", ("router",), r"numbers are 1 too large"),
    Plant(ADDRESS, "output_as", "columns at 0", (*LINEARS, "act"), r"left at 0|not computed", features=_last(8)),
    Plant(ADDRESS, "output_as", "columns stale", (*LINEARS, "act"), r"of the row .* before", features=_last(8)),
    Plant(ADDRESS, "output_as", "rows further", (*LINEARS, "act", "attention"), r"moved \+?\d rows", (1,), _same),
    Plant(ADDRESS, "output_as", "output of before", LINEARS, r"one call before"),
    Plant(ADDRESS, "output_as", "never written", (*LINEARS, "act", "attention"), r"0 in its place|never written"),
)  # fmt: skip
_PRECISIONS = (
    Plant(PRECISION, "linear_as", "input in fp8", LINEARS, rf"input .* in {_FP8}"),
    Plant(PRECISION, "linear_as", "input in int8", LINEARS, r"input .* in int8 with a scale for each row"),
    Plant(PRECISION, "linear_as", "input in bits", LINEARS, _bits("input", 5), (5,)),
    Plant(PRECISION, "linear_as", "weight in fp8", LINEARS, r"weight in float8_e4m3fn.*tensor"),
    Plant(PRECISION, "linear_as", "weight in int8", LINEARS, r"weight in int8 with a scale for each row"),
    Plant(PRECISION, "linear_as", "weight in int4", LINEARS, r"weight in int4 .*block of 32", (32,)),
    Plant(PRECISION, "linear_as", "split in k", LINEARS, r"sums over \d+ inputs.*each part", (4, 8), _same),
    Plant(PRECISION, "linear_as", "sum in bf16", LINEARS, r"sums over \d+ inputs.*after each", (4, 8), _same),
    Plant(PRECISION, "norm_as", "squares in bf16", ("norm",), r"squares.*bfloat16", (2, 4), fits=_rms),
    Plant(PRECISION, "norm_as", "weight in fp8", ("norm",), rf"weight in {_FP8}", fits=_adds),
    Plant(PRECISION, "norm_as", "input in bits", ("norm",), _bits("input", 5), (5,),
          fits=lambda a, p: a.norm == "plain"),
    Plant(PRECISION, "rotary_as", "table in bits", ("rotary",), _bits("table", 5), (5,)),
    Plant(PRECISION, "rotary_as", "table in fp8", ("rotary",), rf"table .* in {_FP8}"),
    Plant(PRECISION, "rotary_as", "positions in bf16", ("rotary",), r"positions.*bfloat16"),
    Plant(PRECISION, "activation_as", "sigmoid in bits", ("act",), _bits("sigmoid", 5), (5,)),
    Plant(PRECISION, "activation_as", "sigmoid from a table", ("act",), r"sigmoid from a table", (33,), _same),
    Plant(PRECISION, "activation_as", "gate in fp8", ("act",), rf"gate in {_FP8}"),
    Plant(PRECISION, "attention_as", "cache in fp8", ("attention",), rf"keys and values of its cache in {_FP8}"),
    Plant(PRECISION, "attention_as", "values in int8", ("attention",), r"values of its cache in int8.*row"),
    Plant(PRECISION, "attention_as", "query in fp8", ("attention",), rf"query in {_FP8}"),
    Plant(PRECISION, "attention_as", "probabilities in bits", ("attention",), _bits("probabilities", 4), (4,)),
    Plant(PRECISION, "experts_as", "input in fp8", ("experts",), rf"input .* in {_FP8}"),
    Plant(PRECISION, "experts_as", "inner in fp8", ("experts",), r"float8_e4m3fn"),
    Plant(PRECISION, "experts_as", "weights in int8", ("experts",), r"weights? .*int8"),
    Plant(PRECISION, "output_as", "fp8", (*LINEARS, "act", "attention"), rf"result in {_FP8}"),
    Plant(PRECISION, "output_as", "int8", (*LINEARS, "attention"), r"result in int8 with a scale for each row"),
    Plant(PRECISION, "output_as", "bits cut off", (*LINEARS, "act", "norm"), _bits("result", 6) + ".*cut", (6,)),
    Plant(PRECISION, "output_as", "cut at", ("qkv", "square", "wide"), r"result cut at", (1.0,), _same),
    Plant(PRECISION, "output_as", "wrapped", ("qkv", "square", "wide"), r"wrapped at", (1.0,), _same),
)  # fmt: skip
_FACTORS = (
    Plant(FACTOR, "output_as", "times", (*LINEARS, "norm", "act", "attention"), r"^(?!.*(head|column)).*multiplied by",
          (1.03, 0.96, 2.0), _same, times=8, within=0.005),
    Plant(FACTOR, "output_as", "columns times", ("attention",), r"head \d.* multiplied by", (1.05, 0.9), _same,
          times=3, features=_head, within=0.01),
    Plant(FACTOR, "output_as", "columns times", LINEARS, r"column \d+ multiplied by", (1.5, 0.5), _same, times=3,
          features=_column, within=0.02),
    Plant(FACTOR, "output_as", "plus", (*LINEARS, "attention"), r"added", (0.05,), _same),
    Plant(FACTOR, "attention_as", "cache times", ("attention",), r"keys and values times", (1.05, 0.9), _same,
          lambda a, p: not a.cap),
    Plant(FACTOR, "experts_as", "one left out", ("experts",), r"without expert \d"),
    Plant(FACTOR, "experts_as", "one times", ("experts",), r"expert \d's part", (1.3, 0.7), _same, times=3),
    Plant(FACTOR, "linear_as", "bias times", ("qkv",), r"bias times", (0.5, 3.0), _same, _biased, also=(SETTING,)),
    Plant(FACTOR, "output_as", "times", ("logits",), r"multiplied by|logits' scale", (1.05, 0.9),
          lambda a, p, n: (n, n * a.logits_scale), times=2, within=0.005, also=(SETTING,)),
)  # fmt: skip
PLANTS = (*_SETTINGS, *_ADDRESSES, *_PRECISIONS, *_FACTORS)
NO_CAUSE: dict[str, tuple[float, ...]] = {
    "noise": (0.02, 0.1), "noise of each element": (0.03, 0.1), "signs": (0.02, 0.1), "random values": (0.02, 0.1),
    "random zeros": (0.03, 0.1), "permuted": (4, 8), "squashed": (2.0, 1.0), "bent": (1.1, 0.9), "a wave": (0.03, 0.1),
    "factors of rows": (0.05, 0.1), "leaking": (0.05, 0.1), "drifting": (0.05, 0.1),
}  # fmt: skip
"""Variants of no family, with their strengths."""
_OF_EACH = 5
_NO_CAUSE_SORTS = (*LINEARS, "norm", "act", "attention")


@dataclass(frozen=True)
class CauseCase:
    """A case of fault laboratories with the cause that is right; None where there is none."""

    case: Case
    family: str
    right: Right | None

    @property
    def name(self) -> str:
        return self.case.name

    @property
    def half(self) -> str:
        return half(self.name, self.case.group)


def _case(plant: Plant, model: str, p: Place, rng: random.Random, right: Right | None, n: float) -> CauseCase:
    fault: dict[str, Any] = {"kind": plant.kind, "module": p.path, "param": plant.variant, "factor": n}
    where: tuple[int, ...] = ()
    parts = [model, f"{p.layer}.{p.name}", plant.variant.replace(" ", "-"), f"{n:g}"]
    if plant.features is not None:
        fault["features"] = plant.features(rng, p)
        first, last = fault["features"][0], fault["features"][-1]
        where = (first, first // HEAD) if last > first else (first,)
        parts.append(f"columns{first}to{last}")
    if plant.kind == "experts_as" and plant.variant.startswith("one "):
        fault["expert"] = rng.randrange(ARCHITECTURES[model].experts)
        where = (fault["expert"],)
        parts.append(f"expert{fault['expert']}")
    name = "-".join(parts)
    right = None if right is None else replace(right, where=where)
    golden = rng.choice(GOLDENS)
    return CauseCase(Case(name, model, fault, golden, culprits=p.culprits, group=plant.family), plant.family, right)


def _planted() -> list[CauseCase]:
    found = []
    for k, plant in enumerate(PLANTS):
        rng = random.Random(f"{SEED} {k} {plant.kind} {plant.variant}")
        models = list(ARCHITECTURES)
        rng.shuffle(models)
        count = 0
        for model in models:
            a = ARCHITECTURES[model]
            there = [p for p in places(a) if p.sort in plant.sorts and plant.fits(a, p)]
            if not there or count == plant.times:
                continue
            p, n, count = rng.choice(there), rng.choice(plant.numbers), count + 1
            right = Right((plant.family, *plant.also), plant.words, plant.values(a, p, n), plant.within)
            found.append(_case(plant, model, p, rng, right, n))
    return found


def _without_cause() -> list[CauseCase]:
    found = []
    for variant, numbers in NO_CAUSE.items():
        rng = random.Random(f"{SEED} {variant}")
        models = list(ARCHITECTURES)
        rng.shuffle(models)
        for model in models[:_OF_EACH]:
            p = rng.choice([p for p in places(ARCHITECTURES[model]) if p.sort in _NO_CAUSE_SORTS])
            plant = Plant(NONE, "output_as", variant, (), "")
            found.append(_case(plant, model, p, rng, None, rng.choice(numbers)))
    return found


CASES: tuple[CauseCase, ...] = (*_planted(), *_without_cause())
