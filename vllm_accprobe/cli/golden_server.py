"""``accprobe golden make`` and ``check``: a pack of a model that is served here, and a server against a pack.

Not here: packs as files (golden.py), what is captured (golden/make.py), what is sent (golden/check.py)."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from vllm_accprobe.cli import options, output_paths
from vllm_accprobe.cli.options import argument, option
from vllm_accprobe.cli.output import answer, say_notes, say_written
from vllm_accprobe.refusals import CommandError, NothingThere

REPORT = "report"
"""Folder of the comparison, in the work's."""


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
        from vllm_accprobe.waiting import Pace

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


@dataclass(frozen=True)
class MakeOptions:
    """The model, and the pack."""

    model_and_options: list[str] = argument("MODEL [-- OPTIONS...]", "A model and options of vllm serve, or -- vllm "
                                            "serve MODEL ....")  # fmt: skip
    prompts: str | None = options.prompts()
    stream: bool = option("--stream --float32", False, "Compute in float32 on this CPU without vLLM: layers are read "
                          "from the checkpoint one after another.")  # fmt: skip


@dataclass(frozen=True)
class CheckOptions:
    """The pack, and the server."""

    pack: Path = argument("PACK", "A golden pack.")
    command: list[str] = argument("-- CMD...", "vllm serve MODEL ....")


def make(what: MakeOptions, file: PackFileOptions, how: GoldenWorkOptions) -> None:
    """Serve a model, send public prompts, and write a golden pack of what they compute.

    The prompts are sent three times: freely, captured along these answers, and captured once more to measure the noise.
    Options behind -- are vllm serve's. With --float32 --stream the model is computed here, as by `accprobe golden
    stream`.
    Exit code 0: the pack is written, 2: it cannot be.
    """
    from vllm_accprobe.gate import preflight
    from vllm_accprobe.golden.make import make as made_pack
    from vllm_accprobe.report.text import count, size

    if what.stream:
        _make_streamed(what, file, how)
        return
    line = _line(what.model_and_options)
    file.check()
    model = preflight.model_of(preflight.command_of(line, os.environ)) or ""
    with how.work() as work:
        done = made_pack(line, model, file.out, work, how.settings(what.prompts or ""), os.environ,
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


def _make_streamed(what: MakeOptions, file: PackFileOptions, how: GoldenWorkOptions) -> None:
    from vllm_accprobe.cli.golden_stream import make_streamed

    if len(what.model_and_options) != 1:
        raise CommandError("--float32 --stream takes a model's folder alone: no server is started, and has no options")
    usual = GoldenWorkOptions()
    for name, flag in (("max_gb", "--max-gb"), ("model", "--model"), ("timeout", "--timeout"),
                       ("ready", "--ready-timeout")):  # fmt: skip
        if getattr(how, name) != getattr(usual, name):
            raise CommandError(f"{flag} is of a server, and --float32 --stream starts none: leave it out")
    file.check()
    with how.work(file.out.with_name(file.out.name + ".work")) as work:
        make_streamed(Path(what.model_and_options[0]), what.prompts, file.out, work, max_bytes=file.max_bytes,
                      seed=file.seed)  # fmt: skip
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


def check(what: CheckOptions, how: GoldenWorkOptions) -> None:
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

    if what.pack.is_dir():
        raise CommandError(f"{what.pack} is a folder: name a pack, which is a file (`accprobe golden make` writes it)")
    line = shlex.join(what.command) if len(what.command) > 1 else what.command[0]
    with how.work() as work:
        pack = open_pack(what.pack, work)
        try:
            done = golden.check(pack.home / PROMPTS, line, work, how.settings(), os.environ, gigabytes=how.max_gb,
                                seed=pack.seed)  # fmt: skip
        except OtherIds as e:
            raise NothingThere(str(e)) from None
        typer.echo(golden.answers_sentence(done.answers))
        if note := golden.noise_sentence(done.noise):
            say_notes([note])
        for text in servers.rendered_lines(done.answers.rendering) if done.answers and done.answers.rendering else ():
            typer.echo(text)
        code, found = _compared(what.pack, done.dump, work / REPORT)
        if how.keep is None:
            say_notes(["the dump and the report are removed now; with --keep DIR they stay"])
        if how.keep is not None:
            say_written(work, about="the dump, the answers, the report")
    rendered = done.answers is not None and done.answers.verdict == "fail"
    answer(pack=what.pack, answers=None if done.answers is None else servers.gap_json(done.answers),
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


COMMANDS = ((make, "Serve a model, and write a pack of what it computes"),
            (check, "Serve a model, and compare it with a pack"))  # fmt: skip
