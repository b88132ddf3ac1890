"""The loops as machine code: called by many threads, and what takes their place where there are none."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from vllm_accprobe.dump.dtypes import widen
from vllm_accprobe.kernels import native, rows as kernel

pytest.importorskip("llvmlite")


def sides(width, rows=9):
    random = np.random.default_rng(width)
    g = random.standard_normal((rows, width)).astype(np.float32)
    m = (g * (1 + 2**-7 * random.standard_normal(g.shape))).astype(np.float32)
    g[1, 0], m[2, -1] = np.inf, np.nan
    return g, random.permutation(rows), m, np.arange(rows)


def test_threads_have_buffers_of_their_own():
    def both(width):
        g, gi, m, mi = sides(width, 40)
        args = g, "float32", gi, m, "float32", mi, widen
        return kernel.rows(*args), kernel.structure_sums(*args)

    widths = [1, 7, 64, 2048, 2050, 5000, 20000] * 4
    with ThreadPoolExecutor(4) as pool:
        for width, found in zip(widths, pool.map(both, widths), strict=True):
            for ours, theirs in zip(found, both(width), strict=True):
                np.testing.assert_array_equal(ours, theirs)


def test_a_comparison_does_not_import_numba():
    code = (
        "import sys\nimport numpy as np\n"
        "from vllm_accprobe.dump.dtypes import widen\nfrom vllm_accprobe.kernels import rows\n"
        "a, at = np.ones((2, 8), np.float32), np.arange(2)\n"
        "rows.rows(a, 'float32', at, a, 'float32', at, widen)\n"
        "assert type(rows._compiled()).__name__ == 'Loops' and 'numba' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_numpy_takes_over_where_there_are_none(monkeypatch):
    def none():
        raise native.Unusable("not here")

    monkeypatch.setattr(native, "loops", none)
    assert kernel._find_loops.__wrapped__() is None
    monkeypatch.setattr(kernel, "_compiled", lambda: None)
    g, gi, m, mi = sides(33)
    args = g, "float32", gi, m, "float32", mi, widen
    np.testing.assert_array_equal(kernel.rows(*args), kernel.rows(*args, compiled=False))
