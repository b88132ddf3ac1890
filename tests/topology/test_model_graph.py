"""Names that are given twice, nodes out of order, rings: what viewers get is sound."""

from __future__ import annotations

import random
from itertools import pairwise

from vllm_accprobe.topology.model_graph import GraphNode, ModelGraph, sound


def graph(*nodes: tuple[str, str, str], inputs: str = "", outputs: str = "") -> ModelGraph:
    made = tuple(GraphNode(name, "Op", tuple(takes.split()), tuple(gives.split())) for name, takes, gives in nodes)
    return ModelGraph("g", made, {}, tuple(inputs.split()), tuple(outputs.split()))


def check(g: ModelGraph) -> None:
    known = set(g.inputs)
    for node in g.nodes:
        assert set(node.inputs) <= known
        assert not set(node.outputs) & known
        known |= set(node.outputs)
    assert set(g.outputs) <= known


def test_a_name_that_is_given_twice_is_two_tensors() -> None:
    made = sound(graph(("a", "x", "h"), ("b", "h", "h"), ("c", "h", "y"), inputs="x", outputs="h y"))
    check(made)
    assert [n.outputs for n in made.nodes] == [("h",), ("h~2",), ("y",)]
    assert made.nodes[2].inputs == ("h~2",)
    assert made.outputs == ("h~2", "y")


def test_what_is_taken_and_never_given_is_an_input() -> None:
    made = sound(graph(("a", "x w", "y"), inputs="x", outputs="y"))
    check(made)
    assert made.inputs == ("x", "w")


def test_nodes_are_brought_into_order() -> None:
    chain = [(f"n{i}", f"t{i}", f"t{i + 1}") for i in range(500)]
    random.Random(5).shuffle(chain)
    made = sound(graph(*chain, inputs="t0", outputs="t500"))
    check(made)
    assert all(a.outputs == b.inputs for a, b in pairwise(made.nodes))


def test_a_ring_keeps_its_order() -> None:
    made = sound(graph(("a", "z", "x"), ("b", "x", "z"), outputs="z"))
    check(made)
    assert [n.name for n in made.nodes] == ["a", "b"]
    assert made.inputs == ("z",)
    assert made.outputs == ("z~2",)
