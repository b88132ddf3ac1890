"""Module taps: every forward of every chosen module, inputs as they went in, outputs as they came out.

The problem: PyTorch's hooks never fire for classes whose ``__call__`` goes straight to ``forward`` (vLLM's
torch.compile decorator), nor for the lm_head (its quantisation method is called); a kernel may change its inputs in
place; one shared instance has as many names as layers; a forward takes tuples, dicts and containers, by position or by
name. The idea: ``forward`` is wrapped on the instance. Inputs are taken before it runs, outputs after; inputs are named
by the forward's signature, and a path in a container is part of the role. Of several names the one counts that lies in
the running module. The first calls of each kind are compared by hash for inputs that were changed in place, later only
those that were. Each module's line has its plain attributes and where its forward is written. An error ends the capture
only.

Not here: which rows a tensor has (core/rows.py), what happens to it (core/session.py), compiled graphs (graphs/).
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import PurePath
from types import CodeType
from typing import Any, Protocol

import torch

from vllm_accprobe.capture.core.attribute_override import override
from vllm_accprobe.capture.core.session import HEAD, LANGUAGE, VISION, Session, Sites, Ticket
from vllm_accprobe.capture.taps.formulas import formulas
from vllm_accprobe.capture.taps.leaf_code import leaf_code
from vllm_accprobe.config import ProbeConfig, words_choose
from vllm_accprobe.dump.block_code import CODE, FORWARD
from vllm_accprobe.dump.schema import ROOT_TAP, Module

_PLAIN = frozenset((type(None), bool, int, float, str))
"""Types of arguments that hold no tensor."""
_OUTPUTS = tuple(f"output.{index}" for index in range(32))
_Tensor = torch.Tensor


def argument_names(forward: Callable[..., Any]) -> tuple[list[str], str]:
    """Positional parameter names of ``forward`` and the prefix for what ``*args`` swallows.

    vLLM's CustomOp has ``forward(*args, **kwargs)``; the names are those of the method that it dispatches to.
    """
    owner = getattr(forward, "__self__", None)
    for candidate in (forward, getattr(owner, "_forward_method", None), getattr(owner, "forward_native", None)):
        if candidate is not None:
            names, spread = _signature(candidate)
            if names:
                return names, spread
    return [], ""


def _signature(forward: Callable[..., Any]) -> tuple[list[str], str]:
    try:
        parameters = list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):
        return [], ""
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    star = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "")
    return positional, f"{star}." if star and star != "args" else ""


_ATTRIBUTES = [
    "eps", "variance_epsilon", "hidden_size", "input_size", "output_size", "input_size_per_partition",
    "output_size_per_partition", "tp_size", "tp_rank", "num_heads", "num_kv_heads", "total_num_heads",
    "total_num_kv_heads", "head_size", "head_dim", "num_kv_head_replicas", "scale", "scaling", "sliding_window",
    "rotary_dim", "base", "is_neox_style", "max_position_embeddings", "num_embeddings", "embedding_dim",
    "org_vocab_size", "top_k", "global_num_experts", "local_num_experts", "reduce_results", "gather_output",
    "input_is_parallel", "skip_bias_add", "soft_cap", "in_features", "out_features", "normalized_shape",
    "logits_soft_cap", "cap_value", "approximate", "norm_before_gate", "num_groups", "group_size", "alpha", "limit",
    "embed_scale", "offset",
    # experts and their routing, vLLM's and transformers'
    "renormalize", "scoring_func", "routed_scaling_factor", "use_grouped_topk", "num_expert_group", "topk_group",
    "num_group", "norm_topk_prob", "apply_router_weight_on_input", "activation", "swiglu_limit", "swiglu_alpha",
    "swiglu_beta", "mrope_section", "mrope_interleaved", "scaling_factor",
    # attention
    "head_size_v", "kv_cache_dtype", "_k_scale_float", "_v_scale_float", "attn_type", "has_sink", "use_alibi_sqrt",
    "is_causal", "softcap", "num_key_value_groups", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank",
    "kv_lora_rank",
    # factors of a block's own code (Granite, MiniCPM, Falcon-H1, Cohere)
    "residual_multiplier", "embedding_multiplier", "attention_multiplier", "gate_multiplier", "down_multiplier",
    "key_multiplier", "ssm_in_multiplier", "ssm_out_multiplier", "attention_in_multiplier", "attn_out_multiplier",
    # recurrences
    "ssm_state_size", "head_k_dim", "head_v_dim", "gqa_interleaved_layout",
    # convolutions
    "in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode",
    "enable_linear", "tp_world",
    # kernels of 4-bit weights that make 8 bits of their inputs
    "use_w4a8",
    # rotary embeddings, vLLM's and transformers'
    "low_freq_factor", "high_freq_factor", "orig_max_position", "original_max_position_embeddings", "beta_fast",
    "beta_slow", "mscale", "mscale_all_dim", "extrapolation_factor", "attn_factor", "truncate", "scaling_alpha",
    "max_trained_positions", "mixed_b", "short_factor", "long_factor", "short_mscale", "long_mscale", "use_long_rope",
    "rope_type", "rope_angles", "attention_scaling", "original_max_seq_len", "max_seq_len_cached",
]  # fmt: skip
_IMPL = ("scale", "alibi_slopes", "sinks", "logits_soft_cap", "sliding_window", "kv_cache_dtype")
"""Of the object that computes vLLM's attention: ``impl.scale`` and so on."""
_ROUTER = (
    "top_k", "renormalize", "scoring_func", "routed_scaling_factor",
    "use_grouped_topk", "num_expert_group", "topk_group",
)  # fmt: skip
"""Of the object that chooses experts, which is no module: ``router.scoring_func`` and so on."""
_LONGEST = 256
"""A list of more numbers is no description."""


def attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Plain numbers, strings and booleans that describe the operator, and lists of them.

    ``impl.<name>`` are those of an attention's kernel; ``router.<name>`` of what chooses experts, ``router.class`` its
    class; ``has_correction_bias``: whether scores are corrected before experts are chosen; ``custom_routing``: the name
    of a function that chooses them; ``rope_parameters`` of a rotary embedding of transformers is the configuration's,
    by name.
    """
    found: dict[str, Any] = {}
    for name in _ATTRIBUTES:
        value = _plain(module.__dict__.get(name))
        if value is not None:
            found[name] = value
    impl = module.__dict__.get("impl")
    if impl is not None:
        for name in _IMPL:
            value = _plain(getattr(impl, name, None))
            if value is not None:
                found[f"impl.{name}"] = value
    _add_routing(module, found)
    if "rope_type" in module.__dict__:
        config = module.__dict__.get("config")
        value = _plain(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None))
        if value is not None:
            found["rope_parameters"] = value
    return found


def _add_routing(module: torch.nn.Module, found: dict[str, Any]) -> None:
    """How a module's experts are chosen, as far as it is the module's own attributes that say it not yet."""
    router = module.__dict__.get("router")
    holders = [module] if router is None or isinstance(router, torch.nn.Module) else [module, router]
    if len(holders) > 1:
        found["router.class"] = type(router).__name__
        for name in _ROUTER:
            value = _plain(getattr(router, name, None))
            if value is not None:
                found[f"router.{name}"] = value
    for holder in holders:
        if hasattr(holder, "e_score_correction_bias"):
            found["has_correction_bias"] = holder.e_score_correction_bias is not None
        function = getattr(holder, "custom_routing_function", None)
        if function is not None:
            found["custom_routing"] = str(getattr(function, "__qualname__", type(function).__name__))


def _plain(value: Any, depth: int = 0) -> Any:
    """``value`` if it is plain, a small tensor's numbers, a list or dict of such; else None."""
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, _Tensor):
        small = value.device.type != "meta" and value.dim() <= 1 and value.numel() <= _LONGEST
        return value.detach().tolist() if small and value.layout is torch.strided else None
    if isinstance(value, (list, tuple)) and len(value) <= _LONGEST and depth < 3:
        items = [_plain(v, depth + 1) for v in value]
        return None if any(item is None for item in items) else items
    if isinstance(value, Mapping) and depth < 3:
        return {str(k): item for k, v in value.items() if (item := _plain(v, depth + 1)) is not None}
    return None


class Inputs:
    """Names what goes into calls of one callable, whose positional arguments are called ``arguments``; ``spread`` is
    the prefix of what ``*args`` swallows."""

    __slots__ = ("_named", "_named_so", "_positional", "_spread")

    def __init__(self, arguments: list[str], spread: str):
        self._positional = ["input." + name for name in arguments]
        self._named_so = len(arguments)
        self._spread = f"input.{spread}"
        self._named: dict[str, str] = {}

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
        """All tensors that go into a call, with their roles."""
        found: list[tuple[str, torch.Tensor]] = []
        while len(self._positional) < len(args):
            self._positional.append(f"{self._spread}{len(self._positional) - self._named_so}")
        for role, value in zip(self._positional, args, strict=False):
            if isinstance(value, _Tensor):
                found.append((role, value))
            elif type(value) not in _PLAIN:
                found += flatten(role, value, nested=True)
        for name, value in kwargs.items():
            if type(value) not in _PLAIN:
                named = self._named.get(name)
                if named is None:
                    named = self._named[name] = "input." + name
                if isinstance(value, _Tensor):
                    found.append((named, value))
                else:
                    found += flatten(named, value, nested=True)
        return found


def outputs(result: Any) -> list[tuple[str, torch.Tensor]]:
    """All tensors that come out of a call, with their roles."""
    if isinstance(result, _Tensor):
        return [("output.0", result)]
    if type(result) is not tuple or len(result) > len(_OUTPUTS):
        return [] if result is None else list(flatten("output", result))
    found: list[tuple[str, torch.Tensor]] = []
    for role, value in zip(_OUTPUTS, result, strict=False):
        if isinstance(value, _Tensor):
            found.append((role, value))
        elif isinstance(value, (list, tuple, Mapping)):
            found += flatten(role, value, depth=1)
    return found


def flatten(role: str, value: Any, nested: bool = False, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors inside ``value`` with their roles.

    ``output.0`` of a bare tensor or a tuple's first, ``output.key`` of a mapping, ``input.x.0`` inside an argument.
    """
    if isinstance(value, torch.Tensor):
        yield (role if nested or depth else role + ".0"), value
        return
    if depth > 4:
        return
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            if isinstance(item, (torch.Tensor, list, tuple, Mapping)):
                yield from flatten(f"{role}.{index}", item, nested, depth + 1)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from flatten(f"{role}.{key}", item, nested, depth + 1)
    elif isinstance(getattr(value, "tensors", None), Mapping):  # vLLM's IntermediateTensors
        yield from flatten(role, value.tensors, nested, depth + 1)


def chooses(config: ProbeConfig, path: str, cls: str) -> bool:
    """Whether VLLM_ACCPROBE_MODULES (globs over paths, presets, class names) selects the module at ``path``."""
    return not config.modules_left or picks(config.modules, path, cls)


def picks(words: Sequence[str], path: str, cls: str) -> bool:
    """Whether such globs, presets and class names choose the module at ``path``."""
    return words_choose(words, path or ROOT_TAP, path, cls)


def instances(model: torch.nn.Module) -> list[tuple[torch.nn.Module, list[str]]]:
    """Each module of ``model`` once, with all its paths, "" for the root, in the model's order."""
    found: dict[int, tuple[torch.nn.Module, list[str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        found.setdefault(id(module), (module, []))[1].append(path)
    return list(found.values())


_MOST_SOURCE = 300


def source_of(module: torch.nn.Module) -> str | None:
    """``package/file.py:line`` of the forward of ``module``, or None for one that is not written in Python."""
    for forward in (module.__dict__.get("_forward_method"), getattr(type(module), "forward", None)):
        found = _place(forward)
        if found is not None:
            return found
    return None


def _place(forward: Any) -> str | None:
    try:
        function = inspect.unwrap(getattr(forward, "__func__", forward))
        code = getattr(function, "__code__", None)
    except ValueError:  # wrapped in itself
        return None
    if not isinstance(code, CodeType):
        return None
    path = PurePath(code.co_filename)
    parts = str(getattr(function, "__module__", "")).split(".")
    own = path.with_suffix("").parts
    whole = next((p for p in (parts, [*parts, "__init__"]) if own[-len(p) :] == tuple(p)), None)
    name = "/".join(whole) + path.suffix if whole is not None else path.name
    return f"{name}:{code.co_firstlineno}"[-_MOST_SOURCE:]


_CHECKS = 2
"""How many calls of a kind are checked for in-place changes before an input is believed to be left alone."""


class Tap:
    """One wrapped callable of one module: its names, its class, the names of its arguments, what was seen of it.

    parts: in which part of the model each name lies (session.py's words): one instance may stand in a vision tower and
    in the language model, as vLLM's activations do. chosen: of the names, those whose tensors are taken now; tapped:
    those that ever are.
    """

    __slots__ = ("checks", "chosen", "cls", "inputs", "is_root", "names", "parts", "sites", "tapped")

    def __init__(
        self,
        names: list[str],
        cls: str,
        forward: Callable[..., Any],
        parts: Mapping[str, str],
        chosen: frozenset[str],
        is_root: bool,
    ):
        self.names = names
        self.cls = cls
        self.parts = parts
        self.chosen = self.tapped = chosen
        self.is_root = is_root
        self.inputs = Inputs(*argument_names(forward))
        self.checks: tuple[dict[str, int], dict[str, int]] = ({}, {})
        """By kind of step (prefill: 1) and role: calls after which an input was found unchanged."""
        self.sites: dict[str, Sites] = {name: {} for name in names}


def innermost(names: Sequence[str], running: Sequence[str]) -> str:
    """Of a module's several ``names`` the one that lies in the innermost module that runs, or is it."""
    if len(names) > 1:
        for path in reversed(running):
            for name in names:
                if name == path or name.startswith(path + "."):
                    return name
    return names[0]


def tapped(session: Session, tap: Tap, original: Callable[..., Any]) -> Callable[..., Any]:
    """``original`` with inputs taken before and outputs after, in armed steps; otherwise one attribute and a branch.
    While torch.compile traces the call, nothing is taken."""
    is_compiling = torch.compiler.is_compiling
    first, shared, cls, all_checks = tap.names[0], len(tap.names) > 1, tap.cls, tap.checks

    def forward(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():  # first, so that nothing of ours becomes a guard of the compiled graph
            return original(*args, **kwargs)
        state = session.state
        if state is None:
            return original(*args, **kwargs)
        changeable: list[tuple[str, torch.Tensor, Ticket]] = []
        try:
            state.taking += 1
            name = innermost(tap.names, state.stack) if shared else first
            part, before = tap.parts[name], state.inside
            number = state.calls.get(name, 0)
            state.calls[name] = number + 1
            if tap.is_root:
                state.inside = LANGUAGE
            elif part == HEAD:
                state.inside = HEAD
            if state.inside == HEAD:
                part = HEAD
            state.stack.append(name)
            chosen, checks, sites, take = name in tap.chosen, all_checks[state.prefill], tap.sites[name], session.take
            if chosen:
                session.fired.add(name)
                if session.takes_inputs:
                    for role, tensor in tap.inputs(args, kwargs):
                        if checks.get(role, 0) >= _CHECKS:
                            take(state, sites, name, cls, role, number, tensor, part)
                        else:
                            changeable.append((role, tensor, Ticket()))
                            take(state, sites, name, cls, role, number, tensor, part, changeable[-1][2])
            state.taking -= 1
        except Exception as error:
            session.fail(first, error)
            return original(*args, **kwargs)
        result = original(*args, **kwargs)
        try:
            state.taking += 1
            if state.stack and state.stack[-1] == name:
                state.stack.pop()
            state.inside = before
            if chosen and session.state is state:
                if session.takes_outputs:
                    for role, tensor in outputs(result):
                        take(state, sites, name, cls, role, number, tensor, part)
                for role, tensor, ticket in changeable:
                    after, changed = "inplace." + role.partition(".")[2], _verdict(checks, role)
                    take(state, sites, name, cls, after, number, tensor, part, None, ticket, changed)
            state.taking -= 1
        except Exception as error:
            session.fail(first, error)
        return result

    forward.__accprobe__ = tap  # type: ignore[attr-defined]
    return forward


def _verdict(checks: dict[str, int], role: str) -> Callable[[bool], None]:
    """Remembers whether an input is changed in place: one that is, is compared after every call from then on."""

    def changed(different: bool) -> None:
        checks[role] = -1 << 30 if different else checks.get(role, 0) + 1

    return changed


class TapOwner(Protocol):
    """For whom a model is tapped: a capture's Session, errcheck's Watch. ``fired``: taps that were called in a step."""

    config: ProbeConfig
    fired: set[str]

    def module(self, module: Module) -> None:
        """A module is tapped."""

    def skip(self, tap: str, reason: str) -> None:
        """A module cannot be tapped, or is not wanted, or was never called."""


class Taps:
    """All taps of one model. ``remove`` puts every forward back.

    wrapper: wraps each forward: `tapped` of a session, errcheck's `watched` of a Watch.
    """

    def __init__(self, owner: TapOwner, wrapper: Callable[[Tap, Callable[..., Any]], Callable[..., Any]]):
        self._owner = owner
        self._wrapper = wrapper
        self._undo = ExitStack()
        self.remove = self._undo.close
        """Takes all taps off the model, the last one first."""
        self._norms: dict[type, dict[int, tuple[_Passed, Callable[..., Any]]]] = {}
        self.taps: list[Tap] = []

    def attach(self, model: torch.nn.Module, language_prefix: str = "") -> None:
        """Wraps the forwards of all chosen modules of ``model``.

        language_prefix: path of the language model inside a multi-modal one; what lies outside it, except the root,
        is the vision part. "" for a language model.
        """
        found = instances(model)
        shared_parents = {name.rpartition(".")[0] for _, paths in found if len(paths) > 1 for name in paths}
        for index, (module, paths) in enumerate(found):
            cls = type(module).__name__
            chosen = frozenset(path or ROOT_TAP for path in paths if chooses(self._owner.config, path, cls))
            needed = bool(chosen) or paths[0] == "" or any(path in shared_parents for path in paths)
            taps = [path or ROOT_TAP for path in paths]
            source = source_of(module) if chosen else None
            described = attributes(module) if chosen else {}
            if chosen and module._modules:
                described[FORWARD] = formulas(module, argument_names)
            elif chosen and (words := leaf_code(module)):
                described[CODE] = words
            for tap in taps:
                if tap in chosen:
                    self._owner.module(Module(tap, cls, index, described, source))
                else:
                    self._owner.skip(tap, "not selected by VLLM_ACCPROBE_MODULES")
            if not needed:
                continue
            parts = {path or ROOT_TAP: self._part(path, cls, language_prefix) for path in paths}
            self._wrap_forward(module, taps, cls, parts, chosen)
            if chosen and any(part != VISION for part in parts.values()) and _is_head(paths, cls, module):
                self._wrap_apply(module, [t for t in taps if "lm_head" in t] or taps, cls)
            if chosen and hasattr(module, "forward_qkv"):
                passed = _Passed()
                self.taps.append(Tap(taps, cls, passed, parts, chosen, False))
                owner = next((c for c in type(module).__mro__ if _BOTH_NORMS in c.__dict__), None)
                if owner is not None:
                    self._norms.setdefault(owner, {})[id(module)] = passed, self._wrapper(self.taps[-1], passed)
        for norms, taken in self._norms.items():
            self._wrap_both_norms(norms, taken)
        self._norms = {}

    def narrow(self, words: tuple[str, ...] | None) -> frozenset[str] | None:
        """Of the tapped modules only those are taken from now on that ``words`` pick (see `picks`); None: all. What
        is taken, None for all."""
        for tap in self.taps:
            picked = (n for n in tap.tapped if words is None or picks(words, "" if n == ROOT_TAP else n, tap.cls))
            tap.chosen = frozenset(picked)
        return None if words is None else frozenset().union(*(tap.chosen for tap in self.taps))

    def never_fired(self) -> Iterator[tuple[str, str]]:
        """(tap, reason) of all chosen taps that no call of an armed step has reached."""
        for tap in self.taps:
            known = any(name in self._owner.fired for name in tap.names)
            for name in tap.names:
                if name in tap.tapped and name not in self._owner.fired:
                    yield name, "another name of a captured module" if known else "never called in a captured step"

    def _part(self, path: str, cls: str, language_prefix: str) -> str:
        leaf = path.rpartition(".")[2]
        if leaf in ("lm_head", "logits_processor") or cls == "LogitsProcessor":
            return HEAD
        if path == "" or not language_prefix or (path + ".").startswith(language_prefix + "."):
            return LANGUAGE
        # wrappers around the language model, e.g. "model" above "model.language_model", see tokens too
        return LANGUAGE if language_prefix.startswith(path + ".") else VISION

    def _wrap_forward(
        self, module: torch.nn.Module, taps: list[str], cls: str, parts: dict[str, str], chosen: frozenset[str]
    ) -> None:
        if isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList)):
            if chosen:
                self._owner.skip(taps[0], "a container, never called")
            return
        if getattr(module, "do_not_compile", True) is False:
            self._owner.skip(taps[0], "compiled by torch.compile, which calls past its own tap")
            return
        if isinstance(module, torch.jit.ScriptModule):
            self._owner.skip(taps[0], "a TorchScript module, its forward cannot be wrapped")
            return
        original = module.forward
        tap = Tap(taps, cls, original, parts, chosen, taps[0] == ROOT_TAP)
        self._undo.callback(override(module, "forward", self._wrapper(tap, original)))
        self.taps.append(tap)

    def _wrap_apply(self, module: torch.nn.Module, taps: list[str], cls: str) -> None:
        """The lm_head is never called: the logits processor calls ``quant_method.apply(lm_head, x, bias)``."""
        method = getattr(module, "quant_method", None)
        if method is None or not hasattr(method, "apply"):
            return
        original = method.apply
        tap = Tap(taps[:1], cls, original, {taps[0]: HEAD}, frozenset(taps[:1]), False)
        wrapper = self._wrapper(tap, original)

        def apply(*args: Any, **kwargs: Any) -> Any:
            return wrapper(*args, **kwargs) if not args or args[0] is module else original(*args, **kwargs)

        try:
            method.apply = apply
        except AttributeError:
            self._owner.skip(taps[0], "its quantisation method cannot be wrapped")
            return
        self.taps.append(tap)
        self._undo.callback(lambda: method.__dict__.pop("apply", None))

    def _wrap_both_norms(self, norms: type, taken: Mapping[int, tuple[_Passed, Callable[..., Any]]]) -> None:
        """A static method computes q's and k's norm past both modules (MiniMax-M2)."""
        before = norms.__dict__[_BOTH_NORMS]
        if not isinstance(before, staticmethod):  # another release's, of another form
            return
        original: Callable[..., Any] = before.__func__

        def forward_qkv(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if len(args) != 5 or not isinstance(args[2], torch.Tensor) or args[2].dim() != 2 or len(result) < 2:
                return result
            q_norm, k_norm, qkv, q_size, kv_size = args
            if type(q_size) is not int or type(kv_size) is not int or q_size + kv_size > qkv.shape[1]:
                return result
            for norm, first, size, y in ((q_norm, 0, q_size, result[0]), (k_norm, q_size, kv_size, result[1])):
                if (own := taken.get(id(norm))) is not None:
                    own[0].y = y
                    own[1](qkv.narrow(1, first, size))
                    own[0].y = None
            return result

        wrapped = staticmethod(forward_qkv)
        setattr(norms, _BOTH_NORMS, wrapped)

        def undo() -> None:
            if norms.__dict__.get(_BOTH_NORMS) is wrapped:
                setattr(norms, _BOTH_NORMS, before)

        self._undo.callback(undo)


_BOTH_NORMS = "forward_qkv"


class _Passed:
    """What a module would have given, had it been called."""

    y: Any = None

    def __call__(self, x: Any) -> Any:
        return self.y


def _is_head(paths: list[str], cls: str, module: torch.nn.Module) -> bool:
    named = any(path.rpartition(".")[2] == "lm_head" for path in paths)
    return named or cls == "ParallelLMHead" or (cls == "VocabParallelEmbedding" and hasattr(module, "quant_method"))
