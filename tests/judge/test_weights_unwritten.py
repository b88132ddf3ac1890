"""Parameters that loading did not write are named; tables, and constants that no layer's loading writes, are not."""

from __future__ import annotations

from typing import Any

from judge.lives import lives, made, weight

from vllm_accprobe.judge.weights import NEVER_WRITTEN, WeightFault, any_layers, faults_within, side_of


def faults(*prints: Any) -> list[WeightFault]:
    return faults_within(side_of(lives(list(prints))), "mine")


def test_loading_that_writes_all_is_silent() -> None:
    assert faults(made(0, weight(1), raw=True), made(0, weight(2), tap="l.1", raw=True)) == []


def test_memory_that_nobody_filled() -> None:
    (fault,) = faults(made(0, weight(1), raw=True), made(0, weight(2), tap="l.1", times=0, raw=True))
    assert (fault.what, fault.tap, fault.rows) == (NEVER_WRITTEN, "l.1", "")
    assert fault.says == "l.1.weight was never written by loading: it contains earlier values of the memory"


def test_some_rows_of_it() -> None:
    (fault,) = faults(made(0, weight(1), times=4, raw=True))
    assert fault.says.startswith("l.0.weight (rows 4, 5) was never written by loading")


def test_what_the_module_filled_and_other_layers_were_written() -> None:
    norm = [made(0, weight(i), tap=f"layers.{i}.norm", times=6 if i else 0) for i in range(3)]
    (fault,) = faults(*norm)
    assert fault.tap == "layers.0.norm"
    assert fault.says.endswith("as initialised, while loading wrote that of other layers")


def test_constants_and_tables_are_none() -> None:
    written = made(0, weight(1))
    assert faults(written, made(0, weight(2), tap="model", name="normalizer", times=0)) == []
    assert faults(written, made(0, weight(2), tap="l.1", name="cos_sin_cache", times=0, raw=True)) == []


def test_where_nobody_looked_nothing_is_known() -> None:
    assert faults(made(0, weight(1), written=None), made(0, weight(2), tap="l.1", written=None)) == []
    assert faults(made(0, weight(1), times=0, raw=True)) == []


def test_form() -> None:
    assert any_layers("model.layers.3.mlp.experts.12", "w2") == any_layers("model.layers.4.mlp.experts.0", "w2")
