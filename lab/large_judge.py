"""Judges large pairs by the command, as a user does, and adds up what must be reached.

The problem: of a large pair the verdict alone is not enough; it has to come within a time and a memory, and to be the
one that a whole replay gives. The idea: each pair goes through `accprobe compare` in processes of its own, with default
settings and, with an option, once more with ``--replay``; what they wrote is read back. Not here: the pairs
(large_cases.py), measuring (watched.py), the command line (large.py).
"""

import csv
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

from lab import ROOT, watched
from lab.large_cases import Pair
from lab.strength import VISIBLE
from lab.totals import share

WEAK = VISIBLE * 256
"""In units of 2^-8: a worst row that is off by less is close to what rounding leaves."""
TIMEOUT_S = 1800
"""Chosen: nine times what a whole replay of the largest pair took."""
FIRST, AGREE = Fraction("0.95"), Fraction("0.98")
WALL_S, REAL_WALL_S, OWN_MB = 60.0, 120.0, 2000 / 1.048576
"""Chosen, by what users accept: shares, seconds on two cores (of group real: more), 2 GB of memory of its own (in
MiB)."""
CORES = 2


@dataclass(frozen=True)
class Verdict:
    """What one command answered and took; see watched.Measured.

    verdict: pass, fail, or the line of an error. culprit: the first origin's module. rank: of an expected module among
    the origins, 0: not there. replayed: how much, "whole" or "partly". seen: the largest error of a row of the expected
    module's outputs, in units of 2^-8.
    """

    verdict: str
    culprit: str = ""
    rank: int = 0
    origins: int = 0
    replayed: str = ""
    sentence: str = ""
    seen: float = 0.0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    own_mb: float = 0.0
    rss_mb: float = 0.0
    largest_mb: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """One pair. replay: the same pair with ``--replay``, None where there was none. load: of the machine when it
    began, over one minute. at: UTC."""

    name: str
    group: str
    half: str
    expected: tuple[str, ...]
    default: Verdict
    replay: Verdict | None = None
    load: float = 0.0
    at: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()))

    @property
    def clean(self) -> bool:
        return not self.expected

    @property
    def right(self) -> bool:
        return self.default.verdict == "pass" if self.clean else self.default.verdict == "fail" and self.first

    @property
    def first(self) -> bool:
        return self.default.verdict == "fail" and self.default.rank == 1

    @property
    def agrees(self) -> bool | None:
        """Whether both settings give the same verdict; None where there is one only."""
        return None if self.replay is None else self.replay.verdict == self.default.verdict


def judge(
    pair: Pair,
    golden: Path,
    mine: Path,
    options: Sequence[str] = (),
    *,
    replay: bool = False,
    known: Outcome | None = None,
) -> Outcome:
    """options: more words for `accprobe compare`, in both settings. known: an earlier outcome, whose default verdict is
    kept."""
    load = os.getloadavg()[0]
    default = known.default if known else compare(golden, mine, pair.expected, options)
    whole = compare(golden, mine, pair.expected, [*options, "--replay"]) if replay else None
    return Outcome(pair.name, pair.group, pair.half, pair.expected, default, whole, known.load if known else load)


def compare(golden: Path, mine: Path, expected: Sequence[str], options: Sequence[str]) -> Verdict:
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS" and not k.startswith("VLLM_ACCPROBE")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory(prefix="large-lab-") as folder:
        out = Path(folder, "report")
        command = [sys.executable, "-m", "vllm_accprobe", "compare", str(golden.resolve()), str(mine.resolve())]
        took = watched.run(
            [*command, "--out", str(out), *options], env=env, cwd=Path(folder), cores=CORES, timeout_s=TIMEOUT_S
        )
        used = {k: round(getattr(took, k), 1) for k in ("wall_s", "cpu_s", "own_mb", "rss_mb", "largest_mb")}
        if took.code not in (0, 1):
            printed = [line for line in (took.stderr or took.stdout).splitlines() if line.strip()]
            return Verdict(f"error: exit {took.code}: {printed[-1].strip() if printed else ''}", **used)
        result = json.loads((out / "compare.json").read_text())
        return Verdict(**_read(result, expected), seen=_seen(out / "compare.csv", expected), **used)


def strength(serial: Path, mine: Path, expected: Sequence[str]) -> Verdict:
    """``seen`` against a golden of the same kind, where nothing in front of the fault differs: what was planted."""
    return compare(serial, mine, expected, ["--no-replay", "--taps", ",".join(expected)])


def _read(result: Mapping[str, Any], expected: Sequence[str]) -> dict[str, Any]:
    origins = result["origins"]
    modules = [o["module"] for o in origins]
    rank = next((i + 1 for i, module in enumerate(modules) if module in expected), 0)
    blamed = origins[max(rank - 1, 0)] if origins else {}
    return {
        "verdict": result["verdict"], "culprit": modules[0] if modules else "", "rank": rank, "origins": len(modules),
        "replayed": str(result.get("replayed", "")),
        "sentence": str(blamed.get("shape") or blamed.get("sentence") or ""),
    }  # fmt: skip


def _seen(table: Path, expected: Sequence[str]) -> float:
    worst = 0.0
    with table.open(newline="") as lines:
        for row in csv.DictReader(lines):
            if row.get("tap") in expected and row.get("role", "").startswith("output"):
                worst = max(worst, float(row["worst_row_rel_l2"] or 0))
    return round(worst * 256, 2)


# --- sums ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Total:
    """faults, and of these fail and first; clean pairs, and alarms of them (errors count); pairs judged twice, and
    those that got the same verdict twice; the most that one default judgement took, and how many took too long."""

    half: str
    faults: int
    fail: int
    first: int
    clean: int
    alarms: int
    twice: int
    agree: int
    wall_s: float
    cpu_s: float
    own_mb: float
    late: int

    @property
    def missed(self) -> list[str]:
        shares = (("first", self.first, self.faults, FIRST), ("the same verdict", self.agree, self.twice, AGREE))
        found = [f"{name} {n} of {of}, needed {float(p):g}" for name, n, of, p in shares if n < p * of]
        found += [f"{self.alarms} alarms"] if self.alarms else []
        found += [f"{self.late} later than {WALL_S:g} s (group real: {REAL_WALL_S:g})"] if self.late else []
        return found + ([f"{self.own_mb:.0f} MiB, allowed {OWN_MB:.0f}"] if self.own_mb > OWN_MB else [])

    def lines(self) -> list[str]:
        rows = {
            "verdict fail": share(self.fail, self.faults),
            "culprit first": share(self.first, self.faults),
            "alarms of clean pairs": share(self.alarms, self.clean),
            "the same verdict with --replay": share(self.agree, self.twice),
            "at most": f"{self.wall_s:.1f} s, {self.cpu_s:.1f} s of processors, {self.own_mb:.0f} MiB of its own",
            "missed": "; ".join(self.missed) or "nothing",
        }
        return [f"{self.half}:", *[f"  {name}: {text}" for name, text in rows.items() if text]]


def total(half: str, outcomes: Iterable[Outcome]) -> Total:
    every = list(outcomes)
    faults, clean = [o for o in every if not o.clean], [o for o in every if o.clean]
    return Total(
        half, len(faults), sum(o.default.verdict == "fail" for o in faults), sum(o.first for o in faults), len(clean),
        sum(not o.right for o in clean), sum(o.replay is not None for o in every), sum(o.agrees is True for o in every),
        max((o.default.wall_s for o in every), default=0.0), max((o.default.cpu_s for o in every), default=0.0),
        max((o.default.own_mb for o in every), default=0.0),
        sum(o.default.wall_s > (REAL_WALL_S if o.group == "real" else WALL_S) for o in every),
    )  # fmt: skip


def load(path: Path) -> dict[str, Outcome]:
    """By name; empty where there is no such file."""
    if not path.exists():
        return {}
    return {o["name"]: _outcome(o) for o in json.loads(path.read_text())}


def _outcome(o: dict[str, Any]) -> Outcome:
    replay = None if o["replay"] is None else Verdict(**o["replay"])
    known = {f.name for f in fields(Outcome)}
    named = {k: v for k, v in o.items() if k in known}
    return Outcome(**named | {"expected": tuple(o["expected"]), "default": Verdict(**o["default"]), "replay": replay})


def save(path: Path, outcomes: Mapping[str, Outcome]) -> None:
    """A judging that is interrupted leaves the results that were there."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps([asdict(o) for o in outcomes.values()], indent=1))
    new.replace(path)
