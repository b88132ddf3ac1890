"""Whose rows stand before a request whose prompt's beginning was cached."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from opcheck.opcheck_dumps import Maker

from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.schema import RowSpace, Segment, hash_tokens
from vllm_accprobe.formats import open_dump
from vllm_accprobe.opcheck.calls.neighbours import ABSENT, INCOMPLETE, TEXT, UNKNOWN, Past, Prefix, prefixes

START, OTHER = list(range(100, 108)), list(range(200, 208))


def recorded(
    root: Path, lines: Sequence[dict], requests: Sequence[dict], rows: Sequence[tuple[int, int, list[int]]]
) -> Dump:
    """rows: (request, first position, token ids), a step each."""
    m = Maker(root)
    for event in requests:
        m.writer.line({"event": "request", "id": f"r{event['req']}", **event})
    for step, (req, pos, ids) in enumerate(rows):
        segment = {"req": req, "pos": pos, "n": len(ids), "row": 0, "phase": "prefill"}
        m.writer.line({"event": "step", "step": step, "batch": {"requests": 1, "tokens": len(ids)}})
        m.writer.line({"event": "rows", "step": step, "space": "tokens", "src_rows": len(ids), "ids": ids,
                       "segments": [segment]})  # fmt: skip
    for line in lines:
        m.writer.line({"event": "cached", **line})
    return open_dump(m.close())


def asked(req: int, prompt: list[int], **more: object) -> dict:
    return {"req": req, "prompt": hash_tokens(prompt), "prompt_len": len(prompt), **more}


def written(root: Path, requests: Sequence[tuple[list[int], int]], images: Sequence[str] = ()) -> Dump:
    """Requests (prompt, how much of it was cached) one after the other, each with two decode steps (tokens 7, 8)."""
    asks: list[dict] = []
    rows: list[tuple[int, int, list[int]]] = []
    for req, (prompt, cached) in enumerate(requests):
        shown = {"images": [{"hash": images[req], "pos": 0, "n": 1}]} if images else {}
        asks.append(asked(req, prompt, **shown))
        rows += [(req, cached, prompt[cached:]), (req, len(prompt), [7]), (req, len(prompt) + 1, [8])]
    return recorded(root, [], asks, rows)


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
def test_nothing_is_guessed(tmp_path, requests, images):
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


WHOLE = [*START, 1, 2]
RUN = {"low": 0, "n": 8, "owner": 0}


@pytest.mark.parametrize(
    ("line", "first", "second", "why"),
    [
        ({"runs": [RUN]}, {}, {}, ""),
        ({"runs": [RUN]}, {"adapter": "a1"}, {"adapter": "a1"}, ""),
        ({"runs": [RUN]}, {"adapter": "a1"}, {"adapter": "a2"}, "written by request 'r0' with adapter a1"),
        ({"runs": [RUN]}, {}, {"adapter": "a2"}, "written by request 'r0' with no adapter"),
        ({"runs": [RUN]}, {"salt": "x"}, {}, "with another cache salt"),
        ({"runs": [RUN]}, {"images": [{"hash": "x", "pos": 0, "n": 1}]}, {"images": [{"hash": "y", "pos": 0, "n": 1}]},
         "with another image"),
        ({"runs": [{**RUN, "owner": -1}]}, {}, {}, UNKNOWN),
        ({"runs": [{**RUN, "owner": 7}]}, {}, {}, ABSENT),
        ({"runs": [RUN], "why": "of 'r9'"}, {}, {}, "its history is not its own: of 'r9'"),
    ],
)  # fmt: skip
def test_what_the_capture_says_of_owners_decides(tmp_path, line, first, second, why):
    other = [*START, 1, 9]
    requests = [asked(0, WHOLE, **first), asked(1, other, **second)]
    dump = recorded(tmp_path, [{"step": 1, "req": 1, **line}], requests, [(0, 0, WHOLE), (1, 8, [1, 9])])
    found = prefixes(dump, 0)[1]
    assert (found.n, found.since) == (8, 1)
    assert why in found.why
    assert bool(found.why) is bool(why)
    assert found.runs == (() if why else ((0, 8, 0),))


def test_owners_of_other_tokens_are_found_by_the_prompts_hash(tmp_path: Path) -> None:
    other = [*OTHER, 1, 9]
    dump = recorded(
        tmp_path, [{"step": 1, "req": 1, "runs": [RUN]}], [asked(0, WHOLE), asked(1, other)],
        [(0, 0, WHOLE), (1, 8, [1, 9])],
    )  # fmt: skip
    assert prefixes(dump, 0)[1].why == TEXT


def test_without_owners_a_donor_has_the_same_adapter(tmp_path: Path) -> None:
    requests = [asked(0, WHOLE, adapter="a1"), asked(1, [*START, 1, 9], adapter="a2")]
    requests.append(asked(2, [*START, 3], adapter="a1"))
    dump = recorded(tmp_path, [], requests, [(0, 0, WHOLE), (1, 8, [1, 9]), (2, 8, [3])])
    assert prefixes(dump, 0) == {2: Prefix(8, (0,))}


def test_rows_behind_a_foreign_history_are_not_checked_and_runs_are_put_together() -> None:
    x = torch.arange(12.0).reshape(12, 1)
    past = Past(("key",), {2: Prefix(4, runs=((0, 2, 0), (2, 4, 1))), 3: Prefix(2, why="not its own", since=0)})
    past.write(rows((0, 0, 4), (1, 0, 4)), {"key": x[:8]})
    past.write(rows((2, 4, 1), (3, 2, 1)), {"key": x[8:10]})
    view = past.view(rows((2, 4, 1), (3, 2, 1)))
    assert [held["key"].flatten().tolist() for _, _, held in view.requests()] == [[0, 1, 6, 7, 8]]
    assert view.why == "not its own"
