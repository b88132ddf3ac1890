"""What a captured call is, and what a reference says of it.

The problem: hundreds of operators, of vLLM, of vendors and of users, each with its own arguments, must be judged by
formulas that are right, and a formula that does not fit must never become a verdict. The idea: a `Call` has what was
captured; a reference is a plain function from a Call to exact outputs, marked with ``@reference("name")``; a device
kernel, marked with ``@device_kernel("name")``, gives what the device of its tensors computes. Either returns outputs by
role, or raises `Declined` with a reason.
Elsewhere: the formulas (references/), how a call finds its reference (reference_table.py), where calls come from
(calls/records.py), the verdict (floors/verdict.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from vllm_accprobe.judge.rounding_unit import unit

MARKS = REFERENCE, KERNEL = "__accprobe_references__", "__accprobe_device_kernels__"
BY_ROWS = "__accprobe_by_rows__"
"""Attributes of marked functions: the names that each mark gives, and whether a reference works row by row."""
BACKWARD = "backward."
"""What the classes of calls begin with whose outputs are gradients (gradients.py)."""
RECEIVED = "received"
"""The name of the reference that evaluates what a block's own code hands to its parts."""
DIFFERENTIABLE = "__accprobe_differentiable__"
"""Attribute of references of operators whose outputs in float64 lead back to their arguments by torch's autograd."""
T = TypeVar("T")
Tensor = Any  # a torch.Tensor: this module can be read, and references be marked, where torch is not


class Declined(Exception):
    """A call that has no verdict. reason: a short stable phrase, counted by whoever reports; failed: the reference ran
    into an error, which is a defect of the reference or of the dump and not of the operator."""

    def __init__(self, reason: str, failed: bool = False):
        super().__init__(reason)
        self.reason = reason
        self.failed = failed


def decline_if(condition: Any, reason: str) -> None:
    """Raises Declined where this is true."""
    if condition:
        raise Declined(reason)


def required(value: T | None, reason: str) -> T:
    """``value``; raises Declined where there is none."""
    if value is None:
        raise Declined(reason)
    return value


@dataclass(frozen=True)
class CacheRounding:
    """What an 8-bit cache alone does to an output. kind: the format; share: relative L2 error of the row that it moves
    most; expected: standard error that the format's step gives there; most: what it allows (references/caches.py)."""

    kind: str
    share: float
    expected: float
    most: float


@dataclass(frozen=True)
class Expected:
    """An exact output, with the error that roundings inside a right kernel leave before its last one.

    noise is the standard error: independent errors added up as the root of the sum of squares [N. Higham and T. Mary,
    SIAM J. Sci. Comput. 41 (2019) A2815]. bound is the largest error, a sum of absolute values [N. Higham, Accuracy and
    Stability of Numerical Algorithms, 2nd ed., chapter 3]: proved for +, x, / and sqrt, supposing APPROXIMATE of exp,
    log, tanh, erf and rsqrt. scripts/search_bounds.py searches for a rounding that a derivation forgets.

    value: float64 (or integers), the shape of the captured output. noise, bound: float64, broadcastable to value, or
    None where unknown. groups: how many independent errors the noise of a row has, None where each element has its own.
    shared: noise is that of a table, the same in other rows. unit: relative error of the last rounding, None for that
    of the captured dtype. common: a relative error that a whole row may share (a rounded gate). rows: bool [rows],
    which rows have a reference, None for all; reason: why the others have none. note: a sentence for a failure; source:
    a sentence for any result. only_measured: why no verdict is allowed, "" where one is. unseen: what the output rests
    on that was not computed again, so that it may fail and never pass; "" for nothing. exact: the exact output, where
    value was rounded itself (another machine's, another run's). cache: the effect of an 8-bit cache. by_name: it
    supposes what blocks of its class usually do. failed: the reference raised, which ``reason`` says: no verdict."""

    value: Tensor
    noise: Tensor | None = None
    unit: float | None = None
    common: float = 0.0
    rows: Tensor | None = None
    reason: str = ""
    note: str = ""
    source: str = ""
    by_name: bool = False
    only_measured: str = ""
    unseen: str = ""
    exact: Tensor | None = None
    bound: Tensor | None = None
    groups: float | None = None
    shared: bool = False
    cache: CacheRounding | None = None
    failed: bool = False

    def map(self, change: Callable[[Tensor], Tensor]) -> Expected:
        """The same with ``change`` applied to value, noise and bound."""
        value, noise, bound = (None if t is None else change(t) for t in (self.value, self.noise, self.bound))
        return replace(self, value=value, noise=noise, bound=bound)


@dataclass(frozen=True)
class MemoryLayout:
    """How a tensor lay in memory that was not contiguous. stride, offset: in elements, the offset from the beginning of
    its storage; memory: that storage, [n] of the tensor's dtype, or what reads it; None where it is not known."""

    stride: tuple[int, ...]
    offset: int = 0
    memory: Tensor | Callable[[], Tensor | None] | None = None

    def read(self) -> Tensor | None:
        return self.memory() if callable(self.memory) else self.memory


@dataclass(frozen=True)
class Call:
    """One captured call of a module or an operator.

    name: the module's path or the operator's name; cls: the module's class, or the operator's name again. inputs:
    tensors by argument name (a module's); args and kwargs: an operator's, tensors and scalars in torch's dtypes.
    params: a module's tensors by name; attrs: its recorded numbers, strings and booleans; parent: those of the module
    that contains it; config: the model's config.json (the language part, where there are several), {} if unknown.
    outputs: what was captured, by role: ``output.0``, ``inplace.query``. extra: what other records of the dump add, by
    name: ``cache``, ``logits``, ``ranks``; of an operator, ``fresh``: places of arguments that are only written to.
    views: of tensors that were not contiguous, by place: ``inputs.x``, ``args.0``, ``kwargs.out``; here they are.
    """

    name: str
    cls: str
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Tensor] = field(default_factory=dict)
    attrs: Mapping[str, Any] = field(default_factory=dict)
    parent: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    views: Mapping[str, MemoryLayout] = field(default_factory=dict)

    def tensor(self, *names: str) -> Tensor:
        """The first of these inputs that was captured, its own dtype; raises Declined."""
        found = self.maybe(*names)
        if found is None:
            raise Declined(f"input {names[0]} was not captured")
        return found

    def maybe(self, *names: str) -> Tensor | None:
        """The same or None. A number among ``names`` is a place: forwards that take ``*args`` have inputs ``0``,
        ``1``."""
        return next((self.inputs[name] for name in names if name in self.inputs), None)

    def wide(self, *names: str) -> Tensor:
        """``tensor`` in float64."""
        return self.tensor(*names).double()

    def param(self, name: str) -> Tensor:
        """A parameter in float64, which is not to be changed; raises Declined as `stored` does."""
        found = self.stored(name)
        return self.once(name, found.double)

    def stored(self, name: str) -> Tensor:
        """A parameter in its own dtype; raises Declined when the dump has none, or an empty one that a kernel has
        packed."""
        found = self.params.get(name)
        if found is None:
            why = self.params.why.get(name) if isinstance(self.params, Params) else None
            raise Declined(why or f"parameter {name} was not captured")
        if not found.numel():
            raise Declined(f"parameter {name} was packed by a kernel before it could be captured")
        return found

    def once(self, what: Any, make: Callable[[], Tensor]) -> Tensor:
        """What ``make`` gives, which follows from the parameters alone: it is made once for all calls of the module."""
        return self.params.once(what, make) if isinstance(self.params, Params) else make()

    def attr(self, *names: str, default: Any = None) -> Any:
        """The first of these attributes that was recorded; raises Declined where none was and there is no default."""
        for name in names:
            if name in self.attrs:
                return self.attrs[name]
        if default is None:
            raise Declined(f"attribute {names[0]} was not recorded")
        return default

    @property
    def unit(self) -> float:
        """The rounding of the first captured output's dtype: what the kernel may round its intermediates to."""
        for value in self.outputs.values():
            found = unit(str(value.dtype).removeprefix("torch."))
            if found:
                return found
        return 0.0


def changed(of: T, **fields: Any) -> T:
    """``dataclasses.replace`` for a `Call` or an `Expected`, several times as fast: nothing is looked up or checked."""
    new: T = object.__new__(type(of))
    vars(new).update(vars(of), **fields)
    return new


_KEPT = 1 << 30
"""Chosen: bytes that are kept of what was computed from one module's parameters: those of a product of 8,192 by 8,192
in float64 and float32; what is larger is made for each call."""


class Params(dict[str, Tensor]):
    """Tensors that all calls of a module share, by name, with what was computed from them: a weight becomes float64
    once and not for each call. shared: parameters that are arguments of an operator's calls, by what distinguishes
    them; why: of those that are not here, the reason where one is known; unread: those that the module has and whose
    values are not here. Whoever asks for one of these is declined: a norm without its weight would be another norm."""

    def __init__(
        self, tensors: Mapping[str, Tensor] | None = None, why: Mapping[str, str] | None = None,
        unread: Iterable[str] = (),
    ):  # fmt: skip
        super().__init__(tensors or {})
        self.why, self.unread = dict(why or {}), frozenset(unread)
        self.shared: dict[Any, Tensor] = {}
        self._made: dict[Any, Tensor] = {}
        self._room = _KEPT

    def _decline(self, name: object) -> None:
        if name in self.unread:
            raise Declined(self.why.get(str(name)) or f"parameter {name} was not captured")

    def __contains__(self, name: object) -> bool:
        self._decline(name)
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._decline(name)
        return super().get(name, default)

    def once(self, what: Any, make: Callable[[], Tensor]) -> Tensor:
        """What ``make`` gives; what was made before under this name, which may not be changed."""
        found = self._made.get(what)
        if found is None:
            found = make()
            if self._has_room(found):
                self._made[what] = found
        return found

    def share(self, name: Any, read: Callable[[], Tensor]) -> Tensor:
        """One of `shared`, read where it is not there yet."""
        found = self.shared.get(name)
        if found is None:
            found = read()
            if self._has_room(found):
                self.shared[name] = found
        return found

    def _has_room(self, tensor: Tensor) -> bool:
        size = tensor.numel() * tensor.element_size()
        if any(t is tensor for t in (*self.values(), *self._made.values())):
            return True
        if size > self._room:
            return False
        self._room -= size
        return True

    def name_of(self, tensor: Tensor) -> Any | None:
        """The name of one of `shared`, None for any other tensor."""
        return next((name for name, t in self.shared.items() if t is tensor), None)


Reference = Callable[[Call], "Mapping[str, Expected | Tensor] | Expected | Tensor"]
Kernel = Callable[[Call], "Mapping[str, Tensor] | Tensor"]


def reference(*names: str, by_rows: bool = False) -> Callable[[Reference], Reference]:
    """Marks a function as the reference of ``names``: module classes (``RMSNorm``; globs: ``*RMSNorm``) or operators
    (``torch.ops.vendor.fused_norm``, ``aten.mm``). It gives exact outputs by role, or one value for ``output.0``, and
    raises Declined where it cannot. by_rows: every row of every output, its noise too, follows from that row of the
    inputs alone, whatever the other rows hold: several calls may be evaluated as one (batches.py)."""
    return _mark("reference", {REFERENCE: names, BY_ROWS: by_rows}, names)


def device_kernel(*names: str) -> Callable[[Kernel], Kernel]:
    """Marks a function as what a device has for ``names``, which are those of ``@reference``. Its call's tensors lie on
    the device; it gives tensors there in the dtypes of the model, by role or one for ``output.0``, and raises Declined
    where it cannot. An operator of torch.ops needs none: it runs itself."""
    return _mark("device_kernel", {KERNEL: names}, names)


def _mark(word: str, attributes: Mapping[str, object], names: tuple[str, ...]) -> Callable[[Any], Any]:
    if not names:
        raise ValueError(f"@{word} needs at least one name")

    def mark(function: Any) -> Any:
        for name, value in attributes.items():
            setattr(function, name, value)
        return function

    return mark


UNROUNDED = "unrounded"
"""In Call.extra: the operator may have read its inputs before they were rounded to what was captured."""


def half_a_unit_off(inputs: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Each number of a floating-point input half a unit of its own dtype larger or smaller, as float64; the same for
    the same seed."""
    import torch

    drawn = torch.Generator().manual_seed(seed)
    out = {}
    for name, t in inputs.items():
        if not t.is_floating_point():
            out[name] = t
            continue
        # A binade's spacing is eps times its lower end.
        half = torch.ldexp(torch.full(t.shape, torch.finfo(t.dtype).eps / 4.0, dtype=torch.float64),
                           torch.frexp(t.double())[1])  # fmt: skip
        signs = torch.randint(0, 2, t.shape, generator=drawn, dtype=torch.float64) * 2.0 - 1.0
        out[name] = t.double() + signs * half * (t != 0)
    return out


def combined(*noises: Tensor | None) -> Tensor | None:
    """Independent absolute errors together: the root of the sum of their squares; None where there is none."""
    real = [n for n in noises if n is not None]
    if not real:
        return None
    return functools.reduce(lambda a, b: (a * a + b * b).sqrt(), real)


def only(expected: Mapping[str, Expected], **changes: Any) -> dict[str, Expected]:
    """The same outputs with these fields changed."""
    return {role: replace(x, **changes) for role, x in expected.items()}
