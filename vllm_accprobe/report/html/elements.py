"""What the page's sections are made of: text that is safe, sentences, tables.

The problem: names come from dumps of strangers. The idea: `escaped` is the only way from a value to markup.
Not here: the sections (sections.py, further.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from vllm_accprobe.report.text import capital, more, safe

MAX_LIST = 200
"""Lines of one list on the page; compare.json has them all."""


def escaped(value: object, limit: int = 400) -> str:
    """Any value as text that is safe in markup and in a quoted attribute."""
    return escape(safe(value, limit))


def breakable(name: object) -> str:
    """A module path that may wrap after its dots."""
    return escaped(name).replace(".", ".<wbr>")


def as_sentence(text: str) -> str:
    """With a capital and a full stop."""
    return escape(capital(text) + ".")


def html_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], numeric: frozenset[int] | set[int] = frozenset()
) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(f"<{tag}{' class=num' if i in numeric else ''}>{c}</{tag}>" for i, c in enumerate(row))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{cells("th", head)}</tr></thead><tbody>{body}</tbody></table></div>'


def more_of(total: int, shown: int, where: str) -> str:
    return "".join(f'<p class="hint">{line}</p>' for line in more(total, shown, f"compare.json, {where}"))
