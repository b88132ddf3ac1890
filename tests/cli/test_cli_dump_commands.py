"""summary, show, convert and repair on a real dump."""

import json

import numpy as np
import pytest
from cli_dumps import TAPS, make, value

from vllm_accprobe.cli import main


@pytest.fixture
def dump(tmp_path):
    return make(tmp_path / "d")


def lines(capsys):
    out = capsys.readouterr()
    assert out.err == ""
    return out.out.splitlines()


def test_show_saves(dump, tmp_path, capsys):
    from safetensors import safe_open

    tap = f"{TAPS[2][0]}/output.0"
    for name, more in (("a.npy", []), ("b.npy", ["--rows", "1,4"]), ("c.safetensors", [])):
        assert main(["inspect", str(dump), tap, "--step", "0", *more, "--save", str(tmp_path / name)]) == 0
    whole = value(0, 2, 1, 5)
    a = np.load(tmp_path / "a.npy")
    assert a.dtype == np.float32
    assert a.tolist() == whole.tolist()
    assert np.load(tmp_path / "b.npy").tolist() == whole[[1, 4]].tolist()
    with safe_open(tmp_path / "c.safetensors", "np") as f:
        assert list(f.keys()) == [tap]
        assert (f.get_slice(tap).get_dtype(), f.get_slice(tap).get_shape()) == ("BF16", [5, 8])
    capsys.readouterr()
    assert main(["inspect", str(dump), tap, "--step", "0", "--save", str(tmp_path / "a.npy")]) == 2
    assert "exists: nothing is overwritten" in capsys.readouterr().err


def created(group):
    """The names in a group in the order in which they were made."""
    import h5py

    order = []
    group.id.links.iterate(lambda n: order.append(n.decode()), idx_type=h5py.h5.INDEX_CRT_ORDER)
    return order


def test_convert_to_h5_in_the_layout_of_torch_xray(dump, tmp_path, capsys):
    h5py = pytest.importorskip("h5py")
    out = tmp_path / "x.h5"
    assert main(["convert", str(dump), str(out)]) == 0
    said = lines(capsys)
    assert said[0].startswith(f"wrote {out} (rank 0, 27 tensors, ")
    assert said[1] == "note: 24 tensors of bfloat16 or 8-bit floats are float32 there (exact)"
    with h5py.File(out) as f:
        assert created(f["0"]) == [
            "model.embed_tokens.VocabParallelEmbedding.0.forward_input.0",
            "model.embed_tokens.VocabParallelEmbedding.0.forward_output.0",
            "model.layers.0.input_layernorm.RMSNorm.0.forward_params.weight",
            "model.layers.0.input_layernorm.RMSNorm.0.forward_input.0",
            "model.layers.0.input_layernorm.RMSNorm.0.forward_output.0",
            "model.layers.0.post_attention_layernorm.RMSNorm.1.forward_params.weight",
            "model.layers.0.post_attention_layernorm.RMSNorm.1.forward_input.0",
            "model.layers.0.post_attention_layernorm.RMSNorm.1.forward_output.0",
            "model.layers.0.mlp.down_proj.RowParallelLinear.0.forward_params.weight",
            "model.layers.0.mlp.down_proj.RowParallelLinear.0.forward_input.0",
            "model.layers.0.mlp.down_proj.RowParallelLinear.0.forward_output.0",
        ]
        assert [len(f[step]) for step in ("0", "1", "2")] == [11, 8, 8]
        data = f["2"]["model.layers.0.mlp.down_proj.RowParallelLinear.0.forward_input.0"]
        assert data.dtype == np.float32
        assert data[()].tolist() == value(2, 3, 0, 2).tolist()
        noted = {"tap": TAPS[3][0], "role": "input.x", "dtype": "bfloat16"}
        assert {k: v for k, v in data.attrs.items() if k != "accprobe"} == noted
        assert json.loads(data.attrs["accprobe"]) == {**noted, "call": 0, "class": TAPS[3][1]}
    assert main(["convert", str(dump), str(out)]) == 2
    assert "exists: nothing is overwritten" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir() if "part" in p.name] == []


def test_convert_to_npz_of_two_ranks(tmp_path, capsys):
    dump = make(tmp_path / "d", ranks=2)
    assert main(["convert", str(dump), str(tmp_path / "x.npz")]) == 2
    assert "2 ranks: name a directory" in capsys.readouterr().err
    assert main(["convert", str(dump), str(tmp_path / "out"), "*norm*", "--to", "npz", "--step", "1"]) == 0
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "globalrank-0_localrank-0.npz",
        "globalrank-1_localrank-1.npz",
    ]
    with np.load(tmp_path / "out/globalrank-1_localrank-1.npz") as z:
        assert len(z.files) == 6
        assert z[f"1/{TAPS[1][0]}/output.0"].tolist() == value(1, 1, 1, 2).tolist()
        assert z[f"param/{TAPS[1][0]}/param.weight"].dtype == np.float32
