"""``accprobe gentest DUMP``: captured calls as a folder of tests that needs torch and pytest only."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_accprobe.cli import options, places
from vllm_accprobe.cli.endings import CommandError, NothingThere
from vllm_accprobe.cli.opcheck import ids_of, near_names, opened_calls, require_torch
from vllm_accprobe.cli.options import hidden, option
from vllm_accprobe.cli.output import answer, say_notes, say_written
from vllm_accprobe.waiting import progress
from vllm_accprobe.whole_file import NoSpace, no_space

if TYPE_CHECKING:
    from vllm_accprobe.opcheck.calls.records import Calls, Captured
    from vllm_accprobe.opcheck.kit.shrink import Shrunk
    from vllm_accprobe.opcheck.kit.testgen import Written
    from vllm_accprobe.opcheck.reference_table import References


@dataclass(frozen=True)
class GentestOptions:
    """Which calls, and where the tests go."""

    dump: Path = options.dump()
    failed: bool = option("--failed", False, "Calls that opcheck finds wrong, the worst of each module.")
    ops: list[str] = options.ops()
    ids: str = options.ids()
    out: Path | None = options.out("a new folder, accprobe-gentest", None)
    factory: str = hidden("--factory", "", "jprof's: all operators, tensors as captured (else drawn), or drawn.",
                          metavar="load|draw")  # fmt: skip
    cpu_init: bool = hidden("--cpu_init", False, "jprof's: inputs lie on the CPU first, as here always.")
    blacklist: bool = hidden("--blacklist", False, "jprof's: without operators that have no reference.")
    seed: int = options.seed()
    limit: int = option("--limit -n", 50, "At most this many; 0: all calls.", min=0, metavar="N")
    weights: Path | None = options.weights()
    kernel: str = option("--kernel", "", "FILE.py:FUNCTION or MODULE:FUNCTION, run in the operators' place: calls are "
                         "cut to what it fails for.", metavar="NAME")  # fmt: skip
    whole: bool = option("--whole", False, "Failing calls are not cut to the smallest part that fails.")
    real_values: bool = option("--real-values", False, "Captured numbers stay, where drawn ones fail as well.")


def gentest(what: GentestOptions) -> None:
    """Write captured calls as tests: tensors, float64 references and one parametrised test per operator.

    The folder runs with torch and pytest alone, on the machine whose kernel is in question: `pytest --device npu --load
    torch_npu --detail-csv npu.csv`. Exit code 0: written, 2: bad usage or unreadable input, 3: no such call.
    """
    factory, failed, ops, ids, dump = what.factory, what.failed, what.ops, what.ids, what.dump
    if factory not in ("", "load", "draw"):
        raise CommandError(f"--factory {factory[:20]}: load takes captured tensors, draw draws them")
    if not failed and not ops and not ids and not factory:
        raise CommandError("say which calls: --failed, --ops GLOB or --ids IDS")
    most = what.limit or sys.maxsize
    out = what.out or Path("pytests" if factory else "accprobe-gentest")
    if factory and not ops and not ids and not failed:
        ops = ["*:*"]  # operators: their places have a colon
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise CommandError(f"--out: {out} exists and is not empty")
    places.check_place(out, [dump])
    places.writable(out)
    require_torch("gentest")
    from vllm_accprobe.opcheck.kit.bench import load_function
    from vllm_accprobe.opcheck.registry import default_references
    from vllm_accprobe.opcheck.run.replay import Options

    try:
        kernel = load_function(what.kernel) if what.kernel else None
    except ValueError as why:
        raise CommandError(f"--kernel {why}") from None
    calls, references, choice = opened_calls(dump, what.weights), default_references(), Options(ids=ids_of(ids))
    drawing = DrawnCalls(what.seed, factory == "draw", references if what.blacklist else None)
    if ops and not calls.taps(ops):
        raise NothingThere(f"{dump}: --ops matches no call{near_names(dump, ops)}")
    chosen = _failed(calls, references, ops, choice) if failed else _matching(calls, ops, choice, most, drawing)
    try:
        _as_tests(calls, references, chosen, drawing, out, most, what, kernel)
    except (KeyboardInterrupt, OSError) as e:  # a folder that is not whole would stand in the way of the same command
        shutil.rmtree(out, ignore_errors=True)
        if (code := no_space(e)) is not None:
            raise NoSpace(code, out) from e
        raise


def _as_tests(
    calls: Calls, references: References, chosen: Iterator[Captured], drawing: DrawnCalls, out: Path, most: int,
    what: GentestOptions, kernel: Callable[..., Any] | None,
) -> None:  # fmt: skip
    from vllm_accprobe.opcheck.calls import grid
    from vllm_accprobe.opcheck.calls.case import closed
    from vllm_accprobe.opcheck.causes.examine import Causes
    from vllm_accprobe.opcheck.kit.bench import Bench
    from vllm_accprobe.opcheck.kit.shrink import Shrunk, shrunk
    from vllm_accprobe.opcheck.kit.testgen import about, write_case, write_folder

    failed = what.failed
    bench, cuts = Bench(kernel=kernel, references=references), list[Shrunk]()
    causes = Causes(references, taps=None) if failed else None
    written: list[Written] = []
    left: list[str] = []
    wider, last = 0, ""
    for captured in chosen:
        if len(written) == most:
            left.append("more calls than --limit")
            break
        try:
            if not written:
                (out / "cases").mkdir(parents=True, exist_ok=True)
            if causes is not None and (not written or captured.tap != last):
                causes.next_tap()
            found, last = causes.of_calls([captured]) if causes is not None else None, captured.tap
            cause = "" if found is None else found.text
            ready, more = captured, None
            if (failed or kernel is not None) and not any(t.is_meta for t in captured.what.outputs.values()):
                ready = replace(captured, what=closed(captured.what, references))
                cut = shrunk(ready, bench, about(ready), found, real_values=what.real_values, whole=what.whole)
                ready, more = replace(ready, what=cut.call), cut.about()
                cuts.append(cut)
            written.append(write_case(ready, references, out / "cases", len(written), cause, more))
            wider += any(
                r.dtype != grid.name_of(captured.what.outputs[role])
                for role, r in captured.records.items()
                if role in captured.what.outputs and not captured.what.outputs[role].is_meta
            )  # fmt: skip
        except ValueError as why:
            left.append(f"{captured.tap}: {why}")
    left += [*drawing.notes(), *_of_cuts(cuts), *([] if causes is None else causes.problems(counted=True))]
    if wider:
        left.append(f"{wider} calls hold numbers of a coarser dtype than their tensors': the tests have them in that")
    say_notes([*calls.dump.problems, *calls.problems, *references.problems, *left])
    if not written:
        raise NothingThere(f"{calls.dump.path}: {_why_none(calls, failed)}: nothing was written")
    from vllm_accprobe.report.text import count

    write_folder(written, out, f"the dump {Path(calls.dump.path).resolve().name}")
    operators = len({w.op for w in written})
    size = f"{count(len(written), 'call')} of {count(operators, 'operator')}"
    say_written(out, about=f"{size}; run `pytest {out}` with torch alone")
    answer(calls=written, operators=operators)


def _of_cuts(cuts: list[Shrunk]) -> Iterator[str]:
    """What the folder has of the failing calls, and of whom the numbers are."""
    from vllm_accprobe.opcheck.kit.shrink import median_share
    from vllm_accprobe.report.text import count

    if smaller := [c for c in cuts if c.kept]:
        share = f"{100 * median_share(smaller):.2g} %"
        yield f"{count(len(smaller), 'call')} cut to {share} of the bytes (median): --whole keeps all of them"
    drawn = sum(c.synthetic for c in cuts)
    if drawn:
        yield f"{count(drawn, 'call')} with drawn inputs, which fail as well: --real-values keeps the captured ones"
    if rest := len(cuts) - drawn:
        yield f"{count(rest, 'call')} with captured inputs, parts of what users wrote: treat them like the dump"


def _why_none(calls: Calls, failed: bool) -> str:
    if failed and not any(r.payload is not None for r in calls.dump.records):
        return "it holds statistics: what failed is not known, --ops or --factory draw inputs"
    return "no call failed" if failed else "no call matches that has all its tensors"


class DrawnCalls:
    """Calls of which no tensor was captured, or is wanted: their inputs are drawn. references: whose operators alone
    are wanted, None for all."""

    def __init__(self, seed: int, always: bool, references: References | None):
        self.seed, self.always, self.references = seed, always, references
        self.drawn = 0
        self.without: set[str] = set()
        self.why: dict[str, int] = {}

    def of(self, calls: Calls, captured: Captured) -> Captured | None:
        """The call as it is written; None where it cannot be."""
        from vllm_accprobe.opcheck.reference import Declined
        from vllm_accprobe.opcheck.run import synthetic_inputs

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


def _matching(calls: Calls, ops: list[str], options: object, most: int, drawing: DrawnCalls) -> Iterator[Captured]:
    """Calls with all their tensors, or drawn ones: as many of each tap as fit, the first ones."""
    from vllm_accprobe.opcheck.run.replay import Options

    assert isinstance(options, Options)
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


def _failed(calls: Calls, references: References, ops: list[str], options: object) -> Iterator[Captured]:
    """The worst wrong call of each tap, the worst tap first."""
    from vllm_accprobe.opcheck.run.replay import Options, check_tap
    from vllm_accprobe.opcheck.run.result_row import FAIL, CheckResult

    assert isinstance(options, Options)
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
