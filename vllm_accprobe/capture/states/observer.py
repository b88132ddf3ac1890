"""The ledger inside vLLM: an observer of the runner, with a dump to write into.

The problem: a ledger needs the runner's cache, which is made after the model is loaded, each step's schedule, the
moment at which the step is prepared, and a journal; it must work beside a capture, without one, and while a capture is
disarmed. The idea: an observer as the capture is one; where a capture has a dump open the lines go there, else a dump
of its own is made, which has findings, steps' totals and no tensors. Whatever fails here switches the ledger off, is
said once, and serving goes on. A capture has a ledger by default, of ids and owners alone (mode ``owners``): it hashes
nothing, writes into the capture's dump or nowhere, and what it cannot do is counted there. Not here: the ledger
(books.py), the layers (layers.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from vllm_accprobe.capture.core.layout import Layouts
from vllm_accprobe.capture.core.recording import Recording, root_of
from vllm_accprobe.capture.core.say import say
from vllm_accprobe.capture.core.sink import Sink
from vllm_accprobe.capture.states.arrivals import Arrivals
from vllm_accprobe.capture.states.books import Books
from vllm_accprobe.capture.states.findings import Findings
from vllm_accprobe.capture.states.layers import CacheLayers
from vllm_accprobe.capture.states.looks import OWNERS, Layer
from vllm_accprobe.capture.states.schedule import Schedule
from vllm_accprobe.capture.vllm.attach import observe
from vllm_accprobe.capture.vllm.capturing import CaptureObserver
from vllm_accprobe.capture.vllm.eager import compiles
from vllm_accprobe.capture.vllm.forwards import Forwards
from vllm_accprobe.capture.vllm.runner import RunnerAdapter
from vllm_accprobe.capture.vllm.step_observer import EngineStep, StepObserver
from vllm_accprobe.capture.vllm.vllm_compat import given_metadata, guesses, run_info
from vllm_accprobe.config import ProbeConfig
from vllm_accprobe.dump.journal.state_lines import (
    CACHED,
    FINDING,
    TOTALS,
    CachedPrefix,
    CachedRows,
    StateFinding,
    StateTotals,
    sentence,
)


def attach(wrapper: Any) -> StatesObserver | None:
    """Called in each worker after init_device, after the capture's own attach. Never raises."""
    failed = "the ledger of states could not attach ({}): it is off on this rank; serving goes on"
    return observe(wrapper, StatesObserver, StatesObserver.without, failed)


class StatesObserver(StepObserver):
    """The ledger of one worker. All requests and steps are in it, whatever a capture beside it selects."""

    without = "no state is looked at on this rank"

    def __init__(self, config: ProbeConfig, adapter: RunnerAdapter):
        self.config = config
        self.mode = config.ledger or OWNERS
        self.books: Books | None = None
        self.layers: CacheLayers | None = None
        self.dead: str | None = None
        self._adapter = adapter
        self._recording: Recording | None = None
        self._findings: Findings | None = None
        self._forwards: Forwards | None = None
        self._loaded = self._closed = self._open = self._drafting = self._found = False
        self._new: tuple[str, ...] = ()

    @property
    def awake(self) -> bool:
        capture = self._capture()
        return self._loaded and self.dead is None and (self.mode != OWNERS or (capture is not None and capture.awake))

    def _capture(self) -> CaptureObserver | None:
        """The capture that has this worker as well, once its dump is open."""
        for other in self._adapter.observers:
            if isinstance(other, CaptureObserver) and other.session is not None:
                return other
        return None

    def loaded(self) -> None:
        self._loaded = True  # the caches come later

    # --- steps -------------------------------------------------------------------------------------------------------

    def begin_step(self, step: EngineStep) -> None:
        if step.number is None and self.books is None:
            return
        if self.books is None:
            self._make()
        if self.books is not None:
            self._open = step.number is not None
            if self._forwards is not None:
                self._forwards.step(self._adapter.runner)
            if step.number is None:
                self.books.ended(step.finished)
            else:
                self._new = tuple(new.name for new in step.new)
                self.books.begin(step)

    def _make(self) -> None:
        """The caches have their memory when the first step comes."""
        runner, model = self._adapter.runner, self._adapter.model()
        parallel = runner.vllm_config.parallel_config
        if any(int(getattr(parallel, f"{name}_context_parallel_size", 1) or 1) > 1 for name in ("decode", "prefill")):
            return self._off("context parallelism deals a request's blocks to several ranks")
        self.layers = CacheLayers(runner, model)
        if not any(self.layers.layers):
            why = ", ".join(f"{n} x {reason}" for reason, n in self.layers.skipped.items()) or "it has no cache"
            return self._off(f"nothing of this engine can be watched ({why})")
        transfers = getattr(runner.vllm_config, "kv_transfer_config", None) is not None
        schedule = Schedule(self.layers.groups, self.layers.blocks, transfers)
        self._findings = Findings(schedule, self._say)
        guessing = guesses(runner.vllm_config) and bool(
            getattr(runner.vllm_config.scheduler_config, "async_scheduling", False)
        )
        slack = int(getattr(runner.vllm_config.speculative_config, "num_speculative_tokens", 0)) if guessing else 0
        inside = not compiles(runner.vllm_config, model)
        arrivals = Arrivals(torch.device(getattr(runner, "device", "cpu")))
        self.books = Books(
            schedule, self.layers.layers, self.mode, self._findings, arrivals, slack=slack, inside=inside
        )
        self.books.bytes.memory = {g: n for g, n in self.layers.memory.items() if not schedule.groups[g].extra}
        if self.mode == OWNERS and not inside:  # nothing is put around a forward that may be traced
            self.layers.skipped["metadata of a compiled engine"] += 1
            return None
        if inside and self.mode != OWNERS:
            self.layers.watch(self._moment("enters"), self._moment("wrote"), self._moment("leaves"))
        self._forwards = Forwards(self._armed, self._begins, lambda named, result: None)
        self._forwards.root(model)
        self._forwards.runner(runner)
        if self.mode == OWNERS:
            return None
        self._sink()
        watched = self.layers.count
        more = "".join(f"; {n} x {reason}: not watched" for reason, n in self.layers.skipped.items())
        how = "" if inside else ", outside of the forward (graphs)"
        say(f"states: {self.mode}, {watched} layers{how}{more}")
        return None

    def _moment(self, name: str) -> Any:
        """A method of the books that a layer may call at any time."""

        def at(layer: Layer, *more: Any) -> None:
            if self.dead is None and self._open and not self._drafting and self.books is not None:
                try:
                    getattr(self.books.bytes, name)(layer, *more)
                except Exception as error:
                    self.failed(f"{layer.path}", error)

        return at

    def _armed(self) -> bool:
        if self.dead is not None or not self._open or self._drafting:
            return False
        capture = self._capture()
        return self.mode != OWNERS or (capture is not None and capture.armed)

    def _begins(self, rows: int, graph: Any) -> None:
        """A forward begins: its attention's metadata is there."""
        try:
            names = [part.internal for part in self._adapter.batch.rows()]
            layers, runner = self.layers, self._adapter.runner
            assert layers is not None
            assert self.books is not None
            ids, _ = self._adapter.batch.buffers(self._adapter.batch.total)
            self.books.forward(names, lambda g: given_metadata(layers.name_in_engine(g, runner)), ids)
        except Exception as error:
            self.failed("what the attention is given", error)

    def computed(self) -> None:
        if self.books is not None and self._open:
            self._name_requests(self.books)
            self.books.computed()

    def _name_requests(self, books: Books) -> None:
        """What the capture calls the requests of this step that are new, and whose prefix it must know."""
        capture = self._capture()
        if capture is None:
            books.prefixes.clear()
            return
        schedule = books.schedule
        for name in self._new:
            request, one = capture.requests.get(name), schedule.held.get(name)
            if request is not None and one is not None:
                schedule.req[one.number] = request.req
        for one, found, why in books.prefixes:
            if capture.requests.wanted(one.name) and schedule.req[one.number] >= 0 and capture.session is not None:
                runs = tuple(CachedRows(low, n, schedule.req[o] if o >= 0 else -1) for low, n, o in found)
                prefix = CachedPrefix(books.bytes.step, schedule.req[one.number], runs, why)
                capture.session.sink.line(CACHED.to_line(prefix))
        books.prefixes.clear()
        self._new = ()

    @contextlib.contextmanager
    def drafting(self) -> Iterator[None]:
        self._drafting = True
        try:
            yield
        finally:
            self._drafting = False

    def end_step(self) -> None:
        if self.books is not None and self._open and self.dead is None:
            self._open = False
            self.books.end_step()

    # --- the journal -------------------------------------------------------------------------------------------------

    def _sink(self) -> Sink:
        """The capture's, or that of a dump of its own."""
        capture = self._capture()
        if capture is not None and capture.session is not None:
            return capture.session.sink
        assert self.mode != OWNERS
        if self._recording is None:
            runner, parallel = self._adapter.runner, self._adapter.parallel
            model = self._adapter.model()
            device = torch.device(getattr(runner, "device", "cpu"))
            run = run_info(runner, model, device, parallel, self.config.to_json())
            others = {k: v for k, v in parallel.items() if k != "rank"}
            self._recording = Recording(
                self.config, root_of(self.config), run, Layouts({}, 0, 1), lambda part, rows: None,
                rank=parallel["rank"],
                device=device, parallel=others, beside="this engine's ledger of states goes", announced=True,
            )  # fmt: skip
        return self._recording.session.sink

    def _say(self, found: StateFinding) -> None:
        self._sink().line(FINDING.to_line(found))
        if not self._found:
            self._found = True
            say(f"the cache, not the kernel: {sentence(found)}, rank {self._adapter.parallel['rank']} (said once)")

    # --- the end -----------------------------------------------------------------------------------------------------

    def _off(self, why: str) -> None:
        self.dead = why
        if self.mode != OWNERS:
            say(f"the ledger of states is off: {why}; serving goes on")
        with contextlib.suppress(Exception):
            self._sink().skip("", f"the ledger of states is off: {why}")

    def failed(self, where: str, error: BaseException) -> None:
        if self.dead is None:
            self._off(f"{where} failed ({type(error).__name__}: {error})")
            if self.layers is not None:
                self.layers.close()

    def close(self, reason: str) -> None:
        """Writes what was looked at, once, before the capture closes its dump. Never raises."""
        if self._closed:
            return
        self._closed = True
        try:
            self._finish()
        except Exception as error:
            say(f"states: closing failed: {type(error).__name__}: {error}")
        if self._recording is not None:
            self._recording.close(reason)

    def _finish(self) -> None:
        books, layers, findings = self.books, self.layers, self._findings
        for undo in (layers, self._forwards):
            if undo is not None:
                undo.close()
        if books is None or layers is None or findings is None:
            return
        if self.dead is None:
            books.ended(tuple(books.schedule.held))
            books.arrivals.close()
            findings.flush()
        skipped = layers.skipped + books.bytes.unseen
        if books.arrivals.lost:
            skipped["hashes beyond what one step may have on its way"] = books.arrivals.lost
        if self.dead is not None:
            skipped[self.dead] += 1
        for _, what in books.strange_metadata:
            skipped[f"metadata that were never right, and mean something else here ({what.strip('_').lower()})"] += 1
        if self.mode == OWNERS and self._capture() is None:
            return
        totals = StateTotals(
            self.mode, layers.count, books.steps, books.bytes.hashed,
            books.bytes.checked, books.held,
            findings.count, dict(books.events), dict(skipped),
        )  # fmt: skip
        self._sink().line(TOTALS.to_line(totals))
        if not books.steps or self.mode == OWNERS:
            return
        what = f"{findings.count} findings" if findings.count else "nothing wrong"
        say(f"states: {what} in {books.steps} steps: {books.bytes.checked:,} blocks of layers looked at, "
            f"{books.bytes.hashed:,} hashed after a write, {books.held:,} numbers of metadata held against "
            "the schedule")  # fmt: skip
