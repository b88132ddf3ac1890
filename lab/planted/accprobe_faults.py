"""A vLLM plugin that plants numerical faults, named by ``ACCPROBE_FAULT``, in the model that is being loaded.

The problem: to show that the probe names the right operator, an operator of a real, running vLLM must be wrong in a
known way. The idea: this directory is a distribution of its own (the dist-info beside this file); put it on PYTHONPATH
and vLLM calls ``register`` in every process. It patches the model loader, so that the fault is in the model before a
probe attaches its taps (which happens when the runner's own ``load_model`` returns): the probe sees the faulty module
just as it would see a bad kernel. Most faults wrap ``forward`` on the module INSTANCE, which works for classes whose
``__call__`` bypasses hooks, too, and leaves inputs and weights as they are: only outputs are wrong.

``ACCPROBE_FAULT`` is a JSON object, or a list of them, see ``Fault``. Example::

    {"kind": "scale", "module": "model.layers.2.mlp.down_proj", "factor": 1.05, "rows": "position>=40"}

Not here: the kinds (accprobe_fault_kinds.py, accprobe_cause_kinds.py, accprobe_state_kinds.py); row conditions
(accprobe_fault_rows.py); engines' conditions (accprobe_fault_when.py); faults inside compiled graphs; sampler faults
for the V2 runner.
"""

import functools
import json
import os
import sys
from dataclasses import dataclass, fields
from typing import Any

from accprobe_cause_kinds import CAUSE_KINDS, EXPERT_WEIGHTS
from accprobe_fault_kinds import EARLY, KINDS as ONE_KIND, Site
from accprobe_fault_rows import ENGINE
from accprobe_fault_when import holds
from accprobe_state_kinds import recurrence_as

ENV = "ACCPROBE_FAULT"
SAMPLER = "sampler"
MODULE_KINDS = {**ONE_KIND, **CAUSE_KINDS, recurrence_as.__name__: recurrence_as}
KINDS = (*MODULE_KINDS, SAMPLER)


@dataclass(frozen=True)
class Fault:
    """kind: a function of one of the files of kinds, or ``sampler`` (each sampled token is the
    next one in the vocabulary; V1 runner; ``module`` is ignored).
    module: path as in ``model.named_modules()``. factor: the kind's number. rows: see accprobe_fault_rows.py.
    features: which columns of the output (or rows of a parameter); empty means all. output: which of several outputs.
    expert, param: for the kinds that speak of them. rank: the tensor-parallel rank that is broken, or None for all.
    when: in which engines it is there, see accprobe_fault_when.py.
    """

    kind: str
    module: str = ""
    factor: float = 1.05
    rows: str = "all"
    features: tuple[int, ...] = ()
    output: int = 0
    expert: int = 0
    param: str = "weight"
    rank: int | None = None
    when: str = "always"


def parse(text: str) -> list[Fault]:
    """Raises ValueError with one line for anything that is not a fault or a list of faults."""
    try:
        specs = json.loads(text)
    except json.JSONDecodeError as e:
        raise ValueError(f"{ENV} is not JSON: {e}") from None
    names = {f.name for f in fields(Fault)}
    specs = specs if isinstance(specs, list) and specs else [specs]
    for spec in specs:
        if not isinstance(spec, dict) or not set(spec) <= names or spec.get("kind") not in KINDS:
            raise ValueError(f"{ENV}: expected an object with fields {sorted(names)}, kind one of {KINDS}, got {text}")
    return [Fault(**(spec | {"features": tuple(spec.get("features", ()))})) for spec in specs]


def register() -> None:
    """Entry point of the plugin group vllm.general_plugins. Without ``ACCPROBE_FAULT`` at load time nothing happens."""
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.model_loader import base_loader
    from vllm.v1.sample.sampler import Sampler

    if any(word in os.environ.get(ENV, "") for word in ("hit", "chunk")):
        ENGINE.watch()  # before accprobe binds the runner's methods, which it does in a forced server
    loader = base_loader.BaseModelLoader
    if getattr(loader.load_model, "_accprobe_faults", False):
        return
    load, process, greedy = loader.load_model, base_loader.process_weights_after_loading, Sampler.greedy_sample
    shift = [0]  # the sampler belongs to the runner, not to the model: the last loaded model's fault decides
    planting: list[Planting] = []

    @functools.wraps(load)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Rotary embeddings are shared through this table by all models of a process, faulty ones too.
        getattr(rotary_embedding, "_ROPE_DICT", {}).clear()
        text = os.environ.get(ENV)
        config = kwargs.get("vllm_config", args[0] if args else None)
        faults = [f for f in (parse(text) if text else []) if holds(f.when, config)]
        shift[0] = int(any(f.kind == SAMPLER for f in faults))
        here = Planting([f for f in faults if f.kind != SAMPLER and (f.rank is None or f.rank == _tp_rank())])
        planting.append(here)
        try:
            model = load(self, *args, **kwargs)
        finally:
            planting.pop()
        here.late(model)
        if any("hit" in f.rows or "chunk" in f.rows for f in faults):
            ENGINE.watch()
        if faults:
            print(f"accprobe_faults: planted {text}", file=sys.stderr, flush=True)
        return model

    @functools.wraps(process)
    def process_weights(model: Any, *args: Any, **kwargs: Any) -> Any:
        if planting:
            planting[-1].early(model)
        return process(model, *args, **kwargs)

    def greedy_sample(logits: Any) -> Any:
        return (greedy(logits) + shift[0]) % logits.shape[-1]

    load_model._accprobe_faults = True  # type: ignore[attr-defined]
    loader.load_model = load_model  # type: ignore[method-assign]
    base_loader.process_weights_after_loading = process_weights
    Sampler.greedy_sample = staticmethod(greedy_sample)  # type: ignore[method-assign]


class Planting:
    """Faults on their way into one model: ``early`` when its weights are loaded, ``late`` when it is finished."""

    def __init__(self, faults: list[Fault]) -> None:
        self.faults = faults
        self.weights: dict[str, Any] = {}

    def early(self, model: Any) -> None:
        for fault in self.faults:
            module = find(model, fault.module)
            if fault.kind in EARLY:
                MODULE_KINDS[fault.kind](Site(model, module, fault))
            loaded = getattr(module, "weight", None)
            if loaded is not None:
                self.weights[fault.module] = loaded.detach().clone()
            elif fault.kind == "experts_as":
                owner = find(model, fault.module.rpartition(".")[0])
                self.weights[fault.module] = {n: getattr(owner, n).detach().clone() for n in EXPERT_WEIGHTS}

    def late(self, model: Any) -> None:
        for fault in self.faults:
            if fault.kind not in EARLY:
                site = Site(model, find(model, fault.module), fault, self.weights.get(fault.module))
                MODULE_KINDS[fault.kind](site)


def plant(model: Any, *faults: Fault) -> None:
    """Plant ``faults`` in a loaded model (an nn.Module), in place. Raises ValueError when there is no such module."""
    planting = Planting([f for f in faults if f.kind != SAMPLER])
    planting.early(model)
    planting.late(model)


def find(model: Any, path: str) -> Any:
    modules = dict(model.named_modules(remove_duplicate=False))
    if path not in modules:
        near = [name for name in modules if name.rsplit(".", 1)[-1] == path.rsplit(".", 1)[-1]][:5]
        raise ValueError(f"{ENV}: the model has no module {path!r}; similar: {near or list(modules)[:10]}")
    return modules[path]


def _tp_rank() -> int:
    from vllm.distributed import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())
