"""The loops' machine code on disk: the same numbers as numba's own, never run where it does not belong."""

import json
import subprocess
import sys

import numpy as np
import pytest

from vllm_accprobe.dump.dtypes import widen
from vllm_accprobe.kernels import native
from vllm_accprobe.kernels import rows as kernel

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="machine code is kept on Linux only")
pytest.importorskip("numba")


@pytest.fixture(scope="module")
def loops():
    return native.loops()


def sides(width, rows=9):
    random = np.random.default_rng(width)
    g = random.standard_normal((rows, width)).astype(np.float32)
    m = (g * (1 + 2**-7 * random.standard_normal(g.shape))).astype(np.float32)
    g[1, 0], m[2, -1] = np.inf, np.nan
    order = random.permutation(rows)
    return g, order, m, np.arange(rows)


@pytest.mark.parametrize("width", [1, 7, 64, 2048, 2050, 5000])
def test_the_same_bits_as_when_numba_runs_them(loops, width):
    from vllm_accprobe.kernels import loops as compiled

    g, gi, m, mi = sides(width)
    flat = [a.reshape(-1).view(np.uint8) for a in (g, m)]
    table = np.zeros(1, np.uint32)
    both = flat[0], 2, table, gi, flat[1], 2, table, mi
    for way in ("rows", "structure"):
        found = []
        for run in (loops, kernel._ByNumba(compiled)):
            out = np.zeros((len(gi), 11) if way == "rows" else (6, width))
            if way == "rows":
                out[:, 0] = width
            elements = np.zeros(10)
            getattr(run, way)(*both, out, *((2.0**-23, elements) if way == "rows" else ()))
            found.append((out, elements))
        np.testing.assert_array_equal(found[0][0], found[1][0])
        np.testing.assert_array_equal(found[0][1], found[1][1])


def test_a_comparison_does_not_import_numba(loops):
    code = (
        "import sys\nimport numpy as np\n"
        "from vllm_accprobe.dump.dtypes import widen\nfrom vllm_accprobe.kernels import rows\n"
        "a, at = np.ones((2, 8), np.float32), np.arange(2)\n"
        "rows.rows(a, 'float32', at, a, 'float32', at, widen)\n"
        "assert type(rows._compiled()).__name__ == 'Loops' and 'numba' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_another_process_compiles_while_dumps_are_opened(tmp_path, monkeypatch):
    """Only where nothing is kept; this process then reads what that one kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "_made", lambda *_: pytest.fail("compiled here, too"))
    native.compile_early()
    assert set(native._EARLY) == {"rows", "structure"}
    assert isinstance(native.loops(), native.Loops)
    native.compile_early()
    assert native._EARLY == {}


def test_one_that_hangs_is_killed_and_none_is_started_for_nothing(tmp_path, monkeypatch):
    def unusable(*_):
        raise native.Unusable("compiled here")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "_made", unusable)
    monkeypatch.setattr(native, "_PATIENCE_S", 0.1)
    hangs = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(9)"])
    monkeypatch.setattr(native, "_EARLY", {"rows": hangs})
    with pytest.raises(native.Unusable, match="compiled here"):
        native.loops()
    assert hangs.wait(5) == -9
    monkeypatch.setattr(native.os, "access", lambda *_: False)  # a directory that may only be read
    native.compile_early()
    assert native._EARLY == {}


def test_a_file_that_is_damaged_or_anothers_is_not_read(loops, tmp_path):
    made = "symbol", ["sqrt"], b"code"
    path = tmp_path / "x.bin"

    def write(body, **other):
        head = {"name": "x.bin", "hash": native.hashlib.blake2b(b"code", digest_size=16).hexdigest(),
                "symbol": "symbol", "foreign": ["sqrt"]} | other  # fmt: skip
        path.write_bytes(json.dumps(head).encode() + b"\n" + body)
        return native._read(path, "x.bin")

    assert write(b"code") == made
    assert write(b"codf") is None
    assert write(b"cod") is None
    assert write(b"code", name="y.bin") is None
    path.write_bytes(b"\xff\xfe no json")
    assert native._read(path, "x.bin") is None
    assert native._read(tmp_path / "missing", "missing") is None


def test_a_symbol_that_nobody_knows_is_no_machine_code(loops):
    import ctypes

    import llvmlite.binding as llvm

    with pytest.raises(native.Unusable, match="unknown symbol accprobe_nobody"):
        native._define({"accprobe_nobody"}, llvm, ctypes)


def test_numba_takes_over_where_there_is_none(monkeypatch):
    def none():
        raise native.Unusable("not here")

    monkeypatch.setattr(native, "loops", none)
    found = kernel._find_loops.__wrapped__()
    assert isinstance(found, kernel._ByNumba)
    monkeypatch.setattr(kernel, "_compiled", lambda: found)
    g, gi, m, mi = sides(33)
    args = g, "float32", gi, m, "float32", mi, widen
    np.testing.assert_allclose(kernel.rows(*args), kernel.rows(*args, compiled=False), rtol=1e-12)
