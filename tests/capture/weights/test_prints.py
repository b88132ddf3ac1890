"""Fingerprints of tensors: the compiled loops agree with the definition, an order is told from a value."""

import torch

from vllm_accprobe.capture.weights.fingerprint import _on_device, sums_of
from vllm_accprobe.capture.weights.history import transposed

WEIGHT = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).bfloat16()


def test_compiled_loops_and_a_devices_sums_agree() -> None:
    bits = torch.randint(-(1 << 15), 1 << 15, (9, 33), dtype=torch.int16, generator=torch.Generator().manual_seed(2))
    bits[2, 3] = 0
    host = sums_of(bits)
    order, bag, zeros = _on_device(bits)
    assert (host.order.tolist(), host.bag.tolist(), host.zeros) == (order.tolist(), bag.tolist(), zeros)


def test_rows_that_change_places_keep_the_sum_without_order() -> None:
    a, b = sums_of(WEIGHT).whole, sums_of(WEIGHT[[0, 4, 2, 3, 1, 5]]).whole
    assert a[1] == b[1]
    assert a[0] != b[0]


def test_a_transpose_is_turned_back() -> None:
    turned = transposed(WEIGHT.t().contiguous(), tuple(WEIGHT.shape))
    assert turned is not None
    assert sums_of(turned).whole == sums_of(WEIGHT).whole
