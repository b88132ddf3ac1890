"""Causes of addresses: rows, heads, columns, ranks, experts, positions and blocks of the cache that are another's.

The problem: a kernel that reads or writes at a wrong place gives right numbers of something else. The idea: the edited
call has its input or its weight in another order, or the expected output has its parts elsewhere. Which row another
one's result stands in, and which columns, is read from mine's output, so that each way to choose as many counts as
tried. Where no record has what the memory between a view's rows holds, those rows have no expected value.

Not here: addresses that attention alone has (attention_causes.py), columns that are 0 (factors.py), a sum that stops
early (linear_causes.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from vllm_accprobe.opcheck.calls.views import known_memory, without_gaps
from vllm_accprobe.opcheck.causes.api import ADDRESS, FACTOR, Guess, Trial, cause, edited, fit_of, moved
from vllm_accprobe.opcheck.causes.attention_causes import _other, _sizes, _with_past
from vllm_accprobe.opcheck.causes.factors import _columns
from vllm_accprobe.opcheck.causes.linear_causes import LINEAR, _input
from vllm_accprobe.opcheck.causes.norms_causes import RMS, _by_root, _own
from vllm_accprobe.opcheck.causes.norms_causes import _input as _normed
from vllm_accprobe.opcheck.reference import Call, Declined, Expected
from vllm_accprobe.opcheck.references import attention
from vllm_accprobe.opcheck.references.linear import partial
from vllm_accprobe.opcheck.references.parts import ranks_of

_SHIFTS = (1, -1, 2, -2)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_REQUESTS, _BLOCKS = 8, (16, 32, 64, 128)
"""Chosen: other requests whose blocks are tried, and tokens in a block."""
_MOST = 192
"""Chosen: blocks that are tried."""


# --- rows ------------------------------------------------------------------------------------------------------------


def _shifts(trial: Trial) -> list[Guess]:
    _independent(trial)
    n = trial.mine().shape[0]
    return [Guess(k, choices=float(len(_SHIFTS))) for k in _SHIFTS if n > 2 * abs(k)]


def _independent(trial: Trial) -> None:
    if not trial.references.by_rows(trial.call.cls) and trial.call.cls != "Attention":
        raise Declined("its rows are not independent")


@cause(ADDRESS, "*", text="moved {0:+d} rows (each row holds another's result)", values=_shifts, whole=True)
def rows_shifted(trial: Trial, n: int) -> dict[str, Expected]:
    return {role: moved(trial.plain[role], lambda t: t.roll(n, 0)) for role in trial.roles()}


@cause(ADDRESS, "*", text="with its first output moved {0:+d} rows", values=_shifts, whole=True)
def first_output_shifted(trial: Trial, n: int) -> dict[str, Expected]:
    if len(trial.roles()) < 2:
        raise Declined("it has one output")
    role = trial.roles()[0]
    return {role: moved(trial.plain[role], lambda t: t.roll(n, 0))}


def _others(trial: Trial) -> Iterator[Guess]:
    """Rows that are wrong, at most four, and whose result each has: the nearest one."""
    _independent(trial)
    wrong, mine = trial.wrong.get("output.0"), trial.mine().double().flatten(1)
    rows = [] if wrong is None or len(wrong) != len(mine) else wrong.nonzero().flatten().tolist()
    if not 0 < len(rows) <= 4:
        raise Declined("no few rows are wrong")
    y = trial.plain["output.0"].value.double().reshape(mine.shape)
    found = [int((y - mine[k]).square().sum(1).argmin()) for k in rows]
    if all(a != b for a, b in zip(rows, found, strict=True)):
        yield Guess((tuple(rows), tuple(found)), choices=float(len(mine)) ** len(rows))


@cause(ADDRESS, "*", text="in other rows (rows {0} hold the result of rows {1})", values=_others, whole=True)
def rows_of_others(trial: Trial, parameter: tuple[tuple[int, ...], tuple[int, ...]]) -> Expected:
    at = torch.arange(len(trial.mine()))
    at[list(parameter[0])] = torch.tensor(parameter[1])
    return moved(trial.plain["output.0"], lambda t: t[at])


@cause(ADDRESS, "*", text="with its rows in the opposite order", whole=True)
def rows_reversed(trial: Trial, _: Any) -> dict[str, Expected]:
    _independent(trial)
    return {role: moved(trial.plain[role], lambda t: t.flip(0)) for role in trial.roles()}


@cause(ADDRESS, "*", text="with neighbouring rows exchanged", whole=True)
def rows_exchanged(trial: Trial, _: Any) -> dict[str, Expected]:
    _independent(trial)
    n = len(trial.mine())
    at = torch.arange(n).reshape(-1, 2).flip(1).flatten() if n % 2 == 0 else torch.arange(n - 1).reshape(-1, 2).flip(1)
    at = torch.cat((at.flatten(), torch.arange(len(at.flatten()), n)))
    return {role: moved(trial.plain[role], lambda t: t[at]) for role in trial.roles()}


def _calls_before(trial: Trial) -> list[int]:
    before = trial.call.extra.get("before", {}).get("output.0")
    if before is None or before.shape[1:] != trial.mine().shape[1:]:
        raise Declined("no call of it before was captured")
    return [0]


@cause(ADDRESS, "*", text="one call before (its output was not written in this one)", values=_calls_before, whole=True)
def one_call_before(trial: Trial, _: int) -> Expected:
    before, plain = trial.extra("before")["output.0"].double(), trial.plain["output.0"]
    n = min(len(before), len(trial.mine()))
    value = plain.value.double().reshape(trial.mine().shape).clone()
    value[:n] = before[:n]
    return replace(plain, value=value.reshape(plain.value.shape), exact=None)


# --- views -----------------------------------------------------------------------------------------------------------


def _views(trial: Trial) -> Iterator[tuple[int, int]]:
    """(heads in a token's row of the whole tensor, the first of the view's heads) of an input [tokens, heads, size]."""
    _independent(trial)
    x = trial.call.maybe("x", "hidden_states", "input", "0")
    if x is None or x.dim() != 3 or len(x) < 2 or trial.captured.whole is not None or list(_known_views(trial)):
        raise Declined("its input is no view of heads")
    of_inputs = ((trial.call.inputs.get(n.removeprefix("inputs.")), v) for n, v in trial.call.views.items())
    captured = next((v for t, v in of_inputs if t is x), None)
    if captured is not None:
        row, head, one = captured.stride
        if one == 1 and head == x.shape[2] and row % head == 0 and captured.offset % head == 0:
            yield row // head, captured.offset // head % (row // head)
        return
    sizes = {**trial.call.config, **trial.call.parent}
    heads, kv = (sizes.get(n) for n in ("num_attention_heads", "num_key_value_heads"))
    heads, kv = trial.call.parent.get("num_heads", heads), trial.call.parent.get("num_kv_heads", kv)
    if isinstance(heads, int) and isinstance(kv, int) and x.shape[1] in (heads, kv):
        yield from ((heads + 2 * kv, first) for first in ((0,) if x.shape[1] == heads != kv else (heads, 0)))
    yield from ((x.shape[1] * k, 0) for k in (2, 3))


@cause(ADDRESS, *RMS, text="of its input read without the gaps of its view (each token has {0} heads in memory)",
       values=_views, whole=True)  # fmt: skip
def view_read_as_contiguous(trial: Trial, view: tuple[int, int]) -> Expected:
    width, first = view
    plain = trial.plain["output.0"]
    y = plain.value.reshape(*trial.mine().shape)
    tokens, heads = y.shape[:2]
    at = first + torch.arange(tokens * heads)
    token, head = at // width, at % width - first
    known = ((head >= 0) & (head < heads)).reshape(tokens, heads, 1)
    value = y[token, head.clamp(0, heads - 1)].reshape(y.shape)
    mine = trial.mine().double()
    value = torch.where(known, value, mine)  # nobody knows what the memory between the rows holds
    unknown = torch.where(known, 0.0, 8.0 * (mine - y).abs() + mine.abs()).expand(y.shape)
    noise = unknown if plain.noise is None else plain.noise.expand(y.shape)[token, head.clamp(0, heads - 1)].reshape(
        y.shape) + unknown  # fmt: skip
    return replace(plain, value=value, noise=noise, bound=None, common=plain.common, exact=None)


def _known_views(trial: Trial) -> Iterator[tuple[str, str]]:
    """(name, stride) of the inputs that were views of memory that the dump has."""
    for place, view in trial.call.views.items():
        name = place.removeprefix("inputs.")
        if name in trial.call.inputs and known_memory(trial.call.inputs[name], view) is not None:
            yield name, str(list(view.stride))


@cause(ADDRESS, "*", text="of its {0} read without the gaps of its view (stride {1})", values=_known_views, whole=True)
def gaps_not_skipped(trial: Trial, view: tuple[str, str]) -> Call:
    name = view[0]
    return edited(trial.call, inputs={name: without_gaps(trial.call.inputs[name], trial.call.views[f"inputs.{name}"])})


def _offsets(trial: Trial) -> Iterator[tuple[str, int]]:
    for name, _ in _known_views(trial):
        if offset := trial.call.views[f"inputs.{name}"].offset:
            yield name, offset


@cause(ADDRESS, "*", text="of its {0} read from the beginning of its storage (its view begins at element {1})",
       values=_offsets, whole=True)  # fmt: skip
def offset_not_added(trial: Trial, view: tuple[str, int]) -> Call:
    name = view[0]
    x, lies = trial.call.inputs[name], trial.call.views[f"inputs.{name}"]
    memory = known_memory(x, lies)
    if memory is None:
        raise Declined("the memory of its input is not known")
    return edited(trial.call, inputs={name: memory.as_strided(x.shape, lies.stride, 0)})


@cause(ADDRESS, "*", text="with heads and channels exchanged in each row of its input")
def input_heads_turned(trial: Trial, _: Any) -> Call:
    head, name = trial.call.attrs.get("head_size"), next(iter(trial.call.inputs), None)
    if not isinstance(head, int) or head < 2 or name is None:
        raise Declined("it has no heads")
    x = trial.call.inputs[name]
    if x.shape[-1] % head or x.shape[-1] == head:
        raise Declined("its input is no row of heads")
    return edited(trial.call, inputs={name: x.unflatten(-1, (head, -1)).transpose(-1, -2).reshape(x.shape)})


# --- weights and columns ---------------------------------------------------------------------------------------------


def _weight(call: Call) -> Any:
    weight = call.stored("weight")
    if weight.dim() != 2 or not weight.is_floating_point():
        raise Declined("no plain matrix")
    return weight


@cause(ADDRESS, *LINEAR, text="with its weight transposed")
def weight_transposed(trial: Trial, _: Any) -> Call:
    weight = _weight(trial.call)
    if weight.shape[0] != weight.shape[1]:
        raise Declined("it is not square")
    return edited(trial.call, params={"weight": weight.T})


@cause(ADDRESS, *LINEAR, text="with its weight's memory read as that of its transpose")
def weight_read_transposed(trial: Trial, _: Any) -> Call:
    weight = _weight(trial.call)
    if weight.shape[0] == weight.shape[1]:
        raise Declined("that is its transpose")
    return edited(trial.call, params={"weight": weight.reshape(weight.shape[1], -1).T.contiguous()})


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
    return [Guess(w, choices=float(len(ways))) for w in ways]


@cause(ADDRESS, *LINEAR, text="with {0} of its columns exchanged", values=_parts)
def columns_exchanged(trial: Trial, parameter: tuple[str, int, int, int]) -> Expected:
    _, a, b, n = parameter
    at = torch.arange(trial.mine().shape[-1])
    at[a : a + n], at[b : b + n] = torch.arange(b, b + n), torch.arange(a, a + n)
    return moved(trial.plain["output.0"], lambda t: t[..., at])


def _input_parts(trial: Trial) -> list[Guess]:
    width, head = _input(trial.call)[1].shape[-1], trial.call.parent.get("head_dim")
    sizes = [width // n for n in (2, 4, 8) if width % n == 0]
    sizes = [*sizes, *([head, width - head] if isinstance(head, int) and 0 < head < width else [])]
    return [Guess(n, choices=float(len(sizes))) for n in dict.fromkeys(sizes)]


@cause(ADDRESS, *LINEAR, text="with its input's columns {0} places further on (the last ones in front)",
       values=_input_parts)  # fmt: skip
def input_columns_shifted(trial: Trial, n: int) -> Call:
    name, x = _input(trial.call)
    return edited(trial.call, inputs={name: x.roll(n, -1)})


def _stale(trial: Trial) -> Iterator[Guess]:
    for role, columns, name, choices, _y, _mine in _columns(trial):
        yield from (Guess((name, k, role, columns), choices=2.0 * choices) for k in (1, -1))


@cause(ADDRESS, "*", text="with {0} of the row {1} before (not written again)", values=_stale, whole=True)
def columns_stale(trial: Trial, parameter: tuple[str, int, str, tuple[int, ...]]) -> dict[str, Expected]:
    _, by, role, columns = parameter
    plain = trial.plain[role]
    value = plain.value.clone()
    value[..., list(columns)] = plain.value.roll(by, 0)[..., list(columns)]
    return {role: replace(plain, value=value, exact=None)}


def _norm_tails(trial: Trial) -> list[int]:
    width = _normed(trial.call).shape[-1]
    return sorted({*(n for n in _SIZES if n < width), *(width % n for n in (128, 256, 512, 1024) if width > n)} - {0})


@cause(ADDRESS, *RMS, text="with the last {0} columns left out of the sum of its squares", values=_norm_tails)
def norm_tail(trial: Trial, n: int) -> Expected:
    x = _normed(trial.call)
    total = x[..., :-n].square().sum(-1, keepdim=True)
    return _by_root(trial, (total / x.shape[-1] + _own(trial)).sqrt())


# --- ranks, experts --------------------------------------------------------------------------------------------------


def _rank_shifts(trial: Trial) -> list[int]:
    size = int(trial.call.attrs.get("tp_size", 1))
    if size < 2 or not trial.call.attr("reduce_results", default=True):
        raise Declined("no sum over ranks")
    return list(range(1, size))


@cause(ADDRESS, "RowParallelLinear", text="with each rank's input multiplied by the weight of the rank {0} further on",
       values=_rank_shifts)  # fmt: skip
def ranks_exchanged(trial: Trial, by: int) -> Expected:
    plain, ranks = trial.plain["output.0"], ranks_of(trial.call, len(_rank_shifts(trial)) + 1)
    value = plain.value.clone()
    for k, one in enumerate(ranks):
        other = edited(one, params={"weight": _weight(ranks[(k + by) % len(ranks)])})
        value = value + (partial(other).value - partial(one).value).reshape(value.shape)
    return replace(plain, value=value, exact=None)


# --- positions -------------------------------------------------------------------------------------------------------


def _positions(call: Call) -> tuple[str, Any]:
    name = next((n for n in ("positions", "0") if n in call.inputs), None)
    if name is None or call.inputs[name].dim() != 1:
        raise Declined("its positions were not captured, or are several")
    return name, call.inputs[name]


def _position_shifts(trial: Trial) -> list[Guess]:
    positions = _positions(trial.call)[1]
    starts = positions[torch.cat((torch.tensor([True]), positions.diff() != 1))].unique()[:8].tolist()
    shifts = dict.fromkeys([1, -1, 2, -2, *(-s for s in starts), *starts, *_SIZES[2:], 256, 512])
    ways = [(k, which) for k in shifts if k for which in ("query", "key")]
    return [Guess((k, which), choices=float(len(ways))) for k, which in ways]


@cause(ADDRESS, "*RotaryEmbedding", text="with positions {0:+} {1}", values=_position_shifts)
def positions_shifted(trial: Trial, parameter: tuple[int, str]) -> dict[str, Expected]:
    by, which = parameter
    name, positions = _positions(trial.call)
    return _turned(trial, edited(trial.call, inputs={name: (positions + by).clamp(min=0)}), which)


def _turned(trial: Trial, call: Call, which: str) -> dict[str, Expected]:
    roles = {"query": ("output.0", "inplace.query", "inplace.1"), "key": ("output.1", "inplace.key", "inplace.2")}
    return {role: e for role, e in trial.evaluate(call).items() if role in roles.get(which, (role,))}


@cause(ADDRESS, "*RotaryEmbedding", text="with positions that begin at 0 in each chunk", whole=True)
def positions_from_zero(trial: Trial, _: Any) -> Call:
    name, positions = _positions(trial.call)
    begins = torch.cat((torch.tensor([True]), positions.diff() != 1)).nonzero().flatten()
    chunk = torch.bucketize(torch.arange(len(positions)), begins, right=True) - 1
    return edited(trial.call, inputs={name: positions - positions[begins][chunk]})


@cause(ADDRESS, "*RotaryEmbedding", text="with the position of a row in the batch instead of in its request",
       whole=True)  # fmt: skip
def positions_of_the_batch(trial: Trial, _: Any) -> Call:
    name, positions = _positions(trial.call)
    return edited(trial.call, inputs={name: torch.arange(len(positions)).to(positions.dtype)})


# --- attention over a cache ------------------------------------------------------------------------------------------


def _past_times(trial: Trial, factor: float) -> Call:
    return _with_past(trial, lambda at, past: _other({n: t.double() for n, t in past.items()}, lambda t: t * factor))


@cause(FACTOR, "Attention", text="with keys and values times {0:.4g} in its cache", values=fit_of(_past_times, 1.0))
def past_times(trial: Trial, factor: float) -> Call:
    return _past_times(trial, factor)


def _key_tails(trial: Trial) -> list[Guess]:
    if trial.mine().numel() > 1 << 20:
        raise Declined("too large")
    return [Guess(n, choices=6.0) for n in (8, 16, 32, 64, 128, 256)]


@cause(ADDRESS, "Attention", text="without the keys behind the last whole block of {0}", values=_key_tails)
def tail_of_keys(trial: Trial, size: int) -> Expected:
    call, plain = trial.call, trial.plain["output.0"]
    heads, kv, head = _sizes(call)
    how = attention.attention_settings(call, heads, head)
    q, value = call.wide("query").reshape(-1, heads, head), plain.value.reshape(-1, heads, head).clone()
    for at, positions, past in trial.extra("cache").requests(True):
        k, v = (past[n].double().reshape(len(past[n]), kv, -1) for n in ("key", "value"))
        whole = (positions + 1) // size * size
        gone = (torch.arange(len(k))[None] >= whole[:, None]) & (whole > 0)[:, None]
        value[at] = attention.attend(q[at], k, v, query_positions=positions, hidden=gone, **how)[0]
    return replace(plain, value=value.reshape(plain.value.shape), exact=None)


def _blocks(trial: Trial) -> Iterator[Guess]:
    """(request, other one, first position, last) after which the request that is furthest off is nearest, on its worst
    rows."""
    call, mine = trial.call, trial.mine().double().flatten(1)
    off = (mine - trial.plain["output.0"].value.reshape(mine.shape)).square().sum(1)
    found = list(trial.extra("cache").requests(True))
    number = max(range(len(found)), key=lambda k: float(off[found[k][0]].sum()))
    heads, kv, head = _sizes(call)
    how = attention.attention_settings(call, heads, head)
    at, positions, past = found[number]
    some = off[at].topk(min(4, len(at))).indices
    q, at, positions = call.wide("query")[at[some]].reshape(-1, heads, head), at[some], positions[some]
    ways = [(other, size, b) for other in range(len(found)) if other != number for size in _BLOCKS
            for b in range(0, min(len(found[other][2]["key"]), len(past["key"])) - size + 1, size)][:_MOST]  # fmt: skip
    best, way = float(off[at].sum()) * 0.25, None
    for other, size, b in ways:
        k, v = (torch.cat((past[n][:b], found[other][2][n][b : b + size], past[n][b + size :])).double()
                .reshape(len(past[n]), kv, -1) for n in ("key", "value"))  # fmt: skip
        y = attention.attend(q, k, v, query_positions=positions, **how)[0].flatten(1)
        left = float((y - mine[at]).square().sum())
        best, way = (left, (number, other, b, b + size)) if left < best else (best, way)
    if way is not None:
        yield Guess(way, choices=float(len(ways)))


@cause(ADDRESS, "Attention", values=_blocks, whole=True,
       text="with positions {2} to {3} (the last not included) of its request {0} read from request {1}")  # fmt: skip
def block_of_another(trial: Trial, parameter: tuple[int, int, int, int]) -> Call:
    number, other, first, stop = parameter
    source = list(trial.extra("cache").requests(True))[other][2]
    return _with_past(trial, lambda at, past: {
        n: torch.cat((t[:first], source[n][first:stop], t[stop:])) for n, t in past.items()}, number)  # fmt: skip
