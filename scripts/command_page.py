"""docs/cli.md from the commands' own --help, so that no page repeats an option by hand.

    python scripts/command_page.py            writes docs/cli.md anew
    python scripts/command_page.py --check    exit code 1 where it is not what this would write

What all commands have in common is text at the page's beginning, up to the line MARK, and is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
MARK = "<!-- From here on by scripts/command_page.py. -->"


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """(name, command) of all that --help shows."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield " ".join(path), command
        return
    for name, one in inner.items():
        if not one.hidden:
            yield from commands(one, (*path, name))


def section(name: str, command: Any) -> Iterator[str]:
    from vllm_accprobe.cli.options import filled

    yield f"### {name}"
    yield ""
    usage = [p.metavar or (p.name or "").upper() for p in command.params if p.param_type_name == "argument"]
    yield f"`accprobe {' '.join([name, *usage])}`"
    yield ""
    yield from (command.help or "").replace("\b", "").strip().splitlines()
    yield ""
    yield "| option | what |"
    yield "| --- | --- |"
    for p in command.params:
        if p.param_type_name != "option" or p.hidden or "--help" in p.opts:
            continue
        names = ", ".join(f"`{word}`" for word in (*p.opts, *p.secondary_opts))
        value = "" if p.is_flag else f" {p.metavar or p.name.upper()}"
        default = "" if isinstance(p.default, bool) or not isinstance(p.default, (int, float, str, Path)) else p.default
        also = f" Default: {default}." if default not in ("", 0) and p.show_default is not False else ""
        text = filled(p.help or "", name).replace("|", "\\|").replace("<", "&lt;")
        yield f"| {names}{value.replace('|', chr(92) + '|')} | {text}{also} |"
    yield ""


def page(text: str) -> str:
    from vllm_accprobe.cli import build

    kept = text.partition(MARK)[0].rstrip()
    lines = [kept, "", MARK, "", "## Commands", ""]
    for name, command in commands(typer.main.get_command(build())):
        lines += section(name, command)
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    made = page(text)
    if "--check" in sys.argv[1:]:
        return int(made != text)
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
