"""The same inputs N times: an operator that races, or hands out what nobody wrote, gives other numbers.

The problem: such an operator is right most of the time, and a replay that runs it once, on an idle machine, sees
nothing. The idea: `repeat` runs a call N times under changing conditions (conditions.py) and says of each output what
it found: equal in all runs; different within the operator's own floor, which is how sums of atomics come out and a
remark; different beyond it, or made of memory that nobody wrote, which is wrong. What differs is asked once more under
torch's own switch for deterministic algorithms.
Not here: what differs and how (differences.py), the floors (call_floors.py).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_accprobe.judge.statistic import CHANCE
from vllm_accprobe.opcheck.calls.records import Captured
from vllm_accprobe.opcheck.floors.verdict import Verdict
from vllm_accprobe.opcheck.reference import Declined
from vllm_accprobe.opcheck.repeat import conditions
from vllm_accprobe.opcheck.repeat.call_floors import CallFloors
from vllm_accprobe.opcheck.repeat.differences import EQUAL, MEMORY, UNWRITTEN, RunDifferences, gap_words, place, where
from vllm_accprobe.opcheck.repeat.here import MachineKernels
from vllm_accprobe.opcheck.run.judged_row import without_verdict
from vllm_accprobe.opcheck.run.result_row import ERROR, FAIL, PASS, SKIP, WARNING, Checked, unchecked

REPEAT = "repeat"
"""The measure of these rows."""
_SWITCHED = 3


@dataclass(frozen=True)
class RepeatOptions:
    """runs: how often each call is run, 2 at least; strict: any difference fails; chance: of a floor."""

    runs: int
    strict: bool = False
    chance: float = CHANCE


def repeat(captured: Captured, kernels: MachineKernels, options: RepeatOptions) -> Iterator[Checked]:
    """A row for each output of a call, or one that says why there is none."""
    found = _runs(captured, kernels, options.runs)
    if isinstance(found, Declined):
        yield without_verdict(captured, "", None, ERROR if found.failed else SKIP, found.reason)
        return
    bad = {role for role, d in found.items() if d.kind != EQUAL}
    floors = None
    if bad:
        call, base = kernels.here(captured.what), {role: d.first for role, d in found.items()}
        floors = CallFloors.of(kernels.references, call, base, options.chance, "the first run")
    said = _switched(captured, kernels, found) if bad else ""
    for role, d in found.items():
        yield _row(captured, role, d, floors, said, options)


def _runs(captured: Captured, kernels: MachineKernels, runs: int) -> Mapping[str, RunDifferences] | Declined:
    """Each output over all runs."""
    try:
        call = kernels.ready(captured.what)
    except (RuntimeError, ValueError) as error:
        return Declined(f"its inputs cannot be had here: {' '.join(str(error).split())[:80]}")
    found: dict[str, RunDifferences] = {}
    sizes = [t.numel() * t.element_size() for t in captured.what.outputs.values()]
    for run in range(runs):
        byte, alone = conditions.pattern(run), not conditions.busy(run)
        beside = contextlib.nullcontext() if alone else conditions.company(kernels.device)
        with beside, conditions.memory(byte, sizes, kernels.device):
            made = kernels.run(call, byte)
        if isinstance(made, Declined):
            return made if not run else Declined(f"run {run} of {runs}: {made.reason}", True)
        sizes = [t.numel() * t.element_size() for t in made.values()]
        if run and set(made) != set(found):
            return Declined(f"run {run} of {runs} has other outputs than the first", True)
        for role, output in made.items():
            try:
                found.setdefault(role, RunDifferences()).add(output, byte)
            except ValueError as why:
                return Declined(str(why), True)
    return found


def _switched(captured: Captured, kernels: MachineKernels, before: Mapping[str, RunDifferences]) -> str:
    """What torch's switch for deterministic algorithms makes of it, where it is not switched on anyway."""
    if torch.are_deterministic_algorithms_enabled():
        return "torch's deterministic algorithms were on"
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        found = _runs(captured, kernels, max(_SWITCHED, min(d.runs for d in before.values())))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills
    if isinstance(found, Declined):
        if "deterministic" in found.reason:
            return "torch.use_deterministic_algorithms refuses it"
        return f"under torch.use_deterministic_algorithms: {found.reason}"
    equal = all(d.kind == EQUAL for d in found.values())
    return f"torch.use_deterministic_algorithms {'makes all runs equal' if equal else 'does not change that'}"


def _row(
    c: Captured, role: str, d: RunDifferences, floors: CallFloors | None, said: str, options: RepeatOptions
) -> Checked:
    dtype, shape = str(d.first.dtype).removeprefix("torch."), tuple(d.first.shape)
    seq = max((r.seq for r in c.records.values()), default=c.seq)
    if (record := c.records.get(role)) is not None:
        seq = record.seq
    row = unchecked(
        c.tap, c.what.cls, c.rank, c.step, c.call, seq, "", status=PASS, role=role, dtype=dtype, shape=shape
    )
    rows = shape[0] if shape else 1
    row = replace(row, rows=rows, checked=rows, measure=REPEAT, measured=0.0, allowed=1.0, message="")
    kind = d.kind
    if kind == EQUAL:
        return row
    told: dict[str, Any] = {"kind": kind, "runs": d.runs, "differing": d.differing, "switch": said}
    v: Verdict | None = None
    if kind == UNWRITTEN:
        at = where(d.unwritten, shape)
        message = f"uninitialised: {place(at)} hold what memory held before"
    else:
        at = where(d.at, shape)
        message = f"differs in {d.differing} of {d.runs} runs: {place(at)}"
        if floors is not None and d.furthest is not None:
            v, against = floors.judge(role, d.furthest)
            told |= {"against": against, "furthest": d.gap, "floors": v.value, "allowed": v.limit}
            size = (
                "non-finite"
                if v.measure == "nonfinite"
                else f"{v.measure} error {v.value:.3g} of {v.limit:.3g} allowed"
            )
            message += f"; run {d.furthest_run}: {gap_words(d.gap)}, {size} against {against}"
        if kind == MEMORY:
            message += "; it follows what memory held before: it reads what nobody wrote"
        elif v is not None and v.passed:
            message += "; within rounding, as sums in another order are"
        else:
            message += "; beyond rounding: a race"
    wrong = kind in (UNWRITTEN, MEMORY) or v is None or not v.passed
    status = FAIL if wrong or options.strict else WARNING
    measured = float(v.severity) if v is not None and kind != UNWRITTEN else 2.0
    return replace(
        row, status=status, message=f"{message}; {said}" if said else message, evidence=json.dumps(told | at),
        measured=max(measured, 1.0 + 2**-20) if status == FAIL else measured,
        position=at["first_rows"][0] if at["first_rows"] else None,
        column=at["first_column"] if at["first_column"] >= 0 else None,
    )  # fmt: skip
