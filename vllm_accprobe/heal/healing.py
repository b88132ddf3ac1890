"""Modules of a served model compute with a reference in their kernel's place.

The problem: two engineers disagree whether an operator is what makes a server wrong; a comparison says so, an
experiment settles it. The idea: an observer wraps the forwards that VLLM_ACCPROBE_HEAL chooses, inside any capture's
taps, so that a dump of a healed server has healed outputs. In each step that carries requests a chosen call's output
is replaced by its reference; of a block, those of the modules inside it. What cannot be replaced stays as it is and is
counted with the reason; a module at which anything fails is left alone from then on, and the model notices nothing. The
sampler is no module: of greedy rows its token is the largest logit. Compiled engines are refused in a line.
Not here: a call and its value (live_calls.py), earlier keys and values (written_rows.py), the report (outcome.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from vllm_accprobe.capture.core import say
from vllm_accprobe.capture.core.attribute_override import wrap_method
from vllm_accprobe.capture.ops.dispatch import Paused
from vllm_accprobe.capture.taps.hooks import Tap, Taps, innermost, outputs, picks
from vllm_accprobe.capture.taps.params import own_tensors
from vllm_accprobe.capture.teacher_forcing import replaced
from vllm_accprobe.capture.vllm.runner import RunnerAdapter
from vllm_accprobe.capture.vllm.step_observer import EngineStep, StepObserver
from vllm_accprobe.capture.vllm.vllm_compat import batch_of_layer, compiles, language_prefix, requested_model
from vllm_accprobe.config import PREFIX, ProbeConfig, nearest
from vllm_accprobe.dump.schema import ROOT_TAP, Module
from vllm_accprobe.heal.live_calls import (
    QUANT_METHOD,
    Began,
    LiveModules,
    block_of,
    exact,
    host,
    layer_name,
    put,
    rounded_once,
    same_path,
    with_inside,
    with_right_experts,
)
from vllm_accprobe.heal.outcome import HealOutcome, lines
from vllm_accprobe.heal.written_rows import WrittenRows
from vllm_accprobe.opcheck.reference import Declined
from vllm_accprobe.opcheck.reference_table import References
from vllm_accprobe.opcheck.references import composite
from vllm_accprobe.opcheck.registry import default_references

SAMPLER = "sampler"
_CACHED = {"Attention": ("key", "value"), "MLAAttention": ("kv_c_normed", "k_pe")}
"""By class, the inputs that a layer's cache holds."""
BLOCK = "it computes nothing itself: the modules inside it are healed, as far as they have references"
_ALSO = ("lm_head", "*.lm_head", "*.gate")
"""Modules whose outputs others' references need."""


class HealObserver(StepObserver):
    """The healed modules of one rank; the owner of their taps."""

    without = "nothing is healed on this rank"
    unattached = "healing could not attach ({}): nothing is healed on this rank; serving goes on"

    @classmethod
    def left_out(cls, config: ProbeConfig, adapter: RunnerAdapter) -> StepObserver:
        return cls(config, adapter)  # a rank that is not captured computes all the same

    def __init__(self, config: ProbeConfig, adapter: RunnerAdapter):
        self.named, self.words = same_path(config.heal), with_inside(same_path(config.heal))
        self.config = dataclasses.replace(config, modules=(*self.words, *_ALSO))
        self.fired: set[str] = set()
        self.outcome = HealOutcome(int(adapter.parallel["rank"]))
        self._requested = config.heal
        self._root = Path(os.path.abspath(config.dir)) if config.dir else None
        self._adapter = adapter
        self._weights: dict[Any, dict[str, Any]] = {}
        self._names: dict[Any, list[str]] = {}
        self._classes: dict[str, str] = {}
        self._live: LiveModules | None = None
        self._references: References | None = None
        self._written: dict[str, WrittenRows] = {}
        self._running: list[str] = []
        self._active = self._closed = False
        self._paused = Paused()
        self._taps: Taps | None = None

    @property
    def awake(self) -> bool:
        return self._live is not None and not self.outcome.problem

    # --- the model's modules ---

    def module(self, module: Module) -> None:
        """Of the taps: a chosen module, or one that others need."""
        self._classes[module.tap] = module.cls

    def skip(self, tap: str, reason: str) -> None:
        if tap in self._classes:
            self._leave(tap, self._classes[tap], reason)

    def _leave(self, tap: str, cls: str, reason: str) -> None:
        """Of a module that cannot be healed: reported where it is chosen itself, and not only inside one that is."""
        if picks(self.named, "" if tap == ROOT_TAP else tap, cls):
            self.outcome.left[tap] = reason

    def _chosen(self, tap: str, cls: str) -> bool:
        return picks(self.words, "" if tap == ROOT_TAP else tap, cls)

    def layer(self, model: torch.nn.Module, path: str, layer: torch.nn.Module) -> None:
        """Keeps the weights of a chosen module before its kernel packs them."""
        if not self._names:
            for name, module in model.named_modules(remove_duplicate=False):
                self._names.setdefault(module, []).append(name)
        cls, method = type(layer).__name__, type(getattr(layer, "quant_method", None)).__name__
        if any(self._chosen(n, cls) or self._chosen(n + QUANT_METHOD, method) or
               (n.endswith(".kv_b_proj") and self._chosen(n.rpartition(".")[0], "MLAAttention"))
               for n in self._names.get(layer, [path])):  # fmt: skip
            self._weights[layer] = {name: host(t) for name, t in own_tensors(layer)}

    def loaded(self) -> None:
        if self._live is not None or self.outcome.problem:
            return  # weights were loaded anew: those of the first time stay
        runner, model = self._adapter.runner, self._adapter.model()
        if compiles(runner.vllm_config, model):
            self._refuse("the engine is compiled, and runs no Python that could be replaced: start vLLM with "
                         "--enforce-eager")  # fmt: skip
            return
        config = requested_model(runner.vllm_config.model_config).get("config")
        if config is None:
            described = getattr(runner.vllm_config.model_config, "hf_config", None)
            config = described.to_dict() if described is not None else {}
        self._live = LiveModules(model, self._weights, config)
        self._references = default_references()
        self._taps = Taps(self, self._wrapped)
        self._taps.attach(model, language_prefix(model))
        sampler = getattr(runner, "sampler", None)
        if picks(self.words, SAMPLER, type(sampler).__name__):
            self._heal_sampler(sampler)
        chosen = [*self.outcome.healed, *self.outcome.left]
        missing = [word for word in self._requested if not word.startswith("!") and not any(
            picks(same_path((word,)), name, self._classes.get(name, "")) for name in chosen)]  # fmt: skip
        names = tuple(self._live.modules)
        for word in missing:
            say(f"heal: {PREFIX}HEAL={word} matches no module of this model{nearest(word, names)}")
        if not self.outcome.healed:
            self._refuse("no chosen module has a reference" if chosen else "no module of this model is chosen")
            return
        names = tuple(self.outcome.healed)
        say(f"heal: computed by references in float64 from now on: {', '.join(names[:4])}"
            f"{f' and {len(names) - 4:,} more' if len(names) > 4 else ''}")  # fmt: skip
        self._report()

    def _refuse(self, why: str) -> None:
        begun = " more" if any(self.outcome.healed.values()) else ""
        self.outcome.problem = f"nothing{begun} is healed on rank {self.outcome.rank}: {why}"
        say(f"heal: {self.outcome.problem}; serving goes on")
        self._report()

    # --- a step ---

    def begin_step(self, step: EngineStep) -> None:
        self._active = step.number is not None
        self._running.clear()
        if self._live is not None:
            self._live.seen.clear()
        copies = step.blocks().copies if self._written and step.blocks is not None else ()
        for written in self._written.values() if copies else ():
            written.copy(copies)

    def end_step(self) -> None:
        self._active = False

    @contextlib.contextmanager
    def drafting(self) -> Iterator[None]:
        """A draft model shares modules with the model: what it calls is none of the model's."""
        active, self._active = self._active, False
        try:
            yield
        finally:
            self._active = active

    def _wrapped(self, tap: Tap, original: Callable[..., Any]) -> Callable[..., Any]:
        chosen = frozenset(n for n in tap.chosen if self._chosen(n, tap.cls))
        assert self._references is not None
        assert self._live is not None
        found = self._references.find(tap.cls)
        why = found.reason if isinstance(found, Declined) else ""
        if not why and (tap.is_root or getattr(found, "__module__", "") == composite.__name__):
            why = BLOCK
        for name in chosen if why else ():
            self._leave(name, tap.cls, why)
        chosen = frozenset() if why else chosen
        for name in chosen:
            self.outcome.healed.setdefault(name, 0)
            if name.endswith(QUANT_METHOD):
                router = getattr(self._live.modules.get(block_of(name)), "router", None)
                wrap_method(router, "select_experts", functools.partial(self._select, name))
            if tap.cls in _CACHED:
                size = getattr(getattr(self._adapter.runner.vllm_config, "cache_config", None), "block_size", 0)
                self._written[name] = WrittenRows(_CACHED[tap.cls], int(size or 0))
        needed = frozenset(n for n in tap.chosen if n not in chosen)
        is_compiling = torch.compiler.is_compiling

        def forward(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not self._active:
                return original(*args, **kwargs)
            name = innermost(tap.names, self._running)
            began = self._begin(tap, name, args, kwargs) if name in chosen else None
            self._running.append(name)
            try:
                result = original(*args, **kwargs)
            finally:
                self._running.pop()
            if began is not None:
                result = self._healed(tap, name, began, result)
            if name in chosen or name in needed:
                self._see(tap, result)
            return result

        # For who wraps this one: the names of its inputs are the original's.
        forward.__wrapped__, owner = original, getattr(original, "__self__", None)  # type: ignore[attr-defined]
        if owner is not None:
            forward.__self__ = owner  # type: ignore[attr-defined]
        return forward

    def _begin(self, tap: Tap, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Began | None:
        if name not in self.outcome.healed or name in self.outcome.left:
            return None
        try:
            with self._paused:
                return Began(dict(tap.inputs(args, kwargs)))
        except Exception as error:
            self._fail(name, error)
            return None

    def _healed(self, tap: Tap, name: str, began: Began, result: Any) -> Any:
        try:
            with self._paused:
                return self._replaced(tap, name, began, result)
        except Declined as why:
            self._count(name, why.reason)
        except Exception as error:
            self._fail(name, error)
        return result

    def _replaced(self, tap: Tap, name: str, began: Began, result: Any) -> Any:
        """Raises Declined."""
        assert self._references is not None
        assert self._live is not None
        extra = {"cache": self._cache(name, began)} if name in self._written else {}
        # a head that shares its embedding's weight is one module with it, and is called as a head
        head = tap.cls == "VocabParallelEmbedding" and "input.x" in began.inputs
        call = self._live.call(name, "ParallelLMHead" if head else tap.cls, began, result, **extra)
        kept = ""
        if name.endswith(QUANT_METHOD):
            call, kept = with_right_experts(call)
        usable = exact(self._references, call)
        if isinstance(usable, Declined):
            if usable.failed:
                raise RuntimeError(usable.reason)
            raise usable
        changed, why = put(result, usable, began)
        for reason in filter(None, (why, kept)):
            self._count(name, reason)
        self.outcome.healed[name] += 1
        return changed

    def _cache(self, name: str, began: Began) -> Any:
        """What the layer's rows look back at, this step's own included. Raises Declined."""
        assert self._live is not None
        module = self._live.modules[name]
        batch = batch_of_layer(layer_name(module))
        if batch is None or not len(batch.lengths):
            raise Declined("the engine's metadata does not say where its keys and values lie")
        written = self._written[name]
        written.write(batch, {n: began.inputs[f"input.{n}"] for n in written.names if f"input.{n}" in began.inputs})
        window = getattr(module, "sliding_window", None)
        return written.view(batch, window if isinstance(window, int) else 0)

    def _see(self, tap: Tap, result: Any) -> None:
        """Keeps an output that others' references need."""
        if self._live is None or not any(n.endswith(("lm_head", ".gate")) for n in tap.names):
            return
        try:
            with self._paused:
                first = next((t for role, t in outputs(result) if role == "output.0"), None)
                if first is not None:
                    self._live.seen.update(dict.fromkeys(tap.names, host(first)))
        except Exception as error:
            self._fail(tap.names[0], error)

    # --- what is no module: routers and the sampler ---

    def _select(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A router's choice for the experts at ``name``, put right before their kernel, and any capture, sees it."""
        result = original(*args, **kwargs)
        if not self._active or name in self.outcome.left or self._live is None:
            return result
        try:
            with self._paused:
                weights, ids = result
                logits = kwargs.get("router_logits", args[1] if len(args) > 1 else None)
                call, why = with_right_experts(self._live.routing(name, weights, ids, logits))
                if why:
                    self._count(name, why)
                    return result
                right = rounded_once(call.inputs["topk_weights"], weights.dtype)
                return right.to(weights.device), call.inputs["topk_ids"].to(ids.device, ids.dtype)
        except Exception as error:
            self._fail(name, error)
            return result

    def _heal_sampler(self, sampler: Any) -> None:
        if wrap_method(sampler, "sample", self._sample) is None:
            self.outcome.left[SAMPLER] = f"{type(sampler).__name__} has no method `sample`"
        else:
            self.outcome.healed[SAMPLER] = 0

    def _sample(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tokens = None
        if self._active and SAMPLER not in self.outcome.left:
            try:
                with self._paused:
                    tokens = self._greedy(args, kwargs)
            except Declined as why:
                self._count(SAMPLER, why.reason)
            except Exception as error:
                self._fail(SAMPLER, error)
        result = original(*args, **kwargs)
        if tokens is None:
            return result
        try:
            with self._paused:
                result = replaced(result, tokens)
            self.outcome.healed[SAMPLER] += 1
        except Exception as error:
            self._fail(SAMPLER, error)
        return result

    def _greedy(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[int]:
        """The first largest logit of each row whose temperature is 0, -1 of others. Raises Declined."""
        logits, metadata = (*args, *kwargs.values(), None, None)[:2]
        if not isinstance(logits, torch.Tensor) or not hasattr(metadata, "all_greedy"):
            raise Declined("this sampler does not say which rows are greedy")
        best = logits.detach().cpu().double().argmax(-1)
        if not metadata.all_greedy:
            heat = metadata.temperature
            if not isinstance(heat, torch.Tensor) or len(heat) != len(best):
                raise Declined("its temperatures are not those of its rows")
            best = torch.where(heat.cpu() < 1e-5, best, -1)
            if bool((best < 0).any()):
                self._count(SAMPLER, "rows that are drawn at random stay")
        return [int(t) for t in best]

    # --- the report ---

    def _count(self, name: str, reason: str) -> None:
        whys = self.outcome.some.setdefault(name, {})
        whys[reason] = whys.get(reason, 0) + 1

    def _fail(self, name: str, error: BaseException) -> None:
        """A module at which healing failed stays as it is from now on."""
        if name not in self.outcome.left:
            text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            self.outcome.left[name] = f"healing it failed ({text})"
            say(f"heal: {name}: {self.outcome.left[name]}: it is healed no longer; serving goes on")

    def failed(self, where: str, error: BaseException) -> None:
        if not self.outcome.problem:
            self._active = False
            self._refuse(f"{where} failed ({type(error).__name__}: {error})")

    def _report(self) -> None:
        if self._root is not None:
            try:
                self.outcome.write(self._root)
            except OSError as error:
                say(f"heal: {self._root}: {error.strerror or error}: what is healed is in this log alone")

    def close(self, reason: str) -> None:
        if self._closed:
            return
        self._closed, self._active = True, False
        try:
            if self._taps is not None:
                self._taps.remove()
            for name in [n for n, calls in self.outcome.healed.items() if not calls]:
                if name not in self.outcome.left and name not in self.outcome.some:
                    self._leave(name, self._classes.get(name, ""), "never called in a step")
            self._report()
            for line in lines([self.outcome]):
                say(f"{line}, rank {self.outcome.rank}")
        except Exception as error:
            say(f"heal: closing failed ({type(error).__name__}: {error})")
