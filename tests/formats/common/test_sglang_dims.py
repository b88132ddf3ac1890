"""The notes of SGLang's dumper: what they say of a tensor's pieces."""

from __future__ import annotations

import pytest

from vllm_accprobe.formats import sglang


@pytest.mark.parametrize(
    ("note", "dims", "cuts", "copies"),
    [
        ("t h # tp:replicated", 2, [], {"tp"}),
        ("t num_heads[tp] head_dim", 3, [("tp", 1, "join", False)], set()),
        ("t (num_heads * head_dim)[tp]", 2, [("tp", 1, "join", False)], set()),
        ("t h[tp:partial]", 2, [("tp", 1, "partial", False)], set()),
        ("b s[cp:zigzag,sp] h # ep:replicated", 3, [("sp", 1, "join", False), ("cp", 1, "join", True)], {"ep"}),
        ("1 t h[ep:partial+natural]", 3, [("ep", 2, "partial", False)], set()),
    ],
)
def test_notes(note: str, dims: int, cuts: list[tuple[str, int, str, bool]], copies: set[str]) -> None:
    found = sglang.parse_dims(note)
    assert (found.dims, set(found.copies)) == (dims, copies)
    assert [(c.group, c.dim, c.kind, c.zigzag) for c in found.cuts] == cuts


@pytest.mark.parametrize("note", ["t h[", "t h[tp:sideways]", "t-h", "t (a b"])
def test_odd_notes(note: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        sglang.parse_dims(note)
