"""Strangers' names in csv files and on terminals."""

import pytest

from vllm_accprobe.opcheck.plain_csv import escaped, inert, safe, write_rows


def test_names_neither_run_nor_steer_the_terminal():
    assert [inert(t) for t in ("=1+1", "-x", "a=b", "")] == ["'=1+1", "'-x", "a=b", ""]
    assert escaped("a\x1b[31mb\nc") == r"a\x1b[31mb\nc"
    assert safe("x" * 300) == "x" * 199 + "…"
    assert safe("short", 5) == "short"


def test_a_csv_is_there_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.csv"
    write_rows(path, ("n", "said"), [(1, "a,b"), (None, 0.1)])
    assert path.read_text() == 'n,said\n1,"a,b"\n,0.1\n'

    def broken():
        yield (2, "x")
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        write_rows(path, ("n", "said"), broken())
    assert [p.name for p in tmp_path.iterdir()] == ["a.csv"]
    assert path.read_text().startswith("n,said\n1,")
