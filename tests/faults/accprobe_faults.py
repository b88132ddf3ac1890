"""A vLLM plugin that plants one numerical fault, named by ``ACCPROBE_FAULT``, in the model that was just loaded.

The problem: to show that the probe names the right operator, an operator of a real, running vLLM must be wrong in a
known way. The idea: this directory is a distribution of its own (the dist-info beside this file); put it on PYTHONPATH
and vLLM calls ``register`` in every process. It patches ``BaseModelLoader.load_model``, so that the fault is in the
model before a probe attaches its taps (which happens when the runner's own ``load_model`` returns): the probe sees
the faulty module just as it would see a bad kernel. Most faults wrap ``forward`` on the module INSTANCE, which works
for classes whose ``__call__`` bypasses hooks, too, and leaves inputs and weights as they are: only outputs are wrong.

``ACCPROBE_FAULT`` is JSON: ``{"kind": ..., "module": ..., ...}``, see ``Fault``. Example::

    {"kind": "scale", "module": "model.layers.2.mlp.down_proj", "factor": 1.05, "rows": "position>=40"}

Rows: ``all``; ``prefill`` and ``decode`` (a request that has one row in this step is decoding; so is, wrongly, the last
chunk of a prompt when it is one token long); ``position:7``; ``position>=7``. Row → request comes from the forward
context's query_start_loc, row → position from the root forward's ``positions`` (their first line for M-RoPE).
Not here: faults inside compiled graphs, and sampler faults for the V2 runner.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

ENV = "ACCPROBE_FAULT"


@dataclass(frozen=True)
class Fault:
    """kind:
      ``scale``    output times ``factor``        ``add``   output plus ``factor``
      ``zero``     output is 0                    ``nan``   output is NaN
      ``eps``      a norm's eps becomes ``factor``
      ``rope``     a rotary embedding turns by positions that are ``factor`` times too large (rounded down)
      ``attn``     an attention's softmax scale times ``factor``
      ``expert``   output of a MoE block times ``factor`` for the rows routed to ``expert`` (weights are intact)
      ``weight``   parameter ``param`` (default weight) times ``factor``, only rows ``features`` if given
      ``head``     logits of the tokens ``features`` plus ``factor`` (the lm_head's product; its weights are intact)
      ``sampler``  each sampled token is the next one in the vocabulary (V1 runner; ``module`` is ignored)
    rows: which rows of the output (scale, add, zero, nan, head). features: which columns; empty means all.
    module: path as in ``model.named_modules()``. rank: the tensor-parallel rank that is broken, or None for all.
    """

    kind: str
    module: str = ""
    factor: float = 1.05
    rows: str = "all"
    features: tuple[int, ...] = ()
    expert: int = 0
    param: str = "weight"
    rank: int | None = None


KINDS = ("scale", "add", "zero", "nan", "eps", "rope", "attn", "expert", "weight", "head", "sampler")


def parse(text: str) -> Fault:
    """Raises ValueError with one line for anything that is not a fault."""
    try:
        spec = json.loads(text)
    except json.JSONDecodeError as e:
        raise ValueError(f"{ENV} is not JSON: {e}") from None
    names = {f.name for f in fields(Fault)}
    if not isinstance(spec, dict) or not set(spec) <= names or spec.get("kind") not in KINDS:
        raise ValueError(f"{ENV}: expected an object with fields {sorted(names)}, kind one of {KINDS}, got {text}")
    return Fault(**(spec | {"features": tuple(spec.get("features", ()))}))


def register() -> None:
    """Entry point of the plugin group vllm.general_plugins. Without ``ACCPROBE_FAULT`` at load time nothing happens."""
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.v1.sample.sampler import Sampler

    if getattr(BaseModelLoader.load_model, "_accprobe_faults", False):
        return
    load, greedy = BaseModelLoader.load_model, Sampler.greedy_sample
    shift = [0]  # the sampler belongs to the runner, not to the model: the last loaded model's fault decides

    @functools.wraps(load)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = load(self, *args, **kwargs)
        text = os.environ.get(ENV)
        fault = parse(text) if text else None
        shift[0] = int(fault is not None and fault.kind == "sampler")
        if fault is not None and (fault.rank is None or fault.rank == _tp_rank()):
            plant(model, fault)
            print(f"accprobe_faults: planted {text}", file=sys.stderr, flush=True)
        return model

    def greedy_sample(logits: Any) -> Any:
        return (greedy(logits) + shift[0]) % logits.shape[-1]

    load_model._accprobe_faults = True  # type: ignore[attr-defined]
    BaseModelLoader.load_model = load_model  # type: ignore[method-assign]
    Sampler.greedy_sample = staticmethod(greedy_sample)  # type: ignore[method-assign]


def plant(model: Any, fault: Fault) -> None:
    """Plant ``fault`` in a loaded model (an nn.Module), in place. Raises ValueError when there is no such module."""
    if fault.kind == "sampler":
        return
    modules = dict(model.named_modules())
    if fault.module not in modules:
        near = [name for name in modules if name.rsplit(".", 1)[-1] == fault.module.rsplit(".", 1)[-1]][:5]
        raise ValueError(f"{ENV}: the model has no module {fault.module!r}; similar: {near or list(modules)[:10]}")
    module = modules[fault.module]
    if fault.kind == "eps":
        module.variance_epsilon = fault.factor
    elif fault.kind == "attn":
        module.impl.scale *= fault.factor
    elif fault.kind == "weight":
        weight = module.get_parameter(fault.param).data
        rows = list(fault.features) or slice(None)
        weight[rows] *= fault.factor
    elif fault.kind == "rope":
        _wrap_forward(module, functools.partial(_turn_too_far, factor=fault.factor))
    elif fault.kind == "expert":
        _wrap_forward(module, functools.partial(_one_expert, fault=fault, top_k=_top_k(module)))
    elif fault.kind == "head":
        apply, rows = module.quant_method.apply, _Rows(model, fault.rows)
        module.quant_method.apply = lambda *a, **k: _spoil(apply(*a, **k), fault, rows)
    else:
        rows = _Rows(model, fault.rows)
        _wrap_forward(module, lambda forward, *a, **k: _first(forward(*a, **k), lambda t: _spoil(t, fault, rows)))


class _Rows:
    """Chooses the rows of a tensor by the positions that the model is running now."""

    def __init__(self, model: Any, condition: str) -> None:
        self.condition = condition
        self.positions: Any = None
        if condition in ("all", "prefill", "decode"):
            self.compare: Callable[[Any], Any] | None = None
        elif condition.startswith("position>="):
            first = int(condition[len("position>=") :])
            self.compare = lambda p: p >= first
        elif condition.startswith("position:"):
            only = int(condition[len("position:") :])
            self.compare = lambda p: p == only
        else:
            raise ValueError(f"{ENV}: rows {condition!r} is none of all, prefill, decode, position:N, position>=N")
        if condition != "all":
            _wrap_forward(model, self._note_positions)

    def _note_positions(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        positions = kwargs.get("positions", args[1] if len(args) > 1 else None)
        self.positions = positions[0] if positions.dim() == 2 else positions
        return forward(*args, **kwargs)

    def mask(self, rows: int) -> Any:
        """Boolean tensor of ``rows`` entries. Fewer rows than tokens: the last row of each request (the logits)."""
        import torch

        if self.condition == "all":
            return torch.ones(rows, dtype=torch.bool)
        starts = _query_starts()
        if starts is None:  # a profile run
            return torch.zeros(rows, dtype=torch.bool)
        lengths = starts.diff()
        if self.compare is not None:
            mask = self.compare(self.positions)
        else:
            decode = torch.repeat_interleave(lengths == 1, lengths)
            mask = decode if self.condition == "decode" else ~decode
        mask = torch.nn.functional.pad(mask, (0, max(0, rows - len(mask))))
        return mask[starts[1:].long() - 1] if rows == len(lengths) and rows != len(self.positions) else mask[:rows]


def _query_starts() -> Any:
    from vllm.forward_context import get_forward_context, is_forward_context_available

    if not is_forward_context_available():  # the logits are computed after the forward
        return _query_starts.last  # type: ignore[attr-defined]
    metadata = get_forward_context().attn_metadata
    entries = list(metadata.values()) if isinstance(metadata, dict) else [metadata]
    _query_starts.last = entries[0].query_start_loc if entries and entries[0] is not None else None  # type: ignore
    return _query_starts.last  # type: ignore[attr-defined]


_query_starts.last = None  # type: ignore[attr-defined]


def _wrap_forward(module: Any, around: Callable[..., Any]) -> None:
    forward = module.forward

    @functools.wraps(forward)  # the signature stays readable: probes name inputs by it
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(forward, *args, **kwargs)

    module.forward = wrapped


def _first(output: Any, change: Callable[[Any], Any]) -> Any:
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


def _spoil(tensor: Any, fault: Fault, rows: _Rows) -> Any:
    import torch

    mask = rows.mask(tensor.shape[0]).to(tensor.device).view(-1, *[1] * (tensor.dim() - 1))
    if fault.features:
        columns = torch.zeros(tensor.shape[-1], dtype=torch.bool, device=tensor.device)
        columns[list(fault.features)] = True
        mask = mask & columns
    changed = {
        "scale": lambda t: t * fault.factor,
        "add": lambda t: t + fault.factor,
        "head": lambda t: t + fault.factor,
        "zero": torch.zeros_like,
        "nan": lambda t: torch.full_like(t, float("nan")),
    }[fault.kind](tensor)
    return torch.where(mask, changed, tensor)


def _turn_too_far(forward: Callable[..., Any], positions: Any, *args: Any, factor: float, **kwargs: Any) -> Any:
    return forward((positions * factor).to(positions.dtype), *args, **kwargs)


def _top_k(module: Any) -> int:
    """The experts per token of a MoE block, whose attribute's place differs between vLLM versions."""
    for candidate in (module, *module.modules()):
        for owner in (candidate, getattr(candidate, "moe_config", None), getattr(candidate, "router", None)):
            for name in ("top_k", "experts_per_token"):
                if isinstance(getattr(owner, name, None), int):
                    return getattr(owner, name)
    raise ValueError(f"{ENV}: kind expert needs a MoE module, {type(module).__name__} has no top_k")


def _one_expert(forward: Callable[..., Any], *args: Any, fault: Fault, top_k: int, **kwargs: Any) -> Any:
    import torch

    logits = kwargs.get("router_logits", args[1] if len(args) > 1 else None)
    mask = (logits.topk(top_k, dim=-1).indices == fault.expert).any(dim=-1)
    output = forward(*args, **kwargs)
    return _first(output, lambda t: torch.where(mask.unsqueeze(-1), t * fault.factor, t))


def _tp_rank() -> int:
    from vllm.distributed import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())
