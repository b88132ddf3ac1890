"""What a module was given is checked, too: parameters against the checkpoint, an epsilon against its siblings."""

from pathlib import Path

import pytest
import torch
from opcheck.opcheck_dumps import Maker
from support.opchecked import rows_of

from vllm_accprobe.formats import open_dump
from vllm_accprobe.opcheck.calls.records import Calls
from vllm_accprobe.opcheck.run.check_calls import OTHER_FORM, check_stored
from vllm_accprobe.opcheck.run.result_row import CheckResult
from vllm_accprobe.opcheck.run.table import totals

G = torch.Generator().manual_seed(2)
X = torch.randn(6, 16, generator=G, dtype=torch.float64).bfloat16() * 0.1
WEIGHT = (torch.rand(16, generator=G, dtype=torch.float64) + 0.5).bfloat16()


def norms(root: Path, *eps: float, weight: torch.Tensor = WEIGHT) -> Path:
    """Norms that compute honestly with the epsilon they record; the last one has ``weight``."""
    m = Maker(root)
    for k, e in enumerate(eps):
        m.module(f"layers.{k}.norm", "RMSNorm", variance_epsilon=e)
        m.param(f"layers.{k}.norm", "RMSNorm", weight=weight if k == len(eps) - 1 else WEIGHT)
    m.request(0, 6)
    m.step(0, [(0, 0, 6)])
    for k, e in enumerate(eps):
        w = weight if k == len(eps) - 1 else WEIGHT
        y = X.double() / (X.double().pow(2).mean(-1, keepdim=True) + e).sqrt() * w.double()
        m.call(f"layers.{k}.norm", "RMSNorm", {"x": X}, y.bfloat16())
    return m.close()


def model(root: Path, config: str = '{"rms_norm_eps": 1e-6}', layers: int = 3) -> Path:
    from safetensors.torch import save_file

    root.mkdir()
    (root / "config.json").write_text(config)
    save_file({f"layers.{k}.norm.weight": WEIGHT.clone() for k in range(layers)}, root / "model.safetensors")
    return root


def rows(dump: Path, directory: Path | None) -> list[CheckResult]:
    return [*check_stored(Calls(open_dump(dump), directory)), *rows_of(dump, directory)]


def test_an_epsilon_unlike_its_siblings_and_config_is_a_fault(tmp_path: Path) -> None:
    found = rows(norms(tmp_path / "d", 1e-6, 1e-6, 2e-3), model(tmp_path / "m"))
    assert [r.tap for r in found if r.status == "fail"] == ["layers.2.norm"]
    assert "its epsilon is 0.002, where config.json and its siblings have 1e-06" in found[-1].message


@pytest.mark.parametrize("config", ["{}", '{"rms_norm_eps": 1e-5}', "not json"])
def test_without_config_on_its_side_a_majority_proves_nothing(tmp_path: Path, config: str) -> None:
    found = rows(norms(tmp_path / "d", 1e-6, 1e-6, 2e-3), model(tmp_path / "m", config))
    assert {r.status for r in found} == {"pass"}


def test_a_weight_that_is_not_the_checkpoints(tmp_path: Path) -> None:
    wrong = WEIGHT.clone()
    wrong[5] *= 1.06
    found = rows(norms(tmp_path / "d", 1e-6, 1e-6, 1e-6, weight=wrong), model(tmp_path / "m"))
    (bad,) = [r for r in found if r.status == "fail"]
    assert (bad.tap, bad.role, bad.step, bad.column) == ("layers.2.norm", "param.weight", None, 5)
    assert bad.message == "1 of 16 values are not the checkpoint's"
    assert totals(found).statuses == {"pass": 5, "fail": 1}
    assert totals(found).calls == 3


def test_a_weight_in_another_form_is_skipped(tmp_path: Path) -> None:
    found = rows(norms(tmp_path / "d", 1e-6, 1e-6, 1e-6, weight=-WEIGHT.flip(0)), model(tmp_path / "m"))
    assert [(r.role, r.message) for r in found if r.status == "skip"] == [("param.weight", OTHER_FORM)]


def test_without_a_checkpoint_nothing_is_said_of_weights(tmp_path: Path) -> None:
    found = rows(norms(tmp_path / "d", 1e-6), None)
    assert [r.role for r in found] == ["output.0"]
    (tmp_path / "m").mkdir()
    (tmp_path / "m/model.safetensors").write_bytes(b"no tensors")
    calls = Calls(open_dump(tmp_path / "d"), tmp_path / "m")
    assert list(check_stored(calls)) == []
    assert "cannot be read" in calls.problems[0]
