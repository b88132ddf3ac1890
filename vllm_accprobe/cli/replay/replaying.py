"""``accprobe compare`` with a replay: when operators are run again, and the process that does it.

The problem: a replay decides who is wrong, but it needs torch, which takes longer to import than a small pair to
compare, and hours for a large one. The idea: unless told otherwise a small pair is replayed whole, and that begins
beside the comparison; of a large one, what the comparison suspects, if it fails; and never where torch or the values
are missing. It runs in a process of its own: `compare` imports no torch, and a replay that dies leaves the comparison
as it was, with a note. What it proved is kept beside the comparison, for `--rejudge`. Not here: the replay (prove.py),
what it means (opcheck/proof/decide.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_accprobe.cli.common.options import CommandError, progress
from vllm_accprobe.judge.constants import FALSE_ALARM_RATE

if TYPE_CHECKING:
    from vllm_accprobe.children import Child
    from vllm_accprobe.comparison.result import Comparison
    from vllm_accprobe.opcheck.proof.decide import Proof

SMALL = 256 << 20
"""Bytes of both dumps' tensors up to which everything is replayed without being asked."""
SUSPECTS = 8
_MOST_RUN = 1 << 24
"""Bytes of a run.json that is looked at before anything is opened."""


@dataclass(frozen=True)
class Asked:
    """What `compare` was given. replay: True replays everything, False nothing, None as the module says; taps: only
    these, the globs of `--taps`; rate: of false alarms, of the whole replay."""

    golden: Path
    mine: Path
    replay: bool | None
    taps: str | None
    mapping: Path | None
    rate: float = FALSE_ALARM_RATE

    @property
    def globs(self) -> list[str]:
        return [glob.strip() for glob in self.taps.split(",")] if self.taps else []


class Replay:
    """A replay that has begun."""

    def __init__(self, asked: Asked, ops: Sequence[str]):
        import subprocess

        from vllm_accprobe.children import ONE_THREAD, Child

        more = [x for glob in ops for x in ("--ops", glob)]
        more += ["--op-mapping-file", str(asked.mapping)] if asked.mapping is not None else []
        more += ["--rate", repr(asked.rate)]
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  no pipe: nobody reads it while the comparison runs
        self._process: Child = Child(
            "vllm_accprobe.cli.replay.prove", *more, "--", str(asked.golden), str(asked.mine), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self._stderr, env={**os.environ, **ONE_THREAD},
        )  # fmt: skip

    def result(self, result: Comparison) -> tuple[str, str]:
        """Waits, with a bar on a terminal: (the proof's text, "") or ("", what the process said last). result: what was
        compared; the replay explains what is beyond its limits there."""
        proof = ""
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as to_it:  # one that died says so below
            to_it.write(json.dumps(_to_explain(result)) + "\n")
        lines = (json.loads(line) for line in self._process.stdout if line.endswith("\n"))
        first: dict[str, Any] = next(lines, {})
        with progress("replaying", int(first.get("of", 0)), steps=True) as to:
            for message in lines:
                proof = message.get("proof", proof)
                if "done" in message:
                    to(message["done"])
        code = self._process.wait()
        if code == 0 and proof:
            return proof, ""
        self._stderr.seek(0)
        said = [x for x in self._stderr.read().decode("utf-8", "replace").splitlines() if x.strip()]
        return "", said[-1].strip() if said else f"its process ended with {code}"

    def close(self) -> None:
        """Ends it, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._stderr.close()


@contextlib.contextmanager
def begun(asked: Asked) -> Iterator[Replay | None]:
    """A replay beside the comparison, where it is known already that all will be replayed; else None."""
    early = asked.replay is not False and (asked.replay or _small(asked)) and _torch()
    replay = Replay(asked, asked.globs) if early else None
    try:
        yield replay
    finally:
        if replay is not None:
            replay.close()


def replayed(
    result: Comparison, asked: Asked, replay: Replay | None, out: Path,
    before: Callable[[Comparison], object] = lambda result: None,
) -> Comparison:  # fmt: skip
    """``result`` of comparing these dumps, with what a replay proves, which is written to ``out``/replay.json.

    replay: what `begun` gave; before: called with ``result`` where a replay will decide, before it is waited for.
    Raises CommandError where it was asked for and there is no torch or it fails."""
    ops = _chosen(result, asked)
    if ops is None:
        return result
    if not _torch():
        if asked.replay:
            raise CommandError("--replay needs torch: install it beside accprobe (the CPU build will do)")
        return result
    from vllm_accprobe.opcheck.proof.decide import NAME, Proof

    before(result)
    late = Replay(asked, ops) if replay is None else None
    try:
        text, said = (replay or late).result(result)  # type: ignore[union-attr]
    finally:
        if late is not None:
            late.close()
    out.mkdir(parents=True, exist_ok=True)
    path = out / NAME
    path.unlink(missing_ok=True)
    try:
        proof = Proof.from_json(text)
    except ValueError:
        why = said or "it ended without a result"
        if asked.replay:
            raise CommandError(f"--replay: {why}") from None
        return replace(result, notes=[*result.notes, f"replay: failed and decides nothing: {why}"])
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
    return _decided(result, proof)


def _to_explain(result: Comparison) -> dict[str, list[str]]:
    """places: of pairs that fail; taps: of origins, which are explained whole (opcheck/proof/explained.py)."""
    from vllm_accprobe.comparison.result import FAIL
    from vllm_accprobe.opcheck.proof.explained import place_of

    failed = {place_of(p.tap, p.role, p.call) for p in result.pairs if p.status == FAIL}
    return {"places": sorted(failed), "taps": sorted({str(o["module"]) for o in result.origins})}


def remembered(result: Comparison, directory: Path) -> Comparison:
    """``result`` with what was proved when the comparison in ``directory`` was made, if anything was."""
    from vllm_accprobe.opcheck.proof.decide import NAME, Proof

    path = directory / NAME
    if not path.is_file():
        return result
    try:
        return _decided(result, Proof.from_json(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise CommandError(f"cannot read {path}: {error}; delete it to judge without the replay") from None


def told(result: Comparison, directory: Path, replay: bool | None) -> str:
    """What was kept and what was not done again where ``result`` was judged again from ``directory``. No note of the
    result itself, which is the same as it was the first time."""
    from vllm_accprobe.comparison.store.saved import NAME as MEASURED
    from vllm_accprobe.opcheck.proof.decide import NAME

    kept = f"the errors of {result.counts.total:,} pairs are those that were measured ({directory / MEASURED})"
    proof = f"what the replay proved then ({NAME}) was kept" if result.replayed else "nothing was replayed then"
    if (directory / NAME).is_file() and replay is False:
        proof = f"what the replay proved then ({NAME}) was left aside (--no-replay)"
    lost = "no tensor was read and no operator run again, so that sampled values and histograms are missing"
    return f"judged again: {kept}, {proof}; {lost}: compare the dumps for these"


def _decided(result: Comparison, proof: Proof) -> Comparison:
    from vllm_accprobe.comparison.result import PARTLY, WHOLE
    from vllm_accprobe.comparison.verdict.constants_differ import with_effects
    from vllm_accprobe.comparison.verdict.covered import with_covers
    from vllm_accprobe.opcheck.proof.decide import decide
    from vllm_accprobe.opcheck.proof.gaps import narrowed

    proof, said = allowed(proof, result.false_alarm_rate)
    decided = decide(with_effects(result, proof.constants), proof)
    decided = narrowed(decided, {b.tap for b in proof.blamed}, proof.right)
    decided = with_covers(replace(decided, replayed=PARTLY if proof.partly else WHOLE), proof.covers)
    return replace(decided, notes=[*said, *decided.notes])


def allowed(proof: Proof, rate: float) -> tuple[Proof, list[str]]:
    """``proof`` without the blames that honest machines earn more often than ``rate``, and a note about these. A blame
    says its own chance where that is known, so that a replay that was kept is judged by another rate, too."""
    left = [b for b in proof.blamed if (getattr(b, "chance", None) or 0.0) > rate]
    if not left:
        return proof, []
    more = f" and {len(left) - 1} more" if len(left) > 1 else ""
    said = f"replay: what is seen at {left[0].tap}{more} is likelier by chance than --false-alarm-rate {rate:g} allows"
    return replace(proof, blamed=tuple(b for b in proof.blamed if b not in left)), [f"{said}: not blamed"]


def _torch() -> bool:
    import importlib.util

    return importlib.util.find_spec("torch") is not None


def _chosen(result: Comparison, asked: Asked) -> list[str] | None:
    """Globs over taps to replay, empty for all; None for no replay."""
    if asked.replay is not None:
        return asked.globs if asked.replay else None
    if not all(_captured(run) for run in (result.golden_run, result.mine_run)):
        return None
    if _bytes(asked) <= SMALL:
        return asked.globs
    from vllm_accprobe.comparison.verdict.gaps import suspects_of

    suspects = list(dict.fromkeys(tap for o in result.origins[:SUSPECTS] for tap in suspects_of(o)))
    globs = [g for tap in suspects for g in (_literal(tap), _literal(tap) + ".*")]
    return globs or None


def _small(asked: Asked) -> bool:
    """Whether `_chosen` will choose all, by what can be told before the dumps are opened."""
    try:
        paths = [side / "run.json" for side in (asked.golden, asked.mine)]
        if any(path.stat().st_size > _MOST_RUN for path in paths):
            return False
        runs = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    except (OSError, ValueError, RecursionError):
        return False
    return all(isinstance(run, dict) and _captured(run) for run in runs) and _bytes(asked) <= SMALL


def _bytes(asked: Asked) -> int:
    return stored(asked.golden) + stored(asked.mine)


def _captured(run: dict[str, Any]) -> bool:
    """Whether a model was captured, by our probe, with its values."""
    probe = run.get("probe")
    return run.get("tool") == "accprobe" and isinstance(probe, dict) and probe.get("task") == "tensor"


def stored(dump: Path) -> int:
    """Bytes of a dump's segments."""
    total = 0
    try:
        for rank in dump.glob("rank*"):
            with os.scandir(rank) as entries:
                total += sum(e.stat().st_size for e in entries if e.name.startswith("seg-"))
    except OSError:
        pass
    return total


def _literal(tap: str) -> str:
    return tap.replace("[", "[[]")
