"""Tables, whole and cut over ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from reference_calls import drawer, run, same, value

from vllm_accprobe.opcheck.reference import Call, Declined

draw = drawer(5)


def test_embeddings_whole_and_sharded() -> None:
    table, ids = draw(10, 4), torch.tensor([3, 9, 0])
    same(value("VocabParallelEmbedding", {"input_": ids}, params={"weight": table}), F.embedding(ids, table))
    calls = [Call("t", "VocabParallelEmbedding", params={"weight": table[k * 5 : k * 5 + 5]}, attrs={"tp_rank": k})
             for k in range(2)]  # fmt: skip
    found = value("VocabParallelEmbedding", {"input_": ids}, attrs={"tp_size": 2}, extra={"ranks": calls})
    same(found, F.embedding(ids, table))
    with pytest.raises(Declined, match="outside"):
        run("VocabParallelEmbedding", {"input_": torch.tensor([10])}, params={"weight": table})
