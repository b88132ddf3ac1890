"""Attach to vLLM's model runner: which execute_model is a step, and which steps are armed.

The problem: V1 and V2 runners, vendors' copies of them and ten releases differ in everything but a few names, and
engines run dummy, profile and warm-up batches through the same code. The idea: wrap the runner INSTANCE after the
worker has made it, so that the class does not matter; read the scheduler's output, which all share, to decide if a
step is wanted. Whatever is missing is said, not guessed. Only this module, batch.py and vllm_compat.py know vLLM's
runner. Not here: taps (hooks.py), the order of the rows (batch.py), row arithmetic (rows.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from vllm_accprobe.capture.core.attachments import Beside, put_on
from vllm_accprobe.capture.core.layout import Layouts
from vllm_accprobe.capture.core.recording import Recording, at_exit, root_of
from vllm_accprobe.capture.core.rows import Requests, wanted_at_all
from vllm_accprobe.capture.core.say import say
from vllm_accprobe.capture.core.session import LANGUAGE, Session, StepState
from vllm_accprobe.capture.taps.hooks import Taps
from vllm_accprobe.capture.taps.params import Parameters
from vllm_accprobe.capture.vllm.attach import on_worker
from vllm_accprobe.capture.vllm.batch import Batch
from vllm_accprobe.capture.vllm.dealing import Dealing, watch_dealing
from vllm_accprobe.capture.vllm.eager import compiled_modules, compiles
from vllm_accprobe.capture.vllm.loading import before_packing
from vllm_accprobe.capture.vllm.sampling import Sampling
from vllm_accprobe.capture.vllm.vllm_compat import hidden_size, images_of, language_prefix, refusal, run_info, starts
from vllm_accprobe.config import ConfigError, ProbeConfig, in_ranges
from vllm_accprobe.dump.schema import ROOT_TAP, Step

_QUIET = ("compile_or_warm_up_model", "determine_available_memory", "initialize_from_config", "execute_dummy_batch")
"""Worker methods under which nothing is a step: they run invented batches."""
_WARMUP_IDS = ("_warmup_", "_v2_mixed_warmup")


def attach(wrapper: Any) -> RunnerProbe | None:
    """Called in each worker after init_device. Returns the probe, or None if this rank is not captured. Never raises:
    where something is wrong the server starts without the probe, and says so."""
    try:
        return on_worker(wrapper, RunnerProbe, "_accprobe", "NOTHING will be captured on this rank")
    except ConfigError as error:
        say(str(error))
        return None
    except Exception as error:
        say(
            f"could not attach ({type(error).__name__}: {error}): NOTHING will be captured on this rank; "
            "run `accprobe doctor`"
        )
        return None


class RunnerProbe:
    """The probe of one worker: owns the Session, wraps the runner, turns batches into steps."""

    def __init__(self, config: ProbeConfig, worker: Any, runner: Any, parallel: dict[str, Any]):
        self.config = config
        self.runner = runner
        self.worker = worker
        self.parallel = parallel
        self.requests = Requests(config)
        self.batch = Batch(config, self.requests, runner)
        self.recording: Recording | None = None
        self.session: Session | None = None
        self.taps: Taps | None = None
        self.parameters: Parameters | None = None
        self._paths: dict[int, str] = {}
        self.root = root_of(config)
        self._quiet = 0
        self._step = -1
        self._seen_steps = 0
        self._armed_steps = 0
        self.beside: Beside | None = None
        self.dealing: Dealing | None = None
        self._closed = self._refused = False
        for name in _QUIET:
            self._wrap(worker, name, self._quietly)
        self._wrap(runner, "execute_model", self._execute_model)
        self._wrap(runner, "sample_tokens", self._sample_tokens)
        self._wrap(runner, "pool", self._sample_tokens)
        self._wrap(runner, "prepare_inputs", self._prepare_inputs)
        self._wrap(runner, "propose_draft_token_ids", self._draft)
        self._wrap(runner, "_update_states", self._update_states)
        self._wrap(runner, "load_model", self._load_model)
        # vLLM ends processes in several ways: its own shutdown (plugin.py), the interpreter's, and multiprocessing's.
        at_exit(self.close, "process exit")

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name, None)
        if not callable(original):
            return

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        wrapped.__name__ = name
        wrapped.__accprobe__ = original  # type: ignore[attr-defined]
        setattr(owner, name, wrapped)

    def _quietly(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._end_step()
        self._quiet += 1
        try:
            return original(*args, **kwargs)
        finally:
            self._quiet -= 1

    # --- the model ---------------------------------------------------------------------------------------------

    def _load_model(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._refuses("NOTHING will be captured on this rank"):
            return original(*args, **kwargs)
        with before_packing(self._look_at_layer):
            result = original(*args, **kwargs)
        try:
            self._attach_model()
        except Exception as error:
            self._give_up("attaching to the model", error)
        return result

    def _refuses(self, without: str) -> bool:
        """Whether this runner's rows cannot be told apart, which is known before its model is loaded; said once."""
        try:
            why = refusal(self.runner)
        except Exception as error:
            why = f"this runner cannot be looked at ({type(error).__name__}: {error})"
        if why and not self._refused:
            say(f"{why}: {without}; serving goes on")
        self._refused = bool(why)
        return self._refused

    def _look_at_layer(self, model: torch.nn.Module, layer: torch.nn.Module) -> None:
        """A layer whose weights are loaded and not yet packed."""
        try:
            if self.taps is not None or (self.session is not None and self.session.dead is not None):
                return
            if self.parameters is None:
                self._open_session(model)
                self._paths = {id(module): path for path, module in reversed(list(model.named_modules()))}
            if self.parameters is not None and id(layer) in self._paths:
                self.parameters.layer(self._paths[id(layer)], layer)
        except Exception as error:
            self._give_up("the loaded weights", error)

    def _open_session(self, model: torch.nn.Module) -> None:
        """Opens this rank's place in the dump, beside that of an earlier engine of the same process. Taps come later,
        when the model is complete."""
        runner = self.runner
        device = torch.device(getattr(runner, "device", "cpu"))
        vllm_config = runner.vllm_config
        modules = dict(model.named_modules(remove_duplicate=False))
        layouts = Layouts(modules, self.parallel["tp"][0], self.parallel["tp"][1], hidden_size(vllm_config))
        self.recording = Recording(
            self.config, self.root, run_info(runner, model, device, self.parallel, self.config.to_json()), layouts,
            self.batch.space, rank=self.parallel["rank"], device=device, beside="this engine's dump goes",
            parallel={k: v for k, v in self.parallel.items() if k != "rank"},
        )  # fmt: skip
        self.root, self.session = self.recording.root, self.recording.session
        self.session.deal = lambda: self.batch.deal
        self.parameters = Parameters(self.session, model, say)

    def _attach_model(self) -> None:
        runner = self.runner
        model = runner.get_model() if hasattr(runner, "get_model") else runner.model
        if self.taps is not None:  # weights were loaded anew: the modules are the same
            if self.session is not None and self.session.ops is not None:
                self.session.ops.forget_weights()
            return
        if self.session is None:
            self._open_session(model)
        session, vllm_config = self.session, runner.vllm_config
        assert session is not None
        assert self.parameters is not None
        self.taps = Taps(session)
        self.taps.attach(model, language_prefix(model))
        Sampling(session, runner, model, self.batch)
        self._wrap(getattr(runner, "speculator", None), "propose", self._draft)  # V2
        self.parameters.rest()
        self.dealing = watch_dealing(self.batch, vllm_config)
        compiled = compiles(vllm_config, model)
        self.beside = put_on(
            session, self.taps, model, language_prefix(model), self.root, self.parallel["rank"],
            stored=self.parameters.stored, runner=runner, compiled=compiled,
        )  # fmt: skip
        if compiled and self.config.graphs:
            say(
                "the engine compiles or captures graphs (left as configured by VLLM_ACCPROBE_GRAPHS=1): "
                "modules inside them are not seen, and are counted as skipped"
            )
        elif compiled:
            inside = compiled_modules(model)
            session.sink.skip(ROOT_TAP, "the engine is compiled although eager was asked for", count=len(inside) or 1)
            say(
                f"THE ENGINE IS COMPILED although eager was asked for ({', '.join(inside[:3]) or 'as a whole'}): MOST "
                "MODULES WILL NOT BE SEEN; start vLLM with --enforce-eager and no compilation config"
            )

    # --- steps -------------------------------------------------------------------------------------------------

    def _execute_model(self, original: Callable[..., Any], scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        session = self.session
        self._end_step()
        if session is None or session.dead is not None or self._quiet or kwargs.get("dummy_run"):
            return original(scheduler_output, *args, **kwargs)
        try:
            self._begin(session, scheduler_output)
        except Exception as error:
            self._give_up("reading the scheduler's output", error)
        with session.operators():
            result = original(scheduler_output, *args, **kwargs)
        try:
            state = session.state
            if state is not None and not state.spaces:
                self._announce_rows(session, state)
            if result is not None or getattr(self.runner, "sample_tokens", None) is None:
                session.end()  # an answer (pooling, a pipeline's first ranks): nobody will ask for tokens
        except Exception as error:
            self._give_up("ending a step", error)
        return result

    def _end_step(self) -> None:
        """Whatever runs next, it is not of the step that may still be open."""
        if self.session is not None:
            self.session.end()

    def _sample_tokens(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        session = self.session
        if session is None:
            return original(*args, **kwargs)
        try:
            with session.operators():
                return original(*args, **kwargs)
        finally:
            session.end()

    def _draft(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A draft model shares instances with the model (rotary embedding, embedding, head, activations): what it calls
        is none of the model's."""
        session = self.session
        if session is None or session.state is None:
            return original(*args, **kwargs)
        state, session.state = session.state, None
        try:
            return original(*args, **kwargs)
        finally:
            session.state = state if session.dead is None else None

    def _prepare_inputs(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """V2: the batch, which is otherwise a local of execute_model. (V1's method of this name is private.)"""
        batch = original(*args, **kwargs)
        self.batch.prepared(batch)
        return batch

    def _update_states(self, original: Callable[..., Any], out: Any, *args: Any, **kwargs: Any) -> Any:
        """V1: with drafts that only the device knows, the runner works with a copy of ``out``, and makes it smaller."""
        result = original(out, *args, **kwargs)
        self.batch.revised(out)
        return result

    def _begin(self, session: Session, out: Any) -> None:
        counts: dict[str, int] = out.num_scheduled_tokens
        total = int(out.total_num_scheduled_tokens)
        self.batch.begin(out)
        for new in out.scheduled_new_reqs:
            self._register(new)
        if total and not any(name.startswith(_WARMUP_IDS) for name in counts):
            self._step += 1
            self._seen_steps += 1
            begins = starts(out)
            triples = [(name, begins.get(name, 0), n) for name, n in counts.items()]
            wanted = in_ranges(self.config.steps, self._step) and wanted_at_all(self.config, self.requests, triples)
            if wanted:
                self._armed_steps += 1
                prefill = any(
                    start < request.prompt_len
                    for name, start, _ in triples
                    if (request := self.requests.get(name)) is not None
                )
                batch = {"requests": len(counts), "tokens": total}
                session.begin(Step(self._step, batch, time.time()), self.requests.unsent, prefill)
        # Only now: a request that finished in the last step may not be needed any more, but its number stays used.
        for name in out.finished_req_ids:
            if name not in counts:
                self.requests.forget(name)

    def _register(self, new: Any) -> None:
        ids = new.prompt_token_ids
        length = len(ids) if ids is not None else int(getattr(getattr(new, "prompt_embeds", None), "shape", (0,))[0])
        self.requests.add(new.req_id, ids, length, images_of(new))

    def _announce_rows(self, session: Session, state: StepState) -> None:
        """No tap fired (a captured graph, or a filter): the step's rows are written all the same."""
        space = self.batch.space(LANGUAGE, 0)
        if space is not None and space.n:
            session.sink.rows(state.number, space)

    # --- the end -----------------------------------------------------------------------------------------------

    def _give_up(self, where: str, error: BaseException) -> None:
        if self.session is not None:
            self.session.fail(where, error)
        else:
            say(
                f"{where} failed ({type(error).__name__}: {error}): NOTHING will be captured on this rank; "
                "serving goes on"
            )

    def close(self, reason: str) -> None:
        """Closes the rank's dump once; later calls do nothing. Never raises."""
        if self._closed:
            return
        self._closed = True
        recording = self.recording
        if recording is None:
            return
        try:
            recording.end(reason)
            session, sink = recording.session, recording.session.sink
            if self.taps is not None:
                if self._armed_steps:
                    for tap, why in self.taps.never_fired():
                        sink.skip(tap, why)
                self.taps.remove()
            if self.beside is not None:
                self.beside.close()
            if self.dealing is not None:
                self.dealing.close()
            steps, tensors = sink.steps, sink.tensors
            recording.close(reason)
            done = sink.stopped or "closed"
            gigabytes = sink.writer.bytes_written / 1e9
            say(
                f"rank {self.parallel['rank']}: {steps} steps, {tensors} tensors, {gigabytes:.3f} GB "
                f"in {self.root} ({done})"
            )
            if self._seen_steps and not session.fired:
                say(
                    f"NOTHING was captured in {self._seen_steps} steps ({self._armed_steps} selected): "
                    "check the VLLM_ACCPROBE_* filters, or run `accprobe doctor`"
                )
        except Exception as error:
            say(f"closing the dump failed: {type(error).__name__}: {error}")
