"""vLLM's model runner: which worker is observed, which execute_model is a step, and what it computes.

The problem: V1 and V2 runners, vendors' copies of them and ten releases differ in everything but a few names; engines
run dummy, profile and warm-up batches through the same code; in a compiled engine the root's Python may not run at all.
The idea: wrap the runner INSTANCE once, whatever its class, read the scheduler's output, which all share, and notify
the observers (capture, errcheck, ledger, forcing), which live as long as vLLM's worker wrapper. For taps in graphs
every method is wrapped that may run a forward: the root's own, V1's ``_model_forward``, V2's replays. What is missing
is reported, not guessed. What this room reads of a runner is declared in names_by_release.py.

Not here: what an observer does (step_observer.StepObserver), the order of the rows (batch.py), which observer is
used (plugin.py).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch

from vllm_accprobe.capture.arming import SALTS, WORDS
from vllm_accprobe.capture.core import say
from vllm_accprobe.capture.core.attribute_override import override, wrap_method
from vllm_accprobe.capture.core.recording import at_exit
from vllm_accprobe.capture.vllm.batch import EngineBatch
from vllm_accprobe.capture.vllm.modes import adapter_name, embeddings_of, hash_embeddings
from vllm_accprobe.capture.vllm.names_by_release import unplaced
from vllm_accprobe.capture.vllm.sampling import sampling_of
from vllm_accprobe.capture.vllm.step_observer import EngineStep, NewRequest, StepObserver
from vllm_accprobe.capture.vllm.vllm_compat import images_of, moves_of, parallel_of, refusal, starts, step_graph
from vllm_accprobe.capture.vllm.weights import before_packing
from vllm_accprobe.config import ConfigError, ProbeConfig, in_ranges
from vllm_accprobe.dump.schema import StepGraph

_QUIET = ("compile_or_warm_up_model", "determine_available_memory", "initialize_from_config", "execute_dummy_batch")
"""Worker methods under which nothing is a step: they run invented batches."""
_WARMUP_IDS = ("_warmup_", "_v2_mixed_warmup")


class RunnerAdapter:
    """One worker's runner, wrapped when the first observer is added.

    The observer that was added last stands outermost: it hears first of what begins and last of what ends.

    parallel: this rank's place, see vllm_compat.parallel_of. batch: the step that runs, of all observers.
    """

    def __init__(self, worker: Any, runner: Any, parallel: dict[str, Any]):
        self.runner = runner
        self.parallel = parallel
        self.batch = EngineBatch(runner)
        self.observers: list[StepObserver] = []
        self._worker = worker
        self._paths: dict[int, str] = {}
        self._quiet = 0
        self._step = -1
        self._wrapped = self._speculates = self._refused = False

    def add(self, observer: StepObserver) -> None:
        """Tells ``observer`` of everything from now on."""
        if not self._wrapped:
            self._wrapped = True
            self._wrap_all()
        self.observers.append(observer)

    @property
    def worker(self) -> Any:
        """The worker that has the runner."""
        return self._worker

    @property
    def quiet(self) -> bool:
        """Whether the engine runs invented batches of its own."""
        return self._quiet > 0

    @property
    def next_step(self) -> int:
        """The number of the step that comes next."""
        return self._step + 1

    def model(self) -> torch.nn.Module:
        """The runner's model, once it is loaded."""
        runner = self.runner
        model: torch.nn.Module = runner.get_model() if hasattr(runner, "get_model") else runner.model
        return model

    def close(self, reason: str) -> None:
        """Closes the observers. Safe to call twice; never raises."""
        for observer in reversed(self.observers):
            observer.close(reason)

    def _wrap_all(self) -> None:
        for name in _QUIET:
            wrap_method(self._worker, name, self._quietly)
        for name, replacement in (
            ("execute_model", self._execute_model),
            ("sample_tokens", self._sample_tokens),
            ("pool", self._sample_tokens),
            ("prepare_inputs", self._prepare_inputs),
            ("propose_draft_token_ids", self._draft),
            ("_update_states", self._update_states),
            ("load_model", self._load_model),
        ):
            wrap_method(self.runner, name, replacement)
        # vLLM ends processes in several ways: its own shutdown (plugin.py), and those of at_exit.
        at_exit(self.close, "process exit")

    def _load_model(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._refuses():
            return original(*args, **kwargs)
        with before_packing(self._layer_loaded, self._draft_layer_loaded), contextlib.ExitStack() as stack:
            for observer in reversed(self.observers):
                stack.enter_context(observer.loading())
            result = original(*args, **kwargs)
        self._notify(self.observers, "attaching to the model", lambda observer: observer.loaded())
        if not self._speculates:
            self._speculates = True
            wrap_method(getattr(self.runner, "speculator", None), "propose", self._draft)  # V2
        return result

    def _refuses(self) -> bool:
        """Whether this runner's rows cannot be distinguished: known before its model is loaded, and reported once."""
        try:
            why = refusal(self.runner)
        except Exception as error:
            why = f"this runner cannot be examined ({type(error).__name__}: {error})"
        if why and not self._refused:
            for observer in reversed(self.observers):
                say(f"{why}: {observer.without}; serving goes on")
        self._refused = bool(why)
        return self._refused

    def _layer_loaded(self, model: torch.nn.Module, layer: torch.nn.Module) -> None:
        """A layer whose weights are loaded and not yet packed."""

        def notify(observer: StepObserver) -> None:
            if not self._paths:
                self._paths = {id(module): path for path, module in reversed(list(model.named_modules()))}
            path = self._paths.get(id(layer))
            if path is not None:
                observer.layer(model, path, layer)

        self._notify(reversed(self.observers), "the loaded weights", notify)

    def _draft_layer_loaded(self, draft: torch.nn.Module, layer: torch.nn.Module) -> None:
        """The same of a draft model's layer."""
        path = next((path for path, module in draft.named_modules() if module is layer), None)
        if path is not None:
            self._notify(reversed(self.observers), "a draft's loaded weights", lambda one: one.draft_layer(path, layer))

    def _execute_model(self, original: Callable[..., Any], out: Any, *args: Any, **kwargs: Any) -> Any:
        self._end_step()
        awake = [one for one in self.observers if one.awake]
        if not awake or self._quiet or kwargs.get("dummy_run"):
            return original(out, *args, **kwargs)
        try:
            self.batch.begin(out)
            step = self._read(out)
        except Exception as error:
            for observer in awake:
                observer.failed("reading the scheduler's output", error)
        else:
            self._notify(reversed(awake), "reading the scheduler's output", lambda one: one.begin_step(step))
        with contextlib.ExitStack() as stack:
            for observer in reversed(awake):
                stack.enter_context(observer.running())
            result = original(out, *args, **kwargs)
        self._notify(awake, "ending a step", lambda one: one.computed())
        if result is not None or getattr(self.runner, "sample_tokens", None) is None:
            self._end_step()  # an answer (pooling, a pipeline's first ranks): nobody will ask for tokens
        self._raise_if_stopping()
        return result

    def _read(self, out: Any) -> EngineStep:
        """The scheduler's output in our words."""
        counts: dict[str, int] = out.num_scheduled_tokens
        total = int(out.total_num_scheduled_tokens)
        salts = getattr(out, SALTS, None) or {}
        new = [_request(one, str(salts.get(one.req_id, ""))) for one in out.scheduled_new_reqs]
        number = None
        if total and not any(name.startswith(_WARMUP_IDS) for name in counts):
            self._step = number = self._step + 1
        finished = [name for name in out.finished_req_ids if name not in counts]
        why = unplaced(self.runner, out) if number is not None else ""
        arming = getattr(out, WORDS, None)
        return EngineStep(number, counts, total, new, finished, lambda: starts(out), arming, why, lambda: moves_of(out))

    def _sample_tokens(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            with contextlib.ExitStack() as stack:
                for observer in reversed(self.observers):
                    stack.enter_context(observer.running())
                return original(*args, **kwargs)
        finally:
            self._end_step()
            self._raise_if_stopping()

    def _draft(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for observer in reversed(self.observers):
                stack.enter_context(observer.drafting())
            return original(*args, **kwargs)

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

    def _quietly(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._end_step()
        self._quiet += 1
        try:
            return original(*args, **kwargs)
        finally:
            self._quiet -= 1

    def _end_step(self) -> None:
        """Whatever runs next, it is not of the step that may still be open."""
        self._notify(self.observers, "ending a step", lambda one: one.end_step())

    def _notify(self, observers: Iterable[StepObserver], where: str, what: Callable[[StepObserver], None]) -> None:
        for observer in observers:
            try:
                what(observer)
            except Exception as error:
                observer.failed(where, error)

    def _raise_if_stopping(self) -> None:
        for observer in self.observers:
            error, observer.stopping = observer.stopping, None
            if error is not None:
                raise error


def _request(new: Any, salt: str) -> NewRequest:
    ids = new.prompt_token_ids
    rows = embeddings_of(new)
    length = len(ids) if ids is not None else 0 if rows is None else len(rows)
    extra = getattr(getattr(new, "sampling_params", None), "extra_args", None)
    hashed = None
    if rows is not None:
        hashed = functools.partial(hash_embeddings, rows, ids, getattr(new, "prompt_is_token_ids", None))
    sampling = functools.partial(sampling_of, new, ids)
    return NewRequest(new.req_id, ids, length, images_of(new), extra, adapter_name(new), hashed, salt, sampling)


Begins = Callable[["int", "StepGraph | None"], None]
Ends = Callable[["dict[str, Any] | None", Any], None]
_REPLAYS = ("run_fullgraph", "run_pw_graph")


class Forwards:
    """The wrapped forwards of one engine.

    begins(rows, graph): a forward begins; rows: of its tensors, padding included; graph: that replays it. ends(named,
    result): it has returned; named: its arguments by name where it is not the root's own, else None. Both are called
    several times for one forward and must not raise; only while ``armed()``.
    """

    def __init__(self, armed: Callable[[], bool], begins: Begins, ends: Ends):
        self._armed = armed
        self._begins = begins
        self._ends = ends
        self._undo = ExitStack()
        self.close = self._undo.close
        """All of them are as they were."""
        self._manager: Any = None

    def root(self, model: torch.nn.Module) -> None:
        """The root's own forward."""
        original = model.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not self._armed():
                return original(*args, **kwargs)
            self._begins(rows_of(args, kwargs), step_graph())
            result = original(*args, **kwargs)
            self._ends(None, result)
            return result

        self._undo.callback(override(model, "forward", forward))

    def runner(self, runner: Any) -> None:
        """What the runner calls it by."""
        original = getattr(runner, "_model_forward", None)
        if callable(original):
            self._undo.callback(override(runner, "_model_forward", self._watched(original)))

    def step(self, runner: Any) -> None:
        """A step begins: V2's replays, which are made when its graphs are."""
        manager = getattr(runner, "cudagraph_manager", None)
        if manager is None or manager is self._manager:
            return
        self._manager = manager
        for name in _REPLAYS:
            original = getattr(manager, name, None)
            if callable(original):
                self._undo.callback(override(manager, name, self._watched(original)))

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            if not self._armed():
                return original(*args, **kwargs)
            replayed = _replayed_graph(args)
            named = next((value for value in args if isinstance(value, dict)), kwargs)
            self._begins(replayed.size if replayed is not None else rows_of((), named), replayed or step_graph())
            result = original(*args, **kwargs)
            self._ends(named, result)
            return result

        return replacement


def _replayed_graph(args: tuple[Any, ...]) -> StepGraph | None:
    """The graph of a replay (V2: BatchExecutionDescriptor)."""
    for value in args:
        mode = getattr(getattr(value, "cg_mode", None), "name", "NONE")
        if mode != "NONE":
            return StepGraph(mode, int(value.num_tokens))
    return None


def rows_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many rows the model is about to compute, padding included: those of its first tensor."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.dim():
            return int(value.shape[-1] if value.dtype in (torch.int32, torch.int64) else value.shape[0])
    return 0


Observer = TypeVar("Observer", bound=StepObserver)
ADAPTER = "_accprobe"
"""What vLLM's wrapper keeps the adapter as; plugin.py closes it."""


def observe(wrapper: Any, kind: type[Observer]) -> Observer | None:
    """Adds an observer of this ``kind`` to the adapter of the worker inside vLLM's ``wrapper``, and returns it. Called
    in each worker after init_device.

    Returns None where the worker has no runner, or this rank is not chosen, which then has what ``kind.left_out``
    makes. Never raises: where something is wrong the server starts without the probe, with a line.
    """
    try:
        config = ProbeConfig.from_env()
        worker = getattr(wrapper, "worker", wrapper)
        runner = getattr(worker, "model_runner", None)
        if runner is None:
            say(f"{type(worker).__name__} has no model_runner after init_device: {kind.without}")
            return None
        allow_tiles(getattr(runner, "device", None))
        parallel = parallel_of(getattr(wrapper, "vllm_config", None) or runner.vllm_config)
        adapter = wrapper.__dict__.get(ADAPTER)
        if adapter is None or adapter.runner is not runner:
            adapter = RunnerAdapter(worker, runner, parallel)
        observer = kind(config, adapter) if in_ranges(config.ranks, parallel["rank"]) else None
        other = observer or kind.left_out(config, adapter)
        if other is not None:
            wrapper.__dict__[ADAPTER] = adapter
            adapter.add(other)
        return observer
    except ConfigError as error:
        say(str(error))
    except Exception as error:
        say(kind.unattached.format(f"{type(error).__name__}: {error}"))
    return None


def allow_tiles(device: Any) -> None:
    """Requests the registers of Intel's AMX from Linux for this process. vLLM 0.32's attention on a CPU uses them even
    where nothing has requested them, which is so in a first batch of four tokens or fewer: the worker dies (SIGILL)."""
    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    if getattr(device, "type", "") == "cpu" and supported is not None and supported():
        torch.cpu._init_amx()
