"""From a tensor at a tap to lines and bytes of the dump.

The problem: hundreds of tensors per step, most of them seen twice (an output is the next module's input), some strided,
some with rows that nobody asked for, some on a device, while the model waits. The idea: one hash per tensor decides
whether its bytes are new in this step; only new bytes are copied, straight into the writer's block; everything else
is a journal line that points at them. Tensors of a device take the detour over device_staging.py and arrive here on its
thread.
Not here: blocks and files (dump/recorder/writer.py), which rows are which (rows.py, rowmaps.py), what is tapped
(hooks.py).
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_accprobe.capture.core.device_staging import DeviceStaging
from vllm_accprobe.capture.core.memory import DTYPE_NAMES, LAZY, Ranges, Scratch, digest, selected
from vllm_accprobe.capture.core.rowmaps import RowMaps
from vllm_accprobe.capture.core.rows import Space
from vllm_accprobe.config import ProbeConfig
from vllm_accprobe.dump.recorder.writer import RankWriter
from vllm_accprobe.dump.schema import ROOT_TAP, Module, Request, Step
from vllm_accprobe.dump.stats import StatsCell, moments_at, warm_up


def _event(kind: str, value: Any) -> dict[str, Any]:
    event: dict[str, Any] = {"event": kind}
    for f in dataclasses.fields(value):
        item = getattr(value, f.name)
        if item is not None and item != ():
            event[f.name] = item
    return event


class Sink:
    """Everything that one rank leaves behind. Methods are called from the model's thread; none of them raises for a
    full disk or a spent budget: ``stopped`` then says why, and nothing more is taken.

    Args:
        start: the journal's first line, without its ``event`` key.
        staged: tensors go through DeviceStaging (a device), or, for tests, as if they did.
        on_stop: called once, from any thread, with the reason when the sink gives up.
    """

    def __init__(
        self,
        config: ProbeConfig,
        root: Path,
        rank: int,
        start: dict[str, Any],
        on_stop: Callable[[str], None],
        device: torch.device | None = None,
        staged: bool = False,
    ):
        self.keep = config.task == "tensor"
        self._on_stop = on_stop
        self.writer = RankWriter(
            root, rank, {"event": "start", **start}, budget_bytes=config.budget_bytes, on_stop=on_stop
        )
        # Compiling takes seconds the first time on a machine: now, not in somebody's request. Not earlier, at import:
        # vLLM 0.32's CPU worker cannot be initialised in a process that has already loaded llvmlite.
        warm_up()
        self.seen: dict[str, StatsCell] = {}
        self.lasting: dict[str, StatsCell] = {}  # of parameters: their bytes are stored once per run
        self._rowmaps = RowMaps()
        self.scratch = Scratch()
        self.skipped: Counter[tuple[str, str | None, str]] = Counter()
        self.tensors = 0
        self.steps = 0
        self._lock = threading.Lock()
        self._closed = False
        device = device or torch.device("cpu")
        self._staging = DeviceStaging(device, self._staging_failed) if staged or device.type != "cpu" else None

    @property
    def direct(self) -> bool:
        """Whether tensors lie in host memory and are taken where they are."""
        return self._staging is None

    @property
    def stopped(self) -> str | None:
        """Why nothing more is written, or None."""
        return self.writer.stopped

    # --- lines -------------------------------------------------------------------------------------------------

    def line(self, event: dict[str, Any] | Callable[[], dict[str, Any] | None]) -> None:
        """A journal line in its place among the tensors. A callable is asked for it on the writer's thread, when the
        lines before it are done."""
        if self._staging is None:
            self.writer.line(event)
        else:
            self._staging.stage((), lambda _: self.writer.line(event))

    def step(self, step: Step) -> None:
        """A step begins; bytes of the last one, parameters' excepted, are no longer known."""
        self.steps += 1
        self._then(self._new_step)
        self.line(_event("step", step) | {"batch": dict(step.batch)})

    def request(self, request: Request) -> None:
        """A request's line, once, before the first row map that names it."""
        event = _event("request", request)
        if request.images:
            event["images"] = [dataclasses.asdict(image) for image in request.images]
        self.line(event)

    def module(self, module: Module) -> None:
        """A tap's line."""
        self.line(
            {
                "event": "module",
                "tap": module.tap,
                "class": module.cls,
                "index": module.index,
                "attrs": dict(module.attrs),
            }
        )

    def rows(self, step: int, space: Space) -> None:
        """The row map of ``space``; token ids (and true positions) come from its tensors as they are at this moment."""
        tensors, finish = self._rowmaps.of(step, space)

        def arrived(hosts: Sequence[torch.Tensor]) -> None:
            self.writer.line(finish(hosts))

        if self._staging is None:
            arrived(tensors)
        else:
            self._staging.stage(tensors, arrived)

    def skip(self, tap: str, reason: str, role: str | None = None, count: int = 1) -> None:
        """Counted here and written once, at close: a skip that repeats every step is one line."""
        self.skipped[tap, role, reason] += count

    def error(self, where: str, message: str, step: int | None) -> None:
        """A failure that was survived; a message of at most 2,000 characters is kept."""
        self.line({"event": "error", "where": where, "message": message[:2000], "step": step})

    # --- tensors -----------------------------------------------------------------------------------------------

    def tensor(
        self,
        event: dict[str, Any],
        tensor: torch.Tensor,
        space: Space | None,
        row_dim: int,
        ticket: Ticket | None = None,
        lasting: bool = False,
    ) -> None:
        """Stores ``tensor`` (its selected rows, if it has any) and queues its line; ``ticket`` gets the hash.
        ``lasting``: the same bytes will come again in later steps."""
        ready = self._prepare(event, tensor, space, row_dim)
        if ready is None:
            return
        tensor, ranges = ready
        if self._staging is None:
            hash = self._store(event, tensor, ranges, lasting)
            if ticket is not None:
                ticket.digest = hash
            return

        def arrived(hosts: Sequence[torch.Tensor]) -> None:
            hash = self._store(event, hosts[0], None, lasting)
            if ticket is not None:
                ticket.digest = hash

        self._staging.stage((selected(tensor, ranges),), arrived)

    def after(
        self,
        event: dict[str, Any],
        tensor: torch.Tensor,
        space: Space | None,
        row_dim: int,
        ticket: Ticket,
        changed: Callable[[bool], None],
    ) -> None:
        """Stores ``tensor`` only if its bytes are no longer those of ``ticket``; tells ``changed`` which."""
        ready = self._prepare(event, tensor, space, row_dim)
        if ready is None:
            return
        tensor, ranges = ready

        def compare(host: torch.Tensor, ranges: Ranges) -> None:
            event["shape"], parts = self.scratch.parts(host, ranges)
            hash = digest(parts)
            different = ticket.digest is not None and hash != ticket.digest
            changed(different)
            if different:
                self._store_parts(event, parts, hash)

        if self._staging is None:
            compare(tensor, ranges)
        else:
            self._staging.stage((selected(tensor, ranges),), lambda hosts: compare(hosts[0], None))

    def look(self, event: dict[str, Any], tensor: torch.Tensor, ticket: Ticket) -> None:
        """Hash and statistics of ``tensor``, put into ``event``, which becomes no line."""
        ready = self._prepare(event, tensor, None, 0)
        if ready is None:
            return

        def arrived(hosts: Sequence[torch.Tensor]) -> None:
            event["shape"], parts = self.scratch.parts(hosts[0], None)
            ticket.digest = event["hash"] = digest(parts)
            cell = self.seen.get(event["hash"] + event["dtype"])
            if cell is None:
                cell = StatsCell(None, event["hash"])
                for address, nbytes in parts:
                    cell.add(moments_at(address, nbytes, event["dtype"]))
            event["stats"] = cell

        if self._staging is None:
            arrived((ready[0],))
        else:
            self._staging.stage((ready[0],), arrived)

    def _prepare(
        self, event: dict[str, Any], tensor: torch.Tensor, space: Space | None, row_dim: int
    ) -> tuple[torch.Tensor, Ranges] | None:
        """The tensor with its rows along dimension 0 (or whole) and the wanted ranges; None if it cannot be stored."""
        name = DTYPE_NAMES.get(tensor.dtype)
        if name is None or tensor.layout is not torch.strided:  # sparse, quantised, nested
            self.skip(event["tap"], "not a plain tensor", event["role"])
            return None
        # Half precision has no lazy conjugates, and asking releases the GIL, which the writer's thread may then take.
        if name in LAZY and (tensor.is_conj() or tensor.is_neg()):
            tensor = tensor.resolve_conj().resolve_neg()
        event["dtype"] = name
        if space is None or (space.whole and tensor.shape[row_dim] == space.src):
            return tensor, None
        if row_dim != 0:
            return torch.cat([tensor.narrow(row_dim, a, b - a) for a, b in space.ranges], row_dim), None
        return tensor, space.ranges

    def _store(self, event: dict[str, Any], host: torch.Tensor, ranges: Ranges, lasting: bool = False) -> str:
        event["shape"], parts = self.scratch.parts(host, ranges)
        return self._store_parts(event, parts, digest(parts), lasting)

    def _store_parts(
        self, event: dict[str, Any], parts: list[tuple[int, int]], hash: str, lasting: bool = False
    ) -> str:
        event["hash"] = hash
        self.tensors += 1
        key = hash + event["dtype"]
        cell = self.seen.get(key)
        if cell is not None:
            payload = cell.payload
            event["stats"] = cell
            if payload is not None:
                event["seg"], event["off"], event["nbytes"] = payload.seg, payload.off, payload.nbytes
            self.writer.line(event)
            return hash
        cell = self.seen[key] = StatsCell(None, hash)
        if lasting or event["event"] == "param":
            self.lasting[key] = cell
        event["stats"] = cell
        if self.keep or event["event"] == "param":
            cell.payload = self.writer.put(parts, event, cell)
        else:
            for address, nbytes in parts:
                cell.add(moments_at(address, nbytes, event["dtype"]))
            self.writer.line(event)
        return hash

    # --- parameters --------------------------------------------------------------------------------------------

    def param(self, event: dict[str, Any], tensor: torch.Tensor | None, stats: StatsCell | None = None) -> None:
        """A parameter's line: with its payload where ``tensor`` is given, else a fingerprint with ``stats``."""
        if tensor is not None:
            self.tensor(event, tensor, None, 0)
        else:
            self.line(event | {"stats": stats})

    # --- the end -----------------------------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """Writes what is still queued, the counted skips and the ``end`` line. Safe to call twice and from atexit."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._staging is not None:
            self._staging.close()
        if self._rowmaps.disbelieved:
            why = "the runner's positions could not be, the scheduler's were taken"
            self.skip(ROOT_TAP, why, "positions", self._rowmaps.disbelieved)
        totals: Counter[str] = Counter()
        for (tap, role, why), count in self.skipped.items():
            event = {"event": "skip", "tap": tap, "reason": why, "count": count}
            if role is not None:
                event["role"] = role
            self.writer.line(event)
            totals[why] += count
        self.writer.close(reason, {"steps": self.steps, "tensors": self.tensors, "skipped": dict(totals)})

    def _new_step(self) -> None:
        self.seen.clear()
        self.seen.update(self.lasting)
        self._rowmaps.new_step()

    def _then(self, action: Callable[[], None]) -> None:
        if self._staging is None:
            action()
        else:
            self._staging.stage((), lambda _: action())

    def _staging_failed(self, error: BaseException) -> None:
        self.writer.line({"event": "error", "where": "staging", "message": f"{type(error).__name__}: {error}"[:2000]})
        self._on_stop(f"the copy from the device failed: {error}")


class Ticket:
    """Gets the hash of a stored tensor: at once for host tensors, on the staging thread for a device's."""

    __slots__ = ("digest",)

    def __init__(self) -> None:
        self.digest: str | None = None
