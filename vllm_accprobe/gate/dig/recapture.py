"""One side of a gate once more, with a capture of what was chosen.

The problem: a fault may need its batch, its chunks or a warm prefix cache, and a capture of all that costs more than
the disk has. The idea: the command is started with the probe on and disarmed, and is sent every prompt of the passes up
to the target's, in the same pattern and along golden's tokens; before each pass, while the server is idle, the control
file says which of its requests are captured. What a row costs is measured on golden's side with a request of four
tokens, before anything else.
Not here: what is chosen (choose.py), what the dumps say (culprit.py), who starts it (cli/gate_dig.py).
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_accprobe import arm_file
from vllm_accprobe.arm_file import ArmSelection, literal
from vllm_accprobe.dump.reader import open_dump
from vllm_accprobe.dump.schema import LOGITS
from vllm_accprobe.gate.dig.choose import DigPlan, RowSizes, narrowed
from vllm_accprobe.gate.sending import along, passes, replies
from vllm_accprobe.gate.sending.arrival import parse
from vllm_accprobe.gate.sending.client import Sender
from vllm_accprobe.gate.sending.prompts import PromptLine
from vllm_accprobe.gate.sending.replies import Sent
from vllm_accprobe.gate.sending.serving import served
from vllm_accprobe.run.settings import allow_plugin
from vllm_accprobe.whole_file import write_private

PLAN = "plan.json"
MEASURED = "accprobe-dig"
"""The name of the request with which a row is measured."""
SPARE = 0.95
"""Chosen: of the budget; what is planned is an upper bound already."""
_OURS = ("REQUESTS", "TOKENS", "STEPS", "DIR", "RUN_ID", "ARMED", "MAX_GB")
_SEEN_S = 20.0
"""Chosen: until a line of the measuring request is in the journal, which is written within a fraction of a second."""
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


class DigError(Exception):
    """One line: why there is no capture. Exit code 2."""


@dataclass(frozen=True)
class Recapturing:
    """gigabytes: disk budget of a rank. timeout, ready_s, model: as of `send`."""

    gigabytes: float
    timeout: float
    ready_s: float
    model: str
    environ: Mapping[str, str]
    progress: Progress


def environment(base: Mapping[str, str], dump: Path, gigabytes: float) -> dict[str, str]:
    """Of a command that captures into ``dump``, and begins disarmed."""
    environ = {k: v for k, v in base.items() if k not in {f"VLLM_ACCPROBE_{name}" for name in _OURS}}
    environ |= {"VLLM_ACCPROBE": "1", "VLLM_ACCPROBE_DIR": str(dump.absolute()), "VLLM_ACCPROBE_ARMED": "0",
                "VLLM_ACCPROBE_MAX_GB": f"{gigabytes:g}"}  # fmt: skip
    allow_plugin(environ)
    return environ


class Dig:
    """The folder of a dig: OUT/dig with plan.json, a dump of each side and what was sent to each.

    key: what must be the same where it is gone on with. Raises DigError, OSError."""

    def __init__(self, root: Path, key: Mapping[str, Any], plan: DigPlan):
        self.root, self.plan = root, plan
        self.done: list[str] = []
        self._key = json.loads(json.dumps({**key, "target": plan.to_json()["target"]}))
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (root / PLAN).exists():
            self._go_on()
        elif any(root.iterdir()):
            raise DigError(f"{root} has other files: name another --out")
        self._write()

    def dump(self, side: str) -> Path:
        return self.root / side

    def sent(self, side: str) -> Path:
        return self.root / f"sent-{side}"

    def _go_on(self) -> None:
        try:
            was = json.loads((self.root / PLAN).read_bytes())
            same = was["key"] == self._key
            plan, done = DigPlan.from_json(was["plan"]), [str(s) for s in was["done"]]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise DigError(f"{self.root / PLAN} is not of a dig: name another --out") from None
        if same:
            self.plan, self.done = plan, [s for s in done if (self.dump(s) / "run.json").exists()]

    def _write(self) -> None:
        text = json.dumps({"schema": 1, "key": self._key, "plan": self.plan.to_json(), "done": self.done}, indent=1)
        write_private(self.root / PLAN, text + "\n")

    def capture(self, side: str, command: str, golden: Sent, how: Recapturing) -> None:
        """Captures a side that is not done yet. golden: whose tokens are forced. Raises SendError, AlongError,
        DigError, OSError."""
        if side in self.done:
            return
        dump, sent = self.dump(side), self.sent(side)
        for old in (dump, sent):
            shutil.rmtree(old, ignore_errors=True)
            old.mkdir(mode=0o700)
        lines = along.forced_lines(golden)
        settings = golden.about.get("settings", {})
        arrivals = [parse(word) for word in self.plan.words if word != along.SCORE]
        score = along.SCORE in self.plan.words
        with ExitStack() as stack:
            environ = environment(how.environ, dump, how.gigabytes)
            url, key = stack.enter_context(served(command, environ, sent, how.ready_s))
            asked = Sender(url, key, timeout=how.timeout, top=int(settings.get("top", 20)), model=how.model)
            asked, server = asked.introduced()
            if side == "golden" and not self.done:
                sizes = measured(asked, dump, lines[0], how.gigabytes * 1e9 * SPARE)
                self.plan = self.plan if sizes is None else narrowed(self.plan, sizes)
            forcing = along.planned(asked, along.digest(golden), len(arrivals), score, None)
            tell = stack.enter_context(how.progress(f"{side}, captured", len(lines) * len(self.plan.words)))
            many = int(settings.get("concurrency", 64))

            def arm(index: int) -> None:
                self._arm(index, dump)

            passes.send(asked, server, lines, arrivals, many, sent, {}, tell, forcing, arm)
            arm_file.write(dump, ArmSelection(False))
        if not open_dump(dump).records:
            raise DigError(f"{dump}: nothing was captured; read {sent}/engine-0.log")
        self.done.append(side)
        self._write()

    def _arm(self, index: int, dump: Path) -> None:
        window = next((w for w in self.plan.windows if w.pass_index == index), None)
        if window is None:
            arm_file.write(dump, ArmSelection(False))
            return
        names = tuple(literal(name) for name in window.requests)
        arm_file.write(dump, ArmSelection(True, names, ((window.first, window.last),)))

    def replies(self, side: str) -> Sent:
        """What the side answered while it was captured. Raises FolderError, OSError."""
        return replies.read(self.sent(side))


def measured(sender: Sender, dump: Path, line: PromptLine, budget: float) -> RowSizes | None:
    """What a row costs this server, by a request of four tokens, fewer than any block of a prefix cache. None where
    nothing of it is seen. Raises SendError, OSError."""
    ids = (line.token_ids or tuple(range(4)))[:4]
    arm_file.write(dump, ArmSelection(True, (literal(MEASURED),), ((0, 0),)))
    sender.ask(PromptLine(MEASURED, token_ids=ids, max_tokens=1), MEASURED, {}, time.monotonic())
    arm_file.write(dump, ArmSelection(False))
    end = time.monotonic() + _SEEN_S
    while time.monotonic() < end:
        time.sleep(0.5)
        found = _sizes(dump, len(ids), budget)
        if found is not None:
            return found
    return None


def _sizes(dump: Path, rows: int, budget: float) -> RowSizes | None:
    """By the rank that has most; None where nothing is there yet."""
    opened = open_dump(dump)
    by_rank: dict[int, list[float]] = {}
    seen = set()
    for r in opened.records:
        place = None if r.payload is None else (r.rank, r.payload.seg, r.payload.off)
        if r.payload is None or place in seen:
            continue
        seen.add(place)
        kind = 2 if r.step is None else int(r.rows == LOGITS)
        by_rank.setdefault(r.rank, [0.0, 0.0, 0.0])[kind] += r.payload.nbytes
    if not any(row for row, _, _ in by_rank.values()):
        return None
    row, sampled, before = (max(sizes[i] for sizes in by_rank.values()) for i in range(3))
    return RowSizes(row / rows, sampled, budget - before - row - sampled)
