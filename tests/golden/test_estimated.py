from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pack_dumps import dump, judged
from synthetic_model import scaled

from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.golden.estimated import ESTIMATED
from vllm_accprobe.golden.opened import open_pack
from vllm_accprobe.golden.pack import pack
from vllm_accprobe.opcheck.proof.decide import ReplayFinding, ReplayResult, decide

SMALL = 40_000
"""Of the synthetic model's 33 rows, five in full and five as sketches."""


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(dump, pack)."""
    home = tmp_path_factory.mktemp("golden")
    where, out = dump(home / "dump", together=False), home / "x.golden"
    pack(where, out, max_bytes=SMALL)
    return where, out


@pytest.fixture(scope="module")
def sketched(golden: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[int, ...]:
    """Positions of which the pack has sketches and no full row."""
    sketches = open_pack(golden[1], tmp_path_factory.mktemp("opened")).sketches
    place = sketches.places["model.layers.1.mlp.down_proj/output.0#0"]
    return tuple(np.unique(sketches.of(place)[0][:, 1]).tolist())


def nan(values: np.ndarray, positions: np.ndarray, decode: np.ndarray) -> np.ndarray:
    return np.full_like(values, np.nan)


TAP = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "pass"), (1.1, "fail"), (1.5, "fail")])
def test_a_pack_names_what_the_full_golden_names(
    golden: tuple[Path, Path], tmp_path: Path, factor: float, verdict: str
) -> None:
    mine = dump(tmp_path / "mine", chunk=4, faults={TAP: scaled(factor)} if factor > 1 else {})
    small, full = judged(golden[1], mine), compare(*golden[:1], mine)
    assert small.verdict == full.verdict == verdict
    assert [o["module"] for o in small.origins][:1] == [o["module"] for o in full.origins][:1]
    assert small.golden_path == str(golden[1])
    assert small.coverage["pairs"] == sum(p.status != "skip" for p in small.pairs)


@pytest.mark.parametrize("factor", [1.5, None])
def test_a_fault_in_sketched_rows_alone(
    golden: tuple[Path, Path], sketched: tuple[int, ...], tmp_path: Path, factor: float | None
) -> None:
    """factor: None for NaN. A row that only a sketch shows is condemned, and said to be estimated."""
    last = max(sketched)

    def fault(values: np.ndarray, positions: np.ndarray, decode: np.ndarray) -> np.ndarray:
        bad = (positions == last)[:, None]
        return np.where(bad, values * np.float32(np.nan if factor is None else factor), values)

    mine = dump(tmp_path / "mine", together=False, faults={TAP: fault})
    found = judged(golden[1], mine)
    assert found.verdict == "fail"
    assert found.origins[0]["module"] == TAP
    wrong = [p for p in found.pairs if p.status == "fail" and p.message.startswith(ESTIMATED)]
    assert wrong
    assert all(p.worst_position == last for p in wrong if p.tap == TAP)
    assert any(ESTIMATED in str(o["shape"]) for o in found.origins) or any(p.tap == TAP for p in wrong)


def test_either_side_may_be_a_pack(golden: tuple[Path, Path], tmp_path: Path) -> None:
    mine = dump(tmp_path / "mine", chunk=4, faults={TAP: scaled(1.5)})
    pack(mine, tmp_path / "mine.golden", max_bytes=SMALL)
    for sides in ((golden[0], tmp_path / "mine.golden"), (golden[1], tmp_path / "mine.golden")):
        found = judged(*sides)
        assert (found.verdict, found.origins[0]["module"]) == ("fail", TAP)
        assert any(p.message.startswith(ESTIMATED) for p in found.pairs)
    assert judged(golden[1], golden[0]).verdict == "pass"


def test_packs_of_other_seeds_share_no_signs(golden: tuple[Path, Path], tmp_path: Path) -> None:
    pack(golden[0], tmp_path / "other.golden", max_bytes=SMALL, seed=1)
    found = judged(golden[1], tmp_path / "other.golden")
    assert found.verdict == "pass"
    assert not any(p.message.startswith(ESTIMATED) for p in found.pairs)


@pytest.mark.parametrize("held", [True, False])
def test_a_proved_row_is_excused_only_where_the_pack_holds_it(golden: tuple[Path, Path], held: bool) -> None:
    """The pack's rows of the module are equal to the bit, and the replay of mine proves one wrong."""
    result = judged(golden[1], golden[0])
    assert result.measured is not None
    name = result.measured.setting.name
    parts = [p for u in result.measured.units if u.key[:2] == (TAP, "output.0") for p in u.parts if not p.skip]
    request, position = next(name(k) for p in parts for k in p.rows.keys.tolist())
    at = (request, position if held else 1_000)
    result = replace(result, pairs=[p for p in result.pairs if not p.message.startswith(ESTIMATED)])
    blame = ReplayFinding(TAP, "", "output.0", 0, *at, 0.1, None, 5.0, 1, "")
    found = decide(result, ReplayResult((blame,), (), (), frozenset(), 1))
    assert [o["module"] for o in found.origins] == ([] if held else [TAP])
    assert found.verdict == ("pass" if held else "fail")
