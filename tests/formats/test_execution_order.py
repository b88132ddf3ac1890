"""The order in which modules ran, where nobody wrote it down."""

from __future__ import annotations

from vllm_accprobe.formats import msit


def test_order_without_statistics() -> None:
    declared = ["h", "h.0", "h.0.attn", "h.0.mlp", "h.0.ln_1", "h.0.ln_2", "wte"]
    places = msit.execution_order(declared, declared, {})
    order = sorted(declared, key=lambda m: places[m][1])
    assert order == ["wte", "h.0.ln_1", "h.0.attn", "h.0.ln_2", "h.0.mlp", "h.0", "h"]


def test_who_hands_on_runs_first() -> None:
    """Names that tell nothing: b takes what c gives, a takes what b gives."""
    row = {k: ("float32", (2,), float(k)) for k in range(4)}
    tables = {"root.a": {"input.0": row[2], "output.0": row[3]}, "root.b": {"input.0": row[1], "output.0": row[2]},
              "root.c": {"input.0": row[0], "output.0": row[1]}}  # fmt: skip
    places = msit.execution_order(list(tables), list(tables), tables)
    assert sorted(tables, key=lambda m: places[m]) == ["root.c", "root.b", "root.a"]


def test_a_circle_of_equal_values_ends() -> None:
    same = ("float32", (2,), 0.0)
    tables = {m: {"input.0": same, "output.0": same} for m in ("root.a", "root.b", "root.c")}
    places = msit.execution_order(list(tables), list(tables), tables)
    assert sorted(tables, key=lambda m: places[m]) == list(tables)
