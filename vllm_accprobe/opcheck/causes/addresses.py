"""Causes of any operator whose rows are independent: rows of another place, of the input or of the output."""

from __future__ import annotations

from typing import Any

from vllm_accprobe.opcheck.causes.api import ADDRESS, Guess, Trial, cause, edited, moved
from vllm_accprobe.opcheck.reference import Call, Declined, Expected

_SHIFTS = (1, -1, 2, -2)


def _shifts(trial: Trial) -> list[Guess]:
    if not trial.references.by_rows(trial.call.cls) and trial.call.cls != "Attention":
        raise Declined("its rows are not independent")
    n = trial.mine().shape[0]
    return [Guess(k, choices=float(len(_SHIFTS))) for k in _SHIFTS if n > 2 * abs(k)]


@cause(ADDRESS, "*", text="moved {0:+d} rows (each row holds another's result)", values=_shifts)
def rows_shifted(trial: Trial, n: int) -> dict[str, Expected]:
    return {role: moved(trial.plain[role], lambda t: t.roll(n, 0)) for role in trial.roles()}


@cause(ADDRESS, "*", text="with its first output moved {0:+d} rows", values=_shifts)
def first_output_shifted(trial: Trial, n: int) -> dict[str, Expected]:
    if len(trial.roles()) < 2:
        raise Declined("it has one output")
    role = trial.roles()[0]
    return {role: moved(trial.plain[role], lambda t: t.roll(n, 0))}


@cause(ADDRESS, "*", text="with heads and channels exchanged in each row of its input")
def input_heads_turned(trial: Trial, _: Any) -> Call:
    head, name = trial.call.attrs.get("head_size"), next(iter(trial.call.inputs), None)
    if not isinstance(head, int) or head < 2 or name is None:
        raise Declined("it has no heads")
    x = trial.call.inputs[name]
    if x.shape[-1] % head or x.shape[-1] == head:
        raise Declined("its input is no row of heads")
    return edited(trial.call, inputs={name: x.unflatten(-1, (head, -1)).transpose(-1, -2).reshape(x.shape)})
