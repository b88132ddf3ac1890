"""On which grid a tensor's numbers lie: bfloat16 numbers in a float32 tensor are rounded as bfloat16 is.

The problem: HDF5, npz and numpy know no bfloat16 and no 8-bit floats, and tools that write them store float32; with the
unit of that container a right operator is wrong by a factor of hundreds. The idea: a value of float32 at random lies on
bfloat16's grid with probability 2**-16, so that n of them do with 2**-16n: where that is below 2**-64, the tensor
becomes one of the coarser dtype, which is exact. Few-valued tensors (zeros, small integers, powers of two) prove
nothing; the call's other tensors decide, then the dump's other calls. A float32 kernel that rounds to bfloat16 is
wrong, although its output lies on the grid: an output's grid counts only if its inputs lie on it as well, if the call
names that dtype (a cast), or if the dump as a whole keeps such numbers in the wider dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from vllm_accprobe.kernels.float_formats import FORMATS
from vllm_accprobe.opcheck.reference import Call

BITS = {name: bits for name, (bits, _) in FORMATS.items() if not name.endswith("fnuz")}
"""Significant bits of the dtypes between which a grid is searched for, the leading one counted; the coarsest first."""
PROOF = 64
"""Bits that must be 0 by chance: among a million tensors one is mistaken with probability 2**-44 (derived)."""
LOOK, FIRST = 4096, 256
"""Values that are examined for a proof, and that usually are enough to see that there is none (chosen)."""
_TAPS, _SAMPLE, LARGEST = 3, 64, 1 << 22
"""For the dump as a whole: taps that must show it, calls that are examined, elements of one tensor (chosen)."""
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Tensor = Any  # a torch.Tensor


@cache
def coarser(dtype: str) -> tuple[str, ...]:
    """The dtypes with fewer significant bits that this torch has, the coarsest first."""
    bits = BITS.get(dtype, 0)
    return tuple(name for name, n in BITS.items() if n < bits and hasattr(torch, name))


def name_of(tensor: Tensor) -> str:
    return _name(tensor.dtype)


@cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def narrowed(tensor: Tensor, dtype: str) -> Tensor | None:
    """``tensor`` in ``dtype``, None where that changes a value (NaN equals NaN)."""
    if name_of(tensor) == dtype:
        return tensor
    small = tensor.to(getattr(torch, dtype))
    back = small.to(tensor.dtype)
    same = back == tensor
    if not bool(same.all()) and not bool((same | (torch.isnan(back) & torch.isnan(tensor))).all()):
        return None
    return small


def lies_on(tensor: Tensor) -> str:
    """The coarsest float dtype on whose grid all finite values provably lie, the tensor's own where no coarser one
    holds them; "" where the values prove nothing, and for what is no float."""
    own = name_of(tensor)
    if own not in BITS or tensor.is_meta or not tensor.numel():
        return ""
    flat = tensor.detach().reshape(-1)
    # the first one shows it, and nearly always does
    if not (finer := coarser(own)) or _has_own_bits(flat[:1], finer[-1]):
        return own
    first = flat[:: max(len(flat) // FIRST, 1)][:FIRST]
    if _has_own_bits(first, finer[-1]):
        return own
    first = _finite(first)
    names = [n for n in finer if narrowed(first, n) is not None]
    if not names:
        return own
    seen = _finite(flat[:: max(len(flat) // LOOK, 1)][:LOOK])
    proof = [n for n in names if _proves(seen, n, BITS[own])]
    for name in [*proof, *(n for n in names if n not in proof)]:
        if narrowed(_finite(flat), name) is not None:
            return name if name in proof else ""
    return own


def _has_own_bits(values: Tensor, finest: str) -> bool:
    """Whether a finite one has bits that ``finest`` drops: the quick answer for nearly every tensor."""
    words, dropped = values.view(_WORDS[values.element_size()]), (1 << (BITS[name_of(values)] - BITS[finest])) - 1
    if values.numel() == 1:
        return bool(words.item() & dropped) and math.isfinite(values.item())
    return bool((((words & dropped) != 0) & _is_finite(values)).any())


def _finite(values: Tensor) -> Tensor:
    """The finite ones, without zeros: those are on every grid."""
    return values[_is_finite(values) & (values != 0)]


def _is_finite(values: Tensor) -> Tensor:
    return torch.isfinite(values.float() if values.element_size() == 1 else values)  # torch lacks it for 8 bits


def _proves(values: Tensor, dtype: str, container: int) -> bool:
    """Whether values, finite and not 0, that lie on ``dtype``'s grid cannot do so by chance or by being simple. A
    number counts that uses the lower half of the dtype's bits; the numbers must not all be multiples of one step below
    2**bits of it, as small integers are."""
    bits = BITS[dtype]
    mantissa, exponent = torch.frexp(values.double().abs().unique())
    whole = torch.ldexp(mantissa, torch.tensor(bits)).long()  # an integer: the grid's significand
    lowest = whole & -whole
    busy = int((lowest < 1 << (bits // 2)).sum())
    if busy * (container - bits) < PROOF:
        return False
    smallest = exponent - bits + torch.log2(lowest.double()).long()  # of the lowest bit that is set
    return int(exponent.max() - smallest.min()) > bits


@dataclass(frozen=True)
class Sight:
    """What one call shows. entered, made: `lies_on` of the float tensors that went in and of an output; computed: the
    output is none of the inputs."""

    tap: str
    entered: tuple[str, ...]
    made: str
    container: str
    computed: bool


def sights(tap: str, call: Call) -> Iterable[Sight]:
    """One for each output of a call; large tensors are left out."""
    inputs = [t for t in _inputs(call) if t.numel() <= LARGEST]
    entered = tuple(filter(None, map(lies_on, inputs)))
    for output in call.outputs.values():
        if output.numel() <= LARGEST and name_of(output) in BITS:
            same = any(t.shape == output.shape and t.dtype == output.dtype and torch.equal(t, output) for t in inputs)
            yield Sight(tap, entered, lies_on(output), name_of(output), not same)


def kept(seen: Iterable[Sight], declared: Iterable[str]) -> dict[str, str]:
    """Container → the dtype whose numbers a dump keeps in it, where its calls tell. A coarser one: what computes from
    numbers of the grid gives numbers of the grid, at three taps or more and in half of the calls or more. A genuine
    float32 model has such inputs (its embeddings come from a bfloat16 checkpoint) and not such outputs: where three
    taps tell and it is no coarser one, it is the container's own. declared: dtypes of the dump's tensors; a dump that
    has some in the coarser dtype keeps that dtype as it is."""
    found: dict[str, str] = {}
    has = set(declared)
    views = [s for s in seen if s.made and s.entered and s.computed]
    for container in sorted({s.container for s in views}):
        for name in coarser(container):
            on = [s for s in views if s.container == container and _all_on(s.entered, name)]
            both = [s for s in on if BITS[s.made] <= BITS[name]]
            if name not in has and len({s.tap for s in both}) >= _TAPS and 2 * len(both) >= len(on):
                found.setdefault(container, name)
        if len({s.tap for s in views if s.container == container}) >= _TAPS:
            found.setdefault(container, container)
    return found


def _all_on(states: Iterable[str], dtype: str) -> bool:
    return all(BITS[s] <= BITS[dtype] for s in states)


def settled(call: Call, keeps: Callable[[], Mapping[str, str]]) -> Call:
    """``call`` with its tensors in the dtypes whose numbers they hold. keeps: gives `kept` of the whole dump, called
    only where the call does not show it. Tensors are distinguished: a float32 weight with bfloat16 activations stays
    one."""
    states = {role: lies_on(t) for role, t in call.outputs.items()}
    doubtful = {
        role: t for role, t in call.outputs.items()
        if states[role] != name_of(t) and coarser(name_of(t))
    }  # fmt: skip
    if not doubtful or (not any(states[role] for role in doubtful) and not _widened(call, doubtful, keeps)):
        return call
    inputs = list(_inputs(call))
    entered = {id(t): lies_on(t) for t in inputs}
    known = [s for s in entered.values() if s]
    grids: dict[str, str] = {}
    for role, t in doubtful.items():
        state = states[role]
        if state and (_named(call, state) or _credible(call, name_of(t), state, known, keeps)):
            grids[role] = state
    outputs = dict(call.outputs)
    for role, t in doubtful.items():
        name = grids.get(role) or ("" if states[role] else _silent(t, grids, call.outputs, inputs, entered, keeps))
        small = narrowed(t, name) if name else None
        if small is not None:
            outputs[role], grids[role] = small, name
    if not grids:
        return call
    return _with(replace(call, outputs=outputs), _Narrow(call, grids))


def _widened(call: Call, outputs: Mapping[str, Tensor], keeps: Callable[[], Mapping[str, str]]) -> bool:
    """Whether few-valued outputs alone may be of a coarser dtype: the call's inputs lie on such a grid, or there are
    none that tell and the dump keeps such numbers."""
    if not any(t.numel() for t in outputs.values()):
        return False
    known = [(t, s) for t in _inputs(call) if (s := lies_on(t))]
    if known:
        return any(s != name_of(t) for t, s in known)
    return any(container != name for container, name in keeps().items())


def _silent(
    t: Tensor, grids: Mapping[str, str], outputs: Mapping[str, Tensor], inputs: list[Tensor],
    entered: Mapping[int, str], keeps: Callable[[], Mapping[str, str]],
) -> str:  # fmt: skip
    """The grid of an output whose own values prove nothing: that of the call's other outputs, of what went in, of the
    dump, in this order; only of the same container."""
    near = [grid for role, grid in grids.items() if outputs[role].dtype == t.dtype]
    if not near:
        states = [entered[id(x)] for x in inputs if x.dtype == t.dtype and entered[id(x)]]
        if states and name_of(t) not in states:
            near = states
        elif not states and name_of(t) in keeps():
            near = [keeps()[name_of(t)]]
    grid = max(near, key=lambda n: BITS[n], default="")
    return "" if grid == name_of(t) else grid


def _credible(
    call: Call, container: str, dtype: str, known: list[str], keeps: Callable[[], Mapping[str, str]]
) -> bool:  # fmt: skip
    """Whether an output that lies on the grid of ``dtype`` was rounded to it by right: all that went in lies there, or
    the dump keeps such numbers; where neither tells, the call's weights do."""
    if known and _all_on(known, dtype):
        return True
    found = keeps().get(container)
    if found is not None:
        return found != container and BITS[dtype] <= BITS[found]
    weights = [s for s in map(lies_on, call.params.values()) if s]
    return not known and bool(weights) and _all_on(weights, dtype)


def _named(call: Call, dtype: str) -> bool:
    """Whether a call is known to give ``dtype``: a cast."""
    target = getattr(torch, dtype)
    return any(a is target for a in (*call.args, *call.kwargs.values()))


def _inputs(call: Call) -> Iterable[Tensor]:
    """The float tensors that go in: a module's, or an operator's arguments."""
    return (t for t in _tensors([*call.inputs.values(), *call.args, *call.kwargs.values()]) if name_of(t) in BITS)


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _tensors(v)


class _Narrow:
    """What goes in, in the dtypes that it holds: on the outputs' grid where it lies there, on its own where that is
    finer, unchanged where it is the container's or another container."""

    def __init__(self, call: Call, grids: Mapping[str, str]):
        self.containers = {call.outputs[role].dtype: grid for role, grid in grids.items()}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self(v) for v in value)
        if not isinstance(value, torch.Tensor) or value.dtype not in self.containers:
            return value
        grid, state = self.containers[value.dtype], lies_on(value)
        target = state if state and BITS[state] > BITS[grid] else grid
        small = narrowed(value, target)
        return value if small is None else small


def _with(call: Call, change: _Narrow) -> Call:
    extra = {k: change(v) if isinstance(v, torch.Tensor) else v for k, v in call.extra.items()}
    return replace(
        call, inputs={k: change(v) for k, v in call.inputs.items()}, args=tuple(change(a) for a in call.args),
        kwargs={k: change(v) for k, v in call.kwargs.items()}, params={k: change(v) for k, v in call.params.items()},
        extra=extra,
    )  # fmt: skip


def spread(items: list[Any]) -> list[Any]:
    """As many of them as are examined for the dump as a whole, evenly."""
    return items[:: max(math.ceil(len(items) / _SAMPLE), 1)]
