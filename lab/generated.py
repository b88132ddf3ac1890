"""Cases made from tables: which model, operator, layer, kind, strength, rows and columns, drawn with a fixed seed.

The problem: cases written by hand are few, and each one that a judge is tuned on can no longer tell how good the judge
is. The idea: places and options are listed once; a seeded draw goes through the models in turn and through each model's
list, so that all sorts come before one comes again. A case's name says all that was planted, and the name's hash says
in which half it is, so a half is full when it has as many as it should (`SIZES`).

Groups, by ``Case.group``:

    kind        one fault, random weights; against a golden of the same kind and a float32 one
    trained     one fault, trained weights; against float32, a part also against TP=2 or the V2 runner
    two         two faults in different layers; both must be named
    near        one fault at twice the floor, by closed formulas from the relative error wanted to a factor, for all
                elements, a head, a quarter, one column: as small as a wrong kernel may be before it is rounding
    everywhere  the same fault in every layer, as a wrong constant of a port; the first layer's is to be named

Not here: places (places.py) and options (options.py), cases written by hand and the halves (cases.py), kinds
(planted/accprobe_fault_kinds.py), what is left of a near fault after rounding (strength.py).
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lab.cases import CASES, HELD_OUT, TUNED, Case, half
from lab.options import OPTIONS, Maker
from lab.places import RANDOM, SHARED, TRAINED, Fault, Place, planted, without

SIZES = {
    "kind": {TUNED: 40, HELD_OUT: 64}, "trained": {TUNED: 24, HELD_OUT: 44}, "two": {TUNED: 16, HELD_OUT: 33},
    "near": {TUNED: 20, HELD_OUT: 33},
}  # fmt: skip
"""Cases by group and half. Chosen: 60, 40, 30 and 30 held out, and a few more."""


def draws(
    places: dict[str, list[Place]], seed: str, options: Mapping[str, Sequence[Maker]] = OPTIONS
) -> Iterator[tuple[Place, int, Fault, str]]:
    """Endless: models in turn; of each model all its places and options, shuffled, before one comes again."""
    rng = random.Random(seed)
    decks: dict[str, list[tuple[Place, Maker]]] = {model: [] for model in places}
    while True:
        for model, own in places.items():
            if not decks[model]:
                decks[model] = _shuffled(own, rng, options)
            place, option = decks[model].pop(0)
            layer = rng.choice(place.layers)
            yield (place, layer, *planted(place, layer, option(place)(rng)))


def _shuffled(
    places: Sequence[Place], rng: random.Random, options: Mapping[str, Sequence[Maker]]
) -> list[tuple[Place, Maker]]:
    """Every place with every option, so ordered that each kind of fault comes, each time at the place that was met
    least, before any comes again."""
    by_kind: dict[tuple[str, bool], list[tuple[Place, Maker]]] = {}
    for place in places:
        for option in options[place.sort]:
            example = option(place)(random.Random(0))
            by_kind.setdefault((example["kind"], "features" in example), []).append((place, option))
    met: dict[str, int] = {}
    deck = []
    while by_kind:
        for kind in rng.sample(list(by_kind), len(by_kind)):
            left = by_kind[kind]
            entry = min(rng.sample(left, len(left)), key=lambda e: met.get(e[0].op, 0))
            met[entry[0].op] = met.get(entry[0].op, 0) + 1
            deck.append(entry)
            left.remove(entry)
            if not left:
                del by_kind[kind]
    return deck


def _filled(group: str, drawn: Iterator[Case]) -> list[Case]:
    """The first cases of each half, as many as the half should have."""
    wanted, cases, names = dict(SIZES[group]), [], set()
    while any(wanted.values()):
        case = next(drawn)
        if any(
            case.model == model and fault["module"].endswith(tail) for fault in case.faults for model, tail in SHARED
        ):
            continue
        place = half(case.name, group)
        if case.name not in names and wanted[place]:
            names.add(case.name)
            wanted[place] -= 1
            cases.append(case)
    return cases


def _singles(
    group: str, places: dict[str, list[Place]], golden: str, also: Sequence[tuple[str, ...]]
) -> Iterator[Case]:
    for i, (place, layer, fault, name) in enumerate(draws(places, group)):
        model = place.model
        more = tuple("tp2" if way == "v2" and _is_moe(model) else way for way in also[i // len(places) % len(also)])
        name = f"{group}-{model.removeprefix('trained-')}-{name}"
        yield Case(name, model, fault, golden, culprits=place.expected(layer), also=more, group=group)


def _is_moe(model: str) -> bool:
    """The V2 runner's kernels of experts and MLA run in Triton's interpreter here: minutes for a run."""
    return model.endswith(("moe", "deepseek-v2"))


def _twos() -> Iterator[Case]:
    """Two single faults of one model, the first in an earlier layer; neither in what all layers share."""
    skipped = ("rotation", "embedding", "head", "logits", "residual", "router", "experts", "expert weights")
    places = {m: without([p for p in ps if "{}" in p.path], *skipped) for m, ps in (RANDOM | TRAINED).items()}
    waiting: dict[str, tuple[Place, int, Fault, str]] = {}
    for drawn in draws(places, "two"):
        place, layer, fault, _ = drawn
        if fault["kind"] in ("stale", "setting", "zero", "low_sum") or place.op.startswith("visual"):
            continue
        first = waiting.pop(place.model, None)
        if first is None:
            waiting[place.model] = drawn
            continue
        if first[1] == layer:
            waiting[place.model] = drawn
            continue
        a, b = sorted((first, drawn), key=lambda d: d[1])
        second = b[0].expected(b[1]) or (b[2]["module"],)
        yield Case(f"two-{place.model}-{a[3]}-and-{b[3]}", place.model, [a[2], b[2]], "float32",
                   culprits=a[0].expected(a[1]), second=second, group="two")  # fmt: skip


NEAR = 2 * 0.41 * 2.0**-8
"""Relative L2 error of a fault at twice the floor. Rounding to nearest leaves 0.41 * 2^-8 of a row of bfloat16 (0.39
where mantissas are spread as a logarithm, 0.42 for normal numbers); the planted error is twice that. What was planted
is rounded to bfloat16, too; ``python -m lab.faults --strengths`` says what it is then."""


def nears() -> Iterator[Case]:
    """Faults of `NEAR` at the module's output, by closed formulas that hold for columns of equal size."""
    sorts = ("linear", "linear with bias", "norm", "first norm", "later norm", "attention", "latent attention")
    sorts += ("activation", "gate", "picture", "picture linear")
    per_model = {m: [p for p in ps if p.sort in sorts] for m, ps in RANDOM.items()}
    rng = random.Random("near")
    decks: dict[str, list[Place]] = {}
    turn = 0
    while True:
        for model in per_model:
            if not decks.get(model):
                decks[model] = rng.sample(per_model[model], len(per_model[model]))
            place = decks[model].pop()
            layer = rng.choice(place.layers)
            form = _FORMS[turn % len(_FORMS)]
            turn += 1
            fault = form(place, rng)
            if fault is None:
                fault = _near_all(place, rng)
            whole, name = planted(place, layer, fault)
            yield Case(f"near-{model}-{name}", model, whole, "float32", culprits=place.expected(layer), group="near")
        turn += 1  # six models and eight forms: else each model would meet the same forms in every round


def _scaled(excess: float, **more: Any) -> Fault:
    return {"kind": "scale", "factor": round(1 + excess, 4), **more}


def _near_block(place: Place, rng: random.Random) -> Fault:
    """One head."""
    first = place.block * rng.randrange(place.columns // place.block)
    share = place.block / place.columns
    return _scaled(NEAR / share**0.5, features=list(range(first, first + place.block)))


def _near_all(place: Place, rng: random.Random) -> Fault | None:
    return _scaled(NEAR)


def _near_jitter(place: Place, rng: random.Random) -> Fault | None:
    return {"kind": "jitter", "factor": round(NEAR, 4)}


_FORMS: tuple[Callable[[Place, random.Random], Fault | None], ...] = (
    _near_all, _near_jitter, _near_block,
    lambda place, rng: _scaled(NEAR * place.columns**0.5, features=[rng.randrange(place.columns)]),
    lambda place, rng: _scaled(NEAR, rows="decode") if place.rows else None,
    lambda place, rng: _scaled(2 * NEAR, features=list(range(rng.randrange(4), place.columns, 4))),
    _near_jitter,
    lambda place, rng: {"kind": "add", "factor": round(NEAR, 4)} if place.sort.endswith("norm") else None,
)  # fmt: skip
"""All elements, each by another factor, a head, one column, rows of decode, every fourth column, an offset of norms
(the size of a row's elements is 1 there)."""


_L = "model.layers"


def _in_all(path: str, layers: int, kind: str, factor: float, **more: Any) -> list[Fault]:
    return [{"kind": kind, "module": path.format(i), "factor": factor, **more} for i in range(layers)]


def _everywhere(name: str, model: str, faults: list[Fault], golden: str, culprits: tuple[str, ...] = ()) -> Case:
    return Case(f"everywhere-{name}", model, faults, golden, culprits=culprits, group="everywhere")


_MIX0 = f"{_L}.0.block_sparse_moe.experts"
EVERYWHERE = [
    _everywhere("scale", "qwen2", _in_all(f"{_L}.{{}}.mlp.down_proj", 4, "scale", 1.03), "float32"),
    _everywhere("rope-table", "llama", _in_all(f"{_L}.{{}}.self_attn.rotary_emb", 1, "angle", 1.01), "serial"),
    _everywhere("norm-eps", "qwen2", [
        fault for name in ("input", "post_attention")
        for fault in _in_all(f"{_L}.{{}}.{name}_layernorm", 4, "eps", 0.05)], "float32"),
    _everywhere("softmax-scale", "qwen2-moe", _in_all(f"{_L}.{{}}.self_attn.attn", 3, "attn", 1.05), "float32"),
    _everywhere("window", "llama", _in_all(f"{_L}.{{}}.self_attn.attn", 3, "setting", 100,
                param="impl.sliding_window"), "serial"),
    _everywhere("activation", "trained-qwen2", _in_all(f"{_L}.{{}}.mlp.act_fn", 4, "act", 1.05), "float32"),
    _everywhere("bias-forgotten", "qwen2", _in_all(f"{_L}.{{}}.self_attn.qkv_proj", 4, "bias", 1.0), "serial"),
    _everywhere("soft-cap", "trained-llama", _in_all(f"{_L}.{{}}.self_attn.attn", 4, "setting", 10.0,
                param="impl.logits_soft_cap"), "float32"),
    _everywhere("column", "llama", _in_all(f"{_L}.{{}}.mlp.gate_up_proj", 3, "scale", 1.2, features=[300]), "serial"),
    _everywhere("expert-scale", "mixtral", _in_all(f"{_L}.{{}}.block_sparse_moe.experts.routed_experts.quant_method",
                2, "expert", 1.05, expert=1), "float32", (f"{_MIX0}.routed_experts.quant_method", _MIX0)),
]  # fmt: skip
"""Ten: a scale, table (one rotary embedding is shared by all layers), eps, softmax scale, mask, activation, bias
forgotten, wrong constant, one column, one expert."""


def generated() -> list[Case]:
    return [
        *_filled("kind", _singles("kind", RANDOM, "serial", [("float32",)])),
        *_filled("trained", _singles("trained", TRAINED, "float32", [(), ("tp2",), ("v2",)])),
        *_filled("two", _twos()), *_filled("near", nears()), *EVERYWHERE,
    ]  # fmt: skip


GENERATED: list[Case] = generated()
EVERY: list[Case] = [*CASES, *GENERATED]
