"""Any aten operator: calls itself on the CPU, in float64.

The problem: torch has some two thousand operators, and no table of formulas has them all. The idea: an operator's own
CPU kernel in float64 is an independent and far more exact implementation of what a device computed in bfloat16.
Floating tensors become float64 (complex128), a ``dtype`` argument that names a smaller float is raised too; without a
kernel for float64, float32 is tried. Noise: the operator is run again with inputs moved by 2**-24 of their size
[stochastic estimates of conditioning: Parker, Monte Carlo Arithmetic, 1997]; integers that this changes are ties. What
is computed from a parameter that the calls of an operator share is made once. A cast must be right to the bit.
Operators that draw random numbers, have no tensor, or depend on a dtype's bits are declined."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.opcheck.reference import Call, Declined, Expected, Params, decline_if, device_kernel, reference
from vllm_accprobe.opcheck.roundings import ROUNDED, within_float32

_MOVED = 2.0**-24
_TABLE = 8191


def raised(value: Any, real: Any, imaginary: Any) -> Any:
    """A tensor or dtype with floats in these dtypes, and everything on the CPU; other values as they are."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        if value.is_complex():
            return value.to(imaginary, copy=True)
        return value.to(real, copy=True) if value.is_floating_point() else value.clone()
    if isinstance(value, torch.dtype):
        return real if value.is_floating_point else imaginary if value.is_complex else value
    return torch.device("cpu") if isinstance(value, torch.device) else value


@functools.lru_cache(maxsize=64)
def _signs(lengths: tuple[int, ...]) -> Any:
    """1 and -1 at random, float64, as many as the last of ``lengths``, as if drawn one after the other."""
    generator = torch.Generator().manual_seed(0)
    for n in lengths:
        drawn = torch.randint(0, 2, (n,), generator=generator)
    return 2.0 * drawn.double() - 1.0


def _moved(value: Any, lengths: tuple[int, ...]) -> Any:
    """Floats times 1 ± 2**-24 (float32: its next number), at random: signs from a table whose length is a prime, so
    that no two rows share theirs; one for each element would take too long. lengths: of the tables drawn before, and of
    its own."""
    if value.dim() == 2 and not value.is_contiguous() and value.t().is_contiguous():
        return _moved(value.t(), lengths).t()
    flat = value.reshape(-1)
    step = max(_MOVED, torch.finfo(value.dtype).eps)
    table = (1.0 + step * _signs(lengths)).to(value.dtype)
    whole = len(flat) // _TABLE * _TABLE
    moved = torch.empty_like(flat)
    if whole:
        torch.mul(flat[:whole].view(-1, _TABLE), table, out=moved[:whole].view(-1, _TABLE))
    torch.mul(flat[whole:], table[: len(flat) - whole], out=moved[whole:])
    return moved.view(value.shape)


class Widened:
    """A call's arguments in wider dtypes, and moved ones; shared parameters once, if ``function`` writes to none."""

    def __init__(self, call: Call, function: Any, real: Any, imaginary: Any):
        self._dtypes = real, imaginary
        writes = not isinstance(function, torch._ops.OpOverload) or function._schema.is_mutable
        self._params = call.params if isinstance(call.params, Params) and not writes else None
        self._lengths: tuple[int, ...] = ()

    def wide(self, value: Any) -> Any:
        return self._once(value, self._dtypes, lambda: raised(value, *self._dtypes))

    def moved(self, value: Any) -> Any:
        """In the order of the arguments: each draws its own signs."""
        wide = self.wide(value)
        if not isinstance(wide, torch.Tensor) or not wide.is_floating_point():
            return wide
        self._lengths = lengths = (*self._lengths, min(_TABLE, wide.numel()))
        return self._once(value, (*self._dtypes, lengths), lambda: _moved(wide, lengths))

    def _once(self, value: Any, how: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        if self._params is None or not self._params.shared or not isinstance(value, torch.Tensor):
            return make()
        name = self._params.name_of(value)
        return make() if name is None else self._params.once((name, *how), make)


_RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal", "uniform", "exponential", "random", "geometric")
_EMPTY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "resize_")
_BITS = ("nan_to_num", "nextafter", "frexp", "as_strided", "set_", "is_same_size", "view_as_real_copy")
"""What they give depends on the dtype's own range or on memory, so that a wider dtype is another operator."""
_OUTSIDE = ("from_file", "save", "load_tensor", "record_stream", "warn", "_print")
_ELSEWHERE = (
    "prim", "debugprims", "profiler", "debug_mode_ops", "c10d", "_c10d_functional", "_c10d_functional_autograd",
    "c10d_functional", "symm_mem", "inductor", "rpc", "export",
)  # fmt: skip
"""Operators, and namespaces of them, that reach for files, streams, other processes: a dump may be a stranger's."""
_CASTS = ("to", "_to_copy", "copy_", "copy", "type_as")
"""Rounding itself: what comes out is known to the bit."""
_HANDLES = ("onednn", "_mm_handler", "custom_ar", "quick_ar")
"""Operators that take addresses as integers: to run them again would crash."""
_WIDER = 8.0
"""How many times the answer to moved inputs a kernel's own sums may spread: the square root of some sixty terms."""


def of(name: str) -> Any:
    """The operator of ``aten.mm``, ``aten.mm.default``, ``torch.ops.vendor.name``. Raises Declined: torch has none."""
    parts = name.removeprefix("torch.ops.").split(".")
    decline_if(not 2 <= len(parts) <= 3 or not all(p.isidentifier() for p in parts), f"{name} is no operator's name")
    decline_if(parts[0] in _ELSEWHERE or parts[1] in _OUTSIDE, "an operator that reaches outside of its tensors")
    found = torch.ops
    try:
        for part in parts:
            found = getattr(found, part)
    except (AttributeError, RuntimeError):
        raise Declined(f"this torch has no operator {name}") from None
    if not isinstance(found, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        raise Declined(f"{name} is no operator's name")
    return found


def tensors_by_role(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """``input.0``, ``input.2.1`` in a list, ``input.<name>`` by keyword: the tensors of a call's arguments."""

    def walk(role: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, torch.Tensor):
            yield role, value
        elif isinstance(value, (list, tuple)):
            for i, v in enumerate(value):
                yield from walk(f"{role}.{i}", v)

    found: dict[str, Any] = {}
    for key, value in [*enumerate(args), *kwargs.items()]:
        found |= dict(walk(f"input.{key}", value))
    return found


def outputs_by_role(result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """``output.k``, where it is a list ``output.k.i``, and ``inplace.<role>`` of every argument as it is now."""
    found: dict[str, Any] = {}
    values = [*result] if isinstance(result, tuple) else [result]
    for k, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            found[f"output.{k}"] = value
        elif isinstance(value, (list, tuple)):
            found |= {f"output.{k}.{i}": v for i, v in enumerate(value) if isinstance(v, torch.Tensor)}
        elif isinstance(value, (bool, int, float)):
            found[f"output.{k}"] = torch.tensor(value)
    return found | {f"inplace.{role}": t for role, t in tensors_by_role(args, kwargs).items()}


def each(value: Any, change: Callable[[Any], Any]) -> Any:
    """``value`` with ``change`` applied to what is in it, through lists and tuples."""
    if isinstance(value, (list, tuple)):
        return type(value)(each(v, change) for v in value)
    return change(value)


@reference("aten.*", "torch.ops.aten.*")
def itself(call: Call) -> dict[str, Expected]:
    parts = call.cls.removeprefix("torch.ops.").split(".")
    base = parts[1]
    decline_if(any(word in base for word in _RANDOM), "an operator that draws random numbers")
    decline_if(base in _EMPTY, "an operator whose result has no defined values")
    decline_if(base in _BITS or parts[1:] == ["view", "dtype"], "an operator whose result depends on the dtype's bits")
    return in_float64(call, of(call.cls), base in _CASTS)


def in_float64(call: Call, function: Any, cast: bool = False) -> dict[str, Expected]:
    """What ``function`` gives for the arguments of ``call`` in float64, float32 where it has no kernel for that; the
    outputs that were captured, or all where none was. cast: it only rounds. Raises Declined."""
    _check_size(call, function)
    why = ""
    for real, imaginary in ((torch.float64, torch.complex128), (torch.float32, torch.complex64)):
        widened = Widened(call, function, real, imaginary)
        try:
            found = _called(call, function, widened.wide)
        except _REFUSALS as error:
            why = why or " ".join(str(error).split())[:80]
            continue
        decline_if(not found, "its result holds no tensor")
        return _computable(call, function, _expected(call, function, found, widened, real is torch.float32, cast))
    raise Declined(f"its own CPU kernel refuses: {why}")


_SQUARING = {"layer_norm": 1, "native_layer_norm": 1, "rms_norm": 1, "_fused_rms_norm": 1, "group_norm": 1,
             "native_group_norm": 6}  # fmt: skip
"""Operators that square the rows of their first argument, and the place of the rows' dimensions or groups."""


def _computable(call: Call, function: Any, found: dict[str, Expected]) -> dict[str, Expected]:
    """``found`` without the rows that a norm's float32 kernels cannot compute."""
    place = _SQUARING.get(getattr(function, "__name__", "").split(".")[0])
    x: Any = call.args[0] if call.args else call.kwargs.get("input")
    if place is None or not x.numel():
        return found
    cut = call.args[place] if len(call.args) > place else call.kwargs.get("normalized_shape", call.kwargs.get(
        "num_groups", call.kwargs.get("group", 1)))  # fmt: skip
    x = x.double().reshape(len(x), cut, -1) if isinstance(cut, int) else x.double().flatten(-len(cut))
    return {role: within_float32(y, x) for role, y in found.items()}


_REFUSALS = (RuntimeError, TypeError, ValueError, IndexError)
"""What a kernel raises for arguments that it does not take."""


def _called(call: Call, function: Any, change: Callable[[Any], Any]) -> dict[str, Any]:
    """What ``function`` gives for the call's arguments, each changed, by role."""
    args, kwargs = each(list(call.args), change), {k: each(v, change) for k, v in call.kwargs.items()}
    return outputs_by_role(function(*args, **kwargs), args, kwargs)


def _check_size(call: Call, function: Any) -> None:
    """Raises Declined where numbers among the arguments would make far more than was captured: a dump must not decide
    on memory."""
    values = [*call.args, *call.kwargs.values()]
    if max((_product(v) for v in values), default=0) <= _LARGE:
        return
    captured_size = sum(t.numel() for t in (*tensors_by_role(call.args, call.kwargs).values(), *call.outputs.values()))
    try:
        made = _called(call, function, _on_meta)
        size = sum(t.numel() for role, t in made.items() if role.startswith("output."))
    except Exception as error:
        raise Declined(f"how much it would make is not known: {type(error).__name__}") from None
    decline_if(size > _LARGE + 4 * captured_size, "it would make far more than was captured")


_LARGE = 1 << 24


def _product(value: Any) -> int:
    """Of the sizes in a list, or a number itself; 0 for anything else."""
    if isinstance(value, int):
        return abs(value)
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, int) for v in value):
        return math.prod(max(abs(v), 1) for v in value)
    return max((_product(v) for v in value), default=0) if isinstance(value, (list, tuple)) else 0


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _expected(
    call: Call, function: Any, found: dict[str, Any], widened: Widened, narrow: bool, cast: bool
) -> dict[str, Expected]:
    """Each of ``found`` with its noise, from running again. narrow: it ran in float32; cast: it only rounds."""
    try:
        again = _called(call, function, widened.moved)
    except _REFUSALS:
        again = {}
    on_the_way = _on_the_way(call, function, found, widened)
    expected = {}
    for role, value in found.items():
        if role not in call.outputs and (call.outputs or not role.startswith("output.")):
            continue
        other = again.get(role)
        if value.is_floating_point():
            value = value.double()
            captured = call.outputs.get(role)
            if captured is not None and cast:
                expected[role] = Expected(value.to(captured.dtype).double(), unit=0.0)
                continue
            noise = _spread(value, other) + on_the_way.get(role, 0.0)
            if narrow:
                noise = noise + 2.0**-20 * value.abs()
            expected[role] = Expected(value, noise, common=0.5 * call.unit)
        elif role == "output.1" and (chosen := _chosen(call, function, found)) is not None:
            expected[role] = Expected(chosen)
        elif value.is_complex() or value.dim() == 0 or other is None or other.shape != value.shape:
            expected[role] = Expected(value)
        else:
            same = (value == other).flatten(1).all(1) if value.dim() > 1 else value == other
            rows = None if bool(same.all()) else same
            expected[role] = Expected(value, rows=rows, reason="" if rows is None else "two of its values are tied")
    decline_if(not expected, "its result holds no tensor")
    return expected


def _by_name(call: Call, function: Any) -> dict[str, Any]:
    """The arguments of a call of an operator by their names in its schema, defaults included."""
    overload = function if isinstance(function, torch._ops.OpOverload) else function.default
    names = [(a.name, a.default_value) for a in overload._schema.arguments]
    return dict(names) | dict(zip((name for name, _ in names), call.args, strict=False)) | dict(call.kwargs)


def _on_the_way(call: Call, function: Any, found: Mapping[str, Any], widened: Widened) -> dict[str, Any]:
    """Noise by role of what right kernels of half precision round to the output's dtype before the end, each once with
    standard error u / sqrt(3) of its size (roundings.ROUNDED): the product before the sum (cuBLAS), each partial sum
    of a scan and of atomic additions, and a group's mean and 1 / deviation (PyTorch's CUDA kernels)."""
    base = call.cls.removeprefix("torch.ops.").split(".")[1] if "." in call.cls else ""
    value, u = found.get("output.0"), ROUNDED * call.unit
    if base not in _ROUNDING or u < 2.0**-20 or not isinstance(value, torch.Tensor):
        return {}
    arguments = {name: widened.wide(a) for name, a in _by_name(call, function).items()}
    value = value.double()
    if base == "cumsum":
        return {"output.0": u * value.square().cumsum(arguments["dim"]).sqrt()}
    if base == "native_group_norm":
        groups = arguments["group"]
        mean, scale = (found[f"output.{k}"].double().reshape(len(value), groups, 1, 1) for k in (1, 2))
        one = torch.ones(arguments["C"], dtype=torch.float64)
        weight = (one if arguments["weight"] is None else arguments["weight"]).reshape(groups, -1, 1)
        shift = (0 * one if arguments["bias"] is None else arguments["bias"]).reshape(groups, -1, 1)
        y = value.reshape(len(value), groups, arguments["C"] // groups, -1)
        return {"output.0": u * ((y - shift).abs() + (mean * scale * weight).abs()).reshape(value.shape)}
    if base.startswith(("index_add", "scatter_add")):
        alpha = call.kwargs.get("alpha", 1)
        count, size = (
            _called(replace(call, kwargs={**call.kwargs, "alpha": a} if "alpha" in call.kwargs else call.kwargs),
                    function, lambda x, change=change: change(widened.wide(x)))  # type: ignore[misc]
            for change, a in ((_ones, 1), (_sizes, abs(alpha)))
        )
        number = count["output.0"].double() - 1.0  # what is added to is a one, too
        noise = u * number.clamp(min=0.0).sqrt() * size["output.0"].double()
        return dict.fromkeys(("output.0", "inplace.input.0"), noise)
    beta = arguments["beta"]
    added = beta * arguments["self"] if beta else 0.0  # without beta it may be memory that was never written
    return {"output.0": (u * (value - added).abs()).nan_to_num(0.0)}


_ROUNDING = frozenset((
    "addmm", "baddbmm", "addbmm", "addmv", "cumsum", "native_group_norm", "index_add", "index_add_", "scatter_add",
    "scatter_add_",
))  # fmt: skip


def _ones(x: Any) -> Any:
    return torch.ones_like(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def _sizes(x: Any) -> Any:
    return x.abs() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def _chosen(call: Call, function: Any, found: Mapping[str, Any]) -> Any | None:
    """Indices that a sort or a choice of the largest may give, int64: the captured ones where they are all different
    and name the values that are due, since the order of equal values is the kernel's; None for other operators."""
    base = call.cls.removeprefix("torch.ops.").split(".")[1] if "." in call.cls else ""
    mine = call.outputs.get("output.1")
    if base not in ("sort", "topk") or not isinstance(mine, torch.Tensor) or mine.is_meta:
        return None
    value, right, values = _by_name(call, function), found["output.1"], found["output.0"]
    x, dim = value["self"].detach().cpu(), value["dim"]
    if value.get("stable") or not mine.dim() or mine.shape != right.shape or mine.dtype != right.dtype:
        return None
    if not mine.numel() or int(mine.min()) < 0 or int(mine.max()) >= x.shape[dim]:
        return None
    named, ordered = x.gather(dim, mine).double(), mine.sort(dim).values
    once = (ordered.diff(dim=dim) != 0).all(dim, keepdim=True) if mine.shape[dim] > 1 else torch.ones_like(mine).bool()
    due = (named == values.double()) | (named.isnan() & values.double().isnan())
    return torch.where(once & due, mine, right)


def _spread(value: Any, other: Any | None) -> Any:
    """What moved inputs change, an element's own or its row's root mean square, whichever is larger."""
    if other is None or other.shape != value.shape:
        return torch.zeros((), dtype=torch.float64)
    change = torch.nan_to_num(other.double() - value, nan=0.0, posinf=0.0, neginf=0.0).abs()
    if change.dim():
        change = torch.maximum(change, change.square().mean(-1, keepdim=True).sqrt())
    return _WIDER * change


@device_kernel("*.*", "torch.ops.*")
def operator_kernel(call: Call) -> dict[str, Any]:
    """An aten or vendor operator itself, on the device of its tensors."""
    decline_if(any(word in call.cls for word in _HANDLES), "takes a handle of the process that was captured")
    function = of(call.cls)
    devices = [t.device for t in tensors_by_role(call.args, call.kwargs).values()]
    device = devices[0] if devices else torch.device("cpu")

    def placed(value: Any) -> Any:
        if isinstance(value, torch.device):
            return device
        return value.clone() if isinstance(value, torch.Tensor) else value

    return _called(call, function, placed)
