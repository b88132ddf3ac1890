"""The fault laboratory, ``python -m lab.faults``: plants each fault in a real vLLM, compares, prints what was named.

The problem and the idea are in docs/laboratory.md. Exit codes: 0 when in all groups that were judged enough culprits
came first and enough verdicts were fail (totals.NEEDED) and no clean pair raised an alarm; 1 when not; 2 for bad
usage. Of the half that is held out only totals are printed, unless ``--show-held-out`` asks for more.
Not here: the cases (cases.py, generated.py), running (bench.py), judging (judging.py), sums (table.py).
"""

import argparse
import fnmatch
import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from support import kernels

from lab.bench import KERNELS, Bench, capture, in_turn, kernels_of
from lab.cases import HELD_OUT, TUNED, Case
from lab.generated import EVERY
from lab.judging import Outcome, Pair, judge_kept, pairs_across, pairs_of, run_cases
from lab.strength import strengths
from lab.totals import page, row, save, text, totals
from lab.ways import ACROSS, CLEAN, MORE_CLEAN

Clean = tuple[str, str, str]


def main() -> int:
    args = _arguments()
    pairs = [pair for pair in _pairs(args, Path()) if _asked_for(args, pair)]
    if not pairs:
        print(
            f"error: nothing matches --only {args.only!r} --group {args.group!r} --half {args.half}; "
            "--list shows what there is",
            file=sys.stderr,
        )
        return 2
    for name, folder in (("--judge-only", args.judge_only), ("--across", args.across)):
        if folder and not folder.is_dir():
            print(f"error: {name} {folder} is no directory; make one with --keep", file=sys.stderr)
            return 2
    cases = list(dict.fromkeys(pair.case.name for pair in pairs if pair.case))
    chosen = [case for case in EVERY if case.name in cases]
    clean = [(p.model, p.golden, p.mine) for p in pairs if p.case is None and ":" not in p.golden]
    if args.list:
        for pair in pairs:
            faults = pair.case.faults if pair.case else ""
            print(f"{pair.half:8} {pair.name:24} {pair.model:12} {pair.golden:8} → {pair.mine:9} {faults}")
        return 0
    if args.strengths:
        for line in strengths(args.judge_only or args.keep, chosen, held_out=args.show_held_out):
            print(line, flush=True)
        return 0
    if args.capture_only:
        return _capture(args, chosen, clean)

    keep = args.judge_only or args.keep
    root = Path(keep or tempfile.mkdtemp(prefix="faultlab-"))
    root.mkdir(parents=True, exist_ok=True)
    if args.results:
        args.results.mkdir(parents=True, exist_ok=True)
    seen = _Seen(args.results or (root if keep else None), args.show_held_out)
    try:
        if args.judge_only:
            # The pairs again, now with their places; the processes of a pool read them from the disk.
            kept = [replace(p, pack=args.pack) for p in _pairs(args, root) if _asked_for(args, p)]
            absent = judge_kept(kept, seen.done, args.jobs)
            if absent:
                print(f"{absent} of {len(kept)} pairs are not there and were not judged")
        else:
            _run(args, root, chosen, clean, seen)
    finally:
        if keep is None:
            shutil.rmtree(root, ignore_errors=True)
    found = totals(seen.outcomes)
    print(text(found))
    if args.markdown:
        args.markdown.write_text(page(seen.ordered(), held_out=args.show_held_out, details=False))
    return 0 if found and not any(total.missed for total in found) else 1


class _Seen:
    """Outcomes as they come, from any thread: kept, saved, and those of the tuned half printed."""

    def __init__(self, root: Path | None, held_out: bool) -> None:
        self.root, self.held_out = root, held_out
        self.outcomes: list[Outcome] = []
        self._names = [case.name for case in EVERY]
        self._lock = threading.Lock()

    def done(self, outcome: Outcome) -> None:
        with self._lock:
            self.outcomes.append(outcome)
            if self.root is not None:
                every = save(self.root, [outcome], self._names)
                (self.root / "results.md").write_text(page(every, held_out=self.held_out))
            if outcome.half == HELD_OUT and not self.held_out:
                return
            mark, name, model, ways, verdict, culprit, rank, factor, sentence = row(outcome)
            print(f"{mark:4}{name:24} {model:12} {ways:19} {verdict:5} {rank:8} {factor:>7} {culprit}", flush=True)
            if sentence:
                print(f"{'':28} {sentence}", flush=True)

    def ordered(self) -> list[Outcome]:
        place = {name: i for i, name in enumerate(self._names)}
        return sorted(self.outcomes, key=lambda o: place.get(o.name, len(place)))


def _pairs(args: argparse.Namespace, root: Path) -> list[Pair]:
    replay, own = not args.no_replay, kernels_of(root)
    pairs = pairs_of(root, EVERY, CLEAN + MORE_CLEAN, replay, own)
    if args.across:
        pairs += pairs_across((args.across, root), (kernels_of(args.across), own), ACROSS, replay)
    return pairs


def _asked_for(args: argparse.Namespace, pair: Pair) -> bool:
    names = (pair.name, pair.model, *([] if pair.case else ["clean"]))
    groups = (pair.group, f"{pair.group}/{pair.golden}")
    return (
        any(fnmatch.fnmatch(name, args.only) for name in names)
        and any(fnmatch.fnmatch(group, args.group) for group in groups)
        and args.half.replace("-", " ") in ("all", pair.half)
    )


def _capture(args: argparse.Namespace, cases: list[Case], clean: list[Clean]) -> int:
    if args.keep is None:
        print("error: --capture-only needs --keep DIR", file=sys.stderr)
        return 2
    args.keep.mkdir(parents=True, exist_ok=True)
    (args.keep / KERNELS).write_text(kernels.current())
    across = [pair for pair in ACROSS if any(pair[0] == model for model, *_ in clean)]
    bench = Bench(args.keep, models=args.models)
    try:
        failed = capture(bench, in_turn(cases), clean + across, lambda line: print(_now(), line, flush=True))
    finally:
        bench.close()
    print(f"{_now()} failed: {len(failed)} {' '.join(failed)}")
    return 1 if failed else 0


def _now() -> str:
    return time.strftime("%H:%M:%S")


def _run(args: argparse.Namespace, root: Path, cases: list[Case], clean: list[Clean], seen: _Seen) -> None:
    """One model after another, or ``jobs`` models at a time: their engines are apart, so that goldens are shared."""
    (root / KERNELS).write_text(kernels.current())

    def one(model: str) -> None:
        bench = Bench(root, root / f"_log-{model}", args.models)
        try:
            mine = [c for c in cases if c.model == model]
            pairs = [p for p in clean if p[0] == model]
            run_cases(bench, mine, pairs, seen.done, not args.no_replay, kernels.current())
        finally:
            bench.close()

    models = list(dict.fromkeys([c.model for c in cases] + [p[0] for p in clean]))
    if args.jobs > 1:  # its names are loaded when they are read, which two threads cannot do at once
        from transformers import AutoConfig, AutoModelForCausalLM  # noqa: F401
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(one, models))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lab.faults", description="Plant faults in real engines and see whether the culprit is named."
    )
    parser.add_argument("--only", default="*", metavar="GLOB", help="names of cases or models; 'clean' for clean pairs")
    parser.add_argument("--group", default="*", metavar="GLOB", help="groups, as 'kind' or 'trained/float32'")
    parser.add_argument("--half", choices=("all", TUNED, HELD_OUT.replace(" ", "-")), default="all")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="models run, or pairs judged, at a time (1)")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep all pairs there; runs found there are not redone"
    )
    parser.add_argument("--judge-only", type=Path, metavar="DIR", help="judge the pairs kept in DIR; starts no engine")
    parser.add_argument("--across", type=Path, metavar="DIR", help="pairs with the runs of other kernels, kept in DIR")
    parser.add_argument("--capture-only", action="store_true", help="make the runs in --keep DIR, judge nothing")
    parser.add_argument("--strengths", action="store_true", help="how large the planted errors are, in kept runs")
    parser.add_argument("--models", type=Path, metavar="DIR", help="where the weights are (DIR/_models)")
    parser.add_argument("--results", type=Path, metavar="DIR", help="where results.json and .md go (with the pairs)")
    parser.add_argument("--no-replay", action="store_true", help="judge by comparing alone, without a replay")
    parser.add_argument("--pack", type=Path, metavar="DIR", help="with --judge-only: by packs of the goldens, in DIR")
    parser.add_argument("--show-held-out", action="store_true", help="list cases of the half that is held out, too")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there, too")
    parser.add_argument("--list", action="store_true", help="print the pairs and do nothing")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
