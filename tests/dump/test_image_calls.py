"""Modules of an encoder that run image by image: whose rows a call has is known only in a step with one image."""

from vllm_accprobe.dump.schema import REPLICATED, Record, RowSpace, Segment, unnamed

ONE, TWO, PART = 0, 1, 2
"""Steps: with one image of four rows, with two of them, and with two of which one request was chosen."""
ROWS = {
    (0, ONE, "vision/4"): RowSpace(ONE, "vision/4", 4, (Segment(0, 0, 4, 0, image=0),)),
    (0, TWO, "vision/4"): RowSpace(TWO, "vision/4", 8, (Segment(0, 0, 4, 0, image=0), Segment(0, 0, 4, 4, image=1))),
    (0, TWO, "vision/4#1"): RowSpace(TWO, "vision/4#1", 4, (Segment(0, 0, 4, 0, image=0),)),
    (0, PART, "vision/4"): RowSpace(PART, "vision/4", 8, (Segment(0, 0, 4, 0, image=0),)),
}


def calls(step: int, n: int, tap: str = "conv", rows: str = "vision/4") -> list[Record]:
    fixed = {"dtype": "float32", "shape": (4, 2), "row_dim": 0, "stats": None, "hash": None, "payload": None}
    return [
        Record(
            rank=0, step=step, tap=tap, cls="", role="output.0", call=c, seq=c, rows=rows, layout=REPLICATED, **fixed
        )  # type: ignore[arg-type]
        for c in range(n)
    ]


def test_a_call_for_each_image_is_not_a_call_for_all() -> None:
    assert unnamed(calls(ONE, 1) + calls(TWO, 2), ROWS) == [1, 2]
    assert unnamed(calls(TWO, 2), ROWS) == [0, 1]
    assert unnamed(calls(PART, 2), ROWS) == [0, 1]


def test_what_is_called_as_often_for_one_image_is_called_for_all() -> None:
    assert unnamed(calls(ONE, 2) + calls(TWO, 2), ROWS) == []
    assert unnamed(calls(ONE, 1) + calls(TWO, 1), ROWS) == []


def test_images_that_were_dealt_out_have_exact_rows() -> None:
    assert unnamed(calls(TWO, 2, rows="vision/4#1"), ROWS) == []
