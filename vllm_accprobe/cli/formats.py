"""``accprobe formats [PATH]``: which dumps can be read, and how each is recognised.

Not here: the recognising itself (formats/sniff.py).
"""

from __future__ import annotations

from pathlib import Path

import typer


def formats(
    path: Path = typer.Argument(None, metavar="[PATH]", help="Say which format this dump or file is of."),
) -> None:
    """List the formats of dumps that can be read, or say which one PATH is.

    Every command that takes a dump takes any of them, and finds out by itself.
    Exit code 0: it is known, 2: it is no dump."""
    from vllm_accprobe.formats import sniff

    if path is not None:
        _, module, said = sniff.find(path)
        typer.echo(sniff.OWN if module is None else module.NAME)
        if said:
            typer.echo(f"note: {said}", err=True)
        return
    rows = [(sniff.OWN, sniff.OWN_HOW), *((m.NAME, m.HOW) for m in sniff.formats())]
    width = max(len(name) for name, _ in rows)
    for name, how in rows:
        typer.echo(f"{name:<{width}}  {how}")
