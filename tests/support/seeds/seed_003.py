"""The lines of document 003: labels (``set_label``), and ``ait debug compare aclcmp``."""

import csv
import os
import sys
from pathlib import Path

from support.seeds.columns import LABELS
from support.seeds.line import Line

import vllm_accprobe
from vllm_accprobe.cli import main

EXPORTS = {
    "ACLTRANSFORMER_SAVE_TENSOR": "1", "ACLTRANSFORMER_SAVE_TENSOR_MAX": "2",
    "ACLTRANSFORMER_SAVE_TENSOR_RUNNER": "SelfAttentionOpsChatglm6bRunner",
}  # fmt: skip
COMMAND = "bash run_performance.sh patches/models/modeling_chatglm_model.py"

RUNNER = "0_ChatGlm6BModelEncoderTorch/0_ChatGlm6BLayerEncoderOperationGraphRunner/3_SelfAttentionOpsChatglm6bRunner"
_MODEL = f'''"""main_performance.py with the document's three changes; numbers stand in for the model."""
import os
from pathlib import Path

import numpy as np

from vllm_accprobe import gen_id, set_label, set_task_id


def library(values):  # what ATB's ancestor does on a card: a tensor file per execution
    data = values.tobytes()
    head = {{"$Version": "1.0", "$Object.Count": 1, "$Object.Length": len(data), "format": 2, "dtype": 0,
            "dims": ",".join(map(str, values.shape)), "$Object.data": f"0,{{len(data)}}"}}
    file = Path(os.environ["ATB_OUTPUT_DIR"], "tensors", "thread_1", "0", "{RUNNER}", "after", "outTensor0.bin")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes("".join(f"{{k}}={{v}}\\n" for k, v in head.items()).encode() + b"$End=1\\n" + data)


hidden_states = np.linspace(-1, 1, 64, dtype="f4").reshape(4, 16)
while True:
    set_task_id()
    acl_model_out = (hidden_states.copy(),)
    data_id = gen_id()
    set_label("pta", data_id, hidden_states)
    set_label("acl", data_id, acl_model_out[0])
    attention_output = hidden_states * 2
    data_id = gen_id()
    set_label("pta", data_id, data_val=attention_output)
    set_label("acl", data_id, tensor_path="0_ChatGlm6BModelEncoderTorch/"
              "0_ChatGlm6BLayerEncoderOperationGraphRunner"
              "/3_SelfAttentionOpsChatglm6bRunner/after/outTensor0.bin")
    assert os.environ["ACLTRANSFORMER_SAVE_TENSOR"] == "1"
    assert os.environ["ACLTRANSFORMER_SAVE_TENSOR_MAX"] == "2"
    assert os.environ["ACLTRANSFORMER_SAVE_TENSOR_RUNNER"] == "SelfAttentionOpsChatglm6bRunner"
    library(attention_output)
    break
'''


def prepare(home: Path) -> None:
    """What the lines read, below an empty folder."""
    model = home / "patches" / "models" / "modeling_chatglm_model.py"
    model.parent.mkdir(parents=True)
    model.write_text(_MODEL)
    (home / "run_performance.sh").write_text(f'exec {sys.executable} "$1"\n')
    exports = "".join(f"export {name}={value}\n" for name, value in EXPORTS.items())
    (home / "exports.sh").write_text(f'{exports}exec {sys.executable} "$1"\n')


def _signatures(home: Path) -> None:
    """set_label(data_src, data_id, data_val, tensor_path), gen_id(), set_task_id(): by the document's names; outside of
    a run that has labels on they do nothing."""
    data_id = vllm_accprobe.gen_id()
    assert isinstance(data_id, str)
    vllm_accprobe.set_label(data_src="pta", data_id=data_id, data_val=None, tensor_path="x")
    assert callable(vllm_accprobe.set_task_id)


def _with_exports(home: Path) -> None:
    """The document's lines 120 to 130: what is exported where the command is typed also chooses what ATB writes."""
    os.environ.update(EXPORTS)
    try:
        assert main(["labels", "--exec", COMMAND]) == 0
    finally:
        for name in EXPORTS:
            del os.environ[name]
    _table(home, "")


def _table(home: Path, said: str) -> None:
    with (home / "accprobe-labels" / "labels.csv").open(newline="") as f:
        rows = list(csv.DictReader(f))
    assert tuple(rows[0]) == LABELS
    assert [row["cmp_flag"] for row in rows] == ["True", "True"]
    high, low = sorted(rows, key=lambda row: row["acl_data_path"].endswith(".bin"))
    assert low["acl_data_path"] == "rank0000/label-00000.bin"  # the library's file, copied into the dump
    assert (high["pta_dtype"], high["pta_shape"], high["cmp_fail_reason"]) == ("float32", "[4, 16]", "")
    for row in rows:
        assert float(row["cosine_similarity"]) == 1
        assert float(row["max_relative_error"]) == float(row["mean_relative_error"]) == 0
        assert float(row["relative_euclidean_distance"]) == 0


LINES: list[Line] = [
    Line(31, "set_label(data_src, data_id, data_val, tensor_path); gen_id(); set_task_id()", _signatures,
         also=(46, 54)),
    Line(65, "ait debug compare aclcmp xx_args", ("labels",), 2, ("name a DUMP, or with --exec a command",)),
    Line(130, 'ait debug compare aclcmp --exec "bash run_performance.sh patches/models/modeling_chatglm_model.py"',
         _with_exports, ends_at="ATB's ancestor, whose file the script writes itself",
         also=(83, 98, 99, 100, 101, 107, 108, 109, 110, 120, 121, 123)),
    Line(130, "the same with --type tensor, where the script exports what it needs",
         ("labels", "--exec", COMMAND.replace("run_performance", "exports"), "--type", "tensor", "--out", "typed"),
         prints=("PASS: 2 labelled pairs", "wrote typed/labels.csv"), ends_at="the same"),
]  # fmt: skip
