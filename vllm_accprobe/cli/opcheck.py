"""``accprobe opcheck DUMP``: every captured call run again against a reference, on the CPU in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from vllm_accprobe.cli.common import here
from vllm_accprobe.cli.common.checked_report import conclude, run_json
from vllm_accprobe.cli.common.declared import ATTRIBUTES, WEIGHTS
from vllm_accprobe.cli.common.options import CommandError, require_directory, say_notes
from vllm_accprobe.cli.interrupts import kept
from vllm_accprobe.cli.replay import ait_words
from vllm_accprobe.cli.spelling import precheck_options as msprobe

if TYPE_CHECKING:
    from vllm_accprobe.opcheck.calls.records import Calls
    from vllm_accprobe.opcheck.run.worker import Job

_EXACT, _DEVICE = "float64", "device"


def opcheck(
    dump: Path = typer.Argument(None, metavar="[DUMP]", help="A dump, its directory or dump.json; none with --op."),
    same: Path = ait_words.INPUT,
    table_of: Path = ait_words.TABLE,
    ops: list[str] = ait_words.OPS,
    ids: str = ait_words.IDS,
    metric: list[str] = ait_words.METRIC,
    card: int = ait_words.DEVICE,
    model: Path = WEIGHTS,
    standard: str = typer.Option(
        None, "--standard", metavar="NAME", help="The limits: {standards}; operator where msprobe's are not asked for."
    ),
    against: str = typer.Option(
        _EXACT, "--against", metavar="WHAT", help="float64, device (this machine's accelerator), or a golden dump."
    ),
    rerun: bool = typer.Option(
        False, "--rerun", "--atb-rerun", "-rerun", help="Against vLLM's native code, or torch's, run here and now."
    ),
    backward: bool = typer.Option(False, "--backward", help="Gradients of the operators, too, against autograd's."),
    attributes: list[str] = ATTRIBUTES,
    kl: bool = typer.Option(False, "--kl", help="Measure the KL divergence of each output, too."),
    seed: int = typer.Option(0, "--seed", help="Of inputs that are drawn; and of gradients."),
    processes: int = typer.Option(
        1, "-j", "--jobs", min=0, metavar="N", help="Processes that work; 0: none besides this one."
    ),
    resume: bool = typer.Option(False, "--resume", help="Go on with the run that was interrupted in --out."),
    save: Path = typer.Option(None, "--save-failed", metavar="DIR", help="Failed calls go here, with tensors."),
    repeat: int = here.REPEAT,
    rows: str = here.ROWS,
    op: str = here.OP,
    shapes: list[str] = here.SHAPE,
    dtype: str = here.DTYPE,
    more: list[str] = here.WITH,
    load: list[str] = here.LOAD,
    api_info: Path = msprobe.API_INFO,
    config: Path = msprobe.CONFIG,
    once: bool = msprobe.FILTER,
    device: str = msprobe.DEVICE,
    splits: int = msprobe.SPLITS,
    csv_path: Path = msprobe.CSV_PATH,
    save_error: bool = msprobe.SAVE,
    jit: bool = msprobe.JIT,
    out: Path = typer.Option(
        Path("accprobe-opcheck"),
        "--out",
        "--output",
        "-o",
        "--out_path",
        metavar="DIR",
        help="Where the results go: opcheck.csv.",
    ),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="Say more: all modules that fail."),
) -> None:
    """Run captured calls again against references: which operator is wrong for its own inputs?

    Prints the wrong modules first, in the order of execution, then every class and all that was not checked, and writes
    opcheck.csv (a row per output) and result.csv (a row per module or operator); of ATB, whose tools' options are taken
    too, opcheck_result.csv. Needs torch. With --repeat and --rows this machine's own kernels are run instead: are they
    steady, and does a row's result depend on its batch?
    Exit code 0: pass, 1: an operator is wrong, 2: unreadable input, 3: nothing could be checked.
    """
    ait = ait_words.read(dump, same, table_of, ops, ids, metric, card, rerun)
    check = msprobe.asked(ait.dump, api_info, config, once, device, csv_path, save_error, jit)
    dump, out, save = cast(Path, check.dump), check.out or out, cast(Path, save or check.save)
    standard = standard or _default_standard(check)
    asked = here.runs_of(repeat, rows, op), here.named_of(op, shapes, dtype, more)
    require_torch("opcheck", threads=bool(asked[0][0] or asked[0][1] or asked[1]))
    from vllm_accprobe.opcheck.precheck import precheck_files
    from vllm_accprobe.opcheck.run.unavailable import Unavailable
    from vllm_accprobe.opcheck.run.whole import PART, RunError, run

    kl = kl or ait.kl
    job = _job(dump, model, list(ait.ops), ait.calls, standard, against, rerun, backward, kl, seed, save, asked, load)
    job = replace(job, attributes=_attributes(attributes), **ait.job())
    job = _as_msprobe_asks(job, check)
    check_out(out, save, [Path(d) for d in (job.dump, job.golden) if d])
    files = precheck_files.of(check, standard, job.dump)
    dump = dump or Path(op)
    kept.going_on("the calls that were checked are", out / PART, ["--resume"])
    bar = here.LaterBar()
    try:
        resume, processes = resume or check.resumed, splits or processes
        with files.begun(out, out / PART):
            found = run(job, out, processes=processes, resume=resume, plan=bar.start, done=bar.one)
    except (RunError, Unavailable) as why:
        raise CommandError(str(why)) from None
    finally:
        bar.end()
    say_notes(check.notes)
    conclude(found, dump, job, out, standard, bool(ops or ids), verbose,
             lambda out: [*ait_words.write_table(ait, out), *files.write(out)])  # fmt: skip


def _default_standard(check: msprobe.Precheck) -> str:
    """msprobe's limits where its own words were used; MindSpore's for a dump of MindSpore."""
    if not check.msprobe:
        return "operator"
    from vllm_accprobe.opcheck.precheck.precheck_files import framework_of

    return "mindspore" if framework_of(check.dump) == "mindspore" else "msprobe"


def _as_msprobe_asks(job: Job, check: msprobe.Precheck) -> Job:
    """Raises CommandError."""
    from vllm_accprobe.opcheck.run.worker import EXACT

    lists = check.config
    if check.devices and (job.against != EXACT or job.runs_here):
        raise CommandError("--device runs the calls here: not with --against, --rerun, --repeat, --rows or --op")
    if check.once and job.named is not None:
        raise CommandError("--filter_api leaves calls of a dump out; --op has none")
    return replace(
        job, devices=check.devices, once=check.once, white=lists.white_list if lists else (),
        black=lists.black_list if lists else (), jit=check.jit,
    )  # fmt: skip


def check_out(out: Path, save: Path | None, dumps: list[Path]) -> None:
    from vllm_accprobe.cli.common import outputs
    from vllm_accprobe.judge import profile
    from vllm_accprobe.opcheck.atb import op_csv
    from vllm_accprobe.opcheck.repeat import told
    from vllm_accprobe.opcheck.run import table
    from vllm_accprobe.opcheck.run import whole as run

    rows = outputs.csv_with(*table.COLUMNS[:9])
    ours = {
        run.DONE: rows, run.PART: rows, "result.csv": outputs.csv_with(*table.RESULT),
        op_csv.FILE: outputs.csv_with(*op_csv.FIRST),
        **dict.fromkeys((told.REPEAT_FILES[0], told.ROWS_FILES[0]), outputs.SCHEMA_AND_VERDICT),
        **dict.fromkeys((told.REPEAT_FILES[1], told.ROWS_FILES[1]), outputs.matching("<title>opcheck: ")),
        run.SETTINGS: outputs.matching(r"\A\{\"job\":"), profile.NAME: outputs.matching(profile.OURS),
    }  # fmt: skip
    outputs.check(out, ours, dumps=dumps)
    if save is not None:
        outputs.check_place(save, dumps, "--save-failed")


def _job(
    dump: Path | None, model: Path | None, ops: list[str], ids: str, standard: str, against: str, rerun: bool,
    backward: bool, kl: bool, seed: int, save: Path | None,
    asked: tuple[tuple[int, tuple[str, ...]], dict[str, Any] | None], load: list[str],
) -> Job:  # fmt: skip
    from vllm_accprobe.cli.common.same import refuse_same
    from vllm_accprobe.opcheck.run.worker import AGAIN, DEVICE, EXACT, GOLDEN, Job
    from vllm_accprobe.standards import OUTPUT, UnknownStandard, find

    try:
        find(standard, OUTPUT)
    except UnknownStandard as why:
        raise CommandError(f"--standard: {why}") from None
    if rerun and against != _EXACT:
        raise CommandError("--rerun and --against: choose one")
    (repeat, sizes), named = asked
    if repeat or sizes or named is not None:
        here.check_here(dump, named is not None, standard, against, rerun, backward, kl, save)
    elif load:
        raise CommandError("--load belongs to --repeat, --rows and --op")
    require_directory(model, "--weights")
    if dump is None:
        if named is None:
            raise CommandError("DUMP is missing: name a dump's directory, or an operator with --op")
        return Job("", ops=tuple(ops), standard=standard, seed=seed, repeat=repeat, batch=sizes, named=named,
                   load=tuple(load))  # fmt: skip
    if not dump.exists():
        raise CommandError(f"{dump} does not exist: name a dump's directory or file")
    golden = ""
    if against not in (_EXACT, _DEVICE):
        if not Path(against).is_dir():
            raise CommandError(f"--against: {against!r} is neither float64 nor device nor a dump's directory")
        refuse_same(("DUMP", dump), ("--against", Path(against)))
        golden = str(Path(against).resolve())
    way = AGAIN if rerun else GOLDEN if golden else DEVICE if against == _DEVICE else EXACT
    weights = model if model is not None else _model_of(run_json(dump))
    return Job(
        str(dump.resolve()), str(weights.resolve()) if weights else "", tuple(ops), tuple(sorted(ids_of(ids))), way,
        golden, standard, kl, backward, seed, str(save.resolve()) if save else "",
        repeat, sizes, None, tuple(load),
    )  # fmt: skip


def _attributes(texts: list[str]) -> tuple[str, ...]:
    """Raises CommandError for what is no attribute."""
    if not texts:
        return ()  # this process has no need of torch
    from vllm_accprobe.opcheck.calls.attributes.untold import parsed

    try:
        parsed(texts)
    except ValueError as why:
        raise CommandError(f"--attribute: {why}") from None
    return tuple(texts)


def ids_of(text: str) -> frozenset[str]:
    """``0.0.57,0.1.3`` as a set. Raises CommandError."""
    import re

    found = frozenset(filter(None, (part.strip() for part in text.split(","))))
    for item in found:
        if not re.fullmatch(r"\d+\.\d+\.\d+", item):
            raise CommandError(f"--ids: {item!r} is no id; opcheck.csv's column id has them, for example 0.0.57")
    return found


def require_torch(command: str, threads: bool = False) -> None:
    """Raises CommandError where torch is missing. Unless told otherwise, or with ``threads``, it will use one thread:
    small products are no slower for it, and threads that wait for one another in a loop take the other cores."""
    import importlib.util
    import os

    from vllm_accprobe.children import ONE_THREAD

    if importlib.util.find_spec("torch") is None:
        raise CommandError(f"{command} needs torch: install it beside accprobe (the CPU build will do)")
    for name, value in () if threads else ONE_THREAD.items():
        os.environ.setdefault(name, value)


def opened_calls(dump: Path, model: Path | None) -> Calls:
    """The calls of a dump. Raises CommandError and DumpError."""
    from vllm_accprobe.formats import open_dump
    from vllm_accprobe.opcheck.calls.records import Calls

    require_directory(model, "--weights")
    opened = open_dump(dump)
    return Calls(opened, model or _model_of(opened.run))


def _model_of(run: object) -> Path | None:
    """The model's directory by run.json, where it is on this machine."""
    described = run.get("model") if isinstance(run, dict) else None
    path = described.get("path") if isinstance(described, dict) else None
    if not isinstance(path, str) or not path or "\0" in path:
        return None
    return Path(path) if Path(path).is_dir() else None
