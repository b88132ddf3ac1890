"""SGLang's dumper: names, notes, ranks put together, against the reference values and against the tool itself."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from support.peer_dumps import check_metrics, expected, unpack

from vllm_accprobe.comparison.engine import compare
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.formats import open_dump, sglang

RELEASE = "0.5.23"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack("b_sglang_tp", tmp_path_factory.mktemp("sglang"))


def test_two_ranks_against_one(pair: Path) -> None:
    found = compare(pair / "golden", pair / "mine")
    wanted = expected("b_sglang_tp")
    assert check_metrics(wanted, found, "golden", "mine") == 7
    assert found.first_divergence is not None
    assert found.first_divergence["module"] == "layers.1.attn_o_partial"
    assert [o["module"] for o in found.origins] == ["layers.1.attn_o_partial"]
    assert not found.coverage["skipped"]
    assert found.coverage["pairs"] == 24


def test_a_missing_rank_is_said(pair: Path, tmp_path: Path) -> None:
    for f in (pair / "mine").iterdir():
        if "rank=1" not in f.name or "attn_q" not in f.name:
            (tmp_path / f.name).write_bytes(f.read_bytes())
    found = compare(pair / "golden", tmp_path)
    skipped = [p for p in found.pairs if p.status == "skip"]
    assert {p.tap for p in skipped} == {"layers.0.attn_q", "layers.1.attn_q"}
    assert all("missing 1 of 2" in p.message for p in skipped)


@pytest.mark.parametrize(("name", "place"), [
    ("step=0___rank=1___dump_index=9___name=attn_out___layer_id=3", ("layers.3.attn_out", "output.0")),
    ("step=0___rank=0___dump_index=9___name=logits___phase=decode", ("logits.phase=decode", "output.0")),
    ("step=0___rank=0___dump_index=9___name=grad__x___tp_rank=1", ("x", "grad.0")),
    ("step=0___rank=0___dump_index=1___name=param__model.norm.weight", ("model.norm", "param.weight")),
    ("step=0___rank=0___dump_index=1___name=non_intrusive__model.layers.0.mlp.inputs.0___layer_id=0",
     ("model.layers.0.mlp", "input.0")),
    ("step=0___rank=0___dump_index=1___name=non_intrusive__layers.0.output.1", ("layers.0", "output.1")),
    ("step=0___rank=0___dump_index=1___name=non_intrusive__inputs.ids", ("<root>", "input.ids")),
])  # fmt: skip
def test_places(name: str, place: tuple[str, str]) -> None:
    assert sglang.place_of(sglang.parse_name(name + ".pt")) == place


def _save(root: Path, name: str, rank: int, value: torch.Tensor, dims: str | None, info: dict[str, int]) -> None:
    root.mkdir(exist_ok=True)
    tags = f"step=0___rank={rank}___dump_index=1___name={name}"
    meta: dict[str, object] = {"name": name, "rank": rank, "sglang_parallel_info": info}
    torch.save({"value": value, "meta": meta | ({"dims": dims} if dims else {})}, root / f"{tags}.pt")


def test_two_groups_and_zigzag(tmp_path: Path) -> None:
    """A sequence of 8 tokens over 2 cp ranks in zigzag chunks [0,1|6,7] and [2..5], its width over 2 tp ranks."""
    whole = torch.arange(8 * 4, dtype=torch.float32).reshape(8, 4)
    _save(tmp_path / "g", "x", 0, whole, None, {})
    for cp, rows in enumerate(([0, 1, 6, 7], [2, 3, 4, 5])):
        for tp in range(2):
            info = {"cp_rank": cp, "cp_size": 2, "tp_rank": tp, "tp_size": 2}
            part = whole[rows][:, 2 * tp : 2 * tp + 2].contiguous()
            _save(tmp_path / "m", "x", 2 * cp + tp, part, "t[cp:zigzag] h[tp]", info)
    dump = open_dump(tmp_path / "m")
    assert [r.shape for r in dump.records] == [(8, 4)]
    np.testing.assert_array_equal(dump.read(dump.records[0]), whole.numpy())
    assert compare(tmp_path / "g", tmp_path / "m").verdict == "pass"


def test_partial_sums_of_two_groups(tmp_path: Path) -> None:
    """Four ranks: halves of the width, each the sum of two."""
    for tp in range(2):
        for ep in range(2):
            info = {"tp_rank": tp, "tp_size": 2, "moe_ep_rank": ep, "moe_ep_size": 2}
            value = torch.full((3, 2), float(10 * tp + ep), dtype=torch.bfloat16)
            _save(tmp_path, "y", 2 * tp + ep, value, "t h[tp,ep:partial]", info)
    dump = open_dump(tmp_path)
    np.testing.assert_array_equal(dump.read(dump.records[0]), [[1.0, 1.0, 21.0, 21.0]] * 3)


def test_ranks_without_groups(tmp_path: Path) -> None:
    """The dumper outside of SGLang: nothing but ranks."""
    for rank in range(3):
        _save(tmp_path, "x", rank, torch.full((2, 1), float(rank)), "t h[tp]", {})
    dump = open_dump(tmp_path)
    assert [(r.layout.kind, r.layout.index, r.layout.size) for r in dump.records] == [("shard", i, 3) for i in range(3)]


def test_values_that_are_no_tensors_are_counted(tmp_path: Path) -> None:
    _save(tmp_path, "x", 0, torch.ones(2), None, {})
    torch.save({"value": 3, "meta": {}}, tmp_path / "step=0___rank=0___dump_index=2___name=n.pt")
    (tmp_path / "step=0___rank=0___dump_index=3___name=bad.pt").write_bytes(b"no torch file")
    dump = open_dump(tmp_path)
    assert [r.tap for r in dump.records] == ["x"]
    assert sorted(s.reason for s in dump.skips) == ["file that cannot be read", "value that is no tensor"]
    assert len(dump.problems) == 1


def test_two_dumps_in_one_directory(tmp_path: Path) -> None:
    for run in ("dump_1", "dump_2"):
        _save(tmp_path / run, "x", 0, torch.ones(2), None, {})
    with pytest.raises(DumpError, match=r"holds 2 dumps \(dump_1, dump_2\): name one"):
        open_dump(tmp_path)


# --- the tool itself ---


@pytest.fixture(scope="module")
def dumper(pytestconfig: pytest.Config) -> Path:
    """dumper.py of the published wheel; only that file is taken out."""
    cache = pytestconfig.cache
    assert cache is not None
    home = Path(cache.mkdir("sglang"))
    file = home / f"dumper-{RELEASE}.py"
    if not file.exists():
        command = [sys.executable, "-m", "pip", "download", f"sglang=={RELEASE}", "--no-deps", "-q", "-d", str(home)]
        got = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        wheels = list(home.glob("sglang-*.whl"))
        if not wheels:
            pytest.skip(f"sglang {RELEASE} cannot be had by name: {got.stderr.strip().splitlines()[-1:]}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            file.write_bytes(wheel.read("sglang/srt/debug_utils/dumper.py"))
        wheels[0].unlink()
    return file


_SCRIPT = r"""
import sys, types, importlib.util
rank, size, where, source, fault = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5] == "fault"
class Any_:  # stands in for what the serving runtime would say
    tp_rank, tp_size, pp_rank, pp_size = rank, size, 0, 1
    moe_ep_rank, moe_ep_size, moe_tp_rank, moe_tp_size, moe_dp_rank = 0, 1, rank, size, 0
    attn_tp_rank, attn_tp_size, attn_dp_rank, attn_dp_size, attn_cp_rank, attn_cp_size = rank, size, 0, 1, 0, 1
def module(name, **content):
    m = types.ModuleType(name); m.__path__ = []; m.__dict__.update(content); sys.modules[name] = m; return m
for name in ("sglang", "sglang.srt", "sglang.srt.managers", "sglang.srt.layers", "sglang.srt.model_executor"):
    module(name)
nothing = lambda *a, **k: None
module("zmq")
module("sglang.srt.managers.io_struct", sock_recv=nothing, sock_send=nothing, wrap_as_pickle=nothing)
module("sglang.srt.runtime_context", get_parallel=lambda: Any_, get_server_args=nothing, get_serving=nothing)
module("sglang.srt.utils", get_device=lambda: "cpu")
module("sglang.srt.distributed")
attention = module("sglang.srt.layers.dp_attention", get_moe_cp_size=lambda: 1, is_dp_attention_enabled=lambda: False)
sys.modules["sglang.srt.layers"].dp_attention = attention
sys.modules["sglang.srt"].distributed = sys.modules["sglang.srt.distributed"]
module("sglang.srt.layers.logits_processor", LogitsProcessorOutput=type("L", (), {}))
module("sglang.srt.model_executor.forward_batch_info", ForwardBatch=type("F", (), {}), PPProxyTensors=type("P", (), {}))
spec = importlib.util.spec_from_file_location("dumper_of_the_wheel", source)
d = importlib.util.module_from_spec(spec); sys.modules[spec.name] = d; spec.loader.exec_module(d)
import torch
import torch.distributed as dist
if size > 1:
    dist.init_process_group("gloo", init_method=f"file://{where}.sync", rank=rank, world_size=size)
dumper = d._Dumper(config=d.DumperConfig(enable=True, dir=where, exp_name="run", enable_output_console=False))
torch.manual_seed(3)
w = [torch.randn(8, 16), torch.randn(16, 8)]
x = torch.randn(5, 8)
own = slice(rank * 16 // size, (rank + 1) * 16 // size)
for step in range(2):
    dumper.dump("x", x, dims="t h # tp:replicated")
    up = x @ w[0][:, own]
    dumper.dump("up", up, dims="t inter[tp]", layer_id=0)
    down = up @ w[1][own]
    if fault and step == 1:
        down[3] *= 1.01
    dumper.dump("down", down, dims="t h[tp:partial]", layer_id=0)
    if size > 1:
        dist.all_reduce(down)
    x = torch.tanh(down)
    dumper.dump("out", x, dims="t h # tp:replicated", layer_id=0)
    dumper.step()
if size > 1:
    dist.destroy_process_group()
"""


def _run_dumper(dumper: Path, where: Path, size: int, fault: str) -> Path:
    script = where.with_suffix(".py")
    script.write_text(_SCRIPT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(script)]
    ranks = [
        subprocess.Popen([*command, str(r), str(size), str(where), str(dumper), fault if r == size - 1 else "ok"],
                         env=environment, stderr=subprocess.PIPE, text=True)
        for r in range(size)
    ]  # fmt: skip
    for process in ranks:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err[-2000:]
    return where / "run"


def test_a_dump_of_the_tool_itself(dumper: Path, tmp_path: Path) -> None:
    golden = _run_dumper(dumper, tmp_path / "one", 1, "ok")
    found = compare(golden, _run_dumper(dumper, tmp_path / "two", 2, "fault"))
    assert (found.coverage["pairs"], found.coverage["skipped"]) == (8, {})
    assert all(p.status == "pass" for p in found.pairs if p.step == 0)
    first = found.first_divergence
    assert first is not None
    assert (first["module"], first["step"]) == ("layers.0.down", 1)


# --- the notes of SGLang's dumper: what they say of a tensor's pieces ---


@pytest.mark.parametrize(
    ("note", "dims", "cuts", "copies"),
    [
        ("t h # tp:replicated", 2, [], {"tp"}),
        ("t num_heads[tp] head_dim", 3, [("tp", 1, "join", False)], set()),
        ("t (num_heads * head_dim)[tp]", 2, [("tp", 1, "join", False)], set()),
        ("t h[tp:partial]", 2, [("tp", 1, "partial", False)], set()),
        ("b s[cp:zigzag,sp] h # ep:replicated", 3, [("sp", 1, "join", False), ("cp", 1, "join", True)], {"ep"}),
        ("1 t h[ep:partial+natural]", 3, [("ep", 2, "partial", False)], set()),
    ],
)
def test_notes(note: str, dims: int, cuts: list[tuple[str, int, str, bool]], copies: set[str]) -> None:
    found = sglang.parse_dims(note)
    assert (found.dims, set(found.copies)) == (dims, copies)
    assert [(c.group, c.dim, c.kind, c.zigzag) for c in found.cuts] == cuts
