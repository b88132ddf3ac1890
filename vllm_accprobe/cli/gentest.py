"""``accprobe gentest DUMP``: captured calls as a folder of tests that needs torch and pytest only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vllm_accprobe.cli.common.declared import DUMP, IDS, OPS, WEIGHTS
from vllm_accprobe.cli.common.options import CommandError, NothingThere, progress, say_notes, writable

if TYPE_CHECKING:
    from vllm_accprobe.opcheck.calls.records import Calls, Captured
    from vllm_accprobe.opcheck.kit.testgen import Written
    from vllm_accprobe.opcheck.reference_table import References


def gentest(
    dump: Path = DUMP,
    failed: bool = typer.Option(False, "--failed", help="Calls that opcheck finds wrong, the worst of each module."),
    ops: list[str] = OPS,
    ids: str = IDS,
    out: Path = typer.Option(
        Path("accprobe-gentest"), "--out", "-o", metavar="DIR", help="The folder to write; must not exist."
    ),
    most: int = typer.Option(50, "--most", "-n", min=1, help="At most so many calls."),
    model: Path = WEIGHTS,
    flashinfer: bool = typer.Option(
        False, "--flashinfer", help="Write FlashInfer's flight-recorder folders instead, for `flashinfer replay`."
    ),
) -> None:
    """Write captured calls as tests: tensors, float64 references and one parametrised test per operator.

    The folder runs with torch and pytest alone, on the machine whose kernel is in question: `pytest --device npu --load
    torch_npu --detail-csv npu.csv`. Exit code 0: written, 2: bad usage or unreadable input, 3: no such call.
    """
    from vllm_accprobe.cli.common import outputs
    from vllm_accprobe.cli.opcheck import ids_of, opened_calls, require_torch

    if not failed and not ops and not ids:
        raise CommandError("say which calls: --failed, --ops GLOB or --ids IDS")
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise CommandError(f"--out: {out} exists and is not empty")
    outputs.check_place(out, [dump])
    writable(out)
    require_torch("gentest")
    from vllm_accprobe.opcheck.calls import grid
    from vllm_accprobe.opcheck.kit.testgen import write_case, write_folder
    from vllm_accprobe.opcheck.registry import default_references
    from vllm_accprobe.opcheck.run.replay import Options

    calls, references, options = opened_calls(dump, model), default_references(), Options(ids=ids_of(ids))
    chosen = _failed(calls, references, ops, options) if failed else _matching(calls, ops, options, most)
    if flashinfer:
        _as_flashinfer(calls, chosen, out, most, failed)
        return
    written: list[Written] = []
    left: list[str] = []
    wider = 0
    for captured in chosen:
        if len(written) == most:
            left.append("more calls than --most")
            break
        try:
            if not written:
                (out / "cases").mkdir(parents=True, exist_ok=True)
            written.append(write_case(captured, references, out / "cases", len(written)))
            wider += any(
                r.dtype != grid.name_of(captured.what.outputs[role])
                for role, r in captured.records.items() if role in captured.what.outputs
            )  # fmt: skip
        except ValueError as why:
            left.append(f"{captured.tap}: {why}")
    if wider:
        left.append(f"{wider} calls hold numbers of a coarser dtype than their tensors': the tests have them in that")
    say_notes([*calls.dump.problems, *calls.problems, *references.problems, *left])
    if not written:
        raise NothingThere(f"{dump}: {_why_none(calls, failed)}: nothing was written")
    write_folder(written, out, f"the dump {dump.resolve().name}")
    operators = len({w.op for w in written})
    typer.echo(f"written: {out}, {len(written)} calls of {operators} operators; run `pytest {out}` with torch alone")


def _as_flashinfer(calls: Calls, chosen: Iterator[Captured], out: Path, most: int, failed: bool) -> None:
    from vllm_accprobe.opcheck.kit.flashinfer.recorder import FORMAT
    from vllm_accprobe.opcheck.kit.flashinfer.written import FlashFolders

    folders = FlashFolders(out)
    left: list[str] = []
    for captured in chosen:
        if folders.calls.total() == most:
            left.append("more calls than --most")
            break
        folders.add(captured)
    say_notes([*calls.dump.problems, *calls.problems, *folders.lines(), *left])
    if not folders.folders:
        why = "no call that was chosen is one of FlashInfer's" if folders.refused else _why_none(calls, failed)
        raise NothingThere(f"{calls.dump.path}: {why}: nothing was written")
    n, operators = folders.calls.total(), len(folders.calls)
    typer.echo(
        f"written: {out}, {folders.folders} folders of {n} calls of {operators} operators as FlashInfer {FORMAT} has "
        f"them; replay: `flashinfer replay --dir {out}`, judge: `accprobe opcheck {out}`"
    )


def _why_none(calls: Calls, failed: bool) -> str:
    if not any(r.payload is not None for r in calls.dump.records):
        return "it holds statistics, and a test needs the values (VLLM_ACCPROBE_TASK=tensor)"
    return "no call failed" if failed else "no call matches that has all its tensors"


def _matching(calls: Calls, ops: list[str], options: object, most: int) -> Iterator[Captured]:
    """Calls with all their tensors: as many of each tap as fit, the first ones."""
    from vllm_accprobe.opcheck.run.replay import Options

    assert isinstance(options, Options)
    taps = calls.taps(ops)
    share = max(most // max(len(taps), 1), 1) if not options.ids else most
    with progress("gentest", len(taps)) as done:
        for rank, tap, _ in taps:
            taken = 0
            for captured in calls.of(rank, tap):
                if taken < share and not captured.missing and options.wants(captured) and captured.what.outputs:
                    taken += 1
                    yield captured
            done()


def _failed(calls: Calls, references: References, ops: list[str], options: object) -> Iterator[Captured]:
    """The worst wrong call of each tap, the worst tap first."""
    from vllm_accprobe.opcheck.run.replay import Options, check_tap
    from vllm_accprobe.opcheck.run.result_row import FAIL, Checked

    assert isinstance(options, Options)
    worst: dict[tuple[int, str], Checked] = {}
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
