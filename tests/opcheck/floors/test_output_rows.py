"""An output and what is expected of it, cut into rows."""

import torch

from vllm_accprobe.opcheck.floors.output_rows import OutputRows, matrix, numbers
from vllm_accprobe.opcheck.reference import Expected


def test_numbers_are_exact():
    assert numbers(torch.tensor([1.5], dtype=torch.bfloat16)).dtype == torch.float64
    assert numbers(torch.tensor([True])).tolist() == [1]
    assert numbers(torch.tensor([1 + 2j])).tolist() == [[1.0, 2.0]]


def test_matrices_have_a_row_for_each_place_along_the_row_dimension():
    x = torch.arange(6).reshape(1, 2, 3)
    assert matrix(x, 1).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert matrix(x, 7).shape == (1, 6)
    assert matrix(torch.tensor(2.0), 0).tolist() == [[2.0]]
    assert matrix(torch.zeros(0, 4), 0).shape == (0, 1)


def test_rows_without_a_reference_are_left_out():
    value = torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, 4.0]], dtype=torch.float64)
    mine = torch.tensor([[1.0, 2.0], [9.0, 9.0], [3.0, 4.0]]).bfloat16()
    expected = Expected(value, noise=torch.tensor(0.5), rows=torch.tensor([True, False, True]))
    found = OutputRows.of(expected, mine, 0)
    assert (found.at.tolist(), found.mine.tolist()) == ([0, 2], [[1.0, 2.0], [3.0, 4.0]])
    assert (found.noise.tolist(), found.bound, found.exact) == ([[0.5, 0.5]] * 2, None, None)
    assert found.judge("bfloat16").passed
    assert not OutputRows.of(Expected(value), mine, 0).judge("bfloat16").passed
