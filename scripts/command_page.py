"""docs/cli.md from the commands' own --help, so that no page repeats an option by hand.

An option that several commands have with the same text stands in one list; each command names it.

    python scripts/command_page.py            writes docs/cli.md anew
    python scripts/command_page.py --check    exit code 1 where it is not what this would write

What all commands have in common is text at the page's beginning, up to the line MARK, and is kept.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterator
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


def options(name: str, command: Any) -> dict[str, str]:
    """First name of each option → its line. The text above MARK has --json, and what --out begins with."""
    from vllm_accprobe.cli.options import filled

    rows = {}
    for p in command.params:
        if p.param_type_name != "option" or p.hidden or p.opts[0] in ("--help", "--json"):
            continue
        names = ", ".join(f"`{word}`" for word in (*p.opts, *p.secondary_opts))
        value = "" if p.is_flag else f" {p.metavar or p.name.upper()}"
        plain = not isinstance(p.default, bool) and isinstance(p.default, (int, float, str, Path))
        default = getattr(p.default, "value", p.default) if plain else ""
        also = f" Default: {default}." if default != "" and p.show_default is not False else ""
        text = filled(p.help or "", name).removeprefix("Where the results go: ")
        rows[p.opts[0]] = f"- {names}{value}: {text}{also}".replace("<", "&lt;")
    return rows


def section(name: str, command: Any, shared: Collection[str]) -> Iterator[str]:
    """shared: lines that stand among those of several commands."""
    yield f"### {name}"
    yield ""
    usage = [p.metavar or (p.name or "").upper() for p in command.params if p.param_type_name == "argument"]
    yield f"`accprobe {' '.join([name, *usage])}`"
    yield ""
    yield from (command.help or "").replace("\b", "").strip().splitlines()
    yield ""
    rows = options(name, command)
    if own := [row for row in rows.values() if row not in shared]:
        yield from (*own, "")
    if also := [f"`{option}`" for option, row in rows.items() if row in shared]:
        yield f"[Also](#options-of-several-commands): {', '.join(also)}."
        yield ""


def page(text: str) -> str:
    from vllm_accprobe.cli import build

    kept = text.partition(MARK)[0].rstrip()
    known = list(commands(typer.main.get_command(build())))
    count = Counter(pair for name, command in known for pair in options(name, command).items())
    by_name: dict[str, str] = {}  # of several texts for one name the most frequent
    for (option, row), n in count.most_common():
        if n > 1:
            by_name.setdefault(option, row)
    shared = by_name.values()
    lines = [kept, "", MARK, "", "## Options of several commands", "", *shared, "", "## Commands", ""]
    for name, command in known:
        lines += section(name, command, shared)
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
