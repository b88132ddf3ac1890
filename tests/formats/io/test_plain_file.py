"""Opening a stranger's file: only plain ones, named in each refusal, never more than is there."""

import math
from pathlib import Path

import numpy as np
import pytest

from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.formats.io import plain_file
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
    with pytest.raises(DumpError, match="larger than 0 MiB"):
        read_text(path, 10)
    path.write_text("[" * 100_000)
    with pytest.raises(DumpError, match="recursion"):
        read_json(path, 1 << 20)


# --- walks through a stranger's directory: in natural order, never through a link, what is passed over remembered ---


def test_files_in_order_and_what_is_passed_over(tmp_path: Path) -> None:
    for name in ("b10/x.t", "b9/x.t", "a.t", "a.u"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "d.t").mkdir()
    (tmp_path / "link.t").symlink_to("/etc/passwd")
    (tmp_path / "out").symlink_to("/etc")
    passed = plain_file.Passed()
    found = plain_file.files(tmp_path, lambda n: n.endswith(".t"), passed)
    assert [f.name for f in found] == ["a.t", "b9/x.t", "b10/x.t"]
    assert sorted(passed.links) == ["link.t", "out"]
    assert passed.unusable == [("d.t", "a directory in place of a file")]


def test_probe(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/wanted").touch()
    assert plain_file.probe(tmp_path, lambda parts: parts == ("a", "b", "wanted"))
    assert not plain_file.probe(tmp_path, lambda parts: parts[-1] == "wanted", depth=1)
    assert not plain_file.probe(tmp_path / "a/b/wanted", lambda parts: True)
