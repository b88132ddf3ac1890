"""What accprobe size says before a capture is what the capture stores."""

from __future__ import annotations

import json
import math
import re

import pytest
from support.captures import Engines
from support.engine import Ask
from support.prompts import prompt

from vllm_accprobe.capture.taps.selection import picks
from vllm_accprobe.cli import main
from vllm_accprobe.config import ProbeConfig
from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.reader import open_dump
from vllm_accprobe.run.dump_size import per_token

pytestmark = pytest.mark.engine
MODULES = ["norm", "linear", "*.self_attn.attn,lm_head", "*.layers.1,*.layers.2.*", "RotaryEmbedding"]


@pytest.mark.parametrize(
    ("model", "env"),
    [
        ("qwen2", {}),
        ("deepseek-v2", {}),
        ("qwen2", {"VLLM_ACCPROBE_PRESET": "first-look", "VLLM_ACCPROBE_TOKENS": "0"}),
        *[("qwen2", {"VLLM_ACCPROBE_MODULES": words}) for words in MODULES],
        ("qwen2", {"VLLM_ACCPROBE_MODULES": "mlp", "VLLM_ACCPROBE_PARTS": "input"}),
    ],
    ids=lambda value: "-".join(value.values()) or "all" if isinstance(value, dict) else value,
)
def test_bytes_of_a_token(model: str, env: dict[str, str], engines: Engines) -> None:
    """One prompt in one step, so that each distinct payload is 40 rows; the sampler's few numbers are left out."""
    name = re.sub(r"[^a-z0-9]+", "-", "-".join(["dump-size", model, *env.values()]).lower())
    run = engines.run(name, model=model, asks=[Ask(prompt(40, 1), 1, id="one")], env=env)
    assert run.dump is not None
    dump = open_dump(run.dump)
    seen, rows, other = set(), 0, 0
    for record in dump.records:
        if record.payload is None or record.step is None or record.tap == "sampler":
            continue
        key = (record.rank, str(record.payload))
        nbytes = math.prod(record.shape) * DTYPES[record.dtype].itemsize
        if key not in seen and record.shape[:1] == (40,):
            rows += nbytes
        elif key not in seen and record.tap in ("lm_head", "logits_processor"):
            other += nbytes
        seen.add(key)
    config = json.loads((engines.model(model) / "config.json").read_text())
    probe = ProbeConfig.from_env(env)
    chooses = (lambda path, cls: picks(probe.modules, path, cls)) if probe.modules_left else None
    token, logits = per_token(config, chooses=chooses, parts=probe.parts)
    assert (rows, other) == (40 * token, logits)


def test_the_command(engines: Engines, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(engines.model("qwen2"))
    assert main(["size", model, "--tokens", "500", "--tp", "2", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert main(["size", model, "--tokens", "500", "--tp", "2", "--preset", "first-look", "--json"]) == 0
    look = json.loads(capsys.readouterr().out)
    assert whole["bytes_per_token"] > 5 * look["bytes_per_token"] > 0
    assert whole["bytes"] == 500 * whole["bytes_per_token"] + 16 * whole["bytes_per_logits"]
    assert main(["size", model, "--modules", "nothing.like.that"]) == 2
    assert "no module of a decoder is chosen" in capsys.readouterr().err
    assert main(["size", str(engines.model("deepseek-v2")), "--modules", "norm"]) == 2
    assert "only for inputs and outputs of all modules" in capsys.readouterr().err
    assert main(["size", model + "/none"]) == 2
    assert "the config.json of a model is needed" in capsys.readouterr().err
