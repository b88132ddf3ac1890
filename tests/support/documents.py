"""What README and docs tell a reader to type: commands and pieces of Python, in the order of the page.

The problem: a document goes on promising what the program stopped doing. The idea: everything that looks like something
to type is found by its form alone, so that a new sentence is a new test: code blocks (fenced or indented), and
`accprobe ...` between backticks. A line with brackets is a synopsis and not a command: its options are looked up.
Not here: what is done with them (e2e/test_documents.py).
"""

import ast
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_ROOT = ("README.md", "README.zh.md", "CONTRIBUTING.md", "skills/accprobe/SKILL.md")
_ALL = [*_ROOT, *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
TRANSLATED = {page: page.replace(".zh.md", ".md") for page in _ALL if page.endswith(".zh.md")}
"""Pages in Chinese, and what each is a translation of: their commands are the same ones, and typed in once."""
PAGES = [page for page in _ALL if page not in TRANSLATED]
COMMAND, SYNOPSIS, PYTHON = "command", "synopsis", "python"

_BEGINS = re.compile(r"(accprobe|bash|python|pip|pytest|git|source|export) |[A-Z_]+=\S+|\(cd ")
_SPAN = re.compile(r"`((?:accprobe|bash|python) [^`]+)`")
_WHOLE = {"accprobe doctor", "accprobe formats"}
_FENCE = re.compile(r"```(\w*)\s*$")


@dataclass(frozen=True)
class Snippet:
    """kind: COMMAND, one line for a shell; SYNOPSIS, with [choices|of] options; PYTHON, a block. line: from 1."""

    page: str
    line: int
    kind: str
    text: str


def snippets(page: str) -> list[Snippet]:
    """Everything to type on ``page`` (a path below the checkout), in order."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    found: list[Snippet] = []
    block: list[str] = []
    begin = 0
    language: str | None = None  # of the fence that is open

    def end() -> None:
        found.extend(_of_block(page, begin, "\n".join(block), language))
        block.clear()

    for number, line in enumerate(lines, 1):
        fence = _FENCE.match(line)
        if fence and language is not None:
            end()
            language = None
        elif fence:
            if block:
                end()
            language, begin = fence[1], number + 1
        elif language is not None:
            block.append(line)
        elif line.startswith("    ") or (block and not line):
            begin = begin if block else number
            block.append(line)
        else:
            if block:
                end()
            found.extend(_line(page, number, span, said=True) for span in _SPAN.findall(line))
    if block:
        end()
    return found


def _of_block(page: str, begin: int, text: str, language: str | None) -> list[Snippet]:
    text = textwrap.dedent(text).strip("\n")
    if language == "python" or (language is None and _is_python(text)):
        return [Snippet(page, begin, PYTHON, text)]
    if language not in (None, "", "bash"):
        return []
    found = []
    waiting = ""
    for offset, line in enumerate(text.splitlines()):
        whole = waiting + line
        if whole.endswith("\\"):
            waiting = whole[:-1]
            continue
        waiting = ""
        if _BEGINS.match(whole):
            found.append(_line(page, begin + offset, re.split(r"\s+# ", whole)[0]))
    return found


def _line(page: str, number: int, text: str, *, said: bool = False) -> Snippet:
    """said: between backticks, where a command without its arguments is but a name."""
    words = text.split()
    name = words[0] == "accprobe" and (len(words) == 2 or (words[2].startswith("-") and "--" not in words))
    unfinished = said and name and text not in _WHOLE
    kind = SYNOPSIS if unfinished or re.search(r"\[-|\w\|\w| \.\.\.$", text) else COMMAND
    return Snippet(page, number, kind, text)


def _is_python(text: str) -> bool:
    """Whether it is a program: it imports, opens something, or is nothing but assignments and calls."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return False
    return any(isinstance(n, (ast.Import, ast.ImportFrom, ast.With)) for n in tree.body) or (
        bool(tree.body) and all(_does(n) for n in tree.body)
    )


def _does(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
