"""A wrong fusion: a pass over the graph that inductor has made, as a compiler's own pattern would replace it.

The problem: what a compiler gets wrong is in no module and in no kernel: two operators that were right become one that
is not. The idea: vLLM lets an engine's arguments name a pass that inductor runs at the end
(``compilation_config.inductor_passes``), ``passes`` gives those arguments; the pass finds one norm of the model and
lets the residual go into it twice, as a fused add and norm does whose pattern matched one addition too many. The stream
behind it stays right. Not here: faults of captured graphs (captured_faults.py).
"""

from typing import Any

import torch

NORM = 3
"""Counted along the model: 3 is the one in front of the second layer's MLP, where each layer has two."""


def passes() -> dict[str, Any]:
    """Arguments of vllm.LLM. Needs this directory on PYTHONPATH."""
    name = f"{__name__}.residual_twice"
    return {"compilation_config": {"inductor_passes": {"post_grad_custom_post_pass": name}}}


def residual_twice(graph: torch.fx.Graph) -> None:
    """Raises ValueError where the graph has no such norm behind an addition."""
    aten = torch.ops.aten
    norms = [node for node in graph.nodes if node.target is aten.rsqrt.default]
    if len(norms) <= NORM:
        raise ValueError(f"the graph has {len(norms)} norms, and none with number {NORM}")
    scaled = next(user for user in norms[NORM].users if user.target is aten.mul.Tensor)
    stream = next(node for node in scaled.all_input_nodes if node is not norms[NORM])
    if stream.target is not aten.add.Tensor:
        raise ValueError(f"in front of norm {NORM} stands {stream.target}, no addition")
    with graph.inserting_after(stream):
        more = graph.call_function(aten.add.Tensor, (stream, stream.args[1]))
        more.meta.update(stream.meta)
    scaled.replace_input_with(stream, more)
