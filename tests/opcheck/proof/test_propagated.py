"""Created and passed on: told apart for a module that is wrong and had wrong inputs, too."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from opcheck.opcheck_dumps import Maker

from vllm_accprobe.cli import main
from vllm_accprobe.opcheck.proof.make_proof import _propagated_rows as _rows
from vllm_accprobe.opcheck.reference import Expected

ROWS, WIDTH = 12, 64


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()


def dump(root: Path, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, spans: list, prompt: int = ROWS) -> Path:
    m = Maker(root)
    m.module("<root>", "Tiny")
    m.module("norm", "RMSNorm", variance_epsilon=1e-6)
    m.request(0, prompt)
    m.param("norm", "RMSNorm", weight=weight)
    for step, (start, n) in enumerate(spans):
        m.step(step, [(0, start, n)], phase="prefill" if start < prompt else "decode")
        m.call("norm", "RMSNorm", {"x": x[start : start + n]}, y[start : start + n])
    return m.close()


def test_the_two_errors_of_a_wrong_module_with_wrong_inputs(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, WIDTH, generator=g).bfloat16()
    weight = torch.rand(WIDTH, generator=g).bfloat16() + 0.5
    off = (x.double() + 0.02 * torch.randn(ROWS, WIDTH, generator=g)).bfloat16()
    honest = norm(x, weight).bfloat16()
    scale = torch.ones(ROWS, 1)
    scale[7] = 1.3
    wrong = (norm(off, weight) * scale).bfloat16()
    golden = dump(tmp_path / "golden", x, honest, weight, [(0, ROWS)])
    mine = dump(tmp_path / "mine", off, wrong, weight, [(0, 5), (5, 7)])  # row 7 is row 2 of its second step
    out = tmp_path / "out"
    assert main(["compare", str(golden), str(mine), "--replay", "--out", str(out), "-q"]) == 1
    origin = json.loads((out / "compare.json").read_text())["origins"][0]
    assert (origin["module"], origin["role"], origin["evidence"]) == ("norm", "output.0", "replay")
    assert origin["position"] == 7
    exact, theirs = norm(off, weight)[7], honest[7].double()
    created = float((wrong[7].double() - exact).norm() / theirs.norm())
    passed = float((exact - theirs).norm() / theirs.norm())
    assert origin["created"] == pytest.approx(created, rel=1e-9)
    assert origin["propagated"] == pytest.approx(passed, rel=1e-9)
    assert created > 0.2
    assert 0.005 < passed < 0.1
    assert np.isfinite(origin["floor"])


def test_the_phase_is_that_of_the_row_that_is_named(tmp_path: Path) -> None:
    """The comparison names the first bad row, of the prompt; the replay the worst, which was decoded."""
    x, weight = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3)).bfloat16(), torch.ones(WIDTH)
    honest, scale = norm(x, weight).bfloat16(), torch.ones(ROWS, 1)
    scale[2], scale[7] = 1.2, 1.3
    wrong = (norm(x, weight) * scale).bfloat16()
    spans = [(0, 6), *((i, 1) for i in range(6, ROWS))]
    golden = dump(tmp_path / "golden", x, honest, weight.bfloat16(), spans, prompt=6)
    mine = dump(tmp_path / "mine", x, wrong, weight.bfloat16(), spans, prompt=6)
    found = {}
    for how in ("--no-replay", "--replay"):
        assert main(["compare", str(golden), str(mine), how, "--out", str(tmp_path / how), "-q"]) == 1
        origin = json.loads((tmp_path / how / "compare.json").read_text())["origins"][0]
        found[how] = (origin["position"], origin["phase"])
    assert found == {"--no-replay": (2, "prefill"), "--replay": (7, "decode")}


def test_what_a_reference_says_of_an_input_is_split_as_well() -> None:
    """A router's weights are an input of the experts, and a reference knows what they should have been."""
    what = SimpleNamespace(outputs={}, inputs={"topk_weights": torch.tensor([[0.5, 0.25], [0.75, 0.25]])})
    expected = Expected(torch.tensor([[0.5, 0.5], [0.75, 0.25]]))
    record, group = SimpleNamespace(shape=(2, 2)), SimpleNamespace(row_dim=0)
    exact, mine = _rows(SimpleNamespace(what=what), "input.topk_weights", record, expected, group)
    assert (exact - mine).tolist() == [[0.0, 0.25], [0.0, 0.0]]
