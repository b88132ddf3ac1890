"""vLLM's modes, each captured for real: a table for docs/capture.md.

The problem: LoRA, speculation, embeddings, pipelines, states and the rest each change whose row is whose, and "it ran"
proves nothing. The idea: of each mode five runs of a tiny random model: without it (where that has meaning), with it
twice, with it and a planted fault, and what vLLM says where it cannot. Then three questions: is every row the one it is
called (request, position, phase, token, and the embedding's own output bit by bit), is the mode equal to itself and to
the plain run, and does a planted fault come first, with the rows that it spoilt. Runs are kept under ``--keep`` and not
made again. Exit codes: 0, or 1 where a row is wrong, a pair that must pass fails, or a fault does not come first.
Not here: the models (tiny_model.py, mode_models.py), what modes there are (mode_table.py), engines
(tests/support/engine.py).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
for folder in (".", "tests", "scripts"):
    sys.path.insert(0, str(ROOT / folder))

from mode_rows import wrong_rows  # noqa: E402
from mode_servers import ServedRuns  # noqa: E402
from mode_table import MODES, Mode, Way  # noqa: E402
from support.engine import TP2_ENV, V2_ENV, EngineError, EngineHost, Run  # noqa: E402

from vllm_accprobe.comparison.engine import CompareError, compare  # noqa: E402
from vllm_accprobe.dump.reader import open_dump  # noqa: E402
from vllm_accprobe.opcheck.proof.replay_process import ReplayRequest, begun, replayed  # noqa: E402

_ONE = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
_HOSTS = {
    "v1": _ONE,
    "v2": V2_ENV | _ONE,
    "two": TP2_ENV | {"ACCPROBE_TEST_FORK": "1", "OMP_NUM_THREADS": "1", "ACCPROBE_TEST_PP": "1"},
}
PLAIN, FIRST, AGAIN, FAULTY = "plain", "first", "again", "faulty"


@dataclass(frozen=True)
class Judged:
    """One pair of runs. same: pairs that are bit-identical; left_out: what was not compared, by reason."""

    verdict: str
    pairs: int = 0
    same: int = 0
    rows: int = 0
    flips: int = 0
    culprit: str = ""
    where: str = ""
    left_out: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """One mode. rows: checked, and wrong ones in words. runs: what vLLM did (counters), or its own message."""

    mode: str
    rows: int = 0
    wrong: list[str] = field(default_factory=list)
    skips: dict[str, int] = field(default_factory=dict)
    itself: Judged | None = None
    plain: Judged | None = None
    fault: Judged | None = None
    expected: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    refused: str = ""
    failures: list[str] = field(default_factory=list)


class Runs:
    """Makes the runs of the modes under ``root``, and remembers them on the disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._hosts: dict[str, EngineHost] = {}
        self._served = ServedRuns(root)

    def make(self, mode: Mode, way: str) -> tuple[Path, dict[str, Any]]:
        """The dump, and what the engine answered. Raises EngineError."""
        out, done = self.root / mode.name / way, self.root / mode.name / f"{way}.json"
        if not done.exists():
            shutil.rmtree(out, ignore_errors=True)
            out.parent.mkdir(parents=True, exist_ok=True)
            how = mode.plain if way == PLAIN and mode.plain is not None else mode.way
            try:
                run = self._run(mode, how, out, mode.fault if way == FAULTY else None)
            except EngineError:
                if how.host in self._hosts:
                    self._hosts.pop(how.host).close()  # what is left of an engine that failed would spoil the next one
                raise
            done.write_text(json.dumps(asdict(replace(run, dump=None))))
        return out, json.loads(done.read_text())

    def _run(self, mode: Mode, how: Way, out: Path, fault: Mapping[str, Any] | None) -> Run:
        model, asks = mode.model(self.root / "_models"), how.asks(self.root / "_models")
        if how.serve:
            return self._served.capture(model, asks, out=out, args=how.serve, replicas=how.replicas, fault=fault)
        more = {"how": how.how, "env": how.env, "during": how.during, **how.built(self.root)}
        return self._host(how.host).capture(model, asks, out=out, fault=fault, **more)

    def _host(self, kind: str) -> EngineHost:
        if kind not in self._hosts:
            self._hosts[kind] = EngineHost(self.root / f"_log-{kind}.txt", _HOSTS[kind])
        return self._hosts[kind]

    def close(self) -> None:
        for host in self._hosts.values():
            host.close()
        self._served.close()


def judged(golden: Path, mine: Path, replay: bool = False) -> Judged:
    """Compares two runs as the command does."""
    try:
        asked = ReplayRequest(golden.resolve(), mine.resolve(), None if replay else False, None, None)
        with begun(asked) as running, tempfile.TemporaryDirectory() as out:
            result = replayed(compare(asked.golden, asked.mine), asked, running, Path(out))
    except CompareError as e:
        return Judged(f"error: {e}")
    first = result.origins[0] if result.origins else {}
    where = "; ".join(str(first[k]) for k in ("shape", "sentence") if first.get(k))
    place = f"{first.get('request')!r} position {first.get('position')} ({first.get('phase')})" if first else ""
    return Judged(
        result.verdict,
        result.coverage["pairs"],
        sum(p.bit_identical for p in result.pairs),
        result.coverage["rows_compared"],
        len(result.tokens["flipped"]),
        str(first.get("module", "")),
        "; ".join(filter(None, (place, where))),
        dict(result.coverage["skipped"]),
        list(result.notes),
    )


def outcome(runs: Runs, mode: Mode) -> Outcome:
    """Makes what is missing of a mode's runs and judges it."""
    try:
        first, answer = runs.make(mode, FIRST)
    except EngineError as e:
        return Outcome(mode.name, refused=str(e).splitlines()[0], failures=[] if mode.refused else ["did not run"])
    dump = open_dump(first)
    count, wrong = wrong_rows(dump, mode.way.asks(runs.root / "_models"), answer["tokens"])
    skips: dict[str, int] = {}
    for skip in dump.skips:
        skips[skip.reason] = skips.get(skip.reason, 0) + (skip.count or 1)
    failures = [*wrong, *dump.problems, *(str(e) for e in dump.errors)]
    itself = judged(first, runs.make(mode, AGAIN)[0])
    if itself.verdict != "pass":
        failures.append(f"not equal to itself: {itself.verdict}")
    plain = fault = None
    if mode.plain is not None:
        plain = judged(runs.make(mode, PLAIN)[0], first, replay=True)
        if (plain.verdict == "pass") != mode.equal_to_plain:
            failures.append(f"against plain: {plain.verdict}")
    if mode.fault:
        fault = judged(first, runs.make(mode, FAULTY)[0], replay=True)
        if fault.culprit != mode.blamed:
            failures.append(f"the fault in {mode.blamed} was laid at {fault.culprit or 'nobody'}")
    metrics = {k: v for k, v in answer["metrics"].items() if v and not k.endswith("_s")}
    return Outcome(mode.name, count, wrong, skips, itself, plain, fault, mode.blamed, metrics, "", failures)


def page(found: Sequence[Outcome]) -> str:
    """The table in markdown."""
    lines = [
        "| mode | rows checked, wrong | with itself: pairs, bit-identical | with a plain run | planted fault, first |",
        "| --- | --- | --- | --- | --- |",
    ]
    for o in found:
        if o.refused:
            lines.append(f"| {o.mode} | vLLM: {o.refused} | | | |")
            continue
        cells = [o.mode, f"{o.rows:,}, {len(o.wrong)}", _cell(o.itself), _cell(o.plain)]
        told = "" if o.fault is None else f"{o.fault.culprit or 'nobody'}: {o.fault.where}"
        lines.append(f"| {' | '.join([*cells, told])} |")
    lines += ["", "Left out, by reason:", ""]
    for o in found:
        reasons = {**(o.itself.left_out if o.itself else {}), **o.skips}
        lines += [f"- {o.mode}: " + "; ".join(f"{n:,} × {why}" for why, n in sorted(reasons.items()) if n)]
    return "\n".join(lines) + "\n"


def _cell(j: Judged | None) -> str:
    if j is None:
        return "–"
    share = f"{j.same / j.pairs:.1%}" if j.pairs else "0"
    flips = f", {j.flips} flips" if j.flips else ""
    culprit = f": {j.culprit}" if j.culprit else ""
    return f"{j.verdict}{culprit}: {j.pairs:,}, {share}{flips}"


def main() -> int:
    parser = argparse.ArgumentParser(description="vLLM's modes, each captured, compared and given a fault.")
    parser.add_argument("modes", nargs="*", metavar="MODE", help="which; all where none is named: " + ", ".join(MODES))
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep runs there; those found there are not redone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there, too")
    args = parser.parse_args()
    unknown = sorted(set(args.modes) - set(MODES))
    if unknown:
        parser.error(f"no such mode: {', '.join(unknown)}; there are {', '.join(MODES)}")
    root = (args.keep or Path(tempfile.mkdtemp(prefix="modes-"))).absolute()
    root.mkdir(parents=True, exist_ok=True)
    runs, found = Runs(root), []
    try:
        for name in args.modes or MODES:
            try:
                found.append(outcome(runs, MODES[name]))
            except EngineError as e:
                found.append(Outcome(name, refused=str(e).splitlines()[0], failures=["did not run"]))
            print(page(found[-1:]), *(f"FAILED {name}: {why}" for why in found[-1].failures), sep="\n", flush=True)
    finally:
        runs.close()
        if args.keep is None:
            shutil.rmtree(root, ignore_errors=True)
    if args.json:
        args.json.write_text(json.dumps([asdict(o) for o in found], indent=1))
    if args.markdown:
        args.markdown.write_text(page(found))
    return int(any(o.failures for o in found))


if __name__ == "__main__":
    sys.exit(main())
