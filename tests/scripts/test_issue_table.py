"""benchmarks/issue_table.py measures the trees that it is given."""

import sys
from pathlib import Path

import pytest

COMMAND = """import pathlib, sys
pathlib.Path(__file__).with_suffix(".ran").touch()
out = pathlib.Path(sys.argv[-1])
out.mkdir()
(out / "compare.csv").write_text("head\\npair\\n")
"""
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package of a checkout whose commands write a table of one pair, and a file beside them; another lies here."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.chdir(ROOT)
    package = tmp_path / "tree" / "vllm_accprobe"
    package.mkdir(parents=True)
    for name in ("__main__.py", "cli.py"):
        (package / name).write_text(COMMAND)
    return package


def test_a_tree_is_measured_and_not_the_checkout_that_the_table_is_started_from(tmp_path: Path, tree: Path) -> None:
    from issue_table import Bench

    Bench(tree.parent, tmp_path, None).accprobe(tmp_path / "which")
    assert (tree / "__main__.ran").exists()


def test_beside_msprobe_it_is_measured_too(tmp_path: Path, tree: Path) -> None:
    from bench_compare import peer

    program = tmp_path / "msprobe"
    program.write_text(f"#!{sys.executable}\n{COMMAND}")
    program.chmod(0o755)
    peer(tmp_path / "peer", program, 1, {"PYTHONPATH": str(tree.parent)})
    assert (tree / "cli.ran").exists()
