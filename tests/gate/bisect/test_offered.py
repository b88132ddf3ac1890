"""What a vLLM can be told, from its source; and whose vLLM it is."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from vllm_accprobe.gate.bisect.edits import Offered, command, interpreter, options_offered
from vllm_accprobe.gate.bisect.edits import read_offered as read

ARGS = 'parser.add_argument("--enforce-eager", **x)\nparser.add_argument("--block-size")\n'
COMPILATION = "class PassConfig:\n    fuse_a: bool = None\n    limit: int = 3\n    fuse_b: bool = Field(default=True)\n"
KERNEL = "class IrOpPriorityConfig:\n    rms_norm: list[str] = Field()\n    other: int = 1\n"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name, text in (
        ("engine/arg_utils.py", ARGS), ("config/compilation.py", COMPILATION), ("config/kernel.py", KERNEL),
        ("envs.py", 'x = {"VLLM_USE_V2_MODEL_RUNNER": 1}\n'),
        ("model_executor/a.py", 'from x import CustomOp\n@CustomOp.register("rms_norm")\nclass A: ...\n'),
    ):  # fmt: skip
        path = tmp_path / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    return tmp_path / "vllm"


def test_it_stands_in_the_source(package: Path) -> None:
    there = read(package, "vllm=0.99")
    assert "--enforce-eager" in there
    assert "--async-scheduling" not in there
    assert "VLLM_USE_V2_MODEL_RUNNER" in there
    assert (there.passes, there.ir_ops, there.custom_ops) == (("fuse_a", "fuse_b"), ("rms_norm",), ("rms_norm",))


def test_the_commands_own_python_is_asked_and_nothing_is_imported(package: Path, tmp_path: Path) -> None:
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(package.parent)}
    there = options_offered(command([sys.executable, "-m", "vllm.entrypoints.openai.api_server"], environ))
    assert there.options is not None
    assert "--block-size" in there


def test_a_script_names_its_python(tmp_path: Path) -> None:
    script = tmp_path / "vllm"
    environ = {"PATH": str(tmp_path)}
    for text, found in (
        (f"#!{sys.executable}\n", sys.executable),
        (f"#!/bin/sh\n'''exec' {sys.executable} \"$0\" \"$@\"\n", sys.executable),
        ("#!/bin/sh\ndocker run vllm\n", None),
        ("", None),
    ):
        script.write_text(text)
        script.chmod(0o700)
        assert interpreter(("vllm", "serve", "M"), environ) == found
    assert interpreter(("ssh", "host", "nothing"), environ) is None


def test_what_is_not_known_is_taken_to_be_there(tmp_path: Path) -> None:
    assert "--anything" in Offered()
    assert options_offered(command(["ssh", "host", "vllm-serve"], {"PATH": str(tmp_path)})) == Offered()
    assert read(tmp_path).options is None


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here")
def test_the_installed_one() -> None:
    there = options_offered(command([sys.executable, "-m", "vllm.entrypoints.openai.api_server"], os.environ))
    for option in ("--enforce-eager", "--enable-prefix-caching", "--async-scheduling", "--max-num-batched-tokens",
                   "--compilation-config", "--ir-op-priority", "--block-size", "--kv-cache-dtype"):  # fmt: skip
        assert option in there
    assert {"rms_norm", "silu_and_mul", "rotary_embedding"} <= set(there.custom_ops)
    assert "fuse_norm_quant" in there.passes
    assert "rms_norm" in there.ir_ops
    assert "vllm" in there.version
