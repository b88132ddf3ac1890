"""What can be wrong with each sort of operator, as strong as in the cases written by hand.

The problem: a fault's factor means another error in each kind and place. The idea: an option knows its place and draws
factor, rows and columns from those that are visible there. `OPTIONS` names those of each sort of place.
Not here: the places (places.py), faults of a given size (generated.py).
"""

import random
from collections.abc import Callable
from typing import Any

from lab.places import Fault, Place

Option = Callable[[random.Random], Fault]
Maker = Callable[[Place], Option]


def _rows(place: Place, rng: random.Random) -> Fault:
    """All rows in half of the draws."""
    return {"rows": rng.choice(place.rows)} if place.rows and rng.random() < 0.5 else {}


def _everything(kind: str, *factors: float, rows: bool = True, **more: Any) -> Maker:
    def option(place: Place) -> Option:
        return lambda rng: {"kind": kind, "factor": rng.choice(factors), **more} | (_rows(place, rng) if rows else {})

    return option


def column(kind: str, *sizes: float) -> Maker:
    """One column, off by so much that a row of equal columns is off by one of ``sizes``."""

    def option(place: Place) -> Option:
        def fault(rng: random.Random) -> Fault:
            factor = round(1 + rng.choice(sizes) * place.columns**0.5, 3)
            return {"kind": kind, "factor": factor, "features": [rng.randrange(place.columns)]}

        return fault

    return option


def one_of(kind: str, *factors: float) -> Maker:
    """One column (of a product: one row of the weight) by one of ``factors``."""
    return lambda place: lambda rng: {
        "kind": kind, "factor": rng.choice(factors), "features": [rng.randrange(place.columns)],
    }  # fmt: skip


def block(*factors: float) -> Maker:
    def option(place: Place) -> Option:
        def fault(rng: random.Random) -> Fault:
            first = place.block * rng.randrange(place.columns // place.block)
            features = list(range(first, first + place.block))
            return {"kind": "scale", "factor": rng.choice(factors), "features": features}

        return fault

    return option


def expert(kind: str, *factors: float, **more: Any) -> Maker:
    return lambda place: lambda rng: {
        "kind": kind, "factor": rng.choice(factors), "expert": rng.randrange(place.experts), **more,
    }  # fmt: skip


def at(kind: str, factor: float, *rows: str) -> Maker:
    return lambda place: lambda rng: {"kind": kind, "factor": factor, "rows": rng.choice(rows)}


_SCALE = _everything("scale", 1.02, 1.03, 1.05, 1.1, 0.97)
_LINEAR = (
    _SCALE, column("scale", 0.006, 0.012, 0.03), block(1.03, 1.06), _everything("product", 0.03, 0.05, 0.1),
    one_of("product", 0.3, 0.5), _everything("short", 1, 2, rows=False), _everything("low_sum", 1, rows=False),
    _everything("coarse", 5, 6),
)  # fmt: skip
_NORM = (
    _SCALE, column("scale", 0.006, 0.012), column("weight", 0.006, 0.012), _everything("coarse", 5, 6),
    _everything("add", 0.02, 0.05),
)  # fmt: skip
_ATTENTION = (
    _everything("attn", 1.02, 1.03, 1.06, 0.97, rows=False), block(1.03, 1.06, 0.97), _SCALE,
    at("cache", 0.0, "position:5", "position:12", "position:21"), _everything("cache", 1.05, 1.1),
)  # fmt: skip
OPTIONS: dict[str, tuple[Maker, ...]] = {
    "linear": _LINEAR,
    "linear with bias": (*_LINEAR, _everything("bias", 0.3, 1.0)),
    "norm": _NORM,
    "first norm": (*_NORM, _everything("eps", 0.02, 0.05, rows=False)),
    "later norm": (*_NORM, _everything("eps", 0.06, 0.2, rows=False)),
    "attention": (
        *_ATTENTION,
        at("stale", 1.0, "position:10", "position:30"),
        _everything("setting", 100, 200, rows=False, param="impl.sliding_window"),
        _everything("setting", 20.0, 30.0, rows=False, param="impl.logits_soft_cap"),
    ),
    "latent attention": _ATTENTION,
    "activation": (_everything("act", 1.02, 1.05, 1.1), _SCALE, column("scale", 0.012, 0.03)),
    "gate": (_SCALE, column("scale", 0.012, 0.03)),
    "rotation": (_everything("angle", 1.0005, 1.002, 1.01, rows=False),),
    "picture": (_everything("scale", 1.03, 0.97), column("scale", 0.006, 0.012), _everything("coarse", 5, 6)),
    "picture linear": (
        *(_everything("scale", 1.03, 0.97), column("scale", 0.006, 0.012), _everything("coarse", 5, 6)),
        *(_everything("product", 0.03, 0.1), _everything("bias", 1.0)),
    ),
    "router": (column("scale", 0.03), _everything("coarse", 5), _SCALE),
    "experts": (
        lambda place: lambda rng: {"kind": "route", "factor": rng.choice((1, 3)), "rows": rng.choice(place.rows)},
    ),
    "expert": (expert("expert", 1.03, 1.06), _SCALE),
    "expert weights": (
        expert("noise", 0.05, 0.1, param="w2_weight"),
        expert("noise", 0.05, 0.1, param="w13_weight"),
    ),
    "shared": (_everything("scale", 1.03, 1.06), _everything("zero", 0.0, rows=False)),
    "small": (_everything("scale", 1.03, 1.06),),
    "embedding": (
        _everything("scale", 1.02, 1.05, rows=False),
        column("scale", 0.006, 0.012),
        _everything("coarse", 5, 6, rows=False),
    ),
    "residual": (_everything("scale", 1.02, 1.05, output=1),),
    "head": (
        lambda place: lambda rng: {"kind": "logits", "factor": 1.03, "features": list(range(448, 512))},
        lambda place: lambda rng: {"kind": "logits", "factor": 1.25, "features": [rng.randrange(512)]},
        lambda place: lambda rng: {"kind": "head", "factor": 1.0, "features": [rng.randrange(512)]},
    ),
    "logits": (_everything("scale", 1.02, 1.05, rows=False),),
}
