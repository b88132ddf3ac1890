"""Headers of ATB's tensor files, and what is refused."""

import pytest

from vllm_accprobe.formats.io import atb_file


def header(*lines: str, size: int | None = None, payload: int = 0) -> atb_file.AtbHeader:
    data = "".join(f"{line}\n" for line in lines).encode()
    return atb_file.parse_header(data, len(data) + payload if size is None else size)


def test_a_header_by_hand() -> None:
    found = header("$Version=1.0", "format=2", "dtype=27", "dims=3,5", "$End=1", payload=30)
    assert (found.dtype, found.shape, found.stored, found.stats) == ("bfloat16", (3, 5), True, None)
    assert found.offset == len("$Version=1.0\nformat=2\ndtype=27\ndims=3,5\n$End=1\n")


def test_scalars_and_empty_tensors() -> None:
    assert header("dtype=0", "dims=", "$End=1", payload=4).shape == ()
    assert header("dtype=0", "dims=0,7", "$End=1").shape == (0, 7)


def test_statistics_in_place_of_values() -> None:
    found = header("dtype=1", "dims=4", "max=2.5", "min=-1", "mean=0.5", "l2norm=3", "$End=1")
    assert found.stats is not None
    assert (found.stored, found.stats.max, found.stats.l2, found.stats.count) == (False, 2.5, 3.0, 4)


@pytest.mark.parametrize(("lines", "said"), [
    (("dtype=0", "dims=2"), "does not end"),
    (("dtype=0", "dims=-2", "$End=1"), "dims is '-2'"),
    (("dtype=0", "dims=2,x", "$End=1"), "dims is 'x'"),
    (("dtype=0", "dims=2,,2", "$End=1"), "dims is ''"),
    (("dtype=0", "$End=1"), "no dims"),
    (("dims=2", "$End=1"), "dtype is ''"),
    (("dtype=0", "dims=2", "nonsense", "$End=1"), "without '='"),
    (("dtype=0", "dims=" + ",".join(["1000000"] * 9), "$End=1"), "no tensor has these"),
    (("dtype=0", "dims=4", "$End=1"), r"need 16 bytes, the file holds 0"),
    (("dtype=0", "dims=" + "9" * 40, "$End=1"), "not a number"),
])  # fmt: skip
def test_headers_that_are_refused(lines: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        header(*lines)
