"""What is captured of one vLLM release and held against what: one row of docs/compatibility.md, as plain values.

The problem: "runs on release X" says nothing of whether the rows are right there. The idea: the same tiny models answer
the same prompts in every release; each dump is compared with 0.32's or with another of its own release, and a case
that fails is tried again without the probe: what vLLM cannot do by itself is its own refusal, anything else is ours and
makes the row red. Engines of one release share a process as far as they survive it.
Not here: environments (matrix_envs.py), the page (matrix_page.py).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny_model
from matrix_envs import Release
from support.captures import FIVE
from support.engine import V2_ENV, Ask, EngineError, EngineHost, Run
from support.prompts import repetitive

V1, V2 = "V1", "V2"
NEWEST, OWN, OWN_V1 = "0.32", "own", "own V1"
"""With what a case is compared: the same case of 0.32's V1, another case of this runner, one of this release's V1."""
GUESSABLE = [Ask(repetitive(60, 9, i), 24) for i in range(3)]
_NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
_FACTS = "import importlib.metadata as m; print(m.version('torch'), m.version('transformers'))"
_LIBRARY = re.compile(r"(?:/vllm/(_C\w*)\.|/(libintel-ext-pt-cpu)\.)")
_PLACE = re.compile(r"/[^\s()'\"]*/site-packages/")
"""Where an environment lies is of no interest, and differs."""
_ITSELF = re.compile(r"'vllm[.']|_C")
_CAUSE = re.compile(r"\b[A-Z]\w*(?:Error|Exception): .*")


@dataclass(frozen=True)
class Case:
    """One capture. against: (with what, which case of it), see NEWEST. runners: which make it. fewer_rows: drafts that
    were accepted are computed in other steps, rejected ones by one side only. graphs: compiled, in its own process."""

    name: str
    model: str = "qwen2"
    asks: Sequence[Ask] = field(default_factory=lambda: FIVE)
    engine: Mapping[str, Any] = field(default_factory=dict)
    against: tuple[tuple[str, str], ...] = ()
    runners: tuple[str, ...] = (V1,)
    fewer_rows: bool = False
    graphs: bool = False


CASES = (
    Case("plain", against=((NEWEST, "plain"), (OWN_V1, "plain")), runners=(V1, V2)),
    Case("again", against=((OWN, "plain"),), runners=(V1, V2)),
    Case("mixture", "qwen2-moe", against=((NEWEST, "mixture"),)),
    Case("MLA", "deepseek-v2", against=((NEWEST, "MLA"),)),
    Case("pooled", engine={"runner": "pooling"}, against=((NEWEST, "pooled"),), runners=(V1, V2)),
    Case("guessable", asks=GUESSABLE, against=((NEWEST, "guessable"),)),
    Case("n-gram", asks=GUESSABLE, engine={"speculative_config": _NGRAM}, against=((OWN_V1, "guessable"),),
         runners=(V1, V2), fewer_rows=True),
    Case("graphs", engine={"enforce_eager": False}, against=((OWN_V1, "plain"),), graphs=True),
)  # fmt: skip
"""n-gram needs guessable, of V1; graphs and V2's need plain. Where a golden is missing, the comparison says so."""

Comparer = Callable[[Path, Path], Mapping[str, Any]]


def rows_of(release: Release, python: Path, keep: Path, compare: Comparer, cases: Sequence[Case] = CASES,
            say: Callable[[str], None] = print) -> list[dict[str, Any]]:  # fmt: skip
    """The rows of one release, V1's and V2's; dumps go to ``keep``/VERSION/RUNNER/CASE, 0.32's V1 must be there already
    (or be this one). compare: golden, mine → a Comparison's coverage, tokens and verdict, see ``compared``."""
    base = dict(zip(("torch", "transformers"), _asked(python), strict=False))
    rows = []
    for runner in (V1, V2) if release.v2 else (V1,):
        say(f"{release.version} {runner} ...")
        rows.append(base | _Runner(release, runner, python, keep, compare, say).row(cases))
    return rows


class _Runner:
    """The cases of one release's runner, one after another."""

    def __init__(self, release: Release, runner: str, python: Path, keep: Path, compare: Comparer,
                 say: Callable[[str], None]) -> None:  # fmt: skip
        self.release, self.runner, self.python, self.keep = release, runner, python, keep
        self.compare, self.say = compare, say
        self.hosts: dict[tuple[bool, bool], EngineHost] = {}

    def row(self, cases: Sequence[Case]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        kernels: list[str] = []
        started: float | None = None
        try:
            for case in cases:
                if self.runner not in case.runners:
                    continue
                found[case.name] = self._case(case)
                started = started or found[case.name].get("start_s")
                kernels = kernels or libraries(self._host(case.graphs, True).mapped())
                self.say(f"  {case.name}: {found[case.name]}")
        finally:
            for host in self.hosts.values():
                host.close()
        return {"release": self.release.version, "runner": self.runner, "start_s": started, "kernels": kernels,
                "note": self.release.note, "cases": found}  # fmt: skip

    def _case(self, case: Case) -> dict[str, Any]:
        out = self._dump(self.release.version, self.runner, case.name)
        shutil.rmtree(out, ignore_errors=True)
        try:
            run = self._serve(case, out, probe=True)
        except EngineError as error:
            first = cause(str(error), self._host(case.graphs, True).log)
            try:
                self._serve(case, out, probe=False)
            except EngineError:
                return {"error": first, "whose": whose(first)}
            return {"error": first, "whose": "accprobe"}
        if run.dump is None:
            return {"error": "configured, but nothing was written", "whose": "accprobe"}
        result: dict[str, Any] = {"start_s": round(run.metrics["build_s"], 1), "compared": {}}
        if case.name == "n-gram":
            result |= {name: int(run.metrics[name]) for name in ("drafted", "accepted")}
        for where, name in case.against:
            golden = self._golden(where, name)
            if golden != out and not (golden / "run.json").exists():
                result["compared"][where] = {"error": f"there is no {name} of {where}"}
            elif golden != out:
                result["compared"][where] = self.compare(golden, out)
        return result

    def _golden(self, where: str, name: str) -> Path:
        if where == NEWEST:
            return self._dump("0.32.0", V1, name)
        return self._dump(self.release.version, V1 if where == OWN_V1 else self.runner, name)

    def _dump(self, version: str, runner: str, name: str) -> Path:
        return self.keep / version / runner / name

    def _serve(self, case: Case, out: Path, probe: bool) -> Run:
        model = tiny_model.make(case.model, self.keep / "models" / case.model)
        env = {"VLLM_ACCPROBE_GRAPHS": "1"} if case.graphs and probe else {}
        engine = {**self.release.engine, **case.engine}
        return self._host(case.graphs, probe).capture(model, case.asks, out=out, env=env, **engine)

    def _host(self, graphs: bool, probe: bool) -> EngineHost:
        """A process for eager engines and one for others: an engine that was made eager stays so."""
        if (graphs, probe) not in self.hosts:
            root = self.keep / self.release.version
            # Old releases heed no kv_cache_memory_bytes on a CPU, and take half of the machine for each engine.
            env = {"VLLM_CACHE_ROOT": str(root / "cache"), "VLLM_CPU_KVCACHE_SPACE": "1"} | dict(self.release.env)
            env |= {"VLLM_CPU_CI_ENV": "1"} if graphs else {}  # traced by dynamo; inductor would take a minute
            env |= V2_ENV if self.runner == V2 else {}
            log = root / f"{self.runner}{'-graphs' if graphs else ''}{'' if probe else '-bare'}.log"
            log.unlink(missing_ok=True)
            self.hosts[graphs, probe] = EngineHost(log, env, probe=probe, python=self.python)
        return self.hosts[graphs, probe]


def compared(golden: Path, mine: Path) -> dict[str, Any]:
    """One comparison, in numbers. problems: of mine's dump, in its reader's words; replayed: whether the verdict is
    that of a replay, as the command makes one where comparing alone fails."""
    from vllm_accprobe.comparison.engine import compare
    from vllm_accprobe.comparison.result import CompareError
    from vllm_accprobe.dump.reader import open_dump
    from vllm_accprobe.opcheck.proof.replay_process import ReplayRequest, begun, replayed

    dump = open_dump(mine)
    try:
        result = compare(golden, mine)
    except CompareError as error:
        return {"error": str(error)}
    again = result.verdict != "pass"
    if again:
        asked = ReplayRequest(golden.resolve(), mine.resolve(), None, None, None)
        with begun(asked) as running, tempfile.TemporaryDirectory() as out:
            result = replayed(compare(asked.golden, asked.mine), asked, running, Path(out))
    c = result.coverage
    skipped = dict(c["skipped"])
    skipped |= {f"only in {side}": len(c[f"taps_only_{side}"]) for side in ("golden", "mine") if c[f"taps_only_{side}"]}
    return {
        "verdict": result.verdict, "pairs": c["pairs"], "bit_identical": c["pairs_bit_identical"],
        "tokens": result.tokens["compared"], "flipped": len(result.tokens["flipped"]),
        "rows_only_golden": c["rows_only_golden"], "rows_only_mine": c["rows_only_mine"],
        "skipped": skipped, "problems": [str(p) for p in (*dump.problems, *dump.errors)],
        "replayed": again,
    }  # fmt: skip


def whose(error: str) -> str:
    """Of what fails without the probe, too: the environment's, where a package or a library is missing here; else
    vLLM's own. What vLLM imports from itself and does not find is its own."""
    missing = error.startswith(("ModuleNotFoundError", "ImportError")) and not _ITSELF.search(error)
    return "environment" if missing or "LD_PRELOAD" in error else "vLLM"


def libraries(files: Sequence[str]) -> list[str]:
    """vLLM's compiled kernels (and IPEX) among the files that a process has mapped."""
    found = [_LIBRARY.search(file) for file in files]
    return sorted({m[1] or m[2] for m in found if m})


def cause(message: str, log: Path) -> str:
    """The first line of what failed. Where it is only that a worker's log has the root cause: the cause, from there."""
    first = message.splitlines()[0]
    if "root cause" in first and log.exists():
        causes = [m[0] for m in _CAUSE.finditer(log.read_text(errors="replace")) if "root cause" not in m[0]]
        first = causes[-1] if causes else first
    return _PLACE.sub("", first)[:240]


def _asked(python: Path) -> list[str]:
    begin = time.monotonic()
    done = subprocess.run([python, "-c", _FACTS], capture_output=True, text=True, timeout=120, check=False)
    words = done.stdout.split()
    return words if len(words) == 2 else ["?", f"? after {time.monotonic() - begin:.0f} s"]
