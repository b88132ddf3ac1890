"""``accprobe golden``: packs of a golden, files of a few megabytes that are published, checked and compared."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import typer

from vllm_accprobe.cli import golden_server, golden_stream, options
from vllm_accprobe.cli.golden_server import PackFileOptions
from vllm_accprobe.cli.options import Command, argument, option
from vllm_accprobe.cli.output import answer, say_written, show
from vllm_accprobe.refusals import CommandError

golden = typer.Typer(help="Packs: what a model computed, in one small file that others compare with.",
                     rich_markup_mode=None)  # fmt: skip


_LONG = 600
"""Characters of a line with a name that a stranger may have chosen."""


@dataclass(frozen=True)
class GoldenPackOptions:
    """What is packed, and how large the pack may be."""

    dump: Path = argument("DUMP", "The dump of the run that is trusted.")
    prompts: Path | None = option("--prompts", None, "A text file that is put into the pack: the prompts, as they were "
                                  "sent.", metavar="FILE")  # fmt: skip


@dataclass(frozen=True)
class GoldenVerifyOptions:
    """Which packs, and what they must be."""

    packs: list[Path] = argument("PACK...", "Files of packs, or one folder with packs.")
    sha256: str | None = option("--sha256", None, "What the publisher says: the manifest's SHA-256, or its first 16 "
                                "digits or more.", metavar="HEX")  # fmt: skip
    index: bool = option("--index", False, "Write index.json into the folder: each pack's hash, size, model, version "
                         "and device. Later calls compare with it.")  # fmt: skip


@dataclass(frozen=True)
class GoldenHistoryOptions:
    """Where the packs are."""

    folder: Path = argument("DIR", "A folder with packs, also in folders in it.")


def pack(what: GoldenPackOptions, file: PackFileOptions) -> None:
    """Write a pack of a dump: some rows in full, random sums (sketches) of others, tokens, hashes.

    `accprobe compare FILE mine` compares a dump with it.
    Exit code 0: done, 2: it cannot be done.
    """
    from vllm_accprobe.gate.sending import prompts
    from vllm_accprobe.golden.pack import MB
    from vllm_accprobe.golden.pack import pack as write

    file.check([what.dump])
    if what.prompts is not None:
        prompts.read(str(what.prompts))
    done = write(what.dump, file.out, max_bytes=file.max_bytes, seed=file.seed, prompts=what.prompts)
    typer.echo(f"{done.bytes / MB:.2f} MB: {done.taps:,} modules, {done.rows_full:,} rows in full, "
               f"{done.rows_sketched:,} rows as sketches")  # fmt: skip
    for reason, n in done.left_out.items():
        typer.echo(f"left out: {n:,} {reason}")
    answer(pack=asdict(done))
    say_written(file.out)


def verify(what: GoldenVerifyOptions) -> None:
    """Check packs against their manifests, and those of a folder also against its index.json: a line for each.

    Exit code 0: all are, 1: one has other bytes than its manifest says, or another manifest than --sha256 or the
    index, 2: one is no pack, is missing, or cannot be read.
    """
    from vllm_accprobe.dump.files import DumpError
    from vllm_accprobe.formats.io.pack_file import PackAltered, verify
    from vllm_accprobe.golden.history import COLLECTION, index_entry, packs_in, read_index
    from vllm_accprobe.report.text import safe
    from vllm_accprobe.whole_file import whole

    folder = what.packs[0] if len(what.packs) == 1 and what.packs[0].is_dir() else None
    if what.index and folder is None:
        raise CommandError("--index is of one folder with packs: name it")
    if what.sha256 is not None and (len(what.sha256) < 16 or len(what.packs) > 1 or folder is not None):
        raise CommandError("--sha256 takes 16 digits or more, of one pack")
    named = read_index(folder) if folder is not None and not what.index else {}
    packs = what.packs if folder is None else list(dict.fromkeys([*packs_in(folder), *(folder / n for n in named)]))
    code, found, entries = 0, [], {}
    for path in packs:
        try:
            manifest, digest = verify(path)
            name = "" if folder is None else path.relative_to(folder).as_posix()
            due = named.get(name) if named else what.sha256
            if due is None and named:
                raise PackAltered(f"{path} is not in {COLLECTION}: write it again with --index")
            if due is not None and not digest.startswith(due.lower()):
                raise PackAltered(f"{path}: its manifest has the SHA-256 {digest}, not {due}")
            entries[name] = index_entry(manifest, digest, path.stat().st_size)
            typer.echo(f"PASS: {safe(path, _LONG)}: {_about(manifest)}; manifest {digest[:16]}")
            found.append({"pack": path, "verdict": "pass", "sha256": digest})
        except DumpError as e:
            code = max(code, 1 if isinstance(e, PackAltered) else 2)
            if len(packs) == 1 and code == 2:
                raise
            typer.echo(f"FAIL: {safe(e, _LONG)}")
            found.append({"pack": path, "verdict": "fail", "why": str(e)})
    if what.index and folder is not None and code == 0:
        with whole(folder / COLLECTION) as part:
            part.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")
        say_written(folder / COLLECTION)
    answer(packs=found)
    raise typer.Exit(code)


def _about(manifest: object) -> str:
    from vllm_accprobe.golden.history import manifest_text

    name, cls, vllm = (manifest_text(manifest, *keys) for keys in (("model", "path"), ("model", "class"),
                                                                  ("versions", "vllm")))  # fmt: skip
    dtype, device = manifest_text(manifest, "model", "dtype"), manifest_text(manifest, "device", "name")
    unnamed = "" if name or cls else "its model is not named"
    return ", ".join(filter(None, (unnamed, name, cls, dtype, vllm and f"vLLM {vllm}", device)))


def history(what: GoldenHistoryOptions) -> None:
    """Compare the packs of each model in order of vLLM's version and date, each with the one before.

    Exit code 0: none differs beyond the limits, 1: one does, 2: there is no pack, or one cannot be read.
    """
    from vllm_accprobe.golden.history import DIFFERS, UNREADABLE, history
    from vllm_accprobe.report.text import num, safe
    from vllm_accprobe.waiting import waiting

    now = [""]
    with waiting(lambda: f"comparing {now[0]}"):
        lines = history(what.folder, lambda text: now.__setitem__(0, text))
    columns = ("pack", "model", "vLLM", "device", "date", "against the one before", "where", "error", "limit")
    rows = [[safe(line.pack), line.model, line.vllm, line.device, line.date, line.found, safe(line.where, 400),
             "" if line.error is None else num(line.error), "" if line.limit is None else num(line.limit)]
            for line in lines]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    show("  ".join(text.ljust(n) for text, n in zip(row, widths, strict=True)).rstrip() for row in (columns, *rows))
    answer(history=[asdict(line) for line in lines])
    found = {line.found for line in lines}
    raise typer.Exit(1 if DIFFERS in found else 2 if UNREADABLE in found else 0)


for _function, _short in (*golden_server.COMMANDS, (pack, "Write a pack of a dump"),
                          (verify, "Check packs against their manifests"),
                          (history, "Compare packs over versions: since when does a model differ?")):  # fmt: skip
    golden.command(cls=Command, short_help=_short)(options.expanded(_function, f"golden {_function.__name__}"))
golden.command(cls=Command, short_help="Compute a golden in float32 on a CPU, layer by layer")(
    options.expanded(golden_stream.stream, "golden stream")
)
