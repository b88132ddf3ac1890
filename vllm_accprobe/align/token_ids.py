"""Which token each request read at each position, as far as a dump says.

The problem: a picture of rows by position says nothing to who knows a prompt as text. The idea: the row maps hold a
token id per row; of each request they are put in the order of positions, and of an id that was replaced (a rejected
draft) the last one holds. Not here: ids as text (report/html/token_text.py), which rows are comparable (tokens.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from vllm_accprobe.align.final_tokens import last_of_each
from vllm_accprobe.align.requests import Identity, identity

TokenIds = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""External id of a request → sorted positions and the ids there, both int64 [n]."""


def token_ids(dump: Any) -> TokenIds:
    """Of every request of ``dump`` (its ``requests`` and ``rows``) whose ids were recorded. Requests that share their
    external id and differ otherwise are left out: which of them is meant is not known."""
    found: dict[str, dict[Identity, list[tuple[np.ndarray, np.ndarray]]]] = defaultdict(lambda: defaultdict(list))
    for (rank, _, name), space in sorted(dump.rows.items(), key=lambda item: (item[0][1], item[0][0], item[0][2])):
        if name.startswith("vision") or len(space.ids) != sum(s.n for s in space.segments):
            continue
        ids, at = np.array(space.ids, np.int64), 0
        for s in space.segments:
            request = dump.requests.get((rank, s.req))
            if request is not None and s.n and s.pos >= 0:
                where = np.arange(s.pos, s.pos + s.n, dtype=np.int64)
                found[request.id][identity(request)].append((where, ids[at : at + s.n]))
            at += s.n
    one = {label: next(iter(by.values())) for label, by in found.items() if len(by) == 1}
    return {
        label: last_of_each(np.concatenate([p for p, _ in runs]), np.concatenate([i for _, i in runs]))
        for label, runs in one.items()
    }
