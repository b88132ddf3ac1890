"""From a configuration to its outcome: the command is edited, run or remembered, and judged against golden.

The problem: a search knows sets of names, a trial knows commands, and between them stands what only a first run tells:
the model's length, which custom operators it has, how far the bad command is from golden. The idea: one object that is
given a configuration and gives an outcome, and says each in a line with its time.
Not here: the search (search.py), a trial's folder (trials.py), when it fails (judging.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_accprobe.gate.bisect import engine_log, judging
from vllm_accprobe.gate.bisect.axes import MODEL_LENGTH, ServerSetting, partial
from vllm_accprobe.gate.bisect.ddmin import FAIL, PASS, UNRESOLVED
from vllm_accprobe.gate.bisect.edits import Edit, ServeCommand
from vllm_accprobe.gate.bisect.search import Cause, Configuration, Found, TrialOutcome, edits_of, without
from vllm_accprobe.gate.bisect.trials import Trials, Tried
from vllm_accprobe.gate.sending import replies
from vllm_accprobe.gate.sending.replies import Sent


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
    """golden: None: the plain configuration becomes it. rate: of one trial; share: of the command's own distance."""

    command: ServeCommand
    axes: Sequence[ServerSetting]
    trials: Trials
    golden: Sent | None
    rate: float
    share: float
    say: Callable[[str], None] = lambda line: None
    floors: list[Sent] = field(default_factory=list)
    rows: list[TrialRow] = field(default_factory=list)
    expected: int = 0
    size: float = 0.0
    length: int | None = None
    _parts: dict[str, tuple[ServerSetting, ...]] = field(default_factory=dict)
    _bad: Tried | None = None
    _same: frozenset[str] = frozenset()

    def first(self) -> Tried:
        """The command itself, which tells the model's length and its operators."""
        self._bad = tried = self.trials.run(self.command)
        if tried.sent is not None:
            length = replies.read_about(tried.sent).get("server", {}).get("max_model_len")
            self.length = length if isinstance(length, int) else None
        known = engine_log.used(engine_log.read(tried.log))
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
        told = {row.tried.key for row in self.rows}
        tried = known or self.trials.run(command, again)
        outcome = self._judged(configuration, tried)
        if tried.key not in told:
            self.rows.append(
                TrialRow(tuple(sorted(configuration.bad)), outcome, tried, command.line(), configuration.values)
            )
            self._tell(configuration, outcome, tried, again)
        return outcome

    def equal(self, bad: Configuration, plain: Configuration) -> frozenset[str]:
        """Axes of which both engines' logs tell the same."""
        logs = [engine_log.read(self.trials.run(self.made(c)).log) for c in (bad, plain)]
        one, other = map(engine_log.facts, logs)
        varied = [a for a in self.axes if a.name not in plain.bad]
        self._same = frozenset(a.name for a in varied if engine_log.same(a.fact, one, other))
        return self._same

    def line(self, found: Found, cause: Cause, what: str) -> str:
        """The command to type. what: ``fails``, the set alone; ``plain``; ``passes``, the command without the set."""
        base = frozenset({*found.equal, *found.held})
        configurations = {
            "fails": Configuration(base | set(cause.names), cause.apart),
            "plain": Configuration(base),
            "passes": without((*cause.before, *cause.names), cause.gone, self.axes, self._parts),
        }
        return self.made(configurations[what]).line()

    @property
    def seconds(self) -> float:
        """Of all that was run for this, now or before."""
        return sum(row.tried.seconds for row in self.rows)

    def _judged(self, configuration: Configuration, tried: Tried) -> TrialOutcome:
        if tried.sent is None:
            return TrialOutcome(UNRESOLVED, why=f"{tried.why} ({tried.log})" if tried.log else tried.why)
        mine = replies.read(tried.sent)
        if self.golden is None:
            self.golden = mine
        found = judging.judge(self.golden, mine, self.floors)
        whole = (
            configuration.bad >= {a.name for a in self.axes} and not configuration.apart and not configuration.values
        )
        if found.why is not None:
            return TrialOutcome(UNRESOLVED, why=found.why)
        if whole and found.fails(self.rate, 0.0):
            self.size = max(self.size, found.size)
        least = 0.0 if whole else self.share * self.size
        if found.fails(self.rate, least):
            return TrialOutcome(FAIL, found.size, found.p)
        return TrialOutcome(PASS, found.size, found.p, smaller=found.fails(self.rate, 0.0))

    def _filled(self, edit: Edit) -> Edit:
        if MODEL_LENGTH not in edit.add:
            return edit
        kept = [str(self.length) if word == MODEL_LENGTH else word for word in edit.add]
        if self.length is None:  # not known: without the number, vLLM's own default is asked for
            i = edit.add.index(MODEL_LENGTH)
            kept = [*edit.add[: i - 1], *edit.add[i + 1 :]]
        return replace(edit, add=tuple(kept))

    def _tell(self, configuration: Configuration, outcome: TrialOutcome, tried: Tried, again: int) -> None:
        names = sorted(configuration.bad - self._same) or ["everything plain"]
        if len(configuration.bad) == len(self.axes) and not configuration.apart and not configuration.values:
            names = ["the command itself"]
        names += [f"{name} {number}" for name, number in configuration.values]
        said = outcome.kind if outcome.kind != PASS or not outcome.smaller else "pass (differs, by much less)"
        size = f" ({outcome.size:.3g} nats)" if outcome.kind != UNRESOLVED and outcome.size else ""
        where = f": {outcome.why}" if outcome.kind == UNRESOLVED else ""
        when = "kept" if tried.kept else f"{tried.seconds:.0f} s"
        of = f" of about {max(self.expected, len(self.rows))}" if self.expected else ""
        more = " again" * bool(again)
        self.say(f"run {len(self.rows)}{of}: {', '.join(names)}{more}: {said}{size}{where}; {when}")

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
