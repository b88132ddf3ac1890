"""Units as frames of bytes: back as they were, and nothing of what is torn, damaged or made up."""

import numpy as np
import pytest
from measured_units import said, unit

from vllm_accprobe.align.tokens import NO_ROWS
from vllm_accprobe.comparison import store


def test_units_come_back_as_they_were():
    units = [unit(), unit("b", table=None, rows=NO_ROWS)]
    units[1].columns = np.array([[1.5], [np.nan]])
    ((text, data, end),) = store.frames(store.pack(units))
    back = store.unpack(text, data, {})
    assert said(back) == said(units)
    assert type(back[0].key) is type(back[0].parts[0].moment) is tuple
    assert back[0].parts[0].rows is back[0].parts[1].rows
    assert end == len(store.pack(units))


def test_a_frame_with_an_array_of_another_kind_is_refused():
    ((text, data, _),) = store.frames(store.pack([unit()]))
    (_, _, arrays, _) = text["units"][0]
    assert arrays[0] == [["i", 0, [3]]] * 2
    arrays[0][0][0] = "f"
    with pytest.raises(ValueError, match="keys of float64"):
        store.unpack(text, data)


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


@pytest.mark.parametrize(
    ("place", "made_up"),
    [
        *((COLUMNS, where) for where in (["O", 0, [1]], ["f", 0, [99]], ["f", -1, [1]], ["f", 0, "x"], [1], "x")),
        *((PLAIN, columns) for columns in ("x", [["g"]], [[]] * len(store.PLAIN), [["g"] * 3] * len(store.PLAIN),
                                     [["g"] * 2, ["m"] * 3, *[["x"]] * (len(store.PLAIN) - 2)])),
        *((ARRAYS, columns) for columns in ([], [[None]] * 5, [[["i", 0, [3]]] * 2] * 4)),
    ],
)  # fmt: skip
def test_made_up_frames_are_refused(place, made_up):
    ((text, data, _),) = store.frames(store.pack([unit()]))
    text["units"][0][place] = made_up
    with pytest.raises(ValueError, match="not a frame of measured units"):
        store.unpack(text, data)


@pytest.mark.parametrize("ends", [{"f": 99, "i": 0, "b": 0}, {"f": 1}, {"f": "x", "i": 0, "b": 0}, [1], None])
def test_frames_whose_arrays_do_not_fit_their_bytes_are_refused(ends):
    ((text, data, _),) = store.frames(store.pack([unit()]))
    with pytest.raises(ValueError):
        store.unpack(text | {"ends": ends}, data)
