"""benchmarks/issue_table.py measures the trees that it is given."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_a_tree_is_measured_and_not_the_checkout_that_the_table_is_started_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.chdir(ROOT)
    main = tmp_path / "tree" / "vllm_accprobe" / "__main__.py"
    main.parent.mkdir(parents=True)
    main.write_text("import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(__file__)")
    from issue_table import Bench

    Bench(tmp_path / "tree", tmp_path, None).accprobe(tmp_path / "which")
    assert (tmp_path / "which").read_text() == str(main)
