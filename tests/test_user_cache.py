"""Compiled code is kept in the user's cache and nowhere else, least of all beside the installed package."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_accprobe
from vllm_accprobe import user_cache

PACKAGE = Path(vllm_accprobe.__file__).parent


def test_a_directory_that_others_may_write_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mine = tmp_path / "vllm-accprobe"
    assert user_cache.directory() == mine
    assert mine.stat().st_mode & 0o777 == 0o700
    mine.chmod(0o777)
    assert user_cache.directory() is None


def test_where_there_is_no_such_directory_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for home in (str(tmp_path / "file/below"), "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", home)
        assert user_cache.directory() is None
    assert not Path("relative").exists()


USES = """
import numpy as np
from vllm_accprobe.dump import stats_kernels

assert stats_kernels.histogram(np.zeros(8, np.uint8))[0] == 8
"""


@pytest.mark.parametrize("home", ["cache", "file", "numba"])
def test_nothing_is_written_beside_the_package(home: str, tmp_path: Path) -> None:
    """home: a cache of its own; none at all; numba's own setting beside it, which is heeded."""
    pytest.importorskip("numba")
    (tmp_path / "file").touch()
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / home), "PYTHONDONTWRITEBYTECODE": "1"}
    environ |= {"NUMBA_CACHE_DIR": str(tmp_path / "theirs")} if home == "numba" else {}
    before = {p: p.stat().st_mtime_ns for p in PACKAGE.rglob("*") if p.is_file()}
    subprocess.run([sys.executable, "-c", USES], env=environ, check=True, timeout=120)
    assert before == {p: p.stat().st_mtime_ns for p in PACKAGE.rglob("*") if p.is_file()}
    kept = {str(p.relative_to(tmp_path)).split(os.sep)[0] for p in tmp_path.rglob("*.nbi")}
    assert kept == {"cache": {"cache"}, "file": set(), "numba": {"theirs"}}[home]


SUMS = """
import numpy as np
from vllm_accprobe.dump.stats_kernels import moments

for dtype in ("bfloat16", "float16", "float32", "float64", "int32"):
    moments(np.zeros(64, np.uint8), dtype)
"""


def test_the_second_process_compiles_nothing(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    environ.pop("NUMBA_CACHE_DIR", None)
    kept: list[set[Path]] = []
    for _ in range(2):
        subprocess.run([sys.executable, "-c", SUMS], env=environ, check=True, timeout=120)
        kept.append(set(tmp_path.rglob("*.nb?")))
    assert kept[0] == kept[1] != set()
