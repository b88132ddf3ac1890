"""Numbers of a coarser dtype in a wider container are judged by their own grid; a float32 kernel that rounds is not."""

from pathlib import Path

import h5py
import pytest
import torch
from opcheck.opcheck_dumps import Maker
from support.csv_rows import csv_rows
from support.opchecked import rows_of
from support.peer_dumps import unpack

from vllm_accprobe.cli import main
from vllm_accprobe.opcheck.calls import grid
from vllm_accprobe.opcheck.reference import Call
from vllm_accprobe.standards import built_in

NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- what one tensor proves ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("container", "held"),
    [
        ("float32", "bfloat16"), ("float32", "float16"), ("float32", "float8_e4m3fn"), ("float32", "float8_e5m2"),
        ("bfloat16", "float8_e4m3fn"), ("bfloat16", "float8_e5m2"), ("float16", "float8_e4m3fn"),
        ("float64", "float32"), ("float64", "bfloat16"),
    ],
)  # fmt: skip
def test_numbers_of_a_coarser_dtype_are_seen(container: str, held: str) -> None:
    wide = drawn(8, 16).to(getattr(torch, held)).to(getattr(torch, container))
    assert grid.lies_on(wide) == held


@pytest.mark.parametrize("container", ["float64", "float32", "bfloat16", "float16"])
def test_a_tensor_with_one_value_off_the_grid_is_its_own_dtype(container: str) -> None:
    dtype = getattr(torch, container)
    assert grid.lies_on(drawn(8, 16).to(dtype)) == container
    mixed = drawn(200, 100).to(torch.float8_e4m3fn).to(dtype)
    mixed[151, 77] = drawn(1, seed=5).to(dtype)[0]  # beyond what is looked at first
    assert grid.lies_on(mixed) == container


@pytest.mark.parametrize(
    "values",
    [
        torch.zeros(64), torch.ones(64), torch.arange(256.0), torch.arange(200.0) / 16,
        2.0 ** torch.arange(-20.0, 20.0), torch.tensor([0.5, 1.5, -0.75, 1.25] * 50), torch.tensor([1.0078125]),
        torch.zeros(0), torch.full((50,), float("nan")), torch.arange(64), torch.ones(64).to(torch.float8_e4m3fn),
    ],
    ids=["zeros", "ones", "integers", "steps", "powers", "constants", "one", "empty", "nan", "int64", "8 bits"],
)  # fmt: skip
def test_few_values_prove_nothing(values: torch.Tensor) -> None:
    assert grid.lies_on(values) == ""


def test_what_is_not_finite_is_left_out() -> None:
    values = drawn(8, 16).bfloat16().float()
    values[0, 0], values[1, 1], values[2, 2] = float("inf"), float("-inf"), float("nan")
    assert grid.lies_on(values) == "bfloat16"
    back = grid.narrowed(values, "bfloat16")
    assert back is not None
    assert back.dtype == torch.bfloat16


# --- what becomes of a call ----------------------------------------------------------------------------------------


def linear(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> Call:
    return Call("l", "Linear", inputs={"input": x}, params={"weight": w}, outputs={"output.0": y})


def nothing() -> dict[str, str]:
    return {}


def test_a_float32_kernel_that_rounds_to_bfloat16_keeps_its_dtype() -> None:
    x, w = drawn(6, 32).float(), drawn(16, 32, seed=1).bfloat16().float()  # a bfloat16 checkpoint in float32
    y = (x.double() @ w.double().T).bfloat16().float()
    call = linear(x, w, y)
    assert grid.settled(call, nothing) is call
    # unless the dump as a whole keeps bfloat16 numbers in float32
    assert grid.settled(call, lambda: {"float32": "bfloat16"}).outputs["output.0"].dtype == torch.bfloat16


def test_inputs_weights_and_outputs_are_told_apart() -> None:
    x, w = drawn(6, 32).bfloat16().float(), drawn(16, 32, seed=1).float()
    y = (x.double() @ w.double().T).bfloat16().float()
    found = grid.settled(linear(x, w, y), nothing)
    dtypes = found.inputs["input"].dtype, found.params["weight"].dtype, found.outputs["output.0"].dtype
    assert dtypes == (torch.bfloat16, torch.float32, torch.bfloat16)
    full = grid.settled(linear(x, w, y + 1e-4), nothing)
    assert {t.dtype for t in (full.inputs["input"], full.outputs["output.0"])} == {torch.float32}


def test_few_valued_outputs_go_with_the_rest_of_the_call_and_then_with_the_dump() -> None:
    x, y = drawn(6, 32).bfloat16().float(), drawn(6, 16, seed=3).bfloat16().float()
    ones = torch.ones(6, 2)
    two = Call("n", "N", inputs={"x": x}, outputs={"output.0": y, "output.1": ones})
    assert {t.dtype for t in grid.settled(two, nothing).outputs.values()} == {torch.bfloat16}
    one = Call("n", "N", inputs={"x": x}, outputs={"output.0": ones})
    assert grid.settled(one, nothing).outputs["output.0"].dtype == torch.bfloat16
    wide = Call("n", "N", inputs={"x": drawn(6, 32).float()}, outputs={"output.0": ones})
    assert grid.settled(wide, lambda: {"float32": "bfloat16"}) is wide
    alone = Call("n", "N", inputs={"ids": torch.arange(6)}, outputs={"output.0": ones})
    assert grid.settled(alone, nothing) is alone
    kept = grid.settled(alone, lambda: {"float32": "bfloat16"})
    assert kept.outputs["output.0"].dtype == torch.bfloat16


def test_a_cast_may_round_what_was_finer() -> None:
    x = drawn(6, 32).float()
    y = x.bfloat16().float()
    cast = Call("c", "aten._to_copy.default", args=(x,), kwargs={"dtype": torch.bfloat16}, outputs={"output.0": y})
    found = grid.settled(cast, nothing)
    assert (found.args[0].dtype, found.outputs["output.0"].dtype) == (torch.float32, torch.bfloat16)


# --- whole dumps ---------------------------------------------------------------------------------------------------


def build(root: Path, held: torch.dtype, container: torch.dtype, fault: str = "", size: float = 0.003) -> Path:
    """Projections and activations in ``held``, stored in ``container``. fault: ``noise`` (each output of the second
    projection is off by ``size``, at random: about a bfloat16 rounding) or ``rounds`` (it is rounded to bfloat16)."""
    m = Maker(root)
    x, taps = drawn(12, 64).to(held), 4
    for k in range(taps):
        m.module(f"layers.{k}.up", "Linear", in_features=64, out_features=64)
        m.module(f"layers.{k}.act", "SiLU")
    weights = [(drawn(64, 64, seed=k + 1) * 0.12).to(torch.bfloat16).to(held) for k in range(taps)]
    for k, w in enumerate(weights):
        m.param(f"layers.{k}.up", "Linear", weight=w.to(container))
    m.request(0, 12)
    m.step(0, [(0, 0, 12)])
    for k, w in enumerate(weights):
        y = (x.double() @ w.double().T).to(held)
        if k == 1 and fault:
            y = y.bfloat16().to(held) if fault == "rounds" else (y.double() * (1 + size * drawn(12, 64))).to(held)
        z = (y.double() * y.double().sigmoid()).to(held)
        m.call(f"layers.{k}.up", "Linear", {"input": x.to(container)}, y.to(container))
        m.call(f"layers.{k}.act", "SiLU", {"input": y.to(container)}, z.to(container))
        x = z
    return m.close()


@pytest.mark.parametrize("held", list(NARROW))
@pytest.mark.parametrize("standard", ["operator", *(n for n, s in built_in().items() if s.output)])
def test_upcast_numbers_are_judged_as_they_are_in_their_own_dtype(tmp_path: Path, held: str, standard: str) -> None:
    own = rows_of(build(tmp_path / "own", NARROW[held], NARROW[held]), standard=standard)
    wide = rows_of(build(tmp_path / "wide", NARROW[held], torch.float32), standard=standard)
    assert [(r.tap, r.status, r.dtype, r.measured, r.measures) for r in wide] == [
        (r.tap, r.status, r.dtype, r.measured, r.measures) for r in own
    ]
    assert {(r.dtype, r.stored) for r in wide} == {(held, "float32")}
    assert {r.stored for r in own} == {""}


@pytest.mark.parametrize("fault", ["noise", "rounds"])
def test_a_genuine_float32_kernel_with_an_error_of_bfloat16s_size_fails(tmp_path: Path, fault: str) -> None:
    found = rows_of(build(tmp_path / "d", torch.float32, torch.float32, fault))
    assert [r.tap for r in found if r.status == "fail"] == ["layers.1.up"]
    assert {r.stored for r in found} == {""}


def test_a_wrong_kernel_among_upcast_numbers_fails(tmp_path: Path) -> None:
    found = rows_of(build(tmp_path / "d", torch.bfloat16, torch.float32, "noise", 0.02))
    assert [r.tap for r in found if r.status == "fail"] == ["layers.1.up"]


def test_another_tools_fault_free_dump_passes_and_says_which_grid(tmp_path, capsys):
    golden = unpack("d_xray_h5", tmp_path) / "golden"
    assert main(["opcheck", str(golden), "-j", "0", "--out", str(tmp_path / "o")]) == 0
    said = capsys.readouterr().out
    assert "hold bfloat16 numbers: judged by what bfloat16 can hold" in said
    judged = [r for r in csv_rows(tmp_path / "o/opcheck.csv") if r["status"] in ("pass", "fail")]
    assert {(r["dtype"], r["stored"]) for r in judged} == {("bfloat16", "float32")}


def test_the_replay_of_compare_works_on_that_grid_and_says_so(tmp_path, capsys):
    golden = build(tmp_path / "golden", torch.bfloat16, torch.bfloat16)
    wide = build(tmp_path / "wide", torch.bfloat16, torch.float32)
    assert main(["compare", str(golden), str(wide), "--replay", "--out", str(tmp_path / "c")]) == 0
    said = "".join(capsys.readouterr())
    assert "8 outputs of mine checked, no module is wrong" in said
    assert "replay: 8 outputs are tensors of float32 that hold bfloat16 numbers" in said


@pytest.mark.parametrize("cls", ["RowParallelLinear", "VocabParallelEmbedding"])
def test_a_part_of_a_sum_over_ranks_is_not_judged_where_nobody_wrote_that_it_is_one(tmp_path: Path, cls: str) -> None:
    """Another tool's dump of two ranks: its output may be the sum, or this rank's share of it."""
    weights = [drawn(16, 8, seed=k).float() for k in (1, 2)]
    parts = [drawn(6, 8, seed=k + 5).float() for k in (1, 2)]
    total = sum(x.double() @ w.double().T for x, w in zip(parts, weights, strict=True)).float()
    with (
        h5py.File(tmp_path / "globalrank-0_localrank-0.h5", "w") as a,
        h5py.File(tmp_path / "globalrank-1_localrank-1.h5", "w") as b,
    ):
        for f, x, w in zip((a, b), parts, weights, strict=True):
            group = f.create_group("0", track_order=True)
            looked_up = cls == "VocabParallelEmbedding"
            given, out = (torch.arange(6), sum(weights)[:6]) if looked_up else (x, total)
            for name, t in (("params.weight", w), ("input.0", given), ("output.0", out)):
                group[f"o_proj.{cls}.0.forward_{name}"] = t.numpy()
    found = rows_of(tmp_path)
    assert {(r.status, r.message) for r in found} == {("skip", "whether it adds up over ranks was not recorded")}
