"""Looking rows up in a table, whole or cut over ranks by rows.

Formula: torch.nn.Embedding's definition. A rank of a sharded table gives zeros for tokens that are not its own, and the
ranks' results are added; ranks hold equal runs of the vocabulary, the last one padding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from vllm_accprobe.opcheck.reference import Call, Declined, Expected, device_kernel, reference
from vllm_accprobe.opcheck.references.parts import ranks_of, weight_here

_COPY = torch.zeros((), dtype=torch.float64)
"""Bound of a copy."""
_IDS = ("input_", "input", "input_ids", "position_ids", "0")


def looked_up(ids: Any, table: Any, first: int = 0) -> Any:
    """table[ids - first] in float64, zeros for ids outside; ids int [...], table [n, width]."""
    local = ids.long() - first
    inside = (local >= 0) & (local < table.shape[0])
    table = table if table.element_size() > 1 else table.double()  # torch picks no rows of 8-bit floats
    return table[local.clamp(0, table.shape[0] - 1)].double() * inside.unsqueeze(-1)


@reference("VocabParallelEmbedding", "Embedding", "*WordEmbedding", "*TextScaledWordEmbedding")
def embedding(call: Call) -> Expected:
    ids = call.tensor(*_IDS)
    if "Scaled" in call.cls:
        raise Declined("attribute embed_scale was not recorded")
    if call.extra.get("apart"):
        raise Declined("whether it adds up over ranks was not recorded")
    size = int(call.attr("tp_size", default=1))
    if size == 1:
        table = call.stored("weight")
        if int(ids.max()) >= table.shape[0] or int(ids.min()) < 0:
            raise Declined("an id lies outside its table")
        return Expected(looked_up(ids, table), bound=_COPY)
    total = torch.zeros((), dtype=torch.float64)
    for other in ranks_of(call, size):
        table = other.stored("weight")
        total = total + looked_up(ids, table, int(other.attr("tp_rank", default=0)) * table.shape[0])
    return Expected(total, bound=_COPY)  # every rank but one adds zeros


# --- on a device --------------------------------------------------------------------------------------------------


@device_kernel("VocabParallelEmbedding", "Embedding", "*WordEmbedding")
def embedding_kernel(call: Call) -> Any:
    if int(call.attr("tp_size", default=1)) > 1:
        raise Declined("adds up or gathers over ranks")
    return F.embedding(call.tensor(*_IDS).long(), weight_here(call))
