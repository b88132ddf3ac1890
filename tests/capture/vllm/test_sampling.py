"""Runners whose tokens are taken in another way, or not at all: what is skipped is counted by its reason, and said.

The runners are fakes in a release's shape, around ../test_runner_steps.py's. Real ones: tests/e2e.
"""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace as Plain
from typing import Any

import pytest
import torch
from fake_runners import Output, captured, more, new, without_vllm
from test_runner_steps import Model, Runner

from vllm_accprobe.capture.vllm import capturing, names_by_release, runner as room, sampling as taps
from vllm_accprobe.capture.vllm.capturing import CaptureObserver
from vllm_accprobe.config import ProbeConfig
from vllm_accprobe.dump.reader import Dump, open_dump
from vllm_accprobe.dump.schema import MASKS_KNOWN


class LanguageModel(Model):
    @torch.no_grad()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.embed.weight.T


class AscendSampler(torch.nn.Module):
    """vllm-ascend 0.11 (sample/sampler.py): called as a module, with a batch's logits, or with the bonus rows of a step
    with drafts."""

    def forward(self, logits: torch.Tensor) -> Any:
        return Plain(sampled_token_ids=logits.argmax(-1, keepdim=True).int())


class AscendOld(Runner):
    """vllm-ascend 0.11's NPUModelRunner (worker/model_runner_v1.py): samples inside execute_model, has no _sample."""

    sample_tokens = None  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(pools=False)
        self.model = LanguageModel()
        self.sampler = AscendSampler()
        self.input_batch = Plain(req_ids=[], sampling_metadata=Plain(all_greedy=True))

    def execute_model(self, out: Output, intermediate_tensors: Any = None) -> Any:
        self._update_states(out)
        hidden = self.model(torch.arange(out.total_num_scheduled_tokens))
        drafts = sum(len(ids) for ids in out.scheduled_spec_decode_tokens.values())
        logits = self.model.compute_logits(hidden[-1 - drafts :])
        return self.sampler(logits[-1:]).sampled_token_ids


class Newer(Runner):
    """V1 with ``_sample``, and whatever else a mode is told by."""

    def __init__(self, **other: Any) -> None:
        super().__init__(pools=False)
        self.model = LanguageModel()
        self.sampler = AscendSampler()
        self.input_batch = Plain(req_ids=[], sampling_metadata=Plain(all_greedy=True))
        self.__dict__.update(other)

    def execute_model(self, out: Output, intermediate_tensors: Any = None) -> Any:
        self._update_states(out)
        hidden = self.model(torch.arange(out.total_num_scheduled_tokens))
        self.logits = self.model.compute_logits(hidden[-1:])

    def _sample(self, logits: torch.Tensor) -> Any:
        return self.sampler(logits)

    def sample_tokens(self, grammar: Any = None) -> Any:
        return self._sample(self.logits)


DRAFTS = Output([], Plain(req_ids=["a"], num_computed_tokens=[5]), {"a": 3}, {"a": [7, 8]})
PLAIN = more(a=8)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    for module in (room, taps, capturing):
        monkeypatch.setattr(module, "say", lines.append)
    without_vllm(monkeypatch)
    return lines


def served(where: Path, runner: Any, *steps: Output) -> CaptureObserver:
    probe, _ = captured(runner, ProbeConfig(enabled=True, dir=str(where / "dump")))
    for step in steps:
        runner.execute_model(step)
        if runner.sample_tokens is not None:
            runner.sample_tokens()
    probe.close("test")
    return probe


def sampled(dump: Dump) -> list[tuple[int, str]]:
    return [
        (r.step, r.role) for r in dump.records if r.tap == "sampler" and r.role in ("output.token", "output.top_ids")
    ]


def skips(dump: Dump) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for skip in dump.skips:
        found[skip.tap, skip.reason] += skip.count
    return found


def test_a_runner_without_sample_gives_the_samplers_tokens_and_skips_drafts(tmp_path: Path, said: list[str]) -> None:
    dump = open_dump(served(tmp_path, AscendOld(), new(a=5), DRAFTS, PLAIN).root)
    assert dump.errors == []
    both = ["output.top_ids", "output.token"]
    assert sampled(dump) == [(0, both[0]), (0, both[1]), (1, both[0]), (2, both[0]), (2, both[1])]
    assert skips(dump)["sampler", "this runner has no _sample: a step with drafts"] == 1
    tokens = [r for r in dump.records if r.role == "output.token"]
    assert [r.shape for r in tokens] == [(1,), (1,)]


@pytest.mark.parametrize(
    ("told", "mode"),
    [({"batch_sharder": object()}, names_by_release.SHARDED),
     ({"model_state": Plain(num_new_sampled_tokens_per_step=4)}, names_by_release.SEVERAL)],
)  # fmt: skip
def test_logits_of_another_order_are_skipped_and_layers_are_not(tmp_path, said, told, mode):
    dump = open_dump(served(tmp_path, Newer(**told), new(a=5), PLAIN).root)
    assert dump.errors == []
    assert sampled(dump) == []
    assert skips(dump)["sampler", mode.says] == 1
    assert [line for line in said if mode.says in line] == [f"{mode.says}: logits and tokens are skipped"]
    assert {r.step for r in dump.records if r.tap == "embed" and r.role == "output.0"} == {0, 1}


def test_each_step_whose_drafts_the_device_chooses_is_counted_and_the_reason_said_once(tmp_path, said):
    steps = (new(a=5), DRAFTS, DRAFTS, PLAIN)
    dump = open_dump(served(tmp_path, Newer(adaptive_verification=object()), *steps).root)
    assert dump.errors == []
    assert skips(dump)["<root>", names_by_release.VERIFIED.says] == 2
    assert [line for line in said if names_by_release.VERIFIED.says in line] == [
        f"{names_by_release.VERIFIED.says}: such steps are skipped (reported once)"
    ]
    assert {r.step for r in dump.records if r.role.startswith("output")} == {0, 3}


def test_a_refused_mode_serves_and_leaves_its_one_line_and_no_dump(tmp_path: Path, said: list[str]) -> None:
    """Which mark refuses which mode: test_modes.py."""
    runner = Newer()
    runner.vllm_config.parallel_config.use_sequence_parallel_moe = True
    probe = served(tmp_path, runner, new(a=5), PLAIN)
    assert said == [f"{names_by_release.MODES[2].says}: {probe.without}; serving goes on"]
    assert not (probe.root / "run.json").exists()  # nothing that a comparison could take for a capture


@pytest.mark.parametrize("told", [False, True])
def test_masks_are_known_only_where_the_runner_tells_them(tmp_path: Path, said: list[str], told: bool) -> None:
    runner = Newer() if told else Newer(input_batch=Plain(req_ids=[]))
    dump = open_dump(served(tmp_path, runner, new(a=5)).root)
    (sampler,) = [m for m in dump.modules[0] if m.tap == "sampler"]
    assert sampler.attrs.get(MASKS_KNOWN, False) is told
    assert skips(dump)["sampler", "this runner does not tell by request what masks logits"] == (not told)


def test_a_runner_with_neither_way_to_sample_is_counted(tmp_path: Path, said: list[str]) -> None:
    runner = AscendOld()
    runner.sampler = Plain()  # type: ignore[assignment]
    runner.execute_model = lambda out: runner.model(torch.arange(5))  # type: ignore[method-assign,assignment]
    probe = served(tmp_path, runner)
    assert skips(open_dump(probe.root))["sampler", "this runner has neither _sample nor sample"] == 1
