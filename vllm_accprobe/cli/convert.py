"""``accprobe convert DUMP OUT --to h5|npz|safetensors|onnx``.

Not here: the containers (formats/write/), the model as a graph (topology/)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vllm_accprobe.cli.common.declared import LEVEL, NAMES, RANK, REQUEST, ROLE, STEP
from vllm_accprobe.cli.common.json_answer import answer, say_written
from vllm_accprobe.cli.common.options import CommandError, NothingThere, progress, say_notes, selection, size, writable
from vllm_accprobe.cli.interrupts import kept

if TYPE_CHECKING:
    from vllm_accprobe.dump.reader import Dump
    from vllm_accprobe.dump.schema import Record

KINDS = ("h5", "npz", "safetensors", "onnx")
SUMMARY = ("Index", "Step", "Rank", "Module", "Min", "Max", "Mean", "Std")


def convert(
    dump: Path = typer.Argument(..., metavar="DUMP", help="A dump of any format (accprobe formats)."),
    out: Path = typer.Argument(
        None, metavar="[OUT]", help="File for one rank, directory for several; none: h5, beside the dump."
    ),
    names: list[str] = NAMES,
    to: str = typer.Option(None, "--to", metavar="|".join(KINDS), help="Container; else by OUT's ending."),
    step: str = STEP,
    rank: str = RANK,
    role: list[str] = ROLE,
    request: list[str] = REQUEST,
    level: int = LEVEL,
) -> None:
    """Export a dump to HDF5 (torch_xray's layout), npz or safetensors; or the model as ONNX.

    HDF5 and npz have no bfloat16 or 8-bit floats: those tensors become float32, which is exact.
    onnx: modules and operators of one step and which tensor feeds which, for Netron; of ATB's topology (json), too."""
    from vllm_accprobe.cli.common import outputs
    from vllm_accprobe.formats import open_dump
    from vllm_accprobe.formats.write import containers

    kind = to or (out.suffix.lstrip(".") if out is not None else "h5")
    if kind not in KINDS:
        raise CommandError(f"--to: {kind or 'nothing'} is not one of {', '.join(KINDS)}")
    if level is not None and kind != "onnx":
        raise CommandError(f"--level: {kind} holds tensors, which have no levels; it is for --to onnx")
    beside = out is None
    if beside:
        if kind != "h5" or not dump.is_dir():
            raise CommandError("OUT is missing: name a file or a directory")
        out = dump  # where torch_xray has them: beside, and never over, what the dump consists of
        os.umask(0o077)  # a dump holds users' prompts, and so do they
    else:
        outputs.check_place(out, [dump], "OUT")
    writable(out.parent if out.suffix == f".{kind}" else out, "OUT")
    if kind == "onnx":
        from vllm_accprobe.cli.common import drawing

        if names or role or request:
            raise CommandError("--to onnx draws a whole step: it takes --steps, --ranks and --level")
        with _new(out) as path:
            lines = drawing.onnx(dump, path, level, step, rank)
        for line in lines:
            typer.echo(line)
        say_written(out, about=size(out.stat().st_size))
        answer(dump=dump, to=kind, about=lines)
        return
    opened = open_dump(dump)
    if beside and hasattr(opened, "kind"):
        raise CommandError(f"{dump} is no dump of accprobe's, and nothing is written into another's: name OUT")
    chosen = [r for _, r in selection(names or (), step, rank, request, role, parameters=True).apply(opened)]
    stored = [r for r in chosen if r.payload is not None]
    if not stored:
        what = "only statistics, no values" if chosen else "no tensor that matches"
        raise NothingThere(f"{dump} holds {what}: nothing to convert")
    targets = _targets(opened, sorted({r.rank for r in stored}), out, kind)
    write = {"h5": containers.write_h5, "npz": containers.write_npz, "safetensors": containers.write_safetensors}[kind]
    left = 0
    answer(dump=dump, to=kind, tensors=len(stored), skipped={"only statistics": len(chosen) - len(stored)})
    with progress("converting", len(stored)) as tick:
        for number, target in targets.items():
            with _whole(target) as path:
                left += write(opened, [r for r in stored if r.rank == number], path, tick)
            rest = ",".join(str(n) for n in targets if n > number)
            kept.going_on(f"the ranks up to {number} are", target, ["--ranks", rest], ["--ranks", "--rank"])
    if beside:
        for number, target in targets.items():
            path = target.with_name(f"{target.stem}_summary.csv")
            _summary(opened, [r for r in stored if r.rank == number], path)
            say_written(path, about=f"rank {number}")
    for number, target in targets.items():
        n = sum(r.rank == number for r in stored)
        say_written(target, about=f"rank {number}, {n:,} tensors, {size(target.stat().st_size)}")
    if kind != "safetensors" and (wide := containers.widened(stored)):
        typer.echo(f"note: {wide:,} tensors of bfloat16 or 8-bit floats are float32 there (exact)")
    if len(chosen) > len(stored):
        typer.echo(f"skipped: {len(chosen) - len(stored):,} tensors of which only statistics were stored")
    if left:
        typer.echo(f"skipped: {left:,} operator calls or modules with more to say than an HDF5 attribute takes")
    say_notes(opened.problems, err=False)


def _summary(dump: Dump, records: list[Record], path: Path) -> None:
    """torch_xray's summary.csv: the columns and names of its table. Raises OSError."""
    from vllm_accprobe.formats.write.containers import h5_names
    from vllm_accprobe.report.table import write_csv_lines

    def lines() -> Iterator[tuple[object, ...]]:
        for index, (r, group, name) in enumerate(h5_names(dump, records)):
            s = r.stats
            yield (index, group, r.rank, name, *((s.min, s.max, s.mean, s.std) if s else (None,) * 4))

    write_csv_lines(path, SUMMARY, lines())


def _targets(dump: Dump, ranks: list[int], out: Path, kind: str) -> dict[int, Path]:
    """Where each rank goes. A name that ends like the container is a file, anything else a directory."""
    from vllm_accprobe.formats.write import names

    if out.suffix == f".{kind}" and not out.is_dir():
        if len(ranks) > 1:
            raise CommandError(f"the dump has {len(ranks)} ranks: name a directory, not {out}, or choose with --ranks")
        found = {ranks[0]: out}
    else:
        found = {}
        for rank in ranks:
            local = dump.starts.get(rank, {}).get("local_rank")
            local = local if type(local) is int and local >= 0 else rank
            found[rank] = out / names.rank_file(rank, local, kind)
    for path in found.values():
        if path.exists():
            raise CommandError(f"{path} exists: nothing is overwritten; remove it or choose another name")
        path.parent.mkdir(parents=True, exist_ok=True)
    return found


@contextmanager
def _new(out: Path) -> Iterator[Path]:
    """As `_whole`; raises CommandError where there is something already."""
    if out.exists():
        raise CommandError(f"{out} exists: nothing is overwritten; remove it or choose another name")
    with _whole(out) as path:
        yield path


@contextmanager
def _whole(target: Path) -> Iterator[Path]:
    """Another name until the file is complete: an interrupted conversion leaves nothing that looks whole."""
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        yield part
        os.rename(part, target)
    finally:
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        part.unlink(missing_ok=True)
