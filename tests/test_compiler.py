"""The compiler of our loops: each word does what Python does with it."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("llvmlite")
from vllm_accprobe import compiler, machine_code
from vllm_accprobe.compiler import larger, part, scratch, smaller

Ints, Floats, Bytes = NDArray[np.int64], NDArray[np.float64], NDArray[np.uint8]


def run(function: Any, *arguments: Any) -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    text, words = compiler.module_of([function])
    code = machine_code.CompiledLoops((words, machine_code._compiled(text, llvm)), llvm)
    flat: list[Any] = []
    for argument in arguments:
        flat += [machine_code.address(argument), argument.size] if isinstance(argument, np.ndarray) else [argument]
    return code.call[function.__name__](*flat)


def collatz(start: int, most: int) -> int:
    n = start
    steps = 0
    while n != 1 and steps < most:
        if n % 2 == 0:
            n = n // 2
        else:
            n = 3 * n + 1
        steps += 1
    return steps


def skipping(data: Ints, out: Ints) -> int:
    """Continue, negative numbers, a step, an early return, a chained assignment, the end of a range."""
    total = count = 0
    for i in range(1, data.size, 2):
        if data[i] < 0:
            continue
        if data[i] > 100:
            return -1
        total += data[i]
        count += 1
    out[0], out[1] = total, count
    return 0


def decided(a: int, b: int, out: Ints) -> int:
    """The second condition is computed only where the first does not decide: beyond ``out`` lies nothing of ours."""
    if a > 0 and out[a - 1] == b:
        return True
    return not (a < 0 or b > 5)


def _swapped(pair: Any, by: int) -> tuple[int, float]:
    a, b = pair
    return a + by, b * 2


def tuples(n: int, x: float) -> float:
    sums = n, x
    for _ in range(3):
        sums = _swapped(sums, 10)
    a, b = sums
    return a + b if a > 30 else -1.0


def small_numbers(data: Bytes, out: Ints) -> None:
    """Numbers of 8 and 16 bits are not widened, with a sign or without."""
    words, signed = part(data, 0, 2, np.uint16), part(data, 0, 4, np.int8)
    out[0] = words[0] + 1
    out[1] = signed[2] >> 1
    out[2] = data[2] >> 1
    out[3] = np.int64(signed[2]) << 4
    out[4] = (words[1] ^ 0xFFFF) & 0x0F0F | 0x8000
    out[5] = signed[2] < 0
    own = scratch(4, np.int64)
    for i in range(4):
        own[i] = data[3 - i]
    out[6] = own[0] - own[3]


def floats(data: Floats, out: Floats) -> None:
    low, high = np.inf, -np.inf
    finite = 0
    for i in range(data.size):
        if np.isfinite(data[i]):
            low, high = smaller(low, data[i]), larger(high, data[i])
            finite += 1
    out[0], out[1], out[2] = low, high, finite
    out[3] = np.sqrt(abs(low)) / max(high, 1.0) - min(finite, 2)
    out[4] = np.float64(np.float32(0.1))
    out[5] = np.float32(1) + np.uint32(high)
    out[6] = data[0] != data[0]
    out[7] = 7 / 2


def test_integers_and_loops_are_pythons() -> None:
    for start in (1, 6, 27):
        assert run(collatz, start, 1000) == collatz(start, 1000)
    data, ours, theirs = np.array([9, 3, 9, -5, 9, 40, 9, 2]), np.zeros(2, np.int64), np.zeros(2, np.int64)
    assert run(skipping, data, ours) == skipping(data, theirs) == 0
    assert ours.tolist() == theirs.tolist() == [45, 3]
    assert run(skipping, np.array([0, 101]), ours) == -1


def test_conditions_stop_where_they_are_decided() -> None:
    out = np.array([7])
    for a, b in ((1, 7), (1, 3), (0, 3), (-1, 3), (0, 6), (1 - 2**40, 3)):
        assert bool(run(decided, a, b, out)) == decided(a, b, out)


def test_tuples_and_functions_with_constant_arguments() -> None:
    assert run(tuples, 1, 0.5) == tuples(1, 0.5) == 35.0
    assert run(tuples, -1, 0.5) == -1.0


def test_numbers_of_few_bits_stay_so() -> None:
    out = np.zeros(7, np.int64)
    run(small_numbers, np.array([0xFF, 0xFF, 0x81, 0x12], np.uint8), out)
    assert out.tolist() == [0, -64, 64, -127 * 16, (0x1281 ^ 0xFFFF) & 0x0F0F | 0x8000, 1, 0x12 - 0xFF]


def test_floats_with_what_is_not_finite() -> None:
    out = np.zeros(8)
    run(floats, np.array([np.nan, -4.0, np.inf, 2.0]), out)
    assert out.tolist() == [-4.0, 2.0, 2.0, 2.0 / 2 - 2, float(np.float32(0.1)), 3.0, 1.0, 3.5]


def test_what_is_no_word_of_it_is_not_translated() -> None:
    def comprehension(data: Ints, out: Ints) -> None:
        out[0] = sum(x for x in data)

    with pytest.raises(AttributeError, match="of_GeneratorExp"):
        run(comprehension, np.zeros(1, np.int64), np.zeros(1, np.int64))
