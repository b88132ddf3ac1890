"""Requests and steps as an engine tells them: who is forced, who is refused, and that serving goes on."""

from dataclasses import replace
from types import SimpleNamespace as Plain
from typing import Any

import pytest
import torch
from fake_runners import PARALLEL, Output, more, new, without_vllm
from test_runner_steps import Runner

from vllm_accprobe.capture.core.rows import Scheduled
from vllm_accprobe.capture.teacher_forcing import ForcingObserver, first_of_replica, replaced, tokens_of_rows
from vllm_accprobe.capture.vllm.runner import RunnerAdapter
from vllm_accprobe.capture.vllm.sampling import KEY, NamedTokens
from vllm_accprobe.config import ProbeConfig


class Sampler(torch.nn.Module):
    """Chooses token 1 in every row."""

    def sample(self, logits: torch.Tensor, metadata: Any) -> tuple[torch.Tensor, None]:
        return torch.ones(len(logits), dtype=torch.int64), None


class Sampling(Runner):
    def __init__(self) -> None:
        super().__init__(pools=False)
        self.sampler = Sampler()
        self.vllm_config.speculative_config = None

    def sample_tokens(self, grammar: Any = None) -> Any:
        return self.sampler.sample(torch.zeros(len(self.input_batch.req_ids), 100), None)[0].tolist()


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    without_vllm(monkeypatch)


def forced(runner: Any, force: str = "1") -> ForcingObserver:
    adapter = RunnerAdapter(Plain(model_runner=runner), runner, PARALLEL)
    observer = ForcingObserver(ProbeConfig.from_kwargs(enabled=False, force=force), adapter)
    adapter.add(observer)
    runner.load_model()
    return observer


def asks(name: str, prompt: int, scheduled: int, along: Any) -> Output:
    out = new(**{name: prompt})
    out.scheduled_new_reqs[0].sampling_params = Plain(extra_args={KEY: along})
    out.num_scheduled_tokens[name] = scheduled
    return out


def goes_on(finished: tuple[str, ...] = (), **computed: int) -> Output:
    return replace(more(**computed), finished_req_ids=finished)


def test_others_in_the_batch_are_left_alone_and_a_name_is_free_again() -> None:
    runner = Sampling()
    forced(runner)
    runner.execute_model(asks("a", 2, 2, "70 71 72"))
    assert runner.sample_tokens() == [70]
    runner.execute_model(new(b=2))
    assert runner.sample_tokens() == [1]
    runner.execute_model(goes_on(b=2, a=2))
    assert runner.sample_tokens() == [1, 71]
    runner.execute_model(goes_on(("a",), b=3))
    runner.execute_model(new(a=2))
    assert runner.sample_tokens() == [1]


def test_outside_of_steps_nothing_is_named() -> None:
    runner = Sampling()
    forced(runner)
    runner.execute_model(asks("a", 2, 2, "70 71"))
    runner.sample_tokens()
    assert runner.sample_tokens() == [1]  # as an engine's dummy run samples


@pytest.mark.parametrize(
    ("along", "says"),
    [
        ("70 100", "names a token that this model, with 100 of them, does not have"),
        ([70], "is not a text of token ids"),
    ],
)
def test_what_cannot_be_is_answered_as_any_other(along: Any, says: str, caplog: Any) -> None:
    runner = Sampling()
    forced(runner)
    for name in ("a", "b"):
        runner.execute_model(asks(name, 2, 2, along))
        assert runner.sample_tokens() == [1]
    said = [m.removeprefix("accprobe: ") for m in caplog.messages]
    assert len(said) == 1
    assert says in said[0]
    assert "70" not in said[0]
    runner.execute_model(asks("c", 2, 2, "70"))
    assert runner.sample_tokens() == [70]


def test_speculation_is_refused_once_and_only_when_somebody_asks(caplog: Any) -> None:
    runner = Sampling()
    runner.vllm_config.speculative_config = object()
    forced(runner)
    runner.execute_model(new(a=2))
    assert caplog.messages == []
    for name in ("b", "c"):
        runner.execute_model(asks(name, 2, 2, "70"))
        assert runner.sample_tokens() == [1]
    (said,) = caplog.messages
    assert "speculative decoding" in said


def test_an_error_inside_ends_forcing_and_not_serving(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    runner = Sampling()
    observer = forced(runner)
    monkeypatch.setattr(observer._adapter.batch, "rows", lambda: 1 / 0)
    for name in ("a", "b"):
        runner.execute_model(asks(name, 2, 2, "70"))
        assert runner.sample_tokens() == [1]
    said = [m.removeprefix("accprobe: ") for m in caplog.messages]
    assert len(said) == 2
    assert said[0].startswith("forcing failed (ZeroDivisionError")
    assert "answered as any other" in said[1]


def test_each_replica_writes_its_steps_once() -> None:
    places = [{"rank": r, "world_size": 4, "dp": [r // 2, 2]} for r in range(4)]
    assert [first_of_replica(p) for p in places] == [True, False, True, False]


def test_rows_get_the_token_that_follows_what_is_computed() -> None:
    asked = {"a": NamedTokens(10, (50, 51, 52), 52), "c": NamedTokens(4, (60,), 60)}
    chunk, end, decode = Scheduled("a", 0, 6), Scheduled("a", 6, 4), Scheduled("a", 11, 1)
    assert [tokens_of_rows([row], asked) for row in (chunk, end, decode)] == [[-1], [50], [52]]
    again = Scheduled("a", 0, 12)  # preempted: prompt and two tokens are computed anew
    assert tokens_of_rows([Scheduled("b", 9, 1), again, Scheduled("c", 4, 1)], asked) == [-1, 52, -1]


def test_other_rows_than_the_batch_has_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="the sampler has 3 rows, the batch 2"):
        replaced((torch.zeros(3), None), [1, 2])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_what_is_not_named_stays(dtype: torch.dtype) -> None:
    sampled, rest = torch.tensor([1, 2, 3], dtype=dtype), object()
    changed, kept = replaced((sampled, rest), [-1, 90, 0])
    assert (changed.tolist(), changed.dtype, kept is rest) == ([1, 90, 0], dtype, True)
    assert sampled.tolist() == [1, 2, 3]
    assert replaced(sampled, [9, -1, -1]).tolist() == [9, 2, 3]  # releases before 0.10.2
    assert replaced((sampled.view(3, 1), None), [9, -1, -1])[0].tolist() == [[9], [2], [3]]
