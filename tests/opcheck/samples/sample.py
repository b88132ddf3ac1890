"""What a sample of a reference is: a call with what a right kernel makes of it, and the same with a planted error.

A maker is a function of `Draw` and the name of a fault, ``""`` for the right kernel. It gives a `Made`: the call with
its outputs. An output that is an array of floats is what the definition gives, in float64: the reference's value must
be equal to it. A tensor is what a kernel wrote. Definitions are written out with numpy; none uses the package.
test_every_reference.py runs all of them. Not here: the samples (atb.py, fused.py, modules.py, paged.py, recurrent.py,
samplers.py, scaled.py).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from opcheck.samples.dtypes import BRAIN, INT, SINGLE

from vllm_accprobe.opcheck.reference import Call

Array = Any


class Draw:
    """Numbers of one seed: ``d(3, 4)`` are normal ones in the sample's dtype."""

    def __init__(self, seed: int, dtype: torch.dtype = BRAIN):
        self.seed, self.dtype, self.rng = seed, dtype, np.random.default_rng(seed)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> torch.Tensor:
        return torch.from_numpy(scale * self.rng.standard_normal(shape)).to(dtype or self.dtype)

    def below(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high))

    def ints(self, low: int, high: int, *shape: int, dtype: torch.dtype = INT) -> torch.Tensor:
        return torch.from_numpy(self.rng.integers(low, high, shape)).to(dtype)

    def between(self, low: float, high: float, *shape: int, dtype: torch.dtype = SINGLE) -> torch.Tensor:
        return torch.from_numpy(self.rng.uniform(low, high, shape)).to(dtype)


@dataclass(frozen=True)
class Made:
    """exact: by role, what the definition gives; bump: by what an integer is off in a planted error."""

    call: Call
    exact: Mapping[str, Array] = field(default_factory=dict)
    bump: int = 1


Maker = Callable[..., "Made | list[Made] | None"]


@dataclass(frozen=True)
class Sample:
    """make(draw, fault, **variant) gives one or several, or None where the variant cannot have the fault."""

    make: Maker
    faults: tuple[str, ...]
    seeds: int
    dtypes: tuple[torch.dtype, ...]
    variants: Sequence[Mapping[str, Any]]

    def each(self, fault: str = "") -> list[tuple[str, Made]]:
        """For every seed, dtype and variant: which one, and what is made."""
        found = []
        for seed in range(self.seeds):
            for dtype in self.dtypes:
                for variant in self.variants:
                    made = self.make(Draw(seed, dtype), fault, **variant)
                    many = made if isinstance(made, list) else [made]
                    place = f"{fault!r} seed {seed} {dtype} {variant}"
                    found += [(f"{place} {n}", m) for n, m in enumerate(many) if m is not None]
        return found


ONE_OFF = "one number is wrong"
"""A fault that needs no kernel: each output in turn has one number wrong (`faulty`)."""
SAMPLES: dict[str, Sample] = {}


def sample(
    *faults: str, seeds: int = 1, dtypes: tuple[torch.dtype, ...] = (BRAIN,), variants: Sequence[Any] = ({},)
) -> Callable[[Maker], Maker]:
    """Puts a maker into the table, under its module's and its own name."""

    def add(make: Maker) -> Maker:
        name = f"{make.__module__.rpartition('.')[2]}: {make.__name__}"
        assert name not in SAMPLES, name
        SAMPLES[name] = Sample(make, faults, seeds, dtypes, variants)
        return make

    return add


DECLINED: dict[str, Callable[[], Iterator[tuple[Call, str]]]] = {}


def declined(calls: Callable[[], Iterator[tuple[Call, str]]]) -> Callable[[], Iterator[tuple[Call, str]]]:
    """Puts calls that no reference may judge into the table, each with a pattern of the reason."""
    DECLINED[f"{calls.__module__.rpartition('.')[2]}: {calls.__name__}"] = calls
    return calls


def made(cls: str, *args: Any, outputs: Mapping[str, Any], dtype: torch.dtype = BRAIN, **more: Any) -> Made:
    """more: further fields of the Call. An output (array, dtype) is stored in that dtype, an array in ``dtype``."""
    stored, exact = {}, {}
    for role, y in outputs.items():
        y, kind = y if isinstance(y, tuple) else (y, dtype)
        if not isinstance(y, torch.Tensor):
            y = np.ascontiguousarray(y)
            exact |= {role: y} if y.dtype.kind == "f" and kind.is_floating_point else {}
            y = torch.from_numpy(y).to(kind)
        stored[role] = y
    return Made(Call("tap", cls, args=args, outputs=stored, **more), exact)


def wide(t: torch.Tensor) -> Array:
    """What a kernel reads, as numpy's float64."""
    return t.detach().double().numpy()


def faulty(t: torch.Tensor, bump: int = 1) -> torch.Tensor:
    """``t`` with one element wrong: the largest by a twentieth of itself, an integer by ``bump``."""
    flat = t.clone().reshape(-1)
    at = int(torch.nan_to_num(flat.double(), posinf=0.0, neginf=0.0).abs().argmax())
    if flat.dtype == torch.bool:
        flat[at] = ~flat[at]
    elif t.is_floating_point():
        flat[at] = flat[at] * 1.05 + (0.5 if not float(flat[at]) else 0.0)
    else:
        flat[at] = flat[at] - bump
    return flat.reshape(t.shape)
