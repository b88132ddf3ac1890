"""Causes of any operator: a factor of all of an output, of some columns or a head, a constant, a rank's part.

Which columns are wrong is read from mine's output, so that each way to choose as many counts as tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.judge.rounding_unit import unit
from vllm_accprobe.opcheck.causes.api import (
    ADDRESS,
    FACTOR,
    CauseRow,
    Guess,
    Trial,
    among,
    precision,
    rounded_once,
    scaled,
    with_value,
)
from vllm_accprobe.opcheck.reference import Declined, Expected
from vllm_accprobe.opcheck.references.linear import partial
from vllm_accprobe.opcheck.references.parts import ranks_of

ANY, SUMS = ("*",), ("RowParallelLinear",)
_OFF = 4.0
"""Chosen: standard deviations from which an element is taken for wrong when columns are looked for; the proof does not
rest on it."""
_SHARE = 0.25
"""Chosen: of a wrong column's elements, in rows that are wrong, how many are taken for wrong at least."""
_TOGETHER = 8
"""Chosen: columns that are named one by one where they are no run."""


def _floats(trial: Trial) -> Iterator[tuple[str, Any, Any]]:
    """(role, the reference's output, mine's), float64 of one shape, of the outputs that are off, the worst first."""
    found = []
    for role in trial.roles():
        value, mine = trial.plain[role].value, trial.mine(role)
        if mine.is_floating_point() and value.numel() == mine.numel() and mine.numel():
            mine = mine.double()
            value = value.reshape(mine.shape).double()
            off = float((mine - value).square().sum() / value.square().sum().clamp(min=1e-300))
            found.append((off, role, value, mine))
    found.sort(key=lambda x: x[:2], reverse=True)
    yield from ((role, value, mine) for off, role, value, mine in found if off > 0)


def _ratios(trial: Trial, role: str, y: Any, which: Any = True) -> Iterator[float]:
    """Factors by least squares: of all rows and of the wrong ones."""
    seen: list[float] = []
    for target in trial.targets(role):
        for weight in (1.0, trial.weight(role)):
            weight = weight * precision(trial, role) * which
            size = float((weight * y * y).sum())
            factor = float((weight * y * target).sum()) / size if size else math.nan
            if math.isfinite(factor) and not any(math.isclose(factor, s, rel_tol=1e-9) for s in seen):
                seen.append(factor)
                yield factor


def _all(trial: Trial) -> Iterator[Guess]:
    for role, y, _ in _floats(trial):
        yield from among(((f, role) for f in (2.0, 0.5, -1.0)), 8.0)
        yield from (Guess((f, role), fitted=1) for f in _ratios(trial, role, y))


def _constants(trial: Trial) -> Iterator[Guess]:
    for role, y, _ in _floats(trial):
        weight = trial.weight(role) * precision(trial, role)
        for target in trial.targets(role):
            yield Guess((float((weight * (target - y)).sum() / weight.sum()), role), fitted=1)


def _plus(trial: Trial, parameter: tuple[float, str]) -> dict[str, Expected]:
    value, role = parameter
    plain = rounded_once(trial, role)
    return {role: replace(plain, value=plain.value + value)}


def _wrong_columns(trial: Trial, role: str, y: Any, mine: Any) -> list[int]:
    """Of the last dimension, those whose elements are off in the wrong rows."""
    noise = trial.plain[role].noise
    noise = torch.zeros(()) if noise is None else noise.expand(trial.plain[role].value.shape).reshape(y.shape)
    floor = ((unit(trial.dtype(role)) * y).square() + noise.square()).sqrt()
    off = ((mine - y).abs() > _OFF * floor) & (trial.weight(role) > 0)
    rows = (trial.weight(role) > 0).expand_as(y).reshape(-1, y.shape[-1]).sum(0).clamp(min=1)
    share = off.reshape(-1, y.shape[-1]).sum(0) / rows
    return [int(k) for k in (share >= _SHARE).nonzero().flatten()]


def wrong_columns(trial: Trial) -> Iterator[tuple[str, tuple[int, ...], str, float, Any]]:
    """(role, columns, their name, choices, the reference's output) of outputs that are off in some columns alone."""
    for role, y, mine in _floats(trial):
        width = y.shape[-1] if y.dim() > 1 else 0
        found = _wrong_columns(trial, role, y, mine) if width else []
        if not found or len(found) == width:
            continue
        head = trial.call.attrs.get("head_size")
        first, last = found[0], found[-1]
        if last - first + 1 > len(found) and isinstance(head, int) and head > 1 and not width % head:
            first, last = first // head * head, (last // head + 1) * head - 1  # a head some of whose columns are small
        elif isinstance(head, int) and head > 1 and first // head == last // head and 2 * len(found) > head:
            first, last = first // head * head, first // head * head + head - 1
        if isinstance(head, int) and head > 1 and last - first + 1 == head and not first % head and width > head:
            yield role, tuple(range(first, last + 1)), f"head {first // head}", float(width // head), y
        if found[-1] - found[0] + 1 == len(found):
            name = f"columns {found[0]} to {found[-1]}" if len(found) > 1 else f"column {found[0]}"
            yield role, tuple(found), name, 0.5 * width * (width + 1), y
        elif len(found) <= _TOGETHER:
            yield role, tuple(found), f"columns {', '.join(map(str, found))}", float(math.comb(width, len(found))), y


def _some(trial: Trial) -> Iterator[Guess]:
    for role, columns, name, choices, y in wrong_columns(trial):
        which = torch.zeros(y.shape[-1], dtype=torch.float64)
        which[list(columns)] = 1.0
        for factor in _ratios(trial, role, y, which):
            yield Guess((name, factor, role, columns), fitted=1, choices=choices)


def _with_columns(e: Expected, columns: tuple[int, ...], factor: float, read: Expected) -> Expected:
    """read: the output that the factor is applied to, rounded."""
    some = torch.zeros(e.value.shape[-1], dtype=torch.bool)
    some[list(columns)] = True
    other, none = scaled(read, factor), torch.zeros((), dtype=torch.float64)

    def either(a: Any | None, b: Any | None) -> Any | None:
        return None if a is None or b is None else torch.where(some, b.expand(e.value.shape), a.expand(e.value.shape))

    noise = either(none if e.noise is None else e.noise, none if other.noise is None else other.noise)
    value = torch.where(some, other.value, e.value)
    return replace(other, value=value, noise=noise, bound=either(e.bound, other.bound))


def summed_ranks(trial: Trial) -> list[int]:
    size = int(trial.call.attrs.get("tp_size", 1))
    if size < 2 or not trial.call.attr("reduce_results", default=True):
        raise Declined("no sum over ranks")
    return list(range(size))


def _with_rank(trial: Trial, rank: int, whole: float, times: float) -> Expected:
    plain = trial.plain["output.0"]
    part = partial(ranks_of(trial.call, len(summed_ranks(trial)))[rank]).value.reshape(plain.value.shape)
    return with_value(trial, whole * plain.value + times * part if whole else part)


CAUSES = (
    CauseRow("all_times", FACTOR, ANY, "multiplied by {0:.5g}",
             lambda t, p: {p[1]: scaled(rounded_once(t, p[1]), p[0])}, _all),
    CauseRow("never_written", ADDRESS, ANY, "with 0 in its place (never written)",
             lambda t, role: {role: scaled(t.plain[role], 0.0)}, lambda t: [role for role, _, _ in _floats(t)]),
    CauseRow("plus", FACTOR, ANY, "with {0:.4g} added", _plus, _constants),
    CauseRow("columns_times", FACTOR, ANY, "with {0} multiplied by {1:.5g}",
             lambda t, p: {p[2]: _with_columns(t.plain[p[2]], p[3], p[1], rounded_once(t, p[2]))}, _some),
    CauseRow("columns_lost", ADDRESS, ANY, "with {0} left at 0 (not computed)",
             lambda t, p: {p[1]: _with_columns(t.plain[p[1]], p[2], 0.0, t.plain[p[1]])},
             lambda t: [Guess((name, role, columns), choices=n) for role, columns, name, n, _ in wrong_columns(t)]),
    CauseRow("rank_missing", FACTOR, SUMS, "without the part of rank {0} in its sum",
             lambda t, rank: _with_rank(t, rank, 1.0, -1.0), summed_ranks),
    CauseRow("rank_twice", FACTOR, SUMS, "with the part of rank {0} twice in its sum",
             lambda t, rank: _with_rank(t, rank, 1.0, 1.0), summed_ranks),
    CauseRow("not_reduced", FACTOR, SUMS, "without its sum over ranks (rank {0}'s part alone)",
             lambda t, rank: _with_rank(t, rank, 0.0, 1.0), summed_ranks),
)  # fmt: skip
