"""The kinds of faults: what exactly each does to a loaded model. To add one, write a function and name it in ``KINDS``.

The problem: real faults are of many sorts (a wrong constant, a short reduction, a stale row, a bad cache slot), and
each leaves another trace. The idea: a kind is one function of a `Site`, which knows the model, the module, the weight
as it was loaded (vLLM's CPU build repacks weights and throws the originals away), and the rows to spoil. Kinds that
change weights run before vLLM repacks them (``EARLY``), the others on the finished model.

Most kinds change outputs and leave weights as they are, as a bad kernel does.
Not here: how the plugin gets into vLLM (accprobe_faults.py); which rows (accprobe_fault_rows.py).
"""

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from accprobe_fault_rows import Rows, wrap_forward

SEED = 1234
"""Of all made-up perturbations: two runs with the same fault plant the same numbers."""


@dataclass(frozen=True)
class Site:
    """Where a fault goes. fault: accprobe_faults.Fault. weight: the module's loaded weight, before any repacking."""

    model: Any
    module: Any
    fault: Any
    weight: Any = None

    def rows(self) -> Rows:
        return Rows(self.model, self.fault.rows)

    def spoil_output(self, change: Callable[..., Any]) -> None:
        """Replaces the chosen rows and features of output ``fault.output`` by ``change(output, *inputs)``."""
        rows, which = self.rows(), self.fault.output

        def around(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            inputs = [*args, *kwargs.values()]
            if not isinstance(output, tuple):
                return self.pick(output, change(output, *inputs), rows)
            changed = self.pick(output[which], change(output[which], *inputs), rows)
            return (*output[:which], changed, *output[which + 1 :])

        wrap_forward(self.module, around)

    def pick(self, old: Any, new: Any, rows: Rows) -> Any:
        """``new`` in the chosen rows and features, ``old`` elsewhere; in the dtype of ``old``."""
        import torch

        if not rows.tests and not self.fault.features:  # no mask from the host, which a captured graph could not take
            return new.to(old.dtype)
        mask = rows.mask(old.shape[0]).to(old.device).view(-1, *[1] * (old.dim() - 1))
        if self.fault.features:
            columns = torch.zeros(old.shape[-1], dtype=torch.bool, device=old.device)
            columns[list(self.fault.features)] = True
            mask = mask & columns
        return torch.where(mask, new.to(old.dtype), old)

    def noise(self, shape: Any, std: float) -> Any:
        import torch

        return torch.randn(shape, generator=torch.Generator().manual_seed(SEED), dtype=torch.float32) * std


# --- outputs ---------------------------------------------------------------------------------------------------------


def scale(site: Site) -> None:
    """Output times ``factor``."""
    site.spoil_output(lambda t, *_: t * site.fault.factor)


def add(site: Site) -> None:
    """Output plus ``factor``."""
    site.spoil_output(lambda t, *_: t + site.fault.factor)


def jitter(site: Site) -> None:
    """Each element of the output times 1 + ``factor`` * n, n normal (fixed seed, the same in all calls of a shape)."""
    site.spoil_output(lambda t, *_: t.float() * (1 + site.noise(t.shape, site.fault.factor)))


def zero(site: Site) -> None:
    """Output is 0."""
    site.spoil_output(lambda t, *_: t * 0)


def nan(site: Site) -> None:
    """Output is NaN."""
    site.spoil_output(lambda t, *_: t * float("nan"))


def coarse(site: Site) -> None:
    """Output rounded to ``factor`` bits of mantissa (bfloat16 has 8, the leading one counted), as by a lower dtype."""
    site.spoil_output(lambda t, *_: _rounded(t, site.fault.factor))


def _rounded(t: Any, bits: float) -> Any:
    """``t`` in float32, with so many bits of mantissa."""
    import torch

    mantissa, exponent = torch.frexp(t.float())
    steps = 2.0 ** int(bits)
    return torch.ldexp(torch.round(mantissa * steps) / steps, exponent)


def stale(site: Site) -> None:
    """A chosen row holds the output of the row before it in the batch."""
    site.spoil_output(lambda t, *_: t.roll(1, 0))


def logits(site: Site) -> None:
    """Product of the lm_head, tokens ``features``: times ``factor``. The lm_head is used without being called."""
    _wrap_apply(site, lambda t: t * site.fault.factor)


def head(site: Site) -> None:
    """Product of the lm_head, tokens ``features``: plus ``factor``."""
    _wrap_apply(site, lambda t: t + site.fault.factor)


def _wrap_apply(site: Site, change: Callable[[Any], Any]) -> None:
    method, rows = site.module.quant_method, site.rows()
    apply = method.apply

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        old = apply(*args, **kwargs)
        return site.pick(old, change(old), rows)

    method.apply = wrapped


# --- linear layers ---------------------------------------------------------------------------------------------------


def product(site: Site) -> None:
    """Output as if the weight's rows ``features`` were off by ``factor`` standard deviations (normal, fixed seed)."""
    delta = site.noise(site.weight.shape, site.fault.factor * float(site.weight.float().std()))
    site.spoil_output(lambda t, x, *_: t.float() + x.float() @ delta.T)


def short(site: Site) -> None:
    """The reduction stops ``factor`` inputs early."""
    left = int(site.fault.factor)
    tail = site.weight[:, -left:].float()
    site.spoil_output(lambda t, x, *_: t.float() - x.float()[..., -left:] @ tail.T)


def low_sum(site: Site) -> None:
    """Partial sums over blocks of ``factor`` inputs are added up in the output's dtype instead of float32."""
    weight, block = site.weight.float(), int(site.fault.factor)
    bias = getattr(site.module, "bias", None)

    def summed(t: Any, x: Any, *_: Any) -> Any:
        total = t * 0 if bias is None else (t * 0 + bias.float()).to(t.dtype)
        for k in range(0, weight.shape[1], block):
            total = (total.float() + x.float()[..., k : k + block] @ weight[:, k : k + block].T).to(t.dtype)
        return total

    site.spoil_output(summed)


def coarse_input(site: Site) -> None:
    """The layer computes with inputs of ``factor`` bits of mantissa; what the caller has stays as it is."""
    rows = site.rows()

    def around(forward: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(site.pick(x, _rounded(x, site.fault.factor), rows), *args, **kwargs)

    wrap_forward(site.module, around)


def bias(site: Site) -> None:
    """Output less ``factor`` times the layer's bias (1: it is forgotten)."""
    site.spoil_output(lambda t, *_: t.float() - site.fault.factor * site.module.bias.float())


# --- norms, activations, rotary embeddings ---------------------------------------------------------------------------


def eps(site: Site) -> None:
    """A norm's eps becomes ``factor``."""
    site.module.variance_epsilon = site.fault.factor


def act(site: Site) -> None:
    """silu(a) * b becomes silu(``factor`` * a) * b."""
    import torch

    def changed(t: Any, x: Any, *_: Any) -> Any:
        gate, up = x.float().chunk(2, dim=-1)
        return torch.nn.functional.silu(gate * site.fault.factor) * up

    site.spoil_output(changed)


def coarse_sigmoid(site: Site) -> None:
    """silu(a) * b with a sigmoid that is read from a table of ``factor`` points over -8 to 8, linear between them and
    constant outside."""
    import torch

    last = int(site.fault.factor) - 1
    table = torch.linspace(-8.0, 8.0, last + 1).sigmoid()

    def changed(t: Any, x: Any, *_: Any) -> Any:
        gate, up = x.float().chunk(2, dim=-1)
        at = ((gate + 8) * (last / 16)).clamp(0, last)
        below = at.floor().clamp(max=last - 1).long()
        return gate * torch.lerp(table[below], table[below + 1], at - below) * up

    site.spoil_output(changed)


def low_variance(site: Site) -> None:
    """An RMSNorm adds its squares up in bfloat16, the sums of ``factor`` columns one after another."""
    import torch

    rows, block = site.rows(), int(site.fault.factor)

    def around(forward: Callable[..., Any], x: Any, residual: Any = None, *args: Any, **kwargs: Any) -> Any:
        output = forward(x, residual, *args, **kwargs)
        first, read = output if isinstance(output, tuple) else (output, x)
        parts = read.float().square().unflatten(-1, (-1, block)).sum(-1)
        low = torch.zeros_like(parts[..., 0])
        for part in parts.unbind(-1):
            low = (low + part).bfloat16().float()
        first = site.pick(first, first * (parts.sum(-1) / low).sqrt().unsqueeze(-1), rows)
        return (first, read) if isinstance(output, tuple) else first

    wrap_forward(site.module, around)


def rope(site: Site) -> None:
    """A rotary embedding turns by positions that are ``factor`` times too large (rounded down)."""

    def around(forward: Callable[..., Any], positions: Any, *args: Any, **kwargs: Any) -> Any:
        return forward((positions * site.fault.factor).to(positions.dtype), *args, **kwargs)

    wrap_forward(site.module, around)


def angle(site: Site) -> None:
    """A rotary embedding turns by angles that are ``factor`` times too large; its table is intact between calls."""
    import torch

    table = site.module.cos_sin_cache
    cos, sin = table.float().chunk(2, dim=-1)
    per_position = torch.atan2(sin[1], cos[1])  # the angle at position 1 is the frequency
    more = torch.arange(len(table)).unsqueeze(1) * per_position * (site.fault.factor - 1)
    wrong = torch.cat([cos * more.cos() - sin * more.sin(), sin * more.cos() + cos * more.sin()], -1)
    _with_table(site, wrong.to(table.dtype))


def coarse_table(site: Site) -> None:
    """A rotary embedding reads a table of ``factor`` bits of mantissa; the one that it has is intact between calls."""
    table = site.module.cos_sin_cache
    _with_table(site, _rounded(table, site.fault.factor).to(table.dtype))


def _with_table(site: Site, wrong: Any) -> None:
    module, table = site.module, site.module.cos_sin_cache

    def around(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        module.cos_sin_cache = wrong
        try:
            return forward(*args, **kwargs)
        finally:
            module.cos_sin_cache = table

    wrap_forward(module, around)


# --- attention -------------------------------------------------------------------------------------------------------


def attn(site: Site) -> None:
    """An attention's softmax scale times ``factor``."""
    owner = getattr(site.module, "impl", site.module)
    owner.scale *= site.fault.factor


def kernel_scale(site: Site) -> None:
    """An attention's kernel takes a softmax scale ``factor`` times the layer's, whose attribute stays as it is."""
    impl, rows = site.module.impl, site.rows()
    forward = impl.forward

    def wrapped(layer: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(layer, site.pick(query, query * site.fault.factor, rows), *args, **kwargs)

    impl.forward = wrapped


def cache(site: Site) -> None:
    """Keys and values (MLA: the latent) of the chosen rows go into the KV cache times ``factor``.

    Attention reads all keys and values from the cache, those of the running step too.
    """
    _on_their_way(site, lambda t: t * site.fault.factor, 2)


def coarse_values(site: Site) -> None:
    """Values of the chosen rows go into the KV cache as whole numbers up to ``factor`` (127: int8), with a scale for
    each row and head."""

    def codes(t: Any) -> Any:
        step = t.float().abs().amax(-1, keepdim=True).clamp(min=1e-30) / site.fault.factor
        return (t / step).round() * step

    _on_their_way(site, codes, 1)


def _on_their_way(site: Site, change: Callable[[Any], Any], n: int) -> None:
    """Changes the chosen rows of the last ``n`` of keys and values before they are written to the cache."""
    impl, rows = site.module.impl, site.rows()
    update = impl.do_kv_cache_update
    names = list(inspect.signature(update).parameters)
    end = 2 if names[0] in ("kv_c_normed",) else 3  # after the layer, where there is one

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            args = inspect.signature(update).bind(*args, **kwargs).args
        changed = [site.pick(t, change(t), rows) for t in args[end - n : end]]
        return update(*args[: end - n], *changed, *args[end:])

    impl.do_kv_cache_update = wrapped


def slot(site: Site) -> None:
    """Keys and values of the chosen rows go into the KV cache ``factor`` slots further on."""
    impl, rows = site.module.impl, site.rows()
    update = impl.do_kv_cache_update
    signature = inspect.signature(update)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        slots = bound.arguments["slot_mapping"]
        bound.arguments["slot_mapping"] = slots + int(site.fault.factor) * rows.mask(len(slots)).to(slots)
        return update(*bound.args, **bound.kwargs)

    impl.do_kv_cache_update = wrapped


def block(site: Site) -> None:
    """Block number ``factor`` of the KV cache is 0 whenever it was written to."""
    impl = site.module.impl
    update = impl.do_kv_cache_update
    signature = inspect.signature(update)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = update(*args, **kwargs)
        signature.bind(*args, **kwargs).arguments["kv_cache"][int(site.fault.factor)] = 0
        return result

    impl.do_kv_cache_update = wrapped


# --- experts ---------------------------------------------------------------------------------------------------------


def expert(site: Site) -> None:
    """Output of a MoE block times ``factor`` for the rows routed to ``expert`` (weights are intact).

    module: one that takes ``router_logits`` or ``topk_ids``.
    """
    import torch

    fault, forward = site.fault, site.module.forward
    signature = inspect.signature(forward)

    def around(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = {**signature.bind(*args, **kwargs).arguments, **kwargs}  # vLLM's CustomOp.forward takes **kwargs
        ids = given["topk_ids"] if "topk_ids" in given else given["router_logits"].topk(_top_k(site.module)).indices
        mask = (ids == fault.expert).any(dim=-1, keepdim=True)
        output = forward(*args, **kwargs)
        if isinstance(output, tuple):
            return (torch.where(mask, output[0] * fault.factor, output[0]), *output[1:])
        return torch.where(mask, output * fault.factor, output)

    wrap_forward(site.module, around)


def route(site: Site) -> None:
    """A router sends the chosen rows to experts whose numbers are ``factor`` too large (beyond the last: from 0 on),
    with the weights of the right ones.

    module: one whose ``router`` chooses by ``router_logits``."""
    rows, select = site.rows(), site.module.router.select_experts

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        weights, ids = select(*args, **kwargs)
        logits = inspect.signature(select).bind(*args, **kwargs).arguments["router_logits"]
        return weights, site.pick(ids, (ids + int(site.fault.factor)) % logits.shape[-1], rows)

    site.module.router.select_experts = wrapped


def _top_k(module: Any) -> int:
    """The experts per token of a MoE block, whose attribute's place differs between vLLM versions."""
    for candidate in (module, *module.modules()):
        for owner in (candidate, getattr(candidate, "moe_config", None), getattr(candidate, "router", None)):
            for name in ("top_k", "experts_per_token"):
                if isinstance(getattr(owner, name, None), int):
                    return getattr(owner, name)
    raise ValueError(f"kind expert needs a MoE module, {type(module).__name__} has no top_k")


# --- weights and constants -------------------------------------------------------------------------------------------


def weight(site: Site) -> None:
    """Parameter ``param`` times ``factor``, only rows ``features`` if given."""
    values = site.module.get_parameter(site.fault.param).data
    values[list(site.fault.features) or slice(None)] *= site.fault.factor


def noise(site: Site) -> None:
    """Parameter ``param`` plus ``factor`` of its standard deviations of normal noise (fixed seed): rows ``features``
    if given; of expert ``expert`` where the parameter has one more dimension than a matrix."""
    values = site.module.get_parameter(site.fault.param).data
    if values.dim() == 3:
        values = values[site.fault.expert]
    rows = list(site.fault.features) or slice(None)
    std = site.fault.factor * float(values.float().std())
    values[rows] += site.noise(values[rows].shape, std).to(values.dtype)


def setting(site: Site) -> None:
    """Attribute ``param`` (dots lead further in) becomes ``factor``, as an int where it was one."""
    *path, name = site.fault.param.split(".")
    owner = site.module
    for step in path:
        owner = getattr(owner, step)
    old = getattr(owner, name)
    setattr(owner, name, type(old)(site.fault.factor) if isinstance(old, (bool, int)) else site.fault.factor)


def given(site: Site) -> None:
    """The part ``param`` of a block receives what the part number ``factor`` did, which is called before it: between
    the parts, where no code of the block shows it."""
    received: list[Any] = []

    def seen(_: Any, args: Any, kwargs: Any) -> None:
        received[:] = [next(iter((*args, *kwargs.values()))).clone()]

    def changed(_: Any, args: Any, kwargs: Any) -> Any:
        first = received[0].reshape((args or tuple(kwargs.values()))[0].shape)
        return ((first, *args[1:]), kwargs) if args else (args, {**kwargs, next(iter(kwargs)): first})

    source = list(site.module._modules.values())[int(site.fault.factor)]
    source.register_forward_pre_hook(seen, with_kwargs=True)
    site.module.get_submodule(site.fault.param).register_forward_pre_hook(changed, with_kwargs=True)


def unnormed_mlp(self: Any, positions: Any, hidden_states: Any, residual: Any) -> Any:
    """The forward of a llama's layer whose MLP gets what the attention gave, and not its norm."""
    if residual is None:
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
    else:
        hidden_states, residual = self.input_layernorm(hidden_states, residual)
    hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)
    _, residual = self.post_attention_layernorm(hidden_states.clone(), residual)
    return self.mlp(hidden_states), residual


def wired(site: Site) -> None:
    """A block whose own code is another, one of this file: ``param``."""
    site.module.forward = types.MethodType(globals()[site.fault.param], site.module)


def placed(site: Site) -> None:
    """Pictures' rows lie ``factor`` rows further among the text's. module: the root, ""."""
    embed = site.module.embed_input_ids

    def wrapped(ids: Any, multimodal_embeddings: Any = None, *, is_multimodal: Any = None) -> Any:
        if is_multimodal is not None and bool(is_multimodal.any()):
            is_multimodal = is_multimodal.roll(int(site.fault.factor))
        return embed(ids, multimodal_embeddings, is_multimodal=is_multimodal)

    site.module.embed_input_ids = wrapped


def pooled(site: Site) -> None:
    """A pooling method pools each request's row ``factor`` rows before the one that is meant."""
    import torch

    def around(forward: Callable[..., Any], states: Any, *args: Any, **kwargs: Any) -> Any:
        shifted = torch.roll(states, int(site.fault.factor), 0)
        return forward(shifted, *args, **kwargs)

    wrap_forward(site.module, around)


def adapted(site: Site) -> None:
    """Adapters add ``factor`` times too much to the layers whose path ends like ``param``. module: the root, ""."""
    from vllm.lora.layers import base_linear

    base = base_linear.BaseLinearLayerWithLoRA
    apply = base._apply_lora_to_output

    def wrapped(self: Any, x: Any, output: Any) -> Any:
        bare = output.clone()
        added = apply(self, x, output)
        here = self.base_layer.prefix.endswith(site.fault.param)
        return bare + (added - bare) * site.fault.factor if here else added

    base._apply_lora_to_output = wrapped


def tapped(site: Site) -> None:
    """Output times ``factor`` where the probe has put a tap into the module: looking changes the result, as an operator
    does that stands in the way of a fusion."""

    def around(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if not hasattr(site.module, "accprobe_tap_0"):
            return output
        first, *rest = output if isinstance(output, tuple) else (output,)
        return (first * site.fault.factor, *rest) if rest else first * site.fault.factor

    wrap_forward(site.module, around)


KINDS: dict[str, Callable[[Site], None]] = {
    f.__name__: f
    for f in (
        *(scale, add, jitter, zero, nan, coarse, stale, logits, head), *(product, short, low_sum, coarse_input, bias),
        *(eps, low_variance, act, coarse_sigmoid, rope, angle, coarse_table),
        *(attn, kernel_scale, cache, coarse_values, slot, block, expert, route), *(weight, noise, setting, tapped),
        *(given, wired, placed, pooled, adapted),
    )
}  # fmt: skip
EARLY = ("weight", "noise")
