"""Pictures and patches."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from reference_calls import drawer, run, same, value

from vllm_accprobe.opcheck.reference import Declined

draw = drawer(5)


@pytest.mark.parametrize("dims", [2, 3])
def test_patch_convolutions_by_torch(dims: int) -> None:
    kernel = (2, 3, 4)[-dims:]
    x, w, b = draw(5, 3, *(2 * k for k in kernel)), draw(6, 3, *kernel), draw(6)
    theirs = (F.conv2d if dims == 2 else F.conv3d)(x, w, b, stride=kernel)
    same(value(f"Conv{dims}dLayer", {"x": x}, theirs, params={"weight": w, "bias": b}), theirs)
    with pytest.raises(Declined, match="stride"):
        run(f"Conv{dims}dLayer", {"x": x[:, :, 1:]}, theirs, params={"weight": w})


def test_pixels_by_hand() -> None:
    x = torch.tensor([[0, 255, 10, 20]], dtype=torch.uint8)
    params = {"weight": torch.tensor([2.0, 0.5]), "bias": torch.tensor([1.0, -1.0])}
    assert value("FusedMMInputNorm", {"pixel_values": x}, params=params).tolist() == [[1.0, 511.0, 4.0, 9.0]]
