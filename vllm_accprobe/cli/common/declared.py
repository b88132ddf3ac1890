"""Arguments and options that several commands have, each spelt once.

The idea: an option of one name begins its help with the same sentence in every command; what a command adds follows it
(tests/cli/spelling/test_one_spelling.py walks through all of them). Metavars in the plural are lists, with commas or
repeated. Not here: what becomes of them (options.py), older names (spelling/one_spelling.py).
"""

from __future__ import annotations

import typer

DUMP = typer.Argument(..., metavar="DUMP", help="Directory of a dump.")
NAMES = typer.Argument(None, metavar="[GLOB]...", help="Taps, e.g. '*.mlp.*'; '!...' excludes.")
OPS = typer.Option([], "--ops", metavar="GLOBS", help="Classes, operators, paths; '!...' excludes.")
IDS = typer.Option("", "--ids", metavar="IDS", help="Calls by opcheck.csv's column id, e.g. 0.0.57,0.1.3.")
WEIGHTS = typer.Option(
    None, "--weights", metavar="DIR", help="The model's directory; by default the path in the dump's run.json."
)
ATTRIBUTES = typer.Option(
    [], "--attribute", metavar="A=V", help="Of modules, if not recorded: eps=1e-6, '*Norm:eps=1e-6'. Can be repeated."
)
_STEPS, _RANKS, _REQUESTS = "Engine steps, e.g. 0-3,7", "Global ranks, e.g. 0,2-3", "Requests: globs over ids"
STEP = typer.Option("", "--steps", metavar="RANGES", help=f"{_STEPS}.")
RANK = typer.Option("", "--ranks", metavar="RANGES", help=f"{_RANKS}.")
STEPS = typer.Option(None, "--steps", metavar="RANGES", help=f"{_STEPS}; 0 is the next one of a server that runs.")
RANKS = typer.Option(None, "--ranks", metavar="RANGES", help=f"{_RANKS}; all by default.")
REQUESTS = typer.Option(None, "--requests", metavar="GLOBS", help=f"{_REQUESTS}; all by default.")
TOKENS = typer.Option(None, "--tokens", metavar="RANGES", help="Token ordinals, e.g. 0-4,7; 0 is the prompt.")
MODULES = typer.Option(
    None, "--modules", metavar="GLOBS", help="Modules: globs over paths, class names, or presets such as attention."
)
ROLE = typer.Option([], "--roles", metavar="GLOBS", help="E.g. output.0 or 'input.*'; '!...' excludes.")
CALL = typer.Option("", "--calls", metavar="RANGES", help="Ordinals of the tap's calls within a step.")
REQUEST = typer.Option(
    [],
    "--requests",
    metavar="GLOBS",
    help=f"{_REQUESTS}, or starts of the prompts' hashes; '!...' excludes. Only tensors with rows of these.",
)
LEVEL = typer.Option(
    None, "--level", min=0, metavar="N", help="How deep modules are opened: 1 is what the model calls; all by default."
)
DIR = typer.Option(
    None, "--dir", "-d", metavar="DIR", help="Where the command's dump goes; by default ./accprobe/<UTC time>."
)
DIR_OUTPUT = typer.Option(
    None, "--dir", "-d", "--output", "-o", metavar="DIR",
    help="Where the command's dump goes; by default ./accprobe/<UTC time>.",
)  # fmt: skip
JSON = typer.Option(False, "--json", help="Print one json object, not lines.")
CONCURRENCY = typer.Option(64, "--concurrency", metavar="N", min=1, max=1024, help="Requests at a time.")
MAX_TOKENS = typer.Option(
    32, "--max-tokens", metavar="N", min=1, help="Tokens to generate for a prompt, where it says no other."
)
MODEL = typer.Option("", "--model", metavar="NAME", help="Where a server has several; the first by default.")
TIMEOUT = typer.Option(600, "--timeout", metavar="S", min=0.1, help="How long to wait; here for one request.")
READY = typer.Option(1800, "--ready-timeout", metavar="S", min=1, help="How long a command may take until it answers.")
SCORE = typer.Option(
    None, "--score/--no-score", help="A last pass that scores prompt and answer. Default: where a server can."
)
