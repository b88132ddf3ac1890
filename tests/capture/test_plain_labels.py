"""ait's example on a real model, a plain script: a chat loop, set_task_id, a patched model file, both levels."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_model import make

from vllm_accprobe.cli import main

ROOT = Path(__file__).resolve().parents[2]
SEED_COLUMNS = [
    "data_id", "pta_data_path", "pta_dtype", "pta_shape", "acl_data_path", "acl_dtype", "acl_shape", "cmp_flag",
    "cosine_similarity", "max_relative_error", "mean_relative_error", "relative_euclidean_distance",
    "cmp_fail_reason",
]  # fmt: skip
SCRIPT = """
import os, sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM
from atb_file import write
from vllm_accprobe import gen_id, set_label, set_task_id

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
attention = model.model.layers[1].self_attn
forward, inner = attention.forward, {}

def patched(*args, **kwargs):  # low level: the library's own attention, which it writes to a file
    out = forward(*args, **kwargs)
    data_id = gen_id()
    set_label("pta", data_id, data_val=out[0])
    set_label("acl", data_id, tensor_path="0_Model/1_Layer/3_SelfAttention/after/outTensor0.bin")
    inner["attention"] = out[0]
    return out

attention.forward = patched
for turn in range(2):
    set_task_id()
    ids = torch.tensor([[3, 1, 4, 1, 5, 9 + turn]])
    hidden = model(ids, output_hidden_states=True, use_cache=False).hidden_states[-1]
    acl_model_out = (hidden.to(torch.float16),)
    data_id = gen_id()
    set_label("pta", data_id, hidden)  # high level: the model's output
    set_label("acl", data_id, acl_model_out[0])
    task = os.environ["AIT_CMP_TASK_ID"]
    place = Path(os.environ["ACLTRANSFORMER_HOME_PATH"], "tensors", str(os.getpid()), task)
    own = inner["attention"].detach()[0].to(torch.float16)  # the library knows no batch dimension
    if turn:
        own[2] = 0
    write(place / "0_Model/1_Layer/3_SelfAttention/after/outTensor0.bin", own.numpy(), 1)
torch.save({"hidden": hidden.detach(), "attention": inner["attention"].detach()}, sys.argv[2])
"""


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("chat")
    model = make("qwen2", root / "model")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_ACCPROBE", "AIT_", "ATB_"))}
    env |= {
        "PYTHONPATH": str(ROOT / "tests" / "labels"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "VLLM_ACCPROBE_DIR": str(root / "dump"), "ACLTRANSFORMER_HOME_PATH": str(root / "acl"),
    }  # fmt: skip
    command = [sys.executable, "-c", SCRIPT, str(model), str(root / "kept.pt")]
    done = subprocess.run(command, env=env, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert f"accprobe: labels go to {root / 'dump'}" in done.stderr
    return root


def rows(out: Path) -> list[dict[str, str]]:
    with open(out / "labels.csv", newline="") as f:
        reader = csv.DictReader(f)
        assert reader.fieldnames == SEED_COLUMNS
        return list(reader)


def test_both_levels_of_both_turns(chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(chat / "dump"), "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "FAIL: 4 labelled pairs: 3 pass, 1 fail"
    table = rows(tmp_path)
    assert [row["cmp_flag"] for row in table] == ["True"] * 4
    assert [row["acl_dtype"] for row in table] == ["float16"] * 4
    assert [row["pta_dtype"] for row in table] == ["float32"] * 4
    low = [row for row in table if row["acl_data_path"].endswith(".bin")]
    high = [row for row in table if row not in low]
    assert [row["acl_shape"] for row in low] == [row["pta_shape"].replace("[1, ", "[") for row in low]
    assert [row["acl_shape"] for row in high] == [row["pta_shape"] for row in high]
    assert [bool(row["cmp_fail_reason"]) for row in low] == [False, True]
    assert [bool(row["cmp_fail_reason"]) for row in high] == [False, False]


def test_the_numbers_are_the_formulas(chat: Path, tmp_path: Path) -> None:
    """By hand, in float64, for the second turn: msit's formulas, see docs/labels.md."""
    import torch

    main(["compare", str(chat / "dump"), "--out", str(tmp_path)])
    kept = torch.load(chat / "kept.pt", weights_only=True)
    facts = json.loads((tmp_path / "labels.json").read_text())
    found = {p["acl"]["path"].endswith(".bin"): p for p in facts["pairs"] if p["step"] == 1}
    spoilt = kept["attention"].to(torch.float16).clone()
    spoilt[0, 2] = 0
    for low, golden, mine in (
        (False, kept["hidden"], kept["hidden"].to(torch.float16)),
        (True, kept["attention"], spoilt),
    ):
        g, m = golden.double().flatten(), mine.double().flatten()
        relative = torch.where(g.abs() > 2.0**-23, (m / g - 1).abs(), 0.0)
        expected = {
            "cosine_similarity": float(g @ m / (g.norm() * m.norm())),
            "max_relative_error": float(relative.max()),
            "mean_relative_error": float(relative.mean()),
            "relative_euclidean_distance": float((g - m).norm() / g.norm()),
        }
        for name, value in expected.items():
            assert found[low][name] == pytest.approx(value, rel=1e-9), name
