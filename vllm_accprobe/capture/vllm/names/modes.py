"""Modes of vLLM and of vendors in which rows are others than the scheduler's, and what is done about each.

The problem: some modes deal rows out to ranks, reorder them, or decide on the device which there are; a tensor with as
many rows as the step has tokens would then be written under wrong names. The idea: each mode is declared once: how a
running engine shows it, how a wheel's source shows that a release has it, and what follows: the capture is refused, or
a part of it is skipped, in one line; never a wrong row. Not here: who asks (vllm_compat.py, runner.py, sampling.py),
who reads wheels (doctor/wheel).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

REFUSED, SKIPPED, WORKS = "refused", "skipped", "works"


@dataclass(frozen=True)
class Mode:
    """name: in a few words. fate: REFUSED, SKIPPED or WORKS. says: the line, or what is done. marks: ``file:text``,
    where a source shows that it has the mode: the file's end, and what stands in a line of it. on: whether a runner is
    in it, None where nothing has to be asked."""

    name: str
    fate: str
    says: str
    marks: tuple[str, ...]
    on: Callable[[Any], bool] | None = None


def _parallel(runner: Any) -> Any:
    return getattr(getattr(runner, "vllm_config", None), "parallel_config", None)


def _context(runner: Any) -> bool:
    return int(getattr(_parallel(runner), "prefill_context_parallel_size", 1) or 1) > 1


def _pieces(runner: Any) -> bool:
    config = _parallel(runner)
    return bool(getattr(config, "enable_dbo", False)) or int(getattr(config, "ubatch_size", 0) or 0) > 1


def _experts(runner: Any) -> bool:
    return getattr(_parallel(runner), "use_sequence_parallel_moe", False) is True


def _xlite(runner: Any) -> bool:
    return any(kind.__name__ == "XliteModelRunner" for kind in type(runner).__mro__)


def _flash(runner: Any) -> bool:
    """As the vendor's own functions say it, which read settings of several names."""
    utils = sys.modules.get("vllm_ascend.utils")
    if utils is None or not any(kind.__module__.startswith("vllm_ascend.") for kind in type(runner).__mro__):
        return False
    config = getattr(runner, "vllm_config", None)
    enabled, second = getattr(utils, "enable_sp", None), getattr(utils, "flashcomm2_enable", None)
    return bool(enabled is not None and enabled(config)) or bool(second is not None and second())


def _sharded(runner: Any) -> bool:
    return getattr(runner, "batch_sharder", None) is not None


def _verified(runner: Any) -> bool:
    return getattr(runner, "adaptive_verification", None) is not None


def _several(runner: Any) -> bool:
    count = getattr(getattr(runner, "model_state", None), "num_new_sampled_tokens_per_step", 1)
    return isinstance(count, int) and count != 1


CONTEXT = Mode(
    "prefill context parallelism", REFUSED, "prefill context parallelism deals a prompt's rows to several ranks",
    ("config/parallel.py:prefill_context_parallel_size",), _context,
)  # fmt: skip
PIECES = Mode(
    "dual-batch overlap", REFUSED, "dual-batch overlap (--enable-dbo) runs a batch in pieces, on two threads",
    ("config/parallel.py:enable_dbo:",), _pieces,
)  # fmt: skip
EXPERTS = Mode(
    "sequence parallelism of experts", REFUSED,
    "expert, tensor and data parallelism together deal the rows of expert blocks to several ranks",
    ("config/parallel.py:def use_sequence_parallel_moe",), _experts,
)  # fmt: skip
XLITE = Mode(
    "xlite", REFUSED, "xlite runs the model without Python, and no module is seen: start without xlite_graph_config",
    ("xlite/xlite_model_runner.py:class XliteModelRunner",), _xlite,
)  # fmt: skip
FLASH = Mode(
    "FlashComm and sequence parallelism", REFUSED,
    "FlashComm or sequence parallelism deals rows to several ranks: start with VLLM_ASCEND_ENABLE_FLASHCOMM1=0, "
    "VLLM_ASCEND_ENABLE_FLASHCOMM=0 and VLLM_ASCEND_FLASHCOMM2_PARALLEL_SIZE=0, without enable_shared_expert_dp",
    ("vllm_ascend/platform.py:if enable_sp(", "vllm_ascend/utils.py:def enable_sp("), _flash,
)  # fmt: skip
SHARDED = Mode(
    "batch-sharded sampling", SKIPPED, "batch-sharded sampling: each rank has other rows of the logits",
    ("worker/gpu/model_runner.py:if self.batch_sharder is not None",), _sharded,
)  # fmt: skip
SEVERAL = Mode(
    "several tokens a step", SKIPPED, "this model samples several tokens of a request in a step",
    ("worker/gpu/model_runner.py:num_new_sampled_tokens_per_step",), _several,
)  # fmt: skip
VERIFIED = Mode(
    "drafts admitted on the device", SKIPPED, "which drafts of a step are verified is decided on the device (dspark)",
    ("worker/gpu/model_runner.py:if adaptive_verification is not None",), _verified,
)  # fmt: skip

MODES = (
    CONTEXT, PIECES, EXPERTS, XLITE, FLASH, SHARDED, SEVERAL, VERIFIED,
    Mode(
        "drafts taken back in a copy of the scheduler's output", WORKS,
        "the runner's own copy is read, after its _update_states",
        (
            "worker/model_runner_v1.py:scheduler_output = deepcopy(",
            "worker/gpu_model_runner.py:scheduler_output = deepcopy(",
            "worker/gpu_model_runner.py:num_scheduled_tokens_copy =",
        ),
    ),
    Mode(
        "sampling inside execute_model, without _sample", WORKS,
        "tokens are taken from the sampler's result; those of a step with drafts are skipped",
        ("vllm_ascend/worker/model_runner_v1.py:scheduler_output.grammar_bitmask is not None",),
    ),
    Mode(
        "five seconds at shutdown", WORKS, "the front end waits while a dump is written, up to 30 s, in every release",
        ("v1/utils.py:def shutdown(procs",),
    ),
    Mode(
        "Ray", WORKS,
        "ray.kill leaves no time: what the writer's flush timer (0.2 s) gave to the disk is in the dump, not closed",
        ("v1/executor/ray_executor.py:ray.kill(", "executor/ray_distributed_executor.py:ray.kill("),
    ),
)  # fmt: skip
"""In the order in which a report names them. What nothing has to be asked for is read in the source, and handled."""


def refused(runner: Any) -> str:
    """Why this runner cannot be observed at all, "" where it can."""
    return _first(REFUSED, runner)


def unsampled(runner: Any) -> str:
    """Why what this runner samples cannot be told by rows, "" where it can. Known once its model is loaded."""
    return next((mode.says for mode in (SHARDED, SEVERAL) if mode.on is not None and mode.on(runner)), "")


def unplaced(runner: Any, out: Any) -> str:
    """Why the rows of this step cannot be told, "" where they can. out: the scheduler's output."""
    drafts = getattr(out, "scheduled_spec_decode_tokens", None)
    return VERIFIED.says if drafts and _verified(runner) else ""


def in_graphs(vllm_config: Any) -> str:
    """Why taps inside compiled graphs would see rows of one rank only, "" where they see all."""
    passes = getattr(getattr(vllm_config, "compilation_config", None), "pass_config", None)
    if getattr(passes, "enable_sp", False) is True or getattr(passes, "enable_sequence_parallelism", False) is True:
        return "sequence parallelism in compiled graphs deals rows to several ranks"
    return ""


def _first(fate: str, runner: Any) -> str:
    return next((mode.says for mode in MODES if mode.fate == fate and mode.on is not None and mode.on(runner)), "")
