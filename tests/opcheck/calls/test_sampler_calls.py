"""A sampler's calls, each row by its own request, from a dump of the small model."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace as Plain

import numpy as np
import pytest
import torch
from reference_calls import TABLE

from vllm_accprobe.align.tokens import SampledHistory
from vllm_accprobe.dump.schema import EXPONENTIAL, Request, RowSpace, SamplingParameters, Segment
from vllm_accprobe.opcheck.calls.sampler_calls import facts_of, noise_of
from vllm_accprobe.opcheck.reference import Call

LOGITS = torch.tensor([[1.0, 4.0, 3.0, 2.0, -1.0, 0.5], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]])
GREEDY = SamplingParameters(temperature=0.0, digest="g")
PENALISED = SamplingParameters(temperature=0.0, repetition=2.0, digest="p")


def dump(*asks):
    """Two requests whose prompts, tokens 1 and 2, and 5, are computed in one step."""
    requests = {(0, i): Request(i, "ab"[i], "", "h", 2 - i, sampling=a) for i, a in enumerate(asks)}
    parts = (Segment(0, 0, 2, 0), Segment(1, 0, 1, 2))
    logits = (Segment(0, 1, 1, 0), Segment(1, 0, 1, 1))
    rows = RowSpace(0, "tokens", 3, parts, (1, 2, 5)), RowSpace(0, "logits", 2, logits)
    return Plain(rows={(0, 0, r.space): r for r in rows}, requests=requests, records=[], masks={})


def told(asks, tokens, left=None, inputs=None, attrs=None, logits=LOGITS):
    outputs = {"output.token": torch.tensor(tokens)}
    best = logits.topk(3)
    outputs |= {"output.top_logits": best.values, "output.top_ids": best.indices.int()}
    if left is not None:
        best = torch.tensor(left).topk(3)
        outputs |= {"output.masked_logits": best.values, "output.masked_ids": best.indices.int()}
    call = Call("sampler", "AnySampler", inputs or {}, attrs=attrs or {}, outputs=outputs, extra={"logits": logits})
    held = dump(*asks)
    call = replace(call, extra=dict(call.extra) | facts_of(held, 0, 0, call, SampledHistory(held, 0)))
    return TABLE.evaluate(call), outputs


def right(found, outputs, role):
    """Of each row that has a reference, whether it is what the engine gave."""
    e = found[role]
    same = (e.value.double() - outputs[role].double()).abs() <= (e.bound if e.bound is not None else 0.0)
    same |= e.value == outputs[role]
    return [bool(same[i].all()) if e.rows[i] else None for i in range(len(e.rows))]


def test_greedy_rows_and_one_whose_parameters_are_not_known():
    found, outputs = told((GREEDY, None), [1, 0])
    assert right(found, outputs, "output.token") == [True, None]
    assert found["output.token"].reason == "the sampling parameters of its request were not captured"
    found, outputs = told((GREEDY, GREEDY), [2, 5])
    assert right(found, outputs, "output.token") == [False, True]
    assert found["output.token"].note == "request 'a', generated token 1: greedy, and token 2 is 1 behind the best, 1"


def test_of_a_models_nan_no_token_is_wrong():
    logits = LOGITS.clone()
    logits[0] = float("nan")
    found, outputs = told((GREEDY, GREEDY), [2, 5], logits=logits)
    assert right(found, outputs, "output.token") == [None, True]
    assert found["output.token"].reason == "the model's logits of its row hold NaN or infinity"


def test_what_penalties_leave():
    rows = [[1.0, 2.0, 1.5, 2.0, -1.0, 0.5], [0.0, 1.0, 2.0, 3.0, 4.0, 2.5]]
    found, outputs = told((PENALISED, PENALISED), [1, 4], rows)
    assert right(found, outputs, "output.masked_logits") == [True, True]
    assert right(found, outputs, "output.masked_ids") == [True, True]
    assert right(found, outputs, "output.token") == [True, True]  # 1 and 3 are equals
    found, outputs = told((PENALISED, PENALISED), [1, 5], [rows[0], LOGITS[1].tolist()])
    assert right(found, outputs, "output.masked_logits") == [True, False]
    assert found["output.masked_logits"].note == (
        "logits processor: penalties: request 'b', generated token 1: the logit of token 5 became 5, not 2.5; "
        "as if the prompt did not count"
    )
    assert right(found, outputs, "output.token") == [True, True]  # the best of what it got


def test_what_the_runner_has_for_a_row():
    asks = (GREEDY, SamplingParameters(0.5, top_p=0.9, top_k=2, digest="r"))
    rows = {"temperature": torch.tensor([0.0, 0.7]), "top_p": torch.tensor([1.0, 0.9]), "top_k": torch.tensor([6, 2])}
    found, _ = told(asks, [1, 5], inputs=rows)
    assert found["input.temperature"].value.tolist() == [0.0, 0.5]
    assert found["input.top_k"].value.tolist() == [6, 2]
    assert found["input.top_p"].value.float().tolist() == rows["top_p"].tolist()
    assert found["output.token"].source == "of 1 rows any token that the filters keep is right"


def test_forbidden_tokens_stay_forbidden():
    asks = replace(GREEDY, allowed=(2, 3), digest="a")
    left = [[-np.inf, -np.inf, 3.0, 2.0, -np.inf, -np.inf], [-np.inf, -np.inf, 2.0, 3.0, -np.inf, -np.inf]]
    found, outputs = told((asks, asks), [2, 3], left)
    assert right(found, outputs, "output.masked_logits") == [True, True]
    assert right(found, outputs, "output.masked_ids") == [True, True]
    found, outputs = told((asks, asks), [1, 3], [LOGITS[0].tolist(), left[1]])
    assert right(found, outputs, "output.masked_ids") == [False, True]


@pytest.mark.parametrize("wrong", [False, True])
def test_a_seed_by_torchs_own_noise(wrong):
    """As releases draw that have no fused kernel: the largest quotient of probability and exponential noise."""
    generators = [torch.Generator().manual_seed(seed) for seed in range(1, 9)]
    noise = [torch.empty(64).exponential_(generator=g) for _ in range(2) for g in generators]
    attrs = {"noise": EXPONENTIAL, "noise_draws": ",".join(str(int(n.argmin())) for n in noise[8:])}
    assert noise_of(attrs) is not None
    assert noise_of(attrs | {"noise_draws": "1"}) is None
    g = torch.Generator().manual_seed(7)
    token = int((torch.softmax(LOGITS[0] / 2.0, 0) / torch.empty(6).exponential_(generator=g)).argmax())
    asks = SamplingParameters(2.0, seed=7, digest="s")
    found, outputs = told((asks, GREEDY), [(token + wrong) % 6, 5], attrs=attrs)
    assert right(found, outputs, "output.token") == [not wrong, True]


def test_rows_that_are_not_those_of_the_step_have_no_facts(tmp_path: Path):
    call = Call("sampler", "Sampler", outputs={"output.token": torch.tensor([1, 2, 3])})
    held = dump(GREEDY, GREEDY)
    assert facts_of(held, 0, 0, call, SampledHistory(held, 0)) == {}
