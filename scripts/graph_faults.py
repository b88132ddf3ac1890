"""Plants each fault of tests/platform/graph_cases.py in a compiled or captured engine, compares, and prints a table.

    python scripts/graph_faults.py --keep DIR                # what lies there already is not run again
    python scripts/graph_faults.py --keep DIR --only 'one-*' # a glob over cases, models and golden>mine
    python scripts/graph_faults.py --keep DIR --half tuned   # or held-out; see docs/laboratory.md on halves
    python scripts/graph_faults.py --list

Exit codes: 0 when no more than one fault of twelve or more is missed and no clean pair fails, 1 when not, 2 for bad
usage. Not here: the cases (graph_cases.py), running (graph_lab.py), judging (lab/judging.py).
"""

from __future__ import annotations

import argparse
import fnmatch
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
for folder in (".", "tests", "tests/platform", "scripts"):
    sys.path.insert(0, str(ROOT / folder))

from graph_cases import CASES, CLEAN  # noqa: E402
from graph_lab import GraphBench, made, pairs_of  # noqa: E402
from support.engine import EngineError  # noqa: E402

from lab.judging import Outcome, Pair, judge  # noqa: E402
from lab.totals import row  # noqa: E402


def main() -> int:
    """Runs and judges what was asked for."""
    asked = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    asked.add_argument("--keep", type=Path, help="where the runs lie, and go on from")
    asked.add_argument("--only", default="*", help="glob over cases, models and golden>mine; clean: only clean pairs")
    asked.add_argument("--half", choices=("tuned", "held-out"))
    asked.add_argument("--list", action="store_true")
    args = asked.parse_args()
    root = args.keep or Path(tempfile.mkdtemp(prefix="graphfaults-"))
    bench = GraphBench(root)
    pairs = [pair for pair in pairs_of(bench, CASES, CLEAN) if _wanted(pair, args)]
    if not pairs:
        print(f"error: nothing matches --only {args.only!r}; --list shows what there is", file=sys.stderr)
        return 2
    if args.list:
        for pair in pairs:
            print(f"{pair.half:8} {pair.name:28} {pair.model:10} {pair.golden} → {pair.mine}: {pair.expected}")
        return 0
    outcomes: list[Outcome] = []
    try:
        for pair in pairs:
            try:
                made(bench, pair)
                outcomes.append(judge(pair))
            except EngineError as error:
                told = Outcome(pair.name, pair.model, pair.golden, pair.mine, pair.expected, f"error: {error}")
                outcomes.append(replace(told, verdict=told.verdict.splitlines()[0], half=pair.half))
            print(" | ".join(row(outcomes[-1])), flush=True)
    finally:
        bench.close()
        if args.keep is None:
            shutil.rmtree(root, ignore_errors=True)
    return _total(outcomes)


def _wanted(pair: Pair, args: argparse.Namespace) -> bool:
    if args.half and pair.half != args.half.replace("-", " "):
        return False
    if args.only == "clean":
        return pair.case is None
    names = (pair.name, pair.model, f"{pair.golden}>{pair.mine}")
    return any(fnmatch.fnmatchcase(name, args.only) for name in names)


def _total(outcomes: list[Outcome]) -> int:
    """The last lines, and the exit code. A fault counts once: as missed, where any golden missed it."""
    alarms = sum(not o.right for o in outcomes if o.clean)
    clean = sum(o.clean for o in outcomes)
    missed = 0
    for half in ("tuned", "held out"):
        faults = {o.name for o in outcomes if not o.clean and o.half == half}
        right = {name for name in faults if all(o.first for o in outcomes if o.name == name)}
        missed += len(faults) - len(right)
        words = [o.worded for o in outcomes if o.name in faults and o.worded is not None]
        print(
            f"{half}: culprit first {len(right)} of {len(faults)} faults; expected words {sum(words)} of {len(words)}"
        )
    print(f"clean pairs: {alarms} alarms of {clean}")
    return int(bool(alarms) or missed > 1)


if __name__ == "__main__":
    sys.exit(main())
