"""The laboratory of causes, ``python -m lab.causes``: plants faults of known cause, compares, judges the cause given.

Each case is a run with a plant and a comparison with default settings; its outcome is one of `OUTCOMES`. A cause at any
other operator than the planted one is a wrong one, and so is any cause of a fault that is of no family. Exit codes: 0
where enough causes are right and few enough wrong (`Total.missed`), 1 where not, 2 for bad usage. Of the half that is
held out only totals are printed, and its outcomes are kept packed, unless ``--show-held-out`` lists them.
Not here: the cases and what is right (cause_cases.py), the plants (planted/accprobe_cause_kinds.py), runs (bench.py).
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from preloaded_vllm import FORKED, preloaded
from support.engine import EngineHost

from lab import cause_models
from lab.bench import HOSTS, ONE_THREAD, Bench
from lab.cases import HELD_OUT, TUNED
from lab.cause_cases import CASES, NONE, CauseCase
from lab.judging import compared
from lab.totals import share

RIGHT, WRONG, SILENT, NOT_FOUND, ERROR = "right", "wrong", "none", "not found", "error"
OUTCOMES = (RIGHT, WRONG, SILENT, NOT_FOUND, ERROR)
"""``none``: the operator is an origin, without a cause. ``not found``: it is none. ``error``: nothing was compared."""
LEAST_RIGHT, MOST_WRONG = 0.75, 0.02
IMPORT_S = 600.0
"""Chosen: for vLLM's import, which takes 5 minutes on a busy machine."""
RESULTS, PACKED = "causes.json", "causes-held-out.bin"


@dataclass(frozen=True)
class Outcome:
    """One case. outcome: of `OUTCOMES`. rank: of the planted operator among the origins, 0 where it is none. said: by
    module, the causes that were given; planted, expected: in words. seconds: to compare; run_s: to make the run."""

    name: str
    model: str
    family: str
    half: str
    outcome: str
    verdict: str = ""
    culprit: str = ""
    rank: int = 0
    said: dict[str, dict[str, Any]] = field(default_factory=dict)
    planted: str = ""
    expected: str = ""
    seconds: float = 0.0
    run_s: float = 0.0


SHARED = "rotary_emb"
"""vLLM makes one rotary embedding for all layers with equal settings (``get_rope``): a plant in one is in all."""


def _planted(one: CauseCase, module: str, cause: dict[str, Any]) -> bool:
    """Whether the fault was planted in ``module``, or in an object that its layer shares, and the cause is right."""
    if module in one.case.expected:
        return True
    paths = {re.sub(r"\d+", "#", m) for m in one.case.expected if m.endswith(SHARED)}
    return one.right is not None and re.sub(r"\d+", "#", module) in paths and one.right.accepts(cause)


def judged(one: CauseCase, verdict: str, origins: Sequence[dict[str, Any]], **more: Any) -> Outcome:
    """The outcome of a comparison. origins: as in compare.json."""
    modules = [o["module"] for o in origins]
    rank = next((k + 1 for k, m in enumerate(modules) if m in one.case.expected), 0)
    said = {o["module"]: o["cause"] for o in origins if o.get("cause")}
    own = next((said[m] for m in one.case.expected if m in said), None)
    elsewhere = [m for m in said if not _planted(one, m, said[m])]
    if one.right is None:
        outcome = WRONG if said else SILENT if rank else NOT_FOUND
    elif elsewhere or (own is not None and not one.right.accepts(own)):
        outcome = WRONG
    else:
        outcome = RIGHT if own is not None else SILENT if rank else NOT_FOUND
    r = one.right
    expected = "" if r is None else f"{' or '.join(r.families)}: {r.words} {r.values} {r.where}"
    return Outcome(
        one.name, one.case.model, one.family, one.half, outcome, verdict, modules[0] if modules else "", rank, said,
        json.dumps(one.case.faults[0]), expected, **more,
    )  # fmt: skip


@dataclass(frozen=True)
class Total:
    """Outcomes of one group, counted. Those of faults of no family are apart: there, ``none`` is right."""

    name: str
    counts: dict[str, int]

    @classmethod
    def of(cls, name: str, outcomes: Iterable[Outcome]) -> Total:
        found = [o.outcome for o in outcomes]
        return cls(name, {word: found.count(word) for word in OUTCOMES})

    @property
    def cases(self) -> int:
        return sum(self.counts.values())

    @property
    def missed(self) -> list[str]:
        """What is required and not reached, in words."""
        right, wrong = self.counts[RIGHT], self.counts[WRONG]
        if self.name.startswith(NONE):
            return [f"{wrong} causes of faults of no family"] if wrong else []
        found = [f"right {right} of {self.cases}"] if right < LEAST_RIGHT * self.cases else []
        return found + ([f"wrong {wrong} of {self.cases}"] if wrong > MOST_WRONG * self.cases else [])


def totals(outcomes: Sequence[Outcome]) -> list[Total]:
    """Of each half: all plants, each family, each architecture, and the faults of no family."""
    found = []
    for half in (TUNED, HELD_OUT):
        own = [o for o in outcomes if o.half == half]
        planted = [o for o in own if o.family != NONE]
        groups = {f"all, {half}": planted}
        for what in ("family", "model"):
            names = sorted({getattr(o, what) for o in planted})
            groups |= {f"{name}, {half}": [o for o in planted if getattr(o, what) == name] for name in names}
        groups[f"{NONE}, {half}"] = [o for o in own if o.family == NONE]
        found += [Total.of(name, group) for name, group in groups.items() if group]
    return found


def table(found: Sequence[Total]) -> str:
    """Markdown."""
    lines = ["| group | cases | right | wrong | none | not found, error |", "| --- | --- | --- | --- | --- | --- |"]
    for t in found:
        c = t.counts
        lost, right = f"{c[NOT_FOUND]}, {c[ERROR]}", c[SILENT if t.name.startswith(NONE) else RIGHT]
        lines.append(f"| {t.name} | {t.cases} | {share(right, t.cases)} | {c[WRONG]} | {c[SILENT]} | {lost} |")
    return "\n".join([*lines, ""])


def unlike(outcomes: Iterable[Outcome]) -> str:
    """What should have been said, and what was, of each case that is not right."""
    lines = []
    for o in outcomes:
        if o.outcome in (RIGHT, ERROR) or (o.family == NONE and o.outcome == SILENT):
            continue
        lines += [f"- **{o.outcome}** {o.name} ({o.family})", f"  - planted `{o.planted}`, origin {o.rank or 'none'}"]
        lines += [f"  - should be `{o.expected}`" if o.expected else "  - should be no cause"]
        lines += [f"  - {m}: {c['family']}: {c['text']} `{c.get('parameter')}`" for m, c in o.said.items()]
        if not o.rank:
            lines.append(f"  - first origin: {o.culprit or 'none'}, verdict {o.verdict}")
    return "\n".join([*lines, ""])


class Results:
    """Outcomes by name, kept in a folder: those held out packed, so that nobody reads them by accident."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.Lock()
        self.by_name: dict[str, Outcome] = {}
        known, names = {f.name for f in fields(Outcome)}, {one.name for one in CASES}
        for path, text in ((root / RESULTS, bytes), (root / PACKED, zlib.decompress)):
            for o in json.loads(text(path.read_bytes())) if path.exists() else []:
                if o["name"] in names:
                    self.by_name[o["name"]] = Outcome(**{k: v for k, v in o.items() if k in known})

    def add(self, outcome: Outcome) -> None:
        with self._lock:
            self.by_name[outcome.name] = outcome
            held_out = outcome.half == HELD_OUT
            own = [asdict(o) for o in self.by_name.values() if (o.half == HELD_OUT) == held_out]
            text = json.dumps(own, indent=1).encode()
            path = self.root / (PACKED if held_out else RESULTS)
            new = path.with_name(f"{path.name}.new")
            new.write_bytes(zlib.compress(text) if held_out else text)
            new.replace(path)


class CauseBench(Bench):
    """A bench whose models are those of cause_models.py, too, and whose engines are forked by ``python``, a process
    that has imported vLLM (scripts/preloaded_vllm.py), unless that is None."""

    def __init__(self, root: Path, log: Path, models: Path | None = None, python: Path | None = None) -> None:
        super().__init__(root, log, models)
        self._python = python or Path(sys.executable)

    def model(self, name: str) -> Path:
        return cause_models.make(name, self.models / name)

    def _new_host(self, kind: str, log: Path) -> EngineHost:
        return EngineHost(log, HOSTS[kind], python=self._python)


@contextmanager
def forking(root: Path, wanted: bool) -> Iterator[Path | None]:
    """A command that runs Python files in forks of a process that has imported vLLM; None where none is wanted."""
    if not wanted:
        yield None
        return
    # Engines are eager; what vLLM would compile all the same, Cohere's norm, takes minutes.
    env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_ACCPROBE")} | ONE_THREAD
    with preloaded(root / "_vllm", env | {"TORCH_COMPILE_DISABLE": "1"}, IMPORT_S) as bin_:
        yield bin_ / FORKED


def operator_alone(one: CauseCase, mine: Path) -> tuple[str, list[dict[str, Any]]]:
    """The verdict and the origins where the planted operator alone is checked, in this process and without a golden,
    which is quicker. What a comparison finds elsewhere, and whether it finds the operator, is not seen."""
    from vllm_accprobe.dump.reader import model_of
    from vllm_accprobe.formats import open_dump
    from vllm_accprobe.opcheck.calls.records import Calls
    from vllm_accprobe.opcheck.causes.examine import explained_by
    from vllm_accprobe.opcheck.machine_precision import of_machine
    from vllm_accprobe.opcheck.proof import make_proof
    from vllm_accprobe.opcheck.registry import default_references
    from vllm_accprobe.opcheck.run.check_calls import Options
    from vllm_accprobe.opcheck.run.pair import Task, check_task

    dump = open_dump(mine)
    calls, references = Calls(dump, model_of(dump.run)), default_references()
    options = Options(measured=False, budget=calls.budget())
    tasks = [Task(0, rank, tap) for rank, tap, _ in calls.taps(one.case.expected)]
    rows, _ = of_machine.settle([row for task in tasks for row in check_task(calls, task, references, options).rows])
    wrong = make_proof.wrong(rows)
    causes = explained_by(calls, references, wrong.values(), rows, chance=calls.budget().output)
    return "fail" if wrong else "pass", [{"module": tap, "cause": causes.get(tap)} for tap in wrong]


def run_case(bench: CauseBench, one: CauseCase, *, judge_only: bool, alone: bool) -> Outcome | None:
    """None where the run is not there and none is to be made. alone: as `operator_alone`."""
    golden, seconds = bench.root / "_runs" / f"{one.case.model}-{one.case.golden}", 0.0
    mine = bench.root / one.name / "mine"
    try:
        if judge_only:
            if not all((run / "run.json").exists() for run in ((mine,) if alone else (mine, golden))):
                return None
        elif alone:
            mine, seconds = bench.faulty_run(one.case)
        else:
            golden, mine, seconds = bench.pair(one.case)
    except RuntimeError as error:
        return _failed(one, str(error))
    began = time.monotonic()
    if alone:
        verdict, origins = operator_alone(one, mine)
    else:
        result = compared(golden, mine, True)
        if isinstance(result, str):
            return _failed(one, result)
        verdict, origins = result.verdict, result.origins
    return judged(one, verdict, origins, seconds=time.monotonic() - began, run_s=seconds)


def _failed(one: CauseCase, why: str) -> Outcome:
    line = next(iter(why.splitlines()), "")
    planted = json.dumps(one.case.faults[0])
    return Outcome(one.name, one.case.model, one.family, one.half, ERROR, line, planted=planted)


def main(words: Sequence[str] | None = None) -> int:
    args = _arguments(words)
    cases = [one for one in CASES if _chosen(args, one)]
    keep = args.judge_only or args.keep
    if not cases or (args.judge_only and not args.judge_only.is_dir()) or (args.resume and keep is None):
        what = "nothing matches, see --list" if not cases else "--judge-only and --resume need a folder of runs"
        print(f"error: {what}", file=sys.stderr)
        return 2
    if args.list:
        for one in cases:
            print(f"{one.half:8} {one.family:10} {one.name}  {one.right.words if one.right else 'no cause'}")
        return 0
    root = Path(keep or tempfile.mkdtemp(prefix="causelab-"))
    root.mkdir(parents=True, exist_ok=True)
    try:
        return _work(args, root, cases)
    finally:
        if keep is None:
            shutil.rmtree(root, ignore_errors=True)


def _work(args: argparse.Namespace, root: Path, cases: list[CauseCase]) -> int:
    results = Results(root)
    known = {name for name, o in results.by_name.items() if args.resume and o.outcome != ERROR}
    waiting = [one for one in cases if one.name not in known]
    done: set[str] = {one.name for one in cases} - {one.name for one in waiting}

    def of_model(own: list[CauseCase], python: Path | None) -> None:
        bench = CauseBench(root, root / f"_log-{own[0].case.model}", args.models, python)
        try:
            for one in own:
                outcome = run_case(bench, one, judge_only=args.judge_only is not None, alone=args.operator_only)
                if outcome is None:
                    continue
                results.add(outcome)
                done.add(one.name)
                _say(outcome, args.show_held_out)
                if args.delete:
                    shutil.rmtree(root / one.name, ignore_errors=True)
                    (root / one.name).with_name(f"{one.name}.done").unlink(missing_ok=True)
        finally:
            bench.close()

    models = [[c for c in waiting if c.case.model == model] for model in dict.fromkeys(o.case.model for o in waiting)]
    with forking(root, bool(models) and args.judge_only is None) as python, ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(of_model, models, [python] * len(models)))
    outcomes = [results.by_name[one.name] for one in cases if one.name in done]
    found = totals(outcomes)
    print(table(found))
    shown = [o for o in outcomes if o.half != HELD_OUT or args.show_held_out]
    if args.markdown:
        args.markdown.write_text(f"{table(found)}\n{unlike(shown)}")
    missed = [f"{t.name}: {word}" for t in found if t.name.startswith(("all", NONE)) for word in t.missed]
    print("\n".join(missed) or "all that is required")
    return 0 if outcomes and not missed else 1


def _say(o: Outcome, held_out: bool) -> None:
    now = time.strftime("%H:%M:%S", time.gmtime())
    if o.half == HELD_OUT and not held_out:
        print(f"{now} a case held out", flush=True)
        return
    said = "; ".join(f"{m}: {c['family']}: {c['text']}" for m, c in o.said.items())
    print(f"{now} {o.outcome:9} {o.name} ({o.run_s:.0f} + {o.seconds:.0f} s) {said or o.verdict}", flush=True)


def _chosen(args: argparse.Namespace, one: CauseCase) -> bool:
    names = (one.name, one.case.model, one.family)
    globs: Callable[[str], bool] = lambda glob: any(fnmatch.fnmatch(name, glob) for name in names)  # noqa: E731
    return any(map(globs, args.only.split(","))) and args.half.replace("-", " ") in ("all", one.half)


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lab.causes", description="Plant faults of known cause and see which cause is given."
    )
    parser.add_argument("--only", default="*", metavar="GLOBS", help="names of cases, models or families")
    parser.add_argument("--half", choices=("all", TUNED, HELD_OUT.replace(" ", "-")), default="all")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="models at a time (1)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep runs and outcomes there; no run is made twice")
    parser.add_argument("--judge-only", type=Path, metavar="DIR", help="judge the runs kept in DIR; starts no engine")
    parser.add_argument("--models", type=Path, metavar="DIR", help="where the weights are (DIR/_models)")
    parser.add_argument("--operator-only", action="store_true", help="check the planted operator alone: quick")
    parser.add_argument("--resume", action="store_true", help="leave out the cases that have an outcome already")
    parser.add_argument("--delete", action="store_true", help="remove each run once it was judged")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table and what is not right there")
    parser.add_argument("--show-held-out", action="store_true", help="name cases of the half that is held out, too")
    parser.add_argument("--list", action="store_true", help="print the cases and do nothing")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
