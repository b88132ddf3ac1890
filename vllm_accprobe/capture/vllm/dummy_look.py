"""One forward of invented tokens, not compiled, in which a compiled engine shows what its modules give back.

The problem: it must run before anything is compiled, with vLLM's own dummy batch, which on several ranks is a matter of
all of them, also of those that are not captured. The idea: the same function on every rank; a rank that is left out has
an observer that takes part in this and in nothing else. Not here: what is made of it (compiled.py).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from vllm_accprobe.capture.core.say import say
from vllm_accprobe.capture.graphs.sightings import Sightings, watching
from vllm_accprobe.capture.vllm.eager import PIECES, compiled_modules, compiles, level
from vllm_accprobe.capture.vllm.names.modes import in_graphs
from vllm_accprobe.capture.vllm.runner import RunnerAdapter
from vllm_accprobe.capture.vllm.step_observer import StepObserver
from vllm_accprobe.config import ProbeConfig

_TOKENS = 11
"""Of the dummy batch: few, and no size of a model's features."""
_OPAQUE = ("vllm::moe_forward", "vllm::moe_forward_shared")
"""Operators that no compiler looks into and at which nothing is cut."""


def refusal(config: ProbeConfig, runner: Any) -> str:
    """Why no taps are placed, "" where they are. The same on every rank of an engine."""
    if not config.graph_mb:
        return "no taps in compiled graphs: VLLM_ACCPROBE_GRAPH_MB=0"
    if not config.capture_outputs and not config.capture_inputs:
        return "no taps in compiled graphs: VLLM_ACCPROBE_PARTS names neither inputs nor outputs"
    if not hasattr(runner, "_dummy_run"):
        return f"no taps in compiled graphs: {type(runner).__name__} has no _dummy_run"
    why = in_graphs(getattr(runner, "vllm_config", None))
    return f"no taps in compiled graphs: {why}" if why else ""


def look(runner: Any, model: torch.nn.Module) -> Sightings:
    """One dummy batch, not compiled. What will be compiled is seen, and where whole forwards are captured, everything.

    Raises whatever vLLM raises.
    """
    regions = compiled_modules(model)
    whole = "FULL" in str(getattr(getattr(runner.vllm_config.compilation_config, "cudagraph_mode", None), "name", ""))
    run = runner._dummy_run
    known = inspect.signature(run).parameters
    options = {"is_profile": True, "skip_eplb": True, "skip_attn": True}
    rows = min(_TOKENS, int(runner.vllm_config.scheduler_config.max_num_batched_tokens))
    drafts = [getattr(getattr(runner, name, None), "model", None) for name in ("drafter", "speculator")]
    cuts = _cuts(runner.vllm_config.compilation_config)
    with _uncompiled([model, *drafts]), watching(model, [""] if whole else regions, cuts, _OPAQUE) as seen:
        run(rows, **{name: value for name, value in options.items() if name in known})
    seen.found = [one for one in seen.found if one.path not in regions]  # their own forwards are what is compiled
    return seen


class LookingOn(StepObserver):
    """What a rank that is not captured does where others are: it computes the dummy batch with them."""

    without = "nothing is captured on this rank"

    def __init__(self, config: ProbeConfig, adapter: RunnerAdapter):
        self._config = config
        self._adapter = adapter
        self._looked = False

    def loaded(self) -> None:
        runner, model = self._adapter.runner, self._adapter.model()
        if self._looked or not compiles(runner.vllm_config, model) or refusal(self._config, runner):
            return
        self._looked = True
        look(runner, model)

    def failed(self, where: str, error: BaseException) -> None:
        say(f"{where} failed ({type(error).__name__}: {error}): {self.without}; serving goes on")


def _cuts(config: Any) -> list[str]:
    """Names of the operators at which vLLM cuts the graph; where inductor does it, the order is its own."""
    if level(config) != PIECES or getattr(config, "use_inductor_graph_partition", False):
        return []
    return list(getattr(config, "splitting_ops", None) or ())


@contextlib.contextmanager
def _uncompiled(models: Sequence[Any]) -> Iterator[None]:
    """While the context lasts, ``models`` compute as Python says, whatever they will be compiled to."""
    modules = [module for model in models if isinstance(model, torch.nn.Module) for module in model.modules()]
    compiled = [module for module in modules if getattr(module, "do_not_compile", None) is False]
    try:
        for module in compiled:
            module.do_not_compile = True  # type: ignore[assignment]
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in compiled:
            module.do_not_compile = False  # type: ignore[assignment]
