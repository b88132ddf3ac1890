"""``accprobe formats [PATH]``: which dumps can be read, and how each is recognised.

Not here: the recognising itself (formats/sniff.py).
"""

from __future__ import annotations

from pathlib import Path

import typer


def formats_command(
    path: Path = typer.Argument(None, metavar="[PATH]", help="Say which format this dump or file is of."),
) -> None:
    """List the formats of dumps that can be read, or say which one PATH is.

    Every command that takes a dump takes any of them, and finds out by itself."""
    from vllm_accprobe.formats import sniff

    if path is not None:
        from vllm_accprobe.dump.reader import DumpError

        if not path.exists():
            raise DumpError(f"{path} does not exist: name a dump's directory or file")
        module = None if sniff.is_own(path) else sniff.recognise(path)
        if module is None and not sniff.is_own(path):
            typer.echo(f"accprobe: {path} is of no format that is known", err=True)
            raise typer.Exit(3)
        typer.echo(sniff.OWN if module is None else module.NAME)
        return
    rows = [(sniff.OWN, sniff.OWN_HOW), *((m.NAME, m.HOW) for m in sniff.formats())]
    width = max(len(name) for name, _ in rows)
    for name, how in rows:
        typer.echo(f"{name:<{width}}  {how}")
