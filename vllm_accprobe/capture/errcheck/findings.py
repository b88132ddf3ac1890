"""From a bad output to a finding with names for its rows, a small dump of that call, and the rank's report.

The problem: whoever repairs the operator wants its inputs and outputs, but a batch holds the texts of other people; the
first alarm is the one that counts, yet later ones must be counted; a killed rank must have left how far it came. The
idea: the bad rows are located in the output; their segments, and nothing else, go through the same session and sink as
any capture, so that `inspect`, `opcheck` and `gentest` read the result like any dump. Tensors without rows are left out
and counted. One object gets the alarms, and writes the report at every change and now and then.

Not here: detection (watch.py), the format of the report (dump/findings.py).
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vllm_accprobe.capture.core import say
from vllm_accprobe.capture.core.layout import Layouts
from vllm_accprobe.capture.core.recording import Recording
from vllm_accprobe.capture.core.rows import Space
from vllm_accprobe.capture.errcheck.watch import BAD, GOOD, UNCHECKED, Alarm, Watch
from vllm_accprobe.config import ProbeConfig
from vllm_accprobe.dump.files import numbered_siblings
from vllm_accprobe.dump.findings import (
    BAD_BAD,
    GOOD_BAD,
    MOST_ROWS,
    PARAMETER,
    UNSURE,
    FirstBad,
    RankReport,
    sentence,
    write,
)
from vllm_accprobe.dump.journal import TensorHead
from vllm_accprobe.dump.journal_writer import template_of
from vllm_accprobe.dump.schema import ROOT_TAP, Request, Segment, Step
from vllm_accprobe.dump.stats import StatsCell

EXIT = "exit"
SUBDIR = "errcheck"
_PLACES = 100
"""Taps whose later alarms are counted apart."""
_REPORT_S = 10.0


class RankFindings:
    """The findings of one rank. ``parameters``: sentences on bad ones, by tap; ``taps``: how many are watched;
    ``steps``: how many were seen; ``first``: the alarm that counts; ``exits``: it ends the process. root:
    the dump's, in which the report has a folder of its own where there is a capture; parallel: the rank's place among
    the others."""

    def __init__(self, root: Path, config: ProbeConfig, parallel: Mapping[str, Any]) -> None:
        self.root = root / SUBDIR if config.enabled else root
        self.kinds = tuple(kind for kind in config.errcheck if kind != EXIT)
        self.exits = EXIT in config.errcheck
        self.first: FirstBad | None = None
        self.parameters: dict[str, list[str]] = {}
        self.taps = self.steps = 0
        self._parallel = parallel
        self._later = 0
        self._places: Counter[str] = Counter()
        self._written = time.monotonic()
        self._fails = False

    def settle(self) -> None:
        """A second engine of one process writes next to the first one's."""
        self.root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for place in numbered_siblings(self.root):
            if not (place / f"errcheck-rank{self._parallel['rank']:04d}.json").exists():
                place.mkdir(mode=0o700, parents=True, exist_ok=True)
                self.root = place
                return

    def counts(self, tap: str, kept: bool) -> bool:
        """Told of an alarm: whether it is the one that counts, the first, or again at the first one's tap, now that its
        tensors are ``kept``. Others are counted as later ones."""
        first = self.first
        if first is None:
            return True
        self._later += 1
        if len(self._places) < _PLACES or tap in self._places:
            self._places[tap] += 1
        return not first.dtype and kept and tap == first.tap

    def tell(self, found: FirstBad, tensors: str, ends: str, where: str = "") -> str:
        """The alarm counts: it is written, and said in one line. tensors: where they are; ends: what follows. Its
        sentence."""
        self.first = replace(found, tensors=tensors)
        self.write("watching")
        line = sentence(self.first)
        say(f"errcheck: {line}{where}; tensors {tensors}; {ends}")
        return line

    def old(self) -> bool:
        """Whether the report is so old that a killed rank would not have left how far it came."""
        return time.monotonic() - self._written > _REPORT_S

    def write(self, state: str, why: str = "") -> None:
        """Writes the report. Never raises for the disk."""
        self._written = time.monotonic()
        report = RankReport(
            rank=self._parallel["rank"],
            pid=os.getpid(),
            pp=self._parallel["pp"][0],
            dp=self._parallel["dp"][0] if self._parallel["dp"][1] > 1 else 0,
            state=state,
            why=why,
            kinds=self.kinds,
            taps=self.taps,
            steps=self.steps,
            later=self._later,
            places=dict(self._places),
            first=self.first,
            parameters=tuple(text for texts in self.parameters.values() for text in texts),
        )
        try:
            write(self.root, report)
        except OSError as error:
            if not self._fails:
                self._fails = True
                say(f"errcheck: its findings cannot be written to {self.root}: {error.strerror or error}")


FindSpace = Callable[[str, int], "Space | None"]
"""The space of a tensor with so many rows in a part of the model, or None."""
MAX_GB = 1.0


Fingerprint = tuple[str, str, tuple[int, ...], str]
"""Of a parameter, without its values: name, dtype, shape, and the hash of a sample (taps/params.py)."""


def finding(
    watch: Watch, alarm: Alarm, space: Space | None, requests: Mapping[int, Request], parameters: Sequence[str]
) -> tuple[FirstBad, list[int]]:
    """What is known of the alarm, and the bad rows of its output (none where the call was not kept)."""
    tensor = dict(alarm.outputs).get(alarm.role)
    rows: list[int] = []
    if tensor is not None and space is not None:
        rows = [row for row in _bad_rows(watch, alarm, tensor, space) if row < space.src]
    states = {i.state for i in alarm.inputs}
    if parameters:
        verdict = PARAMETER
    elif BAD in states:
        verdict = BAD_BAD
    elif alarm.inputs and states <= {GOOD, UNCHECKED}:
        verdict = GOOD_BAD
    else:
        verdict = UNSURE
    bad = alarm.bad
    named = [_named(row, space, requests) for row in rows[:MOST_ROWS]] if space is not None else []
    return FirstBad(
        step=alarm.step.number,
        order=alarm.order,
        time=time.time(),
        tap=alarm.tap,
        cls=alarm.cls,
        role=alarm.role,
        call=alarm.call,
        kind=bad.word if bad is not None else "NaN, Inf or saturation",
        nan=bad.nan if bad else 0,
        inf=bad.inf if bad else 0,
        saturated=bad.saturated if bad else 0,
        verdict=verdict,
        dtype=str(tensor.dtype).removeprefix("torch.") if tensor is not None else "",
        shape=tuple(tensor.shape) if tensor is not None else (),
        rows=tuple(named),
        bad_rows=len(rows),
        all_rows=space.src if space is not None else 0,
        inputs=tuple(
            {"role": i.role, "state": i.state, "nan": i.bad.nan, "inf": i.bad.inf, "saturated": i.bad.saturated}
            for i in alarm.inputs
        ),
        parameters=tuple(parameters),
        before=alarm.before,
    ), rows


def _bad_rows(watch: Watch, alarm: Alarm, tensor: torch.Tensor, space: Space) -> list[int]:
    dim = next((d for d, size in enumerate(tensor.shape) if size in (space.src, space.padded)), None)
    if dim is None:
        return []
    bad = watch.rule.elements(tensor, alarm.part).movedim(dim, 0)
    return [int(row) for row in torch.nonzero(bad.reshape(bad.shape[0], -1).any(1)).flatten().tolist()]


def _named(row: int, space: Space, requests: Mapping[int, Request]) -> dict[str, Any]:
    for segment in space.segments:
        if segment.row <= row < segment.row + segment.n:
            request = requests.get(segment.req)
            name = request.id if request is not None else str(segment.req)
            return {
                "request": name, "position": segment.pos + row - segment.row, "phase": segment.phase, "row": row,
            }  # fmt: skip
    return {"request": None, "position": None, "phase": None, "row": row}


def cut(space: Space, rows: Sequence[int]) -> Space:
    """``space`` with only ``rows`` (ascending rows of the model's tensors) selected. No rows: as it is."""
    if not rows:
        return space
    ranges: list[tuple[int, int]] = []
    segments: list[Segment] = []
    wanted = set(rows)
    at = 0
    token_rows: list[int] = []
    for segment in space.segments:
        for offset in range(segment.n):
            row = segment.row + offset
            if row in wanted:
                last = segments[-1] if segments else None
                if last is not None and last.req == segment.req and last.row + last.n == row:
                    segments[-1] = Segment(last.req, last.pos, last.n + 1, last.row, last.phase, last.image)
                    ranges[-1] = (ranges[-1][0], row + 1)
                else:
                    segments.append(Segment(segment.req, segment.pos + offset, 1, row, segment.phase, segment.image))
                    ranges.append((row, row + 1))
                if space.token_rows:
                    token_rows.append(space.token_rows[at])
            at += 1
    return Space(
        space.name, space.src, space.padded, ranges, segments, ids=space.ids, positions=space.positions,
        token_rows=token_rows, floors=space.floors,
    )  # fmt: skip


def keep(
    root: Path,
    run: dict[str, Any],
    parallel: Mapping[str, Any],
    watch: Watch,
    layouts: Layouts,
    alarm: Alarm,
    rows: Sequence[int],
    find_space: FindSpace,
    requests: Mapping[int, Request],
    params: Sequence[Fingerprint],
) -> str:
    """Writes the alarm's call as this rank's dump under ``root``. Returns how it went, as part of a sentence.

    params: fingerprints of the module's parameters; their values are the checkpoint's."""
    config = ProbeConfig(enabled=True, dir=str(root), max_gb=MAX_GB)
    tensor = dict(alarm.outputs)[alarm.role]
    full = find_space(alarm.part, tensor.shape[0] if tensor.dim() else 0)
    chosen = cut(full, rows) if full is not None else None

    def spaces(part: str, size: int) -> Space | None:
        # Another kind of rows in a vision tower (patches before merging): the bad ones are not known there.
        if chosen is None or (part == alarm.part and part == "vision" and size != chosen.src):
            return None
        return chosen

    stopped: list[str] = []
    recording = Recording(
        config, root, run, layouts, spaces,
        rank=int(parallel["rank"]), parallel=parallel, device=tensor.device, on_stop=stopped.append,
    )  # fmt: skip
    session, sink = recording.session, recording.session.sink
    concerned = {s.req for s in chosen.segments} if chosen is not None else set()
    step = Step(alarm.step.number, {"tokens": alarm.step.rows}, time.time())
    state = session.begin(step, [r for number, r in sorted(requests.items()) if number in concerned], False)
    assert state is not None
    for tap in (alarm.tap, alarm.tap.rpartition(".")[0]):  # the parent has numbers that a replay needs
        if tap in watch.modules:
            session.module(watch.modules[tap])
    path = "" if alarm.tap == ROOT_TAP else alarm.tap
    for name, dtype, shape, sample in params:
        layout = layouts.param_event(path, name, shape)
        head = TensorHead(alarm.tap, alarm.cls, f"param.{name}", layout=layout, sample=sample, once=True)
        sink.line((template_of(head, dtype, shape, 0), None, 0, 0, StatsCell()))
    for item in alarm.inputs:
        if item.tensor is None:
            sink.skip(alarm.tap, "changed in place before it could be kept", item.role)
        else:
            session.take(state, {}, alarm.tap, alarm.cls, item.role, alarm.call, item.tensor, alarm.part)
    for role, output in alarm.outputs:
        session.take(state, {}, alarm.tap, alarm.cls, role, alarm.call, output, alarm.part)
    recording.close("errcheck")
    if stopped:
        return f"not all kept ({stopped[0]}): {root}"
    return f"kept in {root}"
