"""Faults inside of recurrences: the kernels of one layer's recurrence get other arguments than its code hands them.

The problem: a kernel may be wrong in what no module shows, and a wrong parameter would be found as one. The idea: while
the layer runs, the functions that vLLM calls for its convolution and its recurrence are wrapped, and one argument is
changed: parameters, projections and metadata of all other layers stay right. CPU kernels of vLLM 0.32.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

from accprobe_fault_rows import wrap_forward

Arguments = dict[str, Any]


def _decay(a: Arguments, factor: float) -> None:
    if "A_log" in a:
        a["A_log"] = a["A_log"] + math.log(factor)
    elif "A" in a:
        a["A"] = a["A"] * factor


def _dt(a: Arguments, factor: float) -> None:
    if "dt_bias" in a:
        a["dt_bias"] = a["dt_bias"] * factor


def _beta(a: Arguments, factor: float) -> None:
    """Sigmoid of a large number: the gate that writes into the state is dropped."""
    if "b" in a:
        a["b"] = a["b"] + factor


def _skip(a: Arguments, factor: float) -> None:
    if "D" in a:
        a["D"] = a["D"] * factor


def _begun(a: Arguments, factor: float) -> None:
    """A request that begins finds a state: what an earlier one left, of the size of this layer's own."""
    import torch

    def left(like: Any) -> Any:
        drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float32)
        return (factor * drawn).to(like)

    if "initial_states" in a:  # of Mamba 2
        starts, heads = a["cu_seqlens"], a["x"].shape[1]
        shape = (len(starts) - 1, heads, a["x"].shape[2], a["B"].shape[2])
        known = a["initial_states"]
        known = torch.zeros(shape, dtype=a["state_dtype"]) if known is None else known
        new = ~known.flatten(1).any(1)
        a["initial_states"] = torch.where(new[:, None, None, None], left(known), known)
    elif "initial_state_indices" in a and "initial_state" in a:
        pool, rows = a["initial_state"], a["initial_state_indices"]
        new = rows[~pool[rows].flatten(1).any(1)]
        pool[new] = left(pool[new])


def _other(a: Arguments, factor: float) -> None:
    """While several requests decode, each has its neighbour's row of the states."""
    for name in ("state_batch_indices", "dst_state_batch_indices"):
        if a.get(name) is not None and len(a[name]) > 1:
            a[name] = a[name].roll(1, 0)
    if "initial_state_source" in a and len(a["initial_state_indices"]) > 1:
        a["initial_state_indices"] = a["initial_state_indices"].roll(1, 0)


def _edge(a: Arguments, factor: float) -> None:
    """The convolution of a chunk begins with zeros, as if the request began there."""
    if a.get("has_initial_state") is not None:
        a["has_initial_state"] = a["has_initial_state"] & False


CHANGES: dict[str, Callable[[Arguments, float], None]] = {
    "decay": _decay, "dt": _dt, "beta": _beta, "skip": _skip, "begun": _begun, "other": _other, "edge": _edge,
}  # fmt: skip


def recurrence_as(site: Any) -> None:
    """One argument of the kernels is changed as ``param`` of the fault says; ``factor`` is its number."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.mamba import mamba_mixer2
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    change, inside = CHANGES[site.fault.param], list[bool]()
    kernels = [(mamba_mixer2, name) for name in
               ("mamba_chunk_scan_combined_varlen", "selective_state_update", "causal_conv1d_fn")]
    kernels += [(ops, name) for name in
                ("fused_gdn_gating_cpu", "fused_sigmoid_gating_delta_rule_update_cpu", "chunk_gated_delta_rule_cpu")]
    kernels.append((gdn_attention, "_causal_conv1d_fwd_cpu"))

    def wrapped(kernel: Callable[..., Any]) -> Callable[..., Any]:
        form = inspect.signature(kernel)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not inside:
                return kernel(*args, **kwargs)
            bound = form.bind(*args, **kwargs)
            change(bound.arguments, site.fault.factor)
            return kernel(*bound.args, **bound.kwargs)

        call.__signature__ = form  # type: ignore[attr-defined]
        return call

    for owner, name in kernels:
        setattr(owner, name, wrapped(getattr(owner, name)))

    def during(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        inside.append(True)
        try:
            return forward(*args, **kwargs)
        finally:
            inside.pop()

    wrap_forward(site.module, during)
