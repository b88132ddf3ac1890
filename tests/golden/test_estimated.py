from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from pack_dumps import dump, judged, packed
from synthetic_model import scaled

from vllm_accprobe.align.derived import Derived, derive
from vllm_accprobe.align.tokens import RowSet
from vllm_accprobe.comparison.engine import calibrate, compare, rejudge
from vllm_accprobe.comparison.measure.measured import MeasuredUnit, Part
from vllm_accprobe.comparison.pair import SKIP
from vllm_accprobe.comparison.result import Comparison
from vllm_accprobe.dump.reader import open_dump
from vllm_accprobe.golden.estimated import ALONE, ESTIMATED, GOLDEN_NONFINITE, _sketches_of, compared_sides, is_routed
from vllm_accprobe.golden.pack import pack
from vllm_accprobe.golden.pack_sketches import open_pack
from vllm_accprobe.judge.near_ties import ROWS_BEHIND
from vllm_accprobe.opcheck.proof.apply_proof import ReplayFinding, ReplayResult, decide

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


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "pass"), (1.1, "fail")])
def test_a_pack_names_what_the_full_golden_names(
    golden: tuple[Path, Path], tmp_path: Path, factor: float, verdict: str
) -> None:
    mine = dump(tmp_path / "mine", chunk=4, faults={TAP: scaled(factor)} if factor > 1 else {})
    small, full = judged(golden[1], mine), compare(*golden[:1], mine)
    assert small.verdict == full.verdict == verdict
    assert [o["module"] for o in small.origins][:1] == [o["module"] for o in full.origins][:1]
    assert small.golden_path == str(golden[1])
    assert small.coverage["pairs"] == sum(p.status != "skip" for p in small.pairs)


def last_row(sketched: tuple[int, ...], factor: float) -> Callable[..., np.ndarray]:
    """A fault in the last of the rows that only a sketch shows."""

    def fault(values: np.ndarray, positions: np.ndarray, decode: np.ndarray) -> np.ndarray:
        return np.where((positions == max(sketched))[:, None], values * np.float32(factor), values)

    return fault


@pytest.mark.parametrize(
    ("mine_too", "verdict", "what"),
    [(False, "fail", "of golden only"), (True, "pass", GOLDEN_NONFINITE)],
)
def test_a_row_of_golden_that_is_not_finite(
    sketched: tuple[int, ...], tmp_path: Path, mine_too: bool, verdict: str, what: str
) -> None:
    faults = {TAP: last_row(sketched, np.nan)}
    packed(tmp_path, max_bytes=SMALL, together=False, faults=faults)
    mine = dump(tmp_path / "mine", together=False, faults=faults if mine_too else {})
    found = judged(tmp_path / "x.golden", mine)
    estimated = [p for p in found.pairs if p.message.startswith(ESTIMATED)]
    assert found.verdict == verdict
    assert any(what in p.message for p in estimated if p.status == "fail") is not mine_too
    assert (found.coverage["skipped"].get(GOLDEN_NONFINITE, 0) > 0) is mine_too


@pytest.mark.parametrize(
    ("standard", "floor", "failing"),
    [("accprobe", None, False), ("strict", None, True), ("strict", 1.5, False)],
)
def test_limits_are_those_of_the_standard_and_the_floor(
    golden: tuple[Path, Path], sketched: tuple[int, ...], tmp_path: Path, standard: str, floor: float | None,
    failing: bool,
) -> None:  # fmt: skip
    floors = []
    if floor is not None:
        run = dump(tmp_path / "run", together=False, faults={TAP: scaled(floor)})
        floors.append(calibrate(golden[0], [run], failing=True).save(tmp_path / "floor").parent)
    mine = dump(tmp_path / "mine", together=False, faults={TAP: last_row(sketched, 1.03)})
    found = judged(golden[1], mine, standard=standard, floors=floors)
    failed = {p.tap for p in found.pairs if p.status == "fail" and p.message.startswith(ESTIMATED)}
    assert (TAP in failed) is failing


@pytest.mark.parametrize(("standard", "line"), [("accprobe", "sketches: 0 of "), ("xray", "are not judged by")])
def test_what_is_compared_is_counted_and_not_read_from_the_manifest(
    golden: tuple[Path, Path], standard: str, line: str
) -> None:
    with compared_sides(golden[1], golden[0]) as sides:
        pack = sides.packs[0]
        assert pack is not None
        pack.sketches.rows = np.full_like(pack.sketches.rows, [0, 2**31 - 1])
        object.__setattr__(pack, "manifest", {**pack.manifest, "rows_full": 10**4000, "rows_sketched": 7})
        notes = sides.judged(compare(sides.golden, sides.mine, standard=standard), standard=standard).notes
    assert any(line in note for note in notes)
    assert "5 rows in full and 1 as sketches" in notes[0]


@pytest.mark.parametrize(
    ("tap", "cls", "routed"),
    [("model", "Qwen3MoeModel", False), ("model.layers.0", "Qwen3MoeDecoderLayer", False),
     ("model.layers.0.self_attn", "Qwen3MoeAttention", False), ("model.layers.0.mlp.gate_proj", "Linear", False),
     ("model.layers.0.mlp.gate", "ReplicatedLinear", True), ("model.layers.0.mlp", "Qwen3MoeSparseMoeBlock", True),
     ("model.layers.0.mlp.experts", "SharedFusedMoE", True), ("model.layers.0.ffn", "AscendFusedMoE", True),
     ("model.layers.0.mlp.experts.3.up_proj", "Linear", True), ("model.layers.0.mlp.router", "Linear", True)],
)  # fmt: skip
def test_rows_behind_a_router(tap: str, cls: str, routed: bool) -> None:
    unit = SimpleNamespace(key=(tap, "output.0", 0), cls=cls)
    assert is_routed(unit) is routed  # type: ignore[arg-type]


def test_nan_in_sketched_rows_alone(golden: tuple[Path, Path], sketched: tuple[int, ...], tmp_path: Path) -> None:
    """A row that only a sketch shows is condemned, and said to be estimated."""
    last, fault = max(sketched), last_row(sketched, np.nan)
    mine = dump(tmp_path / "mine", together=False, faults={TAP: fault})
    found = judged(golden[1], mine)
    assert found.verdict == "fail"
    assert found.origins[0]["module"] == TAP
    wrong = [p for p in found.pairs if p.status == "fail" and p.message.startswith(ESTIMATED)]
    assert wrong
    assert all(p.worst_position == last for p in wrong if p.tap == TAP)
    assert any(p.tap == TAP for p in wrong)


@pytest.mark.parametrize(("positions", "alone"), [([4], True), ([3, 4], False)])
def test_an_origin_that_two_sketches_agree_on(
    golden: tuple[Path, Path], tmp_path: Path, positions: list[int], alone: bool
) -> None:
    """In one row or in two that only sketches show."""

    def wrong(values: np.ndarray, there: np.ndarray, decode: np.ndarray) -> np.ndarray:
        return np.where(np.isin(there, positions)[:, None], values * np.float32(1.5), values)

    found = judged(golden[1], dump(tmp_path / "mine", together=False, faults={TAP: wrong}))
    estimated = [o for o in found.origins if ESTIMATED in o["shape"]]
    assert [(o["module"], ALONE in o["shape"]) for o in estimated] == [(TAP, alone)]


ATTENTION = "model.layers.1.self_attn.attn"


def with_router(found: Comparison, *, every: bool) -> Comparison:
    """The same with a router in layer 0 whose choices agree, of the rows of layer 0, or of every row of mine."""
    assert found.measured is not None
    units, setting = list(found.measured.units), found.measured.setting
    at = max(i for i, u in enumerate(units) if u.key[0].startswith("model.layers.0."))
    parts = [Part(p.golden, p.mine, p.step, p.rank, p.moment, "int64", "int64", 0, (2,), rows=p.rows, identical=True)
             for p in units[at].parts if not p.skip]  # fmt: skip
    if every:
        parts[0].rows = RowSet(setting.places[0], setting.places[2])
    key = "model.layers.0.mlp.experts", "input.topk_ids", 0
    router = MeasuredUnit(key, "Experts", "", units[at].order, 0, False, False, parts)
    return rejudge(replace(found.measured, units=[*units[: at + 1], router, *units[at + 1 :]]))


@pytest.mark.parametrize(
    ("packed_golden", "router", "fault", "blamed"),
    [(True, "some rows", ATTENTION, []), (True, "every row", ATTENTION, [ATTENTION]),
     pytest.param(True, "", ATTENTION, [ATTENTION], marks=pytest.mark.extra),  # as what has no router, above
     (False, "some rows", ATTENTION, [ATTENTION]), (True, "some rows", TAP, [TAP]),
     pytest.param(True, "some rows", "", [], marks=pytest.mark.extra)],  # a clean pack passes, above
)  # fmt: skip
def test_attention_behind_a_router_of_which_a_pack_has_some_rows(
    golden: tuple[Path, Path], tmp_path: Path, packed_golden: bool, router: str, fault: str, blamed: list[str]
) -> None:
    """A fault from the second row of each request on. "some rows" of a whole golden are all that are compared."""

    def late(values: np.ndarray, positions: np.ndarray, decode: np.ndarray) -> np.ndarray:
        return np.where((positions > 0)[:, None], values * np.float32(1.1), values)

    mine = dump(tmp_path / "mine", together=False, faults={fault: late} if fault else {})
    with compared_sides(golden[packed_golden], mine) as sides:
        found = compare(sides.golden, sides.mine)
        found = with_router(found, every=router == "every row") if router else found
    assert [o["module"] for o in found.origins][:1] == blamed
    assert found.verdict == ("fail" if blamed else "pass")
    unseen = packed_golden and router == "some rows" and fault != ""
    assert (found.coverage["skipped"].get(ROWS_BEHIND, 0) > 0) is unseen
    assert any("earlier rows' experts were not compared" in note for note in found.notes) is unseen
    attention = [p for p in found.pairs if p.tap == ATTENTION and "experts were not compared" in p.message]
    assert any(" are not judged" in p.message or p.status == SKIP for p in attention) is (unseen and fault == ATTENTION)


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


def test_a_renamed_tensor_has_the_sketches_of_its_own_name(golden: tuple[Path, Path], tmp_path: Path) -> None:
    """A float32 golden's input of down_proj is vLLM's output of act_fn; transformers' own act_fn is another tensor."""
    sketches = open_pack(golden[1], tmp_path)
    with closing(open_dump(golden[0])) as opened:
        own, other = (next(r for r in opened.records if (r.tap, r.role) == (f"model.layers.1.{tap}", "output.0"))
                      for tap in ("mlp.down_proj", "self_attn"))  # fmt: skip
    key = other.tap, other.role, other.call
    renamed, joined = derive([own], *key[:2]), derive([own, own], *key[:2], dim=1)
    assert isinstance(renamed, Derived)
    assert isinstance(joined, Derived)
    places = sketches.sketches.places
    assert _sketches_of(sketches, other, key) == places[f"{other.tap}/output.0#0"] != places[f"{own.tap}/output.0#0"]
    assert _sketches_of(sketches, renamed, key) == places[f"{own.tap}/output.0#0"]
    assert _sketches_of(sketches, joined, key) is None
