"""What all recurrences share: runs of tokens, the slots their states lie in, and how rounding errors pile up.

The problem: an honest kernel rounds on the way (operands and chunk states to the model's dtype, sums in float32), what
it puts into the state stays there for later tokens, and how much of it is left depends on the decays and keys of this
very call. The idea: the recurrence itself tells. It is computed a few times more, in float32, with each quantity that a
kernel may round multiplied by 1 + u r, r uniform in [-1, 1], which has the variance of a rounding to nearest at most;
the spread of the results is the noise [Monte Carlo arithmetic: D. S. Parker, UCLA CSD-970002, 1997]. So errors in the
state add up as the independent ones that they are, and fade with the decay: after T tokens sqrt(min(T, 1 / (1 - a**2)))
of one token's for a decay a, never T of them.
Not here: the recurrences (delta_rule.py, scan.py, short_conv.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import SUM, Call, Declined

SAMPLES = 8
"""Chosen: runs that the spread is taken from. The mean square of 8 is within a factor of 3 in all but 1 of 1,000; the
root mean square over a head's channels, which has hundreds, is the least that each gets."""
EXPONENT = 2.0**-18
"""Chosen: relative error of a decay, an exponential of a product that was rounded in float32 (vLLM's CPU kernels have
exp_u20: 2**-20; fast GPU ones 2**-22)."""
Rounds = Callable[[Any, float], Any]
Tensor = Any  # a torch.Tensor


def _as_it_is(x: Tensor, unit: float) -> Tensor:
    return x


def scattered(evaluate: Callable[..., tuple[Tensor, ...]], *operands: Tensor | None) -> tuple[Any, ...]:
    """((value, noise), ...) for each result of ``evaluate(rounds, *operands)``. operands: float64, or None; ``rounds(x,
    unit)`` is x as an honest kernel may have it. Operands get a leading dimension, one or SAMPLES long; each result has
    it too. The last dimension is one head's: no element gets less noise than its root mean square."""
    exact = evaluate(_as_it_is, *(None if x is None else x.unsqueeze(0) for x in operands))
    generator = torch.Generator().manual_seed(0)

    def rounds(x: Tensor, unit: float) -> Tensor:
        return x * (1.0 + unit * (2.0 * torch.rand(x.shape, generator=generator, dtype=x.dtype) - 1.0))

    narrow = (None if x is None else x.float().expand(SAMPLES, *x.shape) for x in operands)
    with torch.no_grad():
        samples = evaluate(rounds, *narrow)
    found = []
    for value, sample in zip(exact, samples, strict=True):
        spread = (sample.double() - value).square().mean(0)
        head = spread.mean(-1, keepdim=True)
        found.append((value[0], torch.maximum(spread, head).sqrt() + SUM * value[0].abs()))
    return tuple(found)


def read_noise(state: Tensor, weights: Tensor, unit: float, rounds: Rounds) -> Tensor | float:
    """What rounding the entries of ``state`` [..., k, v] for one product with ``weights`` [..., k] adds to it,
    [..., v]: 0 for the exact value."""
    if rounds is _as_it_is:
        return 0.0
    size = torch.einsum("...k,...kv->...v", weights * weights, state * state).sqrt()
    return rounds(torch.ones_like(size), unit) * size - size


def runs(cu_seqlens: Tensor | None, tokens: int) -> list[tuple[int, int]]:
    """(begin, end) of each sequence. Raises Declined where they are not those of ``tokens`` rows."""
    if cu_seqlens is None:
        return [(0, tokens)]
    ends = [int(e) for e in cu_seqlens]
    if not ends or ends[0] != 0 or ends[-1] > tokens or sorted(ends) != ends:
        raise Declined("its sequences' bounds do not fit its rows")
    return list(pairwise(ends))


def slots(indices: Tensor | None, count: int, states: int, null: int | None = None) -> Iterator[int | None]:
    """The state's place of each sequence, None for padding: below 0, or ``null``. Raises Declined."""
    for n in range(count):
        if indices is None:
            yield n
            continue
        at = int(indices.reshape(len(indices), -1)[n, 0])
        if at < 0 or at == null:
            yield None
        elif at >= states:
            raise Declined("a state's index lies outside of the states that were captured")
        else:
            yield at


def arguments(call: Call, names: str) -> Mapping[str, Any]:
    """An operator's arguments, or a module's inputs, by the names of its signature, in order; missing ones are None."""
    order = names.split()
    found: dict[str, Any] = dict.fromkeys(order)
    found.update(zip(order, call.args, strict=False))
    for place, name in enumerate(order):
        if name in call.kwargs:
            found[name] = call.kwargs[name]
        elif name in call.inputs:
            found[name] = call.inputs[name]
        elif str(place) in call.inputs:
            found[name] = call.inputs[str(place)]
    return found


def place_of(call: Call, names: str, name: str) -> str:
    """The role that argument ``name`` has after the call: ``inplace.input.0``, or ``inplace.input.state`` by name."""
    if name in call.kwargs:
        return f"inplace.input.{name}"
    return f"inplace.input.{names.split().index(name)}"


def given(found: Mapping[str, Any], *names: str) -> list[Any]:
    """These arguments in float64. Raises Declined where one is no tensor."""
    for name in names:
        if not isinstance(found[name], torch.Tensor):
            raise Declined(f"argument {name} is no tensor")
    return [found[name].double() for name in names]


def changed(states: Tensor, parts: Mapping[int, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """(value, noise) of all states, float64, where ``parts`` are new and the others as they were."""
    value, noise = states.double().clone(), torch.zeros(states.shape, dtype=torch.float64)
    for at, (y, e) in parts.items():
        value[at], noise[at] = y.reshape(states.shape[1:]), e.reshape(states.shape[1:])
    return value, noise
