"""``accprobe size MODEL``: how large a capture will be, before it is made."""

from __future__ import annotations

from pathlib import Path

import typer

from vllm_accprobe.cli.common.declared import JSON, MODULES
from vllm_accprobe.cli.common.options import CommandError


def size(
    model: Path = typer.Argument(..., metavar="MODEL", help="A model's folder, or its config.json."),
    tokens: int = typer.Option(
        1000, "--tokens", min=1, metavar="N", help="Of prompts and answers together that are captured."
    ),
    answers: int = typer.Option(
        16, "--answers", min=0, metavar="N", help="How many of these are sampled: a row of logits each."
    ),
    modules: str = MODULES,
    preset: str = typer.Option(None, "--preset", metavar="NAME", help="As VLLM_ACCPROBE_PRESET: its modules."),
    tp: int = typer.Option(1, "--tp", min=1, metavar="N", help="Ranks of tensor parallelism."),
    as_json: bool = JSON,
) -> None:
    """Say how large a capture of a model will be, before it is made.

    Exact for Llama, Mistral, Qwen2, Qwen3, Mixtral, Qwen2-MoE, Qwen3-MoE, DeepSeek-V2 and V3, of the modules that are
    chosen. Another decoder is counted by what its config.json has in common with these, which is said. Parameters come
    on top where they fit a quarter of the budget. Exit code 0; 2: the file is no config.json of a decoder.
    """
    import json

    from vllm_accprobe.config import ConfigError, ProbeConfig
    from vllm_accprobe.config_values import words_choose
    from vllm_accprobe.run import dump_size

    given = {name: value for name, value in (("modules", modules), ("preset", preset)) if value}
    try:
        words = ProbeConfig.from_kwargs(**given)
    except ConfigError as why:
        raise CommandError(f"--{why}") from None
    try:
        config, width = dump_size.read_config(model)
        chooses = (lambda path, cls: words_choose(words.modules, path, path, cls)) if words.modules_left else None
        token, logits = dump_size.per_token(config, tp, width, chooses, words.parts)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError) as why:
        if isinstance(why, dump_size.SizeError):
            raise CommandError(str(why)) from None
        what = f"no {why} in it" if isinstance(why, KeyError) else "its numbers are no decoder's"
        raise CommandError(f"{model}: {what}; capture one token, and accprobe summary says its size") from None
    total = token * tokens + logits * answers
    if not total:
        raise CommandError("--modules: no module of a decoder is chosen")
    kind = str(config.get("model_type"))
    known = kind in dump_size.MEASURED
    if as_json:
        said = {"bytes_per_token": token, "bytes_per_logits": logits, "tokens": tokens, "bytes": total, "ranks": tp}
        more = {"bytes_per_rank": total // tp, "model_type": kind, "exact": known}
        typer.echo(json.dumps({"schema": 1} | said | more))
        return
    on = f"{tp} rank{'s' * (tp > 1)}"
    typer.echo(f"{token / 1e6:.3g} MB for a token on {on}, {logits / 1e6:.3g} MB of logits for each that is sampled")
    typer.echo(f"{total / 1e9:.3g} GB for {tokens:,} tokens, {answers:,} of them sampled; parameters come on top")
    each, budget = total / tp / 1e9, words.max_gb
    ends = "" if each <= budget else ": capture ends before all of it is there"
    typer.echo(f"{each:.3g} GB a rank; its budget is {budget:g} (VLLM_ACCPROBE_MAX_GB){ends}")
    if not known:
        typer.echo(f"note: {kind} was not held against a capture; it is counted as a decoder of the kinds that were")
