"""``accprobe gentest DUMP``: captured calls as a folder of tests that needs torch and pytest only."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_accprobe.cli import options, output_paths
from vllm_accprobe.cli.opcheck import ids_of, near_names, opened_calls, require_torch
from vllm_accprobe.cli.options import hidden, option
from vllm_accprobe.cli.output import answer, say_notes, say_written
from vllm_accprobe.refusals import CommandError, NothingThere
from vllm_accprobe.whole_file import NoSpace, no_space

if TYPE_CHECKING:
    from vllm_accprobe.opcheck.calls.records import Calls
    from vllm_accprobe.opcheck.kit.shrink import Shrunk


def gentest(
    dump: Path = options.dump(),
    failed: bool = option("--failed", False, "Calls that opcheck finds wrong, the worst of each module."),
    ops: list[str] = options.ops(),
    ids: str = options.ids(),
    out: Path | None = options.out("a new folder, accprobe-gentest", None),
    factory: str = hidden("--factory", "", "jprof's: all operators, tensors as captured (else drawn), or drawn.",
                          metavar="load|draw"),
    cpu_init: bool = hidden("--cpu_init", False, "jprof's: inputs lie on the CPU first, as here always."),
    blacklist: bool = hidden("--blacklist", False, "jprof's: without operators that have no reference."),
    seed: int = options.seed(),
    limit: int = option("--limit -n", 50, "At most this many; 0: all calls.", min=0, metavar="N"),
    weights: Path | None = options.weights(),
    kernel: str = option("--kernel", "", "FILE.py:FUNCTION or MODULE:FUNCTION, run in the operators' place: calls are "
                         "cut to what it fails for.", metavar="NAME"),
    whole: bool = option("--whole", False, "Failing calls are not cut to the smallest part that fails."),
    real_values: bool = option("--real-values", False, "Captured numbers stay, where drawn ones fail as well."),
) -> None:  # fmt: skip
    """Write captured calls as tests: tensors, float64 references and one parametrised test per operator.

    The folder runs with torch and pytest alone, on the machine whose kernel is in question: `pytest --device npu --load
    torch_npu --detail-csv npu.csv`. Exit code 0: written, 2: bad usage or unreadable input, 3: no such call.
    """
    if factory not in ("", "load", "draw"):
        raise CommandError(f"--factory {factory[:20]}: load takes captured tensors, draw draws them")
    if not failed and not ops and not ids and not factory:
        raise CommandError("say which calls: --failed, --ops GLOB or --ids IDS")
    most = limit or sys.maxsize
    out = out or Path("pytests" if factory else "accprobe-gentest")
    if factory and not ops and not ids and not failed:
        ops = ["*:*"]  # operators: their places have a colon
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise CommandError(f"--out: {out} exists and is not empty")
    output_paths.check_place(out, [dump])
    require_torch("gentest")
    from vllm_accprobe.opcheck.kit import collect
    from vllm_accprobe.opcheck.kit.bench import load_function
    from vllm_accprobe.opcheck.kit.testgen import write_folder
    from vllm_accprobe.opcheck.registry import default_references
    from vllm_accprobe.opcheck.run.check_calls import Options
    from vllm_accprobe.report.text import count

    try:
        function = load_function(kernel) if kernel else None
    except ValueError as why:
        raise CommandError(f"--kernel {why}") from None
    calls, references, choice = opened_calls(dump, weights), default_references(), Options(ids=ids_of(ids))
    drawing = collect.DrawnCalls(seed, factory == "draw", references if blacklist else None)
    if ops and not calls.taps(ops):
        raise NothingThere(f"{dump}: --ops matches no call{near_names(dump, ops)}")
    chosen = (collect.failed(calls, references, ops, choice) if failed else
              collect.matching(calls, ops, choice, most, drawing))  # fmt: skip
    try:
        found = collect.write_cases(chosen, references, out / "cases", most, function, failed, real_values, whole)
        left = [*found.left, *drawing.notes(), *_of_cuts(found.cuts), *found.notes]
        say_notes([*calls.dump.problems, *calls.problems, *references.problems, *left])
        if not found.written:
            raise NothingThere(f"{calls.dump.path}: {_why_none(calls, failed)}: nothing was written")
        write_folder(found.written, out, f"the dump {Path(calls.dump.path).resolve().name}")
    except (KeyboardInterrupt, OSError) as e:  # a folder that is not whole would stand in the way of the same command
        shutil.rmtree(out, ignore_errors=True)
        if (code := no_space(e)) is not None:
            raise NoSpace(code, out) from e
        raise
    operators = len({w.op for w in found.written})
    size = f"{count(len(found.written), 'call')} of {count(operators, 'operator')}"
    say_written(out, about=f"{size}; run `pytest {out}` with torch alone")
    answer(calls=found.written, operators=operators)


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
