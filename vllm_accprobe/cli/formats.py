"""``accprobe formats [PATH]``: which dumps can be read, and how each is recognised.

Not here: the recognising itself (formats/common/sniff.py).
"""

from __future__ import annotations

from pathlib import Path

import typer

from vllm_accprobe.cli.common.json_answer import answer
from vllm_accprobe.cli.common.options import say_notes


def formats(
    path: Path = typer.Argument(None, metavar="[PATH]", help="Say which format this dump or file is of."),
) -> None:
    """List the formats of dumps that can be read, or say which one PATH is.

    Every command that takes a dump takes any of them, and finds out by itself.
    Exit code 0: it is known, 2: it is no dump."""
    from vllm_accprobe.formats.common import sniff

    if path is not None:
        _, found, notes = sniff.find(path)
        typer.echo(sniff.OWN if found is None else found.name)
        answer(path=path, format=sniff.OWN if found is None else found.name)
        say_notes(notes)
        return
    problems: list[str] = []
    known = sniff.formats(problems)
    rows = [(sniff.OWN, sniff.OWN_HOW), *((f.name, f.how + (f" ({f.package})" if f.package else "")) for f in known)]
    answer(formats=[{"name": name, "recognised_by": how} for name, how in rows])
    width = max(len(name) for name, _ in rows)
    for name, how in rows:
        typer.echo(f"{name:<{width}}  {how}")
    say_notes(problems)
