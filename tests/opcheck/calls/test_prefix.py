"""Whose rows stand before a request whose prompt's beginning was cached."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from opcheck.opcheck_dumps import Maker

from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.schema import RowSpace, Segment, hash_tokens
from vllm_accprobe.formats import open_dump
from vllm_accprobe.opcheck.calls.history import INCOMPLETE, Past
from vllm_accprobe.opcheck.calls.prefix import Prefix, prefixes

START, OTHER = list(range(100, 108)), list(range(200, 208))


def written(root: Path, requests: Sequence[tuple[list[int], int]], images: Sequence[str] = ()) -> Dump:
    """Requests (prompt, how much of it was cached) one after the other, each with two decode steps (tokens 7, 8)."""
    m, step = Maker(root), 0
    for req, (prompt, cached) in enumerate(requests):
        event = {"event": "request", "req": req, "id": f"r{req}", "prompt": hash_tokens(prompt)}
        event["prompt_len"] = len(prompt)
        shown = [{"hash": images[req], "pos": 0, "n": 1}] if images else []
        m.writer.line({**event, "images": shown} if shown else event)
        for pos, ids in ((cached, prompt[cached:]), (len(prompt), [7]), (len(prompt) + 1, [8])):
            m.writer.line({"event": "step", "step": step, "batch": {"requests": 1, "tokens": len(ids)}})
            segment = {"req": req, "pos": pos, "n": len(ids), "row": 0, "phase": "prefill"}
            m.writer.line({"event": "rows", "step": step, "space": "tokens", "src_rows": len(ids), "ids": ids,
                           "segments": [segment]})  # fmt: skip
            step += 1
    return open_dump(m.close())


def test_the_hash_of_the_prompt_proves_whose_beginning_it_is(tmp_path: Path) -> None:
    first, second = [*START, 1, 2], [*OTHER, 3, 4]
    dump = written(tmp_path, [(first, 0), (second, 0), ([*OTHER, 5], 8), ([*START, 1, 9], 9), ([*START, 1, 9, 6], 10)])
    assert prefixes(dump, 0) == {2: Prefix(8, (1,)), 3: Prefix(9, (0,)), 4: Prefix(10, (3,))}
    assert prefixes(dump, 1) == {}


@pytest.mark.parametrize(
    ("requests", "images"),
    [
        ([([*START, 1], 0), ([*START[:-1], 0, 2], 8)], ()),  # its beginning is in no other request
        ([([*START, 1], 0), ([*START, 2], 8)], ("a", "b")),  # the same ids stand for other pictures
        ([([*START, 2], 8), ([*START, 1], 0)], ()),  # whose rows came later cannot have filled the cache
        ([([*START, 1], 0), ([*START, 2], 9)], ()),  # capture began behind its prompt: nothing proves anything
    ],
)
def test_nothing_is_guessed(
    tmp_path: Path, requests: list[tuple[list[int], int]], images: tuple[str, ...]
) -> None:  # fmt: skip
    assert prefixes(written(tmp_path, requests, images), 0) == {}


def rows(*spans: tuple[int, int, int]) -> RowSpace:
    return RowSpace(0, "tokens", 0, tuple(Segment(r, p, n, 0) for r, p, n in spans))


def test_a_cache_takes_over_what_another_request_wrote() -> None:
    past, x = Past(("key",), {1: Prefix(2, (0,)), 2: Prefix(3, (1,))}), torch.arange(12.0).reshape(12, 1)
    past.write(rows((0, 0, 4)), {"key": x[:4]})
    past.write(rows((1, 2, 2)), {"key": x[4:6]})
    past.write(rows((2, 3, 1), (3, 2, 1)), {"key": x[6:8]})
    view = past.view(rows((2, 3, 1), (3, 2, 1), (1, 2, 2)))
    assert [held["key"].flatten().tolist() for _, _, held in view.requests()] == [[0, 1, 4, 6], [0, 1, 4, 5]]
    assert view.why == INCOMPLETE  # request 3 has nobody's beginning


def test_two_that_computed_the_same_beginning_otherwise_leave_it_open() -> None:
    for last, expected in ((3.0, []), (2.0, [[1, 2, 9]])):
        past = Past(("key",), {2: Prefix(2, (0, 1))})
        past.write(rows((0, 0, 2), (1, 0, 2)), {"key": torch.tensor([1.0, 2.0, 1.0, last]).reshape(4, 1)})
        past.write(rows((2, 2, 1)), {"key": torch.tensor([[9.0]])})
        view = past.view(rows((2, 2, 1)))
        assert [held["key"].flatten().tolist() for _, _, held in view.requests()] == expected
        assert bool(view.why) is not bool(expected)
