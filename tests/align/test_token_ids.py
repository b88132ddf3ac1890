"""Token ids by request and position, from row maps written by hand."""

from test_tokens import Maps, maps, request

from vllm_accprobe.align.tokens import token_ids
from vllm_accprobe.dump.schema import RowSpace, Segment


def of(dump):
    return {label: (at.tolist(), ids.tolist()) for label, (at, ids) in token_ids(dump).items()}


def test_in_the_order_of_positions_and_the_last_word_counts():
    dump = maps(
        {"tokens": [(0, 7), (1, 8), (2, 9)], "logits": [(2, 9)]},
        {"tokens": [(3, 20), (4, 21), (5, 22)]},
        {"tokens": [(5, 30)]},
        {"tokens": [(1, 8), (0, 7)]},  # computed once more
    )
    assert of(dump) == {"a": ([0, 1, 2, 3, 4, 5], [7, 8, 9, 20, 21, 30])}


def test_ranks_that_computed_the_same_are_one_request():
    dump = maps({"tokens": [(0, 7)]}, ranks=(0, 1))
    dump.rows[(1, 0, "tokens")] = dump.rows[(0, 0, "tokens")]
    assert of(dump) == {"a": ([0], [7])}


def test_of_two_requests_with_one_name_neither_and_nothing_without_ids():
    segments = (Segment(0, 0, 2, 0), Segment(1, 0, 1, 2), Segment(2, 5, 1, 3))
    requests = {(0, 0): request("a"), (0, 1): request("a", prompt="q", req=1), (0, 2): request("b", req=2)}
    dump = Maps((0,), requests)
    dump.rows[(0, 0, "tokens")] = RowSpace(0, "tokens", 4, segments, (1, 2, 3, 4))
    dump.rows[(0, 1, "tokens")] = RowSpace(1, "tokens", 9, (Segment(2, 6, 9, 0),), (1, 2))  # fewer than its rows
    dump.rows[(0, 2, "vision/1")] = RowSpace(2, "vision/1", 1, (Segment(2, 0, 1, 0, image=0),), (1,))
    dump.rows[(0, 3, "tokens")] = RowSpace(3, "tokens", 1, (Segment(9, 0, 1, 0),), (1,))  # of nobody
    assert of(dump) == {"b": ([5], [4])}
    assert of(Maps((0,), requests)) == {}
