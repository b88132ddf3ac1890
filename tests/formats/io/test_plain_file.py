"""Opening a stranger's file: only plain ones, named in each refusal, never more than is there."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.formats.io.plain_file import FileProblem, fill, opened, read_bytes, read_json, read_text


def test_what_goes_wrong_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"12345678")
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(DumpError, match=rf"^{path} cannot be read: it is odd$"), opened(path):
        raise FileProblem("it is odd")
    with pytest.raises(DumpError, match=rf"^cannot read {tmp_path}/none: No such file"), opened(tmp_path / "none"):
        pass
    for odd in (tmp_path / "link", tmp_path):
        with pytest.raises(DumpError, match=f"^cannot read {odd}: "), opened(odd):
            pass


def test_never_more_than_is_there(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"12345678")
    with opened(path) as fd:
        assert fill(path, fd, 4, np.empty(2, "u2")).tobytes() == b"5678"
        assert fill(path, fd, 400, np.empty((0, 3), "u2")).shape == (0, 3)
        with pytest.raises(DumpError, match=rf"^{path} is cut$"):
            fill(path, fd, 5, np.empty(2, "u2"), "is cut")
    with pytest.raises(DumpError, match="has become shorter since it was opened"):
        read_bytes(path, 1, 8)


def test_text_and_json(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b'{"a": [1, NaN, 1e400], "b": "\xff"}')
    found = read_json(path, 100)
    assert found["b"] == "\ufffd"
    assert (found["a"][0], math.isnan(found["a"][1]), found["a"][2]) == (1, True, math.inf)
    with pytest.raises(ValueError, match="larger than 0 MiB"):
        read_text(path, 10)
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="recursion"):
        read_json(path, 1 << 20)
