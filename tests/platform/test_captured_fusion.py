"""The pass that makes a wrong fusion, on a small graph with norms as inductor hands it on."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from captured_fusion import NORM, passes, residual_twice  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402


def norms(n: int, added: bool = True) -> torch.fx.GraphModule:
    """A stream to which each of ``n`` blocks, a norm times 3, is added; the norm comes behind the addition."""

    def model(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for _ in range(n):
            residual = x + residual if added else residual * 1.0
            x = residual * torch.rsqrt((residual * residual).mean(-1, keepdim=True) + 1e-6) * 3.0
        return x, residual

    return make_fx(model)(torch.ones(2, 4), torch.ones(2, 4))


def test_one_norm_gets_the_residual_twice_and_the_stream_does_not() -> None:
    x, residual = torch.arange(8.0).reshape(2, 4), torch.ones(2, 4)
    right, wrong = norms(NORM + 1), norms(NORM + 1)
    residual_twice(wrong.graph)
    wrong.recompile()
    (clean, stream), (faulty, same) = right(x, residual), wrong(x, residual)
    assert torch.equal(stream, same)
    assert not torch.allclose(clean, faulty, rtol=0.1)


def test_a_graph_without_such_a_norm_is_refused() -> None:
    with pytest.raises(ValueError, match=f"{NORM} norms, and none with number {NORM}"):
        residual_twice(norms(NORM).graph)
    with pytest.raises(ValueError, match="no addition"):
        residual_twice(norms(NORM + 1, added=False).graph)


def test_vllm_finds_the_pass_by_its_name() -> None:
    (name,) = passes()["compilation_config"]["inductor_passes"].values()
    module, _, function = name.rpartition(".")
    assert getattr(__import__(module), function) is residual_twice
