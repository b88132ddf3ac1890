"""Operator calls in a journal: what their arguments may look like, and which of their tensors count.

The problem: an operator takes tensors in lists, scalars, dtypes and devices, and somebody wants to call it again from
these words alone. The idea: an argument is a VALUE, a small closed language of JSON:

    null, true, 3, 0.5, "text"     themselves
    {"float": "-inf"}              a number that JSON cannot say: inf, -inf, nan
    {"complex": [re, im]}          a complex number; re and im are numbers or such a "float"
    {"tensor": {"role", "dtype", "shape", "stride", "device", ...}}
                                   a tensor; "count", "min", "max", "mean", "l2", "nan", "inf" and "hash" where it was
                                   looked at; "fresh": true for memory that nobody has written to yet (an output buffer:
                                   may hold anything); "param": "<tap>/param.<name>" for a parameter of the model;
                                   "blocks": {"ids": "<role>", "by": [["<role>", unit], ...]} for a cache of which the
                                   call touches some blocks: the record holds those, [n, ...], the record of role
                                   "ids" their numbers; arguments "by" hold numbers of blocks times unit; "shape" is
                                   the whole cache's;
                                   "written": true for an argument that the operator may write to; "after": count,
                                   min ... hash of what the call made of it
    {"list": [VALUE, ...]}         a list or a tuple
    {"slice": [1, null, 2]}, {"ellipsis": true}
                                   of an index, in other tools' dumps (formats/); no journal has them
    {"dtype": "bfloat16"}, {"device": "cpu"}, {"layout": "strided"}, {"memory_format": "contiguous_format"}
    {"skipped": "<reason>", ...}   an argument that was not kept; role, dtype, shape, stride, device of a tensor stay

Nothing else is let in. Not here: the dataclass (schema.py), how calls are captured (capture/ops/dispatch.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm_accprobe.dump.journal.events import (
    MAX_DIMS,
    MAX_INT,
    Event,
    integer,
    optional_integer,
    optional_string,
    short,
    string,
)
from vllm_accprobe.dump.schema import OpCall, Record, Stats
from vllm_accprobe.dump.stats import StatsCell

SEPARATOR = "::"
"""Between the module's path and the operator in a tap."""
_DEPTH = 6
_WORDS = ("dtype", "device", "layout", "memory_format")
_FLOATS = ("inf", "-inf", "nan")


def is_operator(tap: str) -> bool:
    """Whether a tap is an operator's and not a module's."""
    return SEPARATOR in tap


def op_line(
    tap: str,
    call: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    outputs: Sequence[Any],
    mutates: Sequence[str],
    *,
    step: int | None,
    op: str,
    seq: int,
    module: str | None,
    module_call: int | None,
    slot: int | None,
    inside: str | None = None,
) -> dict[str, Any]:
    """An ``op`` event, see `OpCall`. inside: the operator whose Python kernel made the call."""
    line: dict[str, Any] = {
        "event": "op", "step": step, "tap": tap, "op": op, "call": call, "seq": seq, "module": module, "args": args,
        "kwargs": kwargs, "mutates": mutates,
    }  # fmt: skip
    if module_call is not None:
        line["module_call"] = module_call
    if inside is not None:
        line["inside"] = inside
    if slot is not None:
        line["slot"] = slot
    line["outputs"] = outputs
    return line


def about_bytes(cell: StatsCell) -> dict[str, Any]:
    """What a tensor's description says where the tensor was looked at: those keys that its bytes tell."""
    stats = cell.value
    about = {} if stats is None else {name: getattr(stats, name) for name in Stats.__slots__}
    return about if cell.hash is None else about | {"hash": cell.hash}


def op_call(rank: int, e: Event) -> OpCall:
    """An ``op`` event. Raises ValueError for a value that is not of the language above."""
    kwargs = e.get("kwargs") or {}
    mutates = e.get("mutates") or []
    if not isinstance(kwargs, dict):
        raise ValueError(f"kwargs is {short(kwargs)}")
    if not isinstance(mutates, list) or not all(isinstance(role, str) for role in mutates):
        raise ValueError(f"mutates is {short(mutates)}")
    for value in kwargs.values():
        _check(value)
    return OpCall(
        rank=rank,
        step=optional_integer(e, "step"),
        tap=string(e, "tap"),
        op=string(e, "op"),
        call=integer(e, "call", 0),
        seq=integer(e, "seq", 0),
        module=optional_string(e, "module"),
        args=_values(e, "args"),
        kwargs=kwargs,
        outputs=_values(e, "outputs"),
        mutates=tuple(mutates),
        module_call=integer(e, "module_call", 0),
        slot=optional_integer(e, "slot"),
        inside=optional_string(e, "inside"),
    )


def tensors(values: Sequence[Any] | Any) -> Iterator[dict[str, Any]]:
    """The contents of all ``{"tensor": ...}`` in some VALUES (a list or tuple of them, or one), in order."""
    for value in values if isinstance(values, (list, tuple)) else (values,):
        if isinstance(value, dict):
            if "tensor" in value:
                yield value["tensor"]
            elif "list" in value:
                yield from tensors(value["list"])


def inputs(call: OpCall) -> Iterator[dict[str, Any]]:
    """All tensors that went in, positional ones first."""
    yield from tensors(call.args)
    yield from tensors(list(call.kwargs.values()))


def replaced(records: list[Record], ops: Sequence[OpCall]) -> list[Record]:
    """``records`` without those of calls whose place in a random sample (``slot``) was given to a later call."""
    last: dict[tuple[str, int], OpCall] = {}
    gone: set[tuple[int | None, str, int]] = set()
    for call in ops:
        if call.slot is not None:
            old = last.get((call.op, call.slot))
            if old is not None:
                gone.add((old.step, old.tap, old.call))
            last[call.op, call.slot] = call
    return [r for r in records if (r.step, r.tap, r.call) not in gone] if gone else records


def _values(e: Event, key: str) -> tuple[Any, ...]:
    values = e.get(key) or []
    if not isinstance(values, list):
        raise ValueError(f"{key} is {short(values)}, not a list")
    for value in values:
        _check(value)
    return tuple(values)


def _check(value: Any, depth: int = 0) -> None:
    if value is None or isinstance(value, (str, bool, int, float)):
        return
    if not isinstance(value, dict) or depth > _DEPTH:
        raise ValueError(f"an argument is {short(value)}")
    if "skipped" in value:
        string(value, "skipped")
        if "role" in value:
            _check_tensor(value)
    elif "tensor" in value:
        _check_tensor(value["tensor"])
    elif "list" in value:
        if not isinstance(value["list"], list):
            raise ValueError(f"an argument is {short(value)}")
        for item in value["list"]:
            _check(item, depth + 1)
    elif "float" in value:
        if value["float"] not in _FLOATS:
            raise ValueError(f"an argument is {short(value)}")
    elif "complex" in value:
        parts = value["complex"]
        if not isinstance(parts, list) or len(parts) != 2 or any(type(p) not in (int, float, dict) for p in parts):
            raise ValueError(f"an argument is {short(value)}")
        for part in parts:
            _check(part, depth + 1)
    elif len(value) != 1 or not all(key in _WORDS and isinstance(word, str) for key, word in value.items()):
        raise ValueError(f"an argument is {short(value)}")


def _check_tensor(t: Any) -> None:
    if not isinstance(t, dict):
        raise ValueError(f"a tensor is {short(t)}")
    string(t, "role")
    string(t, "dtype")
    string(t, "device", "")
    optional_string(t, "hash")
    for key in ("shape", "stride"):
        sizes = t.get(key, [])
        if (
            not isinstance(sizes, list)
            or len(sizes) > MAX_DIMS
            or not all(type(n) is int and 0 <= n <= MAX_INT for n in sizes)
        ):
            raise ValueError(f"{key} of {t['role'][:60]} is {short(sizes)}")
    blocks = t.get("blocks")
    if blocks is not None:
        _check_blocks(blocks, t["role"])
    after = t.get("after")
    if after is not None and not isinstance(after, dict):
        raise ValueError(f"after of {t['role'][:60]} is {short(after)}")
    for found in (t, after or {}):
        for key in ("min", "max", "mean", "l2"):
            if found.get(key) is not None and type(found[key]) not in (int, float):
                raise ValueError(f"{key} of {t['role'][:60]} is {short(found[key])}")


def _check_blocks(blocks: Any, role: str) -> None:
    by = blocks.get("by") if isinstance(blocks, dict) and isinstance(blocks.get("ids"), str) else None
    if not isinstance(by, list) or not all(
        isinstance(b, list) and len(b) == 2 and isinstance(b[0], str) and type(b[1]) is int and 0 < b[1] <= MAX_INT
        for b in by
    ):
        raise ValueError(f"blocks of {role[:60]} is {short(blocks)}")
