"""One process of opcheck: gets a job, checks the taps that it gets, and writes rows as lines of JSON.

The problem: an operator's own kernel may crash, or need more memory than there is, and must not take the other hundred
thousand checks with it. The idea: this program (started as a child, children.py) reads one job and then taps from its
standard input; before each call it says which one begins, so that whoever started it knows what it died of. Nothing is
pickled. Elsewhere: the checks (open_job.py, which needs torch), who starts it (process_pool.py).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from vllm_accprobe.children import ONE_THREAD

EXACT, DEVICE, GOLDEN, AGAIN = "float64", "device", "golden", "rerun"
_LATER = ("repeat", "batch", "named", "load", "attributes", "devices", "white", "black", "once", "jit",
          "operations", "op_csv", "within")  # fmt: skip
"""Fields that Job got later; empty ones are left out of its JSON, so that what was begun before them goes on."""


@dataclass(frozen=True)
class Job:
    """What is requested. dump, model, golden: paths, the last two may be ""; against: EXACT, DEVICE, GOLDEN or AGAIN;
    standard, kl, ids: replay.Options'; backward: gradients too; seed: of drawn inputs and gradients; save: where failed
    calls are written, "" for nowhere. repeat, batch: instead of a reference, runs of each call here (repeated.py), and
    sizes of batches (by_rows.py); named: an operator named by hand (named.py), as JSON, in place of a dump; load:
    modules to import first; attributes: of modules, that were not recorded (records.py). devices: what is checked is
    what the operators give here, on these; white, black: API names (opcheck/compat/msprobe.py); once: calls that differ
    in values alone are checked once; jit: an NPU compiles its operators. Of ATB's dumps: operations: only
    these, as ``24_1`` (opcheck/compat/ait.py); op_csv: the table of operators; within: the share of elements within
    ait's tolerance, absolute (opcheck/compat/ait.py)."""

    dump: str
    model: str = ""
    ops: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    against: str = EXACT
    golden: str = ""
    standard: str = "operator"
    kl: bool = False
    backward: bool = False
    seed: int = 0
    save: str = ""
    repeat: int = 0
    batch: tuple[str, ...] = ()
    named: Mapping[str, Any] | None = None
    load: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    white: tuple[str, ...] = ()
    black: tuple[str, ...] = ()
    once: bool = False
    jit: bool = False
    operations: tuple[str, ...] = ()
    op_csv: str = ""
    within: bool = False

    @property
    def runs_here(self) -> bool:
        """Whether this machine's own kernels are run, which need all of its threads."""
        return bool(self.repeat or self.batch or self.named is not None)

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {k: v for k, v in asdict(self).items() if v or k not in _LATER}

    def on(self, device: str) -> Job:
        """The same for one of its devices."""
        return replace(self, devices=(device,))

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Job:
        lists = ("ops", "ids", "batch", "load", "attributes", "devices", "white", "black", "operations")
        return cls(**{**tree, **{k: tuple(tree[k]) for k in lists if k in tree}})


Tap = tuple[int, str, str]
"""(rank, tap, class); STORED stands for the parameters."""
TOGETHER = (None, -1)
"""What begins where several calls are evaluated as one: whose fault a crash is then shows when each is alone."""
STORED: Tap = (-1, "", "")

def main() -> None:
    """The protocol: a job, then taps, one JSON object a line; answers likewise. Ends with its input."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8", errors="backslashreplace")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a kernel prints must not meet the rows

    def say(**message: Any) -> None:
        channel.write(json.dumps(message) + "\n")
        if "row" not in message:  # rows go out with what is said next
            channel.flush()

    try:
        job = Job.from_json(json.loads(sys.stdin.readline()))
        if job.runs_here:  # a race takes two; before torch or numba search for them
            for name in ONE_THREAD:
                os.environ.pop(name, None)
        from vllm_accprobe.opcheck.run.open_job import OpenJob

        bench = OpenJob(job)
        said = list(bench.problems)
        say(taps=bench.taps(), problems=said)
    except Exception as error:
        kinds = {c.__name__ for c in type(error).__mro__}
        known = kinds & {"DumpError", "OSError", "Unavailable"}
        say(error=str(error) if known else f"{type(error).__name__}: {error}")
        return

    for line in sys.stdin:
        task = json.loads(line)
        crashed = {(step, call): why for step, call, why in task["crashed"]}
        rank, tap, cls = task["tap"]
        try:
            for row in bench.rows((rank, tap, cls), crashed, lambda step, call: say(begin=[step, call]), task["alone"]):
                say(row=row.to_plain())
            say(end=True, problems=[p for p in bench.problems if p not in said])
            said = bench.problems
        except Exception as error:  # a defect of ours or of the dump: the tap's row, not the end
            say(failed=f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")
