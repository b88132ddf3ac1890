"""Arguments and options that several commands have, each spelt once.

Not here: what becomes of them (options.py).
"""

from __future__ import annotations

import typer

DUMP = typer.Argument(..., metavar="DUMP", help="Directory of a dump.")
NAMES = typer.Argument(None, metavar="[GLOB]...", help="Taps, e.g. '*.mlp.*'; '!...' excludes.")
OPS = typer.Option([], "--ops", metavar="GLOB", help="Classes, operators, paths; '!...' excludes. Can be repeated.")
IDS = typer.Option("", "--ids", metavar="IDS", help="Calls by opcheck.csv's column id, e.g. 0.0.57,0.1.3.")
WEIGHTS = typer.Option(
    None, "--weights", metavar="DIR", help="The model's directory; by default the path in the dump's run.json."
)
ATTRIBUTES = typer.Option(
    [], "--attribute", metavar="NAME=VALUE", help="Of modules, if not recorded: eps=1e-6, '*Norm:eps=1e-6'. Repeatable."
)
STEP = typer.Option("", "--step", metavar="RANGES", help="Engine steps, e.g. 0-3,7.")
RANK = typer.Option("", "--rank", metavar="RANGES", help="Global ranks, e.g. 0,2-3.")
ROLE = typer.Option([], "--role", metavar="GLOB", help="E.g. output.0 or 'input.*'; '!...' excludes. Can be repeated.")
CALL = typer.Option("", "--call", metavar="RANGES", help="Ordinals of the tap's calls within a step.")
REQUEST = typer.Option(
    [],
    "--request",
    metavar="GLOB",
    help="Only tensors with rows of these requests: id, or start of the prompt's hash; '!...' excludes.",
)
LEVEL = typer.Option(
    None, "--level", min=0, metavar="N", help="How deep modules are opened: 1 is what the model calls; all by default."
)
