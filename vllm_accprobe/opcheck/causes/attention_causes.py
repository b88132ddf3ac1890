"""Causes of attention: scale, soft cap, window, sinks, slopes; heads, and places of the cache that hold something else.

The settings are edits of what references/attention.py reads. A window, and keys and values that are 0, are searched on
the rows of the request that is worst off: a window by sums that grow from a row's own position back; keys and values
that are 0, at one position or in one aligned block, by what their absence does to the softmax,
(Z o - sum e v) / (Z - sum e + n), for all positions at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from vllm_accprobe.opcheck.calls.case import CachedRun, StoredCache
from vllm_accprobe.opcheck.causes.api import (
    ADDRESS,
    FACTOR,
    SETTING,
    CauseRow,
    Guess,
    Trial,
    among,
    decline,
    edited,
    fit_of,
    fits,
    moved,
    named,
    once,
    with_value,
)
from vllm_accprobe.opcheck.floors.rounding import direction, middles
from vllm_accprobe.opcheck.reference import Call, Declined, Expected, decline_if
from vllm_accprobe.opcheck.references.attention import attend, attention_settings, scale_of
from vllm_accprobe.opcheck.references.caches import cache_format

PAGED, CACHED = ("Attention", "EncoderOnlyAttention"), ("Attention",)
_SINKS = ("sinks", "impl.sinks")
LATENT = "MLAAttention"
ANY = (*PAGED, "MMEncoderAttention", "MultiHeadAttention", LATENT)
_ROWS, _NUMBERS = 48, 1 << 23
_EACH = -1
"""All requests of a call, instead of one."""
_BLOCKS = (8, 16, 32, 64, 128, 256)
"""Tokens in a block of the caches that there are."""
_TOGETHER = 5
"""Chosen: requests of a step whose lost positions are tried together."""
_SOURCES = 8
"""Chosen: rows of a step that are tried in another's slot."""
_PIECES, _WAYS = (16, 32, 64, 128), 192
"""Chosen: tokens in a block that another request's may be, and such blocks that are tried."""
Past = Mapping[str, Any]
"""Of a request: "key" and "value", [positions, ...]."""


def sizes(call: Call) -> tuple[int, int, int]:
    """Heads, key heads, head size."""
    heads, kv, head = (int(call.attr(n)) for n in ("num_heads", "num_kv_heads", "head_size"))
    return heads, kv, head


def _settings(call: Call) -> dict[str, Any]:
    heads, _, head = sizes(call)
    return dict(attention_settings(call, heads, head))


def _keys_and_values(past: Past, kv: int) -> tuple[Any, Any]:
    """float64 [positions, key heads, head size]."""
    key, value = (past[n].double().reshape(len(past[n]), kv, -1) for n in ("key", "value"))
    return key, value


def by_requests(trial: Trial, y: Callable[[Any, Any, Any, Any, dict[str, Any]], Any]) -> Expected:
    """The output, computed again. y: (queries [n, heads, d], keys and values [m, key heads, d], positions of the rows,
    settings) → [n, heads, d]."""
    call = trial.call
    (heads, kv, head), how = sizes(call), _settings(call)
    q = call.wide("query").reshape(-1, heads, head)
    value = trial.plain["output.0"].value.reshape(-1, heads, head).clone()
    for at, positions, past in trial.extra("cache").requests(True):
        value[at] = y(q[at], *_keys_and_values(past, kv), positions, how)
    return with_value(trial, value)


def _head_size(call: Call) -> int:
    return int(call.wide("q").shape[-1] if call.cls == LATENT else call.attr("head_size"))


def _scaled(trial: Trial, scale: float) -> Call:
    return edited(trial.call, attrs={"scale": float(scale)})


def _scales(trial: Trial) -> Iterator[Guess]:
    call = trial.call
    own = scale_of(call, head := _head_size(call))
    scalar = call.config.get("query_pre_attn_scalar")
    known = [*named(trial, "scale", "scaling"), head**-0.5, *([scalar**-0.5] if scalar else [])]
    if call.cls == LATENT:  # of the query as it meets the cache, and without what positions take
        pe, latent = call.tensor("k_pe").shape[-1], call.tensor("kv_c_normed").shape[-1]
        known += [(latent + pe) ** -0.5, (head - pe) ** -0.5]
    known = [float(x) for x in known if not math.isclose(float(x), own, rel_tol=1e-12)]
    yield from map(Guess, dict.fromkeys(known))
    yield from among((x for x in (1.0, 1.0 / head, own * own, own**0.5) if x != own and x not in known), 4.0)
    yield from fits(_scaled, trial, [own])


def _keys_scaled(trial: Trial, times: float) -> Call:
    return _scaled(trial, times * scale_of(trial.call, _head_size(trial.call)))


def _cap(trial: Trial) -> list[float]:
    cap = trial.call.attrs.get("logits_soft_cap") or trial.call.config.get("attn_logit_softcapping")
    return [float(cap)] if cap else decline("it has no soft cap")


def _built_slopes(trial: Trial) -> list[str]:
    """The recorded slopes, where they are not the published ones."""
    built, due = trial.call.attrs.get("impl.alibi_slopes"), _settings(trial.call)["slopes"]
    if not built or due is None or all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(built, due, strict=False)):
        decline("its slopes are those of its heads")
    return [", ".join(f"{float(s):.4g}" for s in built[:4]) + (", ..." if len(built) > 4 else "")]


def _capped(trial: Trial, cap: float | None) -> Call:
    return edited(trial.call, attrs={"logits_soft_cap": cap}, config={"attn_logit_softcapping": None})


def _caps(trial: Trial) -> Iterator[Guess]:
    own, known = trial.call.attrs.get("logits_soft_cap"), named(trial, "logits_soft_cap", "attn_logit_softcapping")
    known = [*known, trial.call.config.get("attn_logit_softcapping")]
    yield from (Guess(float(x)) for x in dict.fromkeys(known) if x and x != own)
    yield from fits(_capped, trial, [3.0, 10.0, 30.0, 50.0])


def _windowed(trial: Trial, window: int | None) -> Call:
    return edited(trial.call, attrs={"sliding_window": window})


def _had_window(trial: Trial) -> list[int]:
    window = _settings(trial.call)["window"]
    return [] if window is None else [int(window)]


def _windows(trial: Trial) -> Iterator[Guess]:
    own = next(iter(_had_window(trial)), None)
    known = [*named(trial, "sliding_window"), trial.call.config.get("sliding_window")]
    near = [own - 1, own + 1] if own else []
    known = [x for x in dict.fromkeys([*known, *near]) if isinstance(x, int) and x > 0 and x != own]
    yield from map(Guess, known)
    worst = _worst(trial)
    found = _best_window(worst)
    if found and found != own and found not in known:
        yield Guess(found, choices=float(len(worst.k)))


def _by_heads(at: Callable[[Any], Any], heads: int) -> Callable[[Any], Any]:
    """``at`` of the heads [rows, heads, d] of a tensor of any shape."""
    return lambda t: at(t.reshape(t.shape[0], heads, -1)).reshape(t.shape)


def _heads_in_turn(trial: Trial, _: Any) -> Expected:
    heads, kv, _head = sizes(trial.call)
    decline_if(kv in (1, heads), "each order is the same")
    order = torch.arange(heads).reshape(-1, kv).T.flatten()  # by the key head that each should read
    query = _by_heads(lambda t: t[:, order], heads)(trial.call.tensor("query"))
    found = trial.evaluate(edited(trial.call, inputs={"query": query}))["output.0"]
    back = torch.argsort(order)
    return moved(found, _by_heads(lambda t: t[:, back], heads))


def with_past(
    trial: Trial, change: Callable[[Any, Past], Past], number: int = _EACH, read: Callable[[Any], Any] = lambda at: at
) -> Call:
    """The call whose cache has other keys and values for one request, or for `_EACH`. change: (positions of the rows,
    past) → past; read: positions of the rows → the last key that each reads."""
    cache = trial.extra("cache")
    runs = [CachedRun(*run) for run in cache.requests(True)]
    for k in range(len(runs)) if number == _EACH else (number,):
        positions = runs[k].positions
        runs[k] = CachedRun(runs[k].at, read(positions), change(positions, runs[k].past))
    return edited(trial.call, extra={"cache": StoredCache(runs, cache.why)})


def _other(past: Past, change: Callable[[Any], Any]) -> dict[str, Any]:
    return {n: change(t.clone()) if n in ("key", "value") else t for n, t in past.items()}


def _zeroed(t: Any, some: slice) -> Any:
    t[some] = 0
    return t


def _past_times(trial: Trial, factor: float) -> Call:
    return with_past(trial, lambda at, past: _other({n: t.double() for n, t in past.items()}, lambda t: t * factor))


def _without_tail(trial: Trial, size: int) -> Expected:
    def y(q: Any, k: Any, v: Any, positions: Any, how: dict[str, Any]) -> Any:
        whole = (positions + 1) // size * size
        gone = (torch.arange(len(k))[None] >= whole[:, None]) & (whole > 0)[:, None]
        return attend(q, k, v, query_positions=positions, hidden=gone, **how)[0]

    return by_requests(trial, y)


def _other_blocks(trial: Trial) -> Iterator[Guess]:
    """(request, other one, first position, last) after which the request that is furthest off is nearest, on its worst
    rows."""
    call, mine = trial.call, trial.mine().double().flatten(1)
    off = (mine - trial.plain["output.0"].value.reshape(mine.shape)).square().sum(1)
    found = list(trial.extra("cache").requests(True))
    number = max(range(len(found)), key=lambda k: float(off[found[k][0]].sum()))
    (heads, kv, head), how = sizes(call), _settings(call)
    at, positions, past = found[number]
    some = off[at].topk(min(4, len(at))).indices
    q, at, positions = call.wide("query")[at[some]].reshape(-1, heads, head), at[some], positions[some]
    ways = [(other, size, b) for other in range(len(found)) if other != number for size in _PIECES
            for b in range(0, min(len(found[other][2]["key"]), len(past["key"])) - size + 1, size)][:_WAYS]  # fmt: skip
    best, way = float(off[at].sum()) * 0.25, None
    for other, size, b in ways:
        k, v = (torch.cat((past[n][:b], found[other][2][n][b : b + size], past[n][b + size :])).double()
                .reshape(len(past[n]), kv, -1) for n in ("key", "value"))  # fmt: skip
        y = attend(q, k, v, query_positions=positions, **how)[0].flatten(1)
        left = float((y - mine[at]).square().sum())
        best, way = (left, (number, other, b, b + size)) if left < best else (best, way)
    if way is not None:
        yield Guess(way, choices=float(len(ways)))


def _block_of_another(trial: Trial, parameter: tuple[int, int, int, int]) -> Call:
    number, other, first, stop = parameter
    source = list(trial.extra("cache").requests(True))[other][2]
    return with_past(trial, lambda at, past: {
        n: torch.cat((t[:first], source[n][first:stop], t[stop:])) for n, t in past.items()}, number)  # fmt: skip


_Gone = tuple[int, int, int]
"""A request's number or `_EACH`, and the first and the stop of the positions whose key and value are 0."""


def _gone(trial: Trial) -> Iterator[Guess]:
    """(in words, the positions of one request or of several)."""
    worst, *others = _wrong_requests(trial)
    for nearer in (worst.mine, middles(worst.mine, worst.dtype)):
        for _, first, stop in sorted(_zeros(worst, nearer))[:4]:
            for request in (worst.request, _EACH):
                yield Guess((_places(first, stop), ((request, first, stop),)), choices=4.0 * len(worst.k))
    if 0 < len(others) < _TOGETHER:  # each lost its own
        best = [(w, *min(_zeros(w, w.mine))[1:]) for w in (worst, *others)]
        named = " and ".join(f"{_places(first, stop)} of its request {w.request}" for w, first, stop in best)
        choices = math.prod(4.0 * len(w.k) for w, *_ in best)
        yield Guess((named, tuple((w.request, first, stop) for w, first, stop in best)), choices=choices)


def _places(first: int, stop: int) -> str:
    return f"position {first}" if stop - first == 1 else f"positions {first} to {stop - 1}"


def _not_written(trial: Trial, where: tuple[str, tuple[_Gone, ...]]) -> Call:
    cache = trial.extra("cache")
    runs = [CachedRun(*run) for run in cache.requests(True)]
    for number, first, stop in where[1]:
        for k in range(len(runs)) if number == _EACH else (number,):
            past = _other(runs[k].past, partial(_zeroed, some=slice(first, stop)))
            runs[k] = replace(runs[k], past=past)
    return edited(trial.call, extra={"cache": StoredCache(runs, cache.why)})


def _overwritten(trial: Trial) -> Iterator[Guess]:
    """(request's number, position, row of this step) of the slot that holds another row's key and value; the rows are
    the first one and each request's last one, which padding repeats."""
    w, heads, kv = _worst(trial), *sizes(trial.call)[:2]
    rows = sorted({0, *(int(at[-1]) for at, _, _ in trial.extra("cache").requests(True) if len(at))})[:_SOURCES]
    some = max(1, _NUMBERS // (heads * len(w.k) * w.v.shape[-1]))
    q, mine, out, positions = w.q[:some], w.mine[:some], w.value[:some], w.positions[:some]
    k, v = (x.repeat_interleave(heads // kv, 1) for x in (w.k, w.v))
    distance = positions[:, None] - torch.arange(len(k))[None, :]
    seen = (distance >= 0) & (distance < (w.window or math.inf))
    scores = (torch.einsum("nhd,mhd->nhm", q, k) * w.scale).masked_fill(~seen.unsqueeze(1), -math.inf)
    best, where = 0.25 * float((mine - out).square().sum()), None
    for row in rows:
        key, value = (trial.call.wide(n)[row].reshape(kv, -1).repeat_interleave(heads // kv, 0)
                      for n in ("key", "value"))  # fmt: skip
        new = ((q * key).sum(-1) * w.scale).unsqueeze(-1)
        top = torch.maximum(scores.amax(-1, keepdim=True), new)
        e, added = torch.exp(scores - top).unsqueeze(-1), torch.exp(new - top).unsqueeze(-1)
        total = e.sum(2, keepdim=True)
        y = (total * out.unsqueeze(2) - e * v.transpose(0, 1) + added * value.unsqueeze(1)) / (total - e + added)
        y = torch.where(seen[:, None, :, None], y, out.unsqueeze(2))
        left = (y - mine.unsqueeze(2)).square().sum((0, 1, 3))
        if float(left.amin()) < best:
            best, where = float(left.amin()), (w.request, int(left.argmin()), row)
    if where is not None:
        yield Guess(where, choices=float(len(rows) * len(w.k)))


def _slot_overwritten(trial: Trial, where: tuple[int, int, int]) -> Call:
    number, position, row = where
    new = {n: trial.call.inputs[n][row].flatten() for n in ("key", "value")}

    def change(at: Any, past: Past) -> dict[str, Any]:
        found = {n: t.clone() for n, t in past.items()}
        for n, x in new.items():
            found[n][position] = x.reshape(found[n][position].shape).to(found[n].dtype)
        return found

    return with_past(trial, change, number)


def _past(
    name: str, text: str, change: Callable[..., Any], values: Any = once, whole: bool = False,
    read: Callable[[Any], Any] = lambda at: at,
) -> CauseRow:  # fmt: skip
    """A cause that edits the cache. change: (past, positions of the rows, number of key heads, parameter) → past; read:
    as in `with_past`."""

    def found(trial: Trial, value: Any) -> Call:
        kv = sizes(trial.call)[1]
        return with_past(trial, lambda at, past: change(past, at, kv, value), read=read)

    return CauseRow(name, ADDRESS, CACHED, text, found, values, whole)


def _taken(past: Past, key: str, value: str) -> dict[str, Any]:
    return {n: past[m].reshape(past[n].shape) for n, m in (("key", key), ("value", value))}


@dataclass(frozen=True)
class WorstRequest:
    """Rows of the request that is furthest off: queries, mine's output and the reference's [n, heads, ...], positions
    [n], keys and values [m, kv heads, ...]; request: its number in the call."""

    request: int
    q: Any
    mine: Any
    positions: Any
    k: Any
    v: Any
    value: Any
    scale: float
    window: int | None
    dtype: str


def _worst(trial: Trial) -> WorstRequest:
    """Raises Declined where no request is off, and where scores are more than scaled products."""
    return _wrong_requests(trial, 1)[0]


def _wrong_requests(trial: Trial, most: int = _TOGETHER) -> list[WorstRequest]:
    """The requests with rows that are off, the worst one first, which is there always. Raises Declined as `_worst`."""
    call = trial.call
    (heads, kv, head), settings = sizes(call), _settings(call)
    if settings["sinks"] is not None or settings["slopes"] is not None or settings["cap"]:
        raise Declined("a search for plain scores only")
    inputs, expected = trial.mine(), trial.plain["output.0"]
    mine, value = (t.double().reshape(inputs.shape[0], heads, -1) for t in (inputs, expected.value))
    q = call.wide("query").reshape(inputs.shape[0], heads, head)
    off: list[tuple[float, int, Any, Any, Mapping[str, Any]]] = []
    for number, (at, positions, past) in enumerate(trial.extra("cache").requests(True)):
        size = float((mine[at] - value[at]).norm() / value[at].norm().clamp(min=1e-30))
        if size > 0.0:
            off.append((size, number, at, positions, past))
    decline_if(not off, "no request is off")
    found, dtype = list[WorstRequest](), trial.dtype("output.0")
    for _, number, at, positions, past in sorted(off, key=lambda x: (-x[0], x[1]))[:most]:
        k, v = _keys_and_values(past, kv)
        error = (mine[at] - value[at]).flatten(1).square().sum(1)
        bad = error > 2.0 * (call.unit * value[at]).flatten(1).square().sum(1)
        if found and not bool(bad.any()):
            break
        first = int(positions[bad][0]) if bool(bad.any()) else int(positions[0])
        some = max(2, min(_ROWS, _NUMBERS // (heads * len(k))))
        later = (positions >= first).nonzero().flatten()
        picked = later[torch.linspace(0, len(later) - 1, min(some, len(later))).long()]
        at, positions = at[picked], positions[picked]
        way = direction(value[at], mine[at], dtype)
        nearer = middles(mine[at], dtype) if way.toward_zero else mine[at]
        scale, window = settings["scale"], settings["window"]
        found.append(WorstRequest(number, q[at], nearer, positions, k, v, value[at], scale, window, dtype))
    return found


def _best_window(w: WorstRequest) -> int:
    """The window with which the worst row comes closest: sums of e and e v from the row's own position back."""
    row = int((w.mine - w.value).flatten(1).square().sum(1).argmax())
    seen = int(w.positions[row]) + 1
    share = w.q.shape[1] // w.k.shape[1]
    heads = max(1, min(w.q.shape[1], _NUMBERS // (seen * w.v.shape[-1])))
    k, v = (x[:seen].flip(0).repeat_interleave(share, 1)[:, :heads] for x in (w.k, w.v))
    scores = torch.einsum("hd,mhd->mh", w.q[row, :heads], k) * w.scale
    e = torch.exp(scores - scores.amax(0))
    out = (e.unsqueeze(-1) * v).cumsum(0) / e.cumsum(0).clamp(min=1e-300).unsqueeze(-1)
    return 1 + int((out - w.mine[row, :heads]).square().sum((1, 2)).argmin())


def _zeros(w: WorstRequest, nearer: Any) -> list[tuple[float, int, int]]:
    """(what is left of the error, first, stop) of the best block of each size."""
    share = w.q.shape[1] // w.k.shape[1]
    k, v = (x.repeat_interleave(share, 1) for x in (w.k, w.v))
    scores = torch.einsum("nhd,mhd->hnm", w.q, k) * w.scale
    distance = w.positions[:, None] - torch.arange(len(k))[None, :]
    seen = (distance >= 0) & (distance < (w.window or math.inf))
    scores = scores.masked_fill(~seen, -math.inf)
    top = scores.amax(-1, keepdim=True).clamp(min=0.0)
    e, nothing = torch.exp(scores - top), torch.exp(-top) * seen
    total, out, off = e.sum(-1, keepdim=True), w.value.transpose(0, 1), (nearer - w.value).transpose(0, 1)
    found = []
    for size in (1, *(b for b in _BLOCKS if b < 2 * len(k))):
        gone, there = _blocks(e, size), _blocks(nothing, size)
        take = 1.0 / (total - gone + there).clamp(min=1e-300)
        keep = total * take - 1.0
        # |off - (keep out - take lost)|² where lost, the sum of e v over a block, is only needed in products
        lost_off = _blocks(e * torch.einsum("hne,mhe->hnm", off, v), size)
        lost_out = _blocks(e * torch.einsum("hne,mhe->hnm", out, v), size)
        lost_lost = e * e * v.square().sum(-1).T.unsqueeze(1) if size == 1 else _squares(e, v, size)
        change = (
            keep.square() * out.square().sum(-1, keepdim=True)
            - 2 * keep * take * lost_out
            + take.square() * lost_lost
            - 2 * keep * (off * out).sum(-1, keepdim=True)
            + 2 * take * lost_off
        )
        left = change.sum((0, 1))
        best = int(left.argmin())
        found.append((float(left[best]), best * size, min((best + 1) * size, len(k))))
    return found


def _blocks(x: Any, size: int) -> Any:
    """Sums over blocks of the last dimension."""
    if size == 1:
        return x
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size)).sum(-1)


def _squares(e: Any, v: Any, size: int) -> Any:
    """|sum over a block of e v|², [heads, n, blocks]."""
    parts = [torch.einsum("hnm,mhe->hne", a, b).square().sum(-1)
             for a, b in zip(e.split(size, -1), v.split(size), strict=True)]  # fmt: skip
    return torch.stack(parts, -1)


CAUSES = (
    CauseRow("past_times", FACTOR, CACHED, "with keys and values times {0:.4g} in its cache", _past_times,
             fit_of(_past_times, 1.0)),
    CauseRow("tail_of_keys", ADDRESS, CACHED, "without the keys behind the last whole block of {0}", _without_tail,
             lambda t: decline("too large") if t.mine().numel() > 1 << 20 else among(_BLOCKS)),
    CauseRow("block_of_another", ADDRESS, CACHED,
             "with positions {2} to {3} (the last not included) of its request {0} read from request {1}",
             _block_of_another, _other_blocks, whole=True),
    CauseRow("keys_at_other_scale", SETTING, PAGED, "with its 8-bit keys at {0:.4g} times their scale", _keys_scaled,
             lambda t: fits(_keys_scaled, t, [1.0]) if cache_format(t.call.attrs) is not None else ()),
    CauseRow("other_scale", SETTING, ANY, "with the softmax scale {0:.4g}", _scaled, _scales),
    CauseRow("no_soft_cap", SETTING, (*PAGED, LATENT), "without its soft cap of {0:g}", lambda t, _: _capped(t, None),
             _cap),
    CauseRow("other_soft_cap", SETTING, (*PAGED, LATENT), "with a soft cap of {0:.4g}", _capped, _caps),
    CauseRow("no_window", SETTING, PAGED, "without its sliding window of {0}", lambda t, _: _windowed(t, None),
             _had_window),
    CauseRow("other_window", SETTING, CACHED, "with a sliding window of {0}", _windowed, _windows),
    CauseRow("no_sinks", SETTING, PAGED, "without its attention sinks",
             lambda t, _: edited(t.call, without=_SINKS) if any(n in t.call.params or n in t.call.attrs for n in _SINKS)
             else decline("no sinks")),
    CauseRow("no_slopes", SETTING, PAGED, "without its ALiBi slopes",
             lambda t, _: decline("it has no slopes") if _settings(t.call)["slopes"] is None
             else edited(t.call, without=("impl.alibi_slopes",), config={"model_type": "", "alibi": False})),
    CauseRow("own_slopes", SETTING, PAGED, "with the ALiBi slopes that it was built with, {0}, not those of its heads",
             lambda t, _: edited(t.call, config={"model_type": "", "alibi": False}), _built_slopes),
    CauseRow("heads_in_turn", ADDRESS, PAGED,
             "with key heads dealt out in turn (query head h reads key head h modulo their number)", _heads_in_turn),
    CauseRow("heads_shifted", ADDRESS, PAGED, "with its heads' results {0} places further on",
             lambda t, n: moved(t.plain["output.0"], _by_heads(lambda y: y.roll(n, 1), sizes(t.call)[0])),
             lambda t: among(range(1, sizes(t.call)[0]))),
    CauseRow("positions_not_written", ADDRESS, CACHED,
             "if keys and values of {0} were 0 in the cache (written elsewhere, or not at all)", _not_written, _gone,
             whole=True),
    CauseRow("slot_overwritten", ADDRESS, CACHED,
             "if position {1} of its request {0} had key and value of row {2} of this step (its slot was overwritten)",
             _slot_overwritten, _overwritten, whole=True),
    _past("step_not_written", "if nothing of this step were in the cache yet (keys and values 0)",
          lambda past, at, kv, _: _other(past, lambda t: _zeroed(t, slice(int(at.min()), None))), whole=True),
    _past("past_lost", "if nothing of earlier steps were in the cache (keys and values 0)",
          lambda past, at, kv, _: _other(past, lambda t: _zeroed(t, slice(0, int(at.min())))), whole=True),
    _past("past_unread", "if only the keys of this step were read, and none of earlier steps",
          lambda past, at, kv, _: {n: t[int(at.min()) :] for n, t in past.items()}, whole=True,
          read=lambda at: at - at.min()),
    _past("own_key_unread", "if each row read the keys before its own position only", lambda past, *_: past,
          read=lambda at: (at - 1).clamp(min=0)),
    # With a window, a row without a next key reads one key less, as in a smaller window.
    _past("next_key_read", "if each row read the key after its own position, too", lambda past, *_: past,
          lambda t: [] if _had_window(t) else [None], read=lambda at: at + 1),
    _past("past_shifted", "with keys and values one position late in the cache",
          lambda past, at, kv, _: _other(past, lambda t: t.roll(1, 0))),
    _past("keys_for_values", "with its keys taken for values", lambda past, at, kv, _: _taken(past, "key", "key")),
    _past("keys_and_values_exchanged", "with keys and values exchanged",
          lambda past, at, kv, _: _taken(past, "value", "key")),
    _past("last_head_for_all", "with the last of its key heads' values in all of them",
          lambda past, at, kv, _: _other(past, _by_heads(lambda t: t[:, -1:].expand_as(t).clone(), kv)),
          lambda t: [None] if sizes(t.call)[1] > 1 else []),
    _past("key_heads_shifted", "with each query head's key head {0} further on",
          lambda past, at, kv, n: _other(past, _by_heads(lambda t: t.roll(-n, 1), kv)),
          lambda t: among(range(1, min(kv := sizes(t.call)[1], 9)), float(kv - 1))),
)  # fmt: skip
