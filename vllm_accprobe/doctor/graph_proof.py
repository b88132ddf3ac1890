"""Does a tap inside a compiled graph change what is computed: runs, compared bit by bit, and the module whose tap does.

The problem: a tap is an operator in the middle of what a compiler fuses, so that capturing may change the numbers that
it shows; and an engine that does not repeat itself would seem to change. The idea: the same requests, one after the
other, to runs whose environments differ in the taps alone: ``off`` twice, which says whether bits are a standard at
all, ``on`` with the user's settings, ``selected`` with fewer of the same taps, ``full``. A row is a request's at a
position, and is looked up in the other dump; rows after a token that differs are counted and not compared. Where bits
differ, taps are placed at the first half of the modules, and so on. Of answers only hashes are kept.

Not here: starting the server (gate/served_run.py), what judges numbers that may differ (comparison/), exit codes
(cli/doctor.py).
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from vllm_accprobe.config import ENV, PREFIX, REPLICAS, RUN_ID, TAP_SET, ConfigError, ProbeConfig, Ranges
from vllm_accprobe.dump.decode import object_at, value_at
from vllm_accprobe.dump.dtypes import widen
from vllm_accprobe.dump.journal_writer import amend_graphs
from vllm_accprobe.dump.reader import Dump, open_dump
from vllm_accprobe.dump.schema import LOGITS, ROOT_TAP, TOKENS, Record, RowSpace
from vllm_accprobe.gate.sending import prompts as prompts_file
from vllm_accprobe.gate.sending.client import Sender, SendError
from vllm_accprobe.gate.sending.prompts import PromptLine, PromptsError
from vllm_accprobe.gate.served_run import ServedRun, ServerCommand
from vllm_accprobe.progress import waiting
from vllm_accprobe.run.launcher import allow_plugin

PROMPTS = (
    "The first computers filled whole rooms, and",
    "Q: What is 17 times 23?\nA: 17 times 23 is",
    "def mean(values):\n    return sum(values) /",
    "Water boils at a lower temperature on a mountain, because the air up there has less pressure. The same holds for",
)
"""chosen: short, of several lengths, in words and in code."""
LOGPROBS = 5
_MOST_PROMPTS = 256


def read_prompts(source: str | None) -> list[PromptLine]:
    """As `accprobe send` reads them; None: the PROMPTS above. Raises PromptsError, OSError."""
    found = [PromptLine("", text) for text in PROMPTS] if source is None else prompts_file.read(source)
    if len(found) > _MOST_PROMPTS:
        raise PromptsError(f"{source}: {len(found)} prompts; give 1 to {_MOST_PROMPTS}")
    return found


def hashes(sender: Sender, prompts: Sequence[PromptLine]) -> list[str]:
    """A hash of each answer: its tokens and log-probabilities. Raises SendError."""
    sender, _ = sender.introduced()
    found = []
    for number, line in enumerate(prompts):
        line = replace(line, name=f"accprobe-doctor-{number}", parameters={**line.parameters, "ignore_eos": True})
        reply = sender.ask(line, line.name, {}, time.monotonic())
        if reply.refused is not None:
            raise SendError(f"request {line.name}: {reply.refused}")
        answer = [reply.token_ids, reply.logprobs, reply.top, reply.finish]
        found.append(hashlib.sha256(json.dumps(answer).encode()).hexdigest())
    return found


OFF, AGAIN, ON, SELECTED, FULL = "off", "off again", "on", "selected", "full"
OUTCOME = ("<root>", "logits")
"""Of VLLM_ACCPROBE_MODULES: what Python sees outside the graph in every run; the preset ``logits`` has the sampler."""
_MOST_NAMED = 1000
_LONGEST = 100_000
"""derived: of one environment variable, Linux takes 128 KiB."""


@dataclass(frozen=True)
class TapRun:
    """One start of the command. name: for people; environ: all of its environment; place: directory of its dump."""

    name: str
    place: Path
    environ: Mapping[str, str] = field(repr=False)

    @property
    def log(self) -> Path:
        """Where its output goes."""
        return self.place.with_name(self.place.name + ".log")


class Runs:
    """The environments of one proof. base: the user's; out: where dumps and logs go.

    Raises ConfigError where the user's settings are wrong, or place no taps.
    """

    def __init__(self, base: Mapping[str, str], out: Path):
        own = (RUN_ID, REPLICAS, TAP_SET)
        self._base = {name: value for name, value in base.items() if name not in own} | {
            ENV: "1",
            PREFIX + "GRAPHS": "1",
        }
        allow_plugin(self._base)
        self._out = out
        self.config = ProbeConfig.from_env(self._base)
        if not self.config.graph_mb:
            raise ConfigError(f"{PREFIX}GRAPH_MB=0 places no taps: there is nothing to compare with; unset it")
        if not self.config.capture_outputs:
            raise ConfigError(f"{PREFIX}PARTS takes no outputs, and taps in graphs take nothing else: unset it")

    def off(self, name: str = OFF) -> TapRun:
        """No taps, and no other setting that puts anything into the model; the same steps, tokens and requests."""
        return self._run(name, self._bare() | {PREFIX + "GRAPH_MB": "0"})

    def on(self) -> TapRun:
        """The user's own settings, and what decides in addition to them."""
        return self._run(ON, self._theirs(self._modules()))

    def full(self) -> TapRun:
        """Taps at all modules."""
        return self._run(FULL, {**self._theirs("all"), PREFIX + "GRAPH_TAPS": ""})

    def selected(self, taps: Sequence[str], steps: Sequence[int], *, everywhere: bool = False) -> TapRun:
        """Every second of the ``taps`` that ``on`` recorded, in every second of its ``steps``. everywhere: ``on`` has
        the full set, which these few might not require."""
        named = [*taps[1::2][:_MOST_NAMED], *OUTCOME]
        kept = ",".join(map(str, steps[1::2][:_MOST_NAMED] or steps[:1]))
        full = {PREFIX + "GRAPH_TAPS": "?*"} if everywhere else {}
        return self._run(SELECTED, {**self._theirs(",".join(named)), PREFIX + "STEPS": kept, **full})

    def first(self, of: str, modules: Sequence[str]) -> TapRun:
        """Taps at these modules of run ``of`` alone, none of them chosen. Raises ConfigError where they are
        too many to name."""
        named = ",".join(modules)
        if len(named) > _LONGEST:
            raise ConfigError(f"{len(modules)} modules are too many to name in one variable")
        same = {"GRAPH_MB": str(self.config.graph_mb), "GRAPH_TAPS": named, "PARTS": self._parts()}
        environ = self._bare() | {PREFIX + name: value for name, value in same.items()}
        return self._run(f"{of}, first {len(modules)}", environ)

    def _run(self, name: str, environ: Mapping[str, str]) -> TapRun:
        place = self._out / name.replace(",", "").replace(" ", "-")
        return TapRun(name, place, {**environ, PREFIX + "DIR": str(place)})

    def _bare(self) -> dict[str, str]:
        kept = {name: value for name, value in self._base.items() if not name.startswith(PREFIX)}
        c = self.config
        facts = {
            "GRAPHS": "1", "MODULES": ",".join(OUTCOME), "PARTS": "output", "STEPS": _spelt(c.steps),
            "TOKENS": _spelt(c.tokens), "RANKS": _spelt(c.ranks), "REQUESTS": ",".join(c.requests),
            "MAX_GB": str(c.max_gb),
        }  # fmt: skip
        return kept | {PREFIX + name: value for name, value in facts.items()}

    def _theirs(self, modules: str) -> dict[str, str]:
        return {**self._base, PREFIX + "MODULES": modules, PREFIX + "PARTS": self._parts()}

    def _parts(self) -> str:
        """They decide where taps stand. Where nothing is reported: no parameters, which would fill a disk run by
        run."""
        return ",".join(self.config.parts) or "input,output"

    def _modules(self) -> str:
        chosen = self.config.modules
        if not self.config.modules_left:
            return ",".join(chosen)
        everything = ["all"] if all(glob.startswith("!") for glob in chosen) else []
        return ",".join([*everything, *chosen, *OUTCOME])


def _spelt(ranges: Ranges) -> str:
    return ",".join(f"{low}-{high}" for low, high in ranges)


def carry_out(
    run: TapRun, command: ServerCommand, prompts: Sequence[PromptLine], max_tokens: int, timeout: float
) -> list[str]:
    """Hashes of a server's answers, none for a program. timeout: seconds until the run is given up.

    Raises SendError, OSError.
    """
    until = time.monotonic() + timeout
    run.log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = f"run `{run.name}`"
    try:
        with ServedRun(name, command, run.environ, log=run.log) as process:
            if not command.url:
                with waiting(lambda: name):
                    code = process.wait(timeout)
                if code is None:
                    raise SendError(
                        f"the command still runs after {timeout:g} s (--timeout); is it a server? Then name its --port"
                    )
                if code:
                    raise SendError(f"the command ended with exit code {code}{process.why()}")
                return []
            process.ready(until, "--timeout")
            left = max(until - time.monotonic(), 1.0)
            sender = Sender(command.url, command.key, timeout=left, top=LOGPROBS, max_tokens=max_tokens)
            with process.reporting(), waiting(lambda: f"{name} is sent prompts"):
                return hashes(sender, prompts)
    except SendError as error:
        raise SendError(f"{name}: {error}") from None


SAMPLER, TOKEN = "sampler", "output.token"
TOP = ("output.top_logits", "output.top_ids")

RowKey = tuple[int, str, int, int]
"""(rank, prompt's hash, ordinal, position) of a row."""
Place = tuple[int, str, str, int]
"""(rank, tap, role, call)."""


_HEADS = ("logits_processor", "lm_head")


def decides(tap: str) -> bool:
    """Whether ``tap`` is one that every run records outside the graph, and no place inside."""
    return tap in (ROOT_TAP, SAMPLER) or tap.rpartition(".")[2] in _HEADS


@dataclass(frozen=True)
class Tally:
    """What two runs gave at one place. rows: compared; differing: of these; rel_l2: of the step that is farthest, in
    units of the first run's norm, None where no values were read."""

    rows: int = 0
    differing: int = 0
    rel_l2: float | None = None

    def __add__(self, other: Tally) -> Tally:
        far = [x for x in (self.rel_l2, other.rel_l2) if x is not None]
        return Tally(self.rows + other.rows, self.differing + other.differing, max(far, default=None))

    def alongside(self, other: Tally) -> Tally:
        """Both, where they are about the same rows: another tap, another rank."""
        both = self + other
        return Tally(max(self.rows, other.rows), max(self.differing, other.differing), both.rel_l2)

    @property
    def same(self) -> bool | None:
        """None where nothing was compared."""
        return None if not self.rows else not self.differing


@dataclass(frozen=True)
class Effect:
    """What decides of two runs. batches: whether both computed the same rows in the same steps. behind: rows that were
    left out because a token before them differed."""

    tokens: Tally
    top_logits: Tally
    logits: Tally
    root: Tally
    batches: bool
    behind: int = 0

    @property
    def same(self) -> bool | None:
        """Whether no bit differs; None where nothing was compared."""
        known = [spot.same for spot in self.spots.values() if spot.same is not None]
        return all(known) if known else None

    @property
    def spots(self) -> dict[str, Tally]:
        return {"tokens": self.tokens, "top_logits": self.top_logits, "logits": self.logits, "root": self.root}

    def figures(self) -> dict[str, Any]:
        """Of JSON: whether each differs, and the root's distance."""
        differing = {name: differs(spot.same) for name, spot in self.spots.items()}
        return {**differing, "root_rel_l2": number(self.root.rel_l2)}


@dataclass(frozen=True)
class FirstDifference:
    """The first place, in order of execution, at which two runs with taps have other values."""

    tap: str
    role: str
    rank: int
    spot: Tally


class Bits:
    """A dump, by rows."""

    def __init__(self, dump: Dump):
        self.dump = dump
        self._requests = {key: (one.prompt, one.ordinal) for key, one in dump.requests.items()}
        self._keys: dict[tuple[int, int, str], tuple[RowKey, ...]] = {}
        self._places: dict[Place, list[Record]] = {}
        for record in dump.records:
            if record.step is not None:
                self._places.setdefault((record.rank, record.tap, record.role, record.call), []).append(record)

    def places(self) -> Mapping[Place, list[Record]]:
        """All records of steps, by place, in the order of the journal."""
        return self._places

    def keys(self, record: Record) -> tuple[RowKey, ...]:
        """Of the record's rows; one key of its own for a tensor without rows."""
        if record.rows is None or record.row_dim != 0 or not record.shape:
            return ((record.rank, "", -1, record.step or 0),)
        where = (record.rank, record.step or 0, record.rows)
        if where not in self._keys:
            space = self.dump.rows.get(where)
            keys = () if space is None else tuple(self._rows_of(record.rank, space))
            self._keys[where] = keys
        return self._keys[where]

    def _rows_of(self, rank: int, space: RowSpace) -> Iterator[RowKey]:
        for part in space.segments:
            prompt, ordinal = self._requests.get((rank, part.req), ("", -1 - part.req))
            image = "" if part.image is None else f"#{part.image}"
            for offset in range(part.n):
                yield rank, prompt + image, ordinal, part.pos + offset

    def token_ids(self) -> dict[RowKey, int]:
        """What the rows were computed from, and what was sampled after them (at the position that it takes)."""
        found: dict[RowKey, int] = {}
        for (rank, _, name), space in self.dump.rows.items():
            if name in (TOKENS, LOGITS) and space.ids:
                found.update(zip(self._rows_of(rank, space), space.ids, strict=False))
        for (_, tap, role, _), records in self._places.items():
            if (tap, role) == (SAMPLER, TOKEN):
                for record in records:
                    if record.payload is not None:
                        values = self.dump.read(record).reshape(-1)
                        for (rank, prompt, ordinal, position), value in zip(self.keys(record), values, strict=False):
                            found[rank, prompt, ordinal, position + 1] = int(value)
        return found

    def batches(self) -> dict[tuple[int, int], tuple[RowKey, ...]]:
        """Rows of the batch of each (rank, step), in order."""
        return {
            (rank, step): tuple(self._rows_of(rank, space))
            for (rank, step, name), space in self.dump.rows.items()
            if name == TOKENS
        }


def outcome(reference: Bits, other: Bits) -> Effect:
    """What decides: the tokens, the best logits, all logits and the root's output, of the rows that both have."""
    compared, ends = _tokens(reference, other)
    pairing = _Pairing(reference, other, ends)
    top, logits, root = Tally(), Tally(), Tally()
    for place in reference.places():
        _, tap, role, _ = place
        if tap == SAMPLER and role in TOP:
            top = top.alongside(pairing.spot(place))
        elif tap.rpartition(".")[2] in _HEADS and role.startswith("output."):
            logits = logits.alongside(pairing.spot(place))
        elif tap == ROOT_TAP and role.startswith("output."):
            root = root.alongside(pairing.spot(place))
    ours, theirs = reference.batches(), other.batches()
    batches = all(ours[key] == theirs[key] for key in ours if key in theirs)
    return Effect(compared, top, logits, root, batches, len(pairing.behind))


def first_difference(reference: Bits, other: Bits) -> FirstDifference | None:
    """Of the places inside that both dumps have: the first one whose values differ."""
    pairing = _Pairing(reference, other, _tokens(reference, other)[1])
    inside = [place for place in reference.places() if not decides(place[1]) and place in other.places()]
    for place in sorted(inside, key=lambda one: reference.places()[one][0].seq):
        spot = pairing.spot(place)
        if spot.differing:
            return FirstDifference(place[1], place[2], place[0], spot)
    return None


_Ends = dict[tuple[int, str, int], int]
"""By (rank, prompt, ordinal): the first position whose token differs."""


def _tokens(reference: Bits, other: Bits) -> tuple[Tally, _Ends]:
    ours, theirs = reference.token_ids(), other.token_ids()
    shared = [key for key in ours if key in theirs]
    wrong = [key for key in shared if ours[key] != theirs[key]]
    ends: _Ends = {}
    for rank, prompt, ordinal, position in wrong:
        ends[rank, prompt, ordinal] = min(ends.get((rank, prompt, ordinal), position), position)
    return Tally(len(shared), len(wrong)), ends


class _Pairing:
    """Looks one dump's rows up in the other. behind: rows left out because a token before them differed."""

    def __init__(self, reference: Bits, other: Bits, ends: _Ends):
        self._reference, self._other, self._ends = reference, other, ends
        self.behind: set[RowKey] = set()

    def spot(self, place: Place) -> Tally:
        """What both gave at one place."""
        there: dict[RowKey, tuple[Record, int]] = {}
        for record in self._other.places().get(place, ()):
            for row, key in enumerate(self._other.keys(record)):
                there[key] = (record, row)
        found = Tally()
        for record in self._reference.places()[place]:
            found += self._one(record, self._reference.keys(record), there)
        return found

    def _one(self, record: Record, keys: tuple[RowKey, ...], there: dict[RowKey, tuple[Record, int]]) -> Tally:
        """Of one tensor of the reference."""
        pairs: dict[int, tuple[Record, list[int], list[int]]] = {}
        for row, key in enumerate(keys):
            if key not in there:
                continue
            if key[3] >= self._ends.get(key[:3], key[3] + 1):
                self.behind.add(key)
                continue
            other, at = there[key]
            _, mine, its = pairs.setdefault(id(other), (other, [], []))
            mine.append(row)
            its.append(at)
        found, error, norm, measured = Tally(), 0.0, 0.0, False
        for other, mine, its in pairs.values():
            whole = mine == its == list(range(len(keys))) and self._other.keys(other) == keys
            if whole and record.hash is not None and (record.hash, record.shape) == (other.hash, other.shape):
                found += Tally(len(mine))
                continue
            if record.payload is None or other.payload is None:  # of statistics only: whole tensors, or nothing
                found += Tally(len(mine), len(mine)) if whole and record.hash and other.hash else Tally()
                continue
            ours, theirs = self._rows(self._reference, record, mine), self._rows(self._other, other, its)
            if (record.dtype, ours.shape) != (other.dtype, theirs.shape):
                found += Tally(len(mine), len(mine))
                continue
            apart = (_bytes(ours) != _bytes(theirs)).any(axis=1)
            found += Tally(len(mine), int(apart.sum()))
            golden, mine_ = (_numbers(values, record.dtype) for values in (ours, theirs))
            with np.errstate(all="ignore"):  # of infinities that differ
                error += float(np.square(golden - mine_).sum())
                norm += float(np.square(golden).sum())
            measured = True
        if found.rows and not measured and not found.differing:
            return Tally(found.rows, 0, 0.0)
        return found + Tally(rel_l2=_relative(error, norm) if measured else None)

    @staticmethod
    def _rows(bits: Bits, record: Record, rows: list[int]) -> np.ndarray:
        """[rows, the rest] of stored bits; a tensor without rows is one row."""
        values = bits.dump.read(record)
        if record.rows is None or record.row_dim != 0 or not record.shape:
            return values.reshape(1, -1)
        return values.reshape(record.shape[0], -1)[rows]


def _bytes(rows: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1)


def _numbers(rows: np.ndarray, dtype: str) -> np.ndarray:
    values = widen(rows, dtype, as_float=True)
    return np.abs(values) if np.iscomplexobj(values) else values.astype(np.float64)


def _relative(error: float, norm: float) -> float:
    """Infinite where a side is not finite, or where there is a difference from nothing."""
    if not error:
        return 0.0
    relative = float(np.sqrt(error / norm)) if norm else math.inf
    return relative if math.isfinite(relative) else math.inf


SAME, CHANGED, UNKNOWN = "same", "changed", "unknown"


@dataclass(frozen=True)
class TapRunResult:
    """A run that was carried out. answers: hashes of a server's answers. outcome: against the first run without taps;
    None for that run itself. parting: against ``on``, for a run with other taps or fewer chosen ones."""

    name: str
    place: str
    seconds: float
    graphs: dict[str, Any]
    answers: tuple[str, ...] = ()
    outcome: Effect | None = None
    same_answers: bool | None = None
    parting: FirstDifference | None = None

    @property
    def taps(self) -> int:
        """How many were placed."""
        return int(self.graphs.get("taps") or 0)

    @property
    def same(self) -> bool | None:
        """Whether it gave what the first run without taps gave; None where nothing could be compared."""
        known = [x for x in (self.same_answers, self.outcome.same if self.outcome else None) if x is not None]
        return all(known) if known else None


@dataclass(frozen=True)
class Culprit:
    """``module``: taps at the ``before`` modules in front of it change no bit, and with one at it bits change.
    run: which run was examined; ran: how many runs it took. module "": taps at all places change nothing as long as
    none is chosen."""

    run: str
    module: str
    before: int
    ran: int
    root_rel_l2: float | None


@dataclass(frozen=True)
class TapProof:
    """verdict: SAME, CHANGED, or UNKNOWN with the reason ``why``. repeats: whether two runs without taps agree."""

    verdict: str
    why: str
    runs: tuple[TapRunResult, ...]
    repeats: bool | None = None
    culprits: tuple[Culprit, ...] = ()
    notes: tuple[str, ...] = ()


Serve = Callable[[TapRun], Sequence[str]]
"""Carries out a run to its end, and gives hashes of a server's answers; none for a program."""


class Prover:
    """Carries out the runs of one proof and compares them. say: gets a line whenever something is known."""

    def __init__(self, runs: Runs, serve: Serve, say: Callable[[str], None], clock: Callable[[], float]):
        self._runs, self._serve, self._say, self._clock = runs, serve, say, clock
        self._bits: dict[str, Bits] = {}
        self._ran: list[TapRunResult] = []

    def prove(self, *, full: bool = False, bisect: bool | None = None) -> TapProof:
        """All of it. full: a run with taps at all modules, too. bisect: whether to search for the module whose tap
        changes bits; None: for the user's own taps, and not for the full set. Raises DumpError and what the runs do.
        """
        first = self._do(self._runs.off())
        off = self._bits[first.name].dump
        self._say(f"{3 + full} more runs, about {_minutes((3 + full) * first.seconds)} in all")
        why = _nothing(off)
        if why:
            return self._end(UNKNOWN, why)
        again = self._do(self._runs.off(AGAIN))
        on = self._do(self._runs.on())
        if not on.taps:
            skips = self._bits[on.name].dump.skips
            why = next((skip.reason for skip in skips if skip.tap == ROOT_TAP), "the dump does not say why")
            return self._end(UNKNOWN, f"no taps were placed: {why}", again.same)
        dump = self._bits[on.name].dump
        steps = sorted({step for _, step in dump.steps})
        selected = self._do(self._runs.selected(recorded(dump), steps, everywhere=on.graphs.get("set") == "full"))
        notes = []
        if selected.graphs.get("key") != on.graphs.get("key"):
            notes.append("`selected` has other taps than `on`: choosing modules has compiled the model again")
        every = self._do(self._runs.full()) if full else None
        if again.same is None:
            return self._end(UNKNOWN, "no token, no logits and no output of the model were recorded", None, notes)
        if not again.same:
            why = "two runs without taps differ already: this engine does not repeat itself, so bits are no standard"
            if again.outcome is not None and not again.outcome.batches:
                why += "; their batches differed: send requests one at a time"
            return self._end(UNKNOWN, why, False, notes)
        culprits = []
        wrong = on.same is False or selected.same is False
        if on.same is False and bisect is not False:
            culprits.append(self._culprit(on, notes))
        if every is not None and every.same is False and bisect:
            culprits.append(self._culprit(every, notes))
        found = tuple(one for one in culprits if one is not None)
        return self._end(CHANGED if wrong else SAME, "", True, notes, found)

    # --- one run -----------------------------------------------------------------------------------------------

    def _do(self, run: TapRun) -> TapRunResult:
        began = self._clock()
        answers = tuple(self._serve(run))
        seconds = self._clock() - began
        bits = Bits(open_dump(run.place))
        self._bits[run.name] = bits
        graphs = dict(object_at(bits.dump.run, "engine", "graphs") or {})
        ran = TapRunResult(run.name, str(run.place), seconds, graphs, answers)
        if self._ran:
            first = self._ran[0]
            result = outcome(self._bits[first.name], bits)
            same = answers == first.answers if answers or first.answers else None
            # Fewer chosen ones must show the values that all of them show.
            on = next((bits for name, bits in self._bits.items() if name == "on"), None)
            parting = first_difference(on, bits) if on is not None and on is not bits else None
            ran = replace(ran, outcome=result, same_answers=same, parting=parting)
        self._ran.append(ran)
        sameness = "" if ran.same is None else ", the same bits as off" if ran.same else ", OTHER BITS than off"
        self._say(f"{run.name}: {seconds:.0f} s, {ran.taps} taps{sameness}")
        return ran

    # --- which module ------------------------------------------------------------------------------------------

    def _culprit(self, changed: TapRunResult, notes: list[str]) -> Culprit | None:
        modules = placed(self._bits[changed.name].dump, changed.graphs)
        try:
            self._runs.first(changed.name, modules)
        except ConfigError as error:
            notes.append(f"which module it is was not searched: {error}")
            return None
        if not modules:
            return None
        most = (len(modules) - 1).bit_length() + 1
        self._say(
            f"the taps of `{changed.name}` change the result; which of {len(modules)}: at most {most} more runs, about "
            f"{_minutes(most * changed.seconds)}"
        )
        tried: dict[int, TapRunResult] = {}

        def differs(count: int) -> bool:
            if count not in tried:
                tried[count] = self._do(self._runs.first(changed.name, modules[:count]))
            return tried[count].same is False

        count = first_change(len(modules), differs)
        if count == len(modules) and not differs(count):  # not the graph, but what is done with it
            return Culprit(changed.name, "", count, len(tried), None)
        result = tried[count].outcome
        far = None if result is None else result.root.rel_l2
        return Culprit(changed.name, modules[count - 1], count - 1, len(tried), far)

    def _end(
        self, verdict: str, why: str, repeats: bool | None = None, notes: Sequence[str] = (),
        culprits: tuple[Culprit, ...] = (),
    ) -> TapProof:  # fmt: skip
        blamed = {one.run: one.module for one in culprits}
        if repeats is not None:
            for ran in self._ran:
                if ran.taps and ran.outcome is not None:
                    changed = _amended(ran, repeats, blamed.get(ran.name))
                    amend_graphs(self._bits[ran.name].dump.path, {"changed": changed})
        return TapProof(verdict, why, tuple(self._ran), repeats, culprits, tuple(notes))


def first_change(count: int, differs: Callable[[int], bool]) -> int:
    """The smallest n that this finds with differs(n) and not differs(n - 1), given not differs(0) and differs(count):
    log2(count) questions. Each answer stands for itself: nothing is assumed of the numbers that were not tried."""
    same, changed = 0, count
    while changed - same > 1:
        middle = (same + changed) // 2
        if differs(middle):
            changed = middle
        else:
            same = middle
    return changed


def recorded(dump: Dump) -> list[str]:
    """Modules inside whose outputs the dump has, in order of execution."""
    order: dict[str, int] = {}
    for record in dump.records:
        if record.step is not None and record.role.startswith("output.") and not decides(record.tap):
            order.setdefault(record.tap, record.seq)
    return sorted(order, key=order.__getitem__)


def placed(dump: Dump, graphs: dict[str, Any]) -> list[str]:
    """Modules that have a tap, in order of execution: as they were recorded, where all of them were, else as run.json
    names them piece by piece, with what stands between pieces where it is known."""
    seen = recorded(dump)
    pieces = graphs.get("pieces")
    if not isinstance(pieces, list):
        return seen
    between = [str(path) for path in graphs.get("between") or ()]
    paths: list[str] = []
    for number, piece in enumerate(pieces):
        paths += [str(path) for path in piece]
        if len(between) == len(pieces) - 1 and number < len(between):
            paths.append(between[number])
    paths = list(dict.fromkeys([*paths, *between]))
    return [path for path in seen if path in paths] if set(paths) <= set(seen) else paths


def _nothing(dump: Dump) -> str:
    """Why this dump can prove nothing; "" where it can."""
    if value_at(dump.run, "engine", "eager"):
        return "the engine is eager: nothing is compiled, and no taps are in graphs"
    if not dump.records:
        return "nothing was captured; `accprobe doctor` finds the reason"
    return ""


def _amended(ran: TapRunResult, repeats: bool, module: str | None) -> dict[str, Any]:
    """``engine.graphs.changed`` of a run with taps: what they changed."""
    assert ran.outcome is not None
    changed = {**ran.outcome.figures(), "against": "off", "repeats": repeats}
    return changed | ({"module": module} if module else {})


def differs(same: bool | None) -> bool | None:
    """The opposite; None stays."""
    return None if same is None else not same


def number(value: float | None) -> float | None:
    """As JSON can say it."""
    return value if value is not None and math.isfinite(value) else None


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


_HEAD = ("run", "taps", "tokens", "top logits", "logits", "root", "root rel_l2", "key", "time")
DISTRUST = "a bug of memory that is used again too early can hide while taps stand: docs/capture.md, When to distrust"


def lines(proof: TapProof) -> list[str]:
    """The table, what differs first, the verdict last."""
    out = _table(proof.runs)
    if any(ran.outcome is not None and ran.outcome.behind for ran in proof.runs):
        out.append("rows behind a token that differs have other inputs, and are not compared")
    for ran in proof.runs:
        if ran.outcome is not None and not ran.outcome.batches:
            out.append(f"{ran.name}: other batches than off: bits may differ for that alone")
        if ran.same_answers is False:
            out.append(f"{ran.name}: the server's answers differ from off's")
        if ran.parting is not None:
            one = ran.parting
            out.append(
                f"{ran.name}: first other value than on's at {one.tap} {one.role}"
                f" ({one.spot.differing} of {one.spot.rows} rows, rel_l2 {_figure(one.spot.rel_l2)})"
            )
    out += proof.notes
    out += [_blame(one) for one in proof.culprits]
    return [*out, verdict(proof)]


def verdict(proof: TapProof) -> str:
    """The last line."""
    if proof.verdict == SAME:
        full = next((ran for ran in proof.runs if ran.name == "full"), None)
        text = "looking changed nothing: tokens, logits and the model's output are the same bits, with taps and without"
        if full is not None and full.same is False and full.outcome is not None:
            text += f"; the full set does change them (root rel_l2 {_figure(full.outcome.root.rel_l2)})"
        return f"{text}\n({DISTRUST})"
    if proof.verdict == CHANGED:
        wrong = [ran.name for ran in proof.runs if ran.name in ("on", "selected") and ran.same is False]
        return f"LOOKING CHANGED THE RESULT: {' and '.join(wrong)} against off"
    return f"nothing could be proved: {proof.why}"


def to_json(proof: TapProof) -> dict[str, Any]:
    """What ``--json`` prints. Figures are of each run against the first one without taps; null where there are none."""
    return {
        "schema": 1, "verdict": proof.verdict, "why": proof.why or None, "repeats": proof.repeats,
        "runs": [_run(ran) for ran in proof.runs],
        "culprits": [
            {"run": one.run, "module": one.module or None, "before": one.before, "runs": one.ran,
             "root_rel_l2": number(one.root_rel_l2)} for one in proof.culprits
        ],
        "notes": list(proof.notes),
    }  # fmt: skip


def _run(ran: TapRunResult) -> dict[str, Any]:
    outcome, parting = ran.outcome, ran.parting
    figures = None if outcome is None else outcome.figures() | {
        "answers": differs(ran.same_answers), "rows": outcome.root.rows, "rows_behind_a_token": outcome.behind,
        "same_batches": outcome.batches,
    }  # fmt: skip
    return {
        "name": ran.name, "dump": ran.place, "seconds": round(ran.seconds, 1), "set": ran.graphs.get("set"),
        "taps": ran.taps, "chosen": ran.graphs.get("chosen", 0), "key": ran.graphs.get("key") or None,
        "same": ran.same, "changed": figures,
        "first_parting": None if parting is None else {
            "tap": parting.tap, "role": parting.role, "rank": parting.rank, "rows": parting.spot.rows,
            "differing": parting.spot.differing, "rel_l2": number(parting.spot.rel_l2),
        },
    }  # fmt: skip


def _table(runs: tuple[TapRunResult, ...]) -> list[str]:
    rows = [list(_HEAD)]
    for ran in runs:
        result = ran.outcome
        spots = ["-"] * 5
        if result is not None:
            spots = [*map(_cell, result.spots.values()), _figure(result.root.rel_l2)]
        taps = str(ran.taps) + (f" ({ran.graphs.get('set')})" if ran.taps else "")
        rows.append([ran.name, taps, *spots, str(ran.graphs.get("key") or "-")[:8], f"{ran.seconds:.0f} s"])
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _cell(spot: Tally) -> str:
    if not spot.rows:
        return "-"
    return f"{spot.differing} of {spot.rows}" if spot.differing else f"same ({spot.rows})"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _blame(one: Culprit) -> str:
    if not one.module:
        return (
            f"{one.run}: taps at all {one.before} modules change nothing as long as none is chosen: what changes the "
            "result is what is chosen, or another setting"
        )
    alone = (
        "no tap in front of it" if not one.before else f"taps at the {one.before} modules in front of it change no bit"
    )
    return f"{one.run}: first module whose compiled code changed: {one.module} ({alone}; {one.ran} runs)"
