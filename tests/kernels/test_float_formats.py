"""The table of floating-point formats is torch's own."""

import pytest
import torch

from vllm_accprobe.kernels.float_formats import FORMATS, LOW, half_step, smallest


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_is_torchs(name):
    kind = getattr(torch, name)
    assert 2.0 ** FORMATS[name][1] == torch.finfo(kind).smallest_normal
    step, least = 2 * half_step(name), smallest(name)
    given = torch.tensor([1 + step, 1 + step / 2, least, least / 4], dtype=torch.float64)
    assert given.to(kind).double().tolist() == [1 + step, 1.0, least, 0.0]


def test_what_is_no_float_has_no_step():
    assert (half_step("int8"), smallest("bool")) == (0.0, 0.0)
    assert sorted(set(FORMATS) - set(LOW)) == ["float32", "float64"]
