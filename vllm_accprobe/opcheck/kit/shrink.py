"""The smallest part of a failing call that still fails, and, where it may, with other numbers in it.

The problem: a failing call of a server has megabytes, of which a line shows the fault, and they are what somebody
wrote. The idea: delta debugging [A. Zeller and R. Hildebrandt, IEEE TSE 28 (2002) 183] of what a reference can be
evaluated on alone: rows, requests, heads, columns of a product or an activation. A part is kept while it fails in the
ways in which the whole call did: what was captured is wrong, and, with a kernel at hand, what the kernel gives. Without
one it is not known how its kernel takes fewer rows: then aligned blocks of `GRAIN` are left out, so that tails and
places within a tile stay, and a view stays one. Numbers are replaced where the fault is shown to stay: the kernel fails
with them, or the cause is proved, which says what it gives for them. Not here: how a case is checked (bench.py),
written (testgen.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from vllm_accprobe.opcheck.calls import case as cases
from vllm_accprobe.opcheck.calls.random_inputs import draw, moments_of
from vllm_accprobe.opcheck.calls.records import Captured
from vllm_accprobe.opcheck.calls.views import in_memory, is_contiguous, some_rows
from vllm_accprobe.opcheck.causes.api import Trial
from vllm_accprobe.opcheck.causes.search import Explanation, reproduced
from vllm_accprobe.opcheck.kit.bench import CAPTURED, DEVICE, Bench, Case
from vllm_accprobe.opcheck.reference import Call, Declined, Expected, MemoryLayout

GRAIN = 16
"""Chosen: rows, columns or heads that are left out together where no kernel is at hand; the smallest tile of a matrix
unit's instruction [PTX ISA, mma.m16n8k16]."""
_EVALUATIONS, _FEWEST, _BYTES = 96, 12, 4 << 30
"""Chosen: parts of one call that are tried, at most and at least; between, as many as the call goes into the bytes."""
_HEADS = ("num_heads", "num_kv_heads", "head_size")
_COLUMNS = ("*ParallelLinear", "*Linear", "ParallelLMHead")
_PAIRS = ("SiluAndMul", "MulAndSilu", "GeluAndMul")
_CONSTANTS = {"epsilon", "usual", "apart"}
"""In Call.extra: what does not change with a call's rows or columns."""
_ATTENTION = ("Attention", "EncoderOnlyAttention")
REAL = "the inputs are captured numbers, of the rows that are here"
DRAWN = "the inputs were drawn at random with the captured dtype, layout, mean and spread"


@dataclass(frozen=True)
class Shrunk:
    """call: what is left; kept: by axis, (how many are left, of how many); before, after: bytes of its tensors; values:
    a sentence on whose numbers these are, synthetic: whether none of the inputs' is a captured one."""

    call: Call
    kept: Mapping[str, tuple[int, int]]
    before: int
    after: int
    values: str
    synthetic: bool

    def about(self) -> dict[str, Any]:
        """What the case says of it."""
        kept = {word: f"{k} of {n}" for word, (k, n) in self.kept.items()}
        return {"kept": kept, "values": self.values} if self.values else {}


@dataclass(frozen=True)
class CutAxis:
    """word: what there is of it; size: how many; cut: the call with some of them, int64 [k] in order."""

    word: str
    size: int
    cut: Callable[[Call, Any], Call]


def nbytes(call: Call) -> int:
    """Of all tensors of a closed call, each once."""
    tensors: dict[str, Any] = {}
    cases.encode(call, tensors)
    return sum(t.numel() * t.element_size() for t in tensors.values())


def shrunk(
    captured: Captured, bench: Bench, about: Mapping[str, Any], cause: Explanation | None = None, *,
    real_values: bool = False, whole: bool = False,
) -> Shrunk:  # fmt: skip
    """A closed call, cut. bench: with the kernel, where there is one; about: of its case; whole: nothing is left out. A
    call that does not fail stays as it is."""
    call = captured.what
    before = nbytes(call)
    ways = [w for w in (CAPTURED, DEVICE) if (w == CAPTURED or bench.kernel) and _fails(call, bench, about, w)]
    if not ways:
        return Shrunk(call, {}, before, before, REAL, False)
    laid = {name for name, tensor, view in _views(call) if not is_contiguous(tensor.shape, view.stride)}

    def good(part: Call) -> bool:
        if any(name in laid and is_contiguous(tensor.shape, view.stride) for name, tensor, view in _views(part)):
            return False  # a kernel is right for it, whatever it does with strides
        return all(_fails(part, bench, about, way) for way in ways)

    grain, kept, left = (1 if DEVICE in ways else GRAIN), {}, max(_FEWEST, min(_EVALUATIONS, _BYTES // before))
    for make in () if whole else (rows, heads, columns):
        axis = make(call, bench)
        if axis is None or axis.size <= grain:
            continue
        at, spent = least(axis, call, good, grain, left)
        left -= spent
        if len(at) < axis.size:
            kept[axis.word] = len(at), axis.size
            call = axis.cut(call, at)
    values, synthetic = REAL, False
    if not real_values:
        other = _redrawn(call)
        if other is not None:
            by_cause = _by_cause(captured, call, other, bench, cause) if DEVICE not in ways else None
            found = _by_kernel(other, bench, CAPTURED in ways) if DEVICE in ways else by_cause
            if found is not None and all(_fails(found[0], bench, about, way) for way in ways):
                (call, why), synthetic = found, True
                values = f"{DRAWN}; {why}"
    return Shrunk(call, kept, before, nbytes(call), values, synthetic)


def _fails(call: Call, bench: Bench, about: Mapping[str, Any], way: str) -> bool:
    try:
        return any(o.status == "fail" for o in bench.check(Case(about, call, {}), way))
    except (ArithmeticError, IndexError, KeyError, RuntimeError, ValueError):
        return False  # a part that the reference cannot take is none


def least(
    axis: CutAxis, call: Call, good: Callable[[Call], bool], grain: int, most: int
) -> tuple[Any, int]:  # fmt: skip
    """(what is kept of the axis, int64 in order; parts that were tried), by delta debugging of blocks of ``grain``.
    most: parts to try."""
    blocks = list(torch.arange(axis.size).split(grain))
    count, tried = 2, 0

    def fails(part: Sequence[Any]) -> bool:
        nonlocal tried
        tried += 1
        return good(axis.cut(call, torch.cat(list(part))))

    while len(blocks) > 1 and tried < most:
        pieces = [blocks[k * len(blocks) // count : (k + 1) * len(blocks) // count] for k in range(count)]
        without = ([b for j, p in enumerate(pieces) if j != k for b in p] for k in range(count))
        # the last piece has the tail; of a view the first one reads nothing but its own memory
        smaller: Iterable[tuple[list[Any], int]] = ((p, 2) for p in (pieces if call.views else reversed(pieces)))
        rest: Iterable[tuple[list[Any], int]] = ((p, max(count - 1, 2)) for p in without) if count > 2 else ()
        found = next(((p, n) for part in (smaller, rest) for p, n in part if tried < most and fails(p)), None)
        if found is not None:
            blocks, count = found[0], min(found[1], len(found[0]))
        elif count < len(blocks):
            count = min(2 * count, len(blocks))
        else:
            break
    return torch.cat(blocks), tried


def _views(call: Call) -> Iterator[tuple[str, Any, MemoryLayout]]:
    for place, view in call.views.items():
        name = place.removeprefix("inputs.")
        if name in call.inputs and call.inputs[name].dim() == len(view.stride):
            yield name, call.inputs[name], view


def rows(call: Call, bench: Bench) -> CutAxis | None:
    """Rows of the first dimension, of references that work row by row; of attention queries, with their requests."""
    out = call.outputs.get("output.0")
    alone = bench.references.by_rows(call.cls) or call.cls.endswith("RotaryEmbedding")
    if out is None or not out.dim() or call.args or not (alone or call.cls in _ATTENTION):
        return None
    n = out.shape[0]
    tensors = [*call.inputs.values(), *call.outputs.values()]
    if any(not t.dim() or t.shape[0] != n for t in tensors) or set(call.extra) - {"cache", *_CONSTANTS}:
        return None
    return CutAxis("rows", n, _some_rows)


def _some_rows(call: Call, at: Any) -> Call:
    views = {f"inputs.{name}": some_rows(view, t.shape, at) for name, t, view in _views(call)}
    extra = dict(call.extra)
    if isinstance(cache := extra.get("cache"), cases.StoredCache):
        extra["cache"] = cases.StoredCache([r for run in cache.runs if (r := _of_run(call, run, at))], cache.why)
    return replace(
        call, views=views, extra=extra,
        inputs={k: t[at] for k, t in call.inputs.items()}, outputs={k: t[at] for k, t in call.outputs.items()},
    )  # fmt: skip


def _of_run(call: Call, run: cases.CachedRun, at: Any) -> cases.CachedRun | None:
    """A request's rows among ``at``, and what these look back at."""
    stays = torch.isin(run.at, at)
    if not bool(stays.any()):
        return None
    positions = run.positions[stays]
    last = int(positions.max()) + 1 if call.cls == "Attention" and len(positions) else None
    return cases.CachedRun(torch.searchsorted(at, run.at[stays]), positions, {k: t[:last] for k, t in run.past.items()})


def heads(call: Call, bench: Bench) -> CutAxis | None:
    """Heads of keys and values of an attention, with the queries that read them; heads of a norm by heads."""
    if call.cls in _ATTENTION and all(isinstance(call.attrs.get(n), int) for n in _HEADS):
        q, kv = call.attrs["num_heads"], call.attrs["num_kv_heads"]
        flat = {"query": q, "key": kv, "value": kv, "output.0": q}
        tensors = {**call.inputs, **call.outputs}
        fits = kv > 1 and q % kv == 0 and not call.params and not call.attrs.get("alibi_slopes")
        if fits and set(tensors) <= set(flat) and all(t.dim() == 2 and t.shape[1] % flat[n] == 0
                                                      for n, t in tensors.items()):  # fmt: skip
            return CutAxis("heads", kv, _some_heads)
    out = call.outputs.get("output.0")
    if out is not None and out.dim() == 3 and bench.references.by_rows(call.cls) and not call.views and all(
        t.shape == out.shape for t in (*call.inputs.values(), *call.outputs.values())
    ):  # fmt: skip
        return CutAxis("heads", out.shape[1], lambda c, at: _mapped(c, lambda t: t[:, at]))
    return None


def _mapped(call: Call, change: Callable[[Any], Any]) -> Call:
    sides = ({k: change(t) for k, t in side.items()} for side in (call.inputs, call.outputs))
    inputs, outputs = sides
    return replace(call, inputs=inputs, outputs=outputs)


def _some_heads(call: Call, at: Any) -> Call:
    """Strides of the whole are those of fewer heads of one row."""
    q, kv = call.attrs["num_heads"], call.attrs["num_kv_heads"]

    def some(t: Any) -> Any:
        groups = t.reshape(len(t), kv, -1) if t.dim() == 2 else t.reshape(len(t), kv, -1, t.shape[-1])
        return groups[:, at].reshape(len(t), *([-1] if t.dim() == 2 else [len(at), t.shape[-1]]))

    extra = dict(call.extra)
    if isinstance(cache := extra.get("cache"), cases.StoredCache):
        runs = [replace(r, past={k: some(t) for k, t in r.past.items()}) for r in cache.runs]
        extra["cache"] = cases.StoredCache(runs, cache.why)
    attrs = {**call.attrs, "num_heads": q // kv * len(at), "num_kv_heads": len(at)}
    views = {name: replace(view, memory=None) for name, view in call.views.items()}
    return replace(_mapped(call, some), attrs=attrs, extra=extra, views=views)


def columns(call: Call, bench: Bench) -> CutAxis | None:
    """Columns of a product's output, with their weights; of an activation, with what they are computed from."""
    out = call.outputs.get("output.0")
    if out is None or len(call.outputs) != 1 or call.args or set(call.extra) - _CONSTANTS or out.dim() < 1:
        return None
    n, weight = out.shape[-1], call.params.get("weight")
    if call.cls in _PAIRS and len(call.inputs) == 1 and not call.views:
        return CutAxis("columns", n, lambda c, at: replace(
            c, inputs={k: t[..., torch.cat((at, at + n))] for k, t in c.inputs.items()},
            outputs={k: t[..., at] for k, t in c.outputs.items()}))  # fmt: skip
    if weight is None or weight.dim() != 2 or len(weight) != n or set(call.params) - {"weight", "bias"}:
        return None
    if not any(fnmatchcase(call.cls, glob) for glob in _COLUMNS):
        return None
    if not weight.is_floating_point() or weight.element_size() < 2 or int(call.attrs.get("tp_size", 1)) > 1:
        return None
    return CutAxis("columns", n, lambda c, at: replace(
        c, params={k: t[at] for k, t in c.params.items()}, outputs={k: t[..., at] for k, t in c.outputs.items()}
    ))  # fmt: skip


def _redrawn(call: Call) -> Call | None:
    """The call with other numbers in its inputs and its history, token ids included; positions, weights and layouts
    stay. None where it has a tensor of unknown meaning."""
    if call.args or call.kwargs or set(call.extra) - {"cache", *_CONSTANTS}:
        return None
    generator = torch.Generator().manual_seed(0)

    def other(name: str, t: Any) -> Any:
        if "position" in name or not t.numel():
            return t
        try:
            return draw(tuple(t.shape), str(t.dtype).removeprefix("torch."), moments_of(t), generator)
        except Declined:
            return None

    inputs = {name: other(name, t) for name, t in call.inputs.items()}
    if any(t is None for t in inputs.values()):
        return None
    extra = dict(call.extra)
    if isinstance(cache := extra.get("cache"), cases.StoredCache):
        runs = [replace(run, past={k: other(k, t) for k, t in run.past.items()}) for run in cache.runs]
        extra["cache"] = cases.this_step(cases.StoredCache(runs, cache.why), inputs)
    views = dict(call.views)
    for name, _, view in _views(call):
        lies = in_memory(inputs[name], replace(view, memory=None))
        size = lies.untyped_storage().nbytes() // lies.element_size()
        memory = lies.as_strided((size,), (1,), 0)
        views[f"inputs.{name}"] = replace(view, offset=lies.storage_offset(), memory=memory)
    return replace(call, inputs=inputs, extra=extra, views=views)


def _by_kernel(call: Call, bench: Bench, wrong: bool) -> tuple[Call, str] | None:
    """wrong: what was captured is."""
    made = bench.made(call) if wrong else bench.references.evaluate(call)
    if isinstance(made, Declined) or not set(call.outputs) <= set(made):
        return None
    values = {role: x.value.reshape(call.outputs[role].shape) if isinstance(x, Expected) else x
              for role, x in made.items() if role in call.outputs}  # fmt: skip
    outputs = {role: values[role].to("cpu", t.dtype) for role, t in call.outputs.items()}
    whose = "what the kernel of --kernel gave for them" if wrong else "the reference, rounded: the engine was right"
    return replace(call, outputs=outputs), f"what is called captured is {whose}"


def _by_cause(
    captured: Captured, part: Call, other: Call, bench: Bench, cause: Explanation | None
) -> tuple[Call, str] | None:
    """Where the first cause explains the part as well: what it gives for the other numbers."""
    for found in () if cause is None else cause.found[:1]:
        tensors = {f"input.{name}": t for name, t in part.inputs.items()} | dict(part.outputs)
        records = {role: replace(r, shape=tuple(tensors[role].shape))
                   for role, r in captured.records.items() if role in tensors}  # fmt: skip
        trials = []
        for call in (part, other):
            plain = bench.references.evaluate(call)
            if isinstance(plain, Declined):
                return None
            if call is other:
                call = replace(call, outputs={r: plain[r].value.reshape(t.shape).to(t.dtype) if r in plain else t
                                              for r, t in call.outputs.items()})  # fmt: skip
            trials.append(Trial(replace(captured, what=call, records=records, whole=None), bench.references, plain))
        expected = reproduced(found, *trials)
        if expected is None or not set(other.outputs) <= set(expected):
            return None
        outputs = {r: expected[r].value.reshape(t.shape).to(t.dtype) for r, t in other.outputs.items()}
        return replace(other, outputs=outputs), "what is called captured is what this cause gives for them"
    return None


def median_share(found: Sequence[Shrunk]) -> float:
    """Of the calls that were cut, the median of what is left of their bytes; nan for none."""
    shares = sorted(s.after / s.before for s in found if s.kept and s.before)
    return shares[len(shares) // 2] if shares else math.nan
