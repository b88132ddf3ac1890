"""The page of the matrix, and the file beside it that holds its rows: text from values, nothing is run.

The problem: a whole run takes half an hour to two, so rows are made at different times, and a table that is edited by
hand is believed by nobody. The idea: PAGE.json holds the rows as they were measured, each with its day and kernels; a
run replaces the rows of the releases that it tried and keeps the others; the page's tables are written from that file
alone, between two markers.
Not here: what a row says (matrix_runs.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matrix_runs import NEWEST, OWN, OWN_V1
from packaging.version import Version
from vendor_wheels import placed

Row = Mapping[str, Any]
_COLUMNS = ("release", "torch, transformers", "with 0.32", "tokens", "with itself", "V1 with V2", "skipped")
BEGIN = "<!-- written by scripts/matrix.sh -->"
END = "<!-- end of what scripts/matrix.sh writes -->"
_AVX2 = "AVX2 build"


def merged(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """All rows, those of a release that was tried now in place of its earlier ones, by version and runner."""
    fresh = list(new)
    tried = {row["release"] for row in fresh}
    kept = [row for row in old if row["release"] not in tried]
    return sorted([*kept, *fresh], key=lambda row: (Version(row["release"]), row.get("runner") or ""))


def good(row: Row) -> bool:
    """Whether nothing of this row is ours to mend: it runs, every comparison passed with all rows there, or vLLM itself
    refused the case."""
    if row.get("error"):
        return False
    cases = row["cases"]
    if "error" in cases.get("plain", {}):  # one that was not asked for says nothing
        return False
    return all(_case_good(name, case) for name, case in cases.items())


def _case_good(name: str, case: Row) -> bool:
    if "error" in case:
        return case["whose"] == "vLLM"
    return all(_right(one, name == "n-gram") for one in case["compared"].values())


def _right(one: Row, fewer_rows: bool) -> bool:
    missing = one.get("rows_only_golden", 0) + one.get("rows_only_mine", 0)
    return one.get("verdict") == "pass" and not one["problems"] and (fewer_rows or not missing)


def read(data: Path) -> list[Row]:
    """The rows of an earlier run; none where there is no file. Raises ValueError, in one line, for another file."""
    if not data.exists():
        return []
    try:
        rows = json.loads(data.read_text(encoding="utf-8"))["rows"]
        assert all(isinstance(row["release"], str) for row in rows)
    except (ValueError, KeyError, TypeError, AssertionError):
        raise ValueError(f"{data} holds no rows of a matrix: move it away, or name another page") from None
    return rows


def write(page: Path, data: Path, rows: Sequence[Row]) -> None:
    """The data, and what stands between the markers of the page; a page that is not there has nothing else."""
    data.write_text(json.dumps({"rows": list(rows)}, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    # From the file, whose keys are sorted: rows of an earlier run come from there, too.
    page.write_text(placed(before(page), "\n".join(lines(read(data))), BEGIN, END), encoding="utf-8")


def before(page: Path) -> str:
    return page.read_text(encoding="utf-8") if page.exists() else f"{BEGIN}\n{END}\n"


def lines(rows: Sequence[Row]) -> list[str]:
    """The tables. Rows of releases without an engine are one line each; an error that many have is written once."""
    ran = [row for row in rows if not row.get("error")]
    out = _table(_COLUMNS, [_first(row) for row in rows])
    names = list(dict.fromkeys(name for row in ran for name in row["cases"] if name not in ("plain", "again")))
    errors = _Errors()
    out += ["", *(f"- {name}: {_further(name, ran, errors)}" for name in names), ""]
    notes = [f"- {_names(of)}: {where}" for where, of in _grouped(rows, _where)]
    notes += [f"- {_name(row)}: {note}" for row in rows for note in _notes(row)]
    notes += [f"- [{number}] {_cell(error)}" for error, number in errors.items()]
    return [*out, *notes]


class _Errors(dict[str, int]):
    """Error → its number on the page."""

    def of(self, case: Row) -> str:
        return f"{case.get('whose', '?')} [{self.setdefault(case['error'], len(self) + 1)}]"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    text = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in text]


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


def _name(row: Row) -> str:
    return f"{row['release']} {row.get('runner') or ''}".strip()


def _first(row: Row) -> Sequence[str]:
    head = [_name(row), ", ".join((row.get("torch", "-"), row.get("transformers", "?")))]
    tail = [str(_skipped(row))]
    if row.get("error"):
        return [*head, f"does not run: {row['error']}", *["-"] * 3, *tail]
    plain, again = (row["cases"].get(name, {}) for name in ("plain", "again"))
    if not plain:
        return [*head, *["-"] * 4, *tail]
    if "error" in plain:
        return [*head, _failed(plain), *["-"] * 3, *tail]
    one = plain["compared"].get(NEWEST)
    other = plain["compared"].get(OWN_V1)
    rest = [_itself(again), _short(other) if other else "-", *tail]
    if one is None:
        return [*head, "is 0.32", "-", *rest]
    return [*head, _short(one), "-" if "error" in one else _tokens(one), *rest]


def _where(row: Row) -> str:
    """Processor, kernels, day, version: what most rows have in common."""
    kernels = " ".join(row.get("kernels") or ()) or "-"
    return ", ".join((row.get("capability", "?"), kernels, row.get("day", "?"), f"accprobe {row.get('accprobe', '?')}"))


def _grouped(rows: Sequence[Row], what: Callable[[Row], str]) -> list[tuple[str, list[Row]]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(what(row), []).append(row)
    return list(found.items())


def _names(rows: Iterable[Row]) -> str:
    return ", ".join(map(_name, rows))


def _skipped(row: Row) -> int:
    """What all comparisons of the row with 0.32 have skipped; the reasons stand in the data."""
    found = [(case.get("compared") or {}).get(NEWEST) or {} for case in (row.get("cases") or {}).values()]
    return sum(sum((one.get("skipped") or {}).values()) for one in found)


def _itself(again: Row) -> str:
    if "error" in again:
        return _failed(again)
    one = again.get("compared", {}).get(OWN)
    return _short(one) if one else "-"


def _further(name: str, rows: Sequence[Row], errors: _Errors) -> str:
    """What came of a case, and in which rows, the most frequent last and without their names."""
    ran = [row for row in rows if name in row["cases"]]
    found = sorted(_grouped(ran, lambda row: _outcome(row["cases"][name], errors)), key=lambda one: len(one[1]))
    said = [f"{_cell(what)} ({_names(of)})" for what, of in found[:-1]]
    return "; ".join([*said, ("else " if said else "") + _cell(found[-1][0])])


def _outcome(case: Row, errors: _Errors) -> str:
    if "error" in case:
        return errors.of(case)
    said = "; ".join(_verdict(one) if "error" not in one else one["error"] for one in case["compared"].values())
    return (said or "0.32's own") + (f", {case['accepted']} of {case['drafted']} drafts" if "drafted" in case else "")


def _notes(row: Row) -> list[str]:
    note = row.get("note") or ""
    # What is said of a release's AVX2 build says nothing of a row that another one computed.
    found = [] if not note or (_AVX2 in note and "_C_AVX2" not in (row.get("kernels") or ())) else [note]
    for name, case in (row.get("cases") or {}).items():
        for one in (case.get("compared") or {}).values():
            found += [f"{name}: {_cell(problem)[:200]}" for problem in one.get("problems") or ()]
    return found


def _failed(case: Row) -> str:
    return f"{case.get('whose', '?')}: {case['error']}"


def _short(one: Row) -> str:
    return one["error"] if "error" in one else f"{_verdict(one)}, {_share(one)} of {one['pairs']}"


def _verdict(one: Row) -> str:
    missing = [(n, side) for side in ("golden", "mine") if (n := one[f"rows_only_{side}"])]
    told = one["verdict"] + (" after a replay" if one.get("replayed") else "")
    return told + "".join(f", {n} rows only in {side}" for n, side in missing)


def _share(one: Row) -> str:
    """Cut, not rounded: 100 % says all."""
    if one["bit_identical"] == one["pairs"]:
        return "100 %"
    return f"{int(1000 * one['bit_identical'] / max(one['pairs'], 1)) / 10:.1f} %"


def _tokens(one: Row) -> str:
    return f"{one['tokens']}, equal" if not one["flipped"] else f"{one['tokens']}, {one['flipped']} differ"
