"""Taps inside a compiled engine: where capture/graphs meets vLLM.

The problem: taps must stand before vLLM compiles and profiles its memory, with the shapes that a forward has, and then
hear when a forward of a step begins and ends. The idea: when the model is loaded, vLLM's own dummy batch says what
every module gives back; the taps are placed, their key goes into vLLM's compile key; the forward of each step, whoever
calls it, aims the taps and drains them. Whatever fails here leaves the engine as it is without taps. Not here: the taps
(capture/graphs), the dummy batch (dummy_look.py), forwards (forwards.py), which engines compile (eager.py).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vllm_accprobe.capture.core.say import say
from vllm_accprobe.capture.core.session import LANGUAGE, Session
from vllm_accprobe.capture.graphs.drain import GraphDrain
from vllm_accprobe.capture.graphs.placement import FULL, Placed, TapPlan, plan, ring_bytes
from vllm_accprobe.capture.graphs.sightings import BETWEEN, Sightings
from vllm_accprobe.capture.taps.arguments import Inputs, outputs
from vllm_accprobe.capture.taps.selection import chooses, picks
from vllm_accprobe.capture.vllm.dummy_look import look, refusal
from vllm_accprobe.capture.vllm.forwards import Forwards
from vllm_accprobe.config import TAP_SET
from vllm_accprobe.dump.recorder.amend import amend_graphs
from vllm_accprobe.dump.schema import ROOT_TAP, StepGraph

_WHERE = "taps in compiled graphs"


class InGraphs:
    """The taps of one engine that compiles. ``around`` the root before other taps, ``place`` before it compiles.

    Until taps are placed, and where they cannot be, every method does nothing.
    """

    def __init__(self, session: Session, runner: Any, model: torch.nn.Module):
        self._session = session
        self._runner = runner
        self._model = model
        self._unfit: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._placed: Placed | None = None
        self._drain: GraphDrain | None = None
        self._forwards = Forwards(lambda: session.state is not None, self._begins, self._ends)
        os.environ[TAP_SET] = ""

    # --- before the engine compiles ----------------------------------------------------------------------------

    def around(self) -> None:
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
        asked = functools.partial(chooses, config)
        rows = int(self._runner.vllm_config.scheduler_config.max_num_batched_tokens)
        seen = look(self._runner, self._model)
        budget, device = config.graph_mb * 10**6, torch.device(getattr(self._runner, "device", "cpu"))
        ring = ring_bytes(budget, device) if config.task == "tensor" else 0
        made = plan(
            seen, asked if config.modules else lambda path, cls: False, rows, budget - ring,
            inputs=config.capture_inputs, outputs=config.capture_outputs, only_stats=config.task == "stats",
            places=functools.partial(picks, config.graph_taps) if config.graph_taps else None,
            folds=device.type == "cpu" and "inductor" in _compiled_how(self._runner.vllm_config)["backend"],
        )  # fmt: skip
        self._unfit, self._names = made.unfit, seen.names
        placed = Placed(made, asked, device)
        if ring:
            session.sink.reserve(ring)
        self._placed, self._drain = placed, GraphDrain(session, placed)
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

    # --- steps -------------------------------------------------------------------------------------------------

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
            if self._drain is not None:
                self._drain.aim(rows)
        except Exception as error:
            self._drain = None
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
                session.record(session.state, ROOT_TAP, cls, role, 0, tensor, LANGUAGE)

    def computed(self) -> None:
        """The forward of a step has returned; a second call of the same step does nothing."""
        self._safely(GraphDrain.take)

    def end_step(self) -> None:
        """What is computed now is of no step."""
        self._safely(GraphDrain.rest)

    def why(self, tap: str, otherwise: str) -> str:
        """Why nothing was captured at ``tap``."""
        return self._unfit.get(tap) or self._unfit.get(self._names.get(tap, tap), otherwise)

    def end(self) -> None:
        """Taps copy nothing any more, and are taken off; what they left out is counted."""
        self.end_step()
        placed, self._placed, self._drain = self._placed, None, None
        if placed is not None:
            placed.remove()
            for (path, role), why in placed.plan.partly.items():
                if path in self._session.fired:
                    self._session.sink.skip(path, why, role)

    def close(self) -> None:
        """The forwards are as they were; what stands around the root's is gone already."""
        self._forwards.close()

    def _safely(self, what: Callable[[GraphDrain], None]) -> None:
        if self._drain is None:
            return
        try:
            what(self._drain)
        except Exception as error:
            self._drain = None
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
