"""Which requests and rows of a failed gate are captured, in which pass.

The problem: a capture of everything does not fit on a disk, and a capture of the worst token's own row shows what was
passed on to it: the error may have been made in an earlier row, which left wrong keys and values behind. The idea: of
the pass in which the worst token lies a few requests are captured whole, up to that token; where their prompts came
from the prefix cache, so is the prompt of the request that filled it, in whichever pass. What a disk budget does not
hold is left out in a fixed order, and each omission is a sentence.
Not here: which tokens are worst (measure/gating.py), starting servers (recapture.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from vllm_accprobe.gate.sending import steps as steps_log
from vllm_accprobe.gate.sending.along import SCORE
from vllm_accprobe.gate.sending.replies import Sent
from vllm_accprobe.gate.sending.reply import Reply

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
class DigTarget:
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
        return tuple(steps_log.request_id(name, self.pass_index) for name in self.names)


@dataclass(frozen=True)
class DigPlan:
    """windows: by rising pass, the target's last. words: the arrivals of the passes that are sent, the target's last.
    left: what is not captured, as sentences."""

    target: DigTarget
    windows: tuple[Window, ...]
    words: tuple[str, ...]
    left: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> DigPlan:
        """Raises KeyError, TypeError, ValueError for what ``to_json`` has not made."""
        lists = [{**w, "names": tuple(w["names"]), "prompts": tuple(w["prompts"])} for w in value["windows"]]
        windows = tuple(Window(**w) for w in lists)
        return cls(DigTarget(**value["target"]), windows, tuple(value["words"]), tuple(value["left"]))


def choose(golden: Sent, mine: Sent, worst: Sequence[Token]) -> DigPlan:
    """worst: of the gate, most informative first, at least one."""
    words = [str(p.get("arrive")) for p in golden.about["passes"]]
    served = [w for w in worst if w.pass_index < len(words) and words[w.pass_index] != SCORE]
    first = (served or list(worst))[0]
    target = DigTarget(first.name, first.ordinal, first.position, first.gap, first.pass_index)
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
    return DigPlan(target, tuple(windows[i] for i in sorted(windows)), tuple(sent))


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
    """Prompt tokens that were not computed, where the engine or the server told."""
    rows = steps_log.read(side.path).rows(index, name)
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

    def of(self, plan: DigPlan) -> float:
        return sum(w.rows * self.row + w.sampled * self.sampled for w in plan.windows)


def narrowed(plan: DigPlan, sizes: RowSizes) -> DigPlan:
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
