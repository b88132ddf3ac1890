"""Recurrent modules whose convolution and recurrence are no modules, computed from the beginning of each request.

The problem: of Mamba 2, gated delta rule and short convolution layers only the projections are modules; what lies
between them reads a state that no record has. The idea: a state follows from what the projections gave for all earlier
rows of its request, which the dump has, as it has keys and values. For each class: whose outputs the recurrence reads
(`reads`), which inputs of modules inside received its results (`made`, roles ``inside.<path>/<input>``), and a function
from rows and a state to results and the next state (`Mixer.advance`). The state behind a call is kept for the next one.
Noise as in recurrent.py: sampled, with every rounding that a kernel may do, the state's between two calls included
where the cache's dtype is not known to be wider than the model's.
Elsewhere: the recurrences (recurrent.py), the rows of earlier steps (calls/neighbours.py), states that are another
request's (causes/state_causes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from vllm_accprobe.dump.block_code import INSIDE
from vllm_accprobe.opcheck.reference import Call, Declined, Expected, decline_if
from vllm_accprobe.opcheck.references import recurrent
from vllm_accprobe.opcheck.references.parts import RowResults, reshaped, unit_of
from vllm_accprobe.opcheck.references.recurrent import EPSILON, Rounds, as_it_is, by_heads, samples_of, spread_of

Tensor = Any  # a torch.Tensor
State = tuple[Tensor, Tensor]
"""The last inputs of the convolution [..., width - 1, channels], and the recurrence's state; float64, or float32 of
samples, which have a leading dimension."""
_LONGEST = 1 << 30
"""Chosen: numbers of a state times rows of a call, a few seconds; requests beyond it have no reference."""
_TOO_LONG = "a recurrence that is too long to be computed again here"


@dataclass(frozen=True)
class Mixer:
    """A module's recurrence for its weights. width: of the convolution; channels: that it has; state: the shape of the
    recurrence's state, () for none; advance: (rounds, unit, rows by name [..., t, width], state) → (results by role
    [..., t, width], the next state); groups: independent errors of a row."""

    width: int
    channels: int
    state: tuple[int, ...]
    advance: Callable[[Rounds, float, Mapping[str, Tensor], State], tuple[dict[str, Tensor], State]]
    groups: int

    def zero(self) -> State:
        return (torch.zeros(1, self.width - 1, self.channels, dtype=torch.float64),
                torch.zeros(1, *self.state, dtype=torch.float64))  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """Of a class: see above. make: a call's `Mixer`; raises Declined."""

    reads: tuple[str, ...]
    made: tuple[str, ...]
    make: Callable[[Call], Mixer]


def _convolved(rounds: Rounds, unit: float, x: Tensor, weight: Tensor, bias: Tensor | None, first: Tensor, silu: bool
               ) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(the convolution of rows x [..., t, d] rounded to the model's dtype, the last inputs)."""
    width = weight.shape[1]
    whole = torch.cat((first.expand(*x.shape[:-2], *first.shape[-2:]), x), -2)
    y = (whole.unfold(-2, width, 1) * weight.to(x.dtype)).sum(-1)
    y = y if bias is None else y + bias.to(x.dtype)
    if silu:
        y = F.silu(rounds(y, unit))
    return rounds(y, unit), whole[..., whole.shape[-2] - width + 1 :, :]


def _weight(call: Call, *places: str) -> tuple[Tensor, Tensor | None]:
    """The convolution's (weight [d, width], bias or None), float64, of the first of these modules inside that has
    one."""
    inner = call.extra.get("inner_params", {})
    for place in places:
        if (weight := inner.get(f"{place}.weight")) is not None and weight.numel():
            bias = inner.get(f"{place}.bias")
            decline_if(weight.dim() != 3, "its convolution's weight was packed by a kernel before it could be captured")
            return weight.double().reshape(len(weight), -1), None if bias is None else bias.double()
    raise Declined("its convolution's weight was not captured")


def _of(call: Call, name: str) -> int:
    value = call.attrs.get(name)
    if not isinstance(value, int):
        raise Declined(f"attribute {name} was not recorded")
    return value


def _mamba2(call: Call) -> Mixer:
    """Rows of in_proj: z, then x, B and C, then dt [T. Dao and A. Gu, arXiv 2405.21060]; z is the norm's."""
    weight, bias = _weight(call, "conv1d")
    a, d, dt_bias = (call.param(n) for n in ("A", "D", "dt_bias"))
    heads, size, n = len(a), _of(call, "head_dim"), _of(call, "ssm_state_size")
    inner, times = heads * size, call.maybe("mup_vector")
    decline_if((len(weight) - inner) % (2 * n) or len(weight) <= inner, "its groups do not fit its heads")
    decline_if(call.attrs.get("activation") not in ("silu", "swish"), "its activation is not known")
    groups = (len(weight) - inner) // (2 * n)

    def advance(rounds: Rounds, unit: float, rows: Mapping[str, Tensor], state: State) -> Any:
        x = rows["in_proj"]
        x = x if times is None else rounds(x * times.to(x.dtype), unit)
        mixed, window = _convolved(rounds, unit, x[..., inner : inner + len(weight)], weight, bias, state[0], True)
        b, c = (by_heads(t.unflatten(-1, (groups, n)), heads) for t in
                (mixed[..., inner : inner + groups * n], mixed[..., inner + groups * n :]))  # fmt: skip
        dt = F.softplus(x[..., inner + len(weight) :] + dt_bias.to(x.dtype)).unsqueeze(-1)
        inputs = mixed[..., :inner].unflatten(-1, (heads, size))
        y, new = recurrent.scan(rounds, unit, inputs, dt, a.reshape(heads, 1, 1).to(x), b, c,
                                d.reshape(heads, 1).to(x), None, state[1])  # fmt: skip
        return {"norm/x": y.flatten(-2)}, (window, new)

    return Mixer(weight.shape[1], len(weight), (heads, size, n), advance, heads)


def _short_conv(call: Call) -> Mixer:
    """Rows of in_proj: B, C and x; C conv(B x) [LFM2: vllm/model_executor/layers/mamba/short_conv.py]."""
    weight, bias = _weight(call, "conv", "conv1d")

    def advance(rounds: Rounds, unit: float, rows: Mapping[str, Tensor], state: State) -> Any:
        b, c, x = rows["in_proj"].chunk(3, -1)
        mixed, window = _convolved(rounds, unit, rounds(b * x, unit), weight, bias, state[0], False)
        return {"out_proj/input_": c * mixed}, (window, state[1])

    return Mixer(weight.shape[1], len(weight), (), advance, len(weight))


def _delta_net(call: Call) -> Mixer:
    """Rows of in_proj_qkvz and in_proj_ba: Qwen3-Next has them by groups of heads, Qwen3.5 one after the other."""
    weight, bias = _weight(call, "conv1d")
    a_log, dt_bias = call.param("A_log"), call.param("dt_bias")
    size, width, values = _of(call, "head_k_dim"), _of(call, "head_v_dim"), len(a_log)
    keys = (len(weight) - values * width) // (2 * size)
    decline_if(keys < 1 or values % keys or 2 * keys * size + values * width != len(weight), "its heads do not fit")
    layout, share = call.attrs.get("gqa_interleaved_layout"), values // keys
    decline_if(layout is None, "the order of its projection's columns was not recorded")

    def parts(rows: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        qkvz, ba = rows["in_proj_qkvz"], rows["in_proj_ba"]
        if not layout:
            return (qkvz[..., : len(weight)], *ba.chunk(2, -1))
        by_group = qkvz.unflatten(-1, (keys, -1)).split((size, size, share * width, share * width), -1)
        b, a = ba.unflatten(-1, (keys, -1)).split((share, share), -1)
        return torch.cat([t.flatten(-2) for t in by_group[:3]], -1), b.flatten(-2), a.flatten(-2)

    def advance(rounds: Rounds, unit: float, rows: Mapping[str, Tensor], state: State) -> Any:
        x, b, a = parts(rows)
        mixed, window = _convolved(rounds, unit, x, weight, bias, state[0], True)
        q, k, v = mixed.split((keys * size, keys * size, values * width), -1)
        q, k = (t.unflatten(-1, (keys, size)) for t in (q, k))
        q, k = (t * torch.rsqrt((t * t).sum(-1, keepdim=True) + EPSILON) for t in (q, k))
        q, k = (t.repeat_interleave(share, -2) for t in (q, k))
        g, beta = recurrent.gates(a_log.to(x.dtype), a, b, dt_bias.to(x.dtype))
        y, new = recurrent.rule(rounds, unit, size**-0.5, q, k, v.unflatten(-1, (values, width)), g, rounds(beta, unit),
                                state[1])  # fmt: skip
        return {"norm/x": y.flatten(-2)}, (window, new)

    return Mixer(weight.shape[1], len(weight), (values, size, width), advance, values)


KINDS: Mapping[str, Kind] = {
    "MambaMixer2": Kind(("in_proj",), ("norm/x",), _mamba2),
    "ShortConv": Kind(("in_proj",), ("out_proj/input_",), _short_conv),
    "QwenGatedDeltaNetAttention": Kind(("in_proj_qkvz", "in_proj_ba"), ("norm/x",), _delta_net),
}  # fmt: skip


def _key(call: Call) -> tuple[Any, ...]:
    """What the states of a call follow from, besides rows: causes try other parameters and attributes."""
    tensors = {**call.params, **call.extra.get("inner_params", {})}
    bits = ((n, t.detach().cpu().contiguous().reshape(-1).view(torch.uint8)) for n, t in tensors.items())
    return (*sorted((n, hash(b.numpy().tobytes())) for n, b in bits), str(call.attrs))


def carried(call: Call) -> dict[str, Expected]:
    """What the recurrence made, by role. Raises Declined."""
    kind, cache = KINDS[call.cls], call.extra.get("cache")
    roles = [f"{INSIDE}{place}" for place in kind.made if f"{INSIDE}{place}" in call.outputs]
    decline_if(not roles, "what its recurrence made was not captured")
    if cache is None:
        raise Declined("which row belongs to which request was not captured")
    mixer, unit = kind.make(call), unit_of(call.outputs[roles[0]])
    stored = 0.0 if call.extra.get("wide_state") else unit
    found = {role: RowResults(len(call.outputs[role])) for role in roles}
    size = max(1, *(torch.Size(mixer.state).numel(), mixer.channels))
    other, left, long, key = call.extra.get("start"), _LONGEST, False, _key(call)
    for at, positions, past in cache.requests():
        first, stop = int(positions[0]), len(positions) + int(positions[0])
        store: dict[Any, dict[int, tuple[State, State | None]]] = past.get(CARRIED, {})
        known = store.get(key, {})
        begun = max((n for n in known if n <= first), default=0)
        if (stop - begun) * size > left:
            long = True
            continue
        left -= (stop - begun) * size
        plain: tuple[State, State | None] = known.get(begun, (mixer.zero(), None))
        state: tuple[State, State | None] = both(mixer, unit, stored, past, (begun, first), plain)[1]
        if other is not None and (instead := other(at, positions)) is not None:
            state = (instead, None)
        results, after = both(mixer, unit, stored, past, (first, stop), state)
        if other is None and (not store or key in store):
            store[key] = {first: state, stop: after}
        for role in roles:
            value, noise = spread_of(*results[role.removeprefix(INSIDE)], mixer.groups)
            found[role].put(at, (value, noise))
    made = {}
    for role, rows in found.items():
        decline_if(not rows.parts, _TOO_LONG if long else cache.why or "no row has its whole history in the dump")
        value, noise = rows.parts
        out = call.outputs[role]
        decline_if(value.numel() != out.numel(), "what its recurrence made has another shape")
        reason = cache.why or (_TOO_LONG if long else "no row of a request")
        e = Expected(value, noise, rows=rows.rows(), reason=reason, groups=mixer.groups, shared=True)
        made[role] = reshaped(e, out.shape)
    return made


class OtherStates:
    """Of the requests that a tap has seen up to a call: their rows so far, for causes. requests: by label, (step,
    position) where each run of rows begins, and all rows by name; found: what a cause has found of the call."""

    def __init__(self, requests: Mapping[str, tuple[Sequence[tuple[int, int]], Mapping[str, Tensor]]]):
        self.requests = requests
        self.found: dict[Any, Any] = {}
        self._known: dict[tuple[str, int, bool], State] = {}

    def behind(self, mixer: Mixer, label: str, n: int, uncleared: bool = False) -> State:
        """The exact state behind the first ``n`` rows of a request, from none; uncleared: from what the request that
        ended last before it left, and so on."""
        if (label, n, uncleared) not in self._known:
            begun = max((k for of, k, how in self._known if (of, how) == (label, uncleared) and k < n), default=0)
            before = self._before(label) if uncleared and not begun else None
            state = mixer.zero() if before is None else self.behind(mixer, before, self.length(before, 1 << 62), True)
            state = self._known.get((label, begun, uncleared), state)
            own = {name: t[begun:n].double().unsqueeze(0) for name, t in self.requests[label][1].items()}
            self._known[label, n, uncleared] = mixer.advance(as_it_is, 0.0, own, state)[1] if n > begun else state
        return self._known[label, n, uncleared]

    def _before(self, label: str) -> str | None:
        """The request that ended last before this one began; None where none did."""
        began = self.requests[label][0][0][0]
        ended = {other: begins[-1][0] for other, (begins, _) in self.requests.items() if begins[-1][0] < began}
        return max(ended, key=lambda other: ended[other]) if ended else None

    def length(self, label: str, step: int) -> int:
        """How many rows of a request there were before this step."""
        begins, rows = self.requests[label]
        return next((pos for s, pos in begins if s >= step), len(next(iter(rows.values()))))


CARRIED = "carried state"
"""In a request's past: states after so many of its rows, exact and sampled, by what they follow from (`_key`): of the
first such call alone."""


def both(
    mixer: Mixer, unit: float, stored: float, past: Mapping[str, Tensor], rows: tuple[int, int],
    start: tuple[State, State | None],
) -> tuple[dict[str, tuple[Tensor, Tensor]], tuple[State, State]]:  # fmt: skip
    """(results by role, each (exact, samples), and the states behind them). rows: first, stop of ``past``; stored: one
    rounding of a state that is kept between calls, 0.0 for none that matters."""
    exact, samples = start
    narrow = (samples_of(exact[0]), samples_of(exact[1])) if samples is None else samples
    own = {n: t[rows[0] : rows[1]].double().unsqueeze(0) for n, t in past.items() if n != CARRIED}
    rounds = recurrent.at_random(rows[0])
    if rows[0] == rows[1]:
        return {}, (exact, narrow)
    values, after = mixer.advance(as_it_is, unit, own, exact)
    with torch.no_grad():
        sampled, spread = mixer.advance(rounds, unit, {n: samples_of(t) for n, t in own.items()}, narrow)
    spread = (spread[0], rounds(spread[1], stored) if stored else spread[1])
    return {role: (values[role], sampled[role]) for role in values}, (after, spread)
