"""``accprobe golden``: packs of a golden, files of a few megabytes that are published, checked and compared.

A pack is made of a dump, of a model that is served here, or of one that is computed on this CPU; a server is checked
against one. Not here: packs (golden/pack.py), what is captured (golden/make.py), what is sent (golden/check.py)."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vllm_accprobe.cli import options, output_paths
from vllm_accprobe.cli.endings import going_on
from vllm_accprobe.cli.options import Command, argument, option
from vllm_accprobe.cli.output import answer, say_notes, say_written, show
from vllm_accprobe.progress import USUAL
from vllm_accprobe.refusals import CommandError, NothingThere

if TYPE_CHECKING:
    from vllm_accprobe.gate.sending.prompts import PromptLine
    from vllm_accprobe.golden.stream import StreamSummary

golden = typer.Typer(help="Packs: what a model computed, in one small file that others compare with.",
                     rich_markup_mode=None)  # fmt: skip
REPORT = "report"
"""Folder of the comparison, in the work's."""
_LONG = 600
"""Characters of a line with a name that a stranger may have chosen."""


@dataclass(frozen=True)
class PackFileOptions:
    """The pack that is written."""

    out: Path = option("--out -o", ..., "The file to write, MODEL_vllm-VERSION.golden.", metavar="FILE")
    max_mb: float | None = option("--max-mb", None, "Largest size of the file; by default by the size of the model: 8 "
                                  "for 7B, 25 for 70B.", min=0.01, metavar="MB")  # fmt: skip
    seed: int = option("--seed", 0, "Draws the random rows and the sketches' signs: packs that are to be compared have "
                       "the same.", metavar="N")  # fmt: skip

    @property
    def max_bytes(self) -> int | None:
        return None if self.max_mb is None else int(self.max_mb * 1e6)

    def check(self, dumps: Iterable[Path] = ()) -> None:
        """Before anything is read or started. Raises CommandError where the file cannot be written, or is another one
        than a pack."""
        from vllm_accprobe.formats.io.pack_file import begins_as_pack

        output_paths.check_place(self.out, dumps)
        output_paths.check_own(self.out, begins_as_pack, "--out")


@dataclass(frozen=True)
class GoldenWorkOptions:
    """What both commands need for a server that they start."""

    keep: Path | None = option("--keep", None, "A new folder for the dump, the answers and the server's log. Default: "
                               "nothing is kept.", metavar="DIR")  # fmt: skip
    max_gb: float = option("--max-gb", 20.0, "Disk budget per rank.", min=0.001, metavar="GB")
    model: str = option("--model", "", "The model's name, where a server has several. Default: the first.",
                        metavar="NAME")  # fmt: skip
    timeout: float = option("--timeout", 600.0, "How long to wait; for one answer.", metavar="S", min=0.1)
    ready: float = option("--ready-timeout", 1800.0, "How long a server may take to start.", metavar="S",
                          min=1)  # fmt: skip

    def settings(self, prompts: str = "") -> Any:
        """gate.sides.SendSettings: lines every 5 s, also in a pipe."""
        from vllm_accprobe.gate.sides import SendSettings
        from vllm_accprobe.golden.prompts import MAX_TOKENS
        from vllm_accprobe.progress import Pace

        return SendSettings(prompts=prompts, max_tokens=MAX_TOKENS, model=self.model, timeout=self.timeout,
                            ready_s=self.ready, say=Pace(often=True))  # fmt: skip

    @contextmanager
    def work(self, resumed: Path | None = None) -> Iterator[Path]:
        """The folder of --keep, or one that is removed. resumed: the default's name, which is removed after success
        only, and may hold what a killed run has begun, as --keep may. Raises CommandError."""
        if resumed is not None:
            from vllm_accprobe.golden.make import is_begun

            home = self.keep or resumed
            if home.exists() and not is_begun(home) and (not home.is_dir() or any(home.iterdir())):
                raise CommandError(f"{home} exists and is not of such a run: name a new folder with --keep")
            output_paths.check_place(home, option="--keep")
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                yield home
            finally:
                with suppress(OSError):  # not empty
                    home.rmdir()
            if self.keep is None:
                shutil.rmtree(home)
            return
        if self.keep is None:
            with _removed() as folder:
                yield folder
            return
        if self.keep.exists() and (not self.keep.is_dir() or any(self.keep.iterdir())):
            raise CommandError(f"--keep {self.keep} exists and is not empty: name a new folder")
        output_paths.check_place(self.keep, option="--keep")
        self.keep.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield self.keep


@contextmanager
def _removed() -> Iterator[Path]:
    """A new folder here that is removed, but for a log that the error names: it is to be read."""
    folder = Path(tempfile.mkdtemp(prefix="accprobe-golden-", dir=Path.cwd()))
    named: Path | None = None
    try:
        yield folder
    except Exception as error:
        named = next((log for log in folder.rglob("*.log") if str(log) in str(error)), None)
        raise
    finally:
        kept = None if named is None else named.rename(folder.with_suffix(".log"))
        shutil.rmtree(folder)
        if named is not None and kept is not None:
            named.parent.mkdir(mode=0o700, parents=True)
            kept.rename(named)


def make(
    *,
    model_and_options: list[str] = argument("MODEL [-- OPTIONS...]", "A model and options of vllm serve, or -- vllm "
                                            "serve MODEL ...."),
    prompts: str | None = options.prompts(),
    stream: bool = option("--stream --float32", False, "Compute in float32 on this CPU without vLLM: layers are read "
                          "from the checkpoint one after another."),
    file: PackFileOptions,
    how: GoldenWorkOptions,
) -> None:  # fmt: skip
    """Serve a model, send public prompts, and write a golden pack of what they compute.

    The prompts are sent three times: freely, captured along these answers, and captured once more to measure the noise.
    Options behind -- are vllm serve's. With --float32 --stream the model is computed here, as by `accprobe golden
    stream`.
    Exit code 0: the pack is written, 2: it cannot be.
    """
    from vllm_accprobe.gate import preflight
    from vllm_accprobe.golden.make import make as made_pack
    from vllm_accprobe.report.text import count, size

    if stream:
        _make_streamed(model_and_options, prompts, file, how)
        return
    line = _line(model_and_options)
    file.check()
    model = preflight.model_of(preflight.command_of(line, os.environ)) or ""
    with how.work() as work:
        done = made_pack(line, model, file.out, work, how.settings(prompts or ""), os.environ,
                         gigabytes=how.max_gb, max_bytes=file.max_bytes, seed=file.seed)  # fmt: skip
    found = done.pack
    answer(pack=file.out, bytes=found.bytes, prompts=done.prompts, taps=found.taps, rows_full=found.rows_full,
           rows_sketched=found.rows_sketched, left_out=dict(found.left_out), noise=done.noise.to_json(),
           captured_bytes=done.captured, seconds=done.seconds)  # fmt: skip
    typer.echo(done.noise.sentence)
    rows = f"{count(found.rows_full, 'row')} in full, {found.rows_sketched:,} as sketches"
    say_written(file.out, about=f"{size(found.bytes)}, {count(done.prompts, 'prompt')}, {count(found.taps, 'tap')}, "
                f"{rows}; {size(done.captured)} captured, {done.seconds:.0f} s")  # fmt: skip
    for why, n in found.left_out.items():
        typer.echo(f"left out: {n:,} rows of tensors: {why}")


def _make_streamed(words: list[str], prompts: str | None, file: PackFileOptions, how: GoldenWorkOptions) -> None:
    """A pack of what `stream` computes. The last tokens of each text count as generated, so that `check` sends a server
    along them."""
    from vllm_accprobe.gate.sending.prompts import read
    from vllm_accprobe.golden.make import pack_streamed
    from vllm_accprobe.golden.prompts import texts

    if len(words) != 1:
        raise CommandError("--float32 --stream takes a model's folder alone: no server is started, and has no options")
    for flag in options.used(how):
        if flag != "--keep":
            raise CommandError(f"{flag} is of a server, and --float32 --stream starts none: leave it out")
    file.check()
    model, out = Path(words[0]), file.out
    with how.work(out.with_name(out.name + ".work")) as work:
        _check_folder(model)
        lines = read(prompts) if prompts else [line for line in texts() if line.text is not None]
        done, found = pack_streamed(model, *_encoded(model, lines), out, work, USUAL, max_bytes=file.max_bytes,
                                    seed=file.seed)  # fmt: skip
        if done is not None:
            _say_streamed(done)
        answer(pack=out, golden=None if done is None else asdict(done), **asdict(found))
        say_written(out, about=f"{found.bytes / 1e6:.2f} MB, {len(lines)} prompts, {found.taps:,} taps, "
                    f"{found.rows_full:,} rows in full, {found.rows_sketched:,} as sketches")  # fmt: skip
        if how.keep is not None:
            say_written(work, about="the dump, the answers")


def _line(words: Sequence[str]) -> str:
    """The command: MODEL and options of vllm serve, or all of it. Raises CommandError."""
    from vllm_accprobe.gate.served_run import serves

    if not words:
        raise CommandError("no model is named; write `accprobe golden make MODEL --out X.golden`")
    if len(words) == 1 and " " in words[0]:
        return words[0]
    return shlex.join(words if serves(words) else ["vllm", "serve", *words])


def check(
    *,
    pack: Path = argument("PACK", "A golden pack."),
    command: list[str] = argument("-- CMD...", "vllm serve MODEL ...."),
    how: GoldenWorkOptions,
) -> None:
    """Serve a model with the probe on, send a pack's token ids, and compare with the pack.

    Names the operator that introduced the error. Exit code 0: pass, 1: differences beyond the standard, 2: bad usage,
    or the server or the pack cannot be read, 3: nothing could be compared, or the server makes other token ids of the
    pack's texts.
    """
    from vllm_accprobe.gate.sending.client import OtherIds
    from vllm_accprobe.golden import check as golden
    from vllm_accprobe.golden.pack import PROMPTS
    from vllm_accprobe.golden.pack_sketches import open_pack
    from vllm_accprobe.report import servers

    if pack.is_dir():
        raise CommandError(f"{pack} is a folder: name a pack, which is a file (`accprobe golden make` writes it)")
    line = shlex.join(command) if len(command) > 1 else command[0]
    with how.work() as work:
        opened = open_pack(pack, work)
        try:
            done = golden.check(opened.home / PROMPTS, line, work, how.settings(), os.environ, gigabytes=how.max_gb,
                                seed=opened.seed)  # fmt: skip
        except OtherIds as e:
            raise NothingThere(str(e)) from None
        typer.echo(golden.answers_sentence(done.answers))
        if note := golden.noise_sentence(done.noise):
            say_notes([note])
        for text in servers.rendered_lines(done.answers.rendering) if done.answers and done.answers.rendering else ():
            typer.echo(text)
        code, found = _compared(pack, done.dump, work / REPORT)
        if how.keep is None:
            say_notes(["the dump and the report are removed now; with --keep DIR they stay"])
        if how.keep is not None:
            say_written(work, about="the dump, the answers, the report")
    rendered = done.answers is not None and done.answers.verdict == "fail"
    answer(pack=pack, answers=None if done.answers is None else servers.gap_json(done.answers),
           verdict=found.get("verdict"), origins=found.get("origins"))  # fmt: skip
    raise typer.Exit(max(code, 1) if rendered and code in (0, 1) else code)


def _compared(golden: Path, mine: Path, out: Path) -> tuple[int, dict[str, Any]]:
    """(exit code, compare.json) of `accprobe compare`, in a process of its own, whose memory goes with it."""
    from vllm_accprobe.children import Child
    from vllm_accprobe.dump.decode import object_in

    words = ["compare", str(golden), str(mine), "--out", str(out)]
    with Child("vllm_accprobe.cli", *words, stdout=subprocess.PIPE) as child:
        stdout, _ = child.communicate()
    typer.echo(stdout.rstrip("\n"))
    return (child.returncode if child.returncode >= 0 else 2), object_in(out / "compare.json", 1 << 28)


def pack(
    *,
    dump: Path = argument("DUMP", "The dump of the run that is trusted."),
    prompts: Path | None = option("--prompts", None, "A text file that is put into the pack: the prompts, as they were "
                                  "sent.", metavar="FILE"),
    file: PackFileOptions,
) -> None:  # fmt: skip
    """Write a pack of a dump: some rows in full, random sums (sketches) of others, tokens, hashes.

    `accprobe compare FILE mine` compares a dump with it.
    Exit code 0: done, 2: it cannot be done.
    """
    from vllm_accprobe.gate.sending.prompts import read
    from vllm_accprobe.golden.pack import MB, pack as write

    file.check([dump])
    if prompts is not None:
        read(str(prompts))
    done = write(dump, file.out, max_bytes=file.max_bytes, seed=file.seed, prompts=prompts)
    typer.echo(f"{done.bytes / MB:.2f} MB: {done.taps:,} modules, {done.rows_full:,} rows in full, "
               f"{done.rows_sketched:,} rows as sketches")  # fmt: skip
    for reason, n in done.left_out.items():
        typer.echo(f"left out: {n:,} {reason}")
    answer(pack=asdict(done))
    say_written(file.out)


def verify(
    packs: list[Path] = argument("PACK...", "Files of packs, or one folder with packs."),
    sha256: str | None = option("--sha256", None, "What the publisher says: the manifest's SHA-256, or its first 16 "
                                "digits or more.", metavar="HEX"),
    index: bool = option("--index", False, "Write index.json into the folder: each pack's hash, size, model, version "
                         "and device. Later calls compare with it."),
) -> None:  # fmt: skip
    """Check packs against their manifests, and those of a folder also against its index.json: a line for each.

    Exit code 0: all are, 1: one has other bytes than its manifest says, or another manifest than --sha256 or the
    index, 2: one is no pack, is missing, or cannot be read.
    """
    from vllm_accprobe.dump.files import DumpError
    from vllm_accprobe.formats.io.pack_file import PackAltered, verify
    from vllm_accprobe.golden.history import COLLECTION, index_entry, packs_in, read_index
    from vllm_accprobe.report.text import safe
    from vllm_accprobe.whole_file import whole

    folder = packs[0] if len(packs) == 1 and packs[0].is_dir() else None
    if index and folder is None:
        raise CommandError("--index is of one folder with packs: name it")
    if sha256 is not None and (len(sha256) < 16 or len(packs) > 1 or folder is not None):
        raise CommandError("--sha256 takes 16 digits or more, of one pack")
    named = read_index(folder) if folder is not None and not index else {}
    if folder is not None:
        packs = list(dict.fromkeys([*packs_in(folder), *(folder / n for n in named)]))
    code, found, entries = 0, [], {}
    for path in packs:
        try:
            manifest, digest = verify(path)
            name = "" if folder is None else path.relative_to(folder).as_posix()
            due = named.get(name) if named else sha256
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
    if index and folder is not None and code == 0:
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


def history(folder: Path = argument("DIR", "A folder with packs, also in folders in it.")) -> None:
    """Compare the packs of each model in order of vLLM's version and date, each with the one before.

    Exit code 0: none differs beyond the limits, 1: one does, 2: there is no pack, or one cannot be read.
    """
    from vllm_accprobe.golden.history import DIFFERS, UNREADABLE, history
    from vllm_accprobe.progress import waiting
    from vllm_accprobe.report.text import num, safe

    now = [""]
    with waiting(lambda: f"comparing {now[0]}"):
        lines = history(folder, lambda text: now.__setitem__(0, text))
    columns = ("pack", "model", "vLLM", "device", "date", "against the one before", "where", "error", "limit")
    rows = [[safe(line.pack), line.model, line.vllm, line.device, line.date, line.found, safe(line.where, 400),
             "" if line.error is None else num(line.error), "" if line.limit is None else num(line.limit)]
            for line in lines]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    show("  ".join(text.ljust(n) for text, n in zip(row, widths, strict=True)).rstrip() for row in (columns, *rows))
    answer(history=[asdict(line) for line in lines])
    found = {line.found for line in lines}
    raise typer.Exit(1 if DIFFERS in found else 2 if UNREADABLE in found else 0)


def stream(
    model: Path = argument("MODEL", "A folder with config.json and safetensors files, not quantised."),
    out: Path = option("--out -o", ..., "The dump. A dump that an interrupted run left is continued.", metavar="DIR"),
    prompts: str = option("--prompts", "default", "A jsonl or text, as `send` takes it, or a folder of `send`: its "
                          "prompts, and its answers as generated tokens.", metavar="FILE"),
    modules: str | None = options.modules(),
    rows: str = option("--rows", "all", "all, or pack: those that a pack stores in full.", metavar="WHICH"),
    float64: bool = option("--float64", False, "Compute in float64: twice the memory."),
    expert_gb: float | None = option("--expert-gb", None, "Of layers that need more memory, experts are read one at a "
                                     "time. Default: half of what is free.", min=0.001, metavar="GB"),
) -> None:  # fmt: skip
    """Compute a golden in float32 on a CPU through transformers, layers read from the checkpoint one after another.

    Needs transformers 5, and memory for one layer in float32. Writes a dump, and DIR/answers with log-probabilities.
    The same command continues a run that was killed. Exit code 0: done, 2: it cannot be done.
    """
    if rows not in ("all", "pack"):
        raise CommandError(f"--rows {rows}: name all or pack")
    output_paths.writable(out)
    names, ids, lengths = _prompts(model, prompts)
    chosen = None
    if rows == "pack":
        from vllm_accprobe.dump.schema import hash_tokens
        from vllm_accprobe.golden.pack import RequestShape, rows_wanted

        shapes = [
            RequestShape(n, len(prompt) - n, prompt=hash_tokens(prompt[:n]))
            for prompt, n in zip(ids, lengths, strict=True)
        ]
        choice = rows_wanted(shapes, 0)
        chosen = [choice.of(number) for number in range(len(ids))]
    going_on("finished blocks are", out)
    from vllm_accprobe.golden.stream import streamed

    done = streamed(
        model, ids, out, dtype="float64" if float64 else "float32", progress=USUAL, prompt_lengths=lengths,
        modules=tuple(filter(None, (modules or "").split(","))), rows=chosen, names=names,
        expert_bytes=None if expert_gb is None else int(expert_gb * 1e9),
    )  # fmt: skip
    _say_streamed(done)
    answer(golden=asdict(done))
    say_written(out)


def _prompts(model: Path, source: str) -> tuple[list[str], list[list[int]], list[int]]:
    """Names, token ids with the generated ones, and how many are the prompt's. Raises CommandError."""
    from vllm_accprobe.gate.sending import prompts, replies

    _check_folder(model)
    if not replies.exists(Path(source)):
        names, ids = _encoded(model, prompts.read(source))
        return names, ids, [len(prompt) for prompt in ids]
    names, ids, lengths = [], [], []
    for name, reply in (replies.read(Path(source)).passes or [{}])[0].items():
        if reply.prompt_token_ids and reply.refused is None:
            names.append(name)
            ids.append([*reply.prompt_token_ids, *(reply.token_ids or [])[:-1]])  # the last one was never read
            lengths.append(len(reply.prompt_token_ids))
    if not ids:
        raise CommandError(f"--prompts: {source} has no answers with token ids")
    return names, ids, lengths


def _check_folder(model: Path) -> None:
    """Raises CommandError: transformers would search its hub for the name."""
    if not (model / "config.json").is_file():
        raise CommandError(f"{model} has no config.json: name a model's folder with it and with safetensors files")


def _encoded(model: Path, lines: Iterable[PromptLine]) -> tuple[list[str], list[list[int]]]:
    """Names and token ids. Raises CommandError."""
    encode = None
    names, ids = [], []
    for line in lines:
        tokens = line.token_ids
        if tokens is None and line.text is not None:
            if encode is None:
                from vllm_accprobe.golden.model_blocks import encoder

                encode = encoder(model)
            tokens = tuple(encode(line.text))
        if not tokens:
            raise CommandError(f"--prompts: {line.name} has no text and no token_ids: name the folder of a `send`")
        names.append(line.name)
        ids.append(list(tokens))
    return names, ids


def _say_streamed(done: StreamSummary) -> None:
    typer.echo(
        f"{done.blocks} blocks, {done.tensors:,} tensors, {done.payload_bytes / 1e9:.2f} GB, in {done.seconds:,.0f} s; "
        f"{done.read_bytes / 1e9:.2f} GB read, peak memory {done.peak_bytes / 1e9:.2f} GB"
    )


for _function, _short in (
    (make, "Serve a model, and write a pack of what it computes"),
    (check, "Serve a model, and compare it with a pack"),
    (pack, "Write a pack of a dump"),
    (verify, "Check packs against their manifests"),
    (history, "Compare packs over versions: since when does a model differ?"),
    (stream, "Compute a golden in float32 on a CPU, layer by layer"),
):
    golden.command(cls=Command, short_help=_short)(options.expanded(_function, f"golden {_function.__name__}"))
