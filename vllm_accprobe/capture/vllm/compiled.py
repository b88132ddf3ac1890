"""Taps inside a compiled engine: where capture/graphs meets vLLM.

The problem: taps must be placed before vLLM compiles and profiles its memory, with the shapes that a forward has, and
must know when a forward of a step begins and ends. The idea: when the model is loaded, vLLM's own dummy batch, which is
not compiled, shows what every module returns; all ranks of the engine take part, also those that are not captured. The
taps are placed and their key goes into vLLM's compile key; the forward of each step aims the taps and reads them out. A
failure leaves the engine as it is without taps.

Not here: the taps (capture/graphs), forwards (runner.py), which engines compile (vllm_compat.py).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_accprobe.capture.core import say
from vllm_accprobe.capture.core.session import LANGUAGE, Session, Sites
from vllm_accprobe.capture.graphs.placement import BETWEEN, FULL, Placed, Sightings, TapPlan, plan, ring_bytes, watching
from vllm_accprobe.capture.graphs.readout import GraphReadout
from vllm_accprobe.capture.taps.hooks import Inputs, chooses, outputs, picks
from vllm_accprobe.capture.vllm.names_by_release import in_graphs
from vllm_accprobe.capture.vllm.runner import Forwards, RunnerAdapter
from vllm_accprobe.capture.vllm.step_observer import StepObserver
from vllm_accprobe.capture.vllm.vllm_compat import PIECES, compiled_modules, compiles, level
from vllm_accprobe.config import TAP_SET, ProbeConfig
from vllm_accprobe.dump.journal_writer import amend_graphs
from vllm_accprobe.dump.schema import ROOT_TAP, StepGraph

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


def observe_dummy_run(runner: Any, model: torch.nn.Module) -> Sightings:
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


class DummyRunOnly(StepObserver):
    """What a rank that is not captured does where others are: it computes the dummy batch with them."""

    without = "nothing is captured on this rank"

    def __init__(self, config: ProbeConfig, adapter: RunnerAdapter):
        self._config = config
        self._adapter = adapter
        self._done = False

    def loaded(self) -> None:
        runner, model = self._adapter.runner, self._adapter.model()
        if self._done or not compiles(runner.vllm_config, model) or refusal(self._config, runner):
            return
        self._done = True
        observe_dummy_run(runner, model)

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


_WHERE = "taps in compiled graphs"


class InGraphs:
    """The taps of one engine that compiles. ``wrap`` the root before other taps, ``place`` before it compiles.

    Until taps are placed, and where they cannot be, every method does nothing.
    """

    def __init__(self, session: Session, runner: Any, model: torch.nn.Module):
        self._session = session
        self._runner = runner
        self._model = model
        self._unfit: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._sites: Sites = {}
        self._placed: Placed | None = None
        self._readout: GraphReadout | None = None
        self._forwards = Forwards(lambda: session.state is not None, self._begins, self._ends)
        os.environ[TAP_SET] = ""

    def wrap(self) -> None:
        """Wraps the forwards: the root's inside its tap, whose output then comes after those of its parts."""
        self._forwards.root(self._model)
        self._forwards.runner(self._runner)

    def place(self, root: Path) -> None:
        """Places taps, and says so, also in the run.json of the dump at ``root``. Never raises."""
        try:
            self._place(root)
        except Exception as error:
            self._session.sink.error(_WHERE, f"{type(error).__name__}: {error}", None)
            say(f"no taps in compiled graphs ({type(error).__name__}: {error}): modules inside them are not seen")

    def _place(self, root: Path) -> None:
        session, config = self._session, self._session.config
        why = refusal(config, self._runner)
        if why:
            session.sink.skip(ROOT_TAP, why)
            say(f"{why}: modules inside compiled graphs are not seen")
            return
        selects = functools.partial(chooses, config)
        rows = int(self._runner.vllm_config.scheduler_config.max_num_batched_tokens)
        seen = observe_dummy_run(self._runner, self._model)
        budget, device = config.graph_mb * 10**6, torch.device(getattr(self._runner, "device", "cpu"))
        ring = ring_bytes(budget, device) if config.task == "tensor" else 0
        made = plan(
            seen, selects if config.modules else lambda path, cls: False, rows, budget - ring,
            inputs=config.capture_inputs, outputs=config.capture_outputs, only_stats=config.task == "stats",
            places=functools.partial(picks, config.graph_taps) if config.graph_taps else None,
            folds=device.type == "cpu" and "inductor" in _compiled_how(self._runner.vllm_config)["backend"],
        )  # fmt: skip
        self._unfit, self._names = made.unfit, seen.names
        placed = Placed(made, selects, device)
        if ring:
            session.sink.reserve(ring)
        self._placed, self._readout = placed, GraphReadout(session, placed)
        os.environ[TAP_SET] = made.key
        facts = {**made.facts(), "ring": ring, "chosen": len(placed.chosen), **_where(made, seen)}
        amend_graphs(root, {**_compiled_how(self._runner.vllm_config), **facts})
        say(
            f"{len(made.placed)} taps in compiled graphs (the {made.kind} set; {made.rows} rows, "
            f"{made.nbytes / 1e6:.0f} MB), {len(placed.chosen)} of them chosen"
            + ("; so many may change what the compiler makes of the model" if made.kind == FULL else "")
        )

    @property
    def placed(self) -> bool:
        """Whether there are taps."""
        return self._placed is not None and bool(self._placed.plan.placed)

    def begin_step(self) -> None:
        """A step is armed."""
        try:
            self._forwards.step(self._runner)
        except Exception as error:
            self._session.fail(_WHERE, error)

    def _begins(self, rows: int, graph: StepGraph | None) -> None:
        """A forward of the step that runs begins."""
        try:
            if graph is not None:
                self._session.computed_by(graph)
            if self._readout is not None:
                self._readout.aim(rows)
        except Exception as error:
            self._readout = None
            self._session.fail(_WHERE, error)

    def _ends(self, named: dict[str, Any] | None, result: Any) -> None:
        """It has returned; ``named``: the arguments of a call whose root may have run no Python."""
        session, state = self._session, self._session.state
        unseen = named is not None and state is not None and not state.calls.get(ROOT_TAP)
        try:
            if unseen and session.takes_inputs:
                self._root(Inputs([], "")((), named or {}))
            self.computed()
            if unseen and session.takes_outputs:
                self._root(outputs(result))
        except Exception as error:
            session.fail(_WHERE, error)

    def _root(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Tensors of the root, whose forward was replayed as a whole."""
        session, cls = self._session, type(self._model).__name__
        if session.state is not None and chooses(session.config, "", cls):
            session.fired.add(ROOT_TAP)
            for role, tensor in tensors:
                session.take(session.state, self._sites, ROOT_TAP, cls, role, 0, tensor, LANGUAGE)

    def computed(self) -> None:
        """The forward of a step has returned; a second call of the same step does nothing."""
        self._safely(GraphReadout.take)

    def end_step(self) -> None:
        """What is computed now is of no step."""
        self._safely(GraphReadout.rest)

    def why(self, tap: str, otherwise: str) -> str:
        """Why nothing was captured at ``tap``."""
        return self._unfit.get(tap) or self._unfit.get(self._names.get(tap, tap), otherwise)

    def end(self) -> None:
        """Taps copy nothing any more, and are taken off; what they left out is counted."""
        self.end_step()
        placed, self._placed, self._readout = self._placed, None, None
        if placed is not None:
            placed.remove()
            for (path, role), why in placed.plan.partly.items():
                if path in self._session.fired:
                    self._session.sink.skip(path, why, role)

    def close(self) -> None:
        """The forwards are as they were; what wrapped the root's is gone already."""
        self._forwards.close()

    def _safely(self, what: Callable[[GraphReadout], None]) -> None:
        if self._readout is None:
            return
        try:
            what(self._readout)
        except Exception as error:
            self._readout = None
            self._session.fail(_WHERE, error)


def _compiled_how(vllm_config: Any) -> dict[str, Any]:
    """What vLLM makes of the model, in its own words."""
    config = vllm_config.compilation_config
    mode, graphs = getattr(config, "mode", getattr(config, "level", None)), getattr(config, "cudagraph_mode", None)
    return {
        "mode": getattr(mode, "name", mode), "backend": str(getattr(config, "backend", "") or ""),
        "cudagraph_mode": getattr(graphs, "name", None),
        "capture_sizes": list(getattr(config, "cudagraph_capture_sizes", None) or ()),
        "splitting_ops": list(getattr(config, "splitting_ops", None) or ()),
    }  # fmt: skip


def _where(made: TapPlan, seen: Sightings) -> dict[str, Any]:
    """The placed modules by piece, in order of execution, and those whose results a splitting operator gives."""
    most = max((piece for found in seen.pieces.values() for piece in found), default=-1)
    pieces: list[list[str]] = [[] for _ in range(most + 1)]
    between: list[str] = []
    for path in dict.fromkeys(one.path for one in made.placed):
        for piece in dict.fromkeys(seen.pieces[path]):
            (between if piece == BETWEEN else pieces[piece]).append(path)
    return {"pieces": pieces, "between": between}
