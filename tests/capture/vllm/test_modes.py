"""Modes with other rows: a runner that is in one is refused or skipped with its line, another is let through."""

from __future__ import annotations

import sys
from types import SimpleNamespace as Plain
from typing import Any

import pytest

from vllm_accprobe.capture.core.rows import Requests, Scheduled
from vllm_accprobe.capture.vllm import relied_on
from vllm_accprobe.capture.vllm.batch import ChosenRows, EngineBatch
from vllm_accprobe.capture.vllm.vllm_compat import refusal
from vllm_accprobe.config import ProbeConfig

CONTEXT, PIECES, EXPERTS, XLITE, FLASH = relied_on.MODES[:5]


class NPUModelRunner:
    """vllm-ascend's, as far as a mode is told by it."""

    __module__ = "vllm_ascend.worker.model_runner_v1"

    def __init__(self, **parallel: Any) -> None:
        self.vllm_config = Plain(parallel_config=Plain(**parallel))
        self.input_batch = Plain(req_ids=[])


class XliteModelRunner(NPUModelRunner):
    """vllm-ascend 0.18 and 0.23, xlite/xlite_model_runner.py: 25."""


@pytest.mark.parametrize(
    ("runner", "mode"),
    [
        (NPUModelRunner(prefill_context_parallel_size=2), CONTEXT),
        (NPUModelRunner(enable_dbo=True), PIECES),
        (NPUModelRunner(ubatch_size=2), PIECES),
        (NPUModelRunner(use_sequence_parallel_moe=True), EXPERTS),
        (XliteModelRunner(), XLITE),
    ],
)
def test_a_mode_that_deals_rows_out_is_refused(runner: Any, mode: relied_on.Mode) -> None:
    assert refusal(runner) == mode.says
    assert refusal(NPUModelRunner(prefill_context_parallel_size=1, use_sequence_parallel_moe=False)) == ""


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (False, False)])
def test_flashcomm_is_asked_of_the_vendor(monkeypatch: pytest.MonkeyPatch, first: bool, second: bool) -> None:
    utils = Plain(enable_sp=lambda config: first, flashcomm2_enable=lambda: second)
    monkeypatch.setitem(sys.modules, "vllm_ascend.utils", utils)
    assert refusal(NPUModelRunner()) == (FLASH.says if first or second else "")


def test_steps_whose_drafts_the_device_chooses_have_no_rows() -> None:
    runner = Plain(adaptive_verification=object())
    assert relied_on.unplaced(runner, Plain(scheduled_spec_decode_tokens={"a": [1]})) == relied_on.VERIFIED.says
    assert relied_on.unplaced(runner, Plain(scheduled_spec_decode_tokens={})) == ""
    assert relied_on.unplaced(Plain(), Plain(scheduled_spec_decode_tokens={"a": [1]})) == ""


@pytest.mark.parametrize(
    ("runner", "says"),
    [
        (Plain(batch_sharder=object()), relied_on.SHARDED.says),
        (Plain(model_state=Plain(num_new_sampled_tokens_per_step=4)), relied_on.SEVERAL.says),
        (Plain(batch_sharder=None, model_state=Plain(num_new_sampled_tokens_per_step=1)), ""),
    ],
)
def test_logits_in_another_order_have_no_rows(runner: Any, says: str) -> None:
    """0.33: each rank gathers hidden states in the order of their owners before it computes logits."""
    assert relied_on.unsampled(runner) == says
    config = ProbeConfig()
    requests = Requests(config)
    requests.add("a", [1, 2], 2, ())
    rows = ChosenRows(EngineBatch(runner), config, requests)
    space = rows.logits([Scheduled("a", 0, 2, 0, 2)], 1)
    assert space.src == 1
    assert space.n == (0 if says else 1)


def test_sequence_parallelism_in_graphs_has_no_taps() -> None:
    def config(**passes: Any) -> Plain:
        return Plain(compilation_config=Plain(pass_config=Plain(**passes)))

    assert relied_on.in_graphs(config(enable_sp=True))
    assert relied_on.in_graphs(config(enable_sequence_parallelism=True))
    assert relied_on.in_graphs(config(enable_sp=False)) == relied_on.in_graphs(Plain()) == ""
