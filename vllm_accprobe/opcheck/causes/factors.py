"""Causes of any operator: a factor of all of an output, of some columns or a head, a constant, a rank's part.

Which columns are wrong is read from mine's output, so that each way to choose as many counts as tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.judge.floor import unit
from vllm_accprobe.opcheck.causes.api import ADDRESS, FACTOR, Guess, Trial, cause, precision, rounded_once, scaled
from vllm_accprobe.opcheck.floors.rounding import middles
from vllm_accprobe.opcheck.reference import Declined, Expected
from vllm_accprobe.opcheck.references.linear import partial
from vllm_accprobe.opcheck.references.parts import ranks_of

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
            found.append((float((mine - value).square().sum() / value.square().sum().clamp(min=1e-300)), role))
    for off, role in sorted(found, reverse=True):
        if off > 0:
            mine = trial.mine(role).double()
            yield role, trial.plain[role].value.reshape(mine.shape).double(), mine


def _ratios(trial: Trial, role: str, y: Any, mine: Any, which: Any = True) -> Iterator[float]:
    """Factors by least squares: of all rows and of the wrong ones, of mine's numbers as they are and as truncated
    ones."""
    seen: list[float] = []
    for target in (mine, middles(mine, trial.dtype(role))):
        for weight in (1.0, trial.weight(role)):
            weight = weight * precision(trial, role) * which
            size = float((weight * y * y).sum())
            factor = float((weight * y * target).sum()) / size if size else math.nan
            if math.isfinite(factor) and not any(math.isclose(factor, s, rel_tol=1e-9) for s in seen):
                seen.append(factor)
                yield factor


def _all(trial: Trial) -> Iterator[Guess]:
    for role, y, mine in _floats(trial):
        yield from (Guess((f, role), choices=8.0) for f in (2.0, 0.5, -1.0))
        yield from (Guess((f, role), fitted=1) for f in _ratios(trial, role, y, mine))


@cause(FACTOR, "*", text="multiplied by {0:.5g}", values=_all)
def all_times(trial: Trial, parameter: tuple[float, str]) -> dict[str, Expected]:
    factor, role = parameter
    return {role: scaled(rounded_once(trial, role), factor)}


@cause(ADDRESS, "*", text="with 0 in its place (never written)", values=lambda t: [role for role, _, _ in _floats(t)])
def never_written(trial: Trial, role: str) -> dict[str, Expected]:
    return {role: scaled(trial.plain[role], 0.0)}


def _constants(trial: Trial) -> Iterator[Guess]:
    for role, y, mine in _floats(trial):
        weight = trial.weight(role) * precision(trial, role)
        for target in (mine, middles(mine, trial.dtype(role))):
            yield Guess((float((weight * (target - y)).sum() / weight.sum()), role), fitted=1)


@cause(FACTOR, "*", text="with {0:.4g} added", values=_constants)
def plus(trial: Trial, parameter: tuple[float, str]) -> dict[str, Expected]:
    value, role = parameter
    plain = rounded_once(trial, role)
    return {role: replace(plain, value=plain.value + value)}


# --- columns ---------------------------------------------------------------------------------------------------------


def _wrong_columns(trial: Trial, role: str, y: Any, mine: Any) -> list[int]:
    """Of the last dimension, those whose elements are off in the wrong rows."""
    noise = trial.plain[role].noise
    noise = torch.zeros(()) if noise is None else noise.expand(trial.plain[role].value.shape).reshape(y.shape)
    floor = ((unit(trial.dtype(role)) * y).square() + noise.square()).sqrt()
    off = ((mine - y).abs() > _OFF * floor) & (trial.weight(role) > 0)
    rows = (trial.weight(role) > 0).expand_as(y).reshape(-1, y.shape[-1]).sum(0).clamp(min=1)
    share = off.reshape(-1, y.shape[-1]).sum(0) / rows
    return [int(k) for k in (share >= _SHARE).nonzero().flatten()]


def _columns(trial: Trial) -> Iterator[tuple[str, tuple[int, ...], str, float, Any, Any]]:
    """(role, columns, their name, choices, y, mine) of outputs that are off in some columns alone."""
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
            run = tuple(range(first, last + 1))
            yield role, run, f"head {first // head}", float(width // head), y, mine
        if found[-1] - found[0] + 1 == len(found):
            name = f"columns {found[0]} to {found[-1]}" if len(found) > 1 else f"column {found[0]}"
            yield role, tuple(found), name, 0.5 * width * (width + 1), y, mine
        elif len(found) <= _TOGETHER:
            name = f"columns {', '.join(map(str, found))}"
            yield role, tuple(found), name, float(math.comb(width, len(found))), y, mine


def _some(trial: Trial) -> Iterator[Guess]:
    for role, columns, name, choices, y, mine in _columns(trial):
        which = torch.zeros(y.shape[-1], dtype=torch.float64)
        which[list(columns)] = 1.0
        for factor in _ratios(trial, role, y, mine, which):
            yield Guess((name, factor, role, columns), fitted=1, choices=choices)


@cause(FACTOR, "*", text="with {0} multiplied by {1:.5g}", values=_some)
def columns_times(trial: Trial, parameter: tuple[str, float, str, tuple[int, ...]]) -> dict[str, Expected]:
    _, factor, role, columns = parameter
    return {role: _with_columns(trial.plain[role], columns, factor, rounded_once(trial, role))}


def _lost(trial: Trial) -> Iterator[Guess]:
    for role, columns, name, choices, _y, _mine in _columns(trial):
        yield Guess((name, role, columns), choices=choices)


@cause(ADDRESS, "*", text="with {0} left at 0 (not computed)", values=_lost)
def columns_lost(trial: Trial, parameter: tuple[str, str, tuple[int, ...]]) -> dict[str, Expected]:
    _, role, columns = parameter
    return {role: _with_columns(trial.plain[role], columns, 0.0)}


def _with_columns(e: Expected, columns: tuple[int, ...], factor: float, read: Expected | None = None) -> Expected:
    """read: the output that the factor is applied to, rounded."""
    some = torch.zeros(e.value.shape[-1], dtype=torch.bool)
    some[list(columns)] = True
    other = scaled(e if read is None else read, factor)

    def either(a: Any | None, b: Any | None) -> Any | None:
        return None if a is None or b is None else torch.where(some, b.expand(e.value.shape), a.expand(e.value.shape))

    noise = torch.zeros((), dtype=torch.float64) if e.noise is None else e.noise
    other_noise = torch.zeros((), dtype=torch.float64) if other.noise is None else other.noise
    return replace(other, value=torch.where(some, other.value, e.value), noise=either(noise, other_noise),
                   bound=either(e.bound, other.bound))  # fmt: skip


# --- ranks -----------------------------------------------------------------------------------------------------------


def _ranks(trial: Trial) -> list[int]:
    size = int(trial.call.attrs.get("tp_size", 1))
    if size < 2 or not trial.call.attr("reduce_results", default=True):
        raise Declined("no sum over ranks")
    return list(range(size))


def _with_rank(trial: Trial, rank: int, times: float) -> dict[str, Expected]:
    plain = trial.plain["output.0"]
    part = partial(ranks_of(trial.call, len(_ranks(trial)))[rank]).value
    return {"output.0": replace(plain, value=plain.value + times * part.reshape(plain.value.shape))}


@cause(FACTOR, "RowParallelLinear", text="without the part of rank {0} in its sum", values=_ranks)
def rank_missing(trial: Trial, rank: int) -> dict[str, Expected]:
    return _with_rank(trial, rank, -1.0)


@cause(FACTOR, "RowParallelLinear", text="with the part of rank {0} twice in its sum", values=_ranks)
def rank_twice(trial: Trial, rank: int) -> dict[str, Expected]:
    return _with_rank(trial, rank, 1.0)


@cause(FACTOR, "RowParallelLinear", text="without its sum over ranks (rank {0}'s part alone)", values=_ranks)
def not_reduced(trial: Trial, rank: int) -> dict[str, Expected]:
    plain = trial.plain["output.0"]
    part = partial(ranks_of(trial.call, len(_ranks(trial)))[rank]).value
    return {"output.0": replace(plain, value=part.reshape(plain.value.shape))}
