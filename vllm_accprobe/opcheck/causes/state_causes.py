"""Causes of recurrent states: another request's, none, or an old one, whole or of the convolution alone.

The problem: a kernel that reads a wrong slot computes rightly from a wrong state, and so do all later rows of that
request, long after. The idea: at some run of its rows, the first one or a later, a request's state became another one
that the dump knows, and from there on everything is as the module computes it. Which state, and at which run, is read
from mine's output, for each request by itself, so that each way to choose counts as tried; a request that is right as
it is keeps its own.
Elsewhere: states of a call (references/mixers.py), the proof (search.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vllm_accprobe.dump.block_code import INSIDE
from vllm_accprobe.opcheck.causes.api import ADDRESS, SETTING, CauseRow, Guess, Trial, edited
from vllm_accprobe.opcheck.reference import Call, Declined
from vllm_accprobe.opcheck.references.mixers import KINDS, Mixer, OtherStates, State, as_it_is

_RUNS = 6
"""Chosen: the latest runs of rows of a request at which its state may have become another one."""
_MOST = 1 << 26
"""Chosen: numbers of states that are computed for one request: about a second."""
_BOTH, _RECURRENCE, _WINDOW = "its state", "the recurrence's state", "the convolution's last inputs"
_PARTS = (_BOTH, _RECURRENCE, _WINDOW)
_LEFT, _OTHER, _NONE, _STALE = "left", "other", "none", "stale"
_TEXTS = {
    _LEFT: "if {part} at the first token of request {own!r} was not reset: it is the final state of request {donor!r}",
    _OTHER: "with {part} of request {own!r} taken from request {donor!r} before position {at}",
    _NONE: "with {part} of request {own!r} reset to zero before position {at}",
    _STALE: "with {part} of request {own!r} at position {at} not updated since position {old}",
}
"""Kind → the clause."""


def _setting(trial: Trial) -> tuple[Mixer, OtherStates, list[str]]:
    """The module's recurrence, the requests' states, and the roles of what it made. Raises Declined."""
    call = trial.call
    roles = [role for role in trial.roles() if role.startswith(INSIDE)]
    if call.cls not in KINDS or not roles:
        raise Declined("no recurrence of it was computed")
    return KINDS[call.cls].make(call), trial.extra("states"), roles


def _candidates(
    kind: str, mixer: Mixer, others: OtherStates, own: str, first: int
) -> Iterator[tuple[str, int, int, State]]:
    """(donor, position at which the request's state becomes another one, position of that state, the state)."""
    begins = [(step, pos) for step, pos in others.requests[own][0] if pos <= first]
    if kind == _LEFT:
        for donor in others.requests:
            n = others.length(donor, begins[0][0])
            if donor != own and n:
                yield donor, 0, n, others.behind(mixer, donor, n)
                yield donor, 0, n, others.behind(mixer, donor, n, uncleared=True)
        return
    later = [(k, *begins[k]) for k in range(1, len(begins))][-_RUNS:]
    for k, step, pos in later:
        if kind == _NONE:
            yield own, pos, 0, mixer.zero()
        elif kind == _STALE:
            for old in sorted({pos - 1, *(at for _, at in begins[1:k][-_RUNS:])}):
                yield own, pos, old, others.behind(mixer, own, old)
        else:
            for donor in others.requests:
                n = others.length(donor, step)
                if donor != own and n:
                    yield donor, pos, n, others.behind(mixer, donor, n)


@dataclass(frozen=True)
class _StateTrial:
    """One request's rows of a call: ``rows`` by name, from its first [1, n, ...], of which those from ``first`` on are
    the call's; mine: what was made of them, by place, float64."""

    mixer: Mixer
    rows: Mapping[str, Any]
    first: int
    mine: Mapping[str, Any]

    def off(self, state: State, begun: int) -> tuple[float, State]:
        """(squared distance of mine's from what follows from a state behind ``begun`` rows, the state at the run)."""
        if begun < self.first:
            before = {n: t[:, begun : self.first] for n, t in self.rows.items()}
            state = self.mixer.advance(as_it_is, 0.0, before, state)[1]
        made = self.mixer.advance(as_it_is, 0.0, {n: t[:, self.first :] for n, t in self.rows.items()}, state)[0]
        off = sum(float((made[n][0] - y.reshape(made[n][0].shape)).square().sum()) for n, y in self.mine.items())
        return off, state


_Choice = tuple[dict[int, State], dict[str, Any], float]


def _best(trial: Trial, kind: str, part: str) -> _Choice:
    """`_searched`, once for each call."""
    known = _setting(trial)[1].found
    if (kind, part) not in known:
        known[kind, part] = _searched(trial, kind, part)
    return known[kind, part]


def _searched(trial: Trial, kind: str, part: str) -> _Choice:
    """(by first row of a request's run: the state there that explains mine's output best, unless its own does; what
    the clause says of the first such request; in how many ways it could be chosen)."""
    mixer, others, roles = _setting(trial)
    found: dict[int, State] = {}
    cause: dict[str, Any] = {}
    ways, name = 1.0, KINDS[trial.call.cls].reads[0]
    size = max(1, mixer.channels, int(mixer.zero()[1].numel()))
    for at, positions, past in trial.call.extra["cache"].requests():
        first, stop = int(positions[0]), int(positions[-1]) + 1
        own = next((label for label, (_, rows) in others.requests.items()
                    if len(rows[name]) >= stop and torch.equal(rows[name][:stop], past[name])), None)  # fmt: skip
        if own is None or stop * size > _MOST:
            continue
        rows = {n: past[n].double().unsqueeze(0) for n in KINDS[trial.call.cls].reads}
        run = _StateTrial(mixer, rows, first, {r.removeprefix(INSIDE): trial.mine(r)[at].double() for r in roles})
        least, best, count = run.off(others.behind(mixer, own, first), first)[0], None, 1
        for donor, pos, n, other in _candidates(kind, mixer, others, own, first):
            plain = others.behind(mixer, own, pos)
            window, state = (other[k] if part in (_BOTH, which) else plain[k]
                             for k, which in ((0, _WINDOW), (1, _RECURRENCE)))  # fmt: skip
            count += 1
            left, there = run.off((window, state), pos)
            if left < least or (best is not None and left == least):  # the latest place that explains it
                least, best = left, {"part": part, "own": own, "donor": donor, "at": pos, "old": n - 1}
                found[int(at[0])] = there
        if best is not None:
            cause = cause or best
            ways *= count
    return found, cause, ways


def _states(trial: Trial) -> Iterator[Guess]:
    mixer = _setting(trial)[0]
    for kind, text in _TEXTS.items():
        for part in _PARTS if mixer.state else (_WINDOW,):
            _, cause, ways = _best(trial, kind, part)
            if cause:
                yield Guess((text.format(**cause), kind, part), choices=ways)


def _from_states(trial: Trial, parameter: tuple[str, str, str]) -> Call:
    found = _best(trial, *parameter[1:])[0]
    return edited(trial.call, extra={"start": lambda at, _: found.get(int(at[0]))})


def _without(name: str) -> Callable[[Trial, Any], Call]:
    """The call with this parameter 0."""
    return lambda trial, _: edited(trial.call, params={name: torch.zeros_like(trial.call.stored(name))})


CAUSES = (
    CauseRow("another_state", ADDRESS, tuple(KINDS), "{0}", _from_states, _states, whole=True),
    CauseRow("no_step_bias", SETTING, tuple(KINDS), "without the bias of its time step", _without("dt_bias")),
    CauseRow("no_direct_part", SETTING, tuple(KINDS), "without D, its inputs' direct part", _without("D")),
)
