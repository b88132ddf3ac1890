"""From a gate that failed to an operator: which rows are captured on both sides, and what their comparison says.

The problem: a capture of everything does not fit on a disk; the worst token's own row may only show what an earlier row
left in the KV cache; a fault may need its batch, its chunks or a cached prefix; and a start takes minutes. The idea: a
server with the probe on and disarmed is sent every prompt up to the target's pass, in the same pattern and along
golden's tokens; before each pass the control file says which requests are captured: a few whole ones, and those that
filled their prefix cache. An eager server of the gate is kept for it (`KeptServers`); a cache salt makes it as fresh as
one that is started. A row's size is measured first; what exceeds the budget is left out in a fixed order, each with a
sentence. Where a side cannot be started here, the same is printed as commands.

Not here: which tokens are worst (measure/gating.py), comparing (comparison/), sentences (report/servers.py).
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from vllm_accprobe import arm_file
from vllm_accprobe.arm_file import ArmSelection, literal
from vllm_accprobe.dump.decode import DecodeError, load
from vllm_accprobe.dump.reader import open_dump
from vllm_accprobe.dump.schema import LOGITS
from vllm_accprobe.gate.measure.token_gaps import gaps
from vllm_accprobe.gate.sending import passes, replies
from vllm_accprobe.gate.sending.client import Reply, Sender
from vllm_accprobe.gate.sending.passes import SCORE, parse
from vllm_accprobe.gate.sending.prompts import PromptLine
from vllm_accprobe.gate.sending.replies import Sent
from vllm_accprobe.gate.served_run import ServedRun, served
from vllm_accprobe.judge.origins import OriginEntry
from vllm_accprobe.progress import USUAL, Pace, waiting
from vllm_accprobe.run.launcher import allow_plugin
from vllm_accprobe.whole_file import write_private

MOST = 3
"""Chosen: requests. One may be an accident of its batch; each costs as much disk as the first."""


class Token(Protocol):
    """A token of a gate's ``worst``."""

    @property
    def name(self) -> str: ...
    @property
    def ordinal(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def gap(self) -> float: ...
    @property
    def pass_index(self) -> int: ...


@dataclass(frozen=True)
class LocalizeTarget:
    """The token that is dug for. ordinal: as VLLM_ACCPROBE_TOKENS counts; gap: in nats, of the gate."""

    name: str
    ordinal: int
    position: int
    gap: float
    pass_index: int


@dataclass(frozen=True)
class Window:
    """What is captured in one pass: of the prompts ``names`` the token ordinals first to last. prompts: how many
    tokens each prompt has."""

    pass_index: int
    names: tuple[str, ...]
    first: int
    last: int
    prompts: tuple[int, ...]

    @property
    def prompt_rows(self) -> int:
        return sum(self.prompts)

    @property
    def rows(self) -> int:
        """At most; what the prefix cache holds is not computed."""
        return (self.prompt_rows if self.first == 0 else 0) + self.sampled - len(self.names) * (self.first == 0)

    @property
    def sampled(self) -> int:
        """Rows that reach the logits."""
        return len(self.names) * (self.last - self.first + 1)

    @property
    def requests(self) -> tuple[str, ...]:
        """As the server is asked."""
        return tuple(replies.request_id(name, self.pass_index) for name in self.names)


@dataclass(frozen=True)
class LocalizePlan:
    """windows: by rising pass, the target's last. words: the arrivals of the passes that are sent, the target's last.
    left: what is not captured, as sentences."""

    target: LocalizeTarget
    windows: tuple[Window, ...]
    words: tuple[str, ...]
    left: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class PlanFile:
    """plan.json. key: what must be the same where it is gone on with; done: sides."""

    key: dict[str, Any]
    plan: LocalizePlan
    done: list[str]


def choose(golden: Sent, mine: Sent, worst: Sequence[Token]) -> LocalizePlan:
    """worst: of the gate, most informative first, at least one."""
    words = [str(p.get("arrive")) for p in golden.about["passes"]]
    served = [w for w in worst if w.pass_index < len(words) and words[w.pass_index] != SCORE]
    first = (served or list(worst))[0]
    target = LocalizeTarget(first.name, first.ordinal, first.position, first.gap, first.pass_index)
    here = [w for w in (served or worst) if w.pass_index == target.pass_index]
    names = tuple(dict.fromkeys(w.name for w in here))[:MOST]
    last = max(next(w.ordinal for w in here if w.name == name) for name in names)
    windows = {target.pass_index: _window(golden, target.pass_index, names, 0, last)}
    for name in names:
        source = _filled_by(golden, mine, name, target.pass_index, words)
        if source is None:
            continue
        index, other = source
        had = windows.get(index)
        if had is None:
            windows[index] = _window(golden, index, (other,), 0, 0)
        elif other not in had.names:
            windows[index] = _window(golden, index, (*had.names, other), 0, had.last)
    score = target.pass_index < len(words) and words[target.pass_index] == SCORE
    sent = [w for w in words[: target.pass_index + 1] if w != SCORE] + ([SCORE] if score else [])
    return LocalizePlan(target, tuple(windows[i] for i in sorted(windows)), tuple(sent))


def _window(golden: Sent, index: int, names: tuple[str, ...], first: int, last: int) -> Window:
    return Window(index, names, first, last, tuple(len(_prompt(golden, name)) for name in names))


def _prompt(golden: Sent, name: str) -> list[int]:
    reply = golden.passes[0].get(name)
    return (reply.prompt_token_ids or []) if reply is not None else []


def _filled_by(golden: Sent, mine: Sent, name: str, index: int, words: Sequence[str]) -> tuple[int, str] | None:
    """(pass, prompt) of the request that the prefix cache had the prompt of ``name`` from, on either side; None where
    nothing came from there."""
    known = [n for side in (golden, mine) if (n := _cached(side, name, index)) is not None]
    prompt = _prompt(golden, name)
    cached = max(known) if known else len(prompt) if index else 0
    if not cached:
        return None
    order = list(golden.passes[0])
    for earlier in range(index + 1):
        before = order if earlier < index else order[: order.index(name)] if words[index] == "one" else []
        for other in before:
            if _prompt(golden, other)[:cached] == prompt[:cached]:
                return earlier, other
    return None


def _cached(side: Sent, name: str, index: int) -> int | None:
    """Prompt tokens that were not computed, where the engine or the server reported it."""
    rows = replies.read_steps(side.path).rows(index, name)
    if rows:
        return rows[0][1]
    reply: Reply | None = side.passes[index].get(name) if index < len(side.passes) else None
    return None if reply is None else reply.cached


@dataclass(frozen=True)
class RowSizes:
    """Bytes of one rank, measured. row: of all modules, for a row of tokens; sampled: for one that reaches the logits,
    in addition; left: of the disk budget."""

    row: float
    sampled: float
    left: float

    def of(self, plan: LocalizePlan) -> float:
        return sum(w.rows * self.row + w.sampled * self.sampled for w in plan.windows)


def narrowed(plan: LocalizePlan, sizes: RowSizes) -> LocalizePlan:
    """As much of ``plan`` as fits; the target's own row is in it in any case."""
    *others, own = plan.windows
    left = list(plan.left)
    had = len(own.names)
    while len(own.names) > 1 and sizes.of(plan) > sizes.left:
        own = replace(own, names=own.names[:-1], prompts=own.prompts[:-1])
        plan = replace(plan, windows=(*others, own))
    if len(own.names) < had:
        left.append(f"{had - len(own.names)} of {had} requests")
    if sizes.of(plan) > sizes.left and others:
        left.append("the requests that filled the prefix cache: an error in their rows shows in what was read from it")
        others, plan = [], replace(plan, windows=(own,))
    if sizes.of(plan) > sizes.left and own.last > 0:
        left.append(f"the {own.prompt_rows:,} rows of the prompt: an error that they left in the KV cache shows later")
        own = replace(own, first=1)
        plan = replace(plan, windows=(own,))
    if sizes.of(plan) > sizes.left and own.first:
        fits = max(int(sizes.left // max(sizes.row + sizes.sampled, 1)), 1)
        if own.last - fits + 1 > own.first:
            left.append(f"the tokens before token {own.last - fits + 1}")
            own = replace(own, first=own.last - fits + 1)
            plan = replace(plan, windows=(own,))
    if sizes.of(plan) > sizes.left:
        left.append(f"what the budget ends before: {sizes.of(plan) / 1e9:.3g} GB a rank are needed (--localize-gb)")
    return replace(plan, left=tuple(left))


def lines(plan: LocalizePlan, golden: Path, gigabytes: float) -> list[str]:
    """golden: the folder along which both sides are sent."""
    found = []
    for side in ("golden", "mine"):
        found += [
            f"{side}, on its machine (COMMAND: what serves it there; end it with SIGTERM or Ctrl-C when all is sent):",
            f"  {settings(plan, side, gigabytes)} COMMAND",
            f"  {shlex.join(['accprobe', 'send', '--teacher-force', str(golden), '--url', 'URL'])} --out {side}-dig",
        ]
    return [*found, "anywhere:", "  accprobe compare golden-dump mine-dump --out compare"]


def settings(plan: LocalizePlan, side: str, gigabytes: float) -> str:
    """The environment of a side's command."""
    requests = ",".join(literal(name) for window in plan.windows for name in window.requests)
    first, last = min(w.first for w in plan.windows), max(w.last for w in plan.windows)
    values = {
        "": "1", "_FORCE": "1", "_DIR": f"{side}-dump", "_MAX_GB": f"{gigabytes:g}", "_REQUESTS": requests,
        "_TOKENS": f"{first}-{last}" if last > first else str(first),
    }  # fmt: skip
    return " ".join(f"VLLM_ACCPROBE{name}={shlex.quote(value)}" for name, value in values.items())


PLAN = "plan.json"
_MOST_OF_PLAN = 64 << 20
MEASURED = "accprobe-dig"
"""The name of the request with which a row is measured."""
SPARE = 0.95
"""Chosen: of the budget; what is planned is an upper bound already."""
_OURS = ("REQUESTS", "TOKENS", "STEPS", "DIR", "RUN_ID", "ARMED", "MAX_GB")
_SEEN_S = 20.0
"""Chosen: until a line of the measuring request is in the journal, which is written within a fraction of a second."""
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


class LocalizeError(Exception):
    """One line: why there is no capture. Exit code 2."""


@dataclass(frozen=True)
class Recapturing:
    """gigabytes: disk budget of a rank. timeout, ready_s, model, say: as of `SendSettings`. kept: servers that run."""

    gigabytes: float
    timeout: float
    ready_s: float
    model: str
    environ: Mapping[str, str]
    progress: Progress
    say: Pace = USUAL
    kept: KeptServers = field(default_factory=lambda: KeptServers())


def environment(base: Mapping[str, str], dump: Path, gigabytes: float) -> dict[str, str]:
    """Of a command that captures into ``dump``, and begins disarmed."""
    environ = {k: v for k, v in base.items() if k not in {f"VLLM_ACCPROBE_{name}" for name in _OURS}}
    environ |= {"VLLM_ACCPROBE": "1", "VLLM_ACCPROBE_DIR": str(dump.absolute()), "VLLM_ACCPROBE_ARMED": "0",
                "VLLM_ACCPROBE_MAX_GB": f"{gigabytes:g}"}  # fmt: skip
    allow_plugin(environ)
    return environ


class KeptServers:
    """Servers of a gate that run until its verdict, with the probe on and disarmed: a side that differs is armed and
    asked again. sides: golden, mine or both; root: where their dumps go; gigabytes: disk budget of a rank."""

    def __init__(self, sides: Collection[str] = (), root: Path = Path(), gigabytes: float = 0.0):
        self.sides, self._root, self._gigabytes = sides, root, gigabytes
        self._runs: dict[str, tuple[ServedRun, ExitStack]] = {}

    @contextmanager
    def serve(
        self, side: str, command: str, environ: Mapping[str, str], out: Path, ready_s: float, say: Pace
    ) -> Iterator[ServedRun]:
        """As `served`; a side that is kept runs on after the context."""
        if side not in self.sides:
            with served(side, command, environ, out, ready_s, say) as run:
                yield run
            return
        dump = self._root / side
        shutil.rmtree(dump, ignore_errors=True)
        dump.mkdir(mode=0o700, parents=True)
        stack = ExitStack()
        run = stack.enter_context(
            served(side, command, environment(environ, dump, self._gigabytes), out, ready_s, say)
        )
        self._runs[side] = run, stack
        with run.reporting():
            yield run
        _settle(run.log.parent)

    def runs(self, side: str) -> bool:
        return side in self._runs

    @contextmanager
    def taken(self, side: str) -> Iterator[ServedRun]:
        """The server of a side, which is ended with the context. The steps of the gate's answers stay as they are."""
        run, stack = self._runs.pop(side)
        steps: dict[Path, int] = {}
        try:
            steps = {path: path.stat().st_size for path in run.log.parent.glob("steps-*/*.jsonl")}
            with run.reporting():
                yield run
        finally:
            try:
                stack.close()
            finally:
                for path, size in steps.items():
                    with suppress(FileNotFoundError):
                        os.truncate(path, size)

    def close(self) -> None:
        """Ends what was not taken; of that nothing was captured."""
        with ExitStack() as ends:  # each is ended, whatever the other one's end raises
            for side in [*self._runs]:
                ends.callback(self._end, side)

    def _end(self, side: str) -> None:
        with self.taken(side):
            pass
        shutil.rmtree(self._root / side, ignore_errors=True)
        with suppress(OSError):
            self._root.rmdir()


_SETTLED_S = 0.3
"""Chosen: three times as long as the plugin waits between two writes of its steps."""


def _settle(folder: Path) -> None:
    """Waits until a server that runs on has written the steps of its answers; 3 s at most."""
    before: dict[Path, int] | None = None
    for _ in range(10):
        now = {path: path.stat().st_size for path in folder.glob("steps-*/*.jsonl")}
        if now == before or not now:
            return
        before = now
        time.sleep(_SETTLED_S)


_SALT = "accprobe-dig"


def salted(lines: Sequence[PromptLine], salt: str = _SALT) -> list[PromptLine]:
    """With a cache salt of a capture: no prefix that was computed before it is found, those within it are."""
    return [
        replace(one, parameters={**one.parameters, "cache_salt": f"{salt} {one.parameters.get('cache_salt', '')}"})
        for one in lines
    ]


class Localization:
    """The folder of a dig: OUT/dig with plan.json, a dump of each side and what was sent to each.

    key: what must be the same where it is gone on with. Raises LocalizeError, OSError."""

    def __init__(self, root: Path, key: Mapping[str, Any], plan: LocalizePlan):
        self.root, self.plan = root, plan
        self.done: list[str] = []
        self._key = json.loads(json.dumps({**key, "target": plan.to_json()["target"]}))
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (root / PLAN).exists():
            self._go_on()
        elif any(path.name not in ("golden", "mine") for path in root.iterdir()):
            raise LocalizeError(f"{root} has other files: name another --out")
        self._write()

    def dump(self, side: str) -> Path:
        return self.root / side

    def sent(self, side: str) -> Path:
        return self.root / f"sent-{side}"

    def _go_on(self) -> None:
        try:
            was = load(PlanFile, self.root / PLAN, _MOST_OF_PLAN, {"schema": 1})
        except DecodeError:
            raise LocalizeError(f"{self.root / PLAN} is not of a dig: name another --out") from None
        if was.key == self._key:
            self.plan, self.done = was.plan, [s for s in was.done if (self.dump(s) / "run.json").exists()]

    def _write(self) -> None:
        file = {"schema": 1, **asdict(PlanFile(self._key, self.plan, self.done))}
        write_private(self.root / PLAN, json.dumps(file, indent=1) + "\n")

    def capture(self, side: str, command: str, golden: Sent, how: Recapturing) -> None:
        """Captures a side that is not done yet. golden: whose tokens are forced. Raises SendError, TeacherForcingError,
        LocalizeError, OSError."""
        kept = how.kept.runs(side)
        if side in self.done and not kept:
            return
        dump, sent = self.dump(side), self.sent(side)
        for old in (sent,) if kept else (dump, sent):
            shutil.rmtree(old, ignore_errors=True)
            old.mkdir(mode=0o700)
        lines = salted(passes.forced_lines(golden))
        settings = golden.about.get("settings", {})
        arrivals = [parse(word) for word in self.plan.words if word != passes.SCORE]
        score = passes.SCORE in self.plan.words
        with ExitStack() as stack:
            environ = environment(how.environ, dump, how.gigabytes)
            start = how.kept.taken(side) if kept else served(side, command, environ, sent, how.ready_s, how.say)
            run = stack.enter_context(start)
            server, top = run.command, int(settings.get("top", 20))
            sender = Sender(server.url, server.key, timeout=how.timeout, top=top, model=how.model)
            with waiting(lambda: f"{side}: measuring a row", how.say):
                sender, about = sender.introduced()
                if not self.done:
                    sizes = measured(sender, dump, lines[0], how.gigabytes * 1e9 * SPARE)
                    self.plan = self.plan if sizes is None else narrowed(self.plan, sizes)
                forcing = passes.planned(sender, passes.digest(golden), len(arrivals), score, None)
            tell = stack.enter_context(how.progress(f"{side}, captured", len(lines) * len(self.plan.words)))
            many = int(settings.get("concurrency", 64))

            def arm(index: int) -> None:
                self._arm(index, dump)

            passes.send(sender, about, lines, arrivals, many, sent, {}, tell, forcing, arm)
            arm_file.write(dump, ArmSelection(False))
        if not open_dump(dump).records:
            raise LocalizeError(f"{dump}: nothing was captured; read {run.log}")
        self.done = [*(s for s in self.done if s != side), side]
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


SHOWS = 0.5
"""Chosen: of the gate's gap at the target; a captured run batches otherwise, and rounding moves a gap by less."""
_PASS = ".pass"
EAGER = b"the engine is made eager"
"""What the plugin says (plugin.py)."""
_START = 1 << 20


@dataclass(frozen=True)
class Localized:
    """verdict, origin: of compare.json, origin None where nothing is one; others: how many more. gap: at the target
    while captured, None where it is not known. token: the culprit's place as (prompt, pass, ordinal), None where it is
    none of a request that was sent. eager: mine was made eager for the capture. look: commands."""

    plan: LocalizePlan
    verdict: str
    origin: OriginEntry | None
    others: int
    gap: float | None
    token: tuple[str, int, int] | None
    eager: bool
    look: tuple[str, ...]

    @property
    def shows(self) -> bool | None:
        """Whether the difference was there while captured; None where that is not known."""
        return None if self.gap is None else self.gap >= SHOWS * self.plan.target.gap

    def to_json(self) -> dict[str, Any]:
        """The ``dig`` of gate's json."""
        where = None if self.token is None else dict(zip(("prompt", "pass", "ordinal"), self.token, strict=True))
        return {
            "plan": self.plan.to_json(), "verdict": self.verdict, "culprit": self.origin, "token": where,
            "other_origins": self.others, "gap_while_captured": self.gap, "eager": self.eager, "look": list(self.look),
        }  # fmt: skip


def dug(dig: Localization, compared: Path, golden: Sent) -> Localized:
    """compared: the folder of the comparison. golden: the gate's, whose prompts the culprit's request is one of. Raises
    OSError, ValueError."""
    comparison = json.loads((compared / "compare.json").read_bytes())
    origins = comparison.get("origins") or []
    origin = origins[0] if origins else None
    return Localized(
        dig.plan, str(comparison.get("verdict")), origin, max(len(origins) - 1, 0), _gap(dig), _token(origin, golden),
        made_eager(dig.sent("mine") / "engine-0.log"), commands(dig.dump("golden"), dig.dump("mine"), dig.root),
    )  # fmt: skip


def made_eager(log: Path) -> bool:
    """Whether the engine would have compiled or captured graphs, had it not been captured: it says so at its start."""
    try:
        with log.open("rb") as f:
            return EAGER in f.read(_START)
    except OSError:
        return False


def commands(golden: Path, mine: Path, out: Path) -> tuple[str, ...]:
    """To look further."""
    words = [
        ("accprobe", "compare", golden, mine, "--out", out / "compare", "--verbose"),
        ("accprobe", "opcheck", mine, "--out", out / "opcheck"),
        ("accprobe", "gentest", mine, "--failed", "--out", out / "gentest"),
    ]
    return tuple(shlex.join(map(str, line)) for line in words)


def _gap(dig: Localization) -> float | None:
    """As the gate's: root mean square over the tokens that golden lists."""
    target = dig.plan.target
    index = len(dig.plan.words) - 1
    sides = [dig.replies(side).passes for side in ("golden", "mine")]
    pair = [p[index].get(target.name) if index < len(p) else None for p in sides]
    if pair[0] is None or pair[1] is None:
        return None
    found, _, _ = gaps(pair[0], pair[1])
    return next((t.distance for t in found if t.position == target.position), None)


def _token(origin: OriginEntry | None, golden: Sent) -> tuple[str, int, int] | None:
    if origin is None or type(origin.get("position")) is not int:
        return None
    request, position = str(origin["request"]), origin["position"] or 0
    for index in range(len(golden.passes)):
        name = request.removesuffix(f"{_PASS}{index}") if index else request
        reply = golden.passes[0].get(name)
        if reply is not None and reply.prompt_token_ids and replies.request_id(name, index) == request:
            return name, index, max(position - len(reply.prompt_token_ids) + 1, 0)
    return None
