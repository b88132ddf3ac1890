"""Operator taps: every call of ``torch.ops.*`` in armed steps, by dispatch.

The problem: below modules lie the operators of PyTorch, of vLLM and of a vendor's library, and only PyTorch's
dispatcher sees them all, thousands per step, a third of which compute nothing. The idea: a TorchDispatchMode that is
entered for armed forwards and nowhere else. Once per operator its schema and the settings decide whether it is left
out, which arguments it writes to and whether its kernel is Python, which then runs with the mode on. Each call writes
tensor lines for what went in and came out, and one ``op`` line that says how to call it again. Written arguments are
taken before the call and compared by hash after it. A random sample is a reservoir that is written as it goes: the k-th
call takes a place among n with probability n/k, and the reader drops calls whose place was taken later. Other probes'
operators inside the forward (errcheck's) are left out: they say when they are at work. An error here ends the capture,
never the call.

Not here: what is stored of a tensor (op_tensors.py), code outside a probed model (begin_end.py).
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from vllm_accprobe.capture.core.session import Session, StepState, address
from vllm_accprobe.capture.ops.op_tensors import (
    CACHE,
    SMALL,
    TOO_MANY,
    Found,
    Memory,
    TakenTensor,
    Takes,
    Touched,
    inputs,
    outputs,
    touched,
    writes_unsaid,
)
from vllm_accprobe.capture.taps.hooks import Taps
from vllm_accprobe.capture.taps.params import named_tensors
from vllm_accprobe.config import ProbeConfig, matches
from vllm_accprobe.dump.journal import op_line

active_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
"""How many modes there are, nearly always 0: 25 ns, where an ``Paused`` takes 400. Where a torch does not tell, the
stack itself is looked at."""


class Paused:
    """``with paused: ...``, again and again, from one thread at a time; may be nested."""

    __slots__ = ("_modes",)

    def __init__(self) -> None:
        self._modes: list[list[Any]] = []

    def __enter__(self) -> None:
        modes = [m for m in _get_current_dispatch_mode_stack() if hasattr(m, "pauses")]
        for mode in modes:
            mode.pauses += 1
        self._modes.append(modes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for mode in self._modes.pop():
            mode.pauses -= 1


TRACE, DEDUP, SAMPLE, FULL = "trace", "dedup", "sample", "full"
DEFAULT_CALLS = 5
"""How many random calls of an operator the mode ``sample`` keeps where no number is set."""
VIEW = "a view, computes nothing"
_DENIED = {
    "allocates memory, computes nothing": (
        "aten.empty*", "aten.new_empty*", "aten._empty*", "aten.resize*", "aten._resize*", "aten.set_.*",
    ),
    "moves a value to the host": ("aten.item.*", "aten._local_scalar_dense.*", "aten.is_nonzero.*", "aten.equal.*"),
    "asks or marks, computes nothing": (
        "prim.*", "profiler.*", "aten.record_stream.*", "aten.is_*", "aten._has_*", "aten.size.*", "aten.stride.*",
        "aten.sym_*", "aten.numel.*", "aten.dim.*", "aten.lift*", "aten.detach*", "aten._pin_memory.*",
        "aten.pin_memory.*", "aten._assert*",
    ),
}  # fmt: skip
FRESH = ("aten.empty", "aten.new_empty", "aten._empty")
"""Beginnings of names of operators that give memory that was not written yet."""


def by_default(op: str) -> str | None:
    """Why operator ``op`` is left out unless it is named, or None."""
    for reason, globs in _DENIED.items():
        if any(fnmatchcase(op, glob) for glob in globs):
            return reason
    return None


class Choice:
    """The decisions of one rank. ``seed`` and the operator's name give the random numbers, so that two ranks and two
    runs that make the same calls keep the same ones."""

    def __init__(self, config: ProbeConfig):
        self.mode = config.ops_mode if config.task == "tensor" else TRACE
        self.seed = config.seed
        default = DEFAULT_CALLS if self.mode == SAMPLE else None
        self.calls = config.ops_calls if config.ops_calls is not None else default
        self._names = tuple(glob for glob in config.ops_list if "::" not in glob)
        self._taps = tuple(glob for glob in config.ops_list if "::" in glob)
        self._seen: set[int] = set()
        self._counts: Counter[str] = Counter()
        self._random: dict[str, random.Random] = {}

    def denied(self, op: str) -> str | None:
        """Why no call of ``op`` is captured, or None. ``op``: ``aten.mm.default``; globs may leave ``.default`` out."""
        names = (op, op.rpartition(".")[0])
        if self._names and not matches(self._names, names):
            return "not selected by VLLM_ACCPROBE_OPS_LIST"
        by_name = any(not g.startswith("!") and g != "*" and any(fnmatchcase(n, g) for n in names) for g in self._names)
        return None if by_name else by_default(op)

    def wanted_at(self, tap: str) -> bool:
        """Whether the globs over taps (those with ``::``) choose calls of tap ``module::op``."""
        return not self._taps or matches(self._taps, (tap, tap.rpartition(".")[0]))

    def seen(self, signature: Hashable) -> bool:
        """Mode ``dedup``: whether a call like this one was written before; remembers it."""
        key = hash(signature)
        if key in self._seen:
            return True
        self._seen.add(key)
        return False

    def keeps(self, op: str) -> tuple[bool, int | None]:
        """Whether this call of ``op``, the next one, keeps its tensors, and its place in the sample if there is one."""
        if self.mode == TRACE:
            return False, None
        if self.calls is None or self.mode == FULL:
            return True, None
        self._counts[op] += 1
        count = self._counts[op]
        if count <= self.calls:
            return True, count - 1
        generator = self._random.get(op)
        if generator is None:
            generator = self._random[op] = random.Random(f"{self.seed} {op}")
        place = generator.randrange(count)
        return (True, place) if place < self.calls else (False, None)


_OVERWRITING = ("aten.copy_.", "aten.fill_.", "aten.zero_.")


class Operator:
    """One overload of an operator.

    denied: why no call is captured, or None. view: what comes out may share memory with what goes in, and nothing is
    written. overwrites: earlier values of a written argument do not matter. fresh: gives memory that was not written
    yet. kernels: dispatch keys whose kernel is a Python function. taps: by module, the tap's name and whether it is
    wanted.
    """

    __slots__ = (
        "_arguments", "_writes", "denied", "fresh", "kernels", "name", "overwrites", "skip_tap", "taps", "view",
    )  # fmt: skip

    def __init__(self, func: Any, choice: Choice):
        self.name = str(func)
        self.skip_tap = f"::{self.name}"
        schema = getattr(func, "_schema", None)
        arguments = schema.arguments if schema is not None else ()
        written = [(i, a) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
        self._arguments = tuple(a.name for a in arguments)
        self.denied = choice.denied(self.name) if schema is not None else "a higher-order operator"
        self._writes = frozenset(role for i, a in written for role in (f"input.{i}", f"input.{a.name}"))
        # PyTorch's convention: what is written and can only be passed by name is an output buffer.
        self.overwrites = self.name.startswith(_OVERWRITING) or any(a.kwarg_only for _, a in written)
        self.view = not written and schema is not None and any(r.alias_info is not None for r in schema.returns)
        self.fresh = self.name.startswith(FRESH)
        self.kernels = python_kernels(self.name) if schema is not None else frozenset()
        self.taps: dict[str | None, tuple[str, bool]] = {}

    @property
    def writes(self) -> bool:
        """Whether its schema lets it write to an argument."""
        return bool(self._writes)

    def written(self, role: str) -> bool:
        """Whether the tensor in ``role`` (``input.0``, or ``input.0.1`` in a list) is in a written argument."""
        if not self._writes:
            return False
        return role in self._writes or ".".join(role.split(".")[:2]) in self._writes

    def names_of(self, tensors: Sequence[tuple[str, Any]]) -> dict[str, str]:
        """By role, the names of the arguments that tensors are: ``slot_mapping``, ``indices.0`` in a list."""
        names = {}
        for role, _ in tensors:
            _, place, *rest = role.split(".")
            name = place
            if place.isdecimal() and int(place) < len(self._arguments):
                name = self._arguments[int(place)]
            names[role] = ".".join((name, *rest))
        return names

    def integers_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, int]:
        """The arguments that are whole numbers, by name."""
        found = {**dict(zip(self._arguments, args, strict=False)), **kwargs}
        return {name: value for name, value in found.items() if type(value) is int}

    def kernel(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The dispatch key of the Python kernel that PyTorch would choose for these arguments, or None."""
        first = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)), None)
        if first is None:
            return None
        for name in (torch._C._dispatch_key_for_device(first.device.type), "CompositeExplicitAutograd"):
            key = getattr(torch._C.DispatchKey, name, None)
            if key is not None and func.has_kernel_for_dispatch_key(key):
                return key if name in self.kernels else None
        return None


def python_kernels(name: str) -> frozenset[str]:
    """Names of the dispatch keys under which the kernel of operator ``name`` (``vllm.x.default``) is Python."""
    namespace, _, rest = name.partition(".")
    if namespace in ("aten", "prim", "prims"):
        return frozenset()
    base, _, overload = rest.rpartition(".")
    try:
        table = torch._C._dispatch_dump(f"{namespace}::{base}" + ("" if overload == "default" else f".{overload}"))
    except (RuntimeError, AttributeError):
        return frozenset()
    # "CPU: registered at /.../library.py:12 :: ..." after three lines about the schema
    return frozenset(line.partition(":")[0].partition("[")[0] for line in table.splitlines()[3:] if ".py:" in line)


def tensors_in(result: Any) -> Iterator[torch.Tensor]:
    """All tensors in what an operator returned."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for item in result:
            yield from tensors_in(item)


def shares_memory(result: Any, args: tuple[Any, ...]) -> bool:
    """Whether the first thing that came out lies in the memory of the first tensor that went in: a view, then."""
    out = next(tensors_in(result), None)
    first = next((a for a in args if isinstance(a, torch.Tensor)), None)
    if out is None or first is None:
        return True
    where = address(out)
    return where == address(first) if where else out.numel() == 0


@dataclass(slots=True)
class OpenCall:
    """One call on its way: what is known of it, what was taken of it, its written arguments as they were before and as
    they are after. keep: its tensors are stored; place: of its line, what says where the call was; touched: what it
    touches of caches, by role."""

    tap: str
    number: int
    keep: bool
    args: list[Any]
    kwargs: dict[str, Any]
    place: dict[str, Any]
    outputs: list[Any] = field(default_factory=list)
    mutates: list[str] = field(default_factory=list)
    refused: bool = False
    taken: list[tuple[TakenTensor, dict[str, Any]]] = field(default_factory=list)
    before: list[tuple[str, torch.Tensor | Touched, TakenTensor | None, dict[str, Any]]] = field(default_factory=list)
    after: list[tuple[str, TakenTensor, dict[str, Any]]] = field(default_factory=list)
    touched: dict[str, Touched | None] = field(default_factory=dict)

    def line(self) -> dict[str, Any]:
        """The journal's line, when everything about its tensors is known."""
        for taken, about in self.taken:
            taken.add_to(about)
        for role, taken, about in self.after:
            if role in self.mutates:
                taken.add_to(about.setdefault("after", {}))
        args, kwargs, outputs = self.args, self.kwargs, self.outputs
        if self.refused:
            args, outputs = [_settled(v) for v in args], [_settled(v) for v in outputs]
            kwargs = {name: _settled(v) for name, v in kwargs.items()}
        return op_line(self.tap, self.number, args, kwargs, outputs, self.mutates, **self.place)


def _settled(value: Any) -> Any:
    """A VALUE as it is written: a tensor whose values were not read becomes ``skipped`` with its shape."""
    if isinstance(value, dict):
        if "tensor" in value and "skipped" in value["tensor"]:
            return value["tensor"]
        if "list" in value:
            return {"list": [_settled(v) for v in value["list"]]}
    return value


_UNLISTED = "not selected by VLLM_ACCPROBE_OPS_LIST"


class Operators(TorchDispatchMode):
    """The operator tap of one session: ``with session.operators(): forward()``.

    chosen: names of the tapped modules whose operators are wanted; None for all and those outside any module.
    Steps of which only a part is wanted are left out.
    """

    supports_higher_order_operators = True  # else PyTorch refuses them under any mode

    def __init__(self, session: Session, memory: Memory, chosen: frozenset[str] | None = None):
        super().__init__()
        self._session = session
        self._memory = memory
        self._choice = Choice(session.config)
        self._takes = Takes(session, memory, int(session.config.ops_max_mb * 1e6))
        self._all = self._chosen = chosen
        self._operators: dict[Any, Operator] = {}
        self._step: StepState | None = None
        self._inside: list[str] = []
        self.calls = 0
        self.pauses = 0
        """Of other probes that are at work right now."""

    def forget_weights(self) -> None:
        """Memory of weights may have others now: they are examined anew."""
        self._takes.forget_weights()

    def narrow(self, chosen: frozenset[str] | None) -> None:
        """Of these modules alone calls are taken from now on; None: of all that the settings choose."""
        self._chosen = self._all if chosen is None else chosen

    def forget_calls(self) -> None:
        """Samples and counts of equal calls begin anew."""
        self._choice = Choice(self._session.config)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        session = self._session
        state = session.state
        if state is None or state.taking or self.pauses:
            return func(*args, **kwargs)
        call = operator = None
        try:
            operator = self._operators.get(func)
            if operator is None:
                operator = self._operators[func] = Operator(func, self._choice)
            if state is not self._step:
                self._step = state
                self._memory.refresh()
            if not operator.view:
                call = self._before(state, operator, args, kwargs)
        except Exception as error:
            session.fail(f"operator {func}", error)
        result = func(*args, **kwargs) if operator is None else self._run(operator, func, args, kwargs)
        if operator is None or session.state is not state:
            return result
        try:
            if operator.view:
                if shares_memory(result, args):
                    session.sink.skip(operator.skip_tap, operator.denied or VIEW)
                    return result
                call = self._before(state, operator, args, kwargs)
            self._note_memory(operator, args, kwargs, result)
            if call is not None:
                self._after(state, operator, call, result)
        except Exception as error:
            session.fail(f"operator {func}", error)
        return result

    def _run(self, operator: Operator, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs the operator; one whose kernel is Python with this mode on, so that what it calls is seen."""
        key = operator.kernel(func, args, kwargs) if operator.kernels else None
        if key is None:
            return func(*args, **kwargs)
        self._inside.append(operator.name)
        try:
            with self:
                return func._op_dk(key, *args, **kwargs)
        finally:
            self._inside.pop()

    def _before(
        self, state: StepState, operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> OpenCall | None:
        """Decides about a call, and takes what goes in."""
        sink = self._session.sink
        if operator.denied is not None:
            sink.skip(operator.skip_tap, operator.denied)
            return None
        module = state.stack[-1] if state.stack else None
        place = operator.taps.get(module)
        if place is None:
            tap = f"{module or ''}::{operator.name}"
            place = operator.taps[module] = tap, self._choice.wanted_at(tap)
        tap, wanted = place
        reason = self._unwanted(state, module, wanted)
        if reason is not None:
            sink.skip(operator.skip_tap, reason)
            return None
        number = state.calls.get(tap, 0)
        state.calls[tap] = number + 1
        found: Found = []
        values, named = inputs(args, kwargs, found)
        if self._choice.mode == DEDUP and self._choice.seen(_signature(operator.name, found)):
            sink.skip(operator.skip_tap, "same shapes and dtypes as an earlier call")
            return None
        keep, slot = self._choice.keeps(operator.name)
        where = {
            "step": state.number, "op": operator.name, "seq": state.seq, "module": module, "slot": slot,
            "module_call": None if module is None else max(state.calls.get(module, 1) - 1, 0),
            "inside": self._inside[-1] if self._inside else None,
        }  # fmt: skip
        state.seq += 1
        call = OpenCall(tap, number, keep, values, named, where)
        if self._memory.cached and self._session.everybodys:
            call.touched = self._touched(operator, found, args, kwargs)
        for role, tensor, about in found:
            self._input(state, operator, call, role, tensor, about)
        self.calls += 1
        return call

    def _touched(
        self, operator: Operator, found: Found, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> dict[str, Touched | None]:
        """What a call touches of the caches among its arguments; of small views nothing but they themselves."""
        cached = self._memory.cached
        caches = [(role, t) for role, t, _ in found if address(t) in cached]
        if not caches:
            return {}
        tensors = [(role, t) for role, t, _ in found]
        sizes = operator.integers_of(args, kwargs)
        return touched(operator.name, operator.names_of(tensors), tensors, caches, self._takes.max_bytes, sizes)

    def _unwanted(self, state: StepState, module: str | None, wanted: bool) -> str | None:
        if not wanted:
            return _UNLISTED
        if self._chosen is not None and module not in self._chosen:
            return "its module is not selected by VLLM_ACCPROBE_MODULES"
        # Outside any module the rows may not be requested yet: the runner is still preparing them.
        if not self._session.everybodys and (module is None or not self._session.whole_step(state)):
            return "its rows cannot be distinguished, and not all requests are selected"
        return None

    def _input(
        self,
        state: StepState,
        operator: Operator,
        call: OpenCall,
        role: str,
        tensor: torch.Tensor,
        about: dict[str, Any],
    ) -> None:
        written = operator.written(role)
        where, name = self._named(tensor, about)
        if written:
            about["written"] = True
        blocks = call.touched.get(role)
        if blocks is not None:
            self._blocks(state, operator, call, role, blocks, about, written or writes_unsaid(operator.name))
            return
        if self._refused(call, role, tensor, where, about):
            return
        if written and where in self._memory.fresh:
            about["fresh"] = True
            if operator.overwrites:
                call.before.append((role, tensor, None, about))
                return
        weight = name is not None and not written
        taken = self._takes.take(state, call.tap, operator.name, role, call.number, tensor, call.keep, weight)
        call.taken.append((taken, about))
        if written:
            call.before.append((role, tensor, taken, about))

    def _blocks(
        self,
        state: StepState,
        operator: Operator,
        call: OpenCall,
        role: str,
        blocks: Touched,
        about: dict[str, Any],
        written: bool,
    ) -> None:
        """Takes the blocks of a cache that the call touches, and their numbers."""
        take = functools.partial(self._takes.take, state, call.tap, operator.name)
        about["blocks"] = {"ids": f"{role}.blocks", "by": blocks.by}
        take(f"{role}.blocks", call.number, blocks.ids, call.keep, False)
        taken = take(role, call.number, blocks.now(), call.keep, False)
        call.taken.append((taken, about))
        if written:
            call.before.append((role, blocks, taken, about))

    def _named(self, tensor: torch.Tensor, about: dict[str, Any]) -> tuple[int, str | None]:
        """Where the tensor's storage begins, and which parameter it is part of, which is noted in ``about``."""
        where = address(tensor)
        name = self._memory.parameters.get(where)
        if name is not None:
            about["param"] = name
        return where, name

    def _refused(self, call: OpenCall, role: str, tensor: torch.Tensor, where: int, about: dict[str, Any]) -> bool:
        reason = self._takes.refuses(tensor, where)
        if reason == CACHE and self._session.everybodys:
            # a view of one request's state is any tensor; the cache itself is not
            reason = None if tensor.nbytes <= SMALL else TOO_MANY if role in call.touched else reason
        if reason is None:
            return False
        about["skipped"] = reason
        call.refused = True
        self._session.sink.skip(call.tap, f"a tensor of an operator: {reason}", role)
        return True

    def _note_memory(self, operator: Operator, args: Any, kwargs: Any, result: Any) -> None:
        """Keeps the account of memory that was not written yet."""
        fresh = self._memory.fresh
        if operator.fresh:
            fresh.update(address(tensor) for tensor in tensors_in(result))
        elif fresh and not operator.view:
            fresh.difference_update(address(tensor) for tensor in tensors_in(result))
            if operator.writes:
                found: Found = []
                inputs(args, kwargs, found)
                fresh.difference_update(address(tensor) for role, tensor, _ in found if operator.written(role))

    def _after(self, state: StepState, operator: Operator, call: OpenCall, result: Any) -> None:
        """Takes what was changed in place and what came out, and queues the call's line."""
        mutates = call.mutates
        tap, op, number, keep = call.tap, operator.name, call.number, call.keep
        for role, source, before, about in call.before:
            tensor = source.now() if isinstance(source, Touched) else source
            if before is None:  # nothing was there before: whatever it is, it is new
                taken = self._takes.take(state, tap, op, f"inplace.{role}", number, tensor, keep, False)
                mutates.append(role)
            else:
                changed = functools.partial(mutates.append, role)
                taken = self._takes.take_changed(state, tap, op, role, number, tensor, keep, before, changed)
            call.after.append((role, taken, about))
        found: Found = []
        call.outputs = outputs(result, found)
        for role, tensor, about in found:
            where, _ = self._named(tensor, about)
            of = next((r for r, b in call.touched.items() if b is not None and b.is_it(tensor)), None)
            blocks = None if of is None else call.touched[of]
            if blocks is not None:  # the cache itself is handed back
                about["blocks"] = {"ids": f"{of}.blocks", "by": blocks.by}
                taken = self._takes.take(state, tap, op, role, number, blocks.now(), keep, False)
                call.taken.append((taken, about))
            elif not self._refused(call, role, tensor, where, about):
                taken = self._takes.take(state, tap, op, role, number, tensor, keep, False)
                call.taken.append((taken, about))
        self._session.sink.line(call.line)


def _signature(name: str, found: Found) -> tuple[Any, ...]:
    return (name, *((role, about["dtype"], about["device"], *about["shape"]) for role, _, about in found))


def of_runner(session: Session, taps: Taps, model: torch.nn.Module, runner: Any, stored: bool, compiled: bool) -> None:
    """For a model runner of vLLM. ``stored``: parameters' payloads are in the dump. ``compiled``: the engine compiles
    or captures graphs, in which operators are none of Python's."""
    if compiled:
        session.sink.skip("::", "operators inside compiled or captured graphs cannot be seen")
        session.say("operators are not captured: the engine compiles or captures graphs (VLLM_ACCPROBE_GRAPHS=1)")
        return
    offloads = _offloads(getattr(runner, "vllm_config", None))
    _watch(session, taps, model, stored, lambda: _caches(getattr(runner, "kv_caches", None)), moves=offloads)


def of_model(session: Session, taps: Taps, model: torch.nn.Module, stored: bool) -> None:
    """For a plain torch model, which keeps its caches to itself."""
    _watch(session, taps, model, stored, lambda: ())


def _watch(
    session: Session,
    taps: Taps,
    model: torch.nn.Module,
    stored: bool,
    caches: Callable[[], Iterable[torch.Tensor]],
    moves: bool = False,
) -> None:
    """moves: weights of several layers take turns in one piece of memory, so that an address does not tell whose."""

    def named() -> Iterator[tuple[str, str, torch.Tensor]]:
        return ((path, name, t) for path, _, name, t in named_tensors(model) if not moves)

    config = session.config
    chosen = frozenset().union(*(tap.chosen for tap in taps.taps)) if config.modules_left else None
    session.ops = Operators(session, Memory(named, caches, stored), chosen)


def _offloads(vllm_config: Any) -> bool:
    """Whether vLLM keeps weights in host memory and brings them when they are needed."""
    config = getattr(vllm_config, "offload_config", None)
    sizes = [
        getattr(getattr(config, "uva", None), "cpu_offload_gb", 0),
        getattr(getattr(config, "prefetch", None), "offload_group_size", 0),
        getattr(getattr(vllm_config, "cache_config", None), "cpu_offload_gb", 0),
    ]
    return any(isinstance(size, (int, float)) and size > 0 for size in sizes)


def _caches(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a runner's ``kv_caches``: a list, per layer a tensor or several."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _caches(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _caches(item)
