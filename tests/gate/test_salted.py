"""What meets the cache, and what does not."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from fake_paths import FakePaths

from vllm_accprobe.gate import self_check
from vllm_accprobe.gate.self_check import REQUESTS, SaltedSender
from vllm_accprobe.gate.sending.client import Reply
from vllm_accprobe.gate.sending.prompts import GRAMMAR, PromptLine

PATHS = {w.name: w for w in REQUESTS}


def test_only_what_is_to_hit_hits() -> None:
    how = {"min_tokens": 4, "temperature": 0}
    fake, line = FakePaths(), PromptLine("p", token_ids=tuple(range(300)), max_tokens=4, parameters=how)
    with fake.serve() as (url, seen):
        cached: dict[str, Any] = {}
        replies: dict[str, Any] = {}
        for name, path in PATHS.items():
            forced = "scored" if path.scored else "accprobe" if path.before else None
            asked = replace(line, along=tuple(replies["alone"].token_ids or ())) if forced else line
            sender = SaltedSender(url, model="tiny", top=5, own=path, salt="s", way=forced)
            reply = replies[name] = sender.ask(asked, "p", {}, time.monotonic())
            cached[name] = reply.cached
            assert reply.refused is None
    assert cached == {"alone": 0, "again": 0, "batch": 0, "hit": 288, "pieces": 256, "scoring": None}
    assert [c for _, _, c in fake.salts] == [0, 0, 0, 0, 288, 0, 128, 256, 0]
    assert len({salt for salt, *_ in fake.salts}) == len(PATHS)
    assert len({request for _, request in seen}) == len(seen)
    scored, alone = replies["scoring"], replies["alone"]
    assert scored.token_ids == alone.token_ids
    assert len(scored.logprobs or ()) == len(scored.top or ()) == 4
    assert scored.prompt_token_ids == alone.prompt_token_ids


def test_what_a_grammar_forbids_is_not_scored() -> None:
    """Only a server that decodes applies it: the two paths have other numbers anyway."""
    base = {"p": Reply("p", 0.0, 0.0, [1] * 300, [7, 8])}
    for name in ("top_p", *GRAMMAR):
        lines = [PromptLine("p", token_ids=(1,) * 300, parameters={name: {}})]
        sent = {path: len(self_check._lines(lines, base, PATHS[path], "accprobe")) for path in ("hit", "scoring")}
        assert sent == {"hit": 1, "scoring": int(name not in GRAMMAR)}
