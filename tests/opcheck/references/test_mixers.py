"""Recurrent modules computed from the beginning of each request, against loops over tokens; states that are others'."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from opcheck.samples.recurrent import convolved, delta_rule, gates, scan
from opcheck.samples.sample import wide

from vllm_accprobe.dump.block_code import INSIDE
from vllm_accprobe.dump.schema import Layout, Record, RowSpace, Segment
from vllm_accprobe.opcheck.calls import neighbours
from vllm_accprobe.opcheck.calls.case import CachedRun, StoredCache
from vllm_accprobe.opcheck.calls.neighbours import Past
from vllm_accprobe.opcheck.calls.records import Captured
from vllm_accprobe.opcheck.causes import state_causes
from vllm_accprobe.opcheck.causes.api import Outputs, Trial
from vllm_accprobe.opcheck.causes.search import Examined, search
from vllm_accprobe.opcheck.reference import Call, Declined
from vllm_accprobe.opcheck.references import mixers
from vllm_accprobe.opcheck.references.mixers import CARRIED, OtherStates, carried
from vllm_accprobe.opcheck.references.recurrent import EPSILON

State = tuple[Any, Any]
"""The convolution's last inputs, and the recurrence's state."""
HEADS, SIZE, N, WIDTH = 2, 4, 3, 4
DRAWN = torch.Generator().manual_seed(7)


def draw(*shape: int) -> Any:
    return torch.randn(shape, generator=DRAWN, dtype=torch.float64).bfloat16()


WEIGHTS: dict[str, dict[str, Any]] = {
    "MambaMixer2": {"conv1d.weight": draw(HEADS * SIZE + 2 * N, 1, WIDTH), "conv1d.bias": draw(HEADS * SIZE + 2 * N),
                    "A": -draw(HEADS).abs() - 0.1, "D": draw(HEADS), "dt_bias": draw(HEADS)},
    "ShortConv": {"conv.weight": draw(6, 1, 3)},
    "QwenGatedDeltaNetAttention": {"conv1d.weight": draw(2 * SIZE + HEADS * SIZE, 1, WIDTH),
                                   "A_log": draw(HEADS), "dt_bias": draw(HEADS)},
}  # fmt: skip


def mamba2(x: Mapping[str, Any], w: Mapping[str, Any], state: State) -> tuple[Any, State]:
    inner, rows = HEADS * SIZE, wide(x["in_proj"])
    mixed, window = convolved(rows[:, inner:-HEADS], wide(w["conv1d.weight"])[:, 0], wide(w["conv1d.bias"]), state[0])
    v, b, c = np.split(mixed[:, None], (inner, inner + N), -1)
    dt = np.log1p(np.exp(rows[:, -HEADS:] + wide(w["dt_bias"])))
    y, s = scan(v.reshape(-1, HEADS, SIZE), dt, wide(w["A"]), b, c, wide(w["D"]), state[1], "")
    return y, (window, s)


def short_conv(x: Mapping[str, Any], w: Mapping[str, Any], state: State) -> tuple[Any, State]:
    b, c, v = np.split(wide(x["in_proj"]), 3, -1)
    y, window = convolved(b * v, wide(w["conv.weight"])[:, 0], 0.0, state[0], act=False)
    return c * y, (window, state[1])


def delta_net(x: Mapping[str, Any], w: Mapping[str, Any], state: State) -> tuple[Any, State]:
    """One head of queries and keys, whose values' heads share it; columns one after the other."""
    rows, weight = wide(x["in_proj_qkvz"]), wide(w["conv1d.weight"])[:, 0]
    mixed, window = convolved(rows[:, : len(weight)], weight, 0.0, state[0])
    q, k, v = np.split(mixed[:, None], (SIZE, 2 * SIZE), -1)
    b, a = x["in_proj_ba"].chunk(2, -1)
    g, beta = gates(w["A_log"], a, b, w["dt_bias"], "")
    y, s = delta_rule(q, k, v.reshape(-1, HEADS, SIZE), g, beta, state[1], "", EPSILON)
    return y, (window, s)


STEP: dict[str, Callable[..., tuple[Any, State]]] = {
    "MambaMixer2": mamba2, "ShortConv": short_conv, "QwenGatedDeltaNetAttention": delta_net,
}  # fmt: skip
SHAPES = {"MambaMixer2": {"in_proj": 2 * HEADS * SIZE + 2 * N + HEADS}, "ShortConv": {"in_proj": 18},
          "QwenGatedDeltaNetAttention": {"in_proj_qkvz": 4 * SIZE + 2 * HEADS * SIZE - 2 * SIZE,
                                         "in_proj_ba": 2 * HEADS}}  # fmt: skip
STATE = {"MambaMixer2": (HEADS, SIZE, N), "ShortConv": (), "QwenGatedDeltaNetAttention": (HEADS, SIZE, SIZE)}
MADE = {"MambaMixer2": "norm/x", "ShortConv": "out_proj/input_", "QwenGatedDeltaNetAttention": "norm/x"}
BEGINS = {"old": ((0, 0),), "a": ((1, 0), (2, 8), (3, 9)), "b": ((1, 0), (2, 6), (3, 7))}
"""The runs of rows of three requests; the call is that of step 3, or of step 1."""
LENGTH = {"old": 9, "a": 10, "b": 8}


def none(cls: str) -> State:
    channels, _, width = next(w.shape for n, w in WEIGHTS[cls].items() if n.endswith(".weight"))
    return np.zeros((channels, width - 1)), np.zeros(STATE[cls])


class Case:
    """Rows of three requests of a class, and what a loop over tokens makes of them."""

    def __init__(self, cls: str):
        self.cls = cls
        self.rows = {r: {n: draw(LENGTH[r], width) for n, width in SHAPES[cls].items()} for r in LENGTH}

    def run(self, of: str, first: int, stop: int, state: State) -> tuple[Any, State]:
        y, state = STEP[self.cls]({n: x[first:stop] for n, x in self.rows[of].items()}, WEIGHTS[self.cls], state)
        return torch.from_numpy(y).flatten(1), state

    def behind(self, of: str, n: int) -> State:
        return self.run(of, 0, n, none(self.cls))[1] if n else none(self.cls)

    def call(self, step: int, mine: Mapping[str, State]) -> Call:
        """The call of a step, whose requests begin with the states ``mine``, or their own."""
        runs, made, at = [], [], 0
        for of in ("a", "b"):
            begins = dict(BEGINS[of])
            first, stop = begins[step], begins.get(step + 1, LENGTH[of])
            own = self.behind(of, first)
            made.append(self.run(of, first, stop, mine.get(of, own))[0])
            past = {n: x[:stop] for n, x in self.rows[of].items()}
            runs.append(CachedRun(torch.arange(at, at + stop - first), torch.arange(first, stop), past))
            at += stop - first
        others = {r: (tuple(x for x in BEGINS[r] if x[0] <= step), self.rows[r]) for r in LENGTH}
        attrs = {"head_dim": SIZE, "ssm_state_size": N, "activation": "silu", "head_k_dim": SIZE, "head_v_dim": SIZE,
                 "gqa_interleaved_layout": False}  # fmt: skip
        inner = {n: w for n, w in WEIGHTS[self.cls].items() if "." in n}
        extra = {"cache": StoredCache(runs, ""), "states": OtherStates(others), "inner_params": inner,
                 "wide_state": True}  # fmt: skip
        return Call("l.mixer", self.cls, params={n: w for n, w in WEIGHTS[self.cls].items() if "." not in n},
                    attrs=attrs, outputs={f"{INSIDE}{MADE[self.cls]}": torch.cat(made).bfloat16()},
                    extra=extra)  # fmt: skip


class Table:
    """A table of references of which this is the only one."""

    @staticmethod
    def evaluate(call: Call) -> Any:
        return carried(call)

    @staticmethod
    def by_rows(cls: str) -> bool:
        return False


def trial(call: Call) -> Trial:
    (role, out), = call.outputs.items()
    record = Record(0, 1, "l.mixer.norm", "X", "input.x", 0, 0, "bfloat16", tuple(out.shape), "tokens", 0, None, None,
                    Layout("replicated"), None)  # fmt: skip
    captured = Captured("l.mixer", 0, 1, 0, call, {role: record})
    return Trial(captured, Table(), Outputs(carried(call)))  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("cls", list(STEP))
def test_a_loop_over_tokens_gives_the_same(cls: str, step: int) -> None:
    call = Case(cls).call(step, {})
    found = Examined(trial(call))
    assert found.rows
    assert not found.failed


@pytest.mark.parametrize("name", ["nothing", "dt_bias"])
def test_states_of_other_parameters_are_not_kept_for_the_next_call(name: str) -> None:
    """A call with another parameter, as causes try it, between two calls of the dump."""
    case = Case("MambaMixer2")
    stores: dict[int, Any] = {}

    def call(step: int) -> Call:
        made = case.call(step, {})
        for k, run in enumerate(made.extra["cache"].requests()):
            run[2][CARRIED] = stores.setdefault(k, {})
        return made

    carried(call(2))
    other = call(2)
    if name in other.params:
        carried(replace(other, params={**other.params, name: other.params[name] + 1.0}))
    assert all(len(s) == 1 for s in stores.values())
    found, plain = (carried(c)[f"{INSIDE}norm/x"].value for c in (call(3), case.call(3, {})))
    torch.testing.assert_close(found, plain)


def test_a_request_that_is_too_long_is_alone_without_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Case("MambaMixer2").call(3, {})
    size = HEADS * SIZE * N
    monkeypatch.setattr(mixers, "_LONGEST", size * 9)  # request a has 10 rows, b has 8
    (found,) = carried(call).values()
    assert found.rows is not None
    assert found.rows.tolist() == [False, True]
    assert found.reason == "a recurrence that is too long to be computed again here"


def test_states_beyond_a_limit_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = RowSpace(0, "tokens", 0, (Segment(0, 0, 4, 0), Segment(1, 0, 2, 0)))
    past = Past(("in_proj",), carried={})
    past.write(rows, {"in_proj": torch.zeros(6, 1)})
    states = (torch.zeros(1, 2), torch.zeros(1, 3))
    past.carried = {0: {"key": {4: (states, None)}}}
    for limit, kept in ((1 << 20, [True, True]), (20, [True, False])):
        monkeypatch.setattr(neighbours, "_MOST_STATES", limit)
        assert [CARRIED in found for _, _, found in past.view(rows).requests()] == kept
        past.carried.pop(1, None)


def mixed(window: State, state: State) -> State:
    return window[0], state[1]


WRONG: dict[str, tuple[int, Callable[[Case], Mapping[str, State]], str]] = {
    "left": (1, lambda c: {"a": c.behind("old", 9)},
             "if its state at the first token of request 'a' was not reset: it is the final state of request 'old'"),
    "exchanged": (3, lambda c: {"a": c.behind("b", 7), "b": c.behind("a", 9)},
                  "with its state of request 'a' taken from request 'b' before position 9"),
    "the step before": (3, lambda c: {"b": c.run("b", 6, 7, c.behind("a", 8))[1]},
                        "with its state of request 'b' taken from request 'a' before position 6"),
    "lost": (3, lambda c: {"a": none(c.cls)}, "with its state of request 'a' reset to zero before position 9"),
    "old": (3, lambda c: {"a": c.behind("a", 8)},
            "with its state of request 'a' at position 9 not updated since position 7"),
    "state alone": (2, lambda c: {"a": mixed(c.behind("a", 8), c.behind("b", 6))},
                    "with the recurrence's state of request 'a' taken from request 'b' before position 8"),
    "window alone": (2, lambda c: {"a": mixed(c.behind("b", 6), c.behind("a", 8))},
                     "with the convolution's last inputs of request 'a' taken from request 'b' before position 8"),
    "no state but a window": (3, lambda c: {"a": c.behind("a", 8)},
                              "with the convolution's last inputs of request 'a' at position 9 not updated since "
                              "position 7"),
}  # fmt: skip


@pytest.mark.parametrize(("cls", "name"), [
    (c, n) for n in WRONG for c in STEP if (n == "no state but a window") == (c == "ShortConv")
])  # fmt: skip
def test_a_wrong_state_is_named(cls: str, name: str) -> None:
    step, wrong, text = WRONG[name]
    case = Case(cls)
    found = search([trial(case.call(step, wrong(case))), trial(case.call(step, {}))], state_causes.CAUSES)
    assert found is not None
    assert found.text == f"mine's output is what this {cls} gives {text}"


@pytest.mark.parametrize(("name", "text"), [("dt_bias", "without the bias of its time step"),
                                            ("D", "without D, its inputs' direct part")])  # fmt: skip
def test_a_parameter_that_is_left_out_is_named(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, weights = Case("MambaMixer2"), WEIGHTS["MambaMixer2"]
    right = weights[name]
    monkeypatch.setitem(weights, name, torch.zeros_like(right))
    call = case.call(1, {})
    call.params[name] = right  # type: ignore[index]
    found = search([trial(call)], state_causes.CAUSES)
    assert found is not None
    assert found.text == f"mine's output is what this MambaMixer2 gives {text}"


def test_another_error_is_no_state() -> None:
    call = Case("MambaMixer2").call(3, {})
    (role, out), = call.outputs.items()
    call.outputs[role] = out * 1.5  # type: ignore[index]
    assert search([trial(call)], state_causes.CAUSES) is None


@pytest.mark.parametrize(("missing", "why"), [("ssm_state_size", "attribute ssm_state_size was not recorded"),
                                          ("activation", "its activation is not known")])  # fmt: skip
def test_what_is_not_known_has_no_reference(missing: str, why: str) -> None:
    call = Case("MambaMixer2").call(1, {})
    del call.attrs[missing]  # type: ignore[attr-defined]
    with pytest.raises(Declined) as error:
        carried(call)
    assert error.value.reason == why
