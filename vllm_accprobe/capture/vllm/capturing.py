"""The capture of one worker: the observer that owns a Recording, and the history of its weights.

The problem: a dump of a served model has the weights as they were loaded, the chosen steps of the chosen requests, what
was sampled, operators, labels and patches, all in their order, and whatever of it fails must end the capture and not
the serving. The idea: one observer of the runner that puts the parts on when they can be put on, opens the session's
steps, and takes everything off again.

Not here: events of weights (weights.py), taps (taps/hooks.py), what a runner is (runner.py), the dump
(core/recording.py).
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from vllm_accprobe.capture.arming import Windows
from vllm_accprobe.capture.core import say
from vllm_accprobe.capture.core.layout import Layouts
from vllm_accprobe.capture.core.recording import Recording, root_of
from vllm_accprobe.capture.core.rows import Requests, wanted_at_all
from vllm_accprobe.capture.core.session import LANGUAGE, NOTHING, Session
from vllm_accprobe.capture.taps.hooks import Taps, chooses, tapped
from vllm_accprobe.capture.taps.params import ParameterLines
from vllm_accprobe.capture.taps.patches import put_on
from vllm_accprobe.capture.vllm.batch import ChosenRows, EncoderDistribution, distributes_encoder
from vllm_accprobe.capture.vllm.compiled import DummyRunOnly, InGraphs
from vllm_accprobe.capture.vllm.modes import attach_modes, record_draft_layer
from vllm_accprobe.capture.vllm.runner import RunnerAdapter
from vllm_accprobe.capture.vllm.sampling import Sampling
from vllm_accprobe.capture.vllm.step_observer import EngineStep, StepObserver
from vllm_accprobe.capture.vllm.vllm_compat import compiled_modules, compiles, hidden_size, language_prefix, run_info
from vllm_accprobe.capture.vllm.weights import MOST, AdapterSlots, WeightCalls
from vllm_accprobe.capture.weights.history import WeightLife
from vllm_accprobe.config import ProbeConfig, Ranges
from vllm_accprobe.dump.journal import ARMED
from vllm_accprobe.dump.schema import ROOT_TAP, Armed, Step

_WHERE = "looking at the weights"
MANY_ADAPTERS = f"an adapter in a slot, after the first {MOST}"


class Weights:
    """Never raises. session: gives it when there is something to write."""

    def __init__(self, config: ProbeConfig, adapter: RunnerAdapter, session: Callable[[], Session | None]):
        self._adapter, self._session = adapter, session
        self.life = WeightLife(
            self._line,
            lambda path, cls: chooses(config, path, cls),
            lambda: adapter.next_step,
            self._failed,
            adapter.parallel["rank"],
            config.weights,
        )
        self._calls = WeightCalls(self.life, adapter.worker, adapter.runner)
        self.examine, self.loading, self.settle = self.life.examine, self._calls.loading, self._calls.settle
        self._slots: AdapterSlots | None = None

    def loaded(self, model: torch.nn.Module) -> None:
        """The model is loaded, packed, and has its adapters' layers."""
        if self.life.off:
            return
        with self.life.safely():
            self._calls.watch(model)
            if self._slots is None:
                self._slots = AdapterSlots(
                    self.life, self._adapter.runner, lambda: self._adapter.quiet,
                    lambda: self._skip(ROOT_TAP, MANY_ADAPTERS),
                )  # fmt: skip

    def close(self) -> None:
        with self.life.safely():
            self._calls.settle()
            self._calls.close()

    def _line(self, line: dict[str, Any]) -> None:
        session = self._session()
        if session is not None and session.dead is None:
            session.sink.line(line)

    def _skip(self, path: str, reason: str) -> None:
        session = self._session()
        if session is not None:
            session.sink.skip(path, reason)

    def _failed(self, error: BaseException) -> None:
        text = f"{type(error).__name__}: {error}"
        say(f"{_WHERE} failed ({text}): their further changes are not recorded; capture goes on")
        session = self._session()
        if session is not None:
            session.sink.error(_WHERE, text, None)


class CaptureObserver(StepObserver):
    """What captures one worker. ``session`` and ``taps`` are None until the model is loaded."""

    without = "NOTHING will be captured on this rank"
    unattached = "could not attach ({}): NOTHING will be captured on this rank; run `accprobe doctor`"

    @classmethod
    def left_out(cls, config: ProbeConfig, adapter: RunnerAdapter) -> StepObserver | None:
        return DummyRunOnly(config, adapter) if config.graphs else None

    def __init__(self, config: ProbeConfig, adapter: RunnerAdapter):
        self.config = self._selected = config
        self.root = root_of(config)
        self.requests = Requests(config)
        self.session: Session | None = None
        self.taps: Taps | None = None
        self._adapter = adapter
        self._rows = ChosenRows(adapter.batch, config, self.requests)
        self._recording: Recording | None = None
        self._parameters: ParameterLines | None = None
        self._attached = contextlib.ExitStack()
        self._graphs: InGraphs | None = None
        self._weights = Weights(config, adapter, lambda: self.session)
        self.windows = Windows(config, self._aim, self._note, self._refuse, say)
        self._seen_steps = self._armed_steps = 0
        self._closed = self._reported_unplaced = False

    @property
    def awake(self) -> bool:
        return self.session is not None and self.session.dead is None

    @property
    def armed(self) -> bool:
        """Whether tensors of the step that runs are taken."""
        return self.session is not None and self.session.state is not None

    def layer(self, model: torch.nn.Module, path: str, layer: torch.nn.Module) -> None:
        if self.taps is None and (self.session is None or self.session.dead is None):
            _, parameters = self._open(model)
            parameters.layer(path, layer)
            self._weights.examine(path, layer)

    def draft_layer(self, path: str, layer: torch.nn.Module) -> None:
        if self.taps is None and (self.session is None or self.session.dead is None):
            record_draft_layer(self._open(self._adapter.model())[1], path, layer)

    def loading(self) -> contextlib.AbstractContextManager[Any]:
        return self._weights.loading()

    def _open(self, model: torch.nn.Module) -> tuple[Session, ParameterLines]:
        """This rank's place in the dump, next to that of an earlier engine of the same process. Taps come later, when
        the model is complete."""
        if self.session is None:
            runner, parallel = self._adapter.runner, self._adapter.parallel
            device = torch.device(getattr(runner, "device", "cpu"))
            run = run_info(runner, model, device, parallel, self.config.to_json())
            modules = dict(model.named_modules(remove_duplicate=False))
            tp_rank, tp_size = parallel["tp"]
            layouts = Layouts(modules, tp_rank, tp_size, hidden_size(runner.vllm_config))
            self._recording = Recording(
                self.config, self.root, run, layouts, self._rows.space, rank=parallel["rank"], device=device,
                parallel=parallel, contents="this engine's dump goes", announced=True,
            )  # fmt: skip
            self.root, self.session = self._recording.root, self._recording.session
            self.session.encoder_share = lambda: self._adapter.batch.share
        if self._parameters is None:
            self._parameters = ParameterLines(self.session, model, say)
        return self.session, self._parameters

    def loaded(self) -> None:
        runner, batch = self._adapter.runner, self._adapter.batch
        model = self._adapter.model()
        if self.taps is not None:  # weights were loaded anew: the modules are the same
            if self.session is not None and self.session.ops is not None:
                self.session.ops.forget_weights()
            return
        session, parameters = self._open(model)
        compiled = compiles(runner.vllm_config, model)
        if compiled and self.config.graphs:
            self._graphs = InGraphs(session, runner, model)
            self._graphs.wrap()
        self.taps = Taps(session, functools.partial(tapped, session))
        self.taps.attach(model, language_prefix(model))
        Sampling(session, runner, model, self._rows)
        parameters.rest()
        self._weights.loaded(model)
        attach_modes(self._attached, session, parameters, runner, model, batch)
        if self._graphs is not None:
            self._graphs.place(self.root)
        if distributes_encoder(runner.vllm_config):
            distribution = EncoderDistribution(batch)
            self._attached.callback(distribution.close)
            if not distribution.seen:
                batch.no_known_shares()
        self._attached.push(put_on(
            session, self.taps, model, language_prefix(model), self.root, self._adapter.parallel["rank"],
            stored=parameters.stored, runner=runner, compiled=compiled,
        ))  # fmt: skip
        if self._graphs is not None and self._graphs.placed:
            pass  # its line says how much is seen
        elif compiled and self.config.graphs:
            say(
                "the engine compiles or captures graphs (left as configured by VLLM_ACCPROBE_GRAPHS=1): "
                "modules inside them are not seen, and are counted as skipped"
            )
        elif compiled:
            inside = compiled_modules(model)
            session.sink.skip(ROOT_TAP, "the engine is compiled although eager was requested", count=len(inside) or 1)
            say(
                f"THE ENGINE IS COMPILED although eager was requested ({', '.join(inside[:3]) or 'as a whole'}): MOST "
                "MODULES WILL NOT BE SEEN; start vLLM with --enforce-eager and no compilation config"
            )

    def begin_step(self, step: EngineStep) -> None:
        session = self.session
        assert session is not None
        self._weights.settle()
        self.windows.update(step.arming, step.number)
        for new in step.new:
            self.requests.add(
                new.name, new.prompt, new.length, new.images, new.adapter, new.embedded, new.salt, new.sampling
            )
        if step.number is not None:
            self._seen_steps += 1
        if step.number is not None and self.windows.wants(step.number) and self._placed(step):
            begins = step.starts()
            triples = [(name, begins.get(name, 0), n) for name, n in step.counts.items()]
            if wanted_at_all(self._selected, self.requests, triples):
                self._armed_steps += 1
                self.windows.took()
                prefill = any(
                    start < request.prompt_len
                    for name, start, _ in triples
                    if (request := self.requests.get(name)) is not None
                )
                batch = {"requests": len(step.counts), "tokens": step.tokens}
                session.begin(Step(step.number, batch, time.time()), self.requests.unsent, prefill)
                if self._graphs is not None:
                    self._graphs.begin_step()
        # Only now: a request that finished in the last step may not be needed any more, but its number stays used.
        for name in step.finished:
            self.requests.forget(name)

    def _placed(self, step: EngineStep) -> bool:
        """Whether the rows of ``step`` are known; a step of which they are not is counted as skipped."""
        if not step.unplaced:
            return True
        assert self.session is not None
        self.session.sink.skip(ROOT_TAP, step.unplaced)
        if not self._reported_unplaced:
            self._reported_unplaced = True
            say(f"{step.unplaced}: such steps are skipped (reported once)")
        return False

    def _aim(
        self, config: ProbeConfig | None, modules: tuple[str, ...] | None, rows: Mapping[str, Ranges]
    ) -> None:
        """Other rows are taken from now on; config: None for none at all. modules: see Taps.narrow; rows: see
        ArmSelection."""
        self.requests.aim(config, rows)
        session = self.session
        if config is None or session is None:
            return
        self._selected = config
        self._rows.aim(config)
        session.everybodys = not config.requests and not config.tokens and not rows
        chosen = self.taps.narrow(modules) if self.taps is not None else None
        if session.ops is not None:
            session.ops.narrow(chosen)

    def _note(self, armed: Armed) -> None:
        if self.session is not None:
            self.session.sink.line(ARMED.to_line(armed))

    def _refuse(self, why: str) -> None:
        if self.session is not None:
            self.session.sink.error("arming", why, None)

    def running(self) -> contextlib.AbstractContextManager[Any]:
        return NOTHING if self.session is None else self.session.operators()

    @contextlib.contextmanager
    def drafting(self) -> Iterator[None]:
        """A draft model shares instances with the model (rotary embedding, embedding, head, activations): what it calls
        is none of the model's."""
        session = self.session
        if session is None or session.state is None:
            yield
            return
        state, session.state = session.state, None
        try:
            yield
        finally:
            session.state = state if session.dead is None else None

    def computed(self) -> None:
        if self._graphs is not None:
            self._graphs.computed()
        state = self.session.state if self.session is not None else None
        if self.session is not None and state is not None and not state.spaces:
            # No tap fired (a captured graph, or a filter): the step's rows are written all the same.
            space = self._rows.space(LANGUAGE, 0)
            if space is not None and space.n:
                self.session.announce(state, space)

    def end_step(self) -> None:
        if self.session is not None:
            self.session.end()
        if self._graphs is not None:
            self._graphs.end_step()

    def failed(self, where: str, error: BaseException) -> None:
        if self.session is not None:
            self.session.fail(where, error)
        else:
            say(f"{where} failed ({type(error).__name__}: {error}): {self.without}; serving goes on")

    def close(self, reason: str) -> None:
        """Closes the rank's dump once; later calls do nothing."""
        recording = self._recording
        if self._closed or recording is None:
            self._closed = True
            return
        self._closed = True
        self._weights.close()
        try:
            recording.end(reason)
            session, sink = recording.session, recording.session.sink
            if self._graphs is not None:
                self._graphs.end()  # some of its taps wrap others of ours
            if self.taps is not None:
                if self._armed_steps:
                    for tap, why in self.taps.never_fired():
                        sink.skip(tap, why if self._graphs is None else self._graphs.why(tap, why))
                self.taps.remove()
            if self._graphs is not None:
                self._graphs.close()
            self._attached.close()
            self.windows.close()
            steps, tensors = sink.steps, sink.tensors
            recording.close(reason)
            done = sink.stopped or "closed"
            gigabytes = sink.writer.bytes_written / 1e9
            say(
                f"rank {self._adapter.parallel['rank']}: {steps} steps, {tensors} tensors, {gigabytes:.3f} GB "
                f"in {self.root} ({done})"
            )
            if self._seen_steps and not session.fired:
                why = "check the VLLM_ACCPROBE_* filters, or run `accprobe doctor`"
                if not self.config.armed and not self.windows.count:
                    why = f"it began disarmed (VLLM_ACCPROBE_ARMED=0), and was never armed: `accprobe arm {self.root}`"
                say(f"NOTHING was captured in {self._seen_steps} steps ({self._armed_steps} selected): {why}")
        except Exception as error:
            say(f"closing the dump failed: {type(error).__name__}: {error}")
