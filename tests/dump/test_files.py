"""Names of files in a dump, and of dumps beside one another."""

from __future__ import annotations

from pathlib import Path

from vllm_accprobe.dump.files import journal_lines, numbered_siblings


def test_names_beside_a_directory_that_is_taken() -> None:
    names = [place.as_posix() for place in numbered_siblings(Path("a/d"))]
    assert names[:3] == ["a/d", "a/d.2", "a/d.3"]
    assert names[-1] == "a/d.999"


def test_a_last_line_without_an_end_is_torn(tmp_path: Path) -> None:
    (tmp_path / "j").write_bytes(b'{"a":1}\n\n{"b"')
    assert list(journal_lines(tmp_path / "j")) == [(1, b'{"a":1}\n', 8), (2, b"\n", 1), (0, b'{"b"', 4)]
