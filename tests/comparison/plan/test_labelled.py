"""Labelled pairs as units: which rows meet, and where both sides are read."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from vllm_accprobe.comparison.labelled_pairs import LabelSide, LabelView, meeting, places
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.label_files import Label
from vllm_accprobe.dump.schema import REPLICATED, Payload, Record

KEY = (2, 0, "x", 1)


def stored(shape, role, *, dtype="float32"):
    nbytes = int(np.prod(shape)) * 4
    return Record(0, 2, "label:x", "", role, 1, 0, dtype, shape, None, 0, None, None, REPLICATED, Payload(0, 0, nbytes))


def view(golden, mine, **dump):
    def side(record):
        return LabelSide("", record.dtype, record.shape, SimpleNamespace(**dump), record)

    return LabelView({(*KEY, "pta"): side(stored(golden, "pta")), (*KEY, "acl"): side(stored(mine, "acl"))})


@pytest.mark.parametrize(
    ("golden", "mine", "shape"),
    [
        ((4, 6), (4, 6), (4, 6)),
        ((2, 3, 5), (2, 3, 5), (6, 5)),
        ((4, 6), (2, 12), (1, 24)),  # of another shape: one row
        ((24,), (24,), (1, 24)),
        ((1 << 21, 2), (1 << 21, 2), (1, 1 << 22)),  # more rows than a table holds
    ],
)
def test_rows_of_the_last_dimension_or_one(golden, mine, shape):
    unit = view(golden, mine).unit_of(KEY)
    assert (unit.golden_key, unit.key, unit.depth) == (("x", "pta", 1), ("x", "acl", 1), 1)
    (g,), (m,) = unit.golden, unit.mine
    assert g.first.shape == m.first.shape == g.merge.shape == shape
    assert g.where == m.where == (None if shape[0] == 1 else (0, 0, f"label:{shape[0]}"))


def test_row_i_meets_row_i_and_as_many_rows_are_one_space():
    units = [view(s, s).unit_of(KEY) for s in ((4, 6), (2, 2, 9), (24,), (3, 1))]
    found = meeting(units)
    where = units[0].mine[0].where
    assert sorted(w[2] for w in found.sides[1].rows) == ["label:3", "label:4"]
    met = found.meet(where, (where,))
    assert met.both
    assert met.other.tolist() == [0, 1, 2, 3]


def test_a_side_is_read_in_the_units_shape_and_why_not_is_kept():
    bits = np.arange(24, dtype=np.float32).reshape(4, 6)
    both = view((4, 6), (2, 12), read=lambda record, out: bits)
    assert both.read(both.unit_of(KEY).mine[0].first).tolist() == [list(range(24))]

    def torn(record, out):
        raise OSError("torn\nfile")

    lost = view((4, 6), (4, 6), read=torn)
    with pytest.raises(DumpError, match="torn file"):
        lost.read(lost.unit_of(KEY).golden[0].first)
    assert lost.failed == {KEY: "torn file"}


def test_a_file_counts_where_a_value_is_there_too():
    other = stored((4, 6), "output.0")
    file = Label(0, 2, "label:x", "acl", 1, "a.npy")
    dump = SimpleNamespace(records=[stored((4, 6), "acl"), other], labels={0: file}, path=Path())
    assert places(dump) == {(*KEY, "acl"): file}
