"""The watch on a small torch model: what alarms, what does not, what is known of the call, on both ways of reading."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from capture.toy import Rotary, Toy

from vllm_accprobe.capture.errcheck.watch import (
    BAD,
    GOOD,
    UNCHECKED,
    UNKNOWN,
    Alarm,
    Badness,
    BadnessRule,
    Watch,
    WatchedStep,
    parameters,
    watched,
)
from vllm_accprobe.capture.taps.hooks import Taps

IDS = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])
BOTH = ("nan", "overflow")


class Watched:
    """A model under watch. Each call of ``run`` is a step; alarms gather in ``alarms``."""

    def __init__(self, model: torch.nn.Module, kinds: tuple[str, ...] = BOTH, **how: Any) -> None:
        self.model = model
        self.alarms: list[Alarm] = []
        self.said: list[str] = []
        self.watch = Watch(kinds, self.alarms.append, self.said.append, **how)
        self.taps = Taps(self.watch, functools.partial(watched, self.watch))
        self.taps.attach(model)
        self.steps = 0

    def run(self, *args: Any, rows: int = 8, **kwargs: Any) -> Any:
        self.watch.begin(WatchedStep(self.steps, rows))
        self.steps += 1
        result = self.model(*args, **kwargs)
        self.watch.end()
        self.watch.poll(wait=True)
        return result

    def only(self) -> Alarm:
        assert self.said == []
        assert len(self.alarms) == 1, self.alarms
        return self.alarms[0]


def spoil(module: torch.nn.Module, change: Callable[[Any], Any], at_call: int = 0) -> None:
    """From its call number ``at_call`` on, ``module`` gives ``change(output)``."""
    forward, count = module.forward, [0]

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        result = forward(*args, **kwargs)
        return change(result) if count[0] > at_call else result

    module.forward = wrapped  # type: ignore[method-assign]


def put(value: float, *index: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(t: torch.Tensor) -> torch.Tensor:
        t = t.clone()
        t[index] = value
        return t

    return change


@pytest.fixture(params=[False, True], ids=["host", "deferred"])
def deferred(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_a_clean_model_is_silent_and_unchanged(deferred: bool) -> None:
    model = Toy()
    expected = model(IDS)["logits"]
    watched = Watched(model, deferred=deferred)
    for _ in range(3):
        assert torch.equal(watched.run(IDS)["logits"], expected)
    assert watched.alarms == []
    assert watched.said == []
    watched.taps.remove()
    assert torch.equal(model(IDS)["logits"], expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), torch.finfo(torch.float32).max])
def test_the_first_bad_output_is_named(deferred: bool, value: float) -> None:
    model = Toy()
    spoil(model.layers[1].extra.inner, put(value, 1, 2, 5), at_call=2)
    watched = Watched(model, deferred=deferred)
    for _ in range(4):
        watched.run(IDS)
    assert [a.step.number for a in watched.alarms] == [2, 3]
    alarm = watched.alarms[0]
    assert (alarm.tap, alarm.cls, alarm.role, alarm.call) == ("layers.1.extra.inner", "Linear", "output.0", 0)
    kind = {"nan": Badness(1, 0, 0), "inf": Badness(0, 1, 0)}.get(str(abs(value)), Badness(0, 0, 1))
    assert alarm.bad == kind
    assert [(i.role, i.state) for i in alarm.inputs] == [("input.input", GOOD)]
    assert alarm.before == "layers.1.rotary"
    assert dict(alarm.outputs)["output.0"].shape == (2, 4, 8)


def test_kinds_that_nobody_asked_for_are_left_alone(deferred: bool) -> None:
    for kinds, value, found in (("nan", "inf", 0), ("overflow", "nan", 0), ("nan", "nan", 1), ("overflow", "inf", 1)):
        model = Toy()
        spoil(model.norm, put(float(value), 0, 0, 0))
        watched = Watched(model, (kinds,), deferred=deferred)
        watched.run(IDS)
        assert len(watched.alarms) == found, (kinds, value)


def test_bad_in_bad_out_when_it_was_made_between_modules(deferred: bool) -> None:
    class Between(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.log(self.first(x) * 0 - 1))

    watched = Watched(Between(), deferred=deferred)
    watched.run(torch.ones(8, 4))
    alarm = watched.only()
    assert (alarm.tap, alarm.before) == ("second", "first")
    assert [(i.role, i.state, i.bad.nan) for i in alarm.inputs] == [("input.input", BAD, 32)]


class Overflowing(Rotary):
    """Multiplies its query where it lies, by infinity while ``bad``."""

    bad = False

    def forward(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> Any:
        query.mul_(float("inf") if self.bad else 1.0)
        return query, key


def test_what_a_module_changes_in_place_is_known_as_it_was(deferred: bool) -> None:
    for clean, state in ((2, GOOD), (0, UNKNOWN)):  # in its first call nobody could know
        model = Toy()
        rotary = Overflowing()
        for layer in model.layers:
            layer.rotary = rotary
        watched = Watched(model, deferred=deferred)
        for _ in range(clean):
            watched.run(IDS)
        rotary.bad = True
        watched.run(IDS)
        alarm = watched.only()
        assert alarm.tap == "layers.0.rotary"
        found = {i.role: i for i in alarm.inputs}
        # query and key are two views of one memory
        assert {r: i.state for r, i in found.items()} == {
            "input.positions": UNCHECKED, "input.query": state, "input.key": state,
        }  # fmt: skip
        query = found["input.query"].tensor
        assert (query is not None and bool(torch.isfinite(query).all())) == (state == GOOD)


class Padded(torch.nn.Module):
    """Rows of tokens as in vLLM: [rows, width], with garbage in the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, 4)
        self.mask = Masked()
        self.lm_head = torch.nn.Linear(4, 16)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        return self.lm_head(self.mask(x, attention_mask=torch.full((4, 4), float("-inf")))[:5])


class Masked(torch.nn.Module):
    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return x


def test_padding_rows_do_not_alarm_and_real_ones_do(deferred: bool) -> None:
    ids = torch.arange(8)
    for row, alarms in ((7, 0), (4, 1)):
        model = Padded()
        spoil(model.embed, put(float("nan"), row, 1))
        watched = Watched(model, deferred=deferred)
        watched.run(ids, ids, rows=5)
        assert len(watched.alarms) == alarms


def test_rule_by_hand() -> None:
    x = torch.tensor([[1.0, float("nan")], [float("inf"), -torch.finfo(torch.float32).max], [0.0, float("-inf")]])
    rule = BadnessRule()
    assert (rule.assess(x, "language"), rule.assess(x, "head")) == (Badness(1, 2, 1), Badness(1, 1, 0))
    assert rule.elements(x, "language").tolist() == [[False, True], [True, True], [False, True]]
    assert rule.elements(x, "head").tolist() == [[False, True], [True, False], [False, False]]


def test_masks_and_forbidden_tokens_do_not_alarm(deferred: bool) -> None:
    model = Padded()
    spoil(model.lm_head, put(float("-inf"), 2, 3))
    watched = Watched(model, deferred=deferred)
    watched.run(torch.arange(8), torch.arange(8))
    assert watched.alarms == []
    spoil(model.lm_head, put(float("inf"), 2, 3))
    again = Watched(model, deferred=deferred)
    again.run(torch.arange(8), torch.arange(8))
    assert again.only().tap == "lm_head"
    spoil(model.mask, put(float("nan"), 2, 3))
    third = Watched(model, deferred=deferred)
    third.run(torch.arange(8), torch.arange(8))
    assert ("input.attention_mask", GOOD) in [(i.role, i.state) for i in third.only().inputs]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_saturates(dtype: torch.dtype, deferred: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).to(dtype)
    largest = {torch.float16: 65504.0, torch.bfloat16: 3.3895313892515355e38}[dtype]
    spoil(model[0], put(largest, 3, 0))
    watched = Watched(model, deferred=deferred)
    watched.run(torch.ones(8, 4, dtype=dtype))
    assert watched.only().bad == Badness(0, 0, 1)
    spoil(model[0], put(largest / 2, 3, 0))
    calm = Watched(model, deferred=deferred)
    calm.run(torch.ones(8, 4, dtype=dtype))
    assert calm.alarms == []


class Cast(torch.nn.Module):
    def __init__(self, dtype: torch.dtype, scale: float) -> None:
        super().__init__()
        self.dtype, self.scale = dtype, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).to(self.dtype)


def test_eight_bits(deferred: bool) -> None:
    x = torch.linspace(-1, 1, 800).reshape(8, 100)
    # A dynamic scale puts the ends at the maximum, 448: of 800 values those above 432/448, a thirtieth. No error.
    for scale, alarms in ((448.0, 0), (4480.0, 1)):
        watched = Watched(Cast(torch.float8_e4m3fn, scale), deferred=deferred)
        clipped = x.clamp(-448 / scale, 448 / scale)
        watched.run(clipped)
        assert len(watched.alarms) == alarms, scale
    watched = Watched(Cast(torch.float8_e5m2, float("nan")), deferred=deferred)
    watched.run(x)
    assert watched.only().bad == Badness(800, 0, 0)


def test_bad_parameters_and_not_masks() -> None:
    module = torch.nn.Linear(3, 2)
    module.register_buffer("attn_mask", torch.full((2, 2), float("-inf")))
    module.register_buffer("workspace", torch.full((2, 2), float("nan")), persistent=False)
    assert parameters(module) == []
    with torch.no_grad():
        module.bias[0] = float("nan")
        module.weight[1, 2] = float("nan")
        module.weight[0, 0] = float("-inf")
    assert parameters(module) == [("weight", Badness(1, 1)), ("bias", Badness(1, 0))]


def test_a_large_step_is_not_held_and_the_next_one_is() -> None:
    model = Toy()
    spoil(model.norm, put(float("nan"), 0, 0, 0))
    watched = Watched(model, deferred=True, keep_bytes=100)
    watched.run(IDS)
    first = watched.alarms[0]
    assert (first.tap, first.outputs, first.bad) == ("norm", (), None)
    assert watched.watch.armed == "norm"
    watched.run(IDS)
    second = watched.alarms[1]
    assert (second.tap, second.bad) == ("norm", Badness(1, 0, 0))
    assert [i.role for i in second.inputs] == ["input.input"]


def test_a_later_change_in_place_does_not_make_an_input_bad() -> None:
    """On a device the call is looked at after the step: what a later module did to its input must not count."""

    class Later(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.one(x)
            y = self.two(h)
            h.fill_(float("nan"))
            return self.three(y)

    model = Later()
    spoil(model.two, put(float("inf"), 0, 0))
    watched = Watched(model, deferred=True)
    watched.run(torch.ones(8, 4))
    alarm = watched.only()
    assert alarm.tap == "two"
    assert [(i.role, i.state, i.tensor) for i in alarm.inputs] == [("input.input", GOOD, None)]


def test_a_failure_of_the_watch_ends_the_watch_only(deferred: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Toy()
    expected = model(IDS)["logits"]
    watched = Watched(model, deferred=deferred)

    def broken(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(torch, "aminmax", broken)
    assert torch.equal(watched.run(IDS)["logits"], expected)
    assert torch.equal(watched.run(IDS)["logits"], expected)
    assert len(watched.said) == 1
    assert "ZeroDivisionError: planted; it is off, serving goes on" in watched.said[0]


def test_numbers_of_three_steps_may_be_on_their_way() -> None:
    """With a device that is behind, steps are read in order and none is lost."""

    class Event:
        def __init__(self) -> None:
            self.waited = 0

        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            self.waited += 1

    model = Toy()
    spoil(model.embed, put(float("nan"), 0, 0, 0), at_call=1)
    watched = Watched(model, deferred=True)
    watch = watched.watch
    events = []
    fetch = watch._slots.fetch  # type: ignore[union-attr]

    def late(taken: Any) -> Any:
        events.append(Event())
        return fetch(taken)[0], events[-1]

    watch._slots.fetch = late  # type: ignore[union-attr, method-assign]
    for step in range(4):
        watch.begin(WatchedStep(step, 8))
        model(IDS)
        watch.end()
    assert [e.waited for e in events] == [1, 1, 0, 0]
    assert [a.step.number for a in watched.alarms] == [1]
    watch.poll(wait=True)
    assert [a.step.number for a in watched.alarms] == [1, 2, 3]


def test_findings_of_the_head_are_named_by_logits_rows() -> None:
    from vllm_accprobe.capture.core.rows import Space
    from vllm_accprobe.capture.errcheck.findings import cut, finding
    from vllm_accprobe.dump.schema import Request, Segment

    model = Padded()
    spoil(model.lm_head, put(float("nan"), 3, 2))
    watched = Watched(model)
    watched.run(torch.arange(8), torch.arange(8))
    segments = [Segment(7, 20, 2, 0, "prefill"), Segment(9, 44, 3, 2, "decode")]
    space = Space("logits", 5, 5, [(0, 5)], segments, token_rows=[4, 5, 11, 12, 13])
    requests = {7: Request(7, "a", "a-1", "", 22), 9: Request(9, "b", "b-1", "", 40)}
    found, rows = finding(watched.watch, watched.only(), space, requests, [])
    assert rows == [3]
    assert found.rows == ({"request": "b", "position": 45, "phase": "decode", "row": 3},)
    assert (found.bad_rows, found.all_rows, found.verdict) == (1, 5, "good in, bad out")
    small = cut(space, [0, 1, 3])
    assert small.ranges == [(0, 2), (3, 4)]
    assert [(s.req, s.pos, s.n, s.row) for s in small.segments] == [(7, 20, 2, 0), (9, 45, 1, 3)]
    assert (small.n, small.token_rows, small.whole) == (3, [4, 5, 12], False)
    assert cut(space, []) is space
