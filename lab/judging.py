"""The fault laboratory's judging: compares the runs that the cases name and says how well the culprit was found.

The problem: what a judge is worth is known after hundreds of pairs, and it is worked on for days. The idea: making runs
(bench.py) is apart from judging; a `Pair` is two finished runs and what is true of them, judged without an
engine, by several processes, each pair as the command does it. One faulty run may be judged against several goldens.
Not here: what is planted (cases.py, generated.py), ways and clean pairs (client.py), sums and tables
(table.py), the command line (weights.py).
"""

import math
import multiprocessing
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lab.bench import Bench
from lab.cases import HANDWRITTEN, Case, half
from lab.ways import CLEAN

BF16 = 2.0**-8
"""One unit of the errors told here: the relative spacing of bfloat16."""
ACROSS = "clean across"


@dataclass(frozen=True)
class Pair:
    """Two runs to be judged. case: None for a clean pair. golden, mine: ways, after ``kernels:`` where the two sides'
    differ. at: where the two runs lie. kernels: what mine was captured with; replay: whether operators are run again.
    run_s: seconds that the faulty run took to make. pack: where goldens' packs are kept, which then are judged
    against in place of the goldens."""

    case: Case | None
    model: str
    golden: str
    mine: str
    at: tuple[Path, Path]
    replay: bool = True
    kernels: str = ""
    run_s: float = 0.0
    pack: Path | None = None

    @property
    def name(self) -> str:
        return self.case.name if self.case else f"clean {self.model}"

    @property
    def group(self) -> str:
        if self.case:
            return self.case.group
        if ":" in self.golden:
            return ACROSS
        return "clean"

    @property
    def half(self) -> str:
        if self.case:
            return half(self.case.name, self.case.group)
        old = (self.model, self.golden, self.mine) in CLEAN
        return half(f"{self.name} {self.golden} {self.mine}", HANDWRITTEN if old else self.group)

    @property
    def expected(self) -> tuple[str, ...]:
        return self.case.expected if self.case else ()

    @property
    def there(self) -> bool:
        return all((run / "run.json").exists() for run in self.at)


@dataclass(frozen=True)
class Outcome:
    """How one pair was judged.

    name, model, golden, mine, group, half, replay, kernels: of the `Pair`. expected: empty for a clean pair.
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
    group: str = HANDWRITTEN
    half: str = "tuned"
    replay: bool = True
    kernels: str = ""
    at: str = field(default_factory=lambda: time.strftime("%H:%M:%S", time.gmtime()))

    @property
    def clean(self) -> bool:
        return not self.expected

    @property
    def first(self) -> bool:
        return self.verdict == "fail" and self.rank == 1

    @property
    def right(self) -> bool:
        return self.verdict == "pass" if self.clean else self.first and self.found

    @property
    def kind(self) -> str:
        """What is counted together: the group, with the golden where a group has several of interest."""
        return f"{self.group}/{self.golden}" if self.group in ("kind", "trained", "two", "near") else self.group

    @property
    def key(self) -> tuple[Any, ...]:
        return self.name, self.golden, self.mine, self.replay, self.kernels


def _blank(pair: Pair) -> Outcome:
    """What is known before judging."""
    return Outcome(
        pair.name, pair.model, pair.golden, pair.mine, pair.expected, verdict="", run_s=pair.run_s, group=pair.group,
        half=pair.half, replay=pair.replay, kernels=pair.kernels,
    )  # fmt: skip


def judge(pair: Pair) -> Outcome:
    """Compares a pair, as the command does, and looks for the planted module."""
    began = time.monotonic()
    told = _blank(pair)
    golden, mine = pair.at
    result = compared(golden if pair.pack is None else packed(golden, pair.pack), mine, pair.replay)
    if isinstance(result, str):
        return replace(told, verdict=result)
    modules = [o["module"] for o in result.origins]
    rank = next((i + 1 for i, m in enumerate(modules) if m in pair.expected), 0)
    blamed = result.origins[max(rank - 1, 0)] if modules else {}
    sentence = _sentence(blamed)
    seconds, words = (pair.case.seconds, pair.case.words) if pair.case else ((), ())
    at = pair.expected[0] if pair.case else blamed.get("module")
    return replace(
        told, verdict=result.verdict, culprit=modules[0] if modules else "", rank=rank,
        found=not pair.case or not seconds or any(m in modules for m in seconds), factor=_factor(blamed),
        sentence=sentence, worded=_worded(words, sentence) if words else None, seen=around(result, at) if at else "",
        origins=len(modules), seconds=time.monotonic() - began,
    )  # fmt: skip


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


def packed(golden: Path, folder: Path) -> Path:
    """The run's pack of the default size, made where it is not there yet."""
    from vllm_accprobe.golden.pack import pack

    folder.mkdir(parents=True, exist_ok=True)
    out = folder / f"{golden.name}.golden"
    if not out.exists():
        pack(golden, out)
    return out


def compared(golden: Path, mine: Path, replay: bool) -> Any:
    """The Comparison, or what went wrong in one line: the other cases still count."""
    from vllm_accprobe.comparison.engine import compare
    from vllm_accprobe.golden.estimated import compared_sides
    from vllm_accprobe.opcheck.proof.replay_process import ReplayRequest, begun, replayed

    try:
        with compared_sides(golden.resolve(), mine.resolve()) as sides, tempfile.TemporaryDirectory() as out:
            asked = ReplayRequest(sides.golden, sides.mine, None if replay else False, None, None)
            with begun(asked) as running:
                return replayed(sides.judged(compare(asked.golden, asked.mine)), asked, running, Path(out))
    except Exception as e:
        return f"error: {type(e).__name__}: {e}".splitlines()[0]


def _factor(origin: dict[str, Any]) -> float:
    created, floor = origin.get("created") or 0.0, origin.get("floor") or 0.0
    return created / floor if floor else math.inf if created else 0.0


def _sentence(origin: dict[str, Any]) -> str:
    graph = origin.get("graph") or {}
    return "; ".join(filter(None, (str(origin.get("shape") or origin.get("sentence") or ""), graph.get("sentence"))))


def _worded(words: Iterable[str], sentence: str) -> bool:
    return all(re.search(w, sentence, re.I) for w in words)


# --- many pairs ------------------------------------------------------------------------------------------------------


def pairs_of(
    root: Path,
    cases: Iterable[Case],
    clean: Iterable[tuple[str, str, str]],
    replay: bool = True,
    kernels: str = "",
) -> list[Pair]:
    """All pairs of runs under ``root``, whether they are there or not."""
    runs, found = root / "_runs", []
    for case in cases:
        for golden in case.goldens:
            at = (runs / f"{case.model}-{golden}", root / case.name / "mine")
            found.append(Pair(case, case.model, golden, case.mine, at, replay, kernels))
    for model, golden, mine in clean:
        at = (runs / f"{model}-{golden}", runs / f"{model}-{mine}")
        found.append(Pair(None, model, golden, mine, at, replay, kernels))
    return found


def pairs_across(
    roots: tuple[Path, Path], kernels: tuple[str, str], pairs: Iterable[tuple[str, str, str]], replay: bool = True
) -> list[Pair]:
    """Clean pairs whose sides were made by two kernels, both ways round."""
    found = []
    for a, b in ((0, 1), (1, 0)):
        for model, golden, mine in pairs:
            at = (roots[a] / "_runs" / f"{model}-{golden}", roots[b] / "_runs" / f"{model}-{mine}")
            ways = (f"{kernels[a]}:{golden}", f"{kernels[b]}:{mine}")
            found.append(Pair(None, model, *ways, at, replay, kernels[b]))
    return found


def judge_kept(pairs: Sequence[Pair], done: Callable[[Outcome], None], jobs: int = 1) -> int:
    """Judges those pairs whose runs are there, in ``jobs`` processes; ``done`` gets each outcome as it comes. Returns
    how many are not there."""
    there = [pair for pair in pairs if pair.there]
    if jobs == 1:
        for pair in there:
            done(judge(pair))
    else:
        # Not by fork: torch's threads do not survive it.
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            for future in as_completed([pool.submit(judge, pair) for pair in there]):
                done(future.result())
    return len(pairs) - len(there)


def run_cases(
    bench: Bench,
    cases: Sequence[Case],
    clean: Sequence[tuple[str, str, str]],
    done: Callable[[Outcome], None],
    replay: bool = True,
    kernels: str = "",
) -> None:
    """Runs and judges the given cases and clean pairs; ``done`` gets each outcome as it comes."""
    for pair in pairs_of(bench.root, cases, clean, replay, kernels):
        try:
            if pair.case is None:
                at = bench.clean_run(pair.model, pair.golden), bench.clean_run(pair.model, pair.mine)
                done(judge(replace(pair, at=at)))
            else:
                golden, mine, seconds = bench.pair(replace(pair.case, golden=pair.golden))
                done(judge(replace(pair, at=(golden, mine), run_s=seconds)))
        except RuntimeError as e:
            done(replace(_blank(pair), verdict=f"error: {e}".splitlines()[0]))
