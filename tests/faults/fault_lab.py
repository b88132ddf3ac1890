"""The fault laboratory: makes the runs that the cases name, compares them, and says how well the culprit was found.

The problem: sixty faults in six models against seven kinds of golden are a thousand engines if each pair makes its own.
The idea: a `Bench` owns the engines of one model, one after another in shared child processes, and remembers each run
under its way; a case needs one run of its own, the faulty one. Comparing is apart from running: kept pairs are judged
again without an engine, which is how the judging rules are worked on.
Not here: what is planted (fault_cases.py), ways and clean pairs (fault_ways.py), the command line (scripts/faults.py).
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from fault_cases import Case
from fault_ways import CLEAN, TRANSFORMERS, WAYS
from support.engine import TP2_ENV, V2_ENV, EngineHost
from tiny_model import make

BF16 = 2.0**-8
"""One unit of the errors told here: the relative spacing of bfloat16."""
_ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
_HOSTS = {"v1": _ONE_THREAD, "v2": V2_ENV | _ONE_THREAD, "tp2": TP2_ENV}


@dataclass(frozen=True)
class Outcome:
    """How one pair was judged.

    name, model, golden, mine: of the case; for a clean pair the name says so. expected: empty for a clean pair.
    verdict: pass, fail, or the one line of an error. culprit: the first origin, or "". rank: of the true module among
    the origins, 1 is first, 0 is not there. found: also the second fault, where there is one. factor: error created by
    the true module (or the culprit) over its limit. sentence: the shape of the error, in words. worded: whether the
    expected words are in it (None: none were expected). seen: errors around the true module, in units of 2^-8.
    seconds: to compare. run_s: to make the faulty run, 0 where it was there already. at: when it was judged (UTC).
    """

    name: str
    model: str
    golden: str
    mine: str
    expected: tuple[str, ...]
    verdict: str
    culprit: str = ""
    rank: int = 0
    found: bool = False
    factor: float = 0.0
    sentence: str = ""
    worded: bool | None = None
    seen: str = ""
    origins: int = 0
    seconds: float = 0.0
    run_s: float = 0.0
    at: str = field(default_factory=lambda: time.strftime("%H:%M:%S", time.gmtime()))

    @property
    def clean(self) -> bool:
        return not self.expected

    @property
    def right(self) -> bool:
        return self.verdict == "pass" if self.clean else self.verdict == "fail" and self.rank == 1 and self.found


class Bench:
    """Makes the runs of one or more models under ``root``. Runs that lie there already are used again."""

    def __init__(self, root: Path, log: Path | None = None) -> None:
        self.root = root
        self.log = log or root / "_log"
        self._hosts: dict[str, EngineHost] = {}

    def model(self, name: str) -> Path:
        return make(name, self.root / "_models" / name)

    def clean_run(self, model: str, way: str) -> Path:
        return self._run(self.root / "_runs" / f"{model}-{way}", model, way, None)

    def pair(self, case: Case) -> tuple[Path, Path, float]:
        """(golden, mine, seconds that mine took)."""
        folder = self.root / case.name
        folder.mkdir(parents=True, exist_ok=True)
        planted, mine = folder / "fault.json", folder / "mine"
        text = json.dumps([case.model, case.mine, case.faults])
        if not planted.exists() or planted.read_text() != text:
            shutil.rmtree(mine, ignore_errors=True)
        golden = self.clean_run(case.model, case.golden)
        link(folder / "golden", golden)
        began = time.monotonic()
        self._run(mine, case.model, case.mine, case.faults)
        planted.write_text(text)
        return golden, mine, time.monotonic() - began

    def close(self) -> None:
        for host in self._hosts.values():
            host.close()
        self._hosts.clear()

    def _run(self, out: Path, model: str, name: str, faults: list[dict[str, Any]] | None) -> Path:
        done = out.with_name(f"{out.name}.done")
        if done.exists() and out.exists():
            return out
        shutil.rmtree(out, ignore_errors=True)
        way = WAYS[name]
        if way.host == TRANSFORMERS:
            from fault_transformers import capture

            capture(self.model(model), way.requests(model), out)
        else:
            self._host(way.host).capture(
                self.model(model), way.requests(model), out=out, fault=faults, how=way.how, **way.engine
            )
        done.touch()
        return out

    def _host(self, kind: str) -> EngineHost:
        if kind not in self._hosts:
            self._hosts[kind] = EngineHost(self.log.with_name(f"{self.log.name}-{kind}.txt"), _HOSTS[kind])
        return self._hosts[kind]


def link(at: Path, to: Path) -> None:
    if at.is_symlink():
        at.unlink()
    at.symlink_to(Path("..") / to.parent.name / to.name)


def judge(case: Case, golden: Path, mine: Path, run_s: float = 0.0, replay: bool = True) -> Outcome:
    """Compares a faulty pair, as the command does, and looks for the planted module."""
    began = time.monotonic()
    base: dict[str, Any] = {
        "name": case.name,
        "model": case.model,
        "golden": case.golden,
        "mine": case.mine,
        "expected": case.expected,
        "run_s": run_s,
    }
    result = _compare(golden, mine, replay)
    if isinstance(result, str):
        return Outcome(**base, verdict=result)
    modules = [o["module"] for o in result.origins]
    rank = next((i + 1 for i, m in enumerate(modules) if m in case.expected), 0)
    blamed = result.origins[max(rank - 1, 0)] if modules else {}
    sentence = _sentence(blamed)
    return Outcome(
        **base,
        verdict=result.verdict,
        culprit=modules[0] if modules else "",
        rank=rank,
        found=case.second is None or case.second in modules,
        factor=_factor(blamed),
        sentence=sentence,
        worded=_worded(case.words, sentence) if case.words else None,
        seen=around(result, case.expected[0]),
        origins=len(modules),
        seconds=time.monotonic() - began,
    )


def judge_clean(model: str, ways: tuple[str, str], golden: Path, mine: Path, replay: bool = True) -> Outcome:
    began = time.monotonic()
    base: dict[str, Any] = {
        "name": f"clean {model}",
        "model": model,
        "golden": ways[0],
        "mine": ways[1],
        "expected": (),
    }
    result = _compare(golden, mine, replay)
    if isinstance(result, str):
        return Outcome(**base, verdict=result)
    blamed = result.origins[0] if result.origins else {}
    return Outcome(
        **base,
        verdict=result.verdict,
        culprit=blamed.get("module", ""),
        factor=_factor(blamed),
        sentence=_sentence(blamed),
        seen=around(result, blamed["module"]) if blamed else "",
        origins=len(result.origins),
        seconds=time.monotonic() - began,
    )


def around(result: Any, module: str) -> str:
    """The worst row's error of each input and output of ``module`` over all steps, in units of 2^-8."""
    worst: dict[str, float] = {}
    failed: set[str] = set()
    for pair in result.pairs:
        if pair.tap == module and pair.worst_row_rel_l2 is not None:
            worst[pair.role] = max(worst.get(pair.role, 0.0), pair.worst_row_rel_l2)
            if pair.status == "fail":
                failed.add(pair.role)
    if not worst:
        return f"{module} was not compared"
    return ", ".join(f"{role} {v / BF16:.3g}{' FAIL' if role in failed else ''}" for role, v in worst.items())


def _compare(golden: Path, mine: Path, replay: bool) -> Any:
    """The Comparison, or what went wrong in one line: the other cases still count."""
    from vllm_accprobe.cli.replaying import Asked, begun, replayed
    from vllm_accprobe.comparison.engine import compare

    try:
        asked = Asked(golden.resolve(), mine, None if replay else False, None, None)
        with begun(asked) as running, tempfile.TemporaryDirectory() as out:
            return replayed(compare(asked.golden, mine), asked, running, Path(out))
    except Exception as e:
        return f"error: {type(e).__name__}: {e}".splitlines()[0]


def _factor(origin: dict[str, Any]) -> float:
    created, floor = origin.get("created") or 0.0, origin.get("floor") or 0.0
    return created / floor if floor else math.inf if created else 0.0


def _sentence(origin: dict[str, Any]) -> str:
    return str(origin.get("shape") or origin.get("sentence") or "")


def _worded(words: Iterable[str], sentence: str) -> bool:
    import re

    return all(re.search(w, sentence, re.I) for w in words)


# --- totals and tables -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Totals:
    faults: int
    failed: int
    first: int
    subtle: int
    subtle_first: int
    other_golden: int
    worded: int
    words: int
    clean: int
    alarms: int

    @property
    def good(self) -> bool:
        """38 of 40 culprits first, 39 of 40 verdicts fail, scaled; no false alarm."""
        missed, passed = self.faults - self.first, self.faults - self.failed
        return missed <= self.faults // 20 and passed <= self.faults // 40 and self.alarms == 0

    def line(self) -> str:
        return (
            f"{self.faults} faults ({self.other_golden} against another kind of golden): verdict fail {self.failed}, "
            f"culprit first {self.first}; of {self.subtle} subtle ones {self.subtle_first}; "
            f"shape in the expected words {self.worded} of {self.words}; "
            f"{self.clean} clean pairs, {self.alarms} false alarms"
        )


def totals(outcomes: Sequence[Outcome], subtle: Iterable[str], same_kind: Iterable[str] = ()) -> Totals:
    faults = [o for o in outcomes if not o.clean]
    clean = [o for o in outcomes if o.clean]
    subtle, same_kind = set(subtle), set(same_kind)
    return Totals(
        faults=len(faults),
        failed=sum(o.verdict == "fail" for o in faults),
        first=sum(o.right for o in faults),
        subtle=sum(o.name in subtle for o in faults),
        subtle_first=sum(o.right for o in faults if o.name in subtle),
        other_golden=sum(o.golden not in same_kind for o in faults),
        worded=sum(o.worded is True for o in faults),
        words=sum(o.worded is not None for o in faults),
        clean=len(clean),
        alarms=sum(not o.right for o in clean),
    )


COLUMNS = ("", "case", "model", "golden → mine", "verdict", "culprit named", "rank", "× limit", "shape")


def row(o: Outcome) -> tuple[str, ...]:
    mark = "ok" if o.right else "BAD"
    culprit = o.culprit if o.rank <= 1 else f"{o.culprit} (true: {o.expected[0]})"
    rank = "" if o.clean else f"{o.rank or '-'} of {o.origins}"
    factor = f"{o.factor:.3g}" if o.culprit else ""
    return mark, o.name, o.model, f"{o.golden} → {o.mine}", o.verdict, culprit, rank, factor, o.sentence


def markdown(outcomes: Sequence[Outcome], summary: str, *, details: bool = True) -> str:
    """The table as a page; with details, also what the rows around each missed module look like."""
    lines = [summary, "", "| " + " | ".join(COLUMNS) + " |", "| " + " | ".join("---" for _ in COLUMNS) + " |"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row(o)) + " |" for o in outcomes]
    if details:
        lines += [
            "",
            "The worst row's error at the planted module (or the one accused), in units of 2^-8; seconds:",
            "",
        ]
        lines += [f"- {'' if o.right else '**BAD** '}{o.name} ({o.golden} → {o.mine}): {_told(o)}" for o in outcomes]
    return "\n".join([*lines, ""])


def _told(o: Outcome) -> str:
    expected = f"expected {' or '.join(o.expected)}; " if o.expected and not o.right else ""
    return f"{expected}{o.seen}; run {o.run_s:.0f} s, judged in {o.seconds:.1f} s at {o.at}"


def save(root: Path, outcomes: Sequence[Outcome], order: Sequence[str]) -> list[Outcome]:
    """Puts outcomes into root/results.json, over older ones of the same pairs, and returns all of them in ``order``."""
    path = root / "results.json"
    kept = json.loads(path.read_text()) if path.exists() else []
    known = {f.name for f in fields(Outcome)}
    old = [Outcome(**{k: v for k, v in o.items() if k in known} | {"expected": tuple(o["expected"])}) for o in kept]
    merged = {(o.name, o.golden, o.mine) if o.clean else o.name: o for o in [*old, *outcomes]}
    place = {name: i for i, name in enumerate(order)}
    every = sorted(merged.values(), key=lambda o: place.get(o.name, len(place)))
    every = [o for o in every if o.clean or o.name in place]
    path.write_text(json.dumps([asdict(o) for o in every], indent=1))
    return every


def run_cases(
    bench: Bench,
    cases: Sequence[Case],
    clean: Sequence[tuple[str, str, str]],
    done: Callable[[Outcome], None],
    replay: bool = True,
) -> None:
    """Runs and judges the given cases and clean pairs; ``done`` gets each outcome as it comes."""
    for case in cases:
        try:
            golden, mine, seconds = bench.pair(case)
        except RuntimeError as e:
            done(_broken(case, e))
            continue
        done(judge(case, golden, mine, seconds, replay))
    for model, first, second in clean:
        runs = [bench.clean_run(model, way) for way in (first, second)]
        done(judge_clean(model, (first, second), *runs, replay=replay))


def judge_kept(
    root: Path,
    cases: Sequence[Case],
    clean: Sequence[tuple[str, str, str]],
    done: Callable[[Outcome], None],
    replay: bool = True,
) -> None:
    """Judges the pairs that an earlier run kept under ``root``, without an engine; what is not there is left out."""
    for case in cases:
        golden, mine = root / "_runs" / f"{case.model}-{case.golden}", root / case.name / "mine"
        if (mine / "run.json").exists() and (golden / "run.json").exists():
            done(judge(case, golden, mine, replay=replay))
    for model, first, second in clean:
        runs = [root / "_runs" / f"{model}-{way}" for way in (first, second)]
        if all((run / "run.json").exists() for run in runs):
            done(judge_clean(model, (first, second), *runs, replay=replay))


def _broken(case: Case, error: Exception) -> Outcome:
    why = f"error: {error}".splitlines()[0]
    return Outcome(case.name, case.model, case.golden, case.mine, case.expected, why)


__all__ = ["CLEAN", "Bench", "Outcome", "Totals", "judge", "judge_kept", "markdown", "row", "run_cases", "totals"]
