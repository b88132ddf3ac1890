"""``accprobe convert DUMP OUT --to h5|npz|safetensors|onnx``.

Not here: the containers (formats/io/containers.py), the model as a graph (topology/)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vllm_accprobe.cli import options, output_paths
from vllm_accprobe.cli.endings import going_on
from vllm_accprobe.cli.options import argument, hidden, option
from vllm_accprobe.cli.output import answer, say_notes, say_written, show
from vllm_accprobe.progress import progress
from vllm_accprobe.refusals import CommandError, NothingThere
from vllm_accprobe.whole_file import whole

if TYPE_CHECKING:
    from vllm_accprobe.dump.reader import Dump
    from vllm_accprobe.dump.schema import Record
    from vllm_accprobe.topology.model_graph import ModelGraph

KINDS = ("h5", "npz", "safetensors", "onnx")
SUMMARY = ("Index", "Step", "Rank", "Module", "Min", "Max", "Mean", "Std")


def convert(
    *,
    dump: Path = argument("DUMP", "A dump of any format (accprobe inspect --formats)."),
    place: Path | None = argument("[OUT]", "As --out; behind --out a GLOB.", None),
    names: list[str] = options.globs(),
    out: Path | None = options.out("a file for one rank, a directory for several; DUMP-h5", None),
    at_end: bool = hidden("--at-end", False, "Of VLLM_ACCPROBE_EXPORT: into the dump, where torch_xray has it."),
    to: str | None = option("--to", None, "Container; else by OUT's ending.", metavar="|".join(KINDS)),
    level: int | None = options.level(),
    tensors: options.SelectionOptions,
) -> None:
    """Export a dump to HDF5 (torch_xray's layout), npz or safetensors; or the model as ONNX.

    HDF5 and npz have no bfloat16 or 8-bit floats: those tensors become float32, which is exact.
    onnx: modules and operators of one step and which tensor feeds which, for Netron; of ATB's topology (json), too."""
    from vllm_accprobe.formats import open_dump
    from vllm_accprobe.formats.io import containers
    from vllm_accprobe.report.text import size

    named = out or place
    if out is not None and place is not None:  # then what follows DUMP are globs
        names = [str(place), *names]
    kind = to or (named.suffix.lstrip(".") if named is not None else "h5")
    if kind not in KINDS:
        subject = f"{kind} is" if kind else f"{named} has no ending, and names"
        raise CommandError(f"--to: {subject} none of {', '.join(KINDS)}")
    if level is not None and kind != "onnx":
        raise CommandError(f"--level: {kind} holds tensors, which have no levels; it is for --to onnx")
    if named is None and (kind != "h5" or not dump.is_dir()):
        raise CommandError("OUT is missing: name a file or a directory")
    out = named or (dump if at_end else dump.absolute().with_name(f"{dump.absolute().name}-h5"))
    if named is None:
        os.umask(0o077)  # a dump holds users' prompts, and so do they
    if not at_end:
        output_paths.check_place(out, [dump], "OUT")
    output_paths.writable(out.parent if out.suffix == f".{kind}" else out, "OUT")
    if kind == "onnx":
        if names or tensors.roles or tensors.requests:
            raise CommandError("--to onnx draws a whole step: it takes --steps, --ranks and --level")
        with _new(out) as path:
            lines = onnx(dump, path, level, tensors.steps, tensors.ranks or "")
        show(lines)
        say_written(out, about=size(out.stat().st_size))
        answer(dump=dump, to=kind, about=lines)
        return
    opened = open_dump(dump)
    if named is None and hasattr(opened, "kind"):
        raise CommandError(f"{dump} is no dump of accprobe's: name OUT")
    chosen = [r for _, r in tensors.selection(names, parameters=True).apply(opened)]
    stored = [r for r in chosen if r.payload is not None]
    if not stored:
        found = "only statistics, no values" if chosen else "no tensor that matches"
        raise NothingThere(f"{dump} holds {found}: nothing to convert")
    targets = _targets(opened, sorted({r.rank for r in stored}), out, kind)
    write = {"h5": containers.write_h5, "npz": containers.write_npz, "safetensors": containers.write_safetensors}[kind]
    left = 0
    answer(dump=dump, to=kind, tensors=len(stored), skipped={"only statistics": len(chosen) - len(stored)})
    with progress("converting", len(stored)) as tick:
        for number, target in targets.items():
            with whole(target, f".{os.getpid()}.part") as path:
                left += write(opened, [r for r in stored if r.rank == number], path, tick)
            rest = ",".join(str(n) for n in targets if n > number)
            going_on(f"the ranks up to {number} are", target, ["--ranks", rest], ["--ranks", "--rank"])
    if named is None:
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
    from vllm_accprobe.formats.io.containers import h5_names
    from vllm_accprobe.report.table import write_csv_lines

    def lines() -> Iterator[tuple[object, ...]]:
        for index, (r, group, name) in enumerate(h5_names(dump, records)):
            s = r.stats
            yield (index, group, r.rank, name, *((s.min, s.max, s.mean, s.std) if s else (None,) * 4))

    write_csv_lines(path, SUMMARY, lines())


def _targets(dump: Dump, ranks: list[int], out: Path, kind: str) -> dict[int, Path]:
    """Where each rank goes. A name that ends like the container is a file, anything else a directory."""
    from vllm_accprobe.formats.io import containers

    if out.suffix == f".{kind}" and not out.is_dir():
        if len(ranks) > 1:
            raise CommandError(f"the dump has {len(ranks)} ranks: name a directory, not {out}, or choose with --ranks")
        found = {ranks[0]: out}
    else:
        found = {}
        for rank in ranks:
            local = dump.starts.get(rank, {}).get("local_rank")
            local = local if type(local) is int and local >= 0 else rank
            found[rank] = out / containers.rank_file(rank, local, kind)
    for path in found.values():
        if path.exists():
            raise CommandError(f"{path} exists: nothing is overwritten; remove it or choose another name")
        path.parent.mkdir(parents=True, exist_ok=True)
    return found


@contextmanager
def _new(out: Path) -> Iterator[Path]:
    """As `whole`; raises CommandError where there is something already."""
    if out.exists():
        raise CommandError(f"{out} exists: nothing is overwritten; remove it or choose another name")
    with whole(out, f".{os.getpid()}.part") as path:
        yield path


def onnx(path: Path, out: Path, level: int | None, step: str, rank: str) -> list[str]:
    """Writes the file and returns lines for people. Raises CommandError, DumpError."""
    from vllm_accprobe.report.text import count, safe
    from vllm_accprobe.topology.data_flow import graph_of
    from vllm_accprobe.topology.model_graph import write_onnx

    if _topology(path, step, rank):
        from vllm_accprobe.topology.model_graph import atb_graph

        graph = atb_graph(path, level)
    else:
        from vllm_accprobe.formats import open_dump

        dump = open_dump(path)
        with progress("reading", len(dump.records)) as tick:
            graph = graph_of(dump, level, _one(rank, "--ranks"), _one(step, "--steps"), tick)
    write_onnx(graph, out)
    return [f"{safe(graph.name)}: {count(len(graph.nodes), 'node')}{_where(graph)}", *map(safe, graph.notes)]


def tree(path: Path, level: int | None, step: str, rank: str) -> list[str]:
    """The lines of the tree. Raises CommandError, DumpError."""
    from vllm_accprobe.formats import open_dump
    from vllm_accprobe.report.text import safe
    from vllm_accprobe.topology import data_flow

    if _topology(path, step, rank):
        root = data_flow.of_atb(path)
    else:
        root = data_flow.of_dump(open_dump(path), _one(rank, "--ranks"), _one(step, "--steps"))
    return [safe(line, 400) for line in data_flow.lines(root, level)]


def _where(graph: ModelGraph) -> str:
    facts = graph.facts
    return f", step {facts['step']} of rank {facts['rank']}" if "step" in facts else ""


def _topology(path: Path, step: str, rank: str) -> bool:
    """Whether ``path`` is a file of ATB's topology, which is of no step."""
    if path.suffix != ".json" or not path.is_file():
        return False
    if step or rank:
        raise CommandError(f"{path} is a topology: it has no steps and no ranks; leave out --steps and --ranks")
    return True


def _one(text: str, option: str) -> int | None:
    """One number. Raises CommandError for a range."""
    if not text:
        return None
    if not text.isdecimal():
        raise CommandError(f"{option}: {text!r} is not one number; one step of one rank is drawn")
    return int(text)
