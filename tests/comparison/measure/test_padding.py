"""From mine's steps and rows of padding to the sentence about its graphs, through dumps with a planted fault."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_model import capture, scaled

from vllm_accprobe.comparison import store
from vllm_accprobe.comparison.engine import compare, rejudge
from vllm_accprobe.comparison.measure.padding import LEFT, NONFINITE, stood_in_padding
from vllm_accprobe.dump.dtypes import widen
from vllm_accprobe.dump.schema import PADDING, TOKENS, StepGraph
from vllm_accprobe.report import html, markdown, terminal

PROMPTS = {name: [(k * i + 3) % 60 for i in range(n)] for name, k, n in (("a", 7, 3), ("b", 5, 11), ("c", 11, 4))}
LAYER = "model.layers.0."
PIECES = {
    "pieces": [[f"{LAYER}self_attn.qkv_proj"], [f"{LAYER}self_attn.o_proj", f"{LAYER}mlp.down_proj"]],
    "between": [f"{LAYER}self_attn.attn"],
}  # fmt: skip


def graphed(dump: Any) -> Any:
    """As of an engine that captured sizes 1, 2, 4 and 8: a prompt of eleven tokens fits into none."""
    dump.run["engine"] = {"graphs": PIECES}
    for key, step in dump.steps.items():
        tokens = dump.rows[(*key, TOKENS)].n
        size = next((s for s in (1, 2, 4, 8) if s >= tokens), None)
        graph = None if size is None else StepGraph("PIECEWISE", size)
        dump.steps[key] = replace(step, batch={"requests": 1, "tokens": tokens}, graph=graph)
    return dump


@pytest.fixture(scope="module")
def golden() -> Any:
    return capture(prompts=PROMPTS, together=False, tokens=16)


def test_the_sentence_is_in_every_report_and_in_a_saved_comparison(golden: Any, tmp_path: Path) -> None:
    """Requests one at a time: a prompt of 3 is a step with a row of padding, all decode steps are of size 1."""
    fault = scaled(1.2, lambda at, decode: decode)
    tap = "model.layers.0.mlp.down_proj"
    mine = graphed(capture(prompts=PROMPTS, together=False, tokens=16, faults={tap: fault}))
    result = compare(golden, mine)
    graph = result.origins[0]["graph"]
    assert (graph["condition"], graph["sizes"], graph["piece"]) == ("size", [1], 1)
    said = "only in steps replayed at size 1 (piece 1: model.layers.0.self_attn.o_proj … model.layers.0.mlp.down_proj)"
    assert graph["sentence"] == said
    assert f"graphs: {said}" in terminal.lines(result)
    assert said in html.page(result)
    assert any(said in line for line in markdown.markdown_lines(result))
    assert said in result._repr_html_()
    store.save(result.measured, tmp_path)
    assert rejudge(store.load(tmp_path)).origins == result.origins


def test_an_engine_without_graphs_has_no_such_entry(golden: Any) -> None:
    mine = capture(prompts=PROMPTS, together=False, tokens=16, faults={"model.layers.0.mlp.down_proj": scaled(1.2)})
    assert "graph" not in compare(golden, mine).origins[0]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (lambda rows: np.full_like(rows[:1], np.nan), NONFINITE),
        (lambda rows: np.full_like(rows[:1], 2.0**20), "values up to 1.05e+06, where real rows have up to"),
        (lambda rows: rows[1:2], LEFT),
        (lambda rows: rows[1:2] + 1, ""),
    ],
    ids=["nan", "huge", "left", "anything"],
)
def test_what_stood_in_padding(golden: Any, values: Any, said: str) -> None:
    """Beside a fault of all padded steps (prompts of three tokens). Rows of padding are paired with nothing."""
    many = {f"r{k}": [(k * i + 3) % 60 for i in range(3 + k % 2)] for k in range(12)}
    tap = "model.layers.0.mlp.down_proj"
    fault = scaled(1.2, lambda at, decode: np.full(len(at), len(at) == 3))
    mine = graphed(capture(prompts=many, together=False, tokens=2, faults={tap: fault}))
    real = {r.step: r for r in mine.records if (r.tap, r.role) == (tap, "output.0")}
    first = widen(mine.read(real[0]), real[0].dtype, as_float=True)
    for (_, number), step in list(mine.steps.items()):
        if step.graph is not None and step.graph.size > step.batch["tokens"] and number > 0:
            mine.add(0, number, tap, "output.0", values(first), real[0].dtype, real[number].seq, PADDING)
            mine.padding.append(mine.records.pop())
    result = compare(capture(prompts=many, together=False, tokens=2), mine)
    graph = result.origins[0]["graph"]
    assert graph["sentence"].startswith("only in steps with padding (1 of 4 rows are padding) (piece 1: ")
    assert graph["in_padding"].startswith(f"rows of padding hold {said}" if said else "")
    assert bool(graph["in_padding"]) == bool(said)
    assert graph["sentence"].endswith(graph["in_padding"])
    assert result.coverage["skipped"]["mine: tensors of a captured graph's rows of padding, which are nobody's"] == 5


def test_the_nearest_tap_in_front_is_told() -> None:
    assert stood_in_padding({"a": NONFINITE, "b": LEFT, "c": "", "d": LEFT}, "c") == f"rows of padding hold {LEFT} at b"
    assert stood_in_padding({"a": "", "b": LEFT}, "a") == ""
    assert stood_in_padding({}, "a") == ""
