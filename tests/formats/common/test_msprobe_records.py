"""Records of msprobe: their places, and their tensors in the order of execution."""

from __future__ import annotations

import math

from vllm_accprobe.dump.schema import Stats
from vllm_accprobe.formats.msprobe import RecordPlace, place_of, record_stats


def test_places() -> None:
    parents = {"Torch.add.3.forward": "Module.mlp.fc.Linear.forward.0", "Torch.mul.0.forward": None}
    assert place_of("Module.mlp.fc.Linear.forward.1", {}) == RecordPlace("mlp.fc", "Linear", 1, "mlp.fc", True)
    assert place_of("Module.Net.forward.0", {}) == RecordPlace("<root>", "Net", 0, "<root>", True)
    assert place_of("Cell.a.Dense.backward.0", {}) == RecordPlace("backward.a", "Dense", 0, "backward.a", True)
    assert place_of("Module.a.Linear.parameters_grad", {}).grads
    # Within its module an API is numbered anew; outside of any the number in its name is all there is.
    inside = RecordPlace("mlp.fc.Torch:add", "Torch.add", None, "mlp.fc", False)
    assert place_of("Torch.add.3.forward", parents) == inside
    assert place_of("Torch.mul.0.forward", parents) == RecordPlace("Torch:mul", "Torch.mul", 0, "", False)
    of_gradient = RecordPlace("backward.mlp.fc.Torch:add", "Torch.add", None, "backward.mlp.fc", False)
    assert place_of("Torch.add.3.backward", parents) == of_gradient
    assert place_of("x.debug", {}) == RecordPlace("x", "", None, "", False)


def test_statistics() -> None:
    assert record_stats({}, 2) is None
    assert record_stats({"Max": 2, "Min": -1, "Mean": 0.5, "Norm": 3.0}, 2) == Stats(2, -1.0, 2.0, 0.5, 3.0, 0, 0)
    odd = record_stats({"Max": math.inf, "Min": math.nan, "Mean": math.nan, "Norm": "?"}, 2)
    assert odd == Stats(2, None, None, None, None, 1, 1)
