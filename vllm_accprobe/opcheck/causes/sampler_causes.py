"""Causes of sampling: a parameter left out, or that of the row before or behind, in a sampler and in its operators.

Of vLLM's sampler the rows are computed again with the other parameters (calls/sampler_calls.py); of an operator, each
argument that has a number for each row is exchanged. A token proves one bit, however rarely it is drawn by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vllm_accprobe.opcheck.causes.api import ADDRESS, SETTING, CauseRow, Guess, Trial, among, edited
from vllm_accprobe.opcheck.reference import Call, Declined

SAMPLER = ("Sampler", "*Sampler")
OPERATORS = (
    "*apply_penalties", "*apply_repetition_penalties_", "*top_k_top_p*", "*apply_min_p", "TopKTopPSampler",
)  # fmt: skip
_NEUTRAL: dict[str, dict[str, Any]] = {
    "seed": {"seed": None}, "top-p": {"top_p": 1.0}, "top-k": {"top_k": 0}, "min-p": {"min_p": 0.0},
    "temperature": {"temperature": 1.0}, "penalties": {"repetition": 1.0, "presence": 0.0, "frequency": 0.0},
}  # fmt: skip
"""By name, the fields of a request's parameters with what leaves a row as it is."""
_RUNNERS = {"repetition": "repetition_penalties", "presence": "presence_penalties", "frequency": "frequency_penalties"}
"""Fields whose input of the sampler has another name."""


def _rows(trial: Trial) -> tuple[dict[str, Any], Sequence[Any]]:
    facts = trial.call.extra.get("sampled") or {}
    if not facts.get("by_row"):
        raise Declined("the parameters of its rows are not known")
    return facts, facts["by_row"]


def _asked_for(trial: Trial) -> list[str]:
    """The parameters that a row of the call asks for."""
    return [name for name, neutral in _NEUTRAL.items() if any(
        r.asks is not None and getattr(r.asks, f) != usual for r in _rows(trial)[1] for f, usual in neutral.items()
    )]  # fmt: skip


def _left_out(trial: Trial, name: str) -> Call:
    return _asking(trial, [r.asks and replace(r.asks, **_NEUTRAL[name]) for r in _rows(trial)[1]], {})


def _neighbours(trial: Trial) -> list[Guess]:
    return among((name, by) for name in _asked_for(trial) for by in (1, -1) if len(_rows(trial)[1]) > 1)


def _of_another_row(trial: Trial, parameter: tuple[str, int]) -> Call:
    name, by = parameter
    facts, rows = _rows(trial)
    others = [rows[(k - by) % len(rows)].asks for k in range(len(rows))]
    asks = [r.asks if r.asks is None or o is None else replace(r.asks, **{f: getattr(o, f) for f in _NEUTRAL[name]})
            for r, o in zip(rows, others, strict=True)]  # fmt: skip
    own = {_RUNNERS.get(f, f) for f in _NEUTRAL[name]} & set(facts["settings"])
    return _asking(trial, asks, {n: tuple(t.roll(by, 0) for t in facts["settings"][n]) for n in own})


def _asking(trial: Trial, asks: Sequence[Any], settings: dict[str, Any]) -> Call:
    """The call whose rows ask for something else."""
    facts, rows = _rows(trial)
    again = facts["again"]([replace(r, asks=a) for r, a in zip(rows, asks, strict=True)])
    return edited(trial.call, extra={"sampled": {**facts, **again, "settings": {**facts["settings"], **settings}}})


def _arguments(trial: Trial) -> list[Guess]:
    """(argument, shift) of arguments with a number for each row."""
    call, n = trial.call, len(trial.mine(trial.roles()[0]))
    named = [*enumerate(call.args), *call.kwargs.items(), *call.inputs.items()]
    found = [k for k, t in named if hasattr(t, "shape") and tuple(t.shape) in ((n,), (n, 1)) and n > 1]
    return among((k, by) for k in found for by in (1, -1))


def _argument(trial: Trial, parameter: tuple[int | str, int]) -> Call:
    which, by = parameter
    call = trial.call
    return replace(call, args=tuple(t.roll(by, 0) if k == which else t for k, t in enumerate(call.args)),
                   kwargs={k: t.roll(by, 0) if k == which else t for k, t in call.kwargs.items()},
                   inputs={k: t.roll(by, 0) if k == which else t for k, t in call.inputs.items()})  # fmt: skip


CAUSES = (
    CauseRow("parameter_left_out", SETTING, SAMPLER, "without its {0}", _left_out,
             lambda t: [name for name in _asked_for(t) if name != "seed"], whole=True),
    CauseRow("parameter_of_another_row", ADDRESS, SAMPLER, "with the {0} of the row {1} before", _of_another_row,
             _neighbours, whole=True),
    CauseRow("argument_of_another_row", ADDRESS, OPERATORS, "with argument {0} of the row {1} before", _argument,
             _arguments, whole=True),
)  # fmt: skip
