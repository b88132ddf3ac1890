"""Causes of rotary embeddings: base, scaling, partial dimension, pairs of channels, positions, one of two inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.opcheck.causes.api import ADDRESS, SETTING, Guess, Trial, cause, edited, fits, named
from vllm_accprobe.opcheck.reference import Call, Declined, Expected
from vllm_accprobe.opcheck.references import rotary

ROTARY = ("*RotaryEmbedding", "MRotaryEmbeddingInterleaved")
_PLAIN = "RotaryEmbedding"
_SCALED = (
    "Llama3RotaryEmbedding", "LinearScalingRotaryEmbedding", "DynamicNTKScalingRotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
)  # fmt: skip


def _base(trial: Trial) -> float:
    return float(trial.call.attr("base"))


def _bases(trial: Trial) -> Iterator[Guess]:
    own, config = _base(trial), trial.call.config
    known = [*named(trial, "base"), config.get("rope_theta"), rotary.settings(config).get("rope_theta"), 10000.0]
    known = [float(x) for x in dict.fromkeys(known) if x and float(x) != own]
    yield from map(Guess, known)
    yield from (Guess(x, choices=3.0) for x in (5e5, 1e6, 1e7) if x != own and x not in known)
    yield from fits(other_base, trial, [own * f for f in (0.1, 0.5, 1.0, 2.0, 10.0)], _role(trial))


def _role(trial: Trial) -> str:
    """The output that is furthest off."""

    def off(role: str) -> float:
        value = trial.plain[role].value
        return float((trial.mine(role).double() - value.reshape(trial.mine(role).shape)).square().sum())

    return max(trial.roles(), key=off)


@cause(SETTING, *ROTARY, text="with the base {0:.5g}", values=_bases)
def other_base(trial: Trial, base: float) -> Call:
    return edited(trial.call, attrs={"base": base})


@cause(SETTING, *_SCALED, "DeepseekScalingRotaryEmbedding", text="without its scaling of frequencies")
def no_scaling(trial: Trial, _: Any) -> Call:
    if trial.call.cls == _PLAIN:
        raise Declined("it has none")
    return edited(trial.call, cls=_PLAIN)


def _kinds(trial: Trial) -> list[str]:
    if "factor" not in rotary.settings(trial.call.config):
        raise Declined("config.json has no factor")
    return [cls for cls in _SCALED if cls != trial.call.cls]


@cause(SETTING, *ROTARY, text="with the frequencies of {0}", values=_kinds)
def other_scaling(trial: Trial, cls: str) -> Call:
    return edited(trial.call, cls=cls)


def _dims(trial: Trial) -> list[int]:
    head = int(trial.call.attr("head_size"))
    own = int(trial.call.attr("rotary_dim", default=head))
    return [d for d in (head, head // 2, head // 4, 3 * head // 4) if d != own and d > 0 and d % 2 == 0]


@cause(SETTING, *ROTARY, text="with {0} channels turned", values=_dims)
def other_dim(trial: Trial, dim: int) -> Call:
    return edited(trial.call, attrs={"rotary_dim": dim})


@cause(SETTING, *ROTARY, text="with {0} for pairs", values=lambda trial: [
    "neighbours instead of halves" if trial.call.attr("is_neox_style", default=True) else "halves instead of neighbours"
])  # fmt: skip
def other_pairs(trial: Trial, _: str) -> Call:
    return edited(trial.call, attrs={"is_neox_style": not trial.call.attr("is_neox_style", default=True)})


def _sections(trial: Trial) -> Iterator[Guess]:
    """(channels of each section, whether they are interleaved)."""
    call, known = trial.call, rotary.settings(trial.call.config)
    own = call.attrs.get("mrope_section") or known.get("mrope_section")
    if not own or call.maybe("positions", "0") is None or call.tensor("positions", "0").dim() != 2:
        raise Declined("its positions have no sections")
    inter = bool(known.get("mrope_interleaved", False))
    first = [*named(trial, "mrope_section"), known.get("mrope_section")]
    ways = [(tuple(x), inter) for x in (*first, own[::-1], [own[0], *own[:0:-1]]) if x and list(x) != list(own)]
    yield from (Guess(w, choices=float(len(ways) + 1)) for w in (*dict.fromkeys(ways), (tuple(own), not inter)))


@cause(SETTING, "MRotary*", text="with the sections {0} of its channels (interleaved: {1})", values=_sections)
def other_sections(trial: Trial, parameter: tuple[tuple[int, ...], bool]) -> Call:
    sections, inter = parameter
    scaling = {**rotary.settings(trial.call.config), "mrope_interleaved": inter, "mrope_section": list(sections)}
    return edited(trial.call, attrs={"mrope_section": list(sections)}, config={"rope_parameters": scaling})


@cause(ADDRESS, "MRotary*", text="with {0} positions in all sections", values=lambda trial: [
    Guess(n, choices=3.0) for n in ("temporal", "height", "width")])  # fmt: skip
def one_section(trial: Trial, name: str) -> Call:
    k = ("temporal", "height", "width").index(name)
    positions = trial.call.tensor("positions", "0")
    if positions.dim() != 2 or len(positions) != 3 or bool((positions == positions[k]).all()):
        raise Declined("its positions have no sections, or they are equal")
    return _at(trial, lambda p: p[k].expand_as(p))


def _at(trial: Trial, positions: Any) -> Call:
    name = next((n for n in ("positions", "0") if n in trial.call.inputs), None)
    if name is None:
        raise Declined("its positions were not captured")
    return edited(trial.call, inputs={name: positions(trial.call.inputs[name].double())})


_OFFSETS = (1, -1, 2, -2)


@cause(SETTING, *ROTARY, text="with positions {0:+d} further on", values=lambda _: [
    Guess(n, choices=float(len(_OFFSETS))) for n in _OFFSETS
])  # fmt: skip
def position_off(trial: Trial, n: int) -> Call:
    return _at(trial, lambda p: p + n)


@cause(SETTING, *ROTARY, text="with the first row's position and those after it, as if it were one run", whole=True)
def one_run(trial: Trial, _: Any) -> Call:
    return _at(trial, lambda p: p[..., :1] + torch.arange(p.shape[-1], dtype=torch.float64))


def _ends(trial: Trial) -> Iterator[Guess]:
    """The position before the first one whose row is wrong, and the ends of tables of the usual sizes before it."""
    off = next(iter(trial.wrong.values()), None)
    positions = trial.call.maybe("positions", "0")
    if off is None or positions is None or positions.shape != off.shape or not bool(off.any()):
        return
    first = int(positions[off].min())
    sizes = [first, *(1 << k for k in range(first.bit_length() - 1, 3, -1)), first - first % 1000, first - first % 100]
    yield from (Guess(n - 1, choices=float(len(sizes))) for n in dict.fromkeys(sizes) if n > 1)


@cause(ADDRESS, *ROTARY, text="with each position above {0} taken for {0} (the end of a table)", values=_ends,
       whole=True)  # fmt: skip
def positions_end(trial: Trial, last: int) -> Call:
    return _at(trial, lambda p: p.clamp(max=last))


@cause(ADDRESS, *ROTARY, text="with the positions of the row before", whole=True)
def positions_of_neighbours(trial: Trial, _: Any) -> Call:
    return _at(trial, lambda p: p.roll(1, -1))


def _stretches(trial: Trial) -> Iterator[Guess]:
    factor = rotary.settings(trial.call.config).get("factor")
    yield from (Guess(float(x)) for x in ([factor, 1.0 / factor] if factor else []))
    yield from fits(angles_times, trial, [1.0], _role(trial))


@cause(SETTING, *ROTARY, text="with angles {0:.6g} times as large", values=_stretches)
def angles_times(trial: Trial, factor: float) -> Call:
    return _at(trial, lambda p: p * factor)


@cause(SETTING, *ROTARY, text="with integer positions {0:.4g} times as large, rounded down",
       values=lambda _: [Guess(f, choices=4.0) for f in (0.5, 0.25, 2.0, 1.02)])  # fmt: skip
def whole_positions_times(trial: Trial, factor: float) -> Call:
    return _at(trial, lambda p: (p * factor).floor())


@cause(SETTING, *ROTARY, text="with its angles turned backwards")
def backwards(trial: Trial, _: Any) -> Call:
    return _at(trial, lambda p: -p)


@cause(SETTING, *ROTARY, text="without turning {0}", values=lambda trial: [
    "its query", *(["its key", "anything"] if trial.call.maybe("key", "2") is not None else [])])  # fmt: skip
def not_turned(trial: Trial, name: str) -> Mapping[str, Expected]:
    both = zip(("its query", "its key"), rotary.query_and_key(trial.call), strict=False)
    return {role: replace(trial.plain[role], value=x.double().reshape(trial.plain[role].value.shape))
            for own, (roles, x, _) in both if name in (own, "anything")
            for role in roles if role in trial.plain}  # fmt: skip


def _magnitudes(trial: Trial) -> list[Guess]:
    _, size = rotary.angles_of(trial.call, int(trial.call.attr("rotary_dim", default=trial.call.attr("head_size"))))
    return [] if size == 1.0 else [Guess(1.0), Guess(size * size)]


@cause(SETTING, *ROTARY, text="with cosines and sines times {0:.4g} instead of its magnitude", values=_magnitudes)
def other_magnitude(trial: Trial, size: float) -> dict[str, Expected]:
    return _by_table(trial, lambda cos, sin, own: (cos * size, sin * size), own_size=False)


def _by_table(trial: Trial, table: Any, own_size: bool = True) -> dict[str, Expected]:
    """The outputs with other cosines and sines. table: (cos, sin, the dtype of rows) → both; own_size: they have the
    module's magnitude."""
    call = trial.call
    head, neox = int(call.attr("head_size")), bool(call.attr("is_neox_style", default=True))
    dim = int(call.attr("rotary_dim", default=head))
    angle, size = rotary.token_angles(call, dim)
    angle, size = angle.unsqueeze(1), size if own_size else 1.0
    found = {}
    for roles, x, heads in rotary.query_and_key(call):
        cos, sin = table(size * angle.cos(), size * angle.sin(), x.dtype)
        y = torch.cat((rotary.rotate(heads.double()[..., :dim], cos, sin, neox), heads.double()[..., dim:]), -1)
        for role in roles:
            if role in trial.plain:
                found[role] = replace(trial.plain[role], value=y.reshape(trial.plain[role].value.shape))
    return found
