"""Causes of addresses: rows, heads, columns, ranks, experts, positions and blocks of the cache that are another's.

The problem: a kernel that reads or writes at a wrong place gives right numbers of something else. The idea: the edited
call has its input or its weight in another order, or the expected output has its parts elsewhere. Which row another
one's result stands in, and which columns, is read from mine's output, so that each way to choose as many counts as
tried. Of a view's storage what its own elements, other views and earlier outputs hold is known; an output that reads
the rest has no expected value.

Not here: addresses that attention alone has (attention_causes.py), columns that are 0 (factors.py), a sum that stops
early (linear_causes.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.dump.block_code import FORWARD, INSIDE
from vllm_accprobe.opcheck.calls.case import this_step
from vllm_accprobe.opcheck.calls.views import by_place, contiguous, read_at, view_of
from vllm_accprobe.opcheck.causes.api import ADDRESS, CauseRow, Guess, Trial, among, edited, moved, with_value
from vllm_accprobe.opcheck.causes.factors import ANY, SUMS, summed_ranks, wrong_columns
from vllm_accprobe.opcheck.causes.linear_causes import LINEAR, linear_input
from vllm_accprobe.opcheck.causes.norms_causes import RMS, by_root, normed_input, own_epsilon
from vllm_accprobe.opcheck.reference import Call, Declined, Expected, MemoryLayout, decline_if, required
from vllm_accprobe.opcheck.references.linear import partial
from vllm_accprobe.opcheck.references.parts import ranks_of

_ROTARY = ("*RotaryEmbedding",)
_SHIFTS = (1, -1, 2, -2)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def _shifts(trial: Trial) -> list[Guess]:
    _independent(trial)
    n = trial.mine().shape[0]
    return among((k for k in _SHIFTS if n > 2 * abs(k)), float(len(_SHIFTS)))


def _independent(trial: Trial) -> None:
    if not trial.references.by_rows(trial.call.cls) and trial.call.cls != "Attention":
        raise Declined("its rows are not independent")


def _in_order(trial: Trial, order: Callable[[Any], Any], first: bool = False) -> dict[str, Expected]:
    """The outputs, or the first one alone, with their rows in another order. order: of numbers of rows."""
    _independent(trial)
    roles = trial.roles()
    decline_if(first and len(roles) < 2, "it has one output")
    return {role: moved(trial.plain[role], lambda t: t[order(torch.arange(len(t)))])
            for role in (roles[:1] if first else roles)}  # fmt: skip


def _others(trial: Trial) -> Iterator[Guess]:
    """Rows that are wrong, at most four, and whose result each has: the nearest one."""
    _independent(trial)
    wrong, mine = trial.wrong.get("output.0"), trial.mine().double().flatten(1)
    rows = [] if wrong is None or len(wrong) != len(mine) else wrong.nonzero().flatten().tolist()
    decline_if(not 0 < len(rows) <= 4, "no few rows are wrong")
    y = trial.plain["output.0"].value.double().reshape(mine.shape)
    found = [int((y - mine[k]).square().sum(1).argmin()) for k in rows]
    if all(a != b for a, b in zip(rows, found, strict=True)):
        yield Guess((tuple(rows), tuple(found)), choices=float(len(mine)) ** len(rows))


def _rows_of_others(trial: Trial, parameter: tuple[tuple[int, ...], tuple[int, ...]]) -> Expected:
    at = torch.arange(len(trial.mine()))
    at[list(parameter[0])] = torch.tensor(parameter[1])
    return moved(trial.plain["output.0"], lambda t: t[at])


def _before(trial: Trial) -> list[int]:
    before = trial.call.extra.get("before", {}).get("output.0")
    if before is None or before.shape[1:] != trial.mine().shape[1:]:
        raise Declined("no call of it before was captured")
    return [0]


def _call_before(trial: Trial, _: int) -> Any:
    before = trial.extra("before")["output.0"].double()
    n = min(len(before), len(trial.mine()))
    value = trial.plain["output.0"].value.double().reshape(trial.mine().shape).clone()
    value[:n] = before[:n]
    return value


def _head_views(trial: Trial) -> Iterator[tuple[int, int]]:
    """(heads in a token's row of the whole tensor, the first of the view's heads) of an input [tokens, heads, size]
    whose strides are not known."""
    x = trial.call.maybe("x", "hidden_states", "input", "0")
    if x is None or x.dim() != 3 or len(x) < 2 or trial.call.views:
        raise Declined("its input is no view of heads, or its strides are known")
    sizes = {**trial.call.config, **trial.call.parent}
    heads, kv = (sizes.get(n) for n in ("num_attention_heads", "num_key_value_heads"))
    heads, kv = trial.call.parent.get("num_heads", heads), trial.call.parent.get("num_kv_heads", kv)
    if isinstance(heads, int) and isinstance(kv, int) and x.shape[1] in (heads, kv):
        yield from ((heads + 2 * kv, first) for first in ((0,) if x.shape[1] == heads != kv else (heads, 0)))
    yield from ((x.shape[1] * k, 0) for k in (2, 3))


def _heads_as_contiguous(trial: Trial, view: tuple[int, int]) -> Any:
    x, (width, first) = trial.call.tensor("x", "hidden_states", "input", "0"), view
    size = x.shape[-1]
    lies = MemoryLayout((width * size, size, 1), first * size)
    place = next(f"inputs.{name}" for name, t in trial.call.inputs.items() if t is x)
    return _read_at(trial, place, x, lies, contiguous(x.shape), lies.offset)


def _views(trial: Trial) -> Iterator[tuple[str, str, int]]:
    """(name, strides, offset) of the inputs and arguments that were views."""
    for place, view in trial.call.views.items():
        yield place.removeprefix("inputs."), str(list(view.stride)), view.offset


def misread(strides: bool, offset: bool) -> Callable[[Trial, tuple[Any, ...]], Any]:
    """A view that a kernel reads without its strides, its offset, or both."""

    def found(trial: Trial, view: tuple[Any, ...]) -> Any:
        """A call whose input was no view is as it is."""
        place = next((p for p in (f"inputs.{view[0]}", str(view[0])) if p in trial.call.views), "")
        tensors = _tensors(trial.call)
        if not place:
            decline_if(not {f"inputs.{view[0]}", view[0]} & tensors.keys(), "this call has no such input")
            return trial.call
        x, lies = required(tensors.get(place), "this call has no such input"), trial.call.views[place]
        stride = contiguous(x.shape) if strides else lies.stride
        return _read_at(trial, place, x, lies, stride, 0 if offset else lies.offset)

    return found


def _tensors(call: Call) -> dict[str, Any]:
    """Inputs and arguments by place."""
    found: dict[str, Any] = {}
    by_place(call, lambda t, place: found.setdefault(place, t))
    return found


def _read_at(
    trial: Trial, place: str, x: Any, lies: MemoryLayout, stride: Sequence[int], begin: int
) -> Any:  # fmt: skip
    """The call, or its outputs, with an input read at another stride and offset. The call's other views of that shape
    of storage are taken to lie in it. What is not known of it is tried as two numbers each, in neither the same ratio
    (norms) nor the same order (choices): an output that differs between them has no expected value."""
    tensors = _tensors(trial.call)
    others = [(tensors[p], v) for p, v in trial.call.views.items()
              if p != place and v.stride[0] == lies.stride[0] and v.offset != lies.offset
              and p in tensors and tensors[p].dtype == x.dtype and len(tensors[p]) == len(x)]  # fmt: skip
    read, known = read_at(x, lies, stride, begin, trial.captured.first, others)
    if bool(known.all()):
        return _with_input(trial.call, place, read)
    decline_if(not x.is_floating_point() or x.element_size() < 2 or not known.any(), "its memory is not known")
    wide = x.double().abs()
    one, two = (trial.evaluate(_with_input(trial.call, place, torch.where(known, read, unknown.to(x.dtype))))
                for unknown in (wide + 1.0, -2.0 * wide.flip(-1) - 3.0))  # fmt: skip
    return {role: _where_equal(trial, role, e, two[role]) for role, e in one.items() if role in trial.roles()}


def _with_input(call: Call, place: str, tensor: Any) -> Call:
    found, name = by_place(call, lambda t, at: tensor if at == place else t), place.removeprefix("inputs.")
    extra = {"cache": this_step(call.extra["cache"], {name: tensor})} if "cache" in call.extra else {}
    return edited(found, inputs=found.inputs, extra=extra)


def _apart(trial: Trial) -> Iterator[tuple[str, str]]:
    """(role, strides) of the outputs that were views."""
    for role in trial.roles():
        record = trial.captured.records[role]
        if view_of(record.shape, record.stride) is not None:
            yield role, str(list(record.stride or ()))


def _written_as_contiguous(trial: Trial, output: tuple[str, str]) -> dict[str, Expected]:
    """The counterpart of `misread`: the view's places hold what a kernel without strides wrote there. The others hold
    what was there before."""
    role, mine, plain = output[0], trial.mine(output[0]), trial.plain[output[0]]
    stride = trial.captured.records[role].stride
    if stride is None or len(stride) != mine.dim() or plain.value.numel() != mine.numel():
        raise Declined("this call's output was no view, or some of its rows have no reference")
    dense = MemoryLayout(contiguous(mine.shape), 0, None)
    first = trial.captured.first
    known = read_at(mine, dense, stride, 0, first)[1]
    decline_if(not known.any(), "none of its places was written")
    moves = moved(plain, lambda t: read_at(t.reshape(mine.shape), dense, stride, 0, first)[0])
    return {role: _where_known(trial, role, moves, known)}


def _where_equal(trial: Trial, role: str, e: Expected, other: Expected) -> Expected:
    return _where_known(trial, role, e, (e.value.double() == other.value.double()).reshape(e.value.shape))


def _where_known(trial: Trial, role: str, e: Expected, known: Any) -> Expected:
    """``e`` where it is known, mine elsewhere, which is then neither right nor wrong."""
    mine = trial.mine(role).double()
    decline_if(e.value.numel() != mine.numel(), "some of its rows have no reference")
    y, known = e.value.double().reshape(mine.shape), known.reshape(mine.shape)
    plain = trial.plain[role].value.double().reshape(mine.shape)
    noise = torch.where(known, 0.0, 8.0 * (mine - plain).abs() + mine.abs())
    if e.noise is not None:
        noise = noise + e.noise.expand(e.value.shape).reshape(mine.shape)
    return replace(e, value=torch.where(known, y, mine), noise=noise, bound=None, exact=None)


def _heads_turned(trial: Trial, _: Any) -> Call:
    head, name = trial.call.attrs.get("head_size"), next(iter(trial.call.inputs), None)
    if not isinstance(head, int) or head < 2 or name is None:
        raise Declined("it has no heads")
    x = trial.call.inputs[name]
    decline_if(x.shape[-1] % head or x.shape[-1] == head, "its input is no row of heads")
    return edited(trial.call, inputs={name: x.unflatten(-1, (head, -1)).transpose(-1, -2).reshape(x.shape)})


def _weight(call: Call) -> Any:
    weight = call.stored("weight")
    decline_if(weight.dim() != 2 or not weight.is_floating_point(), "no plain matrix")
    return weight


def _transposed(square: bool) -> Callable[[Trial, Any], Call]:
    """The weight's transpose, or, of one that is not square, its memory read as that of its transpose."""

    def found(trial: Trial, _: Any) -> Call:
        weight = _weight(trial.call)
        rows, columns = weight.shape
        if (rows == columns) != square:
            raise Declined("it is not square" if square else "that is its transpose")
        return edited(trial.call, params={"weight": weight.reshape(columns, rows).T.contiguous()})

    return found


def _parts(trial: Trial) -> list[Guess]:
    """(name, first part's begin, second's, width) of parts of the output that may be exchanged."""
    width, own = trial.mine().shape[-1], trial.call.attrs
    q, kv = (trial.call.parent.get(f"{n}_size") for n in ("q", "kv"))
    if q is None and {"num_heads", "num_kv_heads", "head_size"} <= own.keys():
        q, kv = (int(own[n]) * int(own["head_size"]) for n in ("num_heads", "num_kv_heads"))
    ways = [("its halves", 0, width // 2, width // 2)] if width % 2 == 0 else []
    if isinstance(q, int) and isinstance(kv, int) and q + 2 * kv == width:
        ways += [("k and v", q, q + kv, kv)] + ([("q and k", 0, q, q), ("q and v", 0, 2 * q, q)] if q == kv else [])
    elif width % 3 == 0:
        ways += [(f"parts {a} and {b} of 3", a * width // 3, b * width // 3, width // 3)
                 for a, b in ((0, 1), (0, 2), (1, 2))]  # fmt: skip
    return among(ways)


def _columns_exchanged(trial: Trial, parameter: tuple[str, int, int, int]) -> Expected:
    _, a, b, n = parameter
    at = torch.arange(trial.mine().shape[-1])
    at[a : a + n], at[b : b + n] = torch.arange(b, b + n), torch.arange(a, a + n)
    return moved(trial.plain["output.0"], lambda t: t[..., at])


def _input_parts(trial: Trial) -> list[Guess]:
    width, head = linear_input(trial.call)[1].shape[-1], trial.call.parent.get("head_dim")
    sizes = [width // n for n in (2, 4, 8) if width % n == 0]
    sizes = [*sizes, *([head, width - head] if isinstance(head, int) and 0 < head < width else [])]
    return among(dict.fromkeys(sizes), float(len(sizes)))


def _input_shifted(trial: Trial, n: int) -> Call:
    name, x = linear_input(trial.call)
    return edited(trial.call, inputs={name: x.roll(n, -1)})


def _stale(trial: Trial) -> Iterator[Guess]:
    for role, columns, name, choices, _ in wrong_columns(trial):
        yield from among(((name, k, role, columns) for k in (1, -1)), 2.0 * choices)


def _columns_stale(trial: Trial, parameter: tuple[str, int, str, tuple[int, ...]]) -> dict[str, Expected]:
    _, by, role, columns = parameter
    value = trial.plain[role].value.clone()
    value[..., list(columns)] = trial.plain[role].value.roll(by, 0)[..., list(columns)]
    return {role: with_value(trial, value, role)}


def _norm_tails(trial: Trial) -> list[int]:
    width = normed_input(trial.call).shape[-1]
    return sorted({*(n for n in _SIZES if n < width), *(width % n for n in (128, 256, 512, 1024) if width > n)} - {0})


def _norm_tail(trial: Trial, n: int) -> Any:
    x = normed_input(trial.call)
    total = x[..., :-n].square().sum(-1, keepdim=True)
    return by_root(trial, (total / x.shape[-1] + own_epsilon(trial)).sqrt())


def _ranks_exchanged(trial: Trial, by: int) -> Any:
    value, ranks = trial.plain["output.0"].value.clone(), ranks_of(trial.call, len(summed_ranks(trial)))
    for k, one in enumerate(ranks):
        other = edited(one, params={"weight": _weight(ranks[(k + by) % len(ranks)])})
        value = value + (partial(other).value - partial(one).value).reshape(value.shape)
    return value


def _positions(call: Call) -> tuple[str, Any]:
    name = next((n for n in ("positions", "0") if n in call.inputs), None)
    if name is None or call.inputs[name].dim() != 1:
        raise Declined("its positions were not captured, or are several")
    return name, call.inputs[name]


def _position_shifts(trial: Trial) -> list[Guess]:
    positions = _positions(trial.call)[1]
    starts = positions[_begins(positions)].unique()[:8].tolist()
    shifts = dict.fromkeys([1, -1, 2, -2, *(-s for s in starts), *starts, *_SIZES[2:], 256, 512])
    return among((k, which) for k in shifts if k for which in ("query", "key"))


def _begins(positions: Any) -> Any:
    """bool [rows]: where a run of positions begins."""
    return torch.cat((torch.tensor([True]), positions.diff() != 1))


def _positions_shifted(trial: Trial, parameter: tuple[int, str]) -> dict[str, Expected]:
    by, which = parameter
    name, positions = _positions(trial.call)
    found = trial.evaluate(edited(trial.call, inputs={name: (positions + by).clamp(min=0)}))
    roles = {"query": ("output.0", "inplace.query", "inplace.1"), "key": ("output.1", "inplace.key", "inplace.2")}
    return {role: e for role, e in found.items() if role in roles[which]}


def _from_zero(trial: Trial, _: Any) -> Call:
    name, positions = _positions(trial.call)
    begins = _begins(positions).nonzero().flatten()
    chunk = torch.bucketize(torch.arange(len(positions)), begins, right=True) - 1
    return edited(trial.call, inputs={name: positions - positions[begins][chunk]})


def _of_the_batch(trial: Trial, _: Any) -> Call:
    name, positions = _positions(trial.call)
    return edited(trial.call, inputs={name: torch.arange(len(positions)).to(positions.dtype)})


def _handed(trial: Trial) -> Iterator[Guess]:
    """Of what parts of a block received: (the part's input, another input or output that the block could hand on)."""
    call, code = trial.call, trial.call.attrs.get(FORWARD) or {}
    outputs = {f"{path}[{role[7:]}]": r.shape for path, role, r in call.extra.get("children", ()) if role[7:].isdigit()}
    sources = {name: t.shape for name, t in call.inputs.items()} | outputs
    for role in (r for r in trial.roles() if r.startswith(INSIDE) and r in code):  # a recurrence computes the others
        size = trial.mine(role).numel()
        fits = [name for name, shape in sources.items() if math.prod(shape) == size and name != code.get(role)]
        yield from (Guess((role.removeprefix(INSIDE), name), choices=len(fits)) for name in fits)


def _other_handed(trial: Trial, parameter: tuple[str, str]) -> Call:
    part, source = parameter
    return edited(trial.call, attrs={FORWARD: {**trial.call.attrs[FORWARD], f"{INSIDE}{part}": source}})


CAUSES = (
    CauseRow("other_part_handed", ADDRESS, ANY, "with {1} handed to {0}", _other_handed, _handed, whole=True),
    CauseRow("rows_shifted", ADDRESS, ANY, "moved {0:+d} rows (each row holds another's result)",
             lambda t, n: _in_order(t, lambda at: at.roll(n)), _shifts, whole=True),
    CauseRow("first_output_shifted", ADDRESS, ANY, "with its first output moved {0:+d} rows",
             lambda t, n: _in_order(t, lambda at: at.roll(n), first=True), _shifts, whole=True),
    CauseRow("rows_of_others", ADDRESS, ANY, "in other rows (rows {0} hold the result of rows {1})", _rows_of_others,
             _others, whole=True),
    CauseRow("rows_reversed", ADDRESS, ANY, "with its rows in the opposite order",
             lambda t, _: _in_order(t, lambda at: at.flip(0)), whole=True),
    CauseRow("rows_exchanged", ADDRESS, ANY, "with neighbouring rows exchanged",
             lambda t, _: _in_order(t, lambda at: torch.where((at ^ 1) < len(at), at ^ 1, at)), whole=True),
    CauseRow("one_call_before", ADDRESS, ANY, "one call before (its output was not written in this one)",
             _call_before, _before, whole=True),
    CauseRow("other_offset", ADDRESS, ("OPTLearnedPositionalEmbedding",),
             "with a table offset of {0}", lambda t, n: edited(t.call, attrs={"offset": n}),
             lambda t: among(n for n in range(5) if n != t.call.attrs.get("offset", 2))),
    CauseRow("view_read_as_contiguous", ADDRESS, RMS,
             "of its input read as if it were contiguous (each token has {0} heads in memory)", _heads_as_contiguous,
             _head_views, whole=True),
    CauseRow("strides_ignored", ADDRESS, ANY, "of its {0} read as if it were contiguous (its strides are {1})",
             misread(True, False), _views, whole=True),
    CauseRow("offset_ignored", ADDRESS, ANY,
             "of its {0} read from the beginning of its storage (its view begins at element {2})", misread(False, True),
             lambda t: (v for v in _views(t) if v[2]), whole=True),
    CauseRow("view_ignored", ADDRESS, ANY, "of its {0} read from the beginning of its storage as if it were contiguous "
             "(its strides are {1}, its view begins at element {2})", misread(True, True),
             lambda t: (v for v in _views(t) if v[2]), whole=True),
    CauseRow("written_as_contiguous", ADDRESS, ANY, "with its {0} written as if it were contiguous (its strides are "
             "{1})", _written_as_contiguous, _apart, whole=True),
    CauseRow("input_heads_turned", ADDRESS, ANY, "with heads and channels exchanged in each row of its input",
             _heads_turned),
    CauseRow("weight_transposed", ADDRESS, LINEAR, "with its weight transposed", _transposed(True)),
    CauseRow("weight_read_transposed", ADDRESS, LINEAR, "with its weight's memory read as that of its transpose",
             _transposed(False)),
    CauseRow("columns_exchanged", ADDRESS, LINEAR, "with {0} of its columns exchanged", _columns_exchanged, _parts),
    CauseRow("input_columns_shifted", ADDRESS, LINEAR,
             "with its input's columns {0} places further on (the last ones in front)", _input_shifted, _input_parts),
    CauseRow("columns_stale", ADDRESS, ANY, "with {0} of the row {1} before (not written again)", _columns_stale,
             _stale, whole=True),
    CauseRow("norm_tail", ADDRESS, RMS, "with the last {0} columns left out of the sum of its squares", _norm_tail,
             _norm_tails),
    CauseRow("ranks_exchanged", ADDRESS, SUMS,
             "with each rank's input multiplied by the weight of the rank {0} further on", _ranks_exchanged,
             lambda t: summed_ranks(t)[1:]),
    CauseRow("positions_shifted", ADDRESS, _ROTARY, "with positions {0:+} {1}", _positions_shifted, _position_shifts),
    CauseRow("positions_from_zero", ADDRESS, _ROTARY, "with positions that begin at 0 in each chunk", _from_zero,
             whole=True),
    CauseRow("positions_of_the_batch", ADDRESS, _ROTARY,
             "with the position of a row in the batch instead of in its request", _of_the_batch, whole=True),
)  # fmt: skip
