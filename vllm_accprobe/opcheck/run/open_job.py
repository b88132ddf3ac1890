"""A job of opcheck, opened: the taps of its dump, and the rows of each.

Elsewhere: the process that has it (process_pool.py), a call against its reference (check_calls.py). Needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

from vllm_accprobe.comparison.config_constants import check_built_of
from vllm_accprobe.dump.decode import decode
from vllm_accprobe.formats import open_dump
from vllm_accprobe.formats.atb import AtbDump
from vllm_accprobe.opcheck.calls import records
from vllm_accprobe.opcheck.calls.batches import to_the_bit
from vllm_accprobe.opcheck.calls.recorded_gradients import RecordedGradients, is_one
from vllm_accprobe.opcheck.calls.records import Calls, Captured
from vllm_accprobe.opcheck.causes.examine import CausesOfTap
from vllm_accprobe.opcheck.compat import msprobe
from vllm_accprobe.opcheck.compat.ait import has_id
from vllm_accprobe.opcheck.floors.pooled import Pools
from vllm_accprobe.opcheck.kit.testgen import saved
from vllm_accprobe.opcheck.reference import BACKWARD
from vllm_accprobe.opcheck.references import api
from vllm_accprobe.opcheck.registry import default_references
from vllm_accprobe.opcheck.repeat import by_rows, named_operator, repeated
from vllm_accprobe.opcheck.repeat.machine_kernels import MachineKernels
from vllm_accprobe.opcheck.run import rerun, synthetic_inputs
from vllm_accprobe.opcheck.run.check_calls import (
    Options,
    ToCheck,
    cache_rows,
    check_backward,
    check_call,
    check_calls,
    check_stored,
)
from vllm_accprobe.opcheck.run.job import AGAIN, DEVICE, EXACT, GOLDEN, STORED, TOGETHER, Job, Tap
from vllm_accprobe.opcheck.run.judged_row import without_verdict
from vllm_accprobe.opcheck.run.own_findings import corrected, own_findings
from vllm_accprobe.opcheck.run.result_row import ERROR, FAIL, OURS, SKIP, STRICT, CheckResult, Unavailable

Rows = Iterator[CheckResult]
Crashes = Mapping[tuple[int | None, int], str]
Begins = Callable[[int | None, int], object]


class OpenJob:
    """A job, opened. Raises DumpError, and Unavailable where there is no device."""

    def __init__(self, job: Job):
        self.job = job
        self.references = default_references()
        self.kernels: Any = None
        if job.runs_here:  # before its operators are searched for
            self.kernels = MachineKernels(self.references, load=job.load)
        self.calls: Any
        if job.named is not None:
            self.calls = named_operator.NamedCalls(decode(named_operator.NamedOperator, job.named), job.seed)
        else:
            model, dump = Path(job.model) if job.model else None, open_dump(Path(job.dump))
            if job.op_csv and isinstance(dump, AtbDump) and not dump.parameters.add_table(Path(job.op_csv)):
                dump.problem(f"{job.op_csv}: no operator was found in it")
            self.calls = Calls(dump, model, records.parsed_attributes(job.attributes))
            if job.against == EXACT and not job.runs_here:
                self.calls.problems += corrected(self.calls.modules, check_built_of(dump, model))
        looks = job.against == EXACT and job.standard in (OURS, STRICT)
        budget = self.calls.budget()
        self.options = Options(job.standard, job.kl, frozenset(job.ids), habits=looks, budget=budget,
                               within=job.within)  # fmt: skip
        note = api.note({op.op for op in self.calls.dump.ops})
        self._mint = api.installed()
        if note and not job.golden:
            self.calls.problems.append(note)
        self.device = "cpu"
        self.source: Any = None
        if job.against == DEVICE:
            found = rerun.accelerator()
            if found is None:
                raise Unavailable("--against device: torch sees no accelerator on this machine")
            self.device, self.source = found, rerun.Device(self.references, found)
        elif job.against == GOLDEN:
            self.source = rerun.Golden(open_dump(Path(job.golden)))
        elif job.against == AGAIN:
            self.source = rerun.Again(self.references)
        if job.devices:
            self.device = rerun.device_named(job.devices[0])
        if job.jit:
            self.calls.problems += rerun.compiled_operators(self.device)

        self._doubles = msprobe.duplicates(self.calls) if job.once else {}
        self._gradients: Any = None
        self._causes: list[Any] = []
        if job.named is None:
            here = bool(job.devices)
            self._gradients = RecordedGradients(self.calls, self.references, self.device, job.seed, here)

    @property
    def problems(self) -> list[str]:
        here = [self.kernels.described()] if self.kernels is not None else []
        causes = [p for c in self._causes for p in c.problems()]
        return [*self.calls.dump.problems, *self.calls.problems, *self.references.problems, *causes, *here]

    def taps(self) -> list[Tap]:
        whole = self.job.against == EXACT and not self.job.ids and not self.job.runs_here
        stored = [STORED] if whole and not self.job.operations else []
        taps = self.calls.taps(self.job.ops)
        return [*stored, *(t for t in taps if not self.job.operations or has_id(t[1], self.job.operations))]

    def rows(self, tap: Tap, crashed: Crashes, begins: Begins, alone: bool = False) -> Rows:
        """The rows of one tap. alone: no two of its calls are evaluated as one."""

        if tap == STORED:
            yield from check_stored(self.calls, self.job.ops)
            if not self.job.ops:
                yield from cache_rows(self.calls.dump)
                own = own_findings(self.calls.dump, Path(self.job.model) if self.job.model else None)
                self.calls.problems += own.lines()
                yield from own.rows()
            return
        pools, causes = Pools(), self._causes_of_tap()
        calls = filter(self.options.wants, self.calls.of(tap[0], tap[1], begins=begins, crashed=crashed))
        alone = alone or bool(crashed or self.source or self.kernels or self.job.devices)
        found = zip(calls, repeat(None)) if alone else to_the_bit(calls, self.references, lambda: begins(*TOGETHER))

        def to_check() -> Iterator[tuple[Captured, Iterable[CheckResult | ToCheck]]]:
            for captured, outcome in found:
                if not alone:  # others may have begun since
                    begins(captured.step, captured.call)
                yield captured, self._check(captured, pools, outcome)

        together = None if alone else lambda: begins(*TOGETHER)
        for captured, rows in check_calls(self.calls.dump, to_check(), together):
            if self.job.save and any(r.status == FAIL for r in rows):
                self.calls.problems += saved(captured, self.references, Path(self.job.save))
            yield from rows if causes is None else causes.with_cause(captured, rows)
        if self.source is None and self.options.standard == OURS and self.kernels is None:
            yield from pools.rows(self.options.budget)

    def _causes_of_tap(self) -> Any:
        """What gives wrong rows their cause; None where something else than the captured call is judged."""
        if self.job.against != EXACT or not self.options.habits or self.kernels is not None or self.job.devices:
            return None

        return CausesOfTap(self._causes, self.references, self.options.budget.output)

    def _check(self, captured: Captured, pools: Pools, outcome: Any = None) -> Iterator[CheckResult | ToCheck]:
        if why := self._left_out(captured):
            yield without_verdict(captured, "", None, SKIP, why)
            return
        if self.kernels is not None:
            yield from self._here(captured)
            return
        if is_one(captured) and not captured.crashed and not self.source:
            yield from self._gradients.check(captured, self.options)
            return
        lacking = captured.missing and not captured.crashed and synthetic_inputs.possible(captured)
        if lacking or (self.job.devices and not captured.missing):
            drawn = synthetic_inputs.drawn(self.calls, captured, self.job.seed) if lacking else captured
            yield from synthetic_inputs.check(
                self.calls, drawn, self.references, self.device, self.options, bool(lacking)
            )
            if self.job.backward and not drawn.missing and not self._gradients.recorded(captured):
                yield from check_backward(drawn, self.references, self.device, self.job.seed)
            return
        evaluate = self.source.evaluate if self.source else lambda c: outcome or self.references.evaluate(c.what)
        yield ToCheck(captured, evaluate, self.options, pools)
        if self.source is None and self._mint and not captured.missing and api.is_mint(captured.what.cls):
            yield from rerun.by_mindspore(self.calls.dump, captured, self.references, self.options)
        known = captured.missing or captured.what.cls.startswith(BACKWARD) or self._gradients.recorded(captured)
        if self.job.backward and not known:
            yield from check_backward(captured, self.references, self.device, self.job.seed)

    def _left_out(self, captured: Captured) -> str:
        if why := msprobe.left_out(captured.what.cls, self.job.white, self.job.black):
            return why
        first = self._doubles.get((captured.rank, captured.tap, captured.step, captured.call))
        return f"another call stands for it: {first}" if first and not captured.crashed else ""

    def _here(self, captured: Captured) -> Rows:
        """Rows of a call that is run by this machine's kernels; of statistics, on drawn inputs."""

        if captured.missing and not captured.crashed and synthetic_inputs.possible(captured):
            captured = synthetic_inputs.drawn(self.calls, captured, self.job.seed)
            captured = replace(captured, what=replace(captured.what, outputs={}))
        if captured.missing and not captured.what.args and not captured.what.inputs:
            yield without_verdict(captured, "", None, ERROR if captured.crashed else SKIP, captured.missing)
            return
        strict, chance = self.options.standard == STRICT, self.options.budget.output
        if self.job.repeat:
            yield from repeated.repeat(captured, self.kernels, repeated.RepeatOptions(self.job.repeat, strict, chance))
        elif self.job.batch:
            yield from by_rows.batches(captured, self.kernels, by_rows.BatchOptions(self.job.batch, strict, chance))
        else:
            once = named_operator.checked_once(captured, self.kernels)
            yield from check_call(self.calls.dump, once, lambda c: self.references.evaluate(c.what), self.options)
