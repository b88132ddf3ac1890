"""``accprobe golden``: packs of a golden."""

from __future__ import annotations

import typer

golden = typer.Typer(help="Packs: a golden in one small file.", rich_markup_mode=None)
