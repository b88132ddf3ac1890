"""What SGLang's comparators print, as rows of results: the text that people keep with ``> log`` or paste.

The problem: the same result is printed in three layouts: by dump_comparator ("Check:" and paths), by the comparator as
plain text, and through rich at three verbosities, wrapped at the terminal's width. The idea: `_BEGINS` has the first
line of each kind of record; all lines up to the next first line belong to it, and marks, numbers and reasons are found
in them wherever they stand. What the log concludes itself, its summary, is returned, so that a log that was cut off, or
wrapped within a name, is not taken for whole. Not here: comparator_report.jsonl, which has the same (result_tables).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from vllm_accprobe.dump.files import DumpError, bounded_lines

SUFFIXES = ("", ".txt", ".log", ".out")
COMPARATOR, DUMP_COMPARATOR = "log=comparator", "log=dump_comparator"
_HEAD = 1 << 16
_MOST_LINES = 10_000
_MOST_PATH = 4096
"""Letters: Linux's PATH_MAX."""
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_STEP = r"(?:\[step=(?P<step>\d+)\] ?)?"
_KINDS = {
    DUMP_COMPARATOR: re.compile(r"^Check:\r?\ntarget=\S.* \(duplicate_index=|^Skip: target=\S.* since no ", re.M),
    COMPARATOR: re.compile(r"─ Comparator Config ─|^Config: \{.*'(?:baseline|target)_path': |^(?:\[step=\d+\] )?(?:"
                           r"Raw \[shape\] .* vs |[✅❌] \S+ +(?:── |rel_diff=))", re.M),
}  # fmt: skip
_BEGINS = {
    "checked": re.compile(r"Check:$"),
    "unmatched": re.compile(r"Skip: target=(?P<name>.+) since (?P<why>no .+)"),
    "plain": re.compile(_STEP + r"Raw \[shape\]"),
    "marked": re.compile(_STEP + r"(?P<mark>[✅❌]) (?!rel_diff=|axis=|downcast )(?P<name>\S+)"),
    "skipped": re.compile(r"(?:Skip: |⊘ )(?P<name>\S+)(?: \(step=(?P<step>\d+)\))?"),
    "value": re.compile(r"(?:NonTensor: |═ )(?P<name>\S+)(?: \(step=(?P<step>\d+)\))?"),
    "errored": re.compile(_STEP + r"(?=Error: |\S+ ── e)(?:Error: )?(?P<name>\S+) (?:── errored )?\((?P<why>\w+)"),
}
"""In this order; the first that fits the beginning of a line."""
_SUMMARY = re.compile(r"Summary: (?=\d+ passed)|│ +(?=\d+ passed)")
_COUNT = re.compile(r"(\d{1,18}) (passed|failed|skipped|errored)")
_NUMBERS = re.compile(r"(rel_diff|max_abs|mean_abs)(?:_diff)?=(\S+)")
_MARKS = re.compile(r"([✅❌]) (rel_diff|max_abs_diff|mean_abs_diff)=")
_FAILED = re.compile(r"(?:⚠️?|✗) ?(.+)|❌ (axis=.+)")
"""Lines that make a pair a failed one: a warning, an error, replicas that differ."""
_NAME = re.compile(r"name=(.+?)(?:___|\.pt\b)")
_PATH_STEP = re.compile(r"(?:step|forward_pass_id)=(\d+)___")


def kind_of_log(path: Path) -> str | None:
    """COMPARATOR, DUMP_COMPARATOR, or None for another file. Raises OSError."""
    if path.suffix not in SUFFIXES:
        return None
    with path.open("rb") as f:
        head = _COLOUR.sub("", f.read(_HEAD).decode(errors="replace"))
    return next((kind for kind, begins in _KINDS.items() if begins.search(head)), None)


def rows(path: Path, concluded: Counter[str]) -> Iterator[dict[str, str]]:
    """name, step, category, reason and numbers of each record; of dump_comparator a mark for each of three numbers in
    place of the category. concluded: gets what the log's summary counts. Raises OSError, DumpError."""
    kind, parts, lines = "", dict[str, str](), list[str]()
    for raw in bounded_lines(path):
        line = _COLOUR.sub("", raw.decode(errors="replace")).rstrip()
        fits = ((k, m) for k, begins in _BEGINS.items() if (m := begins.match(line)))
        begun = next(((k, m) for k, m in fits if (k, kind) != ("plain", "checked")), None)
        summary = bool(_SUMMARY.match(line))
        if begun is None and not summary:
            lines.append(line)
            if len(lines) > _MOST_LINES:
                raise DumpError(f"{path}: a record has more than {_MOST_LINES:,} lines: is this a comparator's log?")
            continue
        if kind:
            yield _row(kind, parts, lines)
        kind, parts, lines = "", {}, [line]
        if begun is not None:
            kind, parts = begun[0], {k: v for k, v in begun[1].groupdict().items() if v}
            lines = [line[begun[1].end() :]]
        else:
            concluded.update({word: int(n) for n, word in _COUNT.findall(line)})
    if kind:
        yield _row(kind, parts, lines)


def _row(kind: str, parts: dict[str, str], lines: list[str]) -> dict[str, str]:
    """lines: of the record, the first without what `_BEGINS` has read."""
    text = "\n".join(line for line in lines if "owncast to" not in line)  # has numbers of rounded values
    row = {"name": parts.get("name", ""), "step": parts.get("step", ""), "reason": parts.get("why", "")}
    for number, value in _NUMBERS.findall(text):
        row.setdefault(f"{number}_diff" if number != "rel_diff" else number, value)
    if kind in ("checked", "unmatched"):
        path = row["name"] or next((line for line in lines if line.startswith("target=")), "")
        start = path[:_MOST_PATH]  # the search takes a time that grows with the square of the length
        row["name"] = found[1] if (found := _NAME.search(start)) else path
        row["step"] = found[1] if (found := _PATH_STEP.search(start)) else ""
        marks = {f"{number} mark": mark for mark, number in _MARKS.findall(text)}
        return row | (marks or {"rel_diff mark": "Shape mismatch" if "Shape mismatch" in text else "Skip"})
    failed = [why for line in lines if (m := _FAILED.match(line.strip())) for why in m.groups() if why]
    if kind == "skipped":
        row["reason"] = " ".join(" ".join(lines).replace("── skipped", "").split()).removeprefix("(").removesuffix(")")
    row["reason"] = row["reason"] or next(iter(failed), "")
    if kind in ("skipped", "errored"):
        category = "failed" if failed and kind == "skipped" else kind
    elif kind == "marked":
        category = "passed" if parts["mark"] == "✅" else "failed"
    else:
        good = re.search(r"✓|\[equal\]" if kind == "value" else r"✅ rel_diff=", text)
        category = "passed" if good and not failed else "failed"
    return row | {"category": category}
