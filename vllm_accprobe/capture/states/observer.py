"""The ledger inside vLLM: the layers that have a cache, and an observer of the runner.

The problem: attention writes keys and values through its implementation's ``do_kv_cache_update`` (vLLM 0.12 and later)
or within its forward; recurrent layers read and write their states in the middle of a module; the caches exist only
after the model is loaded. The ledger must work with a capture, without one, and while a capture is disarmed. The idea:
the engine's own table of such layers, and on each instance the narrowest call that there is, wrapped. Lines go to the
capture's dump, else to one of the ledger's own. A capture has a ledger by default, of ids and owners alone (mode
``owners``), which hashes nothing. A failure switches the ledger off, is said once, and serving goes on.

Not here: what is done at those moments (ledger.py).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from vllm_accprobe.capture.core import say
from vllm_accprobe.capture.core.attribute_override import override
from vllm_accprobe.capture.core.layout import Layouts
from vllm_accprobe.capture.core.recording import Recording, root_of
from vllm_accprobe.capture.core.session import Sink
from vllm_accprobe.capture.states.checks import MOST_TOKENS
from vllm_accprobe.capture.states.ledger import (
    OWNERS,
    Arrivals,
    BlockLedger,
    Findings,
    Layer,
    Pages,
    UnknownLayout,
    tensors_of,
)
from vllm_accprobe.capture.states.schedule import KV, STATE, CacheGroup, Schedule
from vllm_accprobe.capture.vllm.capturing import CaptureObserver
from vllm_accprobe.capture.vllm.runner import Forwards, RunnerAdapter
from vllm_accprobe.capture.vllm.step_observer import EngineStep, StepObserver
from vllm_accprobe.capture.vllm.vllm_compat import compiles, guesses, metadata_of_layer, run_info
from vllm_accprobe.config import ProbeConfig
from vllm_accprobe.dump.journal import (
    CACHED,
    FINDING,
    TOTALS,
    CachedPrefix,
    CachedRows,
    StateFinding,
    StateTotals,
    sentence,
)

_UPDATE = "do_kv_cache_update"
_FORWARDS = ("forward", "forward_mqa", "forward_mha")
"""Where implementations read: attention's, and latent attention's two."""
_UNSEEN = ("cross", "encoder")
Moment = Callable[..., None]
"""Called with a layer; after a write also with what tries it again (metadata_checks.Again)."""


def group_of(spec: Any, mode: str) -> CacheGroup | None:
    """What vLLM's specification of a cache group means here; None for one whose rows are no tokens of the request.
    mode: vLLM's mamba_cache_mode."""
    inner = getattr(spec, "kv_cache_specs", None)  # layers of one kind with different sizes
    if isinstance(inner, Mapping) and inner:
        spec = next(iter(inner.values()))
    name = type(spec).__name__
    size = int(spec.block_size)
    if hasattr(spec, "shapes") and hasattr(spec, "dtypes"):  # MambaSpec, and what derives from it
        if mode == "all":
            return None
        extra = int(getattr(spec, "num_speculative_blocks", 0) or 0)
        return CacheGroup(STATE, size, extra=extra, aligned=mode == "align")
    if any(word in name.lower() for word in _UNSEEN):
        return None
    if name not in ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec",
                    "SinkFullAttentionSpec"):  # fmt: skip
        return None
    sliding = name == "SlidingWindowSpec"
    chunk = int(spec.attention_chunk_size or 0) if name == "ChunkedLocalAttentionSpec" else 0
    return CacheGroup(KV, size, window=int(spec.sliding_window or 0) if sliding else 0, chunk=chunk)


def names_of_states(n: int, cls: str) -> list[str]:
    """What the ``n`` states of a recurrent layer of class ``cls`` are called, in vLLM's order: convolutions first."""
    if n == 1:
        return ["conv state" if "conv" in cls.lower() else "state"]
    return ["conv state" if n == 2 else f"conv state {i}" for i in range(n - 1)] + ["SSM state"]


class CacheLayers:
    """The layers of ``runner``'s ``model``, by group; wrapped while the ledger lives.

    groups: in the engine's order, None for those that are not watched. skipped: layers by reason.
    """

    def __init__(self, runner: Any, model: torch.nn.Module):
        config = runner.kv_cache_config
        self.blocks = int(config.num_blocks)
        self.mode = str(getattr(runner.vllm_config.cache_config, "mamba_cache_mode", "none"))
        self.skipped: Counter[str] = Counter()
        self.groups: list[CacheGroup] = []
        self.layers: list[list[Layer]] = []
        self._undo = ExitStack()
        self.close = self._undo.close
        """All of them are as they were."""
        self._modules: dict[str, Any] = {}
        self.memory: dict[int, int] = {}
        """By group of states, how many tokens a convolution's state holds; see checks.must_change."""
        table = runner.vllm_config.compilation_config.static_forward_context
        own = {id(module): path for path, module in reversed(list(model.named_modules()))}
        for g, group in enumerate(config.kv_cache_groups):
            made = group_of(group.kv_cache_spec, self.mode)
            found: list[Layer] = []
            for name in group.layer_names:
                module = table.get(name)
                path = own.get(id(module))
                if made is None:
                    self.skipped[f"a cache of {type(group.kv_cache_spec).__name__} is not known"] += 1
                elif path is None:
                    self.skipped["a layer of a draft model"] += 1
                else:
                    found += self._layers(path, g, len(found), module)
            size = max(int(getattr(group.kv_cache_spec, "block_size", 1)), 1)
            self.groups.append(made or CacheGroup(KV, size, watched=False))
            self.layers.append(found)

    def _layers(self, path: str, group: int, number: int, module: Any) -> list[Layer]:
        """The layer; each state of a recurrent one by itself: what writes one of them may leave out another."""
        caches = tensors_of(getattr(module, "kv_cache", None))
        if getattr(module, "kv_sharing_target_layer_name", None):
            self.skipped["a layer that reads another one's cache"] += 1
            return []
        if not caches:
            self.skipped["a layer without a cache"] += 1
            return []
        parts = [("", caches)]
        if not hasattr(module, "impl"):
            parts = list(zip(names_of_states(len(caches), type(module).__name__), ([c] for c in caches), strict=True))
        try:
            found = [Layer(path, group, number + i, Pages(p, self.blocks), n) for i, (n, p) in enumerate(parts)]
        except UnknownLayout as why:
            self.skipped[str(why)] += 1
            return []
        if not hasattr(module, "impl"):
            self.memory[group] = min(int(min(caches[0].shape[1:], default=1)), MOST_TOKENS)
        self._modules[path] = module
        return found

    @property
    def count(self) -> int:
        """How many layers are watched; the states of one are one."""
        return sum(len({layer.path for layer in of}) for of in self.layers)

    def name_in_engine(self, group: int, runner: Any) -> str:
        """Any layer's name of a group, by which the attention's metadata is found."""
        return str(runner.kv_cache_config.kv_cache_groups[group].layer_names[0])

    def watch(self, enters: Moment, wrote: Moment, leaves: Moment) -> None:
        """Calls these at each layer's use of its cache; they must not raise."""
        for layers in self.layers:
            for layer in list(layers):
                module = self._modules[layer.path]
                impl = getattr(module, "impl", None)
                if impl is None:
                    self._hook_module(module, layer, enters, wrote, leaves)
                elif callable(getattr(impl, _UPDATE, None)) and not _within(module):
                    update = _updating(getattr(impl, _UPDATE), layer, enters, wrote)
                    self._undo.callback(override(impl, _UPDATE, update))
                    for name in _FORWARDS:
                        if callable(reads := getattr(impl, name, None)):
                            self._undo.callback(override(impl, name, _with_moments(reads, layer, (), (leaves,))))
                elif callable(getattr(impl, "forward", None)):
                    whole = _with_moments(impl.forward, layer, (enters,), (wrote, leaves))
                    self._undo.callback(override(impl, "forward", whole))
                else:
                    self.skipped["attention without a forward of its own"] += 1
                    layers.remove(layer)

    def _hook_module(
        self, module: torch.nn.Module, layer: Layer, enters: Moment, wrote: Moment, leaves: Moment
    ) -> None:
        def before(*_: Any) -> None:
            enters(layer)

        def after(*_: Any) -> None:
            wrote(layer)
            leaves(layer)

        handles = [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
        for handle in handles:
            self._undo.callback(handle.remove)


def _within(module: Any) -> bool:
    """Whether the backend writes within its forward, whatever methods it has. Latent attention never does."""
    if hasattr(module.impl, "forward_mqa"):
        return False
    backend = getattr(module, "attn_backend", None)
    return bool(getattr(backend, "forward_includes_kv_cache_update", False))


def _updating(original: Any, layer: Layer, enters: Moment, wrote: Moment) -> Any:
    def do_kv_cache_update(*args: Any, **kwargs: Any) -> Any:
        enters(layer)
        result = original(*args, **kwargs)
        wrote(layer, lambda *of: written_again(original, args, kwargs, layer.pages.split, *of))
        return result

    return do_kv_cache_update


def written_again(
    original: Any, args: tuple[Any, ...], kwargs: dict[str, Any], split: int, block: int, rows: np.ndarray,
    slots: np.ndarray,
) -> bool | None:  # fmt: skip
    """Whether ``block`` holds what writing ``rows`` leaves there: they are written into a block of other bytes by the
    same call, and what it has changed is compared with the cache.

    args: (module, key, value, cache, slot mapping), as vLLM calls it; None is returned for others.
    """
    if kwargs or len(args) != 5 or not len(rows):
        return None
    module, key, value, cache, mapping = args
    tensors = (key, value, cache, mapping)
    if not all(isinstance(one, torch.Tensor) and one.device.type == "cpu" for one in tensors):
        return None
    mine = cache[block * split : (block + 1) * split]
    others = mine.clone(memory_format=torch.preserve_format)
    flat = others.view(torch.uint8)
    flat.bitwise_not_()
    before = flat.clone()
    at = torch.from_numpy(rows)
    original(module, key[at], value[at], others, torch.from_numpy(slots).to(mapping.dtype))
    changed = flat != before
    return bool(changed.any()) and bool((flat[changed] == mine.view(torch.uint8)[changed]).all())


def _with_moments(original: Any, layer: Layer, before: Sequence[Moment], after: Sequence[Moment]) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        for moment in before:
            moment(layer)
        result = original(*args, **kwargs)
        for moment in after:
            moment(layer)
        return result

    return forward


class StatesObserver(StepObserver):
    """The ledger of one worker. All requests and steps are in it, whatever a capture of the same worker selects."""

    without = "no state is checked on this rank"
    unattached = "the ledger of states could not attach ({}): it is off on this rank; serving goes on"

    def __init__(self, config: ProbeConfig, adapter: RunnerAdapter):
        self.config = config
        self.mode = config.ledger or OWNERS
        self.ledger: BlockLedger | None = None
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

    def begin_step(self, step: EngineStep) -> None:
        if step.number is None and self.ledger is None:
            return
        if self.ledger is None:
            self._make()
        if self.ledger is not None:
            self._open = step.number is not None
            if self._forwards is not None:
                self._forwards.step(self._adapter.runner)
            if step.number is None:
                self.ledger.ended(step.finished)
            else:
                self._new = tuple(new.name for new in step.new)
                self.ledger.begin(step)

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
        self.ledger = BlockLedger(
            schedule, self.layers.layers, self.mode, self._findings, arrivals, slack=slack, inside=inside
        )
        self.ledger.bytes.memory = {g: n for g, n in self.layers.memory.items() if not schedule.groups[g].extra}
        if self.mode == OWNERS and not inside:  # a forward that may be traced is not wrapped
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
        """A method of the ledger that a layer may call at any time."""

        def at(layer: Layer, *more: Any) -> None:
            if self.dead is None and self._open and not self._drafting and self.ledger is not None:
                try:
                    getattr(self.ledger.bytes, name)(layer, *more)
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
            assert self.ledger is not None
            ids, _ = self._adapter.batch.buffers(self._adapter.batch.total)
            self.ledger.forward(names, lambda g: metadata_of_layer(layers.name_in_engine(g, runner)), ids)
        except Exception as error:
            self.failed("what the attention gets", error)

    def computed(self) -> None:
        if self.ledger is not None and self._open:
            self._name_requests(self.ledger)
            self.ledger.computed()

    def _name_requests(self, ledger: BlockLedger) -> None:
        """What the capture calls the requests of this step that are new, and whose prefix it must know."""
        capture = self._capture()
        if capture is None:
            ledger.prefixes.clear()
            return
        schedule = ledger.schedule
        for name in self._new:
            request, one = capture.requests.get(name), schedule.requests.get(name)
            if request is not None and one is not None:
                schedule.req[one.number] = request.req
        for one, found, why in ledger.prefixes:
            if capture.requests.wanted(one.name) and schedule.req[one.number] >= 0 and capture.session is not None:
                runs = tuple(CachedRows(low, n, schedule.req[o] if o >= 0 else -1) for low, n, o in found)
                prefix = CachedPrefix(ledger.bytes.step, schedule.req[one.number], runs, why)
                capture.session.sink.line(CACHED.to_line(prefix))
        ledger.prefixes.clear()
        self._new = ()

    @contextlib.contextmanager
    def drafting(self) -> Iterator[None]:
        self._drafting = True
        try:
            yield
        finally:
            self._drafting = False

    def end_step(self) -> None:
        if self.ledger is not None and self._open and self.dead is None:
            self._open = False
            self.ledger.end_step()

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
            self._recording = Recording(
                self.config, root_of(self.config), run, Layouts({}, 0, 1), lambda part, rows: None,
                rank=parallel["rank"], device=device, parallel=parallel,
                contents="this engine's ledger of states goes", announced=True,
            )  # fmt: skip
        return self._recording.session.sink

    def _say(self, found: StateFinding) -> None:
        self._sink().line(FINDING.to_line(found))
        if not self._found:
            self._found = True
            say(f"the cache, not the kernel: {sentence(found)}, rank {self._adapter.parallel['rank']} (reported once)")

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
        """Writes what was checked, once, before the capture closes its dump. Never raises."""
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
        ledger, layers, findings = self.ledger, self.layers, self._findings
        for undo in (layers, self._forwards):
            if undo is not None:
                undo.close()
        if ledger is None or layers is None or findings is None:
            return
        if self.dead is None:
            ledger.ended(tuple(ledger.schedule.requests))
            ledger.arrivals.close()
            findings.flush()
        skipped = layers.skipped + ledger.bytes.unseen
        if ledger.arrivals.lost:
            skipped["hashes beyond what one step may have on its way"] = ledger.arrivals.lost
        if self.dead is not None:
            skipped[self.dead] += 1
        for _, what in ledger.strange_metadata:
            skipped[f"metadata that were never right, and mean something else here ({what})"] += 1
        if self.mode == OWNERS and self._capture() is None:
            return
        totals = StateTotals(
            self.mode, layers.count, ledger.steps, ledger.bytes.hashed,
            ledger.bytes.checked, ledger.held,
            findings.count, dict(ledger.events), dict(skipped),
        )  # fmt: skip
        self._sink().line(TOTALS.to_line(totals))
        if not ledger.steps or self.mode == OWNERS:
            return
        what = f"{findings.count} findings" if findings.count else "nothing wrong"
        say(f"states: {what} in {ledger.steps} steps: {ledger.bytes.checked:,} blocks of layers checked, "
            f"{ledger.bytes.hashed:,} hashed after a write, {ledger.held:,} numbers of metadata compared with "
            "the schedule")  # fmt: skip
