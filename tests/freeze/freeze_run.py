"""Runs the cases with whichever accprobe is on PYTHONPATH, keeps what is text of them, and compares two such runs.

The problem: the outputs must stay as they are while every module moves, so nothing here may know a module. The idea:
the package is driven through ``vllm_accprobe.cli.main`` alone, in the directory that holds ``corpus``, with relative
paths; said.txt holds each command line with what it printed, complained and ended with. Two ways to compare:
`differences` of two texts, where a floating-point number may differ by `RELATIVE` (another machine's sums), and
`bytes_differ` of two trees, where nothing may differ but `_timeless`'s. Not here: the dumps (freeze_corpus.py), the
cases (freeze_cases.py, freeze_commands.py).

    python tests/freeze/freeze_run.py run HOME PACKAGE    makes HOME/out from HOME/corpus with the package in PACKAGE
    python tests/freeze/freeze_run.py diff A B            exit code 1 and what differs where two such trees do
    python tests/freeze/freeze_run.py write HOME          makes tests/freeze/expected from HOME/out
"""

import contextlib
import csv
import io
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from freeze_cases import Case  # noqa: E402
from freeze_commands import CASES  # noqa: E402

EXPECTED = HERE / "expected"
RELATIVE = 1e-6
"""How far a floating-point number may be off on another machine, of its size."""
ABSOLUTE = 1e-12
"""And absolutely: what is left where two equal numbers were subtracted."""
SETTINGS = {"COLUMNS": "120", "TZ": "UTC", "NO_COLOR": "1", "PYTHONDONTWRITEBYTECODE": "1"}
FOREIGN = ("GITHUB_", "VLLM_", "ACCPROBE_")
"""Environment variables that begin so are not the cases'."""
KIT = "operator_kit/"
PART = re.compile(rb"\.\d+\.part\b")
"""A file or folder that is half made, by its process: msprobe's dump.json names the one that it was made in."""
TIME = re.compile(rb"_20\d{12}(?=\.csv)")
"""When it was written, at the end of the name of a file of msprobe's."""
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w])")


# --- to run ---


def run(name: str, home: Path) -> Path:
    """Runs the case in ``home``, which holds ``corpus``; returns ``home``/out/<name> with all that came of it."""
    from vllm_accprobe.cli import main

    out = home / "out" / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    said = []
    with _place(home):
        for line in CASES[name].lines:
            words = [w.replace("{out}", f"out/{name}") for w in shlex.split(line)]
            if words and words[0] == "copy":
                shutil.copytree(words[1], words[2])
                continue
            stdout, stderr = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
                code = main(words)
            said.append(f"$ accprobe {line}\n{stdout.getvalue()}")
            said += [f"stderr: {e}\n" for e in stderr.getvalue().splitlines()]
            said.append(f"exit {code}\n\n")
    (out / "said.txt").write_text("".join(said), encoding="utf-8")
    return out


@contextlib.contextmanager
def _place(home: Path) -> Iterator[None]:
    """In ``home``, with the settings of every case."""
    before, here = dict(os.environ), Path.cwd()
    for name in before:
        if name.startswith(FOREIGN):
            del os.environ[name]
    os.environ.update(SETTINGS)
    os.chdir(home)
    try:
        yield
    finally:
        os.chdir(here)
        os.environ.clear()
        os.environ.update(before)


# --- what is stored ---


def kept(out: Path, case: Case) -> dict[str, str]:
    """name → text of what is stored of a case's directory: said.txt, the names of all files, and what it keeps."""
    home = out.parents[1]
    files = dict(sorted(_files(out).items()))
    found = {"said.txt": (out / "said.txt").read_text(encoding="utf-8")}
    if len(files) > 1:
        found["files.txt"] = "".join(f"{f}\n" for f in files)
    for file, path in files.items():
        if file != "said.txt" and any(fnmatch(file, pattern) for pattern in case.keep):
            text = path.read_text(encoding="utf-8-sig")
            text = _thinned(text) if case.thin and file.endswith(".csv") else text
            text = _visible(text) if file.endswith(".html") else text
            found[file.replace("/", "--") + ("" if file.endswith((".csv", ".json", ".md")) else ".txt")] = text
    return {name: _placed(text, home) for name, text in found.items()}


def _files(root: Path) -> dict[str, Path]:
    """By relative name; without gentest's copies of our own sources, which change with every word of a docstring."""
    paths = (p for p in root.rglob("*") if p.is_file() or p.is_symlink())
    found = {_timeless(str(p.relative_to(root)).encode()).decode(): p for p in paths}
    return {name: p for name, p in found.items() if KIT not in name}


def _timeless(data: bytes) -> bytes:
    """With placeholders for what no two runs have in common: a half-made file's process and a file's time."""
    return TIME.sub(b"_TIME", PART.sub(b".<PID>.part", data))


def _placed(text: str, home: Path) -> str:
    """``home``, a half-made file's process and what is of this installation as placeholders. A journal's length, too:
    it changes with the last digit of a statistic, that is with the processor and with who was faster to take it."""
    text = _timeless(text.encode()).decode()
    text = text.replace("\r\n", "\n").replace(str(home.resolve()), "<HOME>").replace(str(home), "<HOME>")
    text = re.sub(r'(/journal\.jsonl": )\d+', r"\1<BYTES>", text)
    return re.sub(r"accprobe \d+\.\d+\.\d+\S*", "accprobe <VERSION>", text)


def _thinned(text: str) -> str:
    header, *rows = csv.reader(io.StringIO(text))
    at = header.index("status") if "status" in header else None
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    for i, row in enumerate(rows):
        if i % 4 == 0 or (at is not None and row[at] not in ("pass", "fail")):
            writer.writerow(row)
    return f"{out.getvalue()}{len(rows)} rows in all\n"


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._hidden = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._hidden = self._hidden or (tag if tag in ("script", "style", "svg") else "")

    def handle_endtag(self, tag: str) -> None:
        self._hidden = "" if tag == self._hidden else self._hidden

    def handle_data(self, data: str) -> None:
        if data.strip() and not self._hidden:
            self.lines.append(" ".join(data.split()))


def _visible(page: str) -> str:
    """What a reader of an HTML page sees, a line per piece."""
    parser = _Text()
    parser.feed(page)
    return "".join(f"{line}\n" for line in parser.lines)


# --- to compare ---


def differences(expected: str, found: str) -> list[str]:
    """What differs, a line each, the first ten; nothing where only floating-point numbers do, and by little."""
    if expected == found:
        return []
    old, new = expected.split("\n"), found.split("\n")
    lines = enumerate(zip(old, new, strict=False), 1)
    said = [f"line {i}:\n  - {_cut(a, b)}\n  + {_cut(b, a)}" for i, (a, b) in lines if not _same(a, b)]
    if len(old) != len(new):
        said.append(f"{len(old)} lines expected, {len(new)} found")
    return said[:10]


def _same(a: str, b: str) -> bool:
    if a == b:
        return True
    if NUMBER.split(a) != NUMBER.split(b):
        return False
    return all(map(_near, NUMBER.findall(a), NUMBER.findall(b)))


def _near(a: str, b: str) -> bool:
    """Whole numbers, and one number written in two ways, must be the same text."""
    if a == b:
        return True
    x, y = float(a), float(b)
    floats = any(c in t for t in (a, b) for c in ".e")
    return floats and x != y and math.isclose(x, y, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def bytes_differ(a: Path, b: Path) -> list[str]:
    """Files of one tree only, and files whose bytes differ, with the first line that does."""
    trees = [_files(a), _files(b)]
    said = [f"{name}: only in {a if name in trees[0] else b}" for name in sorted(trees[0].keys() ^ trees[1].keys())]
    for name in sorted(trees[0].keys() & trees[1].keys()):
        old, new = (_timeless(t[name].read_bytes()) for t in trees)
        if old == new:
            continue
        pairs = zip(*(data.decode("utf-8", "backslashreplace").split("\n") for data in (old, new)), strict=False)
        line, (x, y) = next(((i, p) for i, p in enumerate(pairs, 1) if p[0] != p[1]), (0, ("", "")))
        where = f"line {line}" if line else f"{len(old)} bytes against {len(new)}"
        said.append(f"{name}: {where}\n  - {_cut(x, y)}\n  + {_cut(y, x)}")
    return said


def _cut(line: str, other: str) -> str:
    """The part of a long line around the first character that differs."""
    at = next((i for i, (p, q) in enumerate(zip(line, other, strict=False)) if p != q), min(len(line), len(other)))
    return line[max(0, at - 100) : at + 100]


def main(words: list[str]) -> int:
    command, first, *rest = words
    home = Path(first).resolve()
    if command == "run":
        import vllm_accprobe

        package = Path(vllm_accprobe.__file__).resolve().parent
        if rest and package != Path(rest[0]).resolve():
            print(f"the package is {package}, not {rest[0]}", file=sys.stderr)
            return 2
        for name in CASES:
            run(name, home)
    elif command == "write":
        shutil.rmtree(EXPECTED, ignore_errors=True)
        for name, case in CASES.items():
            for file, text in kept(home / "out" / name, case).items():
                path = EXPECTED / name / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    elif command == "diff":
        found = bytes_differ(home, Path(rest[0]).resolve())
        print("\n".join(found) or "no output differs by a byte")
        return 1 if found else 0
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
