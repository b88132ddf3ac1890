"""The same rows alone, in small batches and in the whole: whose result depends on its batch?

The problem: a server never runs a request in the same batch twice, and a kernel that picks another blocking by the
number of its rows gives other numbers. The idea: for each size, the call's rows are run in pieces of that size and
compared, bit by bit, with the same rows of the whole call. A difference within the operator's floor is a remark ("not
batch-invariant"), beyond it wrong. The whole is run twice first. Which operators have independent rows, and where they
lie, is a table; for modules what the references declare (``by_rows``); elementwise operators by torch's own tag.
Attention's unit is the request. Pieces are narrowed, not copied, because a server's rows are dense as well.
Elsewhere: repeated runs (repeated.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from vllm_accprobe.judge.statistic import CHANCE
from vllm_accprobe.opcheck.calls.records import Captured
from vllm_accprobe.opcheck.reference import Call, Declined, decline_if
from vllm_accprobe.opcheck.reference_table import References
from vllm_accprobe.opcheck.references import aten
from vllm_accprobe.opcheck.repeat.machine_kernels import MachineKernels
from vllm_accprobe.opcheck.repeat.repeated import CallFloors, changed, concluded, equal_row, gap_words, largest_gap
from vllm_accprobe.opcheck.run.judged_row import without_verdict
from vllm_accprobe.opcheck.run.result_row import ERROR, SKIP, CheckResult

ROWS = "rows"
"""In Call.extra: place → dimension of the rows, of arguments that were marked by hand."""
NONE = "its rows are not declared to be independent"


@dataclass(frozen=True)
class RowAxes:
    """count: rows of the call; args: place → dimension; inputs: name → dimension; word: what such a row is."""

    count: int
    args: Mapping[int, int]
    inputs: Mapping[str, int]
    word: str = "row"


Axes = Mapping[int, int]
Rule = Callable[[Call], Axes]


def _always(*places: int, dim: int = 0) -> Rule:
    return lambda call: dict.fromkeys(places, dim)


def _arg(call: Call, k: int, name: str = "") -> Any:
    return call.args[k] if k < len(call.args) else call.kwargs.get(name)


def _addmm(call: Call) -> Axes:
    bias, x = call.args[:2]
    return {1: 0, 0: 0} if bias.dim() == 2 and bias.shape[0] == x.shape[0] > 1 else {1: 0}


def _product(call: Call) -> Axes:
    """Of two matrices; of stacks of them, whose products are independent: a row of a stack is a whole product."""
    x, w = call.args[:2]
    if w.dim() == 2 and x.dim() >= 2:
        return {0: 0}
    if x.dim() == w.dim() and x.dim() > 2 and x.shape[0] == w.shape[0]:
        return {0: 0, 1: 0}
    raise Declined(NONE)


def _along(call: Call) -> Axes:
    """Reductions and the like along dimensions that are not the rows'."""
    x, dims = call.args[0], _arg(call, 1, "dim")
    dims = [dims] if isinstance(dims, int) else dims
    decline_if(x.dim() < 2 or not dims or any(d % x.dim() == 0 for d in dims), NONE)
    return {0: 0}


def _topk(call: Call) -> Axes:
    x, dim = call.args[0], _arg(call, 2, "dim")
    decline_if(x.dim() and (dim if isinstance(dim, int) else -1) % x.dim() == 0, NONE)
    return _first(call)


def _first(call: Call, least: int = 2) -> Axes:
    """Of an input of so many dimensions or more."""
    decline_if(call.args[0].dim() < least, NONE)
    return {0: 0}


def _layer_norm(call: Call) -> Axes:
    return _first(call, 1 + len(_arg(call, 1, "normalized_shape")))


def _sdpa(call: Call) -> Axes:
    mask = _arg(call, 3, "attn_mask")
    mask = mask if mask is not None else call.kwargs.get("attn_bias")
    decline_if(isinstance(mask, torch.Tensor) and mask.dim() == 4 and mask.shape[0] > 1, "a mask for each request")
    return {0: 0, 1: 0, 2: 0}


_ATEN: dict[str, Rule] = {
    "mm": _always(0), "addmm": _addmm, "linear": _first, "matmul": _product, "bmm": _always(0, dim=1),
    "embedding": _always(1), "native_layer_norm": _layer_norm, "layer_norm": _layer_norm, "rms_norm": _layer_norm,
    "_fused_rms_norm": _layer_norm, "topk": _topk, "cumsum": _along,
    **dict.fromkeys(("_softmax", "softmax", "_log_softmax", "log_softmax", "sum", "mean", "amax", "amin", "max", "min",
                     "argmax", "argmin", "sort", "logsumexp", "var"), _along),
    **dict.fromkeys(("scaled_dot_product_attention", "_scaled_dot_product_flash_attention",
                     "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention"), _sdpa),
}  # fmt: skip
_REQUESTS = ("scaled_dot_product", "Attention")
_GATES = ("silu_and_mul", "mul_and_silu", "gelu_and_mul", "gelu_tanh_and_mul", "fatrelu_and_mul", "swigluoai_and_mul",
          "gelu_new", "gelu_fast", "gelu_quick")  # fmt: skip
_VENDOR: dict[str, Rule] = {
    "rms_norm": _always(0, 1),
    "fused_add_rms_norm": _always(0, 1),
    "rotary_embedding": _always(0, 1, 2),
    **dict.fromkeys(_GATES, _always(0, 1)),
}
_MODULES = ("*RotaryEmbedding", "VocabParallelEmbedding", "Embedding", "*WordEmbedding", "UnquantizedFusedMoEMethod")
"""Classes of modules whose rows are independent though their references do not say so: those have rows of other
tensors as well (positions, ids, routing weights)."""


def axes_of(call: Call, references: References) -> RowAxes:
    """Where the rows of ``call`` lie. Raises Declined where none are declared, or there are fewer than two."""
    if ROWS in call.extra:
        return _counted(call, {int(k): d for k, d in call.extra[ROWS].items()})
    if call.inputs:
        return _of_module(call, references)
    name = call.cls.removeprefix("torch.ops.")
    parts = name.split(".")
    decline_if(len(parts) < 2, NONE)
    rule = (_ATEN if parts[0] == "aten" else _VENDOR if parts[0] in ("_C", "vllm") else {}).get(parts[1])
    try:
        if rule is None:
            return _pointwise(call)
        requests = parts[1].startswith(_REQUESTS) or "scaled_dot" in name
        return _counted(call, rule(call), "request" if requests else "row")
    except (IndexError, AttributeError, TypeError, ZeroDivisionError):
        raise Declined(NONE) from None


def _counted(call: Call, args: Axes, word: str = "row") -> RowAxes:
    kept = {k: dim for k, dim in args.items() if isinstance(x := _arg(call, k), torch.Tensor) and dim < x.dim()}
    return _enough({call.args[k].shape[dim] for k, dim in kept.items()}, kept, {}, word)


def _enough(sizes: set[int], args: Axes, inputs: Mapping[str, int], word: str) -> RowAxes:
    decline_if(len(sizes) != 1, NONE)
    (count,) = sizes
    decline_if(count < 2, f"a single {word}: nothing to compare it with")
    return RowAxes(count, args, inputs, word)


def _pointwise(call: Call) -> RowAxes:
    """An elementwise operator: rows along the first dimension of whatever has that of the result."""
    operator = aten.of(call.cls)
    overloads = [operator] if hasattr(operator, "tags") else [getattr(operator, n) for n in operator.overloads()]
    decline_if(not all(torch.Tag.pointwise in o.tags for o in overloads), NONE)
    tensors = {k: v for k, v in enumerate(call.args) if isinstance(v, torch.Tensor)}
    decline_if(any(isinstance(v, torch.Tensor) for v in call.kwargs.values()), NONE)
    dims = max((t.dim() for t in tensors.values()), default=0)
    whole = {k: t for k, t in tensors.items() if t.dim() == dims}
    count = max((t.shape[0] for t in whole.values()), default=0) if dims else 0
    return _enough({count}, {k: 0 for k, t in whole.items() if t.shape[0] == count and count > 1}, {}, "row")


def _of_module(call: Call, references: References) -> RowAxes:
    if call.cls.endswith("Attention") and "cache" in call.extra:
        raise Declined("runs here request by request, whoever else is in the batch")
    decline_if(not references.by_rows(call.cls) and not any(fnmatchcase(call.cls, g) for g in _MODULES), NONE)
    decline_if(call.extra.get("ranks"), "adds up over ranks")
    counts = {t.shape[0] for t in call.inputs.values() if isinstance(t, torch.Tensor) and t.dim()}
    if any(not isinstance(t, torch.Tensor) for t in call.inputs.values()) or len(counts) != 1:
        raise Declined("its inputs do not have the same number of rows")
    return _enough(counts, {}, {k: 0 for k, t in call.inputs.items() if t.dim()}, "row")


def cut(call: Call, axes: RowAxes, rows: slice) -> Call:
    """``call`` with these rows only, where rows lie; outputs, which some kernels take their shape from, likewise."""
    span = rows.stop - rows.start
    args = tuple(v.narrow(axes.args[k], rows.start, span) if k in axes.args else v for k, v in enumerate(call.args))
    inputs = {k: v.narrow(axes.inputs[k], rows.start, span) if k in axes.inputs else v for k, v in call.inputs.items()}
    outputs = {r: t.narrow(0, rows.start, span) if t.dim() and t.shape[0] == axes.count else t
               for r, t in call.outputs.items()}  # fmt: skip
    return replace(call, args=args, inputs=inputs, outputs=outputs)


BATCH = "rows"
"""The measure of these rows."""
ALL = "all"
_MOST = 64
"""Chosen: pieces of one size that are run of one call, evenly spread: the first and the last are among them."""


@dataclass(frozen=True)
class BatchOptions:
    """sizes: as they were requested, numbers, ``N`` for the whole, ALL; strict: any difference fails."""

    sizes: tuple[str, ...]
    strict: bool = False
    chance: float = CHANCE

    def of(self, rows: int) -> list[int]:
        """The sizes for a call of so many rows, ascending, the whole left out."""
        found: set[int] = set()
        for size in self.sizes:
            if size == ALL:
                found |= {n for k in range(31) if (n := 1 << k) < rows} | {rows - 1}
            elif size != "N":
                found.add(int(size))
        return sorted(n for n in found if 0 < n < rows)


@dataclass
class RoleSizes:
    """Of one output. whole: of all rows; made: its rows as the pieces gave them; seen, differing: bool [rows]; by_size:
    size → (rows seen, rows that differ, largest difference); dim: of its rows."""

    whole: Any
    dim: int
    made: Any
    seen: Any
    differing: Any
    by_size: dict[int, tuple[int, int, float]] = field(default_factory=dict)


def batches(captured: Captured, kernels: MachineKernels, options: BatchOptions) -> Iterator[CheckResult]:
    """A row for each output of a call, or one that says why there is none."""
    try:
        call = kernels.ready(captured.what)
        axes = axes_of(call, kernels.references)
        sizes = options.of(axes.count)
        decline_if(not sizes, f"{axes.count} {axes.word}s: none of these sizes is smaller")
        whole = _run(kernels, call)
        again = _run(kernels, call)
        found = _pieces(kernels, call, axes, sizes, whole)
    except Declined as why:
        yield without_verdict(captured, "", None, ERROR if why.failed else SKIP, why.reason)
        return
    except (RuntimeError, ValueError) as error:
        text = f"its rows cannot be run alone: {' '.join(str(error).split())[:100]}"
        yield without_verdict(captured, "", None, SKIP, text)
        return
    if not found:
        yield without_verdict(captured, "", None, SKIP, "no output has a row for each of its rows")
        return
    floors = None
    for role, sized in found.items():
        if bool(sized.differing.any()) and floors is None:
            call = kernels.here(captured.what)
            floors = CallFloors.of(kernels.references, call, whole, options.chance, "the whole batch")
        unsteady = role not in again or bool(changed(whole[role], again[role]).any())
        yield _row(captured, role, sized, axes, floors, unsteady, options)


def _run(kernels: MachineKernels, call: Any) -> Mapping[str, Any]:
    made = kernels.run(call)
    if isinstance(made, Declined):
        raise made
    return made


def _pieces(
    kernels: MachineKernels, call: Any, axes: RowAxes, sizes: list[int], whole: Mapping[str, Any]
) -> dict[str, RoleSizes]:
    found: dict[str, RoleSizes] = {}
    for size in sizes:
        for start in _starts(axes.count, size):
            piece = cut(call, axes, slice(start, start + size))
            made = _run(kernels, piece)
            for role, part in made.items():
                if role not in whole:
                    continue
                if role not in found:
                    dim = _row_dim(whole[role], part, axes.count, size)
                    if dim is None:
                        continue
                    none = torch.zeros(axes.count, dtype=torch.bool)
                    found[role] = RoleSizes(whole[role], dim, whole[role].clone(), none, none.clone())
                _compare(found[role], part, size, start)
    return found


def _starts(rows: int, size: int) -> list[int]:
    """Where pieces of this size begin; the last one ends with the rows, all of them have the size."""
    starts = sorted({*range(0, rows - size + 1, size), rows - size})
    if len(starts) <= _MOST:
        return starts
    return sorted({starts[round(k * (len(starts) - 1) / (_MOST - 1))] for k in range(_MOST)})


def _row_dim(whole: Any, part: Any, rows: int, size: int) -> int | None:
    """The one dimension in which the output is as long as there are rows, and the piece's as long as the piece."""
    if whole.dim() != part.dim():
        return None
    other = [d for d in range(whole.dim()) if whole.shape[d] != part.shape[d]]
    if len(other) != 1 or whole.shape[other[0]] != rows or part.shape[other[0]] != size:
        return None
    return other[0]


def _compare(sized: RoleSizes, part: Any, size: int, start: int) -> None:
    theirs = sized.whole.narrow(sized.dim, start, size).movedim(sized.dim, 0)
    mine = part.movedim(sized.dim, 0)
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        raise ValueError(f"{size} rows give {mine.dtype} {list(mine.shape)}")
    other = changed(mine, theirs).reshape(size, -1).any(1)
    sized.seen[start : start + size] = True
    seen, differing, gap = sized.by_size.get(size, (0, 0, 0.0))
    if bool(other.any()):
        sized.differing[start : start + size] |= other
        gap = max(gap, largest_gap(mine, theirs))
        at = torch.arange(start, start + size)[other]
        sized.made.movedim(sized.dim, 0)[at] = mine[other]
    sized.by_size[size] = seen + size, differing + int(other.sum()), gap


def _row(
    c: Captured, role: str, sized: RoleSizes, axes: RowAxes, floors: CallFloors | None, unsteady: bool,
    options: BatchOptions,
) -> CheckResult:  # fmt: skip
    seen, differing = int(sized.seen.sum()), int(sized.differing.sum())
    left = "" if seen == axes.count else f"more than {_MOST} pieces of a size"
    row = equal_row(c, role, sized.whole)
    row = replace(row, rows=axes.count, checked=seen, unchecked_because=left, measure=BATCH)
    if not differing:
        return row
    first = int(sized.differing.nonzero()[0])
    v, against = floors.judge(role, sized.made) if floors is not None else (None, "")
    sizes = {n: {"rows": s, "differing": d, "largest_difference": g} for n, (s, d, g) in sized.by_size.items()}
    about = {"rows": axes.count, "word": axes.word, "differing": differing, "first": first, "sizes": sizes,
            "against": against, "between_runs": unsteady}  # fmt: skip
    which = ", ".join(f"{n}: {d} of {s}" for n, (s, d, _) in sized.by_size.items() if d)
    message = f"not batch-invariant: {axes.word}s that differ from the batch of {axes.count}, by size: {which}"
    message += f"; first {axes.word} {first}; {gap_words(max(g for _, _, g in sized.by_size.values()))}"
    if v is not None:
        about |= {"floors": v.value, "allowed": v.limit}
        message += f", {v.measure} error {v.value:.3g} of {v.limit:.3g} allowed against {against}"
    if unsteady:
        message += "; two runs of the whole batch differ as well: see --repeat"
    wrong = v is None or not v.passed
    message += "; beyond rounding" if wrong else "; within rounding"
    return concluded(row, v, wrong, options.strict, message, about, position=first)
