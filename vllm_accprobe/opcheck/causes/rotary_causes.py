"""Causes of rotary embeddings: base, scaling, partial dimension, pairs of channels, positions, one of two inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.opcheck.causes.api import (
    ADDRESS,
    SETTING,
    CauseRow,
    Guess,
    Trial,
    among,
    edited,
    fits,
    named,
    others,
    with_value,
)
from vllm_accprobe.opcheck.reference import Call, Declined, Expected, decline_if
from vllm_accprobe.opcheck.references import rotary

ROTARY = ("*RotaryEmbedding", "MRotaryEmbeddingInterleaved")
_PLAIN, _SECTIONED = "RotaryEmbedding", ("MRotary*",)
_SCALED = (
    "Llama3RotaryEmbedding", "LinearScalingRotaryEmbedding", "DynamicNTKScalingRotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
)  # fmt: skip
_AXES = ("temporal", "height", "width")


def _role(trial: Trial) -> str:
    """The output that is furthest off."""

    def off(role: str) -> float:
        value = trial.plain[role].value
        return float((trial.mine(role).double() - value.reshape(trial.mine(role).shape)).square().sum())

    return max(trial.roles(), key=off)


def _other_base(trial: Trial, base: float) -> Call:
    return edited(trial.call, attrs={"base": base})


def _bases(trial: Trial) -> Iterator[Guess]:
    own, config = float(trial.call.attr("base")), trial.call.config
    known = [*named(trial, "base"), config.get("rope_theta"), rotary.settings(config).get("rope_theta"), 10000.0]
    yield from others(own, (float(x) for x in known if x), (5e5, 1e6, 1e7), 3.0)
    yield from fits(_other_base, trial, [own * f for f in (0.1, 0.5, 1.0, 2.0, 10.0)], _role(trial))


def _no_scaling(trial: Trial, _: Any) -> Call:
    decline_if(trial.call.cls == _PLAIN, "it has none")
    return replace(trial.call, cls=_PLAIN)


def _kinds(trial: Trial) -> list[str]:
    decline_if("factor" not in rotary.settings(trial.call.config), "config.json has no factor")
    return [cls for cls in _SCALED if cls != trial.call.cls]


def _dims(trial: Trial) -> list[int]:
    head, (_, own) = int(trial.call.attr("head_size")), rotary.way_of(trial.call)
    return [d for d in (head, head // 2, head // 4, 3 * head // 4) if d != own and d > 0 and d % 2 == 0]


def _halves(trial: Trial) -> bool:
    return rotary.way_of(trial.call)[0]


def _sections(trial: Trial) -> Iterator[Guess]:
    """(channels of each section, whether they are interleaved)."""
    call, known = trial.call, rotary.settings(trial.call.config)
    own = call.attrs.get("mrope_section") or known.get("mrope_section")
    if not own or call.maybe("positions", "0") is None or call.tensor("positions", "0").dim() != 2:
        raise Declined("its positions have no sections")
    inter = bool(known.get("mrope_interleaved", False))
    first = [*named(trial, "mrope_section"), known.get("mrope_section")]
    ways = [(tuple(x), inter) for x in (*first, own[::-1], [own[0], *own[:0:-1]]) if x and list(x) != list(own)]
    yield from among((*dict.fromkeys(ways), (tuple(own), not inter)), len(ways) + 1.0)


def _other_sections(trial: Trial, parameter: tuple[tuple[int, ...], bool]) -> Call:
    sections, inter = parameter
    scaling = {**rotary.settings(trial.call.config), "mrope_interleaved": inter, "mrope_section": list(sections)}
    return edited(trial.call, attrs={"mrope_section": list(sections)}, config={"rope_parameters": scaling})


def _one_section(trial: Trial, name: str) -> Call:
    k, positions = _AXES.index(name), trial.call.tensor("positions", "0")
    if positions.dim() != 2 or len(positions) != 3 or bool((positions == positions[k]).all()):
        raise Declined("its positions have no sections, or they are equal")
    return at(trial, lambda p: p[k].expand_as(p))


def at(trial: Trial, positions: Callable[[Any], Any]) -> Call:
    """The call at other positions. positions: of float64 ones."""
    name = next((n for n in ("positions", "0") if n in trial.call.inputs), None)
    if name is None:
        raise Declined("its positions were not captured")
    return edited(trial.call, inputs={name: positions(trial.call.inputs[name].double())})


def _times(trial: Trial, factor: float) -> Call:
    return at(trial, lambda p: p * factor)


def _ends(trial: Trial) -> Iterator[Guess]:
    """The position before the first one whose row is wrong, and the ends of tables of the usual sizes before it."""
    off = next(iter(trial.wrong.values()), None)
    positions = trial.call.maybe("positions", "0")
    if off is None or positions is None or positions.shape != off.shape or not bool(off.any()):
        return
    first = int(positions[off].min())
    sizes = [first, *(1 << k for k in range(first.bit_length() - 1, 3, -1)), first - first % 1000, first - first % 100]
    yield from among((n - 1 for n in dict.fromkeys(sizes) if n > 1), float(len(sizes)))


def _stretches(trial: Trial) -> Iterator[Guess]:
    factor = rotary.settings(trial.call.config).get("factor")
    yield from (Guess(float(x)) for x in ([factor, 1.0 / factor] if factor else []))
    yield from fits(_times, trial, [1.0], _role(trial))


def _not_turned(trial: Trial, name: str) -> Mapping[str, Expected]:
    both = zip(("its query", "its key"), rotary.query_and_key(trial.call), strict=False)
    return {role: with_value(trial, x.double(), role) for own, (roles, x, _) in both if name in (own, "anything")
            for role in roles if role in trial.plain}  # fmt: skip


def _magnitudes(trial: Trial) -> list[Guess]:
    _, size = rotary.angles_of(trial.call, rotary.way_of(trial.call)[1])
    return [] if size == 1.0 else [Guess(1.0), Guess(size * size)]


def by_table(trial: Trial, table: Callable[[Any, Any, Any], Any], own_size: bool = True) -> dict[str, Expected]:
    """The outputs with other cosines and sines. table: (cos, sin, the dtype of rows) → both; own_size: they have the
    module's magnitude."""
    call = trial.call
    angle, size = rotary.token_angles(call, rotary.way_of(call)[1])
    angle, size = angle.unsqueeze(1), size if own_size else 1.0
    found: dict[str, Expected] = {}
    for roles, x, heads in rotary.query_and_key(call):
        y = rotary.by_table(call, heads.double(), *table(size * angle.cos(), size * angle.sin(), x.dtype))
        found |= {role: with_value(trial, y, role) for role in roles if role in trial.plain}
    return found


CAUSES = (
    CauseRow("other_base", SETTING, ROTARY, "with the base {0:.5g}", _other_base, _bases),
    CauseRow("no_scaling", SETTING, (*_SCALED, "DeepseekScalingRotaryEmbedding"), "without its scaling of frequencies",
             _no_scaling),
    CauseRow("other_scaling", SETTING, ROTARY, "with the frequencies of {0}",
             lambda t, cls: replace(t.call, cls=cls), _kinds),
    CauseRow("other_dim", SETTING, ROTARY, "with {0} channels turned",
             lambda t, dim: edited(t.call, attrs={"rotary_dim": dim}), _dims),
    CauseRow("other_pairs", SETTING, ROTARY, "with {0} for pairs",
             lambda t, _: edited(t.call, attrs={"is_neox_style": not _halves(t)}),
             lambda t: ["neighbours instead of halves" if _halves(t) else "halves instead of neighbours"]),
    CauseRow("other_sections", SETTING, _SECTIONED, "with the sections {0} of its channels (interleaved: {1})",
             _other_sections, _sections),
    CauseRow("one_section", ADDRESS, _SECTIONED, "with {0} positions in all sections", _one_section,
             lambda _: among(_AXES)),
    CauseRow("position_off", SETTING, ROTARY, "with positions {0:+d} further on", lambda t, n: at(t, lambda p: p + n),
             lambda _: among((1, -1, 2, -2))),
    CauseRow("one_run", SETTING, ROTARY, "with the first row's position and those after it, as if it were one run",
             lambda t, _: at(t, lambda p: p[..., :1] + torch.arange(p.shape[-1], dtype=torch.float64)), whole=True),
    CauseRow("positions_end", ADDRESS, ROTARY, "with each position above {0} taken for {0} (the end of a table)",
             lambda t, last: at(t, lambda p: p.clamp(max=last)), _ends, whole=True),
    CauseRow("positions_of_neighbours", ADDRESS, ROTARY, "with the positions of the row before",
             lambda t, _: at(t, lambda p: p.roll(1, -1)), whole=True),
    CauseRow("angles_times", SETTING, ROTARY, "with angles {0:.6g} times as large", _times, _stretches),
    CauseRow("whole_positions_times", SETTING, ROTARY, "with integer positions {0:.4g} times as large, rounded down",
             lambda t, factor: at(t, lambda p: (p * factor).floor()), lambda _: among((0.5, 0.25, 2.0, 1.02))),
    CauseRow("backwards", SETTING, ROTARY, "with its angles turned backwards", lambda t, _: _times(t, -1.0)),
    CauseRow("not_turned", SETTING, ROTARY, "without turning {0}", _not_turned,
             lambda t: ["its query", *(["its key", "anything"] if t.call.maybe("key", "2") is not None else [])]),
    CauseRow("other_magnitude", SETTING, ROTARY, "with cosines and sines times {0:.4g} instead of its magnitude",
             lambda t, size: by_table(t, lambda cos, sin, own: (cos * size, sin * size), own_size=False), _magnitudes),
)  # fmt: skip
