"""Runs the fault laboratory: plants each fault in a real vLLM, compares with a golden, and prints what was named.

The problem and the idea are told in docs/faults.md. Exit codes: 0 when enough culprits came first (38 of 40, scaled),
enough verdicts were fail (39 of 40) and no clean pair raised an alarm; 1 when not; 2 for bad usage.
Not here: the cases (tests/faults/fault_cases.py), the running and judging (tests/faults/fault_lab.py).
"""

from __future__ import annotations

import argparse
import fnmatch
import shutil
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
for folder in ("tests", "tests/faults", "scripts"):
    sys.path.insert(0, str(ROOT / folder))

from fault_cases import CASES  # noqa: E402
from fault_lab import Bench, Outcome, Totals, judge_kept, markdown, row, run_cases, save, totals  # noqa: E402
from fault_ways import CLEAN, EASY  # noqa: E402


def main() -> int:
    args = _arguments()
    cases = [c for c in CASES if fnmatch.fnmatch(c.name, args.only) or fnmatch.fnmatch(c.model, args.only)]
    clean = [p for p in CLEAN if fnmatch.fnmatch("clean", args.only) or fnmatch.fnmatch(p[0], args.only)]
    if not cases and not clean:
        print(f"error: no case and no model matches --only {args.only!r}; --list shows them", file=sys.stderr)
        return 2
    if args.list:
        for c in cases:
            print(f"{c.name:24} {c.model:12} {c.golden:8} → {c.mine:9} {c.faults}")
        return 0
    if args.judge_only and not args.judge_only.is_dir():
        print(f"error: --judge-only {args.judge_only} is no directory; make one with --keep", file=sys.stderr)
        return 2

    names = [c.name for c in CASES]
    outcomes: list[Outcome] = []
    lock = threading.Lock()
    keep = args.judge_only or args.keep
    root = Path(keep or tempfile.mkdtemp(prefix="faultlab-"))
    root.mkdir(parents=True, exist_ok=True)

    def done(outcome: Outcome) -> None:
        with lock:
            outcomes.append(outcome)
            if keep is not None:
                every = save(root, [outcome], names)
                (root / "results.md").write_text(markdown(every, _totals(every).line()))
            mark, name, model, ways, verdict, culprit, rank, factor, sentence = row(outcome)
            print(f"{mark:4}{name:24} {model:12} {ways:19} {verdict:5} {rank:8} {factor:>7} {culprit}", flush=True)
            if sentence:
                print(f"{'':28} {sentence}", flush=True)

    try:
        if args.judge_only:
            judge_kept(root, cases, clean, done, not args.no_replay)
        else:
            _run(root, cases, clean, done, args.jobs, not args.no_replay)
    finally:
        if keep is None:
            shutil.rmtree(root, ignore_errors=True)
    outcomes.sort(key=lambda o: names.index(o.name) if o.name in names else len(names))
    result = _totals(outcomes)
    print(result.line())
    if args.markdown:
        args.markdown.write_text(markdown(outcomes, result.line(), details=False))
    return 0 if outcomes and result.good else 1


def _totals(outcomes: list[Outcome]) -> Totals:
    return totals(outcomes, [c.name for c in CASES if c.subtle], EASY)


def _run(root: Path, cases: list, clean: list, done, jobs: int, replay: bool) -> None:
    """One model after another, or ``jobs`` models at a time: their engines are apart, so that goldens are shared."""

    def one(model: str) -> None:
        bench = Bench(root, root / f"_log-{model}")
        try:
            mine = [c for c in cases if c.model == model]
            run_cases(bench, mine, [p for p in clean if p[0] == model], done, replay)
        finally:
            bench.close()

    models = list(dict.fromkeys([c.model for c in cases] + [p[0] for p in clean]))
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, models))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Plant faults in real engines and see whether the culprit is named.")
    parser.add_argument("--only", default="*", metavar="GLOB", help="names of cases or models; 'clean' for clean pairs")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="models that run at the same time (1)")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep all pairs there; runs found there are not redone"
    )
    parser.add_argument("--judge-only", type=Path, metavar="DIR", help="judge the pairs kept in DIR; starts no engine")
    parser.add_argument("--no-replay", action="store_true", help="judge by comparing alone, without a replay")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there, too")
    parser.add_argument("--list", action="store_true", help="print the cases and do nothing")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
