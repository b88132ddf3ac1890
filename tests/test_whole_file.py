"""Files that appear whole or not at all."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_accprobe.whole_file import whole, write_csv_lines, write_text


def test_a_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    with whole(tmp_path / "a") as part:
        part.write_text("x")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["a.part"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


def test_after_an_error_the_old_one_stands(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "old\n\udce4")
    with pytest.raises(FileNotFoundError), whole(tmp_path / "a") as part:
        (part.parent / "missing" / str(part.write_text("half"))).touch()
    assert (tmp_path / "a").read_bytes() == b"old\n\\udce4"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_csv(tmp_path: Path) -> None:
    write_csv_lines(tmp_path / "t.csv", ("a", "b"), ((n, None) for n in (0.1, "x,y")))
    assert (tmp_path / "t.csv").read_bytes() == b'a,b\n0.1,\n"x,y",\n'


def test_a_csv_whose_rows_fail_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    write_csv_lines(path, ("n", "said"), [(1, "a,b"), (None, 0.1)])

    def broken() -> Iterator[tuple[int, str]]:
        yield (2, "x")
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        write_csv_lines(path, ("n", "said"), broken())
    assert [p.name for p in tmp_path.iterdir()] == ["a.csv"]
    assert path.read_text() == 'n,said\n1,"a,b"\n,0.1\n'
