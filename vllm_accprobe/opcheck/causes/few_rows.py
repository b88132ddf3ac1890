"""A wrong call cut to a few of its wrong rows, on which causes and parameters are tried before they are proved.

The problem: a hundred causes with ten parameters each, on four calls of hundreds of rows, take minutes; nearly all are
wrong in every row. The idea: eight of the rows that are wrong, the worst four and four between the others, are a call
of their own where an operator works row by row. Of attention they stay in place, and the cache gives only these.
What fails there is not examined further; what does not is proved on the whole calls.

Not here: what is tried (search.py), fits (api.py), grids (precision.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Call, Declined

_ROWS = 8
"""Chosen: half of them are the worst ones."""
_CACHED = ("Attention", "MLAAttention")
_BY_ROWS = ("UnquantizedFusedMoEMethod",)
"""Classes whose rows are independent, but for what their references say of noise."""


def few_of(trial: Any) -> Any:
    """``trial`` (an `api.Trial`) on a few of its wrong rows; the same where its rows are few, or not independent."""
    call = trial.call
    try:
        if call.cls in _CACHED and call.extra.get("cache") is not None:
            few = replace(call, extra={**call.extra, "cache": _of_worst_request(trial)})
        elif trial.references.by_rows(call.cls) or call.cls.endswith("RotaryEmbedding") or call.cls in _BY_ROWS:
            off = _errors(trial)
            few = call if off is None or len(off) <= _ROWS else _cut(trial, _picked(off))
        else:
            few = call
        if few is call:
            return trial
        return replace(trial, captured=replace(trial.captured, what=few), plain=trial.evaluate(few), wrong={})
    except (Declined, RuntimeError):
        return trial


def _errors(trial: Any) -> Any:
    """float64 [rows]: of all outputs, the relative error's square, 0 in right rows; None where they have other rows."""
    total = None
    for role in trial.roles():
        record, mine, plain = trial.captured.records[role], trial.mine(role), trial.plain[role].value
        if not mine.is_floating_point() or not mine.dim() or plain.numel() != mine.numel() or record.row_dim:
            return None
        off = ((mine.double() - plain.reshape(mine.shape)) * trial.weight(role)).reshape(len(mine), -1)
        off = off.nan_to_num().square().sum(1) / plain.reshape(len(mine), -1).square().sum(1).clamp(min=1e-300)
        if total is not None and len(off) != len(total):
            return None
        total = off if total is None else total + off
    return total


def _picked(off: Any) -> Any:
    """Places of the rows that are taken, in order."""
    wrong = (off > 0).nonzero().flatten()
    wrong = wrong if len(wrong) else torch.arange(len(off))
    worst = wrong[off[wrong].topk(min(_ROWS // 2, len(wrong))).indices]
    return torch.cat((worst, wrong[torch.linspace(0, len(wrong) - 1, _ROWS // 2).long()])).unique()


def _cut(trial: Any, some: Any) -> Call:
    """The call's rows ``some``, in all that has as many."""
    n = len(trial.mine(trial.roles()[0]))

    def part(name: str, t: Any) -> Any:
        record = trial.captured.records.get(name)
        dim = record.row_dim if record is not None else 0
        return t.index_select(dim, some) if t.dim() > dim and t.shape[dim] == n else t

    def of(call: Call) -> Call:
        extra = {k: part(k, v) if isinstance(v, torch.Tensor) else [of(c) for c in v] if k == "ranks" else v
                 for k, v in call.extra.items()}  # fmt: skip
        return replace(call, inputs={k: part(f"input.{k}", t) for k, t in call.inputs.items()},
                       outputs={k: part(k, t) for k, t in call.outputs.items()}, extra=extra)  # fmt: skip

    return of(trial.call)


@dataclass(frozen=True)
class _SomeRows:
    """A cache of which one request has these rows alone: (places, positions, past)."""

    only: tuple[Any, Any, Mapping[str, Any]]
    why: str = ""

    def requests(self, causal: bool = True) -> Iterator[tuple[Any, Any, Mapping[str, Any]]]:
        yield self.only


def _of_worst_request(trial: Any) -> _SomeRows:
    off = _errors(trial)
    if off is None:
        raise Declined("its output has no rows")
    found = [(float(off[at].amax()), -k, x) for k, x in enumerate(trial.call.extra["cache"].requests(True))
             for at in (x[0],) if len(at)]  # fmt: skip
    if not found:
        raise Declined("no row has its whole history")
    at, positions, past = max(found, key=lambda x: x[:2])[2]
    some = _picked(off[at])
    return _SomeRows((at[some], positions[some], past))
