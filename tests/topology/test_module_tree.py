"""The tree on the terminal, literally: layers that are alike share a line, and a level ends it."""

from pathlib import Path

import pytest
from topology.test_data_flow import capture
from topology.test_model_graph import write

from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.formats import open_dump
from vllm_accprobe.topology import data_flow

TREE = """\
<root>  Layered  [8] → [1, 50] bfloat16
├─ embed  Embedding  [8] → [8, 32] bfloat16, weight [50, 32]
├─ layers.0 … layers.11  12 x Layer  [8, 32] → [8, 32] bfloat16
│  ├─ norm  LayerNorm  [8, 32] → [8, 32] bfloat16, weight [32], bias [32]
│  ├─ mixer  Mixer  [8, 32] → [8, 32] bfloat16
│  │  ├─ qkv  Linear  [8, 32] → [8, 96] bfloat16, weight [96, 32], bias [96]
│  │  ├─ core  Core  [8, 32] [8, 32] [8, 32] → [8, 32] bfloat16
│  │  └─ out  Linear  [8, 32] → [8, 32] bfloat16, weight [32, 32], bias [32]
│  ├─ norm2  LayerNorm  [8, 32] → [8, 32] bfloat16, weight [32], bias [32]
│  └─ gated  Gated  [8, 32] → [8, 32] bfloat16
│     ├─ gate  Linear  [8, 32] → [8, 32] bfloat16, weight [32, 32], bias [32]
│     ├─ up  Linear  [8, 32] → [8, 32] bfloat16, weight [32, 32], bias [32]
│     ├─ down  Linear  [8, 32] → [8, 32] bfloat16, weight [32, 32], bias [32]
│     └─ act  SiLU  [8, 32] → [8, 32] bfloat16
├─ norm  LayerNorm  [8, 32] → [8, 32] bfloat16, weight [32], bias [32]
└─ head  Linear  [1, 32] → [1, 50] bfloat16, weight [50, 32], bias [50]"""


def test_twelve_layers_on_sixteen_lines(tmp_path: Path) -> None:
    root = data_flow.of_dump(open_dump(capture(tmp_path / "d", layers=12)))
    assert "\n".join(data_flow.lines(root)) == TREE
    outer = [line for line in TREE.splitlines() if not line.startswith(("│", "   "))]
    assert data_flow.lines(root, 1) == outer
    assert data_flow.lines(root, 0) == outer[:1]


def test_atb_s_topology(tmp_path: Path) -> None:
    root = data_flow.of_atb(write(tmp_path))
    assert data_flow.lines(root, 2) == [
        "Llama_model",
        "├─ 0_embed  WordEmbedding",
        "├─ 1_Llama_layer_0 … 3_Llama_layer_2  3 x Llama_layer",
        "│  ├─ 0_norm  RmsNormOperation",
        "│  ├─ 1_attention  Attention",
        "│  └─ 2_add  ElewiseOperation",
        "└─ 4_head  LmHead",
    ]


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(DumpError, match="is no topology"):
        data_flow.of_atb(tmp_path / "x.json")
