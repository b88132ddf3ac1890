"""Whole rows of finite numbers, as vector code that is written out.

The problem: rows may be short. What a compiler puts around each loop (arguments on the stack, checks that arrays do not
overlap, four vectors per sum to be folded) costs more than 64 elements do. The idea: one function for all rows of a
block, whose loops are LLVM's own instructions: sums and maxima of a row in one vector each, folded once, then the peak
while the row is still in the nearest cache; meanwhile the next block is on its way there, which is worth a quarter of
the speed. LLVM cuts the vectors into what the processor has. A block of which no |g| is small enough to be left out
has loops of its own (measured: 1.15 times as fast on AVX-512, 1.3 times on AVX2), and so have rows without
ELEMENT_FIELDS, as arithmetic limits the speed (1.3 to 1.6 times).
Not here: what is not finite, and rows or parts of rows that are no multiple of a vector (loops.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

from llvmlite import binding, ir

from vllm_accprobe.compiler import emitted

LANES = 8
"""Numbers in a vector: one of AVX-512's registers in float64, several of a smaller processor's."""
_UNROLLED = 4
"""Vectors of a row that are taken at a time."""
_WIDTH = 11
"""Columns of a row table."""
_DIGITS = 16
"""Bits of a count: three of them fit into a word, so that all sums fit into the processor's registers. Counts go up to
BLOCK."""
_SUMS = ("contract", "nsz", "reassoc")
_IN_ORDER = ("contract", "nsz")
"""The same sums, to the bit, however many vectors are taken at a time."""
_WORD, _ONE = ir.IntType(64), ir.DoubleType()
_WIDE, _NARROW = ir.VectorType(_ONE, LANES), ir.VectorType(ir.FloatType(), LANES)
_COUNTS = ir.VectorType(_WORD, LANES)
_ZERO, _INFINITE = ir.Constant(_WIDE, [0.0] * LANES), ir.Constant(_WIDE, [float("inf")] * LANES)
_NONE = ir.Constant(_COUNTS, [0] * LANES)


@emitted
def add_rows(
    body: Any, g: Any, m: Any, q: Any, rel: Any, out: Any, first: Any, n: Any, width: Any, whole: Any, large: Any,
    eps: Any, elements: Any, g_bits: Any, g_size: Any, m_bits: Any, m_size: Any,
) -> None:  # fmt: skip
    """Takes n rows of ``width`` finite numbers into the row table ``out`` from row ``first`` on.

    g, m: float32, the rows one after the other, ``width`` a multiple of LANES. q, rel: float64, become |d| and
    |d| / |g|, inf where g is 0. out: float64 [rows, 11], n is right: gg, mm, gm, dd, abs_d, max_d and max_rel take the
    rows in. whole: these are whole rows and not parts: max_rel and peak are finished too. large: all |g| are above
    TINY, so that nothing is left out of any sum. elements: float64 [10], takes in definition.ELEMENT_FIELDS with
    ``eps``; [0]: they are not added up. g_bits, m_bits: uint8, what the numbers were built from, g_size and m_size
    bytes each; as many that lie behind them are on their way to the cache afterwards. At most BLOCK numbers. None of it
    is checked.
    """
    builder = body.builder
    sides, table, total = [a.at for a in (g, m, q, rel)], out.at, elements.at
    start, rows, size, done, large, eps = (x.value for x in (first, n, width, whole, large, eps))
    every = builder.mul(rows, size)
    strides = (g_bits.at, g_size.value), (m_bits.at, m_size.value)
    next_loads = [(builder.gep(b, [builder.mul(every, s)]), s) for b, s in strides]

    def places(row: Any, of: Sequence[Any]) -> list[Any]:
        """Where the row begins in each array and in the table."""
        at, line = builder.mul(row, size), builder.mul(builder.add(start, row), ir.Constant(_WORD, _WIDTH))
        return [*(builder.gep(a, [at]) for a in of), builder.gep(table, [line])]

    def add(begin: Sequence[Any], all_seen: bool = False) -> None:
        with _Counted(builder, rows, 1, begin) as loop:
            *both, d, r, line = places(loop.at, sides)
            at = builder.mul(loop.at, size)
            following = [(builder.gep(b, [builder.mul(at, s)]), s) for b, s in next_loads]
            wide = _spread(builder, eps)
            found, loop.following = _sums(builder, both, d, r, size, wide, loop.sums, following, all_seen)
            _take_in(builder, builder.gep(line, [ir.Constant(_WORD, 1)]), found, (5, 6))
            if all_seen:
                _take_in(builder, total, [None] * 6 + [found[6], found[4], found[5]], (6, 8))
        if begin:
            _take_in(builder, total, _unpacked(builder, loop.following), (6, 8))

    with builder.if_else(builder.icmp_signed(">", elements.size.value, ir.Constant(_WORD, 0))) as (wanted, unwanted):
        with wanted, builder.if_else(large) as branches:
            for branch, all_seen in zip(branches, (True, False), strict=True):
                with branch:
                    add([*[_NONE] * 2, *[_ZERO] * (1 if all_seen else 4)], all_seen)
        with unwanted:
            add([])
    # Apart, so that one row's root and quotient are on their way while the others are added up.
    with builder.if_then(done), _Counted(builder, rows, 1, []) as again:
        d, r, line = places(again.at, sides[2:])
        _finish(builder, d, r, line, size)


@emitted
def add_columns(body: Any, g: Any, m: Any, scales: Any, n: Any, width: Any, sums: Any) -> None:
    """Adds n rows of ``width`` finite numbers to kernels.structure's sums of each column but how many rows there are.

    g, m: float32, the rows one after the other, ``width`` a multiple of LANES. scales: float64, 1 / |g| of each row.
    sums: float64 [6 * width]. A column's sums stay in registers while all rows are added, in their order.
    """
    builder = body.builder
    rows, size, total = n.value, width.value, sums.at
    with _Counted(builder, size, LANES, []) as columns:
        starts = [builder.mul(size, ir.Constant(_WORD, k)) for k in (0, 1, 2, 3, 5)]
        cells = [builder.gep(total, [builder.add(start, columns.at)]) for start in starts]
        with _Counted(builder, rows, 1, [_load(builder, cell, None, _WIDE, 8) for cell in cells]) as loop:
            at = builder.add(builder.mul(loop.at, size), columns.at)
            x, y = (builder.fpext(_load(builder, a.at, at, _NARROW, 4), _WIDE) for a in (g, m))
            scale = _spread(builder, builder.load(builder.gep(scales.at, [loop.at])))
            d = builder.fmul(builder.fsub(y, x, flags=_SUMS), scale, flags=_SUMS)
            x = builder.fmul(x, scale, flags=_SUMS)
            both = builder.fmul(x, d, flags=_SUMS)
            squares = [builder.fmul(v, v, flags=_SUMS) for v in (d, x, both)]
            more = [*squares[:2], both, squares[2], d]
            loop.following = [builder.fadd(s, v, flags=_SUMS) for s, v in zip(loop.sums, more, strict=True)]
        for cell, value in zip(cells, loop.following, strict=True):
            builder.store(value, builder.bitcast(cell, _WIDE.as_pointer()), align=8)


class _Counted:
    """for at in range(start, stop, step). sums: vectors that begin as they are passed and become ``following``, which
    after the loop is what they are then."""

    def __init__(self, builder: Any, stop: Any, step: int, begin: Sequence[Any], start: Any = None):
        self.builder, self.stop, self.step, self.begin = builder, stop, step, begin
        self.start = ir.Constant(_WORD, 0) if start is None else start

    def __enter__(self) -> _Counted:
        before, self.head = self.builder.basic_block, self.builder.append_basic_block()
        self.builder.branch(self.head)
        self.builder.position_at_end(self.head)
        self.at = self.builder.phi(_WORD)
        self.at.add_incoming(self.start, before)
        self.sums = [self.builder.phi(value.type) for value in self.begin]
        for s, value in zip(self.sums, self.begin, strict=True):
            s.add_incoming(value, before)
        inside, self.after = (self.builder.append_basic_block() for _ in range(2))
        self.builder.cbranch(self.builder.icmp_signed("<", self.at, self.stop), inside, self.after)
        self.builder.position_at_end(inside)
        self.following: Sequence[Any] = self.sums
        return self

    def __exit__(self, *error: Any) -> None:
        here = self.builder.basic_block
        self.at.add_incoming(self.builder.add(self.at, ir.Constant(_WORD, self.step)), here)
        for s, new in zip(self.sums, self.following, strict=True):
            s.add_incoming(new, here)
        self.builder.branch(self.head)
        self.builder.position_at_end(self.after)
        self.following = self.sums


def _each(builder: Any, size: Any, begin: Sequence[Any], following: Callable[..., list[Any]], n: int) -> Sequence[Any]:
    """``begin`` after all vectors of a row, n at a time, the rest one by one. following: (where the first one lies, how
    many, sums so far) to the sums with them."""
    most = builder.and_(size, ir.Constant(_WORD, -n * LANES))
    with _Counted(builder, most, n * LANES, begin) as many:
        many.following = following(many.at, n, many.sums)
    with _Counted(builder, size, LANES, many.following, most) as rest:
        rest.following = following(rest.at, 1, rest.sums)
    return rest.following


def _sums(
    builder: Any, both: Sequence[Any], q: Any, rel: Any, size: Any, eps: Any, elements: Any, next_loads: Any,
    all_seen: bool,
) -> tuple[Any, Any]:
    """Of one row: (sums of g*g, m*m, g*m, d*d, |d|, the largest |d| and |d| / |g|; elements with those of the row)."""

    def following(start: Any, n: int, sums: Sequence[Any]) -> list[Any]:
        for bits, width in next_loads:
            for k in range(0, n, 2):  # a line of the cache has at least 16 numbers
                at = builder.add(start, ir.Constant(_WORD, k * LANES))
                _prefetch(builder, builder.gep(bits, [builder.mul(at, width)]))
        for k in range(n):
            sums = one(builder.add(start, ir.Constant(_WORD, k * LANES)), k, sums)
        return list(sums)

    def one(at: Any, k: int, sums: Sequence[Any]) -> list[Any]:
        x, y = (builder.fpext(_load(builder, a, at, _NARROW, 4), _WIDE) for a in both)
        d, a = (_call(builder, "fabs", v) for v in (builder.fsub(y, x), x))
        ratio = known = kept = _quotient(builder, d, a) if slow and k % 2 else builder.fdiv(d, a)
        if not all_seen:
            some = builder.fcmp_ordered(">", a, _ZERO)
            known, kept = builder.select(some, ratio, _INFINITE), builder.select(some, ratio, _ZERO)
        for value, array in ((d, q), (known, rel)):
            builder.store(value, builder.bitcast(builder.gep(array, [at]), _WIDE.as_pointer()), align=8)
        products = [builder.fmul(*pair, flags=_IN_ORDER) for pair in ((x, x), (y, y), (x, y), (d, d))]
        new = [builder.fadd(s, v, flags=_IN_ORDER) for s, v in zip(sums[:5], (*products, d), strict=True)]
        new += [_call(builder, "maxnum", s, v) for s, v in zip(sums[5:7], (d, kept), strict=True)]
        return new + (_elements(builder, a, d, ratio, eps, sums[7:], all_seen) if elements else [])

    # Intel's processors with AVX-512 divide 8 numbers in 16 cycles; AMD's, which have SSE4a, do not wait for it.
    slow = _has("avx512f") and not _has("sse4a")
    n = 1 if elements and not _has("avx512f") else _UNROLLED  # 16 registers hold no more
    found = _each(builder, size, [*[_ZERO] * 7, *elements], following, n)
    return [_fold(builder, v, largest=i >= 5) for i, v in enumerate(found[:7])], found[7:]


def _quotient(builder: Any, d: Any, a: Any) -> Any:
    """d / a, a float32's number, rounded as a division rounds it, without one; not a number where a is 0.

    Of the estimate of 1 / a 14 bits are right, after one step 42, so that q + r * (d - q * a) is within 2**-83 of the
    quotient; no quotient of 53 bits by 24 lies closer than 2**-78 to a rounding boundary [Markstein 1990].
    """
    typed = ir.FunctionType(_WIDE, [_WIDE, _WIDE, ir.IntType(8)])
    estimate = builder.module.declare_intrinsic("llvm.x86.avx512.rcp14.pd.512", [], typed)
    r = builder.call(estimate, [a, _ZERO, ir.Constant(ir.IntType(8), -1)])
    e = _call(builder, "fma", builder.fneg(a), r, _all(1.0))
    r = _call(builder, "fma", _call(builder, "fma", e, e, e), r, r)
    q = builder.fmul(d, r)
    return _call(builder, "fma", _call(builder, "fma", builder.fneg(q), a, d), r, q)


def _has(feature: str) -> bool:
    """Whether the processor has it."""
    return bool(binding.get_host_cpu_features().get(feature))


def _elements(builder: Any, a: Any, d: Any, ratio: Any, eps: Any, sums: Sequence[Any], all_seen: bool) -> list[Any]:
    """The sums behind definition.ELEMENT_FIELDS with one vector more: two of three counts each (_DIGITS), then sums
    and maxima of ratio and d. a: |g|; d: |d|; ratio: d / a."""
    bound = builder.fadd(a, eps)
    close = builder.fadd(builder.fmul(a, _all(1e-5), flags=_IN_ORDER), _all(1e-8), flags=_IN_ORDER)
    within = [builder.fcmp_ordered("<", d, builder.fmul(bound, _all(share))) for share in (1e-2, 1e-3, 1e-4)]
    within += [builder.fcmp_ordered("<=", d, close), builder.fcmp_ordered(">", d, _all(1e-3))]
    within.append(builder.fcmp_ordered(">", d, _ZERO))
    new = list(sums[:2])
    for i, h in enumerate(within):
        one = ir.Constant(_COUNTS, [1 << _DIGITS * (i % 3)] * LANES)
        new[i // 3] = builder.add(new[i // 3], builder.select(h, one, _NONE))
    if all_seen:
        return [*new, builder.fadd(sums[2], ratio, flags=_IN_ORDER)]
    seen = builder.fcmp_ordered(">", a, _all(2.0**-23))
    for i, value in enumerate((ratio, d)):
        kept = builder.select(seen, value, _ZERO)
        new += [builder.fadd(sums[2 + 2 * i], kept, flags=_IN_ORDER), _call(builder, "maxnum", sums[3 + 2 * i], kept)]
    return new


def _unpacked(builder: Any, sums: Sequence[Any]) -> list[Any]:
    """definition.ELEMENT_FIELDS of what `_elements` has added up."""
    counts = []
    for vector in sums[:2]:
        packed = _fold(builder, vector, largest=False)
        for k in range(3):
            one = builder.lshr(packed, ir.Constant(_WORD, _DIGITS * k))
            counts.append(builder.sitofp(builder.and_(one, ir.Constant(_WORD, (1 << _DIGITS) - 1)), _ONE))
    others = [_fold(builder, v, largest=i % 2 == 1) for i, v in enumerate(sums[2:])]
    return [*counts[:5], *others, *[None] * (4 - len(others)), counts[5]]


def _take_in(builder: Any, cells: Any, values: Sequence[Any], tops: Sequence[int]) -> None:
    """Adds values to cells one after the other; of those in ``tops`` the larger stays."""
    for i, value in enumerate(values):
        if value is None:
            continue
        cell = builder.gep(cells, [ir.Constant(_WORD, i)])
        old = builder.load(cell)
        builder.store(_call(builder, "maxnum", old, value) if i in tops else builder.fadd(old, value), cell)


def _finish(builder: Any, q: Any, rel: Any, line: Any, size: Any) -> None:
    """The columns max_rel and peak of a row, as _finish of loops.py has them."""
    cells = [builder.gep(line, [ir.Constant(_WORD, i)]) for i in range(_WIDTH)]
    n, gg, top = (builder.load(cells[i]) for i in (0, 1, 6))
    zero, endless = ir.Constant(_ONE, 0.0), ir.Constant(_ONE, float("inf"))
    some = builder.fcmp_ordered(">", gg, zero)
    n = _call(builder, "maxnum", n, ir.Constant(_ONE, 1.0))
    rms = _call(builder, "sqrt", builder.fdiv(gg, n))
    scale = builder.select(some, builder.fdiv(ir.Constant(_ONE, 1.0), rms), zero)
    spread = _spread(builder, scale)

    def following(at: Any, n: int, tops: Sequence[Any]) -> list[Any]:
        new = list(tops)
        for k in range(n):  # several maxima: one would wait for itself
            here = builder.add(at, ir.Constant(_WORD, k * LANES))
            d, r = (_load(builder, array, here, _WIDE, 8) for array in (q, rel))
            new[k] = _call(builder, "maxnum", new[k], _call(builder, "minnum", r, builder.fmul(d, spread)))
        return new

    tops = _each(builder, size, [_ZERO] * _UNROLLED, following, _UNROLLED)
    peak = _fold(builder, reduce(partial(_call, builder, "maxnum"), tops), largest=True)
    without = builder.select(builder.fcmp_ordered(">", top, zero), endless, zero)
    builder.store(builder.select(some, peak, without), cells[10])
    builder.store(builder.select(some, builder.load(cells[7]), ir.Constant(_ONE, -1.0)), cells[7])


def _fold(builder: Any, vector: Any, *, largest: bool) -> Any:
    """A vector's sum, or its largest number: halves upon halves."""
    n = LANES
    while n > 1:
        n //= 2
        masks = [ir.Constant(ir.VectorType(ir.IntType(32), n), list(range(k, k + n))) for k in (0, n)]
        low, high = (builder.shuffle_vector(vector, vector, mask) for mask in masks)
        if vector.type.element == _WORD:
            vector = builder.add(low, high)
        else:
            vector = _call(builder, "maxnum", low, high) if largest else builder.fadd(low, high, flags=_IN_ORDER)
    return builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))


def _all(value: float) -> Any:
    return ir.Constant(_WIDE, [value] * LANES)


def _spread(builder: Any, value: Any) -> Any:
    """A vector of one number."""
    vector = builder.insert_element(ir.Constant(_WIDE, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))


def _prefetch(builder: Any, at: Any) -> None:
    """Processors see by themselves what will be read next, but not beyond a page, which a block is."""
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    typed = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    function = builder.module.declare_intrinsic("llvm.prefetch", [byte], typed)
    reading, near, data = (ir.Constant(word, n) for n in (0, 3, 1))
    builder.call(function, [builder.bitcast(at, byte), reading, near, data])


def _load(builder: Any, array: Any, at: Any, kind: Any, align: int) -> Any:
    at = array if at is None else builder.gep(array, [at])
    return builder.load(builder.bitcast(at, kind.as_pointer()), align=align)


def _call(builder: Any, name: str, *values: Any) -> Any:
    """One of LLVM's functions of floating point. Maxima and minima are only ever of numbers."""
    kind = values[0].type
    suffix = "f64" if kind == _ONE else f"v{kind.count}f64"
    typed = ir.FunctionType(kind, [kind] * len(values))
    function = builder.module.globals.get(f"llvm.{name}.{suffix}") or ir.Function(
        builder.module, typed, f"llvm.{name}.{suffix}"
    )
    return builder.call(function, values, fastmath=("nnan", "nsz") if name in ("maxnum", "minnum") else ())
