"""Positions and token ids that a runner handed to a model: right ones are silent, wrong ones are named with rows and
chunk."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_accprobe.comparison.runner_inputs import (
    cache_origin,
    check,
    check_both,
    is_cache,
    is_explained,
    is_input,
    is_runners,
    layout_positions,
    states_of,
    whose,
    with_cause,
)
from vllm_accprobe.dump.journal import METADATA, STALE, StateFinding
from vllm_accprobe.dump.reader import Dump
from vllm_accprobe.dump.schema import (
    DECODE,
    LOGITS,
    NAMED_TOKENS,
    PREFILL,
    REPLICATED,
    ROOT_TAP,
    TOKENS,
    Image,
    Payload,
    Record,
    Request,
    RowSpace,
    SamplingParameters,
    Segment,
    hash_tokens,
)

PROMPTS = {"a": list(range(100, 150)), "b": list(range(200, 230))}
IMAGES = (Image("i", 4, 12),)


class Fake(Dump):
    """Two requests: a's prompt in chunks of 20, b's at once, then three tokens each."""

    def __init__(self, sections: int = 1, images: bool = False):
        super().__init__(Path("somewhere"), {})
        self.values: dict[int, np.ndarray] = {}
        for req, (name, ids) in enumerate(PROMPTS.items()):
            own = IMAGES if images else ()
            self.requests[0, req] = Request(req, name, name, hash_tokens(ids), len(ids), images=own)
        plan = [[(0, 0, 20)], [(0, 20, 20), (1, 0, 30)], [(0, 40, 10), (1, 30, 1)]]
        plan += [[(0, 50 + k, 1), (1, 31 + k, 1)] for k in range(3)]
        self.tokens: dict[tuple[int, int], int] = {}
        for step, parts in enumerate(plan):
            segments, positions, ids, row = [], [], [], 0
            for req, pos, n in parts:
                known = list(PROMPTS.values())[req]
                phase = PREFILL if pos < len(known) else DECODE
                segments.append(Segment(req, pos, n, row, phase))
                row += n
                for p in range(pos, pos + n):
                    positions.append(self.due(p, sections, images))
                    ids.append(known[p] if p < len(known) else 300 + 10 * req + p)
            self.rows[0, step, TOKENS] = RowSpace(step, TOKENS, row, tuple(segments), tuple(ids))
            got = np.array(positions, np.int64)
            shape = (sections, row) if sections > 1 else (row,)
            values = got.T.copy() if sections > 1 else got[:, 0]
            self.add(step, ROOT_TAP, "input.positions", values, shape, TOKENS, sections > 1)
            last = [(req, pos + n - 1) for req, pos, n in parts if pos + n >= len(list(PROMPTS.values())[req])]
            hidden = np.arange(1000 * step, 1000 * step + row * 4).reshape(row, 4)
            self.add(step, ROOT_TAP, "output.0", hidden, hidden.shape, TOKENS, False)
            if last:
                names = [(r, p) for r, first, n in parts for p in range(first, first + n)]
                own = hidden[[names.index(name) for name in last]]
                self.add(step, "logits_processor", "input.hidden_states", own, own.shape, LOGITS, False)
                self.rows[0, step, LOGITS] = RowSpace(
                    step, LOGITS, len(last), tuple(Segment(r, p, 1, i) for i, (r, p) in enumerate(last))
                )
                drawn = np.array([300 + 10 * r + p + 1 for r, p in last])
                self.add(step, "sampler", "output.token", drawn, drawn.shape, LOGITS, False)

    def add(
        self, step: int, tap: str, role: str, values: np.ndarray, shape: tuple[int, ...], rows: str, turned: bool
    ) -> None:
        seq = len(self.records)
        payload = Payload(0, seq, values.nbytes)
        self.records.append(
            Record(0, step, tap, "", role, 0, seq, "int64", shape, rows, int(turned), None, None, REPLICATED, payload)
        )
        self.values[seq] = values

    def read(self, record: Record, out: Any = None) -> np.ndarray:
        return self.values[record.seq]

    def read_rows(self, record: Record, rows: slice, out: Any = None) -> np.ndarray:
        return self.values[record.seq][rows]

    @staticmethod
    def due(p: int, sections: int, images: bool) -> list[int]:
        if not images or p < 4:
            return [p] * sections
        if p < 16:  # a grid of 3 x 4
            return [4, 4 + (p - 4) // 4, 4 + (p - 4) % 4]
        return [p - 8] * sections

    def positions(self, step: int) -> np.ndarray:
        """[rows, sections], to be changed."""
        record = next(r for r in self.records if r.step == step and r.role == "input.positions")
        values = self.values[record.seq]
        return values.T if values.ndim == 2 else values[:, None]

    def ids(self, step: int, change: dict[int, int]) -> None:
        space = self.rows[0, step, TOKENS]
        ids = [change.get(i, n) for i, n in enumerate(space.ids)]
        self.rows[0, step, TOKENS] = RowSpace(step, TOKENS, space.src_rows, space.segments, tuple(ids))


FORMS = [(1, False), (3, False), (3, True)]


@pytest.mark.parametrize(("sections", "images"), FORMS)
def test_right_inputs_are_silent(sections: int, images: bool) -> None:
    found = check(Fake(sections, images))
    assert not found.faults
    assert not found.unchecked
    assert found.checked["positions"] == 87
    assert found.checked["token ids"] >= 80


@pytest.mark.parametrize(("sections", "images"), FORMS)
def test_a_later_chunk_with_the_positions_of_the_first(sections: int, images: bool) -> None:
    dump = Fake(sections, images)
    dump.positions(1)[:20] = dump.positions(0)[:20]
    (fault,) = check(dump).faults
    assert (fault.request, fault.low, fault.high, fault.rows, fault.step) == ("a", 20, 39, 20, 1)
    assert fault.says.startswith(
        "positions of request 'a' are wrong from row 20 on, the second chunk: they are those of rows 0 to 19"
    )
    assert "do not go on where the chunk before ended" in fault.says


def moved(dump: Fake, step: int, rows: Any, by: int, section: Any = slice(None)) -> None:
    dump.positions(step)[rows, section] += by


TEXT, IMAGE = (1, False), (3, True)
NOT_ITS = "token ids of request {!r} are not its prompt's: "


@pytest.mark.parametrize(("form", "change", "says"), [
    (TEXT, lambda d: [moved(d, step, 1, 1) for step in (3, 4, 5)],
     "positions of request 'b' are wrong from row 31 on, in decoding: they are off by +1 (32, where 31 is due); 2 more "
     "of its rows are wrong in later steps"),
    (TEXT, lambda d: moved(d, 2, slice(10), 5),
     "positions of request 'a' are wrong from row 40 on, the third chunk: they are off by +5 (45, where 40 is due); "
     "they do not go on where the chunk before ended"),
    (IMAGE, lambda d: moved(d, 0, slice(12, 16), 1, 2),
     "positions of request 'a' are wrong in rows 12 to 15, the first chunk: section 2 alone is off ((4, 6, 5), where "
     "(4, 6, 4) is due)"),
    (TEXT, lambda d: d.positions(1)[20:].fill(0),
     "positions of request 'b' are wrong from row 1 on, the prompt's only chunk: all are 0, where 1 and on are due"),
    (TEXT, lambda d: d.ids(1, dict(enumerate(range(100, 120)))),
     NOT_ITS.format("a") + "from row 20 on, the second chunk, they repeat rows 0 to 19"),
    (TEXT, lambda d: d.ids(1, {25: 7}), NOT_ITS.format("b") + "their hash is not that of its prompt"),
    (TEXT, lambda d: d.ids(4, {0: 350}),
     "the token id of request 'a' in row 51, in decoding, is 350: the token before it, and the sampler drew 351"),
])  # fmt: skip
def test_what_was_handed_over_wrongly_is_said(form: tuple[int, bool], change: Any, says: str) -> None:
    dump = Fake(*form)
    change(dump)
    (fault,) = check(dump).faults
    assert fault.says == says
    assert f"request {fault.request!r}" in says


@pytest.mark.parametrize(("step", "row", "of", "says"), [
    (1, 0, 48, "request 'b' for row 29, the prompt's only chunk, are computed of the model's output in row 28"),
    (4, 1, 0, "request 'b' for row 32, in decoding, are computed of the model's output in row 51 of request 'a'"),
])  # fmt: skip
def test_logits_of_another_row(step: int, row: int, of: int, says: str) -> None:
    dump = Fake()
    whole, some = (next(r for r in dump.records if r.step == step and r.tap == tap and r.role == role)
                   for tap, role in ((ROOT_TAP, "output.0"), ("logits_processor", "input.hidden_states")))  # fmt: skip
    dump.values[some.seq][row] = dump.values[whole.seq][of]
    (fault,) = check(dump).faults
    assert fault.says == f"the logits of {says}"
    finding = {"module": "logits_processor", "role": "input.hidden_states"}
    assert is_explained({"module": ROOT_TAP, "role": "logits_processor/input.hidden_states"}, finding)


class WithImages(Fake):
    """One image of 12 placeholders in each request; both were encoded in step 0."""

    def __init__(self) -> None:
        super().__init__(3, True)
        encoded = np.arange(96).reshape(24, 4)
        segments = tuple(Segment(req, 0, 12, 12 * req, PREFILL, image=0) for req in (0, 1))
        self.rows[0, 0, "vision/1"] = RowSpace(0, "vision/1", 24, segments)
        self.add(0, "visual", "output.0", encoded, encoded.shape, "vision/1", False)
        for req, name in enumerate(PROMPTS):
            own = (Image(name, 4, 12),)
            self.requests[0, req] = replace(self.requests[0, req], images=own)
        for step in range(6):
            rows = self.rows[0, step, TOKENS]
            names = [(s.req, s.pos + k) for s in rows.segments for k in range(s.n)]
            values = [encoded[12 * r + p - 4] if 4 <= p < 16 else np.full(4, -p) for r, p in names]
            self.add(step, ROOT_TAP, "input.inputs_embeds", np.array(values), (len(names), 4), TOKENS, False)

    def embeds(self, step: int) -> np.ndarray:
        return self.values[next(r for r in self.records if r.step == step and r.role == "input.inputs_embeds").seq]


@pytest.mark.parametrize(("of", "says"), [(slice(12, 24), " of request 'b'"), (slice(11, None, -1), "")])
def test_rows_of_another_image(of: slice, says: str) -> None:
    dump = WithImages()
    found = check(dump)
    assert (found.faults, found.checked["embeddings of images"]) == ([], 24)
    dump.embeds(0)[4:16] = np.arange(96).reshape(24, 4)[of]
    (fault,) = check(dump).faults
    where = "the embeddings of request 'a' in rows 4 to 15, the first chunk, are not those of its image 0"
    assert fault.says == f"{where} but those of image 0{says}"
    assert is_explained({"module": ROOT_TAP, "role": "input.inputs_embeds"}, {"module": ROOT_TAP, "role": fault.role})


@pytest.mark.parametrize("apart", [False, True])
def test_rows_of_an_image_that_lie_further_on(apart: bool) -> None:
    """Of an encoder whose images have their rows in a dimension of their own, too."""
    dump = WithImages()
    if apart:
        at = next(k for k, r in enumerate(dump.records) if r.rows == "vision/1")
        r = dump.records[at] = replace(dump.records[at], rows="vision/image", shape=(2, 12, 4))
        dump.values[r.seq] = dump.values[r.seq].reshape(2, 12, 4)
        segments = tuple(Segment(req, 0, 1, req, PREFILL, image=0) for req in (0, 1))
        dump.rows[0, 0, "vision/image"] = RowSpace(0, "vision/image", 2, segments)
    found = check(dump)
    assert (found.faults, found.checked["embeddings of images"]) == ([], 24)
    dump.embeds(0)[4:16] = dump.embeds(0)[3:15].copy()  # the first of them is a token's
    found = check(dump)
    assert [f.says for f in found.faults] == [
        "the embeddings of request 'a' in rows 5 to 15, the first chunk, are those of its image 0, moved by +1 rows"
    ]
    assert (found.checked["embeddings of images"], sum(found.unchecked.values())) == (23, 1)


def test_tokens_that_are_stale_in_most_rows() -> None:
    """Of each request the token before the last one is fed again, from the second on."""
    dump = Fake()
    for step in (3, 4, 5):
        ids = dump.rows[0, step, TOKENS].ids
        dump.ids(step, {i: n - 1 for i, n in enumerate(ids) if n not in (350, 340)})
    found = check(dump)
    assert not found.fed
    assert {f.request for f in found.faults} == {"a", "b"}
    assert all(": the token before it, and the sampler drew" in f.says for f in found.faults)


def negated_logits(dump: Fake) -> None:
    for r in dump.records:
        if r.tap == "logits_processor":
            dump.values[r.seq] *= -1


def own_tokens(dump: Fake) -> None:
    for step in (3, 4, 5):
        dump.ids(step, dict.fromkeys(range(2), 7 + step))


def named_tokens(dump: Fake) -> None:
    for (rank, req), request in dump.requests.items():
        dump.requests[rank, req] = replace(request, sampling=SamplingParameters(also=(NAMED_TOKENS,), digest=""))
    dump.ids(4, {0: 350})


def shifted(dump: Fake) -> None:
    for step in range(6):
        dump.positions(step)[:] += 2


def scaled_embeddings(dump: WithImages) -> None:
    dump.embeds(0)[4:16] *= 3


@pytest.mark.parametrize(("made", "change", "why", "rows"), [
    (Fake, negated_logits, "rows of logits that are no row of the model's output", 9),
    (WithImages, scaled_embeddings, "embeddings of images that are no row of the encoder's output", 12),
    (Fake, own_tokens, "not those of the sampler", 7), (Fake, named_tokens, "that a client names", 7),
    (Fake, shifted, "a way of its own", 87),
])  # fmt: skip
def test_what_a_model_may_do_itself_is_unchecked(made: Any, change: Any, why: str, rows: int) -> None:
    dump = made()
    change(dump)
    found = check(dump)
    assert not found.faults
    assert sum(n for reason, n in found.unchecked.items() if why in reason) == rows


def test_tokens_that_are_not_the_samplers_anywhere_are_checked_by_the_other_dump() -> None:
    dump = Fake()
    own_tokens(dump)
    golden, mine = check_both((Fake(), dump))
    assert not golden.faults
    assert {f.request for f in mine.faults} == {"a", "b"}
    named_tokens(dump)
    assert not check_both((Fake(), dump))[1].faults


def test_a_grid_is_chosen_by_what_it_explains() -> None:
    at, right = np.arange(30), np.array([Fake.due(p, 3, True) for p in range(30)])
    assert (layout_positions(at, right, [(4, 12)]) == right).all()
    late = right.copy()
    late[20:] += 1
    assert (layout_positions(at, late, [(4, 12)]) == right).all()
    assert (layout_positions(at[:4], right[:4], [(4, 12)]) == right[:4]).all()


def test_the_finding_is_an_origin_of_the_comparison() -> None:
    golden, mine = Fake(), Fake()
    mine.positions(1)[:20] = mine.positions(0)[:20]
    states = states_of((golden, mine))
    assert states["golden"] == {}
    assert states["mine"]["count"] == 1
    origin = cache_origin(states)
    assert origin is not None
    found = origin["module"], origin["class"], origin["role"], origin["rows"]
    assert found == (ROOT_TAP, "runner", "input.positions", 20)
    assert origin["cause"]["text"].startswith("the runner: positions of request 'a' are wrong from row 20 on")
    assert is_cache(origin)
    assert whose(states["mine"]["findings"][0]) == "the runner, not the model"
    both = states_of((mine, mine))
    assert both["mine"]["count"] == 0
    assert cache_origin(both) is None


def test_against_golden_alone() -> None:
    origin = {"module": ROOT_TAP, "role": "input.positions", "class": "Model", "request": "a", "position": 20,
              "rows": 20}  # fmt: skip
    assert is_input(origin)
    assert not is_input(origin | {"role": "input.inputs_embeds"})
    named = with_cause(origin, "the second chunk")
    assert named["class"] == "runner"
    assert (
        named["cause"]["text"]
        == "the runner: positions of request 'a' are not golden's from row 20 on, the second chunk"
    )


def test_metadata_is_the_runners() -> None:
    def found(kind: str, how: str) -> StateFinding:
        return StateFinding(1, kind, "kv", 0, "", 4, 1, "a", how, None, 20, 39, "a", first="layers.0.attn")

    assert is_runners(found(METADATA, "its length is 3; the schedule demands 4"))
    assert is_runners(found(STALE, "its row is written to slot 3 of block 0; the schedule demands slot 7"))
    assert not is_runners(found(STALE, "bytes of an earlier step"))
    dump = Fake()
    dump.states = [(0, found(METADATA, "its block table names block 9 in column 1; the schedule demands block 2"))]
    one = states_of((Fake(), dump))["mine"]["findings"][0]
    assert one["cause"]["family"] == "input"
    assert one["sentence"].endswith("(the second chunk)")


def test_rows_beyond_the_limit_are_counted_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = check(Fake())
    monkeypatch.setattr("vllm_accprobe.comparison.runner_inputs.MOST_ROWS", 40)
    found = check(Fake())
    assert found.faults == whole.faults == []
    beyond = [n for why, n in found.unchecked.items() if why.startswith("token ids beyond the first 40 rows")]
    assert len(beyond) == 1
    assert beyond[0] > 0
    assert found.checked["token ids"] < whole.checked["token ids"]
