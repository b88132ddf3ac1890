"""What to type next, as commands that run as they are printed.

The problem: a report names the operator that is wrong, and the reader must find which command helps and how paths,
names and the wrong row are spelled there. The idea: from a finished comparison at most five steps follow, the most
useful first: the call as a test, its check, the wrong row on both sides, its layer alone. What cannot work with these
dumps is not offered. Not here: what decides an open answer (comparison/verdict/follow_ups.py), spelling (facts.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_accprobe.comparison.gaps import splitting
from vllm_accprobe.comparison.pair import Pairs
from vllm_accprobe.comparison.verdict.follow_ups import dump_facts
from vllm_accprobe.judge.origins import OriginEntry
from vllm_accprobe.judge.weights import wrong_weights
from vllm_accprobe.report.charts import layer_of
from vllm_accprobe.report.facts import glob_of, line_of, operators, own_pairs, path_word, wrong_states

if TYPE_CHECKING:
    from vllm_accprobe.comparison.pair import Pair
    from vllm_accprobe.comparison.result import Comparison

MOST = 5
"""chosen: as many as a person reads."""
_PRESETS = frozenset(("all", "vision", "layers", "attention", "mlp", "norm", "linear", "logits"))
"""Words that VLLM_ACCPROBE_MODULES reads as kinds of modules and not as names."""


@dataclass(frozen=True)
class NextStep:
    """why: a sentence without its full stop; commands: lines to be typed one after the other."""

    why: str
    commands: tuple[str, ...]


def next_steps(comparison: Comparison) -> list[dict[str, str]]:
    """compare.json's ``next``: [{"why", "command"}], the most useful first, lines of a command separated by a line
    break; empty for a pass."""
    if comparison.verdict == "pass":
        return []
    found = [s for s in _steps(comparison) if s is not None]
    return [{"why": s.why, "command": "\n".join(s.commands)} for s in found[:MOST]]


def _steps(comparison: Comparison) -> Iterator[NextStep | None]:
    mine = path_word(comparison.mine_path)
    if wrong_states(comparison):
        yield _step("all findings of mine's ledger of states", ["accprobe", "inspect", mine, "states"])
    if any(f["side"] == "mine" for f in wrong_weights(comparison.weights)) and comparison.weights.get("told"):
        yield _step("the life of mine's weights, with all findings", ["accprobe", "inspect", mine, "weights"])
    place = _Place.of(comparison)
    if place is None:
        return
    if not wrong_states(comparison):  # the kernel computed with the inputs that it had
        yield from _about_the_call(comparison, place)
    yield _values(comparison, place)
    yield _alone(comparison, place)


@dataclass(frozen=True)
class _Place:
    """What the steps are about: the culprit, or where the error is first seen. origin: None there. pair: its worst;
    row: (request, position) that the verdict names, else the pair's worst, None where it has none that `inspect`
    takes."""

    tap: str
    pair: Pair
    origin: OriginEntry | None
    row: tuple[str, int] | None

    @staticmethod
    def of(comparison: Comparison) -> _Place | None:
        origins = operators(comparison)
        found = origins[0] if origins else comparison.first_divergence
        if found is None:
            return None
        own = Pairs(own_pairs(comparison, found))
        if not own:
            return None
        row = found.get("request"), found.get("position")

        def rank(i: int) -> tuple[bool, bool, bool, float]:
            p, named = own[i], row != (None, None)
            whose = named and p.worst_request == row[0]
            return p.status == "fail", whose and p.worst_position == row[1], whose, own.severities[i]

        pair = own[max(range(len(own)), key=rank)]
        own_row = f"{pair.tap}/{pair.role}" in (f"{found.get('module')}/{found.get('role')}", found.get("role"))
        at = _row(*row) if own_row else None
        return _Place(pair.tap, pair, origins[0] if origins else None, at or _row(*_worst(pair)))

    def golden(self, comparison: Comparison) -> tuple[str, str] | None:
        """Golden's (tap, what `show` takes for it); None where its own names, a tool's of files, do not tell."""
        p = self.pair
        if p.golden and p.golden == p.mine:
            return p.tap, f"{p.tap}/{p.role}"
        if comparison.golden_run.get("tool") == "accprobe":
            tap, slash, role = p.golden.rpartition("/")
            return (tap, f"{tap}/{role.partition('#')[0]}") if slash else None
        # Files are named otherwise on each side; inputs may be, too, within one tool.
        same = bool(p.golden) and p.rule == "exact" and not p.role.startswith("input")
        return (p.tap, f"{p.tap}/{p.role}") if same else None


def _split(comparison: Comparison, gap: Mapping[str, Any]) -> NextStep | None:
    """Captures that see what lies in a gap, and their comparison."""
    sides = dump_facts(comparison)
    settings = {s.name: splitting(gap, s.run) for s in sides}
    again = {s.name: s.again("split") if settings[s.name] else s.path for s in sides}
    words = ["accprobe", "compare", *(path_word(again[s.name]) for s in sides), *_without_taps(comparison)]
    last = line_of([*words, *_out(comparison.out, "split")])
    lines = [s.capture("split", **settings[s.name]) for s in sides if settings[s.name]]
    if not lines or last is None or not all(line_of([s.path]) for s in sides):
        return None
    return NextStep("a capture of what lies between the two taps tells which module it is", (*lines, last))


def _about_the_call(comparison: Comparison, place: _Place) -> Iterator[NextStep | None]:
    origin = place.origin
    if origin is not None and (gap := origin.get("gap")):
        yield _split(comparison, gap)
        return
    if origin is None or not str(origin.get("role")).rpartition("/")[2].startswith(("output", "input", "inplace")):
        return
    tap, out = glob_of(str(origin["module"])), comparison.out
    if origin.get("evidence") == "replay":
        words = ["accprobe", "gentest", path_word(comparison.mine_path), "--failed", "--ops", tap]
        why = "the wrong call as a folder of tests, for whoever owns the kernel (needs torch)"
        yield _step(why, words + _out(out, "gentest"))
        words = ["accprobe", "opcheck", path_word(comparison.mine_path), "--ops", tap]
        yield _step("its calls, each run again against the reference (needs torch)", words + _out(out, "opcheck"))
        return
    already = any("--replay" in step["command"] for step in comparison.would_decide)
    if comparison.replayed or comparison.foreign is not None or already:
        return
    sides = dump_facts(comparison)
    if not all(s.ours for s in sides):
        return
    if all(s.inputs for s in sides):
        words = ["accprobe", "compare", *_dumps(comparison), *comparison.options, "--replay", *_out(out, "replayed")]
        yield _step("a replay tells whether the operator is wrong for its own inputs (needs torch)", words)
        return
    poor = [s for s in sides if not s.inputs]
    glob = f"[{tap[0]}]{tap[1:]}" if tap in _PRESETS else tap
    settings = {"TASK": "tensor", "PARTS": "input,output,params", "MODULES": glob}
    again = {s.name: s.again("inputs") if s in poor else s.path for s in sides}
    words = ["accprobe", "compare", *(path_word(again[s.name]) for s in sides), *_without_taps(comparison), "--replay"]
    last = line_of([*words, *_out(out, "replayed")])
    lines = [s.capture("inputs", **settings) for s in poor]
    if last is not None and all(line_of([s.path]) for s in sides):
        why = "what went into the operator was not captured: with it, a replay tells whether the operator is wrong"
        yield NextStep(why, (*lines, last))


def _values(comparison: Comparison, place: _Place) -> NextStep | None:
    p = place.pair
    if p.tap.startswith("-"):
        return None
    at = [] if p.call == 0 else ["--calls", str(p.call)]
    own, who, whose, where, what = list[str](), list[str](), list[str](), list[str](), "values there"
    if place.row is not None:
        request, position = place.row
        where, who = ["--positions", str(position)], ["--requests", glob_of(request)]
        whose = ["--requests", glob_of(comparison.golden_ids.get(request, request))]
        what = "values of the row that the verdict names"
    if place.row in (None, _worst(p)):
        own = ["--steps", str(p.step)] if p.step is not None else []
        what = what if place.row is None else "values of the row that is worst"
    if p.rank is not None and (place.row is None or place.row[0] == p.worst_request):
        own += ["--ranks", str(p.rank)]
    head = ["accprobe", "inspect"]
    lines = [line_of([*head, path_word(comparison.mine_path), f"{p.tap}/{p.role}", *own, *at, *who, *where])]
    golden = place.golden(comparison)
    if golden is not None:
        lines.append(line_of([*head, path_word(comparison.golden_path), golden[1], *at, *whose, *where]))
    found = tuple(line for line in lines if line is not None)
    both = "mine's and golden's" if len(found) > 1 else "the"
    return NextStep(f"{both} {what}", found) if found else None


def _worst(pair: Pair) -> tuple[str | None, int | None]:
    return pair.worst_request, pair.worst_position


def _row(request: str | None, position: int | None) -> tuple[str, int] | None:
    """What `inspect` takes: rows of images are named otherwise than by a request alone."""
    return (request, position) if request and position is not None and ", image " not in request else None


def _alone(comparison: Comparison, place: _Place) -> NextStep | None:
    golden = place.golden(comparison)
    if golden is None:
        return None
    roots = [layer_of(tap) or tap for tap in (place.tap, golden[0])]
    globs = ",".join(f"{glob_of(root)},{glob_of(root)}.*" for root in dict.fromkeys(roots))
    words = ["accprobe", "compare", *_dumps(comparison), *_without_taps(comparison), "--taps", globs]
    what = "layer" if layer_of(place.tap) else "module"
    return _step(f"this {what} alone", words + _out(comparison.out, "alone"))


def _dumps(comparison: Comparison) -> list[str]:
    return [path_word(comparison.golden_path), path_word(comparison.mine_path)]


def _without_taps(comparison: Comparison) -> list[str]:
    """What was set in addition to the two dumps, without the choice of taps."""
    words = list(comparison.options)
    at = words.index("--taps") if "--taps" in words else None
    return words if at is None else words[:at] + words[at + 2 :]


def _out(out: str, name: str) -> list[str]:
    """Where the command writes: below the comparison's own directory, if it has one."""
    return ["--out", path_word(f"{out.rstrip('/')}/{name}")] if out else []


def _step(why: str, words: list[str]) -> NextStep | None:
    line = line_of(words)
    return None if line is None else NextStep(why, (line,))
