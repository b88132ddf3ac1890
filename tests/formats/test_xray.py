"""torch_xray's HDF5: names, order, steps and ranks, what HDF5 can do to a reader."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
from synthetic_model import capture, scaled, write

from vllm_accprobe.cli import main
from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.formats import open_dump


def test_paths_with_other_names_pair_by_order(tmp_path: Path) -> None:
    """What the guide of torch_xray advises to do by editing the library."""
    rng = np.random.default_rng(0)
    values = {f"{m}{k}": rng.standard_normal((4, 8)).astype("f4") for m in "abc" for k in ("in", "out")}
    for side, names in (("golden", ("one.Linear.0", "two.Linear.0", "three.Linear.0")),
                        ("mine", ("first.XpuLinear.0", "second.XpuLinear.0", "third.XpuLinear.0"))):  # fmt: skip
        with h5py.File(tmp_path / f"{side}.h5", "w", track_order=True) as f:
            group = f.create_group("1", track_order=True)
            for m, name in zip("abc", names, strict=True):
                group[f"{name}.forward_input.0"] = values[f"{m}in"]
                group[f"{name}.forward_output.0"] = values[f"{m}out"] + (0.5 if (m, side) == ("b", "mine") else 0)
    found = compare(tmp_path / "golden.h5", tmp_path / "mine.h5")
    assert [(p.golden, p.mine, p.status) for p in found.pairs if p.role == "output.0"] == [
        ("one.Linear.0.forward_output.0", "first.XpuLinear.0.forward_output.0", "pass"),
        ("two.Linear.0.forward_output.0", "second.XpuLinear.0.forward_output.0", "fail"),
        ("three.Linear.0.forward_output.0", "third.XpuLinear.0.forward_output.0", "pass"),
    ]
    assert {p.rule for p in found.pairs} == {"order"}
    assert "names: two is second by order" in found.plan


def test_our_own_dump_and_a_card_whose_paths_have_other_names_pair_by_order(tmp_path: Path) -> None:
    """Ours names its inputs by the arguments, torch_xray's by numbers: input.x and input.0."""
    one: dict[str, Any] = {"prompts": {"a": [3, 14, 15]}, "tokens": 1}
    wrong = "model.layers.1.mlp.down_proj"
    write(capture(**one), tmp_path / "golden")
    write(capture(faults={wrong: scaled(1.2)}, **one), tmp_path / "mine")
    assert main(["convert", str(tmp_path / "mine"), str(tmp_path / "ours.h5")]) == 0
    with h5py.File(tmp_path / "ours.h5") as ours, h5py.File(tmp_path / "xpu.h5", "w", track_order=True) as theirs:
        group = theirs.create_group("1", track_order=True)
        for name, data in ours["0"].items():
            path, part, rest = name.rpartition(".forward_")
            *words, cls, number = path.split(".")
            group[".".join([*(f"k{w}" for w in words), cls, number]) + part + rest] = data[()]
    found = compare(tmp_path / "golden", tmp_path / "xpu.h5")
    only = found.coverage["taps_only_golden"], found.coverage["taps_only_mine"]
    assert (found.coverage["pairs"], only) == (100, ([], []))
    assert [o["module"] for o in found.origins] == [".".join(f"k{w}" for w in wrong.split("."))]


def test_steps_and_ranks(tmp_path: Path) -> None:
    for rank in (1, 0):
        with h5py.File(tmp_path / f"globalrank-{rank}_localrank-{rank}.h5", "w", track_order=True) as f:
            for step in (3, 10):
                f[f"{step}/x.Linear.0.forward_output.0"] = np.full((2, 2), 10 * rank + step, "f2")
    (tmp_path / "globalrank-0_localrank-0_summary.csv").write_text("Index,Step\n")
    dump = open_dump(tmp_path)
    assert [(r.rank, r.step, float(dump.read(r)[0, 0])) for r in dump.records] == [
        (0, 3, 3.0), (0, 10, 10.0), (1, 3, 13.0), (1, 10, 20.0)
    ]  # fmt: skip
    assert dump.problems == []  # steps are numbers: their order is known without h5py's
    with h5py.File(tmp_path / "unordered.h5", "w") as f:
        f["1/b"] = f["1/a"] = np.zeros(2, "f4")
    unordered = open_dump(tmp_path / "unordered.h5")
    assert [r.name for r in unordered.records] == ["a", "b"]
    assert "does not record the order of creation" in unordered.problems[0]


def test_every_dtype_big_endian_chunked_and_packed(tmp_path: Path) -> None:
    kinds = ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u1", "u4", "?")
    arrays = {d: np.arange(12).reshape(3, 4).astype(d) for d in kinds}
    arrays["big"] = np.arange(5, dtype=">f4")
    arrays["complex"] = (np.arange(4) + 1j).astype("c8")
    with h5py.File(tmp_path / "a.h5", "w", track_order=True) as f:
        for name, a in arrays.items():
            f.create_dataset(name, data=a)
        f.create_dataset("packed", data=np.zeros((200, 200), "f4"), chunks=(10, 200), compression="gzip")
        f.create_dataset("scalar", data=np.float32(2.5))
        f.create_dataset("text", data="hello")
        f.create_dataset("none", data=np.zeros((0, 4), "f4"))
    dump = open_dump(tmp_path / "a.h5")
    read = {r.name: dump.read(r) for r in dump.records}
    for name, a in arrays.items():
        assert read[name].dtype == a.dtype.newbyteorder("<")
        assert np.array_equal(read[name], a)
    assert read["packed"].shape == (200, 200)
    assert not read["packed"].any()
    assert (read["scalar"].shape, float(read["scalar"])) == ((), 2.5)
    assert read["none"].shape == (0, 4)
    assert [s.tap for s in dump.skips] == ["text"]


def test_what_leads_out_of_the_file_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside.bin"
    outside.write_bytes(b"\0" * 64)
    other = tmp_path / "other.h5"
    with h5py.File(other, "w") as f:
        f["secret"] = np.ones(4, "f4")
    layout = h5py.VirtualLayout(shape=(4,), dtype="f4")
    layout[:] = h5py.VirtualSource(str(other), "secret", shape=(4,))
    with h5py.File(tmp_path / "x.h5", "w", track_order=True) as f:
        f["good.Linear.0.forward_output.0"] = np.ones(3, "f4")
        f["away"] = h5py.ExternalLink(str(other), "/secret")
        f["soft"] = h5py.SoftLink("/good.Linear.0.forward_output.0")
        f.create_virtual_dataset("virtual", layout)
        f.create_dataset("external", (16,), "f4", external=[(str(outside), 0, 64)])
        f.create_dataset("huge", (1 << 40,), "f4")
        f.create_dataset("huge chunks", (1 << 40,), "f4", chunks=(1024,))
        f["loop"] = f["/"]
    dump = open_dump(tmp_path / "x.h5")
    assert [r.name for r in dump.records] == ["good.Linear.0.forward_output.0"]
    assert sorted(s.tap for s in dump.skips) == ["external", "huge", "huge chunks", "virtual"]
    assert sum("not followed" in p for p in dump.problems) == 2
