"""``accprobe golden stream MODEL``: a golden in float32 on this CPU, of a model that does not fit into its memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vllm_accprobe.cli import options, output_paths
from vllm_accprobe.cli.endings import going_on
from vllm_accprobe.cli.options import argument, option
from vllm_accprobe.cli.output import answer, say_written
from vllm_accprobe.refusals import CommandError
from vllm_accprobe.waiting import USUAL

if TYPE_CHECKING:
    from vllm_accprobe.gate.sending.prompts import PromptLine
    from vllm_accprobe.golden.stream import StreamSummary


@dataclass(frozen=True)
class GoldenStreamOptions:
    """Of what, for which prompts, and which tensors are stored."""

    model: Path = argument("MODEL", "A folder with config.json and safetensors files, not quantised.")
    out: Path = option("--out -o", ..., "The dump. A dump that an interrupted run left is continued.", metavar="DIR")
    prompts: str = option("--prompts", "default", "A jsonl or text, as `send` takes it, or a folder of `send`: its "
                          "prompts, and its answers as generated tokens.", metavar="FILE")  # fmt: skip
    modules: str | None = options.modules()
    rows: str = option("--rows", "all", "all, or pack: those that a pack stores in full.", metavar="WHICH")
    float64: bool = option("--float64", False, "Compute in float64: twice the memory.")
    expert_gb: float | None = option("--expert-gb", None, "Of layers that need more memory, experts are read one at a "
                                     "time. Default: half of what is free.", min=0.001, metavar="GB")  # fmt: skip


def stream(what: GoldenStreamOptions) -> None:
    """Compute a golden in float32 on a CPU through transformers, layers read from the checkpoint one after another.

    Needs transformers 5, and memory for one layer in float32. Writes a dump, and DIR/answers with log-probabilities.
    The same command continues a run that was killed. Exit code 0: done, 2: it cannot be done.
    """
    if what.rows not in ("all", "pack"):
        raise CommandError(f"--rows {what.rows}: name all or pack")
    output_paths.writable(what.out)
    names, ids, lengths = _prompts(what.model, what.prompts)
    rows = None
    if what.rows == "pack":
        from vllm_accprobe.dump.schema import hash_tokens
        from vllm_accprobe.golden.pack import RequestShape, rows_wanted

        shapes = [
            RequestShape(n, len(prompt) - n, prompt=hash_tokens(prompt[:n]))
            for prompt, n in zip(ids, lengths, strict=True)
        ]
        choice = rows_wanted(shapes, 0)
        rows = [choice.of(number) for number in range(len(ids))]
    going_on("finished blocks are", what.out)
    from vllm_accprobe.golden.stream import streamed

    modules = tuple(filter(None, (what.modules or "").split(",")))
    done = streamed(
        what.model, ids, what.out, dtype="float64" if what.float64 else "float32", modules=modules, progress=USUAL,
        prompt_lengths=lengths, rows=rows,
        names=names, expert_bytes=None if what.expert_gb is None else int(what.expert_gb * 1e9),
    )  # fmt: skip
    say_streamed(done)
    answer(golden=asdict(done))
    say_written(what.out)


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


def make_streamed(
    model: Path, prompts: str | None, out: Path, work: Path, *, max_bytes: int | None, seed: int
) -> None:
    """`golden make --float32 --stream`: a pack of what `stream` computes. The last tokens of each text count as
    generated, so that `check` sends a server along them."""
    from vllm_accprobe.gate.sending.prompts import read
    from vllm_accprobe.golden.make import pack_streamed
    from vllm_accprobe.golden.prompts import texts

    _check_folder(model)
    lines = read(prompts) if prompts else [line for line in texts() if line.text is not None]
    done, found = pack_streamed(model, *_encoded(model, lines), out, work, USUAL, max_bytes=max_bytes,
                                seed=seed)  # fmt: skip
    if done is not None:
        say_streamed(done)
    answer(pack=out, golden=None if done is None else asdict(done), **asdict(found))
    say_written(out, about=f"{found.bytes / 1e6:.2f} MB, {len(lines)} prompts, {found.taps:,} taps, "
                f"{found.rows_full:,} rows in full, {found.rows_sketched:,} as sketches")  # fmt: skip


def say_streamed(done: StreamSummary) -> None:
    typer.echo(
        f"{done.blocks} blocks, {done.tensors:,} tensors, {done.payload_bytes / 1e9:.2f} GB, in {done.seconds:,.0f} s; "
        f"{done.read_bytes / 1e9:.2f} GB read, peak memory {done.peak_bytes / 1e9:.2f} GB"
    )
