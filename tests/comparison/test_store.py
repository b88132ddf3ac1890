"""Units as frames of bytes: back as they were, and nothing of what is torn, damaged or made up."""

import json

import numpy as np
import pytest
from measured_units import said, unit

from vllm_accprobe.align.tokens import NO_ROWS
from vllm_accprobe.comparison import store
from vllm_accprobe.comparison.measure.measured import Part
from vllm_accprobe.dump.record_table import LazyTable


def test_units_come_back_as_they_were():
    units = [unit(), unit("b", table=None, rows=NO_ROWS)]
    units[1].columns = np.array([[1.5], [np.nan]])
    ((text, data, end),) = store.frames(store.pack(units))
    back = store.unpack(text, data, {})
    assert said(back) == said(units)
    assert type(back[0].key) is type(back[0].parts[0].moment) is tuple
    assert back[0].parts[0].rows is back[0].parts[1].rows
    assert end == len(store.pack(units))


def test_half_a_surrogate_pair_in_a_name_is_written():
    parts = LazyTable(Part, 1, {"stats": [(0.5, 0.5)]})
    assert json.loads(store._unit_text(parts, [["a\ud800"], 0.5])) == [["a\ud800"], 0.5]
    assert store._unit_text(parts, [["a"], 0.5]) == b'[["a"],0.5]'


def test_a_torn_frame_is_not_there_and_a_damaged_one_neither():
    one, two = store.pack([unit("a")]), store.pack([unit("b")])
    whole = one + two
    assert len(list(store.frames(whole))) == 2
    cuts = len(whole) - 1, len(one), len(one) - 1, 5, 0
    assert [len(list(store.frames(whole[:n]))) for n in cuts] == [1, 1, 0, 0, 0]
    bad = bytearray(whole)
    bad[len(one) + 60] ^= 1
    assert len(list(store.frames(bytes(bad)))) == 1


COLUMNS, PLAIN, ARRAYS = 3, 1, 2
"""Places in a unit."""
NO_FRAME = "not a frame of measured units"


@pytest.mark.parametrize(
    ("place", "made_up", "why"),
    [
        *((COLUMNS, where, NO_FRAME) for where in (["O", 0, [1]], ["f", 0, [99]], ["f", -1, [1]], ["f", 0, "x"], "x")),
        *((PLAIN, columns, NO_FRAME) for columns in (
            "x", [["g"]], [[]] * len(store.PLAIN), [["g"] * 3] * len(store.PLAIN),
            [["g"] * 2, ["m"] * 3, *[["x"]] * (len(store.PLAIN) - 2)])),
        *((ARRAYS, columns, NO_FRAME) for columns in ([], [[None]] * 5, [[["i", 0, [3]]] * 2] * 4)),
        (ARRAYS, "of another kind", "keys of float64"),
        *(("ends", ends, None) for ends in ({"f": 99, "i": 0, "b": 0}, {"f": 1}, {"f": "x", "i": 0, "b": 0}, [1])),
    ],
)  # fmt: skip
def test_made_up_frames_are_refused(place, made_up, why):
    ((text, data, _),) = store.frames(store.pack([unit()]))
    unit_of = text["units"][0]
    if place == "ends":
        text["ends"] = made_up
    elif made_up == "of another kind":
        unit_of[ARRAYS][0][0][0] = "f"
    else:
        unit_of[place] = made_up
    with pytest.raises(ValueError, match=why):
        store.unpack(text, data)
