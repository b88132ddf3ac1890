"""Runs the large laboratory: ``python -m lab.large``, see docs/laboratory.md.

Exit codes: 0 where what must be shown was shown by the pairs that were judged, 1 where not, 2 for bad usage. Of the
half that is held out only totals are printed, unless ``--show-held-out`` asks for more.
"""

import argparse
import fnmatch
import os
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lab import ROOT

os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # of the engines

from lab import large_judge
from lab.cases import HELD_OUT, TUNED
from lab.large_cases import GOLDENS, KERNELS, PAIRS, Pair, Run
from lab.large_judge import Outcome
from lab.large_runs import Runs, possible


def main(words: Sequence[str] | None = None) -> int:
    args = _arguments(words)
    pairs = [pair for pair in PAIRS if _chosen(args, pair)]
    if not pairs:
        print("error: no pair is chosen; --list shows what there is", file=sys.stderr)
        return 2
    if args.list:
        for pair in pairs:
            print(f"{pair.half:8} {pair.group:10} {pair.name}  {' or '.join(pair.expected)}")
        return 0
    if args.judge_only and not args.judge_only.is_dir():
        print(f"error: --judge-only {args.judge_only} is no directory; make one with --keep", file=sys.stderr)
        return 2
    keep = args.judge_only or args.keep
    if keep is not None:
        return _work(args, keep, pairs)
    with tempfile.TemporaryDirectory(prefix="large-lab-") as folder:
        return _work(args, Path(folder), pairs)


def _work(args: argparse.Namespace, root: Path, pairs: list[Pair]) -> int:
    runs, results = Runs(root), args.results or root / "results.json"
    if args.strengths:
        return _strengths(args, runs, pairs)
    known = large_judge.load(results)
    if args.resume:
        pairs = [pair for pair in pairs if pair.name not in known or (args.replay and known[pair.name].replay is None)]
    if args.judge_only:
        there = [pair for pair in pairs if runs.there(pair.golden) and runs.there(pair.mine)]
        if there != pairs:
            print(f"{len(pairs) - len(there)} of {len(pairs)} pairs are not there and are not judged")
        pairs = there
    pairs = sorted(pairs, key=lambda pair: [KERNELS.index(run.kernels) for run in (pair.mine, pair.golden)])
    waiting = Counter(pair.mine.name for pair in pairs)
    done: dict[str, Outcome] = {}
    failed = 0
    try:
        for pair in pairs:
            try:
                made = _make(runs, pair) if not args.judge_only else []
            except RuntimeError as error:
                failed += 1
                print(f"{_now()} {_shown(args, pair)}: {str(error).splitlines()[0]}", flush=True)
                continue
            for line in made:
                print(f"{_now()} made {line}", flush=True)
            if not args.capture_only:
                done[pair.name] = large_judge.judge(
                    pair, runs.at(pair.golden), runs.at(pair.mine), shlex.split(args.options), replay=args.replay,
                    known=known.get(pair.name) if args.resume else None,
                )  # fmt: skip
                known |= done
                large_judge.save(results, known)
                if pair.half != HELD_OUT or args.show_held_out:
                    print("\n".join(_rendered(done[pair.name])), flush=True)
                else:
                    print(f"{_now()} one pair held out", flush=True)
            waiting[pair.mine.name] -= 1
            if args.delete and not waiting[pair.mine.name]:
                runs.delete(pair.mine)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        failed += 1
    finally:
        runs.close()
    chosen = known if args.resume else done
    shown = [known[pair.name] for pair in PAIRS if pair.name in chosen and _chosen(args, pair)]
    return _ended(shown, failed) if not args.capture_only else int(failed > 0)


def _strengths(args: argparse.Namespace, runs: Runs, pairs: list[Pair]) -> int:
    """A line for each fault whose run is there, with a golden of the same kind; of a pair held out only where it is too
    weak."""
    weak = 0
    for pair in pairs:
        serial = replace(pair.golden, way="serial")
        if pair.clean or not runs.there(pair.mine) or not runs.there(serial):
            continue
        seen = large_judge.strength(runs.at(serial), runs.at(pair.mine), pair.expected).seen
        weak += seen < large_judge.WEAK
        if seen < large_judge.WEAK or args.show_held_out or pair.half != HELD_OUT:
            print(f"{'WEAK' if seen < large_judge.WEAK else '':4} {seen:8.2f} times 2^-8  {pair.name}", flush=True)
    return int(weak > 0)


def _ended(outcomes: list[Outcome], failed: int) -> int:
    whole = large_judge.total("all", outcomes)
    halves = [large_judge.total(half, [o for o in outcomes if o.half == half]) for half in (TUNED, HELD_OUT)]
    for total in (*halves, whole):
        if total.faults or total.clean:
            print("\n".join(total.lines()))
    if failed:
        print(f"{failed} pairs could not be made")
    return int(bool(failed or whole.missed or not outcomes))


def _make(runs: Runs, pair: Pair) -> list[str]:
    """A line for each run that had to be made."""
    lines = []
    for run in (pair.golden, pair.mine):
        began = time.monotonic()
        if runs.make(run):
            lines.append(f"{_hidden(pair, run)} in {time.monotonic() - began:.0f} s")
    return lines


def _hidden(pair: Pair, run: Run) -> str:
    return "a run held out" if run.faults and pair.half == HELD_OUT else run.name


def _shown(args: argparse.Namespace, pair: Pair) -> str:
    return pair.name if pair.half != HELD_OUT or args.show_held_out else "a pair held out"


def _rendered(o: Outcome) -> list[str]:
    lines = [f"{_now()} {'ok ' if o.right else 'BAD'} {o.name}"]
    for name, v in (("default", o.default), ("replay", o.replay)):
        if v is None:
            continue
        where = f" rank {v.rank} of {v.origins}, first {v.culprit}" if v.origins else ""
        cost = f"{v.wall_s:.1f} s, {v.cpu_s:.1f} s of processors, {v.own_mb:.0f} MiB of its own"
        lines.append(
            f"    {name:8} {v.verdict}{where}; {cost} (RssAnon {v.rss_mb:.0f}, one process {v.largest_mb:.0f})"
        )
    if o.expected:
        lines.append(f"    planted  {' or '.join(o.expected)}, off by {o.default.seen} times 2^-8; load {o.load:.1f}")
    return lines


def _now() -> str:
    return time.strftime("%H:%M:%S")


def _chosen(args: argparse.Namespace, pair: Pair) -> bool:
    names = (pair.name, pair.group, pair.mine.model)
    return (
        any(fnmatch.fnmatch(name, glob) for name in names for glob in args.only.split(","))
        and args.half.replace("-", " ") in ("all", pair.half)
        and args.kernels in ("all", pair.mine.kernels)
        and args.golden in ("all", pair.golden.way)
        and possible(pair.mine.kernels)
    )


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lab.large", description="Plant faults in 16 layers of width 1,024."
    )
    parser.add_argument("--list", action="store_true", help="print the pairs that are chosen and do nothing")
    parser.add_argument("--only", default="*", metavar="GLOBS", help="names of pairs, groups or models; commas between")
    parser.add_argument("--half", choices=("all", TUNED, HELD_OUT.replace(" ", "-")), default="all")
    parser.add_argument("--kernels", choices=("all", *KERNELS), default="all", help="those of mine")
    parser.add_argument("--golden", choices=("all", *GOLDENS), default="all", help="how golden was made")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="where runs are kept; those found there are used again"
    )
    parser.add_argument("--judge-only", type=Path, metavar="DIR", help="judge the pairs kept in DIR; starts no engine")
    parser.add_argument("--capture-only", action="store_true", help="make the runs, judge nothing")
    parser.add_argument(
        "--replay", action="store_true", help="judge each pair with --replay as well: the same verdict?"
    )
    parser.add_argument("--options", default="", metavar="WORDS", help="more words for `accprobe compare`")
    parser.add_argument("--strengths", action="store_true", help="how large the planted errors are, in kept runs")
    parser.add_argument("--delete", action="store_true", help="remove each run of mine once its last pair was judged")
    parser.add_argument("--resume", action="store_true", help="leave out the pairs that are in the results already")
    parser.add_argument("--results", type=Path, metavar="FILE", help="outcomes as JSON (results.json with the runs)")
    parser.add_argument("--show-held-out", action="store_true", help="name pairs of the half that is held out, too")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
