"""What names a prompt that came as embeddings."""

from __future__ import annotations

from types import SimpleNamespace as Plain

import torch

from vllm_accprobe.capture.vllm.modes import embeddings_of, hash_embeddings

ROWS = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))


def test_engines_of_two_dtypes_have_one_name_for_what_a_client_sent() -> None:
    assert hash_embeddings(ROWS) == hash_embeddings(ROWS.to(torch.bfloat16))
    other = ROWS.clone()
    other[3, 2] += 1
    assert len({hash_embeddings(one) for one in (ROWS, other, ROWS[:4], ROWS.reshape(4, 10))}) == 4


def test_the_tokens_among_them_count_and_what_stands_in_for_the_others_does_not() -> None:
    mask = [True, False, False, False, True]
    name = hash_embeddings(ROWS, [7, 0, 0, 0, 9], mask)
    assert name == hash_embeddings(ROWS, [7, 3, 3, 3, 9], mask)
    assert name != hash_embeddings(ROWS, [8, 0, 0, 0, 9], mask)


def test_prompts_of_tokens_have_none() -> None:
    assert embeddings_of(Plain(prompt_token_ids=[1])) is None
    assert embeddings_of(Plain(prompt_embeds=ROWS)) is ROWS
