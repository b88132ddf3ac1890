"""What a row's request had said when it was sampled, from row maps written by hand."""

from __future__ import annotations

from types import SimpleNamespace as Plain

import numpy as np

from vllm_accprobe.align.tokens import SampledHistory
from vllm_accprobe.dump.schema import Request, RowSpace, SamplingParameters, Segment


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
