"""Modules that compute nothing themselves: what comes out must be what their parts gave.

The problem: most calls of a model are of blocks, and a fault can sit between modules, where nothing is captured (a
residual stream that is scaled, shared experts that are not added). The idea: a block's output is checked against the
outputs captured inside it, bit for bit where it hands one on, in float64 where it adds two up. What a block does the
capture reads in its code (`by_formula`); else it is known by class, and others are declined. A block whose convolution
or recurrence is no module may be found wrong and never right. vLLM's opaque operators put the results of the operators
inside them, first those of single tokens, then those of prompts, into one buffer, where they must lie. Around a
vision tower: x * weight[c] + bias[c] on the channels of raw pixels; a convolution over patches that do not overlap is a
product with the flattened kernel [Dosovitskiy et al., arXiv 2010.11929, section 3.1].
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, reduce
from typing import Any

import torch
import torch.nn.functional as F

from vllm_accprobe.dump.block_code import FORWARD, INSIDE, output_of, parsed
from vllm_accprobe.judge.rounding_unit import unit
from vllm_accprobe.opcheck.reference import (
    RECEIVED,
    Call,
    Declined,
    Expected,
    combined,
    decline_if,
    device_kernel,
    only,
    reference,
    required,
)
from vllm_accprobe.opcheck.references.linear import biased, product
from vllm_accprobe.opcheck.references.mixers import KINDS, carried
from vllm_accprobe.opcheck.references.parts import equal, param_if, ranks_of, weight_here
from vllm_accprobe.opcheck.roundings import APPROXIMATE, ROUNDED, SUM, added, rounded, sum_of_two

Inside = Sequence[tuple[str, str, Any]]
NOT_HANDED_ON = "the output of this block does not follow from the captured outputs of its submodules"
"""Why a block is declined."""
UNSEEN = "only its output projection was checked: its convolution and recurrence were not recomputed"
"""Why a block is not right by what its last part gave."""

BY_NAME = "assumed from its class name; its source code was not analysed"


def inside(call: Call) -> Inside:
    """(path below the block, role, record) in the order of execution. Raises Declined where there is none."""
    found: Inside = call.extra.get("children", ())
    decline_if(not found, "nothing inside it was captured")
    return found


def all_seen(call: Call) -> None:
    """Raises Declined where a part of this block ran that was not captured: it is not known what it added."""
    if unseen := call.extra.get("unseen"):
        more = f" and {len(unseen) - 1} more" if len(unseen) > 1 else ""
        raise Declined(f"a block of which parts were not captured ({unseen[0]}{more})")


def _given(call: Call, record: Any, role: str = "output.0") -> Expected | None:
    """Output ``role`` as this record has it; None where that was not captured, or has another shape."""
    read, out = call.extra.get("read"), call.outputs.get(role)
    if read is None or out is None or tuple(record.shape) != tuple(out.shape):
        return None
    return Expected(read(record).double(), unit=0.0)


def child_value(call: Call, role: str, child: str, child_role: str) -> Expected | None:
    """Output ``role`` handed on from the last output of the child whose path ends so; None where it was not kept."""
    for path, r, record in reversed(inside(call)):
        if r == child_role and (path == child or (child.startswith("*") and path.endswith(child[1:]))):
            return _given(call, record, role)
    return None


def first(call: Call, *children: str) -> Expected | None:
    """output.0 as the first of these children that was captured gave it; None where none was."""
    return next((f for f in (child_value(call, "output.0", child, "output.0") for child in children) if f), None)


def child_output(call: Call, child: str, child_role: str = "output.0") -> Expected:
    """output.0 as this child gave it. Raises Declined."""
    return required(child_value(call, "output.0", child, child_role), NOT_HANDED_ON)


WHERE_SCALED = "where the routed scaling factor is applied was not recorded"


def routed_factor(call: Call) -> float:
    """What a block multiplies its routed experts' sum with: the model's factor where no object inside the block applies
    it to its weights or its sum, else 1. Raises Declined where that was not recorded."""
    whole = call.attrs.get("routed_scaling_factor") or call.config.get("routed_scaling_factor") or 1.0
    factors = call.extra.get("factors", {})  # of the objects inside it, by their paths
    inner = math.prod(factors.values())
    if math.isclose(whole, inner) or ("routed_scaling_factor" not in {**call.attrs, **call.config} and factors):
        return 1.0
    decline_if(not factors or not math.isclose(inner, 1.0), WHERE_SCALED)
    return float(whole)


@reference("Dropout", "Identity", by_rows=True)
def unchanged(call: Call) -> Expected:
    """What a model that is served does not drop."""
    return equal(call.tensor("input", "x", "0"))


@reference("FusedMMInputNorm")
def input_norm(call: Call) -> Expected:
    x, weight, bias = call.wide("pixel_values", "0"), call.param("weight"), call.param("bias")
    decline_if(x.dim() != 2 or x.shape[1] % len(weight), "its pixels have an unknown form")
    by_channel = x.reshape(len(x), len(weight), -1)
    y = by_channel * weight.reshape(1, -1, 1) + bias.reshape(1, -1, 1)
    noise = 2.0**-23 * ((by_channel * weight.reshape(1, -1, 1)).abs() + bias.abs().reshape(1, -1, 1))
    return Expected(y.reshape(x.shape), noise.reshape(x.shape))


@reference("Conv2dLayer", "Conv3dLayer", "Conv2d", "Conv3d")
def convolution(call: Call) -> Expected:
    """Of kernels as large as their stride: the output tells, because each input is used once."""
    x, weight = call.wide("x", "input", "0"), call.param("weight")
    out, dims = call.outputs["output.0"], weight.dim() - 2
    kernel, grid = list(weight.shape[2:]), list(out.shape[2:])
    if x.dim() != dims + 2 or list(x.shape[2:]) != [g * k for g, k in zip(grid, kernel, strict=True)]:
        raise Declined("a convolution whose stride is not its kernel")
    decline_if(weight.shape[1] != x.shape[1], "a convolution in groups")
    y = product(_patches(x, kernel), weight.flatten(1))
    y = biased(y, param_if(call, "bias"), call.unit)
    return y.map(lambda t: t.reshape(len(x), *grid, -1).movedim(-1, 1))


def _patches(x: Any, kernel: list[int]) -> Any:
    """[n, c, g1 k1, ...] → [n * g1 ..., c * k1 ...]."""
    shape: list[int] = [x.shape[0], x.shape[1]]
    for size, k in zip(x.shape[2:], kernel, strict=True):
        shape += [size // k, k]
    dims = len(kernel)
    order = [0, *range(2, 2 + 2 * dims, 2), 1, *range(3, 3 + 2 * dims, 2)]
    return torch.reshape(x.reshape(shape).permute(order), (-1, x.shape[1] * math.prod(kernel)))


def _handed_on(call: Call, *places: tuple[str, str, str], last: bool = True) -> dict[str, Expected]:
    """(role, child, child's role): the first place of a role that was captured.

    last: output.0 only from the child that ran last: a block that does more behind it is not the one that is meant."""
    found: dict[str, Expected] = {}
    ran_last = inside(call)[-1][0]
    if last:
        all_seen(call)
    for role, child, child_role in places:
        if last and role == "output.0" and ran_last != child and not ran_last.startswith(f"{child}."):
            continue
        if role not in found and (value := child_value(call, role, child, child_role)) is not None:
            found[role] = value
    decline_if(not found, NOT_HANDED_ON)
    return found


def _last(call: Call, *children: str) -> dict[str, Expected]:
    """output.0 from the first of these children that was captured and ran last."""
    decline_if(call.maybe("residual") is not None, NOT_HANDED_ON)  # it is added behind that child
    return _handed_on(call, *(("output.0", child, "output.0") for child in children))


_FEW_VALUED = 8.0**-0.5 * 2.0
"""Units: the standard error of rounding a sum of two numbers on one grid once, at most (`sum_of_two`)."""


@reference(FORWARD)
def by_formula(call: Call) -> dict[str, Expected]:
    """What the block's own code makes of its inputs and its parts' outputs, by the formulas that the capture read in
    its source (capture/taps/formulas.py)."""
    found, own = of_code(call), call.attrs[FORWARD].get("own_code")
    why = "" if own is None else f"the inputs of {own[:_SHORT]} are computed by code that could not be analysed"
    return only(found, unseen=why)


BY_OWN_CODE = "checked against its own source code: whether that code is right, only a golden shows"
LEFT_OUT = "its source code leaves out what its configuration or parts require"


def of_code(call: Call) -> dict[str, Expected]:
    """Outputs by their formulas. Raises Declined."""
    texts = call.attrs.get(FORWARD)
    if not isinstance(texts, dict) or not all(isinstance(t, str) for t in texts.values()):
        raise Declined(NO_FORMULA)
    all_seen(call)
    if (child := texts.get("output")) is not None:  # all that this child gave
        texts = {role: f"{child}[{role.rpartition('.')[2]}]" for role in call.outputs if role.startswith("output.")}
    own = {role: text for role, text in texts.items() if role in call.outputs and not role.startswith(INSIDE)}
    found = {role: Formula(call, role).expected(text) for role, text in own.items()}
    decline_if(not found, NOT_HANDED_ON)
    return only(found, source=BY_OWN_CODE)


NOT_RECEIVED = "this part did not receive what the block's own code hands to it"


@reference(RECEIVED)
def received(call: Call) -> dict[str, Expected]:
    """What the block's own code hands to its parts, of those inputs that were captured (roles ``inside.path/name``)."""
    found = {}
    for role, text in call.attrs[FORWARD].items() if isinstance(call.attrs[FORWARD], Mapping) else ():
        if role.startswith(INSIDE) and (received := call.outputs.get(role)) is not None and isinstance(text, str):
            try:
                all_seen(call)
                found[role] = Formula(call, role).expected(text)
            except Declined as why:
                found[role] = Expected(received, rows=torch.zeros(1, dtype=torch.bool), reason=why.reason)
    return only(found, note=NOT_RECEIVED, source=BY_OWN_CODE)


class Formula:
    """Evaluates one output's formula. Raises Declined for what the dump does not have, and for what is no formula."""

    def __init__(self, call: Call, role: str):
        self._call, self._role, self._shape = call, role, call.outputs[role].shape
        self._size = math.prod(self._shape)
        self._unit = _unit(call.outputs[role])
        self._read: dict[tuple[str, int, bool], Expected] = {}

    def expected(self, text: str) -> Expected:
        decline_if(any(_holds(text, word) for word in self._changed()), "a part of the block changed what it received")
        tree = required(parsed(text), NO_FORMULA)
        try:
            y = self._value(tree)
        except (RecursionError, ArithmeticError):
            raise Declined(NO_FORMULA) from None
        decline_if(not isinstance(y, Expected), NO_FORMULA)
        if y.noise is None:  # handed on
            return replace(y, unit=0.0)
        # the last rounding is judged by the output's dtype
        noise = combined(y.noise, (2.0 / 24.0**0.5 * self._unit) * y.value.abs())
        return replace(y, noise=noise, unit=None, bound=y.bound + SUM * y.value.abs())

    def _changed(self) -> Iterator[str]:
        """What parts wrote into, by their formulas, before this output was made, or this part received it."""
        found: Any = self._call.attrs.get(FORWARD)
        code: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
        part = self._role.removeprefix(INSIDE).rpartition("/")[0]
        for path, name, r in inside(self._call) if code else ():
            if not name.startswith(_INPLACE):
                continue
            text, outputs = code.get(f"{INSIDE}{path}/{name.removeprefix(_INPLACE)}"), self._records(part, "output.0")
            if isinstance(text, str) and path != part and not any(x.seq < r.seq for x in outputs):
                yield text

    def _value(self, node: ast.expr, whole: bool = False) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return float(node.value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            value = self._value(node.operand)
            return -value if isinstance(value, float) else value
        if isinstance(node, ast.Name):
            return self._here(self._call.tensor(node.id, node.id.removeprefix("_")), whole)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "own":
            return self._here(self._call.param(node.attr), whole)
        if isinstance(node, ast.Subscript):
            return self._output(*_place(node), whole)
        if isinstance(node, ast.IfExp):
            return self._value(node.body if self._is_there(node.test, node.body) else node.orelse, whole)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("view", "without_batch"):
            decline_if(len(node.args) != 1 or node.keywords, NO_FORMULA)
            if node.func.id == "without_batch":
                decline_if(any(n != 1 for n in self._batches(node.args[0])), "the first row of a part's output")
            return self._value(node.args[0], whole=True)
        if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
            left, right = (self._rounded(self._value(side)) for side in (node.left, node.right))
            return self._of_two(type(node.op), left, right)
        raise Declined(NO_FORMULA)

    def _batches(self, node: ast.AST) -> Iterator[int]:
        """The first size of each tensor in a formula."""
        if isinstance(node, ast.Subscript):
            path, k = _place(node)
            yield from (r.shape[0] for r in self._records(path, f"output.{k}") if r.shape)
        elif isinstance(node, ast.Attribute):
            yield from self._call.param(node.attr).shape[:1]
        elif isinstance(node, ast.Name) and (x := self._call.maybe(node.id, node.id.removeprefix("_"))) is not None:
            yield from x.shape[:1]
        else:
            for part in ast.iter_child_nodes(node):
                yield from self._batches(part)

    def _here(self, tensor: Any, whole: bool) -> Expected:
        """whole: it was viewed in another shape, and may be no bias."""
        kind = 0.0 if tensor.dim() == 0 else _unit(tensor)  # one number does not promote others
        if tensor.numel() == 1 or (not whole and tuple(tensor.shape) == tuple(self._shape[-1:])):  # a factor, a bias
            tensor = tensor.reshape(()) if tensor.numel() == 1 else tensor
            return Expected(tensor.double().expand(self._shape), unit=kind)
        decline_if(tensor.numel() != self._size, "a part whose output has another shape")
        return Expected(tensor.double().reshape(self._shape), unit=kind)

    @cached_property
    def _inside(self) -> Mapping[tuple[str, str], list[Any]]:
        found: dict[tuple[str, str], list[Any]] = {}
        for path, role, r in inside(self._call):
            found.setdefault((path, role), []).append(r)
        return found

    def _records(self, path: str, role: str) -> list[Any]:
        return self._inside.get((path, role), [])

    def _output(self, path: str, k: int, whole: bool) -> Expected:
        if (path, k, whole) not in self._read:
            self._read[path, k, whole] = self._once(path, k, whole)
        return self._read[path, k, whole]

    def _once(self, path: str, k: int, whole: bool) -> Expected:
        found, read = self._records(path, f"output.{k}"), self._call.extra.get("read")
        if len(found) != 1 or read is None:
            raise Declined(f"{path} was called {len(found)} times" if len(found) > 1 else f"{path} was not captured")
        decline_if(getattr(found[0].layout, "kind", "") == "partial", "a sum over ranks")
        return self._here(read(found[0]), whole)

    def _is_there(self, node: ast.expr, then: ast.expr) -> bool:
        """Whether what ``node`` names was there; ``then``: what is the output in that case."""
        if isinstance(node, ast.Subscript):
            path, k = _place(node)
            return bool(self._records(path, f"output.{k}"))
        decline_if(not isinstance(node, ast.Name), NO_FORMULA)
        if self._call.maybe(node.id) is not None:  # type: ignore[attr-defined]
            return True
        try:
            self._value(then)
        except Declined:
            return False
        raise Declined("whether an optional input that is no tensor was there was not recorded")

    def _rounded(self, y: Any) -> Any:
        """What was computed is rounded before it is used."""
        if isinstance(y, float) or y.noise is None:
            return y
        size = max(self._unit, y.unit or 0.0) * y.value.abs()
        return replace(y, noise=combined(y.noise, _FEW_VALUED * size), bound=y.bound + size)

    def _of_two(self, sign: type, a: Any, b: Any) -> Any:
        operate = _SIGNS[sign]
        if isinstance(a, float) and isinstance(b, float):
            return operate(a, b)
        x, y = (e.value if isinstance(e, Expected) else torch.tensor(e, dtype=torch.float64) for e in (a, b))
        dx, dy = (_errors(e) for e in (a, b))
        kind = min((e.unit for e in (a, b) if isinstance(e, Expected) and e.unit), default=None)  # the finer dtype's
        if sign in (ast.Add, ast.Sub):
            return Expected(operate(x, y), combined(dx[0], dy[0]), unit=kind, bound=dx[1] + dy[1])
        if sign is ast.Div:
            decline_if(not isinstance(b, float), NO_FORMULA)
            return Expected(x / y, dx[0] / y.abs(), unit=kind, bound=dx[1] / y.abs())
        noise = combined(dx[0] * y.abs(), dy[0] * x.abs())
        return Expected(x * y, noise, unit=kind, bound=dx[1] * y.abs() + dy[1] * x.abs())


NO_FORMULA = "a block whose formula this release does not know"
_SHORT, _INPLACE = 200, "inplace."
_SIGNS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


def _unit(tensor: Any) -> float:
    return unit(str(tensor.dtype).removeprefix("torch."))


def _holds(text: str, word: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(word)}(?![\w.\[])", text) is not None


def _place(node: ast.Subscript) -> tuple[str, int]:
    """The path and number that ``path[k]`` names."""
    return required(output_of(node), NO_FORMULA)


def _errors(e: Any) -> tuple[Any, Any]:
    """(noise, bound), zeros for what is exact."""
    zero = torch.zeros((), dtype=torch.float64)
    return (zero, zero) if isinstance(e, float) or e.noise is None else (e.noise, e.bound)


Usual = Callable[[Call], Mapping[str, Expected]]


def by_class(
    call: Call, usual: Usual, note: str = "", *, factor: bool = False, part: bool = False
) -> dict[str, Expected]:  # fmt: skip
    """By the block's own code where the capture recorded it, else what blocks of such a class usually do, with
    ``note``; without one, only where that is what it gave: code that could not be followed may do more. factor, part:
    the configuration has a factor, or the block a gate, that ``usual`` applies: the code must agree with it."""
    code = call.attrs.get(FORWARD)
    if code:
        try:
            found = of_code(call)
        except Declined:
            if "output.0" in code:
                raise
        else:
            return _as_required(call, found, usual, factor) if factor or part else found
    by_name = usual(call)
    if code is not None and not note:
        by_name = {role: e for role, e in by_name.items() if torch.equal(e.value, call.outputs[role].double())}
        decline_if(not by_name, NOT_HANDED_ON)
    return only(by_name, note=note, by_name=bool(note))


def _as_required(call: Call, found: Mapping[str, Expected], usual: Usual, factor: bool) -> dict[str, Expected]:
    """``found`` by a block's own code. Outputs that ``usual`` gives otherwise must be those of ``usual`` where the
    configuration has a ``factor``, and are not right by their code elsewhere."""
    try:
        due = usual(call)
    except Declined:
        return dict(found)
    other = {role: e for role, e in due.items() if role in found and e.value.shape == found[role].value.shape
             and not torch.allclose(e.value, found[role].value, rtol=_SAME, atol=_SAME)}  # fmt: skip
    if factor:
        return {**found, **only(other, note=LEFT_OUT)}
    return {**found, **{role: replace(found[role], unseen=f"{LEFT_OUT} (a golden decides)") for role in other}}


_SAME, _NUMBER = 1e-9, re.compile(r"(?<![\w.\[])\d+\.\d+(?:e[-+]?\d+)?(?![\w.\]])")
"""Two formulas of one value in float64 differ by less."""


@reference("*DecoderLayer")
def decoder_layer(call: Call) -> dict[str, Expected]:
    factor, alone = residual_factor(call), "output.1" not in call.outputs  # alone: it adds its residual itself
    found = by_class(call, _usual_layer, BY_NAME, factor=factor != 1.0 and alone)
    known = factor == 1.0 or alone or any(math.isclose(factor, n, rel_tol=_SAME) for n in _numbers(call))
    return found if known else only(found, unseen=f"{LEFT_OUT} (a golden decides)")


def _numbers(call: Call) -> Iterator[float]:
    """All numbers in the formulas of a block's outputs."""
    code = call.attrs.get(FORWARD) or {}
    for text in (t for role, t in code.items() if role.startswith("output.") and isinstance(t, str)):
        yield from (float(n) for n in _NUMBER.findall(text))


def _usual_layer(call: Call) -> dict[str, Expected]:
    """Of layers that pass on (hidden, residual); those that add it themselves, as transformers' do, give x + f
    attention + f MLP."""
    if "output.1" in call.outputs:
        if call.unit == unit("float16") and call.config.get("routed_scaling_factor") not in (None, 1, 1.0):
            raise Declined(WHERE_SCALED)  # some layers divide by it, so that float16 does not overflow
        norms = (("output.1", f"{which}_layernorm", "output.1") for which in ("post_attention", "pre_feedforward"))
        return _handed_on(call, ("output.0", inside(call)[-1][0].partition(".")[0], "output.0"), *norms)
    all_seen(call)
    parts = {path for path, _, _ in inside(call)}
    attention = "self_attn" if "self_attn" in parts else "attn"
    # norms behind the attention or the MLP, as Gemma has them, are in the sum and would have to be known
    norms_behind = {"pre_feedforward_layernorm", "post_feedforward_layernorm", "residual_layernorm"}
    decline_if(not parts >= {attention, "mlp"} or parts & norms_behind, "a layer that adds its residual itself")
    x, factor = "hidden_states" if "hidden_states" in call.inputs else "_0", residual_factor(call)
    times = "" if factor == 1.0 else f"{factor!r} * "
    a, m = f"{times}{attention}[0]", f"{times}mlp[0]"
    y, z = (Formula(call, "output.0").expected(text) for text in (f"({x} + {a}) + {m}", f"{x} + ({a} + {m})"))
    return {"output.0": replace(y, noise=torch.maximum(y.noise, z.noise), bound=torch.maximum(y.bound, z.bound))}


def residual_factor(call: Call) -> float:
    """What a layer multiplies its attention and its MLP with before it adds them (Granite, MiniCPM), else 1."""
    own = call.attrs.get("residual_multiplier", call.config.get("residual_multiplier"))
    if own is None and (depth := call.config.get("scale_depth")) is not None:
        own = float(depth) / float(call.config.get("num_hidden_layers") or 1) ** 0.5
    return 1.0 if own is None else float(own)


@reference("*Attention", "MultiHeadLatentAttentionWrapper")
def attention_block(call: Call) -> dict[str, Expected]:
    return _last(call, "o_proj", "mla_attn", "proj", "dense", "out_proj", "c_proj", "wo")


@reference("*LinearAttention", "*DeltaAttention", "*DeltaNet", "*DeltaNetAttention")
def recurrent_block(call: Call) -> dict[str, Expected]:
    """Attention whose recurrence is no module: it hands on what its projection gave."""
    return _with_recurrence(call, _last(call, "o_proj", "out_proj", "dense"))


def _with_recurrence(call: Call, found: dict[str, Expected]) -> dict[str, Expected]:
    """``found`` of a block with what its recurrence made; without a reference of that, no output is right by what the
    last part gave."""
    try:
        made = carried(call) if call.cls in KINDS else {}
    except Declined as why:
        made, unseen = {}, f"{UNSEEN}: {why.reason}"
    else:
        unseen = "" if made and all(e.rows is None for e in made.values()) else UNSEEN
    return {role: replace(expected, unseen=unseen) for role, expected in found.items()} | made


@reference("*MLP")
def mlp(call: Call) -> dict[str, Expected]:
    return by_class(call, _usual_mlp, BY_NAME, factor=_down_factor(call) is not None, part=bool(_gates(call)))


def _gates(call: Call) -> list[Any]:
    return [r for path, role, r in call.extra.get("children", ()) if (path, role) == ("expert_gate", "output.0")]


def _down_factor(call: Call) -> Any:
    """What an MLP multiplies its output with (Falcon H1), else None."""
    return call.attrs.get("down_multiplier", (call.config.get("mlp_multipliers") or (None, None))[-1])


def _usual_mlp(call: Call) -> dict[str, Expected]:
    if gates := _gates(call):
        return {"output.0": _gated(call, gates[-1])}
    found, factor = _last(call, "down_proj", "fc2", "c_proj", "dense_4h_to_h"), _down_factor(call)
    if factor is None or "output.0" not in found:
        return found
    return found | {"output.0": Expected(float(factor) * found["output.0"].value)}


def _gated(call: Call, gate: Any) -> Expected:
    y = child_output(call, "down_proj").value * call.extra["read"](gate).double().sigmoid()
    size = call.unit * y.abs()
    return Expected(y, ROUNDED * size, common=call.unit, bound=2.0 * size + APPROXIMATE * y.abs())


@reference("MoERunner", "FusedMoE", "SharedFusedMoE")
def experts(call: Call) -> dict[str, Expected]:
    """Routed and shared experts added up; over the ranks where each of them has a part. Where the block adds them
    (SharedFusedMoE, up to vLLM 0.18) output.0 is the shared experts', output.1 the routed ones'."""
    if "output.1" in call.outputs:
        names = ("_shared_experts", "_shared_experts._layer")
        return _handed_on(call, *(("output.0", name, "output.0") for name in names), last=False)
    if not call.extra.get("partial"):
        return {"output.0": _experts(call)}
    parts = [_experts(rank) for rank in ranks_of(call, call.extra["partial"])]
    return {"output.0": reduce(lambda total, p: added(rounded(total, call.unit), rounded(p, call.unit)), parts)}


def _experts(call: Call) -> Expected:
    alone, out = child_value(call, "output.0", "quant_method", "output.0"), call.outputs.get("output.0")
    if alone is not None and out is not None and torch.equal(alone.value, out.double()):
        return alone  # up to 0.11 nothing is added; in between shared experts may be, which the block owns
    all_seen(call)
    routed, factor = child_output(call, "routed_experts.quant_method"), 1.0
    if call.cls == "MoERunner":  # the factor of FusedMoE itself is in the weights
        own = call.attrs.get("routed_scaling_factor")
        factor = float(own) if own is not None else routed_factor(call)
    shared = child_value(call, "output.0", "_shared_experts._layer", "output.0")
    return _sum(call, routed.value, None if shared is None else shared.value, factor)


def _sum(call: Call, routed: Any, shared: Any | None, factor: float) -> Expected:
    """Routed experts times ``factor``, and shared ones. In float16 the shared ones are divided by it instead."""
    scaled = 0.0
    if factor != 1.0 and shared is not None and call.unit == unit("float16"):
        shared = shared / factor
        scaled = shared.abs()
    elif factor != 1.0:
        routed = routed * factor
        scaled = routed.abs()
    if shared is None:
        return Expected(routed, unit=0.0) if factor == 1.0 else Expected(routed)
    y = routed + shared
    half = call.unit * 0.5 * y.abs()  # some kernels add in the experts' own sum
    scaled = call.unit * scaled
    return Expected(y, ROUNDED * (half * half + scaled * scaled) ** 0.5, bound=2.0 * (half + scaled))


def shared_of(call: Call) -> Any | None:
    """What shared experts add to the output of a block, float64; None where they were not captured inside it."""
    shared = child_value(call, "output.0", "_shared_experts._layer", "output.0")
    shared = first(call, "shared_expert", "shared_experts") if shared is None else shared
    if shared is None:
        return None
    gate = [r for path, role, r in call.extra["children"] if (path, role) == ("shared_expert_gate", "output.0")]
    y = shared.value
    return y * call.extra["read"](gate[-1]).double().sigmoid().reshape(len(y), 1) if gate else y


def mixture(call: Call) -> dict[str, Expected]:
    """transformers' experts' sum, with the shared ones', gated by a sigmoid or not."""
    routed, y = child_output(call, "experts"), shared_of(call)
    if y is None:
        return {"output.0": routed}
    total = routed.value + y
    size = y.abs() + 0.5 * total.abs()
    # the gate is rounded for all of a row's shared part, which is at most a row's
    return {"output.0": Expected(total, ROUNDED * call.unit * size, common=call.unit, bound=3.0 * call.unit * size)}


@reference("*MoE", "*MoeSparseMoeBlock", "*SparseMoeBlock", "*Moe")
def moe_block(call: Call) -> dict[str, Expected]:
    parts = {path for path, _, _ in inside(call)}
    all_seen(call)
    if any((path, role) == ("experts", "output.1") for path, role, _ in inside(call)):
        return {"output.0": _apart(call)}
    if "experts" in parts and ("shared_expert" in parts or "shared_experts" in parts):
        return mixture(call)
    if (factor := routed_factor(call)) == 1.0:
        return _last(call, "experts")
    return {"output.0": _sum(call, child_output(call, "experts").value, None, factor)}


def _apart(call: Call) -> Expected:
    """Shared and routed experts, which the block adds."""
    factor = routed_factor(call)
    if any(getattr(r.layout, "kind", "") == "partial" for path, _, r in inside(call) if path == "experts"):
        raise Declined("adds up over ranks behind it")
    shared, routed = (child_value(call, "output.0", "experts", f"output.{k}") for k in (0, 1))
    if shared is None or routed is None:
        raise Declined(NOT_HANDED_ON)
    if factor != 1.0:
        return _sum(call, routed.value, shared.value, factor)
    return sum_of_two(shared.value + routed.value, call.unit)


@reference("*Model")
def model(call: Call) -> dict[str, Expected]:
    names, roles = ("norm", "final_layernorm"), ("output.0", "output.last_hidden_state")
    places = [(role, name, "output.0") for name in names for role in roles]
    return by_class(call, lambda one: _handed_on(one, *places))


@reference("*ForCausalLM", "*ForConditionalGeneration")
def causal_lm(call: Call) -> dict[str, Expected]:
    """vLLM's head runs behind it, in another call; transformers' is inside."""
    places = [("output.0", name, "output.0") for name in ("model", "language_model.model")]
    places.append(("output.logits", "lm_head", "output.0"))
    return by_class(call, lambda one: _handed_on(one, *places, last=False))


@reference("*VisionPatchEmbed", "*PatchEmbed")
def patch_embed(call: Call) -> dict[str, Expected]:
    read, out = call.extra.get("read"), call.outputs.get("output.0")
    if read is not None and out is not None:
        for path, role, record in reversed(inside(call)):
            if (path, role) == ("proj", "output.0") and math.prod(record.shape) == out.numel():
                return {"output.0": Expected(read(record).double().reshape(out.shape), unit=0.0)}
    raise Declined(NOT_HANDED_ON)


@reference("*VisionBlock")
def vision_block(call: Call) -> dict[str, Expected]:
    """The residual that its second norm gave, and the MLP's output, added."""
    down, stream = child_output(call, "mlp"), child_output(call, "norm2", "output.1")
    return {"output.0": sum_of_two(down.value + stream.value, call.unit)}


@reference("*VisionTransformer")
def vision_transformer(call: Call) -> dict[str, Expected]:
    """The merger's rows, perhaps in another order (windows are undone behind it): each of them once."""
    merged = child_output(call, "merger")
    out = call.outputs["output.0"]
    decline_if(out.dim() != 2, NOT_HANDED_ON)
    rows: dict[tuple[float, ...], list[int]] = {}
    for k, row in enumerate(merged.value.tolist()):
        rows.setdefault(tuple(row), []).append(k)
    order = [rows.get(tuple(row), [-1]).pop() if rows.get(tuple(row)) else -1 for row in out.double().tolist()]
    left = iter(sorted(set(range(len(order))) - set(order)))
    return {"output.0": Expected(merged.value[[k if k >= 0 else next(left) for k in order]], unit=0.0)}


@reference("*PatchMerger", "Sequential")
def last_part(call: Call) -> dict[str, Expected]:
    """The output of the part that ended last."""
    _, role, record = inside(call)[-1]
    all_seen(call)
    return {"output.0": required(_given(call, record) if role == "output.0" else None, NOT_HANDED_ON)}


@reference("MambaMixer2", "MambaMixer", "ShortConv", "*Mixer2", "*MambaMixer")
def mixer(call: Call) -> dict[str, Expected]:
    """What ``out_proj`` gave."""
    read, found = call.extra.get("read"), {}
    records = [record for path, role, record in inside(call) if (path, role) == ("out_proj", "output.0")]
    for role, out in call.outputs.items() if inside(call)[-1][0] == "out_proj" and records else ():
        kept = records[-1]
        if role.startswith(INSIDE):
            continue
        if (value := _given(call, kept, role)) is not None:
            found[role] = value
        elif role == "inplace.output" and read is not None and kept.shape[1:] == out.shape[1:]:
            found[role] = _padded(out, read(kept).double())
    decline_if(not found, NOT_HANDED_ON)
    return _with_recurrence(call, found)


def _padded(out: Any, value: Any) -> Expected:
    """These rows, and whatever lies behind them in the buffer ``out``."""
    known = torch.arange(len(out)) < len(value)
    whole = torch.zeros(out.shape, dtype=torch.float64)
    whole[: len(value)] = value
    return Expected(whole, unit=0.0, rows=known, reason="padding")


_NOT_INSIDE = "what it runs inside was not captured"
_MADE = {
    "vllm.mamba_mixer2": ("selective_state_update_cpu", "mamba_chunk_scan_fwd_cpu"),
    "vllm.unified_attention_with_output": ("cpu_attention_with_kv_cache",),
    "vllm.cpu_gdn_attention_core": ("fused_sigmoid_gating_delta_rule_update_cpu", "chunk_gated_delta_rule_cpu"),
}
"""By opaque operator: the operators inside that make its rows, in the order of the rows."""
_WRITES = ("cpu_attn_reshape_and_cache", "concat_and_cache_mla", "index_put_")


def _buffer(call: Call) -> tuple[str, Any]:
    roles = [role for role in call.outputs if role.startswith("inplace.")]
    decline_if(len(roles) != 1 or not len(call.outputs[roles[0]]), _NOT_INSIDE)
    return roles[0], call.outputs[roles[0]]


@reference(*(f"torch.ops.{name}" for name in _MADE))
def opaque(call: Call) -> dict[str, Expected]:
    """The rows that the operators inside it made, in its buffer."""
    role, out = _buffer(call)
    made = next(names for name, names in _MADE.items() if f"{name}." in f"{call.cls}.")
    rows = [t for name in made for op, t in call.extra.get("inner", ()) if f".{name}." in f".{op}."]
    return {role: _in_buffer(out, rows)}


def _in_buffer(out: Any, rows: list[Any | None]) -> Expected:
    """These rows, one after the other, at the front of a buffer of at least as many. Raises Declined."""
    width = max(out[0].numel(), 1)
    flat = [None if t is None or t.numel() % width else t.reshape(-1, *out.shape[1:]) for t in rows]
    if not flat or any(f is None or f.dtype != out.dtype for f in flat):
        raise Declined(_NOT_INSIDE)
    value = torch.cat(flat).double()
    decline_if(len(value) > len(out), _NOT_INSIDE)
    return _padded(out, value)


@reference("torch.ops.vllm.short_conv")
def opaque_convolution(call: Call) -> dict[str, Expected]:
    """(hidden_states, output, layer): its last act copies the rows of its output projection into ``output``."""
    role, out = _buffer(call)
    copies = [t for op, t in call.extra.get("inner", ()) if op.startswith("aten.copy_")]
    decline_if(not copies or copies[-1] is None or copies[-1].shape[1:] != out.shape[1:], _NOT_INSIDE)
    return {role: _in_buffer(out, [copies[-1]])}


@reference("torch.ops.vllm.unified_mla_attention_with_output")
def opaque_latent(call: Call) -> dict[str, Expected]:
    """(q, kv_c, k_pe, output, ...): rows of single tokens first, what the second matrix computed from the mixed latents
    [heads, rows, width]; then those of prompts, copied."""
    role, out = _buffer(call)
    rows: list[Any | None] = []
    decoding, prompt, mixed = False, None, None
    for op, t in call.extra.get("inner", ()):
        if "mla_decode_kvcache" in op:
            decoding = True
        elif op.startswith("aten.bmm") and decoding:
            mixed = t
        elif op.startswith("aten.copy_") and not decoding and t is not None and t.shape[1:] == out.shape[1:]:
            prompt = t
    if decoding:
        if mixed is None or mixed.dim() != 3:
            raise Declined(_NOT_INSIDE)
        rows.append(mixed.transpose(0, 1).reshape(mixed.shape[1], -1))
    if prompt is not None:
        rows.append(prompt)
    return {role: _in_buffer(out, rows)}


@reference("torch.ops.vllm.unified_kv_cache_update", "torch.ops.vllm.unified_mla_kv_cache_update")
def opaque_write(call: Call) -> dict[str, Expected]:
    """It gives an empty tensor, and writes by the operator inside it, which must be there."""
    if not any(f".{name}." in f".{op}." for name in _WRITES for op, _ in call.extra.get("inner", ())):
        raise Declined(_NOT_INSIDE)
    out = call.outputs["output.0"]
    decline_if(out.numel(), "its output has a content that no formula tells")
    return {"output.0": equal(out)}


@device_kernel("Conv2dLayer", "Conv3dLayer", "Conv2d", "Conv3d")
def convolution_kernel(call: Call) -> Any:
    x, w = call.tensor("x", "input", "0"), weight_here(call)
    stride = list(call.attr("stride", default=list(w.shape[2:])))
    padding, groups = call.attrs.get("padding", 0), int(call.attr("groups", default=1))
    decline_if(isinstance(padding, str), "a padding that is named")
    run = F.conv2d if w.dim() == 4 else F.conv3d
    return run(x, w, call.params.get("bias"), stride, padding, call.attrs.get("dilation", 1), groups)
