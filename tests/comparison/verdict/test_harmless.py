"""What is said of images with other hashes, when what was computed of them agrees and when it does not."""

from __future__ import annotations

from picture_runs import PIXELS, seen

from vllm_accprobe.comparison.engine import compare


def test_a_changed_way_of_hashing_is_called_so_where_the_images_agree() -> None:
    golden, mine = seen(PIXELS, "uint8"), seen(PIXELS, "uint8", hashed="new")
    golden.run["versions"], mine.run["versions"] = {"vllm": "0.20.2"}, {"vllm": "0.32.0"}
    result = compare(golden, mine)
    assert result.notes == [
        "image hashes differ in all requests that have images (1), and all that was computed of the images agrees: "
        "another way of hashing (vLLM 0.20.2 and 0.32.0)"
    ]


def test_another_image_is_called_so() -> None:
    result = compare(seen(PIXELS, "uint8"), seen(PIXELS, "uint8", hashed="new", off=0.5))
    assert "request 'a' has different images" in result.notes
    assert not any("hashing" in note for note in result.notes)
    # nothing of the picture was captured: nobody knows
    bare = [seen(PIXELS, "uint8"), seen(PIXELS, "uint8", hashed="new")]
    for side in bare:
        side.records = [r for r in side.records if r.tap != "visual"]
    assert compare(*bare).notes == ["request 'a' has different images"]
