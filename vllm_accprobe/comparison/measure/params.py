"""Parameters: equal, or the weights are different and nothing else needs an explanation.

The problem: two checkpoints, or one checkpoint loaded in two ways, look like an arithmetic fault. The idea: a parameter
must be equal to the bit; where the dtypes differ, after rounding the finer one to the coarser (ties to even). Without
payloads the hash of a fixed sample and the statistics decide. Tables that each machine computes for itself (rotary
cosines) are not weights and may differ by rounding.
Not here: activations (activations.py).
"""

from __future__ import annotations

import re

import numpy as np

from vllm_accprobe.align.ranks import ONE
from vllm_accprobe.comparison.measure import activations
from vllm_accprobe.comparison.measure.activations import OTHER_WIDTH, UNKNOWN_DTYPE
from vllm_accprobe.comparison.measure.measured import Part
from vllm_accprobe.comparison.measure.read import UNREAD, Loader, RowBlock, Stretch, Unread, cut_shape, find_cut
from vllm_accprobe.comparison.plan.unit import Group, Unit
from vllm_accprobe.dump.dtypes import DTYPES, widen
from vllm_accprobe.judge.floor import unit as rounding_unit
from vllm_accprobe.kernels import definition, rows
from vllm_accprobe.standards.limits import Standard

PACKED = "packed or quantised parameters of different dtypes"
ELSEWHERE_CUT = "fingerprints of parameters that are cut differently over ranks"
_COMPUTED = re.compile(r"cos_sin_cache|inv_freq|cos_cached|sin_cached|sinusoid|position_ids|attn_bias_cache")


def is_computed(role: str) -> bool:
    """Whether a buffer is computed by each run for itself rather than loaded."""
    return bool(_COMPUTED.search(role))


def compare_params(unit: Unit, golden: Loader, mine: Loader, standard: Standard) -> list[Part]:
    """Compares a parameter: one group on either side, or, where ranks are compared one by one, one for each rank."""
    found = []
    for m in unit.mine if len(unit.golden) > 1 else unit.mine[-1:]:
        g = next((g for g in unit.golden if g.moment == m.moment), unit.golden[-1])
        try:
            found.append(_compare(Part.of(m, g, whole=True), g, m, golden, mine, standard))
        except Unread:
            found.append(Part.of(m, g, whole=True, skip=UNREAD))
        finally:
            golden.forget()
            mine.forget()
    return found


def _compare(part: Part, g: Group, m: Group, golden: Loader, mine: Loader, standard: Standard) -> Part:
    if g.merge is None or m.merge is None:
        return _skipped(part, m.problem or g.problem)
    if "complex" in DTYPES[g.first.dtype].kind + DTYPES[m.first.dtype].kind:
        return _skipped(part, UNKNOWN_DTYPE)
    cuts = find_cut(g, m)
    shapes = cut_shape(g.merge.shape, cuts[0]), cut_shape(m.merge.shape, cuts[1])
    part.feature = shapes[1]
    if shapes[0] != shapes[1]:
        return _skipped(part, f"parameters: {OTHER_WIDTH}")
    if g.fingerprint is not None and g.fingerprint == m.fingerprint:
        part.agree(g, m)
        return _decided(part, True, "hash")
    floats = [DTYPES[x.first.dtype].kind == "float" for x in (g, m)]
    if g.first.dtype != m.first.dtype and not all(floats):
        return _skipped(part, PACKED)
    if not (g.readable and m.readable):
        return _by_sample(part, g, m, standard)
    a, b = golden.load(g, cuts[0]), mine.load(m, cuts[1])
    data = _common(a.data, a.dtype, b.data, b.dtype)
    at = np.arange(len(b.data))
    elements = np.zeros(len(definition.ELEMENT_FIELDS))
    part.table = rows.rows(data[0], data[2], at, data[1], data[2], at, widen, elements=elements)
    part.elements = tuple(elements.tolist())
    differ = (part.table[:, definition.MAX_D] > 0) | (part.table[:, definition.MISMATCH] > 0)
    if differ.any() and {a.dtype, b.dtype} == {"float16", "bfloat16"} and _one_number(a, b):
        return _decided(part, True, "values, as far as both dtypes hold them")
    if differ.any():
        r = int(part.table[:, definition.MAX_D].argmax())
        part.worst = (r, *rows.locate(data[0][r], data[2], data[1][r], data[2], widen))
    part.same_bits = not differ.any() and Stretch(a, at, b, at).same_bits()
    return _decided(part, not differ.any(), "values")


def _skipped(part: Part, why: str) -> Part:
    part.skip = why
    return part


def _decided(part: Part, equal: bool, by: str) -> Part:
    part.equal, part.by = equal, by
    return part


def _one_number(a: RowBlock, b: RowBlock) -> bool:
    """Whether each element of both can be the same number rounded to float16 and to bfloat16. Neither dtype holds all
    values of the other: float16 loses the last bits of what is small (below 2**-14), bfloat16 those of everything."""
    step = max((1 << 22) // max(a.data.shape[1], 1), 1)
    for start in range(0, len(a.data), step):
        x, y = (widen(s.data[start : start + step], s.dtype).astype(np.float64) for s in (a, b))
        half = np.abs(x if a.dtype == "float16" else y)
        brain = np.abs(y if a.dtype == "float16" else x)
        allowed = np.maximum(half * 2.0**-11, 2.0**-25) + brain * 2.0**-8
        with np.errstate(invalid="ignore"):
            good = (np.abs(x - y) <= allowed) | (x == y) | (np.isnan(x) & np.isnan(y))
        if not good.all():
            return False
    return True


def _by_sample(part: Part, g: Group, m: Group, standard: Standard) -> Part:
    assert g.merge is not None
    assert m.merge is not None
    if (g.merge.kind, g.merge.pieces) != (m.merge.kind, m.merge.pieces):
        return _skipped(part, ELSEWHERE_CUT)
    pairs = list(zip((g.records[i] for i in g.merge.use), (m.records[i] for i in m.merge.use), strict=True))
    if g.first.dtype == m.first.dtype and all(x.sample and y.sample for x, y in pairs):
        equal = all(x.sample == y.sample for x, y in pairs)
        part.stats = (0.0 if equal else float("inf"), 0.0)
        return _decided(part, equal, "hash of a sample")
    if all(x.stats and y.stats for x, y in pairs):
        errors = [activations.statistics_error(x.stats, y.stats) for x, y in pairs if x.stats and y.stats]
        part.stats = max(e[0] for e in errors), max(e[1] for e in errors)
        if len(pairs) == 1 and pairs[0][0].stats and pairs[0][1].stats:
            part.figures = activations.figures(pairs[0][0].stats), activations.figures(pairs[0][1].stats)
        allowed = max(rounding_unit(g.first.dtype), rounding_unit(m.first.dtype))
        if activations.checksums(g, m) is False:
            return _decided(part, False, "checksums")
        known = [activations.same_weights(x, y, allowed) for x, y in pairs]
        if None not in known:
            return _decided(part, all(known), "statistics")
        error = max(part.stats[0], part.stats[1] / standard.element)
        return _decided(part, error <= allowed, "statistics")
    same = activations.checksums(g, m)
    if same is not None:
        part.stats = 0.0 if same else float("inf"), 0.0
        return _decided(part, same, "checksums")
    return _skipped(part, "parameters without payload, sample or statistics" if g.merge.kind == ONE else ELSEWHERE_CUT)


def _common(a: np.ndarray, a_dtype: str, b: np.ndarray, b_dtype: str) -> tuple[np.ndarray, np.ndarray, str]:
    """Both in one dtype: the coarser one's, to which the finer is rounded."""
    if a_dtype == b_dtype:
        return a, b, a_dtype
    target = max((a_dtype, b_dtype), key=lambda d: DTYPES[d].eps)
    return _rounded(a, a_dtype, target), _rounded(b, b_dtype, target), target


def _rounded(bits: np.ndarray, dtype: str, target: str) -> np.ndarray:
    if dtype == target:
        return bits
    values = widen(bits, dtype)
    if target == "bfloat16":
        return round_to_bfloat16(values.astype(np.float32))
    if target in ("float16", "float32", "float64"):
        with np.errstate(over="ignore"):
            return values.astype(DTYPES[target].storage)
    # An 8-bit target: the nearest representable value is found by exact comparison of all 256.
    table = widen(np.arange(256, dtype=np.uint8), target).astype(np.float64)
    finite = np.flatnonzero(np.isfinite(table))
    order = finite[np.argsort(table[finite], kind="stable")]
    steps = table[order]
    at = np.clip(np.searchsorted(steps, values), 1, len(steps) - 1)
    nearer = np.where(values - steps[at - 1] <= steps[at] - values, at - 1, at)
    return order[nearer].astype(np.uint8)


def round_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 values as bfloat16 bits (uint16), rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded.astype(np.uint16)).astype(np.uint16)
