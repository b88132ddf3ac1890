"""Compares two dumps: plan, measure in worker processes, judge.

The problem: reading and measuring cost minutes, judging costs seconds and is done again with other limits. The idea:
the plan's units are measured by workers into plain values (measure/measured.py), from which judging.py makes the
result. Not here: the plan (plan/), one unit (measure/measurer.py), the verdict (verdict/judging.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_accprobe.align.mapping import MappingError, Rules, load_mapping
from vllm_accprobe.align.tokens import RowSet
from vllm_accprobe.align.without_row_maps import take_names
from vllm_accprobe.comparison import notes
from vllm_accprobe.comparison.config_constants import built_otherwise, record_causes
from vllm_accprobe.comparison.coverage import coverage
from vllm_accprobe.comparison.gaps import taps_of
from vllm_accprobe.comparison.measure.measured import (
    ComparisonContext,
    Measured,
    MeasuredUnit,
    SpillBuffer,
    moments_of,
    places_of,
)
from vllm_accprobe.comparison.measure.measurer import measure_all, unit_bytes
from vllm_accprobe.comparison.measure.padding import graphs_of, padding_of
from vllm_accprobe.comparison.measure.read import Loader
from vllm_accprobe.comparison.measure.sampler_rows import RequestedRows
from vllm_accprobe.comparison.notes import differing
from vllm_accprobe.comparison.plan.groups import Groups
from vllm_accprobe.comparison.plan.make_plan import Indices, Plan, make_plan
from vllm_accprobe.comparison.plan.relations import links_of, sources_of
from vllm_accprobe.comparison.plan.unit import LOOKED_UP, SAMPLER, TOKEN, Unit
from vllm_accprobe.comparison.result import FALSE_ALARM_RATE, CompareError, Comparison, NothingCompared
from vllm_accprobe.comparison.row_table import BOUND, RowLog, take_samples, take_spreads
from vllm_accprobe.comparison.runner_inputs import states_of
from vllm_accprobe.comparison.store import Finished, identity
from vllm_accprobe.comparison.verdict.judging import gather, judge
from vllm_accprobe.comparison.weight_places import located
from vllm_accprobe.dump.journal import NO_LIVES
from vllm_accprobe.dump.record_table import LazyTable
from vllm_accprobe.formats import DumpError, NothingReadable, nothing_readable, open_dump
from vllm_accprobe.formats.common import foreign
from vllm_accprobe.formats.common.foreign import INDEPENDENT, VALUES, ForeignDump
from vllm_accprobe.judge.calibration import Calibration
from vllm_accprobe.judge.weights import weights_between
from vllm_accprobe.standards import PAIRS, NamedStandard, UnknownStandard, find
from vllm_accprobe.standards.limits import Standard

IDS_ONLY = "ids of the best logits (used for flipped tokens only)"
Progress = Callable[[int, int], None]


def compare(
    golden: str | Path | Any,
    mine: str | Path | Any,
    *,
    standard: str | Standard = "accprobe",
    taps: str | None = None,
    mapping: str | Path | Rules | None = None,
    progress: Progress | None = None,
    resume: str | Path | None = None,
    ray: str | None = None,
    jobs: int = 0,
    floors: Sequence[str | Path] = (),
    rate: float = FALSE_ALARM_RATE,
) -> Comparison:
    """Compares two dumps (paths, or what `open_dump` gives).

    standard: one of standards.names(PAIRS), or a Standard. taps: globs over tap names, comma separated. mapping: a file
    or rules that say which place of mine is which of golden (docs/formats.md). progress: called with (bytes done, bytes
    in all) of both sides, read or known to be equal. Raises CompareError, one line, and NothingCompared. resume: a
    directory that remembers what is measured until resume.forget is called. ray: address of a Ray cluster whose
    machines do the measuring; jobs: so many processes of this machine do it, 0: threads of this one. floors: further
    runs of golden's side, dumps or what `calibrate` made, from which is known what correct runs differ by
    (judge/calibration.py). rate: the probability of an origin anywhere in a comparison of correct machines,
    above 0 and below 1.
    """
    check_rate(rate)
    if ray is not None and jobs:
        raise CompareError("give a Ray cluster (--ray) or a number of processes here (--jobs), not both")
    rules, other = find_standard(standard)
    dumps = open_both(golden, mine)
    floor = gather(dumps[0], floors, compare)
    plan = make_plan(*dumps, taps=taps, mapping=find_mapping(mapping))
    if taps is not None and not plan.units:
        raise NothingCompared(notes.unmatched(dumps, taps))
    kl = other is not None and other.pairs is not None and other.pairs.needs_kl
    run = _Run(dumps, plan, ray=ray, jobs=jobs, kl=kl)
    log = RowLog(SpillBuffer(None if resume is None else Path(resume), BOUND))
    finished = None
    if resume is not None:
        finished = Finished(Path(resume), identity(dumps, taps, mapping, kl))
    try:
        result = judge(run.measure(progress, finished), rules, log, floor, rate=rate)
        result = result if other is None else notes.apply(result, other)
        result = replace(result, samples=take_samples(plan, run.loaders, result.table, log))
        blamed = {tap for o in result.origins for tap in taps_of(o)}
        spreads, without = take_spreads(plan, run.loaders, result.table, log, blamed, requested=taps is not None)
        result = replace(result, spreads=spreads, without_spread=without)
        if finished is not None:
            finished.close(needed=False)
        return result
    except DumpError as e:
        raise CompareError(str(e)) from None
    finally:
        if finished is not None:
            finished.close()


def rejudge(
    measured: Measured,
    *,
    standard: str | Standard = "accprobe",
    floors: Sequence[str | Path] = (),
    rate: float = FALSE_ALARM_RATE,
) -> Comparison:
    """Judges a saved comparison (store.load) again, by any standard and any rate, without tensors. floors:
    calibrations only."""
    check_rate(rate)
    rules, other = find_standard(standard)
    result = judge(measured, rules, None, gather(None, floors, compare), rate=rate)
    return result if other is None else notes.apply(result, other)


def check_rate(rate: float) -> None:
    """Raises CompareError for what is no probability of a false alarm."""
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate < 1:
        raise CompareError(
            f"the false-alarm rate (--false-alarm-rate, rate=) is a probability above 0 and below 1, not {rate!r}"
        )


def calibrate(golden: str | Path | Any, runs: Sequence[str | Path], *, failing: bool = False) -> Calibration:
    """What golden and further correct ``runs`` of its own side differ by. failing: a run is taken for correct that
    fails against golden, whose fault no comparison with this floor will see. Raises CompareError."""
    found = gather(open_both(golden, golden)[0], runs, compare, "", failing)
    if found is None:
        raise CompareError("give at least one further run of golden's side: another batching, dtype or reduction order")
    return found


def open_both(golden: str | Path | Any, mine: str | Path | Any) -> tuple[Any, Any]:
    """Opens what is a path; raises CompareError for what cannot be read, and NothingCompared where none of a dump's
    files can be."""
    try:
        opened = [open_dump(d) if isinstance(d, (str, Path)) else d for d in (golden, mine)]
        for dump in opened:
            foreign.note_values(dump)
    except NothingReadable as e:
        raise NothingCompared(f"nothing could be compared: {e}") from None
    except DumpError as e:
        raise CompareError(str(e)) from None
    for dump in opened:  # statistics may be there still, but they are not what was requested
        if getattr(dump, "unread", None) and not any(r.payload is not None for r in dump.records):
            raise NothingCompared(f"nothing could be compared: {nothing_readable(dump)}")
    return take_names(opened[0], opened[1])


def find_mapping(mapping: str | Path | Rules | None) -> Rules | None:
    """Reads a mapping file; raises CompareError, one line, for what cannot be used."""
    try:
        return load_mapping(mapping) if isinstance(mapping, (str, Path)) else mapping
    except MappingError as e:
        raise CompareError(str(e)) from None


def find_standard(standard: str | Standard) -> tuple[Standard, NamedStandard | None]:
    """(our own limits, another tool's standard or None). Raises CompareError."""
    if isinstance(standard, Standard):
        return standard, None
    try:
        found = find(standard, PAIRS)
    except UnknownStandard as e:
        raise CompareError(str(e)) from None
    return (found.limits, None) if found.limits is not None else (Standard(), found)


def has_tables(unit: MeasuredUnit) -> bool:
    return not isinstance(unit.parts, LazyTable) and any(p.table is not None for p in unit.parts)


def _shelve(unit: MeasuredUnit, buffer: SpillBuffer) -> None:
    for part in unit.parts if has_tables(unit) else ():
        if part.table is not None:
            part.table = buffer.keep(part.table)


@dataclass
class _Run:
    dumps: tuple[Any, Any]
    plan: Plan
    skipped: Counter[str] = field(default_factory=Counter)
    compared: dict[str, set[RowSet]] = field(default_factory=dict)
    ray: str | None = None
    jobs: int = 0
    kl: bool = False

    def __post_init__(self) -> None:
        self.loaders = Loader(self.dumps[0], 64 << 20), Loader(self.dumps[1], 64 << 20)

    def measure(self, progress: Progress | None = None, finished: Finished | None = None) -> Measured:
        looked_up = {(SAMPLER, role) for role in LOOKED_UP}
        wanted = [u for u in self.plan.units if u.key[:2] not in looked_up]
        ids = sum(len(u.mine) for u in self.plan.units if u.key[:2] in looked_up)
        if ids:
            self.skipped[IDS_ONLY] += ids
        known = dict(finished.done) if finished is not None else {}
        missing = [u for u in wanted if u.key not in known]
        sizes = {u.key: unit_bytes(u) for u in wanted} if progress is not None else {}
        total, done = sum(sizes.values()), sum(sizes[k] for k in known if k in sizes)
        buffer = SpillBuffer(finished.directory if finished is not None else None)
        for unit in known.values():
            _shelve(unit, buffer)
        for batch in self._measured(missing):
            known.update((u.key, u) for u in batch)
            if finished is not None:  # what was not read is measured again in no time
                finished.add([u for u in batch if has_tables(u)])
            for unit in batch:
                _shelve(unit, buffer)
            if progress is not None:
                done += sum(sizes[u.key] for u in batch)
                progress(done, total)
        units = [known[u.key] for u in wanted]
        for unit in units:
            self._note(unit)
        return Measured(self._setting(units), units, buffer)

    def _measured(self, units: list[Unit]) -> Iterator[list[MeasuredUnit]]:
        sides = self.plan.tokens.golden, self.plan.tokens.mine
        if self.jobs:
            from vllm_accprobe.comparison.distributed import measure_by

            return measure_by(self.jobs, self.dumps, sides, units, kl=self.kl)
        if self.ray is None:
            return measure_all(self.dumps, Indices(sides), units, kl=self.kl)
        from vllm_accprobe.comparison.distributed import measure_on

        for side, dump in zip(("golden", "mine"), self.dumps, strict=True):
            if isinstance(dump, ForeignDump):
                raise CompareError(f"--ray spreads accprobe's own dumps only, and {side} is one of {dump.kind}: "
                                   "compare without --ray where all files can be read")  # fmt: skip
        return measure_on(self.ray, self.dumps, sides, units, kl=self.kl)

    def _note(self, unit: MeasuredUnit) -> None:
        if isinstance(unit.parts, LazyTable):  # nothing of it is skipped, and all of it has rows, or nothing
            if not unit.parts.first.whole:
                self.compared.setdefault(unit.parts.first.family, set()).update(unit.parts.column("rows"))
            return
        for part in unit.parts:
            if part.skip:
                self.skipped[part.skip] += 1
            elif not part.whole and not unit.is_param:
                self.compared.setdefault(part.family, set()).add(part.rows)

    def _setting(self, units: list[MeasuredUnit]) -> ComparisonContext:
        plan, (golden, mine) = self.plan, self.dumps
        tree, tokens = plan.tree, plan.tokens
        activations = [u for u in plan.units if not u.is_param]
        sampled = RequestedRows(plan, self.loaders, self.dumps)
        return ComparisonContext(
            golden_path=str(golden.path),
            mine_path=str(mine.path),
            golden_run=dict(golden.run),
            mine_run=dict(mine.run),
            plan=plan.lines(),
            notes=notes.plan_notes(self.dumps, plan),
            coverage=coverage(plan, self.dumps, self.compared, self.skipped),
            tokens_compared=tokens.tokens_compared,
            flips=sampled.flips(),
            processed=sampled.processed({f.key for f in tokens.flips}),
            names=dict(tokens.names),
            images={k: list(v) for k, v in tokens.images.items()},
            parent=tree.parent,
            children=tree.children,
            mixing=tree.mixing,
            classes=dict(tree.classes),
            attrs={m.tap: dict(m.attrs) for modules in mine.modules.values() for m in modules},
            layers=plan.layers,
            dtypes=[] if golden.run.get(INDEPENDENT) or mine.run.get(INDEPENDENT)
            else sorted({Groups.of(g).dtype for u in activations for g in (u.golden, u.mine) if g}
                        | {str(d.run[VALUES]) for d in self.dumps if VALUES in d.run}),
            batches={s: (int(x.batch.get("requests", 0)), int(x.batch.get("tokens", 0)))
                     for (_, s), x in mine.steps.items()},
            nothing=notes.nothing(self.dumps, plan, self.skipped),
            sampler_order=next((u.order for u in plan.units if u.key[:2] == (SAMPLER, TOKEN)), len(plan.units)),
            other_images=[g.id for g, _ in plan.requests.images_differ],
            rehashed=plan.requests.rehashed,
            golden_ids={m.id: g.id for g, m, _ in plan.requests.pairs if m.id != g.id},
            settings=differing(golden, mine),
            built=built_otherwise(self.dumps) | record_causes(self.dumps),
            graphs=graphs_of(mine),
            padding=padding_of(mine),
            places=places_of(plan),
            moments=moments_of(plan),
            states=states_of(self.dumps),
            weights=located(weights_between(*(getattr(d, "lives", NO_LIVES) for d in self.dumps)), self.dumps,
                            plan.units, units, self.loaders),
            links=links_of(plan.units),
            sources=sources_of(plan.names.pairs, golden, mine),
            modules={m.tap: m.cls for modules in mine.modules.values() for m in modules},
            untapped=plan.untapped,
        )  # fmt: skip
