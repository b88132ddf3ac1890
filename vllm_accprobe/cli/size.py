"""``accprobe size MODEL``: how large a capture will be, before it is made."""

from __future__ import annotations

from pathlib import Path

import typer

from vllm_accprobe.cli.common.declared import JSON, MODULES
from vllm_accprobe.cli.common.options import CommandError


def size(
    model: Path = typer.Argument(..., metavar="MODEL", help="A model's folder, or its config.json."),
    tokens: int = typer.Option(1000, "--tokens", min=1, help="Of prompts and answers together that are captured."),
    answers: int = typer.Option(16, "--answers", min=0, help="How many of these are sampled: a row of logits each."),
    modules: str = MODULES,
    preset: str = typer.Option(None, "--preset", help="As VLLM_ACCPROBE_PRESET: its modules."),
    tp: int = typer.Option(1, "--tp", min=1, help="Ranks of tensor parallelism."),
    as_json: bool = JSON,
) -> None:
    """Say how large a capture of a model will be, before it is made.

    Known are dense decoders (Llama, Qwen2, Mistral) and, with all modules, DeepSeek's. Parameters come on top where
    they fit a quarter of the budget. Exit code 0; 2: the model is not known, or the file is no config.json.
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
    except KeyError as why:
        what = f"no {why} in it: known are dense decoders and DeepSeek's"
        raise CommandError(f"{model}: {what}; capture one token, and accprobe summary says its size") from None
    except dump_size.SizeError as why:
        raise CommandError(str(why)) from None
    total = token * tokens + logits * answers
    if not total:
        raise CommandError("--modules: no module of a decoder is chosen")
    if as_json:
        said = {"bytes_per_token": token, "bytes_per_logits": logits, "tokens": tokens, "bytes": total, "ranks": tp}
        typer.echo(json.dumps(said))
        return
    on = f"{tp} rank{'s' * (tp > 1)}"
    typer.echo(f"{token / 1e6:.3g} MB for a token on {on}, {logits / 1e6:.3g} MB of logits for each that is sampled")
    typer.echo(f"{total / 1e9:.3g} GB for {tokens:,} tokens, {answers:,} of them sampled; parameters come on top")
