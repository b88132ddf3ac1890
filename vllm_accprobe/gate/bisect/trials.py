"""One trial: a command with some settings made plain is served, sent the prompts and judged, or its result is kept.

The problem: a trial costs a server's start, a bisection is hours, and settings change rounding, so that the gate alone
fails for nearly any two of them. The idea: a trial's folder has a name of all that decides its numbers (words,
environment, prompts, versions): a complete one is not run again, one that was begun is resumed. A trial fails where the
gate fails and its distance from golden is a good part of the command's own: the same failure, not any other [Zeller and
Hildebrandt, 3.1]. vLLM's log tells what defaults were chosen; a setting that two logs show alike is none.

Not here: what is tried (search.py), the gate's verdict (measure/gating.py).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_accprobe.dump.decode import object_in
from vllm_accprobe.gate import sides
from vllm_accprobe.gate.bisect.edits import MODEL_LENGTH, BisectError, Edit, ServeCommand, ServerSetting, partial
from vllm_accprobe.gate.bisect.search import (
    FAIL,
    PASS,
    UNRESOLVED,
    Cause,
    Configuration,
    Found,
    TrialOutcome,
    edits_of,
    without,
)
from vllm_accprobe.gate.measure import conditions, gating
from vllm_accprobe.gate.sending import passes, prompts, replies
from vllm_accprobe.gate.sending.client import NotServed, ServerLost
from vllm_accprobe.gate.sending.prompts import PromptLine
from vllm_accprobe.gate.sending.replies import Sent
from vllm_accprobe.gate.served_run import served
from vllm_accprobe.gate.sides import SendSettings
from vllm_accprobe.progress import waiting
from vllm_accprobe.whole_file import write_private

_CONFIG = "with config: "
MAX_BYTES = 4 << 20
"""Chosen: of a log, from its beginning; the configuration stands within the first 100 KB."""
_FACTS = {
    "eager": r"\benforce_eager=(\w+)",
    "prefix": r"\benable_prefix_caching=(\w+)",
    "KV cache dtype": r"\bkv_cache_dtype='?([\w.]+)",
    "custom operators": r"'custom_ops': (\[[^\]]*\])",
    "IR operators": r"\bir_op_priority=(IrOpPriorityConfig\([^)]*\))",
}
"""Of the line with the configuration, by the name in `ServerSetting.fact`."""
_LINES = {"async": r"Asynchronous scheduling is (enabled|disabled)", "chunks": r"Chunked prefill is enabled with (\S+)"}
_USED = re.compile(r"(enabled|disabled) custom ops: Counter\(\{([^}]*)\}\)")


def read(path: Path | None) -> str:
    """The beginning of a log, "" where there is none."""
    try:
        with open(path or "", "rb") as f:
            return f.read(MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""


def facts(text: str) -> dict[str, str]:
    """By `ServerSetting.fact`, what the log says of it, and nothing else."""
    found = {}
    config = next((line for line in text.splitlines() if _CONFIG in line), "")
    for source, patterns in ((config, _FACTS), (text, _LINES)):
        for name, pattern in patterns.items():
            if match := re.search(pattern, source):
                found[name] = match[1]
    return found


def used(text: str) -> dict[str, bool] | None:
    """The custom operators of the model: whether each is enabled. None where the log does not tell."""
    found: dict[str, bool] = {}
    logged = False
    for what, names in _USED.findall(text):
        logged = True
        for name in re.findall(r"'([a-z0-9_]+)'", names):
            found[name] = found.get(name, False) or what == "enabled"
    return found if logged else None


def same(name: str, one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether both tell ``name``, and alike."""
    return bool(name) and name in one and one[name] == other.get(name)


TRIAL, FOLDER = "trial.json", "sent"
_DECIDES = re.compile(
    r"(VLLM|ACCPROBE|CUDA|NCCL|NVIDIA|HIP|HSA|ROC|MIOPEN|ASCEND|HCCL|NPU|XPU|XRE|XMLIR|XTORCH|BKCL|KUNLUN|MLU|MUSA|MACA"
    r"|TORCH|PYTORCH|TRITON|INDUCTOR|FLASHINFER|OMP|MKL|KMP|OPENBLAS|ONEDNN|DNNL|GLOO|HF|TRANSFORMERS|LD)_|PYTHONPATH$"
)
"""Chosen: variables that may change numbers; the rest of an environment differs from terminal to terminal."""
_NOT = re.compile(r"VLLM_API_KEY$|HF_TOKEN$|ACCPROBE_TRACEBACK$|VLLM_LOGGING|VLLM_ACCPROBE_RUN_ID$")


@dataclass(frozen=True)
class TrialPrompts(SendSettings):
    """What every trial is sent, and how. prompts: what the lines came from, for send.json."""

    lines: tuple[PromptLine, ...] = field(default=(), repr=False)

    def digest(self) -> str:
        how = [list(self.arrive), self.concurrency, self.top, self.max_tokens, self.model]
        return prompts.digest(list(self.lines)) + json.dumps(how)

    def send(self, url: str, key: str, out: Path, made: Mapping[str, Any]) -> None:
        """Raises what `passes.send` raises."""
        sender, about = self.sender(url, key).introduced()
        arrive = [passes.parse(word) for word in self.arrive]
        passes.send(sender, about, list(self.lines), arrive, self.concurrency, out, dict(made))


@dataclass(frozen=True)
class Tried:
    """sent: the folder, None where there is no server to ask: then ``why`` says it. log: its last engine's. seconds:
    of the run, of all its starts. kept: nothing was started for it now."""

    key: str
    sent: Path | None
    log: Path | None
    seconds: float
    kept: bool = False
    why: str = ""


class Trials:
    """OUT/trials/. versions: of the vLLM that runs, and ours. made: for send.json. variables: those of a vendor's
    switches, which decide, too."""

    def __init__(
        self, out: Path, prompts: TrialPrompts, versions: Mapping[str, str], made: Mapping[str, Any],
        variables: Iterable[str] = (),
    ):  # fmt: skip
        self._variables = frozenset(variables)
        self._out, self._prompts, self._versions, self._made = out / "trials", prompts, dict(versions), dict(made)
        self._ran: set[str] = set()

    def key(self, command: ServeCommand, again: int = 0) -> str:
        """Of everything that decides a trial's numbers; again: counts repetitions of the same."""
        named = self._variables | {name for name, _ in command.environ}
        environ = {k: v for k, v in command.full().items() if k in named or (_DECIDES.match(k) and not _NOT.match(k))}
        what = [command.words, sorted(environ.items()), self._prompts.digest(), sorted(self._versions.items()), again]
        return hashlib.sha256(json.dumps(what).encode("utf-8", "backslashreplace")).hexdigest()[:16]

    def known(self, command: ServeCommand, again: int = 0) -> Tried | None:
        """What is kept of it, None where it must be run."""
        key = self.key(command, again)
        return self._known(key, self._out / key)

    def run(self, command: ServeCommand, again: int = 0, *, afresh: bool = False) -> Tried:
        """afresh: also where it is known. Raises ServerLost where it was lost for the first time, SendError where it
        does not answer, OSError; the answers so far are kept then, and the next call goes on."""
        key = self.key(command, again)
        place = self._out / key
        if not afresh and (known := self._known(key, place)) is not None:
            return known
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = {} if afresh else _read(place)
        began = time.monotonic()
        about |= {"schema": 1, "command": command.line(), "lost": about.get("lost", 0)}
        try:
            self._serve(command, place)
        except NotServed as e:
            about["why"] = str(e)
        except ServerLost as e:
            about["lost"] += 1
            if about["lost"] < 2:
                raise
            about["why"] = f"the server was lost twice in the middle ({e})"
        finally:
            about["seconds"] = round(about.get("seconds", 0.0) + time.monotonic() - began, 3)
            write_private(place / TRIAL, json.dumps(about, indent=1) + "\n")
        self._ran.add(key)
        found = self._known(key, place)
        if found is None:
            raise BisectError(f"{place} has no complete answers after a run: does another process write there?")
        return found

    def _serve(self, command: ServeCommand, place: Path) -> None:
        answers, environ = self._prompts, command.full()
        # The custom operators of the model are told at this level alone; with --enable-log-requests it tells prompts.
        if command.flag("--enable-log-requests") is not True:
            environ.setdefault("VLLM_LOGGING_LEVEL", "DEBUG")
        made = self._made | {"source": answers.prompts}
        with (
            served("the run", shlex.join(command.words), environ, place, answers.ready_s, answers.say) as run,
            waiting(lambda: "the run is sent the prompts", answers.say),
        ):
            answers.send(run.command.url, run.command.key, place / FOLDER, made)

    def _known(self, key: str, place: Path) -> Tried | None:
        about = _read(place)
        logs = sorted(place.glob("engine-*.log"), key=lambda p: p.stat().st_mtime)
        log, seconds = logs[-1] if logs else None, float(about.get("seconds", 0.0))
        if about.get("why"):
            return Tried(key, None, log, seconds, key not in self._ran, str(about["why"]))
        sent = place / FOLDER
        if not replies.exists(sent) or not replies.read_about(sent).get("complete"):
            return None
        return Tried(key, sent, log, seconds, key not in self._ran)


def _read(place: Path) -> dict[str, Any]:
    about = object_in(place / TRIAL, 1 << 20)
    return about if about.get("schema") == 1 else {}


RATE = gating.RATE
SHARE = 0.5
"""Chosen: of the command's distance. Of three equal faults that add up like noise each has 1 / sqrt(3) of it; other
rounding of a tiny bfloat16 model (block size, operators) had a quarter of a fault's (measured, docs/gate.md)."""
DRAWN = 2.0 / (conditions.DRAWS + 1)
"""Derived: the least p that the gate's drawn patterns of signs can give, of one of two passes."""


@dataclass(frozen=True)
class TrialGate:
    """size: root mean square of the gaps of chosen tokens, nats, of the pair of passes where it is largest; a token
    that a side does not list counts as the largest that is listed, at least 1. p: of the gate, 1 without one. n:
    prompts. why: there is no judgement, None where there is."""

    size: float
    p: float
    n: int
    why: str | None = None

    def fails(self, rate: float, least: float) -> bool:
        """Beyond golden's floor, and not less than ``least``."""
        return self.why is None and self.p <= rate and self.size > 0 and self.size >= least


def rate_each(trials: int, prompts: int, rate: float = RATE) -> float:
    """Of one trial, where ``trials`` are expected; not less than the least p that so many prompts can have."""
    return min(rate, max(rate / max(trials, 1), 2.0 * 0.5**prompts, DRAWN))


@dataclass(frozen=True)
class TrialFloor:
    """A server that is known to be right."""

    name: str
    sent: Sent = field(repr=False)


def judge(golden: Sent, mine: Sent, floors: Sequence[TrialFloor] = ()) -> TrialGate:
    """Two folders of the same two arrivals."""
    try:
        gate = gating.compare(golden, mine, [f.sent for f in floors], power=False, names=[f.name for f in floors])
    except gating.GateError as e:
        return TrialGate(0.0, 1.0, 0, str(e))
    if gate.p is None:
        return TrialGate(0.0, 1.0, gate.prompts, gate.why)
    return TrialGate(_size(golden, mine), gate.p, gate.prompts)


def _size(golden: Sent, mine: Sent) -> float:
    from vllm_accprobe.gate.measure.token_gaps import gaps

    sizes = []
    for a, b in ((0, 1), (1, 0)):
        known: list[float] = []
        unlisted = 0
        for name, reply in golden.passes[a].items():
            if (other := mine.passes[b].get(name)) is not None:
                found, _, _ = gaps(reply, other)
                known += [t.gap for t in found if t.gap is not None]
                unlisted += sum(t.gap is None for t in found)
        if known or unlisted:
            known += [max([*known, 1.0])] * unlisted
            sizes.append(math.sqrt(sum(g * g for g in known) / len(known)))
    return max(sizes, default=0.0)


@dataclass(frozen=True)
class TrialRow:
    """One trial, for the report. bad: names of the axes as in the command."""

    bad: tuple[str, ...]
    outcome: TrialOutcome
    tried: Tried
    command: str
    values: tuple[tuple[str, int], ...] = ()


@dataclass
class Trier:
    """golden: None: the plain configuration becomes it. rate: of one trial; share: of the command's own distance.
    own_floor: where golden is the plain configuration, and no floor is named, the first failure must also be beyond
    what that configuration in another dtype differs by."""

    command: ServeCommand
    axes: Sequence[ServerSetting]
    trials: Trials
    golden: Sent | None
    rate: float
    share: float
    say: Callable[[str], None] = lambda line: None
    floors: list[TrialFloor] = field(default_factory=list)
    own_floor: bool = True
    rows: list[TrialRow] = field(default_factory=list)
    expected: int = 0
    size: float = 0.0
    length: int | None = None
    _parts: dict[str, tuple[ServerSetting, ...]] = field(default_factory=dict)
    _bad: Tried | None = None
    _same: frozenset[str] = frozenset()
    _plain: ServeCommand | None = None
    _floor_s: float = 0.0

    def first(self) -> Tried:
        """The command itself, which tells the model's length and its operators. One that did not start before is
        started again: what it lacked may be there now."""
        tried = self.trials.run(self.command)
        if tried.sent is None and tried.kept:
            tried = self.trials.run(self.command, afresh=True)
        self._bad = tried
        if tried.sent is not None:
            length = replies.read_about(tried.sent).get("server", {}).get("max_model_len")
            self.length = length if isinstance(length, int) else None
        known = used(read(tried.log))
        for axis in self.axes:
            kept = axis
            if axis.fact == "custom operators" and known:
                on = [f"{axis.name}: {name}" for name, enabled in known.items() if enabled]
                kept = partial(axis, on) if axis.parts else replace(axis, parts=_operators(axis, known))
            self._parts[axis.name] = kept.parts
        return tried

    def parts(self, axis: ServerSetting) -> tuple[ServerSetting, ...]:
        """Those that the model has."""
        return self._parts.get(axis.name, axis.parts)

    def made(self, configuration: Configuration) -> ServeCommand:
        """The command of a configuration."""
        edits = [self._filled(a.edit) for a in edits_of(configuration, self.axes, self._parts)]
        for name, number in configuration.values:
            scale = next(a.scale for a in self.axes if a.name == name)
            assert scale is not None
            edits.append(Edit(drop=(scale[0],), add=(scale[0], str(number))))
        return self.command.edited(edits)

    def attempt(self, configuration: Configuration, again: int) -> TrialOutcome:
        """Raises what trials raise."""
        command = self.made(configuration)
        known = self.trials.known(command, again)
        reported = {row.tried.key for row in self.rows}
        tried = known or self.trials.run(command, again)
        outcome = self._judged(configuration, tried)
        if tried.key not in reported:
            self.rows.append(
                TrialRow(tuple(sorted(configuration.bad)), outcome, tried, command.line(), configuration.values)
            )
            self._tell(configuration, outcome, tried, again)
        return outcome

    def equal(self, bad: Configuration, plain: Configuration) -> frozenset[str]:
        """Axes of which both engines' logs tell the same."""
        logs = [read(self.trials.run(self.made(c)).log) for c in (bad, plain)]
        one, other = map(facts, logs)
        varied = [a for a in self.axes if a.name not in plain.bad]
        self._same = frozenset(a.name for a in varied if same(a.fact, one, other))
        return self._same

    def line(self, found: Found, cause: Cause, what: str) -> str:
        """The command to type. what: ``fails``, the set alone; ``plain``; ``passes``, the command without the set."""
        base = frozenset(found.held)
        configurations = {
            "fails": Configuration(base | set(cause.names), cause.apart),
            "plain": Configuration(base),
            "passes": without((*cause.before, *cause.names, *found.equal), cause.gone, self.axes, self._parts),
        }
        return self.made(configurations[what]).line()

    @property
    def floor_sizes(self) -> list[tuple[str, float]]:
        """Each floor's name and distance from golden, in nats."""
        golden = self.golden
        return [] if golden is None else [(f.name, gating.apart(golden, f.sent)[0]) for f in self.floors]

    @property
    def seconds(self) -> float:
        """Of all that was run for this, now or before."""
        return self._floor_s + sum(row.tried.seconds for row in self.rows)

    def _judged(self, configuration: Configuration, tried: Tried) -> TrialOutcome:
        if tried.sent is None:
            known = tried.log is None or str(tried.log) in tried.why
            return TrialOutcome(UNRESOLVED, why=tried.why if known else f"{tried.why} ({tried.log})")
        mine = replies.read(tried.sent)
        if self.golden is None:
            self.golden, self._plain = mine, self.made(configuration)
        found = judge(self.golden, mine, self.floors)
        whole = (
            configuration.bad >= {a.name for a in self.axes} and not configuration.apart and not configuration.values
        )
        if whole and self.own_floor and not self.floors and found.fails(self.rate, 0.0):
            self.own_floor = False
            self._make_floor(self.golden)
            found = judge(self.golden, mine, self.floors)
        if found.why is not None:
            return TrialOutcome(UNRESOLVED, why=found.why)
        if whole and found.fails(self.rate, 0.0):
            self.size = max(self.size, found.size)
        least = 0.0 if whole else self.share * self.size
        if found.fails(self.rate, least):
            return TrialOutcome(FAIL, found.size, found.p)
        return TrialOutcome(PASS, found.size, found.p, smaller=found.fails(self.rate, 0.0))

    def _make_floor(self, golden: Sent) -> None:
        """The plain configuration in another dtype, the first that is served and answers with numbers."""
        if self._plain is None:
            return
        line = shlex.join(self._plain.words)
        refused: list[str] = []
        far: list[TrialFloor] = []
        for dtype in sides.candidates(line, None) if sides.of_command(line) != "float32" else []:
            tried = self.trials.run(self._plain.edited([Edit(drop=("--dtype",), add=(f"--dtype={dtype}",))]))
            self._floor_s += tried.seconds
            sent = None if tried.sent is None else replies.read(tried.sent)
            if sent is not None and gating.has_numbers(golden, sent):
                floor = TrialFloor(f"everything plain in {dtype}", sent)
                why = gating.beyond_rounding(golden, sent, floor.name)
                self.say(f"floor: {why or floor.name}; {'kept' if tried.kept else f'{tried.seconds:.0f} s'}")
                if why is None:
                    self.floors = [floor]
                    return
                far.append(floor)
                continue
            refused.append(f"{dtype}: {tried.why or 'it answers with no numbers'}")
        if far:  # no command is judged by them, unless it is further away than they are
            self.floors = far
            return
        why = f" ({'; '.join(refused)})" if refused else ""
        self.say(f"note: the plain configuration makes no floor{why}: rounding may be taken for an error")

    def _filled(self, edit: Edit) -> Edit:
        if MODEL_LENGTH not in edit.add:
            return edit
        kept = [str(self.length) if word == MODEL_LENGTH else word for word in edit.add]
        if self.length is None:  # not known: without the number, vLLM's own default is requested
            i = edit.add.index(MODEL_LENGTH)
            kept = [*edit.add[: i - 1], *edit.add[i + 1 :]]
        return replace(edit, add=tuple(kept))

    def _tell(self, configuration: Configuration, outcome: TrialOutcome, tried: Tried, again: int) -> None:
        names = sorted(configuration.bad - self._same) or ["everything plain"]
        if len(configuration.bad) == len(self.axes) and not configuration.apart and not configuration.values:
            names = ["the command itself"]
        names += [f"{name} {number}" for name, number in configuration.values]
        verdict = outcome.kind if outcome.kind != PASS or not outcome.smaller else "pass (differs, by much less)"
        size = f" ({outcome.size:.3g} nats)" if outcome.kind != UNRESOLVED and outcome.size else ""
        where = f": {outcome.why}" if outcome.kind == UNRESOLVED else ""
        when = "kept" if tried.kept else f"{tried.seconds:.0f} s"
        of = f" of about {max(self.expected, len(self.rows))}" if self.expected else ""
        more = " again" * bool(again)
        self.say(f"run {len(self.rows)}{of}: {', '.join(names)}{more}: {verdict}{size}{where}; {when}")

    def left(self, runs: int) -> float:
        """Seconds that so many more runs take, by the median of what was run."""
        each = [row.tried.seconds for row in self.rows if row.tried.seconds > 0]
        each += [self._bad.seconds] if not each and self._bad is not None else []
        return runs * statistics.median(each) if each else 0.0


def _operators(axis: ServerSetting, known: Mapping[str, bool]) -> tuple[ServerSetting, ...]:
    """Of an engine whose source is not at hand: what its log names."""
    return tuple(
        ServerSetting(f"{axis.name}: {name}", "as by default", "native",
             Edit(fields=(("--compilation-config", "custom_ops+", f"-{name}"),)))
        for name, enabled in sorted(known.items()) if enabled
    )  # fmt: skip


def golden_folder(text: str) -> Path | None:
    """``--golden`` as a folder of send; None where it is a URL or a command. Raises FolderError."""
    path = Path(text)
    if text.startswith(("http://", "https://")) or (" " in text.strip() and not path.exists()):
        return None
    replies.read_about(path)
    return path


def sent_as(about: Mapping[str, Any]) -> dict[str, Any]:
    """How golden's folder was sent, so that trials are sent the same."""
    return {k: v for k, v in about.get("settings", {}).items() if k in ("arrive", "concurrency", "top", "max_tokens")}
