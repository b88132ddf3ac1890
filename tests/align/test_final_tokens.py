"""Which rows came to be."""

import numpy as np

from vllm_accprobe.align.tokens import make_key, valid_rows


def test_a_draft_behind_a_rejected_draft_is_not_real_even_if_its_token_came_true():
    keys = np.array([make_key(0, p) for p in (3, 4, 5)])
    accepted = {0: (np.array([3, 4, 5]), np.array([20, 21, 22]))}
    assert valid_rows(keys, np.array([20, 99, 22]), np.zeros(3, int), accepted).tolist() == [True, False, False]
    # a second run that begins at row 2 is another request's or a gap: what stands before it does not matter
    assert valid_rows(keys, np.array([20, 99, 22]), np.array([0, 0, 2]), accepted).tolist() == [True, False, True]
