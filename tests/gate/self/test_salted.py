"""What meets the cache, and what does not."""

from __future__ import annotations

import time

from fake_vllm import FakeVllm

from vllm_accprobe.gate.self.salted import SaltedSender
from vllm_accprobe.gate.self.ways import REQUESTS
from vllm_accprobe.gate.sending.prompts import PromptLine

WAYS = {w.name: w for w in REQUESTS}


def test_only_what_is_to_hit_hits() -> None:
    fake, line = FakeVllm(), PromptLine("p", token_ids=tuple(range(300)), max_tokens=4)
    along: dict[str, tuple[int, ...]] = {}
    with fake.serve() as (url, seen):
        cached, replies = {}, {}
        for name, way in WAYS.items():
            sender = SaltedSender(url, model="tiny", top=5, way=way, salt="s", along=along)
            reply = replies[name] = sender.ask(line, "p", {}, time.monotonic())
            along["p"] = tuple(reply.token_ids or ())
            cached[name] = reply.cached
            assert reply.refused is None
    assert cached == {"alone": 0, "again": 0, "batch": 0, "hit": 288, "pieces": 256, "scoring": None}
    assert [c for _, _, c in fake.salts] == [0, 0, 0, 0, 288, 0, 128, 256, 0]
    assert len({salt for salt, *_ in fake.salts}) == len(WAYS)
    assert len({request for _, request in seen}) == len(seen)
    scored, alone = replies["scoring"], replies["alone"]
    assert scored.token_ids == alone.token_ids
    assert len(scored.logprobs or ()) == len(scored.top or ()) == 4
    assert scored.prompt_token_ids == alone.prompt_token_ids
