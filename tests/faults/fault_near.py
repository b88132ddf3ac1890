"""Faults at twice the floor: as small as a wrong kernel may be before it is one among honest ones.

The problem: near the floor a judge shows what it can do, and how large a planted error is must be known beforehand. The
idea: closed formulas from the relative error wanted to a factor, for all elements, a head, a quarter, one column.
Not here: what is realised after rounding (fault_strength.py).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from fault_cases import Case
from fault_places import RANDOM, Fault, Place, planted

NEAR = 2 * 0.41 * 2.0**-8
"""Relative L2 error of a fault at twice the floor. Rounding to nearest leaves 0.41 * 2^-8 of a row of bfloat16 (0.39
where mantissas are spread as a logarithm, 0.42 for normal numbers); the planted error is twice that. What was planted
is rounded to bfloat16, too; ``faults.py --strengths`` says what it is then."""


def nears() -> Iterator[Case]:
    """Faults of `NEAR` at the module's output, by closed formulas that hold for columns of equal size."""
    sorts = ("linear", "linear with bias", "norm", "first norm", "later norm", "attention", "latent attention")
    sorts += ("activation", "gate", "picture", "picture linear")
    per_model = {m: [p for p in ps if p.sort in sorts] for m, ps in RANDOM.items()}
    rng = random.Random("near")
    forms = [
        _near_all,
        _near_jitter,
        _near_block,
        _near_column,
        _near_decode,
        _near_quarter,
        _near_jitter,
        _near_offset,
    ]
    decks: dict[str, list[Place]] = {}
    turn = 0
    while True:
        for model in per_model:
            if not decks.get(model):
                decks[model] = rng.sample(per_model[model], len(per_model[model]))
            place = decks[model].pop()
            layer = rng.choice(place.layers)
            form = forms[turn % len(forms)]
            turn += 1
            fault = form(place, rng)
            if fault is None:
                fault = _near_all(place, rng)
            whole, name = planted(place, layer, fault)
            yield Case(f"near-{model}-{name}", model, whole, "float32", culprits=place.expected(layer), group="near")
        turn += 1  # six models and eight forms: else each model would meet the same forms in every round


def _scaled(excess: float, **more: Any) -> Fault:
    return {"kind": "scale", "factor": round(1 + excess, 4), **more}


def _near_all(place: Place, rng: random.Random) -> Fault:
    return _scaled(NEAR)


def _near_jitter(place: Place, rng: random.Random) -> Fault:
    return {"kind": "jitter", "factor": round(NEAR, 4)}


def _near_block(place: Place, rng: random.Random) -> Fault:
    """One head."""
    first = place.block * rng.randrange(place.columns // place.block)
    share = place.block / place.columns
    return _scaled(NEAR / share**0.5, features=list(range(first, first + place.block)))


def _near_column(place: Place, rng: random.Random) -> Fault:
    return _scaled(NEAR * place.columns**0.5, features=[rng.randrange(place.columns)])


def _near_quarter(place: Place, rng: random.Random) -> Fault:
    """Every fourth column."""
    return _scaled(2 * NEAR, features=list(range(rng.randrange(4), place.columns, 4)))


def _near_decode(place: Place, rng: random.Random) -> Fault | None:
    return _scaled(NEAR, rows="decode") if place.rows else None


def _near_offset(place: Place, rng: random.Random) -> Fault | None:
    """Norms only: the size of a row's elements is 1 there."""
    return {"kind": "add", "factor": round(NEAR, 4)} if place.sort.endswith("norm") else None
