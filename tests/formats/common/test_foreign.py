"""What every foreign format's module relies on: records with their own names, lazily read and checked."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.dump.reader import DumpError
from vllm_accprobe.dump.record_table import table_of
from vllm_accprobe.dump.schema import Stats
from vllm_accprobe.formats import open_dump
from vllm_accprobe.formats.common import foreign
from vllm_accprobe.formats.common.foreign import ForeignDump, Tensor, computed, missing, torch_dtype


def dump_of(*tensors: Tensor) -> ForeignDump:
    dump = ForeignDump(Path("there"), "test")
    for t in tensors:
        dump.add(t)
    return dump


def test_a_record_has_its_own_tools_name_and_reads_when_asked() -> None:
    reads = []
    bits = np.arange(6, dtype="<u2")

    def read() -> np.ndarray:
        reads.append(1)
        return bits

    dump = dump_of(Tensor("Module.x.L.forward.0.output.0", "x", "output.0", "bfloat16", (2, 3), read, step=4, rank=1))
    (r,) = dump.records
    assert (r.name, r.tap, r.role) == ("Module.x.L.forward.0.output.0", "x", "output.0")
    assert (r.step, r.rank, r.call) == (4, 1, 0)
    assert dump.ranks == (1,)
    assert set(dump.steps) == {(1, 4)}
    assert not reads
    assert dump.read(r).tolist() == [[0, 1, 2], [3, 4, 5]]
    out = np.zeros(100, np.uint8)
    assert dump.read(r, out).base is not None
    assert out[:12].view("<u2").tolist() == list(range(6))
    assert dump.read_rows(r, slice(1, 2)).tolist() == [[3, 4, 5]]


def test_the_same_place_twice_in_a_step_is_the_next_call_and_a_weight_has_no_step() -> None:
    add = [Tensor(str(i), "x", "output.0", "float32", ()) for i in range(3)]
    add += [Tensor(f"w{s}", "x", "param.weight", "float32", (), step=s) for s in range(2)]
    add += [Tensor("other step", "x", "output.0", "float32", (), step=1)]
    dump = dump_of(*add)
    assert [(r.name, r.step, r.call) for r in dump.records] == [
        ("0", 0, 0), ("1", 0, 1), ("2", 0, 2), ("w0", None, 0), ("w1", None, 1), ("other step", 1, 0)
    ]  # fmt: skip
    assert [r.seq for r in dump.records] == [0, 1, 2, 0, 1, 0]


@pytest.mark.parametrize("given", [np.zeros(5, "<f4"), np.zeros(6, "<f8"), np.zeros((2, 2), "<f4")])
def test_a_payload_that_is_not_what_was_announced_is_an_error(given: np.ndarray) -> None:
    dump = dump_of(Tensor("a", "x", "output.0", "float32", (2, 3), lambda: given))
    with pytest.raises(DumpError, match="was announced"):
        dump.read(dump.records[0])


def test_what_cannot_be_read_is_one_line_and_what_is_unknown_is_counted() -> None:
    def gone() -> np.ndarray:
        raise FileNotFoundError(2, "No such file or directory", "x.bin")

    dump = dump_of(
        Tensor("a", "x", "output.0", "float32", (1,), gone), Tensor("b", "x", "output.1", "int4", (1,)),
        Tensor("c", "x", "output.2", "float32", (-1,)), Tensor("d", "x", "output.3", "float32", (1,)),
        Tensor("e", "x", "output.4", "int8", (1 << 40, 1 << 40)), Tensor("f", "x", "output.5", "int8", (0, 1 << 80)),
        Tensor("g", "x", "output.6", "int8", (1,), call=10**25), Tensor("h", "x", "output.7", "int8", (1,), rank=2**31),
    )  # fmt: skip
    with pytest.raises(DumpError, match="cannot read a in there: No such file"):
        dump.read(dump.records[0])
    with pytest.raises(DumpError, match="only statistics"):
        dump.read(dump.records[1])
    assert [s.reason for s in dump.skips] == [
        f"{foreign.UNKNOWN_DTYPE} (int4)", *[foreign.IMPOSSIBLE_SHAPE] * 3, *[foreign.IMPOSSIBLE_NUMBER] * 2,
    ]  # fmt: skip
    assert len(table_of(dump.records)) == len(dump.records)  # as columns


@pytest.mark.parametrize(
    ("spelling", "name"),
    [("torch.bfloat16", "bfloat16"), ("BF16", "bfloat16"), ("DT_FLOAT", "float32"), ("<f4", "float32"),
     (">i2", "int16"), ("mindspore.float16", "float16"), ("Int64", "int64"), ("?", "bool"), ("DT_BOOL", "bool"),
     ("uint8", "uint8"), ("hifloat8", "hifloat8"), ("torch.float8_e4m3fn", "float8_e4m3fn")],
)  # fmt: skip
def test_spellings_of_dtypes(spelling: str, name: str) -> None:
    assert torch_dtype(spelling) == name


# --- statistics that a tool did not store are computed from its values, and only those ---


def _dump() -> tuple[ForeignDump, list[str]]:
    dump, read = ForeignDump(Path("made"), "made"), []

    def reads(name: str, values: np.ndarray) -> Any:
        def bits() -> np.ndarray:
            read.append(name)
            return values

        return bits

    x = np.array([1.0, -3.0, np.nan, np.inf], "f4")
    partly = Stats(count=3, min=0.0, max=9.0, mean=None, l2=None, nan=0, inf=0)
    whole = Stats(count=2, min=7.0, max=8.0, mean=7.5, l2=1.0, nan=0, inf=0)
    dump.add(Tensor("a", "a", "value", "float32", (4,), reads("a", x)))
    dump.add(Tensor("b", "b", "value", "int64", (3,), reads("b", np.array([1, 2, 6])), stats=partly))
    dump.add(Tensor("c", "c", "value", "float32", (2,), reads("c", x[:2]), stats=whole))
    dump.add(Tensor("d", "d", "value", "float32", (2,), None))
    return dump, read


def test_what_lacks_is_computed_and_what_is_there_is_kept() -> None:
    dump, read = _dump()
    ticks: list[int] = []
    found, failed = computed(dump, dump.records, lambda: ticks.append(1))
    assert (sorted(read), len(ticks), failed) == (["a", "b"], 2, [])
    a, b, c, d = (r.stats for r in found)
    assert a == Stats(count=4, min=-3.0, max=1.0, mean=-1.0, l2=pytest.approx(10**0.5), nan=1, inf=1)
    assert b == Stats(count=3, min=0.0, max=9.0, mean=3.0, l2=pytest.approx(41**0.5), nan=0, inf=0)
    assert (c, d) == (dump.records[2].stats, None)
    assert [missing(r) for r in dump.records] == [True, True, False, False]


def test_a_file_that_went_away_is_said_and_the_others_are_there() -> None:
    dump, _ = _dump()

    def gone() -> np.ndarray:
        raise DumpError("x.npy has gone")

    dump.add(Tensor("e", "e", "value", "float32", (2,), gone))
    found, failed = computed(dump, dump.records)
    assert failed == ["no statistics of 1 tensors: x.npy has gone"]
    assert found[-1].stats is None
    assert found[0].stats is not None


# --- bfloat16 numbers in float32 files are seen in a dump as a whole; embeddings of a float32 model are none ---


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def file(path: Path, dtype: torch.dtype, layers: int = 6, wrong: float = 0.0, on_grid: str = "embed") -> Path:
    """An npz as `accprobe convert` writes it: many steps of one embedding, and layers that compute in ``dtype``.
    on_grid: the taps whose numbers are a bfloat16 checkpoint's."""
    arrays: dict[str, np.ndarray] = {}
    for step in range(12):
        for k in range(layers):
            tap = "embed" if k == 0 else f"layers.{k}"
            x = drawn(100 * step + k, 8, 32).to(torch.bfloat16 if tap == on_grid else dtype).float()
            arrays[f"{step}/{tap}/output.0"] = (x * (1 + wrong)).to(dtype).float().numpy()
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_upcast_outputs_are_seen_and_compared_as_such(tmp_path: Path, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    golden, mine = file(tmp_path / "g.npz", dtype), file(tmp_path / "m.npz", dtype, wrong=2e-3)
    assert foreign.note_values(open_dump(golden)) == name
    found = compare(golden, mine)
    assert f"golden: its float32 values are {name} numbers: judged by what {name} can hold" in found.notes
    assert found.verdict == ("pass" if name == "bfloat16" else "fail")  # 2e-3 is below bfloat16's rounding alone


def test_a_float32_model_of_a_bfloat16_checkpoint(tmp_path: Path) -> None:
    golden, mine = file(tmp_path / "g.npz", torch.float32), file(tmp_path / "m.npz", torch.float32, wrong=1e-3)
    assert foreign.note_values(open_dump(golden)) == ""
    found = compare(golden, mine)
    assert found.verdict == "fail"
    assert not [n for n in found.notes if "numbers: judged" in n]


def test_outputs_are_looked_at_of_all_taps(tmp_path: Path) -> None:
    """Steps repeat their taps: every so-manieth output may always be the embedding."""
    npz = np.load(file(tmp_path / "g.npz", torch.float32))
    with h5py.File(tmp_path / "g.h5", "w", track_order=True) as f:
        for step in range(16):
            group = f.create_group(str(step), track_order=True)
            for key in (k for k in npz if k.startswith(f"{step % 12}/")):
                group[f"{key.split('/')[1]}.Linear.0.forward_output.0"] = npz[key]
    assert open_dump(tmp_path / "g.h5").problems == []


def test_integers_and_constants_tell_nothing(tmp_path: Path) -> None:
    ids = {f"0/layers.{k}/output.0": np.arange(200, dtype=np.float32).reshape(10, 20) for k in range(5)}
    np.savez(tmp_path / "i.npz", **ids)
    assert foreign.note_values(open_dump(tmp_path / "i.npz")) == ""
