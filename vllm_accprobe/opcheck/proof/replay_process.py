"""``accprobe compare`` with a replay: when operators are run again, and the process that does it.

The problem: a replay decides who is wrong, but it needs torch, which takes longer to import than a small pair to
compare, and hours for a large one. The idea: it has a time (`--replay-seconds`), and takes first what the comparison
found. Its process begins in parallel with the comparison; a small pair fits into the time easily and is replayed at
once, a large one when the comparison's result is there. There is none where torch or the values are missing. It runs in
a process of its own: `compare` imports no torch, and a replay that dies leaves the comparison as it was, with a note.
Ctrl-C ends the replay alone, and what it has is used; once more ends all. What it proved is kept next to the
comparison, for `--rejudge`. Not here: the replay (replay_child.py), what it takes first (opcheck/run/budget.py), what
it means (apply_proof.py).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_accprobe.children import BLOCKS_REUSED, ONE_THREAD, Child
from vllm_accprobe.comparison.coverage import with_covers
from vllm_accprobe.comparison.gaps import suspects_of
from vllm_accprobe.comparison.notes import with_effects
from vllm_accprobe.comparison.result import FAIL, PARTLY, WHOLE, Comparison
from vllm_accprobe.comparison.store import MEASURED
from vllm_accprobe.dump.decode import value_at
from vllm_accprobe.dump.reader import run_json
from vllm_accprobe.judge.statistic import RATE as FALSE_ALARM_RATE
from vllm_accprobe.opcheck.proof.apply_proof import NAME, ReplayResult, decide, narrowed
from vllm_accprobe.opcheck.proof.explained import place_of
from vllm_accprobe.progress import progress, waiting
from vllm_accprobe.refusals import CommandError
from vllm_accprobe.whole_file import write_text

SECONDS = 60.0
"""Of wall time that a replay has by default."""
SUSPECTS = 8
_FAILED = 20_000
"""Chosen: failed pairs that are named to a replay; no time is long enough for more."""


@dataclass(frozen=True)
class ReplayRequest:
    """What `compare` requests. replay: True replays everything, False nothing, None what fits into ``seconds`` (0:
    nothing); taps: only these, the globs of `--taps`; rate: of false alarms, of the whole replay; weights: of the
    model, a folder."""

    golden: Path
    mine: Path
    replay: bool | None
    taps: str | None
    mapping: Path | None
    rate: float = FALSE_ALARM_RATE
    seconds: float = SECONDS
    weights: Path | None = None

    @property
    def due(self) -> bool:
        return self.replay is not False and (self.replay is True or self.seconds > 0)

    @property
    def globs(self) -> list[str]:
        return [glob.strip() for glob in self.taps.split(",")] if self.taps else []


class Replay:
    """A replay that has begun."""

    def __init__(self, request: ReplayRequest):
        more = [x for glob in request.globs for x in ("--ops", glob)]
        more += ["--op-mapping-file", str(request.mapping)] if request.mapping is not None else []
        more += ["--weights", str(request.weights)] if request.weights is not None else []
        more += ["--rate", repr(request.rate), *([] if request.replay else ["--seconds", repr(request.seconds)])]
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  no pipe: nobody reads it while the comparison runs
        self._process: Child = Child(
            "vllm_accprobe.opcheck.proof.replay_child", *more, "--", str(request.golden), str(request.mine),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr,
            env={**BLOCKS_REUSED, **os.environ, **ONE_THREAD},
        )  # fmt: skip
        self._stopped = False

    def _message(self) -> dict[str, Any] | None:
        """The next one; None when it is gone. The first Ctrl-C ends the replay alone."""
        while True:
            try:
                return self._process.heard()
            except KeyboardInterrupt:
                if self._stopped:
                    raise
                self._stopped = True
                self._process.tell("stop")

    def result(self, wishes: Mapping[str, Any]) -> tuple[str, str]:
        """Waits, and says how far it is: (the proof's text, "") or ("", the last line of the process). wishes: what
        the comparison has found, as `_wishes` gives it."""
        with waiting(lambda: "the replay reads the dumps"):
            first = self._message() or {}
            if first.get("waits"):
                self._process.tell(json.dumps(wishes))
            plan = (self._message() or {}).get("plan", {})
        calls, of = int(plan.get("calls", 0)), int(plan.get("of", 0))
        label = f"replaying {calls:,} of {of:,} calls (about {plan.get('seconds', 0.0):.0f} s)" if of else "replaying"
        begun = self._message() or {}
        proof = str(begun.get("proof", ""))
        with progress(label, int(begun.get("of", 0)), steps=True) as to:
            while (message := self._message()) is not None:
                if "explain" in message:
                    self._process.tell(json.dumps(wishes))
                proof = message.get("proof", proof)
                if "done" in message:
                    to(message["done"])
        code = self._process.wait()
        if code == 0 and proof:
            return proof, ""
        self._stderr.seek(0)
        lines = [x for x in self._stderr.read().decode("utf-8", "replace").splitlines() if x.strip()]
        return "", lines[-1].strip() if lines else f"its process ended with {code}"

    def close(self) -> None:
        """Ends it, whatever it is doing."""
        self._process.end()
        self._stderr.close()


@contextlib.contextmanager
def begun(request: ReplayRequest) -> Iterator[Replay | None]:
    """A replay in parallel with the comparison, where it is known already that there will be one; else None."""
    early = request.due and (request.replay or _both_captured(request)) and _torch()
    replay = Replay(request) if early else None
    try:
        yield replay
    finally:
        if replay is not None:
            replay.close()


def replayed(
    result: Comparison, request: ReplayRequest, replay: Replay | None, out: Path,
    before: Callable[[Comparison], object] = lambda result: None,
) -> Comparison:  # fmt: skip
    """``result`` of comparing these dumps, with what a replay proves, which is written to ``out``/replay.json.

    replay: what `begun` gave; before: called with ``result`` where a replay will decide, before it is waited for.
    Raises CommandError where it was requested and there is no torch or it fails."""
    captured = all(_captured(run) for run in (result.golden_run, result.mine_run))
    if not request.due or not (request.replay or captured):
        return result
    if not _torch():
        if request.replay:
            raise CommandError("--replay needs torch: install it beside accprobe (the CPU build will do)")
        return result
    before(result)
    late = Replay(request) if replay is None else None
    try:
        text, last = (replay or late).result(_wishes(result))  # type: ignore[union-attr]
    finally:
        if late is not None:
            late.close()
    out.mkdir(parents=True, exist_ok=True)
    path = out / NAME
    path.unlink(missing_ok=True)
    try:
        proof = ReplayResult.from_json(text)
    except ValueError:
        why = last or "it ended without a result"
        if request.replay:
            raise CommandError(f"--replay: {why}") from None
        return replace(result, notes=[*result.notes, f"replay: failed and decides nothing: {why}"])
    write_text(path, text)
    return _decided(result, proof)


def remembered(result: Comparison, directory: Path) -> Comparison:
    """``result`` with what was proved when the comparison in ``directory`` was made, if anything was."""
    path = directory / NAME
    if not path.is_file():
        return result
    try:
        return _decided(result, ReplayResult.from_json(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise CommandError(f"cannot read {path}: {error}; delete it to judge without the replay") from None


def what_was_kept(result: Comparison, directory: Path, replay: bool | None) -> str:
    """What was kept and what was not done again where ``result`` was judged again from ``directory``. No note of the
    result itself, which is the same as it was the first time."""
    kept = f"the errors of {result.counts.total:,} pairs are those that were measured ({directory / MEASURED})"
    proof = f"what the replay proved then ({NAME}) was kept" if result.replayed else "nothing was replayed then"
    if (directory / NAME).is_file() and replay is False:
        proof = f"what the replay proved then ({NAME}) was left out (--no-replay)"
    lost = "no tensor was read and no operator run again, so that sampled values and histograms are missing"
    return f"judged again: {kept}, {proof}; {lost}: compare the dumps for these"


def _decided(result: Comparison, proof: ReplayResult) -> Comparison:
    proof, notes = allowed(proof, result.false_alarm_rate)
    decided = decide(with_effects(result, proof.constants), proof)
    decided = narrowed(decided, {b.tap for b in proof.blamed}, proof.right)
    decided = with_covers(replace(decided, replayed=PARTLY if proof.partly else WHOLE), proof.covers)
    return replace(decided, notes=[*notes, *decided.notes])


def allowed(proof: ReplayResult, rate: float) -> tuple[ReplayResult, list[str]]:
    """``proof`` without the blames that rounding alone earns more often than ``rate``, and a note about these. A blame
    says its own chance where that is known, so that a replay that was kept is judged by another rate, too."""
    left = [b for b in proof.blamed if (getattr(b, "chance", None) or 0.0) > rate]
    if not left:
        return proof, []
    more = f" and {len(left) - 1} more" if len(left) > 1 else ""
    note = f"replay: what is seen at {left[0].tap}{more} is likelier by chance than --false-alarm-rate {rate:g} allows"
    return replace(proof, blamed=tuple(b for b in proof.blamed if b not in left)), [f"{note}: not blamed"]


def _torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def _wishes(result: Comparison) -> dict[str, Any]:
    """What the comparison has found: for opcheck/run/budget.py, and for opcheck/proof/explained.py the places of pairs
    that fail, and origins, which are explained whole."""
    failed = [p for p in result.pairs if p.status == FAIL]
    worst = [p for p in failed if p.step is not None]
    worst.sort(key=lambda p: -((p.measured or 0.0) / p.allowed if p.allowed else math.inf))
    return {
        "suspects": list(dict.fromkeys(tap for o in result.origins[:SUSPECTS] for tap in suspects_of(o))),
        "failed": list(dict.fromkeys((p.tap, p.step, p.call) for p in worst))[:_FAILED],
        "places": sorted({place_of(p.tap, p.role, p.call) for p in failed}),
        "taps": sorted({str(o["module"]) for o in result.origins if not o.get("gap")}),
    }


def _both_captured(request: ReplayRequest) -> bool:
    """Whether both dumps are captures of a model, before they are opened."""
    return all(_captured(run_json(side)) for side in (request.golden, request.mine))


def _captured(run: dict[str, Any]) -> bool:
    """Whether a model was captured, by our probe, with its values."""
    return run.get("tool") == "accprobe" and value_at(run, "probe", "task") == "tensor"
