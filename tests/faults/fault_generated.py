"""Cases made from tables: which model, operator, layer, kind, strength, rows and columns, drawn with a fixed seed.

The problem: cases written by hand are few, and each one that a judge is tuned on can no longer tell how good the judge
is. The idea: places and options are listed once; a seeded draw goes through the models in turn and through each model's
list, so that all sorts come before one comes again. A case's name says all that was planted, and the name's hash says
in which half it is, so a half is full when it has as many as it should (`SIZES`).

Groups, by ``Case.group``:

    kind        one fault, random weights; against a golden of the same kind and a float32 one
    trained     one fault, trained weights; against float32, a part also against TP=2 or the V2 runner
    two         two faults in different layers; both must be named
    near        one fault at twice the floor
    everywhere  the same fault in every layer, as a wrong constant of a port; the first layer's is to be named

Not here: places (fault_places.py) and options (fault_options.py), the groups `near` and `everywhere` (fault_near.py,
fault_everywhere.py), cases written by hand and the halves (fault_cases.py), kinds (accprobe_fault_kinds.py).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

from fault_cases import CASES, HELD_OUT, TUNED, Case, half
from fault_everywhere import EVERYWHERE
from fault_near import nears
from fault_options import OPTIONS, Maker
from fault_places import RANDOM, SHARED, TRAINED, Fault, Place, planted, without

SIZES = {
    "kind": {TUNED: 40, HELD_OUT: 64},
    "trained": {TUNED: 24, HELD_OUT: 44},
    "two": {TUNED: 16, HELD_OUT: 33},
    "near": {TUNED: 20, HELD_OUT: 33},
}
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
        yield Case(
            f"two-{place.model}-{a[3]}-and-{b[3]}",
            place.model,
            [a[2], b[2]],
            "float32",
            culprits=a[0].expected(a[1]),
            second=second,
            group="two",
        )


def generated() -> list[Case]:
    return [
        *_filled("kind", _singles("kind", RANDOM, "serial", [("float32",)])),
        *_filled("trained", _singles("trained", TRAINED, "float32", [(), ("tp2",), ("v2",)])),
        *_filled("two", _twos()),
        *_filled("near", nears()),
        *EVERYWHERE,
    ]


GENERATED: list[Case] = generated()
EVERY: list[Case] = [*CASES, *GENERATED]
