"""Walks through a stranger's directory: in natural order, never through a link, what is passed over remembered."""

from __future__ import annotations

from pathlib import Path

from vllm_accprobe.formats.io import plain_file


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
