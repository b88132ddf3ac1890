"""Requests and names of rows: supersession, flips and ranks, on row maps written by hand."""

from dataclasses import dataclass, field
from types import SimpleNamespace as Plain

import numpy as np

from vllm_accprobe.align.tokens import (
    AFTER_FLIP,
    REJECTED,
    SUPERSEDED,
    RowSet,
    SampledHistory,
    Unions,
    align_rows,
    distinct,
    find_cells,
    make_key,
    pair_requests,
    token_ids,
    valid_rows,
)
from vllm_accprobe.dump.schema import OWN_REQUEST, Image, Request, RowSpace, SamplingParameters, Segment


@dataclass
class Maps:
    ranks: tuple = (0,)
    requests: dict = field(default_factory=dict)
    rows: dict = field(default_factory=dict)


def request(name, prompt="p", length=3, ordinal=0, images=(), req=0, adapter=None):
    return Request(req, name, name, prompt, length, ordinal, images, adapter)


def maps(*steps, requests=None, rank=0, ranks=(0,)):
    """steps: {space: [(position, id) ...]} of request 0."""
    dump = Maps(ranks, {(r, 0): request("a") for r in ranks} if requests is None else requests)
    for step, spaces in enumerate(steps):
        for name, rows in spaces.items():
            segments = tuple(Segment(0, p, 1, i, "prefill" if p < 3 else "decode") for i, (p, _) in enumerate(rows))
            dump.rows[(rank, step, name)] = RowSpace(step, name, len(rows), segments, tuple(t for _, t in rows))
    return dump


def align(golden, mine, sampled=({}, {})):
    plan = pair_requests(distinct(golden.requests), distinct(mine.requests))

    def of(side):
        return lambda rank, step: None if step not in side else np.array(side[step])

    return align_rows(golden, mine, plan, (of(sampled[0]), of(sampled[1])))


PROMPT = [(0, 7), (1, 8), (2, 9)]


def test_what_the_sampler_gave_decides_which_rows_are_real():
    # step 1 verifies drafts 21 and 22 behind 20; the sampler gave 20, then 21 and 30: 22 was rejected
    dump = maps(
        {"tokens": PROMPT, "logits": PROMPT[2:]},
        {"tokens": [(3, 20), (4, 21), (5, 22)], "logits": [(3, 20), (4, 21), (5, 22)]},
        {"tokens": [(5, 30)], "logits": [(5, 30)]},
    )
    plan = align(dump, dump, ({0: [20], 1: [21, 30, -1], 2: [31]},) * 2)
    assert plan.mine.rows[(0, 1, "tokens")].keep.tolist() == [True, True, False]
    assert plan.mine.rows[(0, 2, "tokens")].keep.tolist() == [True]
    assert plan.skipped == {SUPERSEDED: 2, AFTER_FLIP: 0}  # one row on either side
    assert (plan.tokens_compared, plan.flips) == (4, [])


def test_rejected_drafts_are_told_from_recomputed_rows():
    dump = maps({"tokens": PROMPT}, {"tokens": PROMPT}, {"logits": [(2, 9)]})
    segment = Segment(0, 3, 3, 0, "decode", drafts=2)
    dump.rows[(0, 3, "tokens")] = RowSpace(3, "tokens", 3, (segment,), (20, 21, 22))
    dump.rows[(0, 3, "logits")] = RowSpace(3, "logits", 3, (segment,), (20, 21, 22))
    dump.rows[(0, 4, "tokens")] = RowSpace(4, "tokens", 1, (Segment(0, 5, 1, 0, "decode"),), (30,))
    plan = align(dump, dump, ({2: [20], 3: [21, 30, -1]},) * 2)
    assert plan.mine.rows[(0, 3, "tokens")].keep.tolist() == [True, True, False]
    assert plan.skipped == {SUPERSEDED: 6, REJECTED: 2, AFTER_FLIP: 0}


def test_without_a_sampler_the_last_row_counts():
    dump = maps({"tokens": PROMPT}, {"tokens": [(3, 20), (4, 99)]}, {"tokens": [(4, 21)]})
    plan = align(dump, dump)
    assert plan.mine.rows[(0, 1, "tokens")].keep.tolist() == [True, False]


def test_a_flip_is_the_first_token_that_differs():
    golden = maps({"tokens": PROMPT}, {"tokens": [(3, 20)]}, {"tokens": [(4, 21)]}, {"tokens": [(5, 22)]})
    mine = maps({"tokens": PROMPT}, {"tokens": [(3, 20)]}, {"tokens": [(4, 50)]}, {"tokens": [(5, 22)]})
    plan = align(golden, mine)
    (flip,) = plan.flips
    assert (flip.ordinal, flip.position, flip.golden, flip.mine, flip.key) == (2, 4, 21, 50, make_key(0, 3))
    assert (plan.tokens_compared, plan.skipped[AFTER_FLIP]) == (2, 4)
    assert plan.mine.rows[(0, 1, "tokens")].keep.tolist() == [True]
    assert not plan.mine.rows[(0, 3, "tokens")].keep.any()
    assert plan.lines() == [
        "tokens: 2 sampled tokens compared, 1 requests flip",
        "rows: 4 rows after a flipped token left out",
    ]


def test_ranks_with_the_same_rows_are_one_cell_others_are_not():
    both = maps({"tokens": PROMPT}, ranks=(0, 1, 2))
    both.rows[(1, 0, "tokens")] = both.rows[(0, 0, "tokens")]
    both.rows[(2, 0, "tokens")] = RowSpace(0, "tokens", 1, (Segment(0, 0, 1, 0),), (5,))
    assert find_cells(both)[0] == {0: 0, 1: 0, 2: 1}


def test_rows_of_requests_that_nobody_told_of_have_no_tokens():
    dump = maps({"tokens": PROMPT, "logits": PROMPT[2:]}, requests={})
    plan = align(dump, dump)
    assert (plan.tokens_compared, plan.flips) == (0, [])


# --- sets of rows: sorted once, and one set wherever the same rows are meant ---


def rows(*keys):
    return RowSet(np.array(keys, np.int64))


def test_unions_of_sets_of_rows():
    unions, sets = Unions(), [rows(5, 3), rows(3, 9)]
    found = unions.of(sets)
    assert found.seen.keys.tolist() == [3, 5, 9]
    assert found.seen.keys[found.place].tolist() == [5, 3, 3, 9]
    assert (found.distinct, unions.of(sets[:1]).distinct, unions.of([]).seen.keys.tolist()) == (False, True, [])
    assert unions.of([rows(9, 5, 3)]).seen is found.seen
    kept = [rows(i) for i in range(200)]  # more than are remembered
    assert [unions.of([k]).seen.keys.tolist() for k in kept] == [[i] for i in range(200)]


# --- what a row's request had said when it was sampled, from row maps written by hand ---


def space(step, name, *segments, ids=()):
    parts = tuple(Segment(req, pos, n, 0, drafts=drafts) for req, pos, n, drafts in segments)
    return (0, step, name), RowSpace(step, name, 9, parts, ids)


def dump(*spaces, sampling=None, records=(), read=None):
    requests = {(0, 0): Request(0, "a", "a", "h", 3, sampling=sampling), (0, 1): Request(1, "b", "b", "h", 2)}
    return Plain(rows=dict(spaces), requests=requests, records=list(records), read=read)


BATCHES = (
    space(0, "tokens", (0, 0, 3, None), (1, 0, 2, None), ids=(7, 8, 7, 1, 2)),
    space(0, "logits", (0, 2, 1, None), (1, 1, 1, None)),
    space(1, "tokens", (1, 2, 1, None), (0, 3, 1, None), ids=(3, 9)),
    space(1, "logits", (1, 2, 1, None), (0, 3, 1, None)),
    space(2, "tokens", (0, 4, 1, None), ids=(9,)),
    space(2, "logits", (0, 4, 1, None)),
)


def test_a_row_has_the_past_of_its_own_request():
    history = SampledHistory(dump(*BATCHES), 0)
    a, b = history.of(0, 2)
    assert (a.request.id, a.position, a.generated, a.prompt.tolist(), a.output.tolist()) == ("a", 2, 0, [7, 8], [])
    assert (b.request.id, b.prompt.tolist(), b.output.tolist()) == ("b", [1, 2], [])
    b, a = history.of(1, 2)
    assert (b.generated, b.output.tolist(), a.output.tolist()) == (1, [3], [9])
    assert history.row(2, 0).output.tolist() == [9, 9]
    assert history.of(1, 3) == []
    assert history.row(1, 2) is None


def test_tokens_that_are_not_in_the_dump_are_not_made_up():
    hit = space(0, "tokens", (0, 2, 1, None), ids=(7,)), *BATCHES[1:]
    behind = SampledHistory(dump(*hit), 0).row(0, 0)
    assert (behind.prompt, behind.output.tolist()) == (None, [])
    known = SampledHistory(dump(*hit, sampling=SamplingParameters(repetition=2.0, prompt=(7, 8))), 0).row(0, 0)
    assert known.prompt.tolist() == [7, 8]
    two = space(3, "tokens", (0, 3, 1, None), ids=(5,))  # a recomputed position with another token
    assert SampledHistory(dump(*BATCHES, two), 0).row(2, 0).output is None
    assert SampledHistory(dump(*BATCHES[:2], *BATCHES[4:]), 0).row(2, 0).output is None


def test_where_only_logits_were_captured_the_samplers_tokens_tell():
    records = [Plain(tap="sampler", role="output.token", rank=0, step=s, payload=1, shape=(n,)) for s, n in
               ((0, 2), (1, 2), (2, 1))]  # fmt: skip
    tokens = {0: [9, 3], 1: [4, 9], 2: [1]}
    only = dump(*(b for b in BATCHES if b[0][2] == "logits"), records=records, read=lambda r: np.array(tokens[r.step]))
    history = SampledHistory(only, 0)
    assert history.row(2, 0).output.tolist() == [9, 9]
    assert history.row(2, 0).prompt is None


def test_a_request_with_guesses_says_so():
    spaces = space(0, "logits", (0, 2, 2, 1), (1, 1, 1, None))
    assert [r.drafts for r in SampledHistory(dump(spaces), 0).of(0, 3)] == [True, True, False]


# --- token ids by request and position, from row maps written by hand ---


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


# --- which rows came to be ---


def test_a_draft_behind_a_rejected_draft_is_not_real_even_if_its_token_came_true():
    keys = np.array([make_key(0, p) for p in (3, 4, 5)])
    accepted = {0: (np.array([3, 4, 5]), np.array([20, 21, 22]))}
    assert valid_rows(keys, np.array([20, 99, 22]), np.zeros(3, int), accepted).tolist() == [True, False, False]
    # a second run that begins at row 2 is another request's or a gap: what stands before it does not matter
    assert valid_rows(keys, np.array([20, 99, 22]), np.array([0, 0, 2]), accepted).tolist() == [True, False, True]


def test_requests_pair_by_the_strictest_rule_that_fits():
    cat, dog = (Image("cat", 0, 1),), (Image("dog", 0, 1),)
    golden = [request("1", images=cat), request("2", images=dog, ordinal=1), request("3", "q"), request("4", "only")]
    mine = [request("9", images=dog), request("8", images=cat, ordinal=1), request("3", "q"), request("4", "else")]
    plan = pair_requests(golden, mine)
    assert [(g.id, m.id, rule) for g, m, rule in plan.pairs] == [
        ("1", "9", "prompt and ordinal"), ("2", "8", "prompt and ordinal"), ("3", "3", "id and prompt"),
    ]  # fmt: skip
    assert [(g.id, m.prompt) for g, m in plan.different] == [("4", "else")]
    assert len(plan.images_differ) == 2
    exact = pair_requests(golden[:1], [request("7", images=cat), request("6", images=dog)])
    assert [m.id for _, m, _ in exact.pairs] == ["7"]
    assert exact.pairs[0][2] == "prompt, images and ordinal"


def test_one_prompt_to_two_adapters_is_two_requests():
    golden = [request("1", adapter=""), request("2", adapter="sql"), request("3", adapter="chat")]
    mine = [request("7", adapter="chat"), request("8", adapter="sql"), request("9", adapter="other")]
    plan = pair_requests(golden, mine)
    assert [(g.id, m.id) for g, m, _ in plan.pairs] == [("2", "8"), ("3", "7")]
    assert [r.id for r in (*plan.only_golden, *plan.only_mine)] == ["1", "9"]


def test_one_id_with_two_adapters_is_said():
    plan = pair_requests([request("a", adapter="")], [request("a", adapter="sql")])
    assert not plan.pairs
    assert "requests: 'a' has different adapters (golden none, mine 'sql'), not compared" in plan.lines()


def test_a_capture_that_knows_no_adapters_pairs_first_with_what_has_none():
    golden = [request("1"), request("2", ordinal=1)]
    mine = [request("8", adapter="sql"), request("9", adapter="")]
    for one, two, want in ((golden[:1], mine, [("1", "9")]), (golden, mine, [("1", "9"), ("2", "8")])):
        assert [(g.id, m.id) for g, m, _ in pair_requests(one, two).pairs] == want
    assert [(g.id, m.id) for g, m, _ in pair_requests(mine, golden[:1]).pairs] == [("9", "1")]


def test_the_gates_own_request_is_nobodys():
    plan = pair_requests([request(OWN_REQUEST), request("1")], [request("1"), request(OWN_REQUEST)])
    assert [g.id for g, _, _ in plan.pairs] == ["1"]
    assert not plan.only_golden + plan.only_mine
