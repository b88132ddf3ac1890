"""Which captured calls become tests, and what is written of each.

The problem: a dump has thousands of calls, of some only statistics, and a failing one may have a million rows of which
one is wrong. The idea: of each operator as many calls as fit, or the worst that fails; what was not captured is drawn,
and says so; a call that fails is cut to the smallest part that still does, with its cause where that is found. Not
here: the folder (testgen.py), the cutting (shrink.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_accprobe.opcheck.calls import grid
from vllm_accprobe.opcheck.calls.case import closed
from vllm_accprobe.opcheck.calls.records import Calls, Captured
from vllm_accprobe.opcheck.causes.examine import Causes
from vllm_accprobe.opcheck.kit.bench import Bench
from vllm_accprobe.opcheck.kit.shrink import Shrunk, shrunk
from vllm_accprobe.opcheck.kit.testgen import Written, about, write_case
from vllm_accprobe.opcheck.reference import Declined
from vllm_accprobe.opcheck.reference_table import References
from vllm_accprobe.opcheck.run import synthetic_inputs
from vllm_accprobe.opcheck.run.check_calls import Options, check_tap
from vllm_accprobe.opcheck.run.result_row import FAIL, CheckResult
from vllm_accprobe.progress import progress


class DrawnCalls:
    """Calls of which no tensor was captured, or is used: their inputs are drawn. references: whose operators alone
    are written, None for all."""

    def __init__(self, seed: int, always: bool, references: References | None):
        self.seed, self.always, self.references = seed, always, references
        self.drawn = 0
        self.without: set[str] = set()
        self.why: dict[str, int] = {}

    def of(self, calls: Calls, captured: Captured) -> Captured | None:
        """The call as it is written; None where it cannot be."""
        cls = captured.what.cls
        if self.references is not None and isinstance(self.references.find(cls), Declined):
            self.without.add(cls)
            return None
        if captured.missing and not synthetic_inputs.possible(captured):
            self.why[captured.missing] = self.why.get(captured.missing, 0) + 1
            return None
        if not captured.missing and not self.always:
            return captured if captured.what.outputs else None
        found = synthetic_inputs.drawn(calls, captured, self.seed, anew=self.always)
        if found.missing:
            self.why[found.missing] = self.why.get(found.missing, 0) + 1
            return None
        self.drawn += 1
        return found

    def notes(self) -> list[str]:
        lines = [f"{n} calls: {why}" for why, n in self.why.items()]
        if self.drawn:
            lines.append(f"the inputs of {self.drawn} calls were drawn from their statistics: weaker evidence")
        if self.without:
            lines.append(f"--blacklist: no reference for {', '.join(sorted(self.without)[:8])}")
        return lines


def matching(calls: Calls, ops: list[str], options: Options, most: int, drawing: DrawnCalls) -> Iterator[Captured]:
    """Calls with all their tensors, or drawn ones: as many of each tap as fit, the first ones."""
    taps = calls.taps(ops)
    share = max(most // max(len(taps), 1), 1) if not options.ids else most
    with progress("gentest", len(taps)) as done:
        for rank, tap, _ in taps:
            taken = 0
            for captured in calls.of(rank, tap):
                if taken < share and options.wants(captured) and (ready := drawing.of(calls, captured)) is not None:
                    taken += 1
                    yield ready
            done()


def failed(calls: Calls, references: References, ops: list[str], options: Options) -> Iterator[Captured]:
    """The worst wrong call of each tap, the worst tap first."""
    worst: dict[tuple[int, str], CheckResult] = {}
    taps = calls.taps(ops)
    with progress("checking", len(taps)) as done:
        for rank, tap, _ in taps:
            rows = check_tap(calls, rank, tap, lambda c: references.evaluate(c.what), options)
            bad = [r for r in rows if r.status == FAIL and r.step is not None]
            if bad:
                worst[rank, tap] = max(bad, key=lambda r: r.severity)
            done()
    for (rank, tap), row in sorted(worst.items(), key=lambda i: -i[1].severity):
        for captured in calls.of(rank, tap):
            if (captured.step, captured.call) == (row.step, row.call):
                yield captured
                break


@dataclass
class Collected:
    """What was written, cut, and left; notes: of causes that could not be examined, and of dtypes."""

    written: list[Written] = field(default_factory=list)
    cuts: list[Shrunk] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def write_cases(
    chosen: Iterable[Captured], references: References, place: Path, most: int, kernel: Callable[..., Any] | None,
    failing: bool, real_values: bool, whole: bool,
) -> Collected:  # fmt: skip
    """Writes at most ``most`` calls into ``place``, which is made for the first. kernel: what is run in the operators'
    place; failing: they fail, so that their cause is examined; real_values, whole: as `shrunk`. Raises OSError."""
    found, bench = Collected(), Bench(kernel=kernel, references=references)
    causes = Causes(references, taps=None) if failing else None
    wider, last = 0, ""
    for captured in chosen:
        if len(found.written) == most:
            found.left.append("more calls than --limit")
            break
        outputs = captured.what.outputs
        try:
            if not found.written:
                place.mkdir(parents=True, exist_ok=True)
            if causes is not None and (not found.written or captured.tap != last):
                causes.next_tap()
            why, last = causes.of_calls([captured]) if causes is not None else None, captured.tap
            ready, more = captured, None
            if (failing or kernel is not None) and not any(t.is_meta for t in outputs.values()):
                ready = replace(captured, what=closed(captured.what, references))
                cut = shrunk(ready, bench, about(ready), why, real_values=real_values, whole=whole)
                ready, more = replace(ready, what=cut.call), cut.about()
                found.cuts.append(cut)
            cause = "" if why is None else why.text
            found.written.append(write_case(ready, references, place, len(found.written), cause, more))
            wider += any(
                r.dtype != grid.name_of(outputs[role])
                for role, r in captured.records.items() if role in outputs and not outputs[role].is_meta
            )  # fmt: skip
        except ValueError as error:
            found.left.append(f"{captured.tap}: {error}")
    if causes is not None:
        found.notes += causes.problems(counted=True)
    if wider:
        found.notes.append(
            f"{wider} calls hold numbers of a coarser dtype than their tensors': the tests have them in that"
        )
    return found
