"""Taps inside a compiled engine: where capture/graphs meets vLLM.

The problem: taps must stand before vLLM compiles and profiles its memory, with the shapes that a forward has, and then
hear when a forward of a step begins and ends. The idea: when the model is loaded, vLLM's own dummy batch runs once with
compiling switched off, which says what every module gives back; the taps are placed, their key goes into vLLM's compile
key; the root's forward, which is Python around the compiled part, aims the taps and drains them. Whatever fails here
leaves the engine as it is without taps. Not here: the taps (capture/graphs), which engines compile (eager.py).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_accprobe.capture.core.say import say
from vllm_accprobe.capture.core.session import Session
from vllm_accprobe.capture.graphs.drain import GraphDrain
from vllm_accprobe.capture.graphs.placement import FULL, Placed, plan
from vllm_accprobe.capture.graphs.sightings import Sightings, watching
from vllm_accprobe.capture.taps.selection import chooses
from vllm_accprobe.capture.vllm.eager import compiled_modules
from vllm_accprobe.config import TAP_SET
from vllm_accprobe.dump.schema import ROOT_TAP, RUN_JSON

_TOKENS = 11
"""Of the dummy batch: few, and no size of a model's features."""
_WHERE = "taps in compiled graphs"


class InGraphs:
    """The taps of one engine that compiles. ``around`` the root before other taps, ``place`` before it compiles.

    Until taps are placed, and where they cannot be, every method does nothing.
    """

    def __init__(self, session: Session, runner: Any, model: torch.nn.Module, parallel: dict[str, Any]):
        self._session = session
        self._runner = runner
        self._model = model
        self._parallel = parallel
        self._unfit: dict[str, str] = {}
        self._placed: Placed | None = None
        self._drain: GraphDrain | None = None
        self._undo: Callable[[], None] = lambda: None
        os.environ[TAP_SET] = ""

    # --- before the engine compiles ----------------------------------------------------------------------------

    def around(self) -> None:
        """Wraps the root's forward: inside the tap of the root, whose output then comes after those of its parts."""
        original = self._model.forward

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._drain is None or self._session.state is None:
                return original(*args, **kwargs)
            self._safely(lambda drain: drain.aim(_rows(args, kwargs)))
            result = original(*args, **kwargs)
            self.computed()
            return result

        before = self._model.__dict__.get("forward")
        self._model.__dict__["forward"] = forward

        def undo() -> None:
            if before is None:
                self._model.__dict__.pop("forward", None)
            else:
                self._model.__dict__["forward"] = before

        self._undo = undo

    def place(self, root: Path) -> None:
        """Places taps, and says so, also in the run.json of the dump at ``root``. Never raises."""
        try:
            self._place(root)
        except Exception as error:
            self._session.sink.error(_WHERE, f"{type(error).__name__}: {error}", None)
            say(f"no taps in compiled graphs ({type(error).__name__}: {error}): modules inside them are not seen")

    def _place(self, root: Path) -> None:
        session, config = self._session, self._session.config
        why = self._refusal()
        if why:
            session.sink.skip(ROOT_TAP, why)
            say(f"{why}: modules inside compiled graphs are not seen")
            return
        asked = functools.partial(chooses, config)
        rows = int(self._runner.vllm_config.scheduler_config.max_num_batched_tokens)
        seen = self._look()
        made = plan(seen, asked if config.modules else lambda path, cls: False, rows, config.graph_mb * 10**6)
        self._unfit = made.unfit
        placed = Placed(made, asked, torch.device(getattr(self._runner, "device", "cpu")))
        self._placed, self._drain = placed, GraphDrain(session, placed)
        os.environ[TAP_SET] = made.key
        _amend(root, {**_compiled_how(self._runner.vllm_config), **made.facts(), "chosen": len(placed.chosen)})
        say(
            f"{len(made.placed)} taps in compiled graphs (the {made.kind} set; {made.rows} rows, "
            f"{made.nbytes / 1e6:.0f} MB), {len(placed.chosen)} of them chosen"
            + ("; so many may change what the compiler makes of the model" if made.kind == FULL else "")
        )

    def _refusal(self) -> str:
        config = self._session.config
        if not config.graph_mb:
            return "no taps in compiled graphs: VLLM_ACCPROBE_GRAPH_MB=0"
        if not config.capture_outputs:
            return "no taps in compiled graphs: they take outputs, and VLLM_ACCPROBE_PARTS does not"
        if config.ranks and self._parallel["world_size"] > 1:
            # The dummy batch talks to the other ranks, which would not answer.
            return "no taps in compiled graphs: they need all ranks, and VLLM_ACCPROBE_RANKS leaves some out"
        if not hasattr(self._runner, "_dummy_run"):
            return f"no taps in compiled graphs: {type(self._runner).__name__} has no _dummy_run"
        return ""

    def _look(self) -> Sightings:
        """One dummy batch, not compiled."""
        regions = compiled_modules(self._model)
        run = self._runner._dummy_run
        known = inspect.signature(run).parameters
        options = {"is_profile": True, "skip_eplb": True, "skip_attn": True}
        rows = min(_TOKENS, int(self._runner.vllm_config.scheduler_config.max_num_batched_tokens))
        drafts = [getattr(getattr(self._runner, name, None), "model", None) for name in ("drafter", "speculator")]
        with _uncompiled([self._model, *drafts]), watching(self._model, regions) as seen:
            run(rows, **{name: value for name, value in options.items() if name in known})
        return seen

    @property
    def placed(self) -> bool:
        """Whether there are taps."""
        return self._placed is not None and bool(self._placed.plan.placed)

    # --- steps -------------------------------------------------------------------------------------------------

    def computed(self) -> None:
        """The forward of a step has returned; a second call of the same step does nothing."""
        self._safely(GraphDrain.take)

    def end_step(self) -> None:
        """What is computed now is of no step."""
        self._safely(GraphDrain.rest)

    def why(self, tap: str, otherwise: str) -> str:
        """Why nothing was captured at ``tap``."""
        return self._unfit.get(tap, otherwise)

    def close(self) -> None:
        """Taps copy nothing any more; the taps that stand outside of this one's root are gone already."""
        self.end_step()
        self._undo()
        if self._placed is not None:
            self._placed.remove()
        self._drain = None

    def _safely(self, what: Callable[[GraphDrain], None]) -> None:
        if self._drain is None:
            return
        try:
            what(self._drain)
        except Exception as error:
            self._drain = None
            self._session.fail(_WHERE, error)


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


def _rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many rows the model is about to compute, padding included: those of its first tensor."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.dim():
            return int(value.shape[-1] if value.dtype in (torch.int32, torch.int64) else value.shape[0])
    return 0


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


def _amend(root: Path, graphs: dict[str, Any]) -> None:
    """run.json was written when the first weights came; what is known only now is added in one piece."""
    path = root / RUN_JSON
    run = json.loads(path.read_text(encoding="utf-8"))
    run.setdefault("engine", {})["graphs"] = graphs
    temporary = root / f".{RUN_JSON}.{os.getpid()}"
    with os.fdopen(os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "w") as file:
        file.write(json.dumps(run, indent=1) + "\n")
    os.replace(temporary, path)
