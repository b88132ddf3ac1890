"""One real server for all tests of the gate."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_model import make
from vllm_server import Server


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here")
    return make("qwen2", tmp_path_factory.mktemp("gate") / "model")


@pytest.fixture(scope="session")
def server(served_model: Path, preloaded_vllm: Path) -> Iterator[Server]:
    """`vllm serve` with the probe on, which captures statistics of the logits; it can be forced, and cuts prompts
    of more than 64 tokens into chunks."""
    root = served_model.parent
    env = {"VLLM_ACCPROBE": "1", "VLLM_ACCPROBE_DIR": str(root / "dump"), "VLLM_ACCPROBE_TASK": "stats"}
    env |= {"VLLM_ACCPROBE_MODULES": "logits", "OMP_NUM_THREADS": "1", "VLLM_ACCPROBE_FORCE": str(root / "steps-0")}
    vllm = preloaded_vllm / "vllm"
    args = ["--enable-prompt-tokens-details", "--max-num-batched-tokens=64"]
    with Server(served_model, log=root / "server.log", env=env, args=args, vllm=vllm) as running:
        yield running
