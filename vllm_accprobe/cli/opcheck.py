"""``accprobe opcheck DUMP``: every captured call run again against a reference, on the CPU in float64.

With --repeat and --rows this machine's own kernels are run instead, also of an operator that is named by hand.
msprobe's and ait's options are hidden fields of the groups; what they mean is in opcheck/compat. `conclude` prints and
writes what `online serve` needs, too. Not here: the check (opcheck/run), the lines (opcheck/run/table.py)."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vllm_accprobe.cli import options, output_paths
from vllm_accprobe.cli.endings import going_on
from vllm_accprobe.cli.options import argument, hidden, option
from vllm_accprobe.cli.output import answer, say_notes, say_written, show
from vllm_accprobe.progress import progress
from vllm_accprobe.refusals import CommandError, NothingThere
from vllm_accprobe.whole_file import write_text

if TYPE_CHECKING:
    from vllm_accprobe.opcheck.calls.records import Calls
    from vllm_accprobe.opcheck.run.job import Job
    from vllm_accprobe.opcheck.run.process_pool import CheckedRun

_EXACT, _DEVICE = "float64", "device"
_MOST_RUNS = 100_000
_WORST = ("tap", "cls", "role", "rank", "step", "call", "request", "position", "column", "measure", "measured",
          "allowed", "created", "severity", "tier", "chance", "message")  # fmt: skip


@dataclass(frozen=True)
class OpcheckOptions:
    """What is checked, by which limits, and where the results go."""

    dump: Path | None = argument("[DUMP]", "A dump, its directory or dump.json; none with --op.", None)
    ops: list[str] = options.ops()
    ids: str = options.ids()
    weights: Path | None = options.weights()
    standard: str | None = option("--standard", None, "The limits: {standards}; operator by default.", metavar="NAME")
    against: str = options.against()
    rerun: bool = option("--rerun", False, "Against vLLM's native code, or torch's, run here and now.")
    backward: bool = option("--backward", False, "Gradients of the operators, too, against autograd's.")
    attributes: list[str] = option("--attribute", [], "Of modules, if not recorded: eps=1e-6, '*Norm:eps=1e-6'. Can "
                                   "be repeated.", metavar="A=V")  # fmt: skip
    kl: bool = option("--kl", False, "Measure the KL divergence of each output, too.")
    seed: int = options.seed()
    jobs: int = options.jobs()
    resume: bool = option("--resume", False, "Continue the run that was interrupted in --out.")
    save: Path | None = option("--save-failed", None, "Failed calls go here, with tensors.", metavar="DIR")
    out: Path = options.out("opcheck.csv", Path("accprobe-opcheck"))
    verbose: bool = options.verbose()


@dataclass(frozen=True)
class KernelOptions:
    """This machine's own kernels, in place of a reference."""

    repeat: int = option("--repeat", 0, "Times that each is run: calls, here, for races and unwritten memory.", min=0,
                         metavar="N")  # fmt: skip
    rows: str = option("--rows", "", "Rows in batches of these sizes, e.g. 1,N or all, here.", metavar="SIZES")
    op: str = option("--op", "", "No dump: this operator, or FILE.py:FUNCTION, on drawn inputs.", metavar="NAME")
    shapes: list[str] = option("--shape", [], "Its tensors, e.g. 7x64,64x32. Can be repeated: further calls.",
                               metavar="SHAPES")  # fmt: skip
    dtype: str = option("--dtype", "float32", "Theirs: one, or one for each; int64:32 is below 32.", metavar="DTYPES")
    arguments: list[str] = option("--with", [], "An argument of it by name. Can be repeated.", metavar="NAME=JSON")
    load: list[str] = option("--load", [], "Import this first: it registers operators. Can be repeated.",
                             metavar="MODULE")  # fmt: skip


@dataclass(frozen=True)
class MsprobeOptions:
    """msprobe's acc_check, multi_acc_check and run_ut (opcheck/compat/msprobe.py)."""

    api_info: Path | None = hidden("-api_info", None, "DUMP as msprobe says it: its limits.", metavar="FILE")
    config: Path | None = hidden("--config", None, "msprobe's config.json or config.yaml.", metavar="FILE")
    once: bool = hidden("-f", False, "Calls that differ in values alone are checked once.")
    device: str = hidden("-d --device", "", "Run the calls here and judge that: cpu, cuda:1, 0,1.", metavar="DEVICES")
    csv_path: Path | None = hidden("-csv_path", None, "As --resume of msprobe's result csv.", metavar="FILE")
    save_error: bool = hidden("-save_error_data", False, "As --save-failed ut_error_data<time>.")
    jit: bool = hidden("--jit_compile", False, "An NPU compiles its operators (-j alone is the same).")


@dataclass(frozen=True)
class AitOptions:
    """ait llm opcheck (opcheck/compat/ait.py)."""

    same: Path | None = hidden("--input", None, "As DUMP: ATB's tensors of one execution.", metavar="DIR")
    table: Path | None = hidden("--csv-path", None, "ATB's operation_tensors_N.csv.", metavar="FILE")
    metric: list[str] = hidden("--metric", [], "More columns of opcheck_result.csv: abs cos_sim kl.", metavar="WORDS")
    card: int | None = hidden("--device-id", None, "As ait has it; no card is used.", metavar="N")


def opcheck(checking: OpcheckOptions, machine: KernelOptions, msprobe: MsprobeOptions, from_ait: AitOptions) -> None:
    """Run captured calls again against references: which operator is wrong for its own inputs?

    Prints the wrong modules first, in the order of execution, then every class and all that was not checked, and writes
    opcheck.csv (a row per output) and result.csv (a row per module or operator); of ATB, opcheck_result.csv. Needs
    torch. With --repeat and --rows this machine's own kernels are run instead: are they steady, and does a row's result
    depend on its batch? msprobe's and ait's own options are taken, too (docs/migration.md).
    Exit code 0: pass, 1: an operator is wrong, 2: unreadable input, 3: nothing could be checked.
    """
    from vllm_accprobe.opcheck.compat import ait as ait_words, msprobe as msprobe_words

    ait = ait_words.read(checking, from_ait)
    say_notes(ait.notes)
    check = msprobe_words.read_options(ait.dump, msprobe)
    out, standard, save = check.out or checking.out, checking.standard or "operator", checking.save or check.save
    if check.msprobe and not checking.standard:  # its own limits where its own words were used
        mindspore = msprobe_words.framework_of(check.dump) == "mindspore"
        standard = "mindspore" if mindspore else "msprobe"
    here = _here(machine)
    runs_here = bool(here["repeat"] or here["batch"] or here["named"])
    require_torch("opcheck", threads=runs_here)
    from vllm_accprobe.opcheck.run.process_pool import PART, run

    if check.devices and (checking.against != _EXACT or checking.rerun or runs_here):
        raise CommandError("--device runs the calls here: not with --against, --rerun, --repeat, --rows or --op")
    if check.once and here["named"]:
        raise CommandError("--filter_api leaves calls of a dump out; --op has none")
    check_standard(standard)
    if checking.rerun and checking.against != _EXACT:
        raise CommandError("--rerun and --against: choose one")
    if runs_here:
        _check_here(checking, machine, check.dump, standard, ait.kl, save)
    elif here["load"]:
        raise CommandError("--load goes with --repeat, --rows and --op")
    fields = here | ait.job() | {
        "devices": check.devices, "once": check.once, "white": check.config.white_list,
        "black": check.config.black_list, "jit": check.jit, "ops": ait.ops,
    }  # fmt: skip
    if msprobe.api_info is not None and not runs_here:  # acc_check runs every API forward and backward
        fields["backward"] = True
    job = _job(checking, check.dump, standard, save, fields, ait)
    check_out(out, save, [Path(d) for d in (job.dump, job.golden) if d])
    files = msprobe_words.of(check, standard, job.dump)
    going_on("the calls that were checked are", out / PART, ["--resume"])
    with ExitStack() as bars:
        tick = [lambda: None]

        def begin(taps: int) -> None:
            tick[0] = bars.enter_context(progress("opcheck", taps))

        with files.begun(out, out / PART):
            found = run(job, out, processes=checking.jobs, resume=checking.resume or check.resumed, plan=begin,
                        done=lambda: tick[0]())  # fmt: skip
    say_notes(check.notes)
    conclude(found, check.dump or Path(machine.op), job, out, standard, bool(checking.ops or checking.ids),
             checking.verbose, lambda out: [*ait_words.write_table(ait, out), *files.write(out)])  # fmt: skip


def _job(
    checking: OpcheckOptions, dump: Path | None, standard: str, save: Path | None, fields: dict[str, Any], ait: Any
) -> Job:
    """ait: its words (opcheck/compat/ait.py). Raises CommandError."""
    from vllm_accprobe.dump.reader import model_of, run_json
    from vllm_accprobe.opcheck.run.job import AGAIN, Job

    output_paths.require_directory(checking.weights, "--weights")
    if checking.attributes:  # else this process has no need of torch
        from vllm_accprobe.opcheck.calls.records import parsed_attributes

        try:
            parsed_attributes(checking.attributes)
        except ValueError as why:
            raise CommandError(f"--attribute: {why}") from None
    backward = fields.get("backward", checking.backward)
    fields |= {"backward": backward, "standard": standard, "seed": checking.seed,
               "attributes": tuple(checking.attributes)}  # fmt: skip
    if dump is None:
        if fields["named"] is None:
            raise CommandError("DUMP is missing: name a dump's directory, or an operator with --op")
        return Job("", **fields)
    if not dump.exists():
        raise CommandError(f"{dump} does not exist: name a dump's directory or file")
    way, golden = against(checking.against, dump)
    weights = checking.weights or model_of(run_json(dump))
    return Job(
        str(dump.resolve()), model=str(weights.resolve()) if weights else "", ids=tuple(sorted(ids_of(ait.calls))),
        against=AGAIN if checking.rerun else way, golden=golden, kl=ait.kl or checking.kl,
        save=str(save.resolve()) if save else "", **fields,
    )  # fmt: skip


def check_standard(name: str) -> None:
    """Raises CommandError for one that judges no output."""
    from vllm_accprobe.standards import OUTPUT, UnknownStandard, find

    try:
        find(name, OUTPUT)
    except UnknownStandard as why:
        raise CommandError(f"--standard: {why}") from None


def against(word: str, dump: Path | None) -> tuple[str, str]:
    """(Job.against, Job.golden) of the option ``--against``. Raises CommandError."""
    from vllm_accprobe.opcheck.run.job import DEVICE, EXACT, GOLDEN

    if word in (_EXACT, _DEVICE):
        return (DEVICE if word == _DEVICE else EXACT), ""
    if not Path(word).is_dir():
        raise CommandError(f"--against: {word!r} is neither float64 nor device nor a dump's directory")
    if dump is not None:
        output_paths.refuse_same(("DUMP", dump), ("--against", Path(word)))
    return GOLDEN, str(Path(word).resolve())


def check_out(out: Path, save: Path | None, dumps: list[Path]) -> None:
    from vllm_accprobe.judge import profile
    from vllm_accprobe.opcheck.compat import ait as op_csv
    from vllm_accprobe.opcheck.repeat import render
    from vllm_accprobe.opcheck.run import process_pool as run, table

    rows = output_paths.csv_with(*table.COLUMNS[:9])
    ours = {
        run.DONE: rows, run.PART: rows, "result.csv": output_paths.csv_with(*table.RESULT),
        op_csv.FILE: output_paths.csv_with(*op_csv.FIRST),
        **dict.fromkeys((render.REPEAT_FILES[0], render.ROWS_FILES[0]), output_paths.SCHEMA_AND_VERDICT),
        **dict.fromkeys((render.REPEAT_FILES[1], render.ROWS_FILES[1]), output_paths.matching("<title>opcheck: ")),
        run.SETTINGS: output_paths.matching(r"\A\{\"job\":"), profile.NAME: output_paths.matching(profile.OURS),
    }  # fmt: skip
    output_paths.check(out, ours, dumps=dumps)
    if save is not None:
        output_paths.check_place(save, dumps, "--save-failed")


def ids_of(text: str) -> frozenset[str]:
    """``0.0.57,0.1.3`` as a set. Raises CommandError."""
    found = frozenset(filter(None, (part.strip() for part in text.split(","))))
    for item in found:
        if not re.fullmatch(r"\d+\.\d+\.\d+", item):
            raise CommandError(f"--ids: {item!r} is no id; opcheck.csv's column id has them, for example 0.0.57")
    return found


def require_torch(command: str, threads: bool = False) -> None:
    """Raises CommandError where torch is missing. Unless the environment says otherwise, or with ``threads``, it will
    use one thread: small products are no slower for it, and threads that wait for one another in a loop take the other
    cores."""
    from vllm_accprobe.children import ONE_THREAD

    if importlib.util.find_spec("torch") is None:
        raise CommandError(f"{command} needs torch: install it beside accprobe (the CPU build will do)")
    for name, value in () if threads else ONE_THREAD.items():
        os.environ.setdefault(name, value)


def opened_calls(dump: Path, model: Path | None) -> Calls:
    """The calls of a dump. Raises CommandError and DumpError."""
    from vllm_accprobe.dump.reader import model_of
    from vllm_accprobe.formats import open_dump
    from vllm_accprobe.opcheck.calls.records import Calls

    output_paths.require_directory(model, "--weights")
    opened = open_dump(dump)
    return Calls(opened, model or model_of(opened.run))


def conclude(
    found: CheckedRun, dump: Path, job: Job, out: Path, standard: str, chosen: bool, verbose: bool,
    more: Callable[[Path], list[Path]] = lambda out: [],
) -> None:  # fmt: skip
    """The report of a check whose opcheck.csv is written, with its files. chosen: not all calls were chosen; more:
    writes further files. Raises typer.Exit with the exit code."""
    from vllm_accprobe.dump.reader import run_json
    from vllm_accprobe.judge import profile
    from vllm_accprobe.opcheck.machine_precision import of_machine
    from vllm_accprobe.opcheck.run import result_row, table
    from vllm_accprobe.opcheck.run.table import totals as count

    say_notes(found.problems)
    if job.repeat or job.batch:
        _say_here(job, found, out, None if verbose else 10)
    known = found.rows
    if job.against == _EXACT and not (job.runs_here or job.devices):
        known = result_row.without_unknown_blocks(known)
        own = {r.cls for r in known if r.message == result_row.OWN_CODE}
        say_notes(f"{cls}: unchecked: {result_row.OWN_CODE}" for cls in sorted(own))
    checked, machine = of_machine.settle(known, strict=standard == result_row.STRICT)
    totals = count(checked)
    if not totals.checked and not totals.statuses.get(result_row.FAIL):
        reason = next(iter(totals.skipped), "no call matches" if chosen else "the dump holds no call")
        near = "" if found.rows or not chosen else near_names(dump, job.ops)
        raise NothingThere(f"{dump}: nothing could be checked: {reason}{near}")
    show(table.lines(checked, totals, most=None if verbose else 10, machine=machine))
    failed = [(max(group, key=lambda r: r.severity), len(group)) for group in table.failures(checked)]
    wrong = bool(totals.statuses.get(result_row.FAIL) or totals.statuses.get(result_row.ERROR))
    answer(
        verdict="fail" if wrong else "pass", calls=totals.calls, checked=totals.checked, statuses=totals.statuses,
        skipped=totals.skipped, machine=machine.habits,
        wrong=[{name: getattr(worst, name) for name in _WORST} | {"outputs": n} for worst, n in failed],
    )  # fmt: skip
    if found.lost is not None:
        raise found.lost
    if checked != found.rows:
        table.resettle(out / "opcheck.csv", checked)
    table.write_result(checked, out / "result.csv")
    written = [out / "opcheck.csv", out / "result.csv"]
    if machine.habits:
        written.append(out / profile.NAME)
        computes = profile.Profile(machine.habits, profile.host_of(run_json(dump)), machine.units)
        write_text(written[-1], computes.to_json())
    written += more(out)
    say_written(*written)
    raise typer.Exit(int(wrong))


def near_names(dump: Path, globs: Sequence[str]) -> str:
    """What follows globs over operators, classes and paths that match none: the nearest names; "" without."""
    from vllm_accprobe.dump.files import DumpError
    from vllm_accprobe.dump.reader import nearest
    from vllm_accprobe.formats import open_dump

    try:
        opened = open_dump(dump)
    except DumpError:
        return ""
    names = {name for r in opened.records if r.step is not None for name in (r.tap, r.cls) if name}
    found = nearest(globs, names | {op.op for op in opened.ops})
    return f"; the nearest names: {', '.join(found)}" if found else ""


def _here(machine: KernelOptions) -> dict[str, Any]:
    """The fields of Job that these options fill. Raises CommandError."""
    repeat, rows = machine.repeat, machine.rows
    sizes = tuple(s.strip() for s in rows.split(",") if s.strip())
    if rows and not sizes:
        raise CommandError("--rows: name batch sizes, e.g. 1,N, or all")
    for size in sizes:
        if size not in ("N", "all") and not re.fullmatch(r"[1-9]\d{0,8}", size):
            raise CommandError(f"--rows: {size!r} is no batch size; 1,8,N or all, N being the whole batch")
    if sizes and set(sizes) == {"N"}:
        raise CommandError("--rows: N is the whole batch; name a smaller size beside it, e.g. 1,N")
    if repeat and sizes:
        raise CommandError("--repeat and --rows: choose one")
    if repeat == 1 or repeat > _MOST_RUNS:
        raise CommandError(f"--repeat {repeat}: from 2 to {_MOST_RUNS:,} runs")
    return {"repeat": repeat, "batch": sizes, "named": _named_operator(machine), "load": tuple(machine.load)}


def _named_operator(machine: KernelOptions) -> dict[str, Any] | None:
    """The operator named by hand as a job has it; None where there is none. Raises CommandError."""
    if not machine.op:
        if machine.shapes or machine.arguments:
            raise CommandError("--shape and --with go with --op")
        return None
    if not machine.shapes:
        raise CommandError("--op needs --shape: its tensors, e.g. 7x64,64x32")
    dtypes = [d.strip() for d in machine.dtype.split(",")]
    return {"op": machine.op, "shapes": list(machine.shapes), "dtypes": dtypes, "more": _values(machine.arguments)}


def _values(more: Sequence[str]) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for name, value in options.pairs(more, "--with {!r}: NAME=VALUE, e.g. eps=1e-6"):
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _say_here(job: Job, found: CheckedRun, out: Path, most: int | None) -> None:
    """The report of `--repeat` and `--rows`. Raises typer.Exit."""
    from vllm_accprobe.opcheck.repeat import render
    from vllm_accprobe.opcheck.run import table
    from vllm_accprobe.opcheck.run.result_row import ERROR, FAIL
    from vllm_accprobe.opcheck.run.table import totals

    rows = found.rows
    counted = totals(rows)
    if not counted.checked and not counted.statuses.get(ERROR):
        reason = next(iter(counted.skipped), "no call matches" if job.ops or job.ids else "the dump holds no call")
        raise NothingThere(f"{job.dump or 'opcheck'}: nothing could be run: {reason}")
    mode = render.mode_of(job.repeat, job.batch)
    lines = render.lines(rows, counted, mode, most)
    show(lines)
    answer(**render.to_json(rows, counted, mode))
    if found.lost is not None:
        raise found.lost
    files = [out / name for name in (render.REPEAT_FILES if job.repeat else render.ROWS_FILES)]
    table.write_result(rows, out / "result.csv")
    write_text(files[0], json.dumps(render.to_json(rows, counted, mode), indent=1) + "\n")
    write_text(files[1], render.page(rows, lines, f"opcheck: {mode}"))
    say_written(out / "opcheck.csv", out / "result.csv", *files)
    raise typer.Exit(1 if counted.statuses.get(FAIL) or counted.statuses.get(ERROR) else 0)


def _check_here(
    checking: OpcheckOptions, machine: KernelOptions, dump: Path | None, standard: str, kl: bool, save: Path | None
) -> None:
    """Raises CommandError for options that mean nothing for this machine's kernels alone."""
    chosen = {"--against": checking.against != _EXACT, "--rerun": checking.rerun, "--backward": checking.backward,
              "--kl": kl or checking.kl, "--save-failed": save is not None}  # fmt: skip
    if used := [name for name, is_chosen in chosen.items() if is_chosen]:
        raise CommandError(f"{used[0]} does not go with --repeat, --rows or --op: those run this machine's kernels")
    if standard not in ("operator", "strict"):
        raise CommandError("--repeat, --rows and --op know --standard operator and strict, where any difference fails")
    if machine.op and dump is not None:
        raise CommandError("--op takes no DUMP: its inputs are drawn")
