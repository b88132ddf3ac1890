"""What every foreign format's module relies on: records with their own names, lazily read and checked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from vllm_accprobe.dump.reader import DumpError
from vllm_accprobe.formats.common import foreign
from vllm_accprobe.formats.common.foreign import ForeignDump, Tensor, torch_dtype


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
    )  # fmt: skip
    with pytest.raises(DumpError, match="cannot read a in there: No such file"):
        dump.read(dump.records[0])
    with pytest.raises(DumpError, match="only statistics"):
        dump.read(dump.records[1])
    assert [s.reason for s in dump.skips] == [f"{foreign.UNKNOWN_DTYPE} (int4)", foreign.ODD_SHAPE]


@pytest.mark.parametrize(
    ("spelling", "name"),
    [("torch.bfloat16", "bfloat16"), ("BF16", "bfloat16"), ("DT_FLOAT", "float32"), ("<f4", "float32"),
     (">i2", "int16"), ("mindspore.float16", "float16"), ("Int64", "int64"), ("?", "bool"), ("DT_BOOL", "bool"),
     ("uint8", "uint8"), ("hifloat8", "hifloat8"), ("torch.float8_e4m3fn", "float8_e4m3fn")],
)  # fmt: skip
def test_spellings_of_dtypes(spelling: str, name: str) -> None:
    assert torch_dtype(spelling) == name
