"""examples/ as they stand; what two_servers.sh does for action.yml, with two real servers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from preloaded_vllm import command
from support.captures import Engines

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run(argv: list[str], at: Path, **env: str) -> subprocess.CompletedProcess[str]:
    before = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_ACCPROBE")}
    path = os.pathsep.join([str(at / "bin"), str(Path(sys.executable).parent), before["PATH"]])
    env = {"PYTHONPATH": str(ROOT), **env}
    return subprocess.run(argv, cwd=at, env=before | {"PATH": path} | env, capture_output=True, text=True, timeout=400)


def test_every_example_is_told_of() -> None:
    told = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"[{p.name}]({p.name})" in told for p in EXAMPLES.iterdir() if p.name != "README.md")


def test_plain_torch_names_the_module_that_was_changed(tmp_path: Path) -> None:
    done = run([sys.executable, str(EXAMPLES / "plain_torch.py"), "out"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("FAIL: 2.norm (")


def test_label_pairs_names_the_pair(tmp_path: Path) -> None:
    assert run([sys.executable, str(EXAMPLES / "label_pairs.py"), "out"], tmp_path).returncode == 0
    done = run(["accprobe", "labels", "out"], tmp_path)
    assert done.returncode == 1
    assert "1 pass, 1 fail" in done.stdout
    assert "scaled" in done.stdout


@pytest.mark.engine
def test_your_vllm_is_captured_and_read(engines: Engines, preloaded_vllm: Path, tmp_path: Path) -> None:
    model = engines.model("qwen2")
    (tmp_path / "bin").mkdir()
    command(preloaded_vllm, tmp_path / "bin" / "example", EXAMPLES / "your_vllm.py")
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    own |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ACCPROBE": "1", "VLLM_ACCPROBE_DIR": "out"}
    done = run([str(tmp_path / "bin" / "example"), str(model)], tmp_path, **own)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    read = run([sys.executable, str(EXAMPLES / "your_vllm.py"), "--read", "out"], tmp_path)
    assert read.returncode == 0, read.stderr
    assert "20 rows of request 0, from position 0 on (prefill)" in read.stdout
