"""Names of rows: supersession, flips and ranks, on row maps written by hand."""

from dataclasses import dataclass, field

import numpy as np

from vllm_accprobe.align.tokens import (
    AFTER_FLIP,
    REJECTED,
    SUPERSEDED,
    align_rows,
    distinct,
    find_cells,
    make_key,
    pair_requests,
)
from vllm_accprobe.dump.schema import Request, RowSpace, Segment


@dataclass
class Maps:
    ranks: tuple = (0,)
    requests: dict = field(default_factory=dict)
    rows: dict = field(default_factory=dict)


def request(name, prompt="p", length=3, ordinal=0, images=(), req=0):
    return Request(req, name, name, prompt, length, ordinal, images)


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


def test_recomputed_rows_count_once_and_the_last_one():
    dump = maps({"tokens": PROMPT}, {"tokens": PROMPT})
    plan = align(maps({"tokens": PROMPT}), dump)
    assert [plan.mine.rows[(0, s, "tokens")].keep.any() for s in (0, 1)] == [False, True]
    assert plan.skipped[SUPERSEDED] == 3


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
