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
    assert text["arrays"][0][0] == "<i8"
    text["arrays"][0][0] = "<f8"
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


@pytest.mark.parametrize("arrays", [[["|O", [1], 0]], [["<f8", [99], 0]], [["<f8", [1], -8]], "x", [[1]]])
def test_made_up_frames_are_refused(arrays):
    with pytest.raises(ValueError):
        store.unpack({"units": [], "arrays": arrays}, b"\0" * 16)
