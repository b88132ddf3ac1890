"""Plants each fault of tests/platform/inductor_cases.py in an engine that inductor compiles, compares, prints a table.

    python scripts/inductor_faults.py --keep DIR               # makes what is not there, and judges everything
    python scripts/inductor_faults.py --keep DIR --make        # makes what is not there
    python scripts/inductor_faults.py --keep DIR --judge       # judges what is there, and runs no engine
    python scripts/inductor_faults.py --keep DIR --only 'i-*'  # a glob over names of cases and models; --list
    python scripts/inductor_faults.py --keep DIR --judge --without-replay

An outcome is `exact` (the first origin is the fault's module), `gap` (it is a gap that contains the module), `parent`
or `child` (a module that encloses it, or lies in it: right about the place, less sharp), `WRONG` (another operator),
`nobody` (it fails without an origin) or `missed` (the verdict is pass). Exit codes: 0 where the shares FAILED and
PLACED are reached, 1 where not, 2 for bad usage.
Not here: the cases (inductor_cases.py), running (graph_lab.py).
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
for folder in (".", "tests", "tests/platform", "scripts"):
    sys.path.insert(0, str(ROOT / folder))

from graph_lab import GraphBench, made, pairs_of  # noqa: E402
from inductor_cases import CASES, CLEAN  # noqa: E402
from support.engine import EngineError  # noqa: E402

from lab.judging import Pair, compared  # noqa: E402

FAILED, PLACED = 0.85, 0.90
"""Of the faults, the share whose verdict is fail; of these, the share whose operator, or a gap that contains it,
comes first. No other operator may be named, and no clean pair may fail."""
RIGHT = ("exact", "gap", "parent", "child")


def outcome(result: Any, module: str) -> str:
    """Which of the docstring's words fits."""
    if result.verdict == "pass":
        return "missed"
    if not result.origins:
        return "nobody"
    return _fits(result.origins[0], module)


def _fits(origin: Mapping[str, Any], module: str) -> str:
    gap = origin.get("gap")
    if gap:
        return "gap" if module in gap["contains"] else "WRONG"
    named = str(origin["module"])
    if named == module:
        return "exact"
    if module.startswith(f"{named}."):
        return "parent"
    return "child" if named.startswith(f"{module}.") else "WRONG"


def main() -> int:
    """Runs and judges what was asked for."""
    asked = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    asked.add_argument("--keep", type=Path, required=True, help="where the runs lie, and go on from")
    asked.add_argument("--only", default="*", help="glob over names of cases and models; clean: only clean pairs")
    asked.add_argument("--judge", action="store_true", help="run no engine")
    asked.add_argument("--make", action="store_true", help="judge nothing")
    asked.add_argument("--without-replay", action="store_true")
    asked.add_argument("--list", action="store_true")
    args = asked.parse_args()
    bench = GraphBench(args.keep)
    pairs = [pair for pair in pairs_of(bench, CASES, CLEAN) if _wanted(pair, args.only)]
    if not pairs:
        print(f"error: nothing matches --only {args.only!r}; --list shows what there is", file=sys.stderr)
        return 2
    found: Counter[str] = Counter()
    try:
        for pair in pairs:
            if args.list:
                print(f"{pair.name:24} {pair.model:14} {pair.golden} → {pair.mine}: {pair.expected}")
                continue
            if not args.judge:
                try:
                    made(bench, pair)
                except EngineError as error:
                    print(f"{pair.name} | error: {str(error).splitlines()[0]}", flush=True)
                    continue
            if pair.there and not args.make:
                found[_row(pair, not args.without_replay)] += 1
    finally:
        bench.close()
    return 0 if args.list or args.make else _total(found)


def _wanted(pair: Pair, only: str) -> bool:
    if only == "clean":
        return pair.case is None
    return any(fnmatch.fnmatchcase(name, only) for name in (pair.name, pair.model))


def _row(pair: Pair, replay: bool) -> str:
    """Prints the pair's line; its outcome, with `clean` before it where nothing was planted."""
    result = compared(*pair.at, replay)
    if isinstance(result, str):
        print(f"{pair.name} | {pair.model} | {pair.mine} | {result}", flush=True)
        return "error"
    word = outcome(result, pair.expected[0]) if pair.case else f"clean {result.verdict}"
    first = result.origins[0] if result.origins else {}
    gap = first.get("gap")
    named = f"{gap['after']} … {gap['before']}" if gap else str(first.get("module", ""))
    facts = (first.get("evidence", ""), f"{first['times']:.3g}x" if first.get("times") else "", len(result.origins))
    cells = (pair.name, pair.model, pair.mine, word, *(pair.expected or ("",)), named, *map(str, facts))
    print(" | ".join(cells), flush=True)
    return word


def _total(found: Counter[str]) -> int:
    """The last lines, and the exit code."""
    faults = sum(n for word, n in found.items() if not word.startswith("clean"))
    failed = faults - found["missed"] - found["error"]
    right = sum(found[word] for word in RIGHT)
    clean, alarms = found["clean pass"] + found["clean fail"], found["clean fail"]
    words = ", ".join(f"{n} {word}" for word, n in sorted(found.items()) if not word.startswith("clean"))
    print(f"faults: {failed} of {faults} fail; the operator or a gap that contains it {right} of {failed} ({words})")
    print(f"clean pairs: {alarms} alarms of {clean}")
    good = failed >= FAILED * faults and right >= PLACED * failed and not found["WRONG"] and not alarms
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
