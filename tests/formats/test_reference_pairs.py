"""Each tool's packed dumps, with a planted fault: our metrics are those that were computed apart, in float64, when the
dumps were made. One table over the readers; verdict, origins and coverage of these pairs: tests/freeze."""

from pathlib import Path

import pytest
from support.peer_dumps import check_metrics, check_row, expected, unpack

from vllm_accprobe.comparison.engine import compare

ASCEND = {"b_sglang_tp": 7, "c_msit_torch": 6, "e_atb": 11, "e_atb_vs_torch": 23, "f_torchair": 20}
PLAIN = {"a_msprobe_tensor": 8, "d_xray_h5": 7, "d_xray_h5_renamed": 6, "g_single": 77}
"""How many tensors are checked."""
SIDES = {"f_torchair": ("fx_golden", "ge_mine")}


@pytest.mark.parametrize("name", ASCEND)
def test_metrics_of_files(name: str, tmp_path: Path) -> None:
    golden, mine = SIDES.get(name, ("golden", "mine"))
    root = unpack(name, tmp_path)
    assert check_metrics(expected(name), compare(root / golden, root / mine), golden, mine) == ASCEND[name]


@pytest.mark.parametrize("name", PLAIN)
def test_metrics_of_names(name: str, tmp_path: Path) -> None:
    root = unpack(name, tmp_path)
    by_name = {p.golden: p for p in compare(root / "golden", root / "mine").pairs}
    checked = 0
    for t in expected(name, "expected_plain.json")["tensors"]:
        if name != "g_single":
            names = [n.rpartition("/")[2] for n in t["name"].split(" <-> ")]
            assert by_name[names[0]].mine == names[-1]
        elif t["name"].startswith("cross") or not t["numel"]:
            continue
        else:
            names = [t["golden_file"].removeprefix("g_single/golden/")]
            row = by_name[names[0]]
            assert (row.dtype_golden, row.dtype_mine) == (t["golden_dtype"], t["mine_dtype"])
        check_row(by_name[names[0]], t)
        checked += 1
    assert checked == PLAIN[name]
