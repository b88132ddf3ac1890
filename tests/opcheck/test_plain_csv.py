"""Strangers' names in csv files and on terminals."""

from vllm_accprobe.opcheck.plain_csv import escaped, inert, safe


def test_names_neither_run_nor_steer_the_terminal():
    assert [inert(t) for t in ("=1+1", "-x", "a=b", "")] == ["'=1+1", "'-x", "a=b", ""]
    assert escaped("a\x1b[31mb\nc") == r"a\x1b[31mb\nc"
    assert safe("x" * 300) == "x" * 199 + "…"
    assert safe("short", 5) == "short"
