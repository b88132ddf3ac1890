"""Operators named by hand, on drawn inputs, where there is no dump.

The problem: whoever writes a kernel wants to know today whether it races or depends on its batch, without an engine
that captured it. The idea: an operator of torch.ops, or a Python function as ``module:function``, gets tensors of the
shapes and dtypes of the command line, drawn with a seed, in the order of its schema; numbers come by name. Each shape
is a call without outputs. Shapes: ``7x64,64x32``; ``*`` before a size marks the rows of an argument (needed for
functions and vendors' operators), ``out:`` a tensor that is only written to. Dtypes: one for all or one for each;
``int64:32`` draws below 32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from vllm_accprobe.dump.schema import Layout, Record
from vllm_accprobe.judge.statistic import RATE, Budget
from vllm_accprobe.opcheck.calls.records import Captured, wanted
from vllm_accprobe.opcheck.reference import Call, Declined
from vllm_accprobe.opcheck.references import aten
from vllm_accprobe.opcheck.repeat.by_rows import ROWS
from vllm_accprobe.opcheck.repeat.machine_kernels import FRESH, FUNCTION, MachineKernels, NotLoaded, function, load_vllm

_ONE = re.compile(r"(?P<out>out:)?(?P<sizes>scalar|\*?\d+(x\*?\d+)*)\Z")
_DTYPE = re.compile(r"(?P<name>\w+)(:(?P<below>\d+))?\Z")
_MOST = 1 << 31
"""Elements of one tensor, chosen: beyond, somebody mistyped a shape."""


@dataclass(frozen=True)
class NamedOperator:
    """As the command line has it. op: ``aten.mm``, ``torch.ops.vendor.name``, ``package.module:function`` or
    ``path/to/file.py:function``; shapes: one text for each call; dtypes: see above; more: arguments by name."""

    op: str
    shapes: tuple[str, ...]
    dtypes: tuple[str, ...] = ("float32",)
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NoDump:
    """What stands in a dump's place."""

    problems: tuple[str, ...] = ()
    ops: tuple[Any, ...] = ()
    rows: Mapping[Any, Any] = field(default_factory=dict)


class NamedCalls:
    """The face of calls.records.Calls for operators named by hand. Raises NotLoaded for what cannot be made."""

    def __init__(self, named: NamedOperator, seed: int):
        self.dump = NoDump()
        self.problems: list[str] = []
        self._calls = {}
        if ":" in named.op:
            function(named.op)
        for shape in named.shapes:
            call = call_of(named, shape, seed)
            self._calls[call.name] = call

    def budget(self, rate: float = RATE) -> Budget:
        return Budget(rate, max(len(self._calls), 1), max(len(self._calls), 1))

    def taps(self, ops: Iterable[str] = ()) -> list[tuple[int, str, str]]:
        globs = tuple(ops)
        return [(0, name, call.cls) for name, call in self._calls.items() if wanted(globs, name, call.cls)]

    def of(
        self, rank: int, tap: str, *, begins: Callable[[int | None, int], object] = lambda step, call: None,
        crashed: Mapping[tuple[int | None, int], str] = MappingProxyType({}),
    ) -> Iterator[Captured]:  # fmt: skip
        begins(0, 0)
        why = crashed.get((0, 0), "")
        yield Captured(tap, rank, 0, 0, self._calls[tap], {}, why, crashed=bool(why))


def call_of(named: NamedOperator, shape: str, seed: int) -> Call:
    """The call that this shape requires. Raises NotLoaded."""
    generator = torch.Generator().manual_seed(seed)
    texts = [s.strip() for s in shape.split(",") if s.strip()]
    if len(named.dtypes) not in (1, len(texts)):
        raise NotLoaded(f"--dtype: {len(named.dtypes)} for {len(texts)} tensors: name one, or one for each")
    dtypes = named.dtypes * len(texts) if len(named.dtypes) == 1 else named.dtypes
    tensors, rows, fresh = [], {}, set()
    for k, (text, dtype) in enumerate(zip(texts, dtypes, strict=True)):
        found = _ONE.match(text)
        if found is None:
            raise NotLoaded(f"--shape {text!r}: sizes with x between them, e.g. 7x64; * marks rows, out: an output")
        sizes = [] if found["sizes"] == "scalar" else found["sizes"].split("x")
        marked = [d for d, s in enumerate(sizes) if s.startswith("*")]
        if len(marked) > 1:
            raise NotLoaded(f"--shape {text!r}: one dimension has the rows")
        if marked:
            rows[k] = marked[0]
        if found["out"]:
            fresh.add(k)
        tensors.append(_drawn([int(s.lstrip("*")) for s in sizes], dtype, generator))
    extra: dict[str, Any] = {}
    name = f"{named.op.rpartition('/')[2]}({shape})"
    if ":" in named.op:
        places = list(range(len(tensors)))
        args, kwargs, cls = tuple(tensors), dict(named.more), named.op.rpartition("/")[2]
        extra[FUNCTION] = named.op
    else:
        args, kwargs, places, cls = _by_schema(named, tensors)
    extra |= {FRESH: [places[k] for k in sorted(fresh)]} if fresh else {}
    extra |= {ROWS: {str(places[k]): dim for k, dim in rows.items()}} if rows else {}
    return Call(name, cls, args=args, kwargs=kwargs, extra=extra)


def _drawn(shape: Sequence[int], dtype: str, generator: Any) -> Any:
    found = _DTYPE.match(dtype)
    kind = getattr(torch, found["name"], None) if found else None
    if found is None or not isinstance(kind, torch.dtype):
        raise NotLoaded(f"--dtype {dtype!r}: torch has no such dtype; int64:32 draws integers below 32")
    if math.prod(shape) > _MOST:
        raise NotLoaded(f"--shape: {list(shape)} has more than {_MOST:,} elements")
    if kind.is_floating_point or kind.is_complex:
        return torch.randn(list(shape), generator=generator, dtype=torch.complex64 if kind.is_complex else torch.float32
                           ).to(kind)  # fmt: skip
    return torch.randint(0, max(int(found["below"] or 2), 1), list(shape), generator=generator).to(kind)


def _by_schema(named: NamedOperator, tensors: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any], list[int], str]:
    """(args, kwargs, the place of each tensor among args, the class of the call)."""
    name = named.op.replace("::", ".")
    if name.removeprefix("torch.ops.").startswith(("_C.", "vllm.", "_moe_C.")):
        load_vllm()
    try:
        operator = aten.of(name)
    except Declined as why:
        raise NotLoaded(f"--op {named.op}: {why.reason}; --load names the library that has it") from None
    overloads = [operator] if hasattr(operator, "_schema") else [getattr(operator, n) for n in operator.overloads()]
    text = ""
    for overload in overloads:
        try:
            args, kwargs, places = _filled(overload._schema, dict(named.more), list(tensors))
        except NotLoaded as why:
            text = text or str(why)
            continue
        base = name.removeprefix("torch.ops.")
        short = str(overload).rpartition(".")[2]
        cls = f"{base}.{short}" if base.startswith("aten.") and base.count(".") == 1 else f"torch.ops.{base}"
        return args, kwargs, places, base if base.startswith("aten.") and base.count(".") == 2 else cls
    raise NotLoaded(f"--op {named.op}: {text}")


def _filled(
    schema: Any, more: dict[str, Any], tensors: list[Any]
) -> tuple[tuple[Any, ...], dict[str, Any], list[int]]:  # fmt: skip
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    places: list[int] = []
    for a in schema.arguments:
        kind = str(a.type)
        if a.name in more:
            value = more.pop(a.name)
            if isinstance(value, str) and isinstance(found := getattr(torch, value, None), torch.dtype):
                value = found
        elif kind in ("Tensor", "Optional[Tensor]") and tensors and not a.kwarg_only:
            places.append(len(args))
            value = tensors.pop(0)
        elif a.has_default_value():
            value = a.default_value
        else:
            what = "a tensor: --shape has too few" if "Tensor" in kind else f"a {kind}: --with {a.name}=VALUE"
            raise NotLoaded(f"its argument {a.name} is {what}")
        if a.kwarg_only:
            kwargs[a.name] = value
        else:
            args.append(value)
    if tensors:
        raise NotLoaded(f"--shape has {len(tensors)} tensors more than {schema.name} takes")
    if more:
        raise NotLoaded(f"--with {next(iter(more))}: {schema.name} has no such argument")
    return tuple(args), kwargs, places


def checked_once(captured: Captured, kernels: MachineKernels) -> Captured:
    """The call with what this machine's kernel makes of it as outputs, as though it had been captured."""
    made = kernels.run(kernels.ready(captured.what))
    if isinstance(made, Declined):
        return replace(captured, missing=made.reason, crashed=made.failed)
    records = {
        role: Record(rank=0, step=0, tap=captured.tap, cls=captured.what.cls, role=role, call=0, seq=k,
                     dtype=str(t.dtype).removeprefix("torch."), shape=tuple(t.shape), rows=None, row_dim=0, stats=None,
                     hash=None, layout=Layout("replicated"), payload=None)
        for k, (role, t) in enumerate(made.items())
    }  # fmt: skip
    return replace(captured, what=replace(captured.what, outputs=dict(made)), records=records)
