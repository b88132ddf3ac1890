"""Which token a row gets, and that nothing else of a sampler's result changes."""

from __future__ import annotations

from types import SimpleNamespace as Plain

import pytest
import torch

from vllm_accprobe.capture.core.attribute_override import wrap_method
from vllm_accprobe.capture.core.rows import Scheduled
from vllm_accprobe.capture.teacher_forcing import replaced, tokens_of_rows
from vllm_accprobe.capture.vllm.sampling import NamedTokens


def test_rows_get_the_token_that_follows_what_is_computed() -> None:
    asked = {"a": NamedTokens(10, (50, 51, 52), 52), "c": NamedTokens(4, (60,), 60)}
    chunk, end, decode = Scheduled("a", 0, 6), Scheduled("a", 6, 4), Scheduled("a", 11, 1)
    assert [tokens_of_rows([row], asked) for row in (chunk, end, decode)] == [[-1], [50], [52]]
    again = Scheduled("a", 0, 12)  # preempted: prompt and two tokens are computed anew
    assert tokens_of_rows([Scheduled("b", 9, 1), again, Scheduled("c", 4, 1)], asked) == [-1, 52, -1]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_what_is_not_named_stays(dtype: torch.dtype) -> None:
    sampled, rest = torch.tensor([1, 2, 3], dtype=dtype), object()
    changed, kept = replaced((sampled, rest), [-1, 90, 0])
    assert (changed.tolist(), changed.dtype, kept is rest) == ([1, 90, 0], dtype, True)
    assert sampled.tolist() == [1, 2, 3]
    assert replaced(sampled, [9, -1, -1]).tolist() == [9, 2, 3]  # releases before 0.10.2
    assert replaced((sampled.view(3, 1), None), [9, -1, -1])[0].tolist() == [[9], [2], [3]]


def test_other_rows_than_the_batch_has_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="the sampler has 3 rows, the batch 2"):
        replaced((torch.zeros(3), None), [1, 2])


def test_a_module_and_a_plain_object_are_wrapped_alike() -> None:
    class Sampler(torch.nn.Module):
        def sample(self, logits: int) -> int:
            return logits + 1

    for sampler in (Sampler(), Plain(sample=lambda logits: logits + 1)):
        assert wrap_method(sampler, "sample", lambda original, logits: original(logits) * 10) is not None
        assert sampler.sample(1) == 20
    assert wrap_method(None, "sample", lambda original: None) is None
