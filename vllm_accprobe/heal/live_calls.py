"""A running module's call as opcheck has it of a dump, its reference's value, and that value in the result's place.

The problem: a reference takes a `Call` with parameters, attributes and what other records add; in a server these are
live objects, on a device, changed in place by the call itself. The idea: inputs are copied to the host before the
call; afterwards the same `Call` is made that calls/records.py makes from a dump, the reference computes in float64 on
the host, and its value is rounded once to the output's dtype (`rounded_once`). Where the call wrote its output into an
input, so does healing; elsewhere the result gets a new tensor, since the old one may be what other code still reads.
Experts: what should have been chosen follows from the gate's logits, so that a wrong router is healed too.
Not here: which modules, when, and what is reported (healing.py); keys and values of earlier steps (written_rows.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from vllm_accprobe.capture.taps.hooks import attributes, outputs
from vllm_accprobe.capture.taps.params import own_tensors
from vllm_accprobe.opcheck.reference import Call, Declined, Expected, Params
from vllm_accprobe.opcheck.reference_table import References
from vllm_accprobe.opcheck.references.moe import choosing, route
from vllm_accprobe.opcheck.references.parts import unit_of

Tensor = Any  # a torch.Tensor
QUANT_METHOD, EXPERTS = ".quant_method", ".routed_experts"
_ROOM = 1 << 30
"""Chosen: bytes of parameters whose float64 copies and sizes, 6 times as much of bfloat16, are kept between calls."""


def rounded_once(value: Tensor, dtype: Any) -> Tensor:
    """float64 ``value`` in ``dtype``, to the nearest number, ties to even. torch converts to 16 and 8 bits by way of
    float32, which rounds twice; rounded to odd on the way, the second rounding is the only one that counts [S. Boldo
    and G. Melquiond, IEEE Trans. Computers 57 (2008) 462]."""
    if not dtype.is_floating_point or dtype in (torch.float32, torch.float64):
        return value.to(dtype)
    nearest = value.float()
    back = nearest.double()
    bits = nearest.view(torch.int32) - (back.abs() > value.abs()).int()  # towards zero
    to_odd = (bits | (back != value).int()).view(torch.float32)
    return torch.where(torch.isfinite(nearest), to_odd, nearest).to(dtype)


def host(tensor: Tensor) -> Tensor:
    """A copy in host memory."""
    return tensor.detach().to("cpu", copy=True)


def with_outputs(result: Any, new: Mapping[str, Tensor]) -> Any:
    """``result`` of a forward with these outputs by role. Raises Declined where one lies deeper than in a tuple."""
    if isinstance(result, torch.Tensor):
        return new.get("output.0", result)
    if type(result) not in (tuple, list) or any(role.count(".") > 1 for role in new):
        raise Declined("its result is neither a tensor nor a tuple of tensors")
    return type(result)(new.get(f"output.{place}", item) for place, item in enumerate(result))


@dataclass
class Began:
    """A call before it ran: its inputs by role as they are, and copies of them on the host."""

    live: dict[str, Tensor]
    inputs: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.inputs = {role: host(t) for role, t in self.live.items()}

    def written_into(self, output: Tensor) -> bool:
        """Whether ``output`` is an input, or a part of one, that the call has changed."""
        return any(
            t.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
            and not torch.equal(t.detach().cpu(), self.inputs[role])
            for role, t in self.live.items()
        )


class LiveModules:
    """What calls need of the modules of ``model``. weights: those that were kept before they were packed, by module;
    config: config.json. seen: ``output.0`` of this step by path, of modules that others need."""

    def __init__(self, model: torch.nn.Module, weights: Mapping[Any, Mapping[str, Tensor]], config: Mapping[str, Any]):
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.seen: dict[str, Tensor] = {}
        self._weights, self._config = weights, config
        self._attributes: dict[Any, dict[str, Any]] = {}
        self._params: dict[Any, Params] = {}
        self._usual: dict[str, dict[str, Any]] = {}
        self._room = _ROOM

    def call(self, path: str, cls: str, began: Began, result: Any, **extra: Any) -> Call:
        """A call that has returned ``result``. extra: besides what other modules add."""
        parent, last = path.rpartition(".")[0], self.modules[path]
        return Call(
            path, cls,
            inputs={role.removeprefix("input."): t for role, t in began.inputs.items()},
            params=self._params_of(self.modules[parent] if path.endswith(QUANT_METHOD) else last),
            attrs=self._attrs(last), parent=self._attrs(self.modules[parent]) if path else {},
            config=self._config_of(path), outputs={role: host(t) for role, t in outputs(result)},
            extra={"usual": self._usual_of(cls)} | self._extra(path, cls) | extra,
        )  # fmt: skip

    def routing(self, path: str, weights: Tensor, ids: Tensor, logits: Tensor) -> Call:
        """What a router has chosen for the experts whose kernel is called at ``path``, as a call of that kernel."""
        return Call(
            path, "", inputs={"topk_weights": host(weights), "topk_ids": host(ids)},
            parent=self._attrs(self.modules[path.rpartition(".")[0]]), config=self._config_of(path),
            extra=self._extra(path, "") | {"router_logits": host(logits)},
        )  # fmt: skip

    def _config_of(self, path: str) -> Mapping[str, Any]:
        part = "vision_config" if path.startswith(("visual", "vision", "model.visual")) else "text_config"
        inner = self._config.get(part)
        return {**self._config, **inner} if isinstance(inner, dict) else self._config

    def _attrs(self, module: Any) -> dict[str, Any]:
        if module not in self._attributes:
            self._attributes[module] = attributes(module)
        return self._attributes[module]

    def tensors(self, module: Any) -> dict[str, Tensor]:
        """Its parameters and buffers on the host, as they were loaded."""
        kept = self._weights.get(module)
        return dict(kept) if kept is not None else {name: t.detach().cpu() for name, t in own_tensors(module)}

    def _params_of(self, module: Any) -> Params:
        found = self._params.get(module)
        if found is None:
            found = Params(self.tensors(module))
            size = sum(t.numel() * t.element_size() for t in found.values())
            if size <= self._room:  # else float64 copies are made again for each call
                self._room -= size
                self._params[module] = found
        return found

    def _usual_of(self, cls: str) -> dict[str, Any]:
        """The commonest value of each number among the attributes of a class's modules."""
        if cls not in self._usual:
            values: dict[str, Counter[Any]] = {}
            for module in dict.fromkeys(m for m in self.modules.values() if type(m).__name__ == cls):
                for name, value in self._attrs(module).items():
                    if isinstance(value, (int, float)):
                        values.setdefault(name, Counter())[value] += 1
            self._usual[cls] = {name: c.most_common(1)[0][0] for name, c in values.items()}
        return self._usual[cls]

    def _extra(self, path: str, cls: str) -> dict[str, Any]:
        """As calls/neighbours.Neighbours.extra has it of a dump."""
        if cls == "LogitsProcessor":
            head = self.seen.get(path.rpartition("logits_processor")[0] + "lm_head")
            return {} if head is None else {"lm_head": head}
        if cls == "MLAAttention":
            inner = self.modules.get(f"{path}.kv_b_proj")
            weight = None if inner is None else self.tensors(inner).get("weight")
            return {} if weight is None else {"kv_b_proj": weight}
        if not path.endswith(QUANT_METHOD):
            return {}
        block = block_of(path)
        gates = [g for g in gates_of(path) if g in self.modules]
        holder = self._attrs(self.modules[block]) if block in self.modules else {}
        found: dict[str, Any] = {
            "router": {k.removeprefix("router."): v for k, v in holder.items() if k.startswith("router.")},
            "gate": {k: t for g in gates for k, t in self.tensors(self.modules[g]).items() if k.endswith("_bias")},
        }
        logits = next((self.seen[g] for g in gates if g in self.seen), None)
        return found if logits is None else found | {"router_logits": logits}


def block_of(path: str) -> str:
    """The experts whose kernel is called at ``path``."""
    return path.removesuffix(QUANT_METHOD).removesuffix(EXPERTS)


def gates_of(path: str) -> tuple[str, str]:
    """Where the gate of experts may be whose kernel is called at ``path``."""
    block = block_of(path)
    return f"{block}.gate", f"{block.rpartition('.')[0]}.gate"


def with_right_experts(call: Call) -> tuple[Call, str]:
    """``call`` of experts with those that its router should have chosen, and why its router's choice stays, "" where it
    does not. Of experts that are tied within rounding, those that were chosen stay."""
    ids, weights, logits = call.maybe("topk_ids"), call.maybe("topk_weights"), call.extra.get("router_logits")
    if ids is None or weights is None:
        return call, ""
    if logits is None or len(logits) != len(ids):
        return call, "the choice of its experts stays: its gate's logits are not known"
    tie, z = 4 * unit_of(logits), logits.double()
    try:
        how = choosing(call)
        right, clear = route(z, ids.shape[1], tie=tie, **how)
    except Declined as why:
        return call, f"the choice of its experts stays: {why.reason}"
    top, had = right.topk(ids.shape[1], -1), ids.long().clamp(min=0)
    plain = how.get("bias") is None and how.get("groups", 1) == 1  # then scores rise with logits
    near = z.gather(1, had).amin(1) >= z.gather(1, top.indices).amin(1) - 2 * tie
    stays = (~clear & near & plain).unsqueeze(-1)
    chosen = {"topk_ids": torch.where(stays, ids.long(), top.indices),
              "topk_weights": torch.where(stays, weights.double(), top.values)}  # fmt: skip
    return replace(call, inputs={**call.inputs, **chosen}), ""


def exact(references: References, call: Call) -> dict[str, Expected] | Declined:
    """The reference's outputs that may stand for the call's own, by role."""
    found = references.evaluate(call)
    if isinstance(found, Declined):
        return found
    usable = {role: e for role, e in found.items() if role in call.outputs and role.startswith("output.")}
    if not usable:
        return Declined("its reference has no output that the module returns")
    why = next((e.only_measured or e.unseen for e in usable.values() if e.only_measured or e.unseen), "")
    if why or any(e.value.shape != call.outputs[role].shape for role, e in usable.items()):
        return Declined(why or "its reference has another shape than its output")
    return usable


def put(result: Any, usable: Mapping[str, Expected], began: Began) -> tuple[Any, str]:
    """(``result`` with the references' values, why some rows stay, "" where none does). Raises Declined."""
    live, new, why = dict(outputs(result)), {}, ""
    for role, e in usable.items():
        old = live[role]
        value = rounded_once(e.value, old.dtype)
        if e.rows is not None and not bool(e.rows.all()):
            if not bool(e.rows.any()):
                raise Declined(e.reason or "no row has a reference")
            why = e.reason or "some rows have no reference"
            value = torch.where(e.rows.reshape(-1, *[1] * (value.dim() - 1)), value, old.detach().cpu())
        new[role] = (old, value)
    healed = with_outputs(result, {role: value.to(old.device) for role, (old, value) in new.items()})
    inside = {role for role, (old, _) in new.items() if began.written_into(old)}
    for role in inside:  # nothing can fail any more: the result is whole, or as it was
        new[role][0].copy_(new[role][1])
    return (with_outputs(healed, {role: new[role][0] for role in inside}) if inside else healed), why


def layer_name(module: Any) -> str:
    """What the engine calls an attention layer; "" for anything else."""
    return str(getattr(module, "layer_name", "") or "")


def same_path(words: Sequence[str]) -> tuple[str, ...]:
    """Globs that also match a path's end: ``layers.*.mlp`` is ``*.layers.*.mlp``, too."""
    found: list[str] = []
    for word in words:
        mark, bare = ("!", word[1:]) if word.startswith("!") else ("", word)
        found += [word] if bare.startswith("*") or "." not in bare else [word, f"{mark}*.{bare}"]
    return tuple(found)


def with_inside(words: Sequence[str]) -> tuple[str, ...]:
    """Globs that also match what lies inside the modules that ``words`` match."""
    return tuple(glob for word in words for glob in ((word, f"{word}.*") if not word.endswith("*") else (word,)))
