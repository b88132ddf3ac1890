"""``accprobe golden``: packs of a golden."""

from __future__ import annotations

import typer

from vllm_accprobe.cli import golden_server, options
from vllm_accprobe.cli.options import Command

golden = typer.Typer(help="Packs: a golden in one small file.", rich_markup_mode=None)


for _function, _short in golden_server.COMMANDS:
    golden.command(cls=Command, short_help=_short)(options.expanded(_function, f"golden {_function.__name__}"))
