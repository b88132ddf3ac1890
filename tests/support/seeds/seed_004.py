"""The lines of document 004: dump of ATB and of torch, compare, torchair. opcheck's and errcheck's stand elsewhere."""

import csv
import json
import shutil
from pathlib import Path

import pytest
from support.peer_dumps import unpack
from support.seeds.joined import joined
from support.seeds.line import Line

from vllm_accprobe.config import ConfigError
from vllm_accprobe.formats import open_dump

_prepare_others, _OTHERS = joined("004", "atb_lines", "errcheck_lines")
GE, FX, OFF = "dump/dump_20261120101010", "gm_20261120101010_dump", "off/dump_20261120101010"
NO_ATB = "ATB itself, which needs CANN and a card: run.sh stands in for it and writes where it is told to"


def prepare(home: Path) -> None:
    """What the lines read, below an empty folder."""
    (home / "patches" / "models").mkdir(parents=True)
    (home / "patches" / "models" / "modeling_xxx.py").touch()
    packed = home / "packed"
    atb, pair, graphs = (unpack(name, packed) for name in ("e_atb", "e_atb_vs_torch", "f_torchair"))
    for side in ("golden", "mine"):  # as the document's release calls it
        shutil.copytree(next((atb / side).iterdir()), home / f"atb_{side}" / "ait_dump")
    shutil.copytree(next((pair / "golden").iterdir()), home / "torch" / "ait_dump")
    shutil.copytree(next((pair / "mine").iterdir()), home / "atb" / "ait_dump")
    shutil.copytree(pair / "op_mapping", home / "op_mapping")
    shutil.copytree(next((graphs / "ge_mine").iterdir()), home / GE)
    shutil.copytree(next((graphs / "ge_nofusion_golden").iterdir()), home / OFF)
    shutil.copytree(next((graphs / "fx_golden").rglob("gm_*_dump")), home / FX)
    (home / "fusion_switch.json").write_text('{"Switch": {"GraphFusion": {"ALL": "off"}, "UBFusion": {"ALL": "off"}}}')
    model = next((home / "atb_golden" / "ait_dump" / "model").glob("*/*.json"))
    shutil.copyfile(model, home / "model.json")
    layer = next(n for n in json.loads(model.read_text())["nodes"] if n["opType"].endswith("layer"))
    (home / "XXX_layer.json").write_text(json.dumps(layer))
    (home / "run.sh").write_text(
        'where="${ATB_OUTPUT_DIR}tensors/0_7/0/0_Linear/after"\n'
        'mkdir -p "$where"; cp first.bin "$where/outtensor0.bin"\n'
        'case "$ATB_DUMP_TYPE" in *model*|*layer*)\n'
        '  mkdir -p "${ATB_OUTPUT_DIR}model/7" "${ATB_OUTPUT_DIR}layer/7"\n'
        '  cp model.json "${ATB_OUTPUT_DIR}model/7/"; cp XXX_layer.json "${ATB_OUTPUT_DIR}layer/7/";; esac\n'
        "env | grep ^ATB_ > last_environment\n"
    )
    file = next((home / "atb_golden").rglob("6_LmHead/after/outtensor0.bin"))
    shutil.copyfile(file, home / "first.bin")
    shutil.copyfile(file, home / "xx.bin")
    _as_torch(home / "xx.bin", home / "xx.pth")
    _prepare_others(home)


def _as_torch(source: Path, target: Path) -> None:
    import torch

    from vllm_accprobe.formats.single import first

    tensor = first(source)
    bits = torch.from_numpy(tensor.read().copy())
    torch.save(bits.view(getattr(torch, tensor.dtype)).reshape(tensor.shape), target)


def _dump(at: int, says: str, *words: str, **told: str) -> Line:
    """``ait llm dump --exec ...`` with an option; told: what ATB's variables must say."""
    out = () if {"-o", "--output"} & set(words) else ("-o", f"out-{at}-{'-'.join(words).strip('-').replace(' ', '')}")

    def check(home: Path, said: str) -> None:
        found = dict(line.split("=", 1) for line in (home / "last_environment").read_text().splitlines())
        assert {name: found.get(name) for name in told} == told

    argv = ("run", "--exec", "bash run.sh patches/models/modeling_xxx.py", *words, *out)
    return Line(at, f"ait llm dump --exec ... {says}", argv, prints=("ATB wrote",), ends_at=NO_ATB, check=check)


def _drawn(home: Path, said: str) -> None:
    atb = home / "drawn" / "ait_dump"
    assert (atb / "model/7/model.onnx").stat().st_size > 500
    assert (atb / "layer/7/XXX_layer.onnx").stat().st_size > 500


def _rank_folder(home: Path, said: str) -> None:
    dump = open_dump(home / "aasx" / "sss" / "ait_dump")
    assert [(r.tap, r.role, r.step, r.rank) for r in dump.records] == [("0_Linear", "output.0", 0, 0)]


def _topology(home: Path) -> None:
    from vllm_accprobe import atb_json_to_onnx

    onnx = pytest.importorskip("onnx")
    model_level = 1
    layer_topo_info = "./XXX_layer.json"
    atb_json_to_onnx(layer_topo_info, model_level)
    outer = onnx.load("XXX_layer.onnx")
    onnx.checker.check_model(outer)
    atb_json_to_onnx(layer_topo_info)
    assert len(onnx.load("XXX_layer.onnx").graph.node) > len(outer.graph.node) == 6


def _hook(home: Path) -> None:
    """register_hook(model, DumpConfig(...)): ours is one dump with a journal; its steps are the token ids."""
    import torch

    from vllm_accprobe import DumpConfig, register_hook

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    dump_config = DumpConfig(dump_path="./ait_dump", token_range=[0], module_list=[], tensor_part=2, device_id=None)
    hook = register_hook(model, dump_config, hook_type="dump_data")
    model(torch.ones(2, 4))
    hook.close()
    taps = {(r.tap, r.role) for r in open_dump(home / "ait_dump").records if r.step == 0}
    assert {("0", "input.input"), ("0", "output.0"), ("1", "output.0")} <= taps


def _torch_layout(home: Path) -> None:
    """{DUMP_DIR}/ait_dump/torch_tensors/{device_id}_{PID}/{TID}, model_tree.json."""
    root = home / "torch" / "ait_dump"
    (process,) = (root / "torch_tensors").iterdir()
    for named in (root.parent, root, root / "torch_tensors", process):
        dump = open_dump(named)
        assert ("model.layers.0.mlp.down_proj", "Linear") in {(r.tap, r.cls) for r in dump.records}


def _csv(out: str, least: int) -> object:
    def check(home: Path, said: str) -> None:
        with (home / out / "compare.csv").open(newline="") as f:
            assert sum(row["status"] in ("pass", "fail") for row in csv.DictReader(f)) >= least

    return check


def _compare(
    at: int, says: str, words: str, code: int, least: int, *prints: str, also: tuple[int, ...] = ()
) -> Line:  # fmt: skip
    out = f"report-{at}-{least}"
    argv = ("compare", *words.split(), "--output", out, "--no-replay")
    return Line(at, f"ait llm compare {says}", argv, code, prints, check=_csv(out, least), also=also)  # type: ignore[arg-type]


def _no_torchair(call: str) -> object:
    def run(home: Path) -> None:
        from vllm_accprobe import torchair_dump

        with pytest.raises(ConfigError, match="torchair is not installed here"):
            eval(call, {"torchair_dump": torchair_dump})

    return run


def _config(at: int, call: str, *also: int) -> Line:
    ends_at = "torchair, which comes with torch_npu and CANN"
    return Line(at, call, _no_torchair(call), ends_at=ends_at, also=also)  # type: ignore[arg-type]


LINES: list[Line] = sorted(
    [
        _dump(25, ""),
        _dump(33, "--type layer tensor", "--type", "layer", "tensor", ATB_DUMP_TYPE="layer|tensor"),
        Line(
            33,
            "ait llm dump --exec ... --type model layer onnx",
            ("run", "--exec", "bash run.sh x", "--type", "model", "layer", "onnx", "-o", "drawn"),
            prints=("2 topologies drawn as ONNX",),
            ends_at=NO_ATB,
            check=_drawn,
        ),
        Line(33, "--type onnx alone", ("run", "--exec", "true", "--type", "onnx"), 2, ("add one of them",)),
        _dump(34, "-sd", "-sd", ATB_SAVE_TENSOR="2"),
        _dump(34, "--only-save-desc", "--only-save-desc", ATB_SAVE_TENSOR="2"),
        _dump(35, "-ids 2, 3_1", "-ids", "2,", "3_1", ATB_SAVE_TENSOR_IDS="2,3_1"),
        _dump(35, "--save-operation-ids 2,3_1", "--save-operation-ids", "2,3_1", ATB_SAVE_TENSOR_IDS="2,3_1"),
        _dump(35, "--type model", "--type", "model", ATB_DUMP_TYPE="model"),
        _dump(36, "-er 1,3", "-er", "1,3", ATB_SAVE_TENSOR_RANGE="1,3"),
        _dump(36, "--execute-range 1,3", "--execute-range", "1,3", ATB_SAVE_TENSOR_RANGE="1,3"),
        _dump(36, "-er 3,5,7,7", "-er", "3,5,7,7", ATB_SAVE_TENSOR_RANGE="3,5,7,7"),
        _dump(37, "-child True", "-child", "True", ATB_SAVE_CHILD="1"),
        _dump(37, "--save-operation-child False", "--save-operation-child", "False", ATB_SAVE_CHILD="0"),
        _dump(38, "-time 0", "-time", "0", ATB_SAVE_TENSOR_TIME="0"),
        _dump(38, "--save-time 2", "--save-time", "2", ATB_SAVE_TENSOR_TIME="2"),
        _dump(38, "(-time: after)", ATB_SAVE_TENSOR_TIME="1", ATB_SAVE_TENSOR_IN_BEFORE_OUT_AFTER="0"),
        _dump(39, "-opname self", "-opname", "self", ATB_SAVE_TENSOR_RUNNER="self"),
        _dump(39, "--operation-name self", "--operation-name", "self", ATB_SAVE_TENSOR_RUNNER="self"),
        _dump(40, "-tiling", "-tiling", ATB_SAVE_TILING="1"),
        _dump(40, "--save-tiling", "--save-tiling", ATB_SAVE_TILING="1"),
        _dump(41, "-stp 1", "-stp", "1", ATB_SAVE_TENSOR_PART="1"),
        _dump(41, "--save-tensor-part 0", "--save-tensor-part", "0", ATB_SAVE_TENSOR_PART="0"),
        Line(
            42,
            "ait llm dump --exec ... -o aasx/sss",
            ("run", "--exec", "bash run.sh x", "-o", "aasx/sss"),
            prints=("ATB wrote",),
            ends_at=NO_ATB,
            check=_rank_folder,
        ),
        _dump(42, "--output xx", "--output", "xx"),
        _dump(43, "-device 1", "-device", "1", ATB_DEVICE_ID="1"),
        _dump(43, "--device-id 1", "--device-id", "1", ATB_DEVICE_ID="1"),
        _dump(44, "-l info", "-l", "info"),
        _dump(44, "--log-level debug", "--log-level", "debug"),
        _dump(
            56,
            "--type op kernel cpu_profiling: operation_io_tensors, kernel_io_tensors, cpu_profiling",
            *("--type", "op", "kernel", "cpu_profiling"),
            ATB_DUMP_TYPE="op|kernel|cpu_profiling",
            ATB_SAVE_CPU_PROFILING="1",
        ),
        Line(
            50, "ait_dump/tensors/{device_id}_{PID}/{TID}", ("summary", "atb_golden/ait_dump"), prints=("3_Qwen_layer",)
        ),
        Line(52, "ait_dump/model/{PID}", ("summary", "model.json", "--tree"), prints=("2 x Qwen_layer",)),
        Line(69, "atb_json_to_onnx(layer_topo_info, model_level)", _topology, also=(65, 67, 68)),
        Line(
            69,
            "the same as a command",
            ("convert", "XXX_layer.json", "layer.onnx", "--level", "1"),
            prints=("6 nodes",),
        ),
        Line(107, "from ait_llm import DumpConfig, register_hook", _hook, also=(82, 96, 108, 109)),
        Line(116, "ait_dump/torch_tensors/{device_id}_{PID}/{TID}", _torch_layout),
        Line(117, "model_tree.json", ("summary", "torch/ait_dump", "--tree"), prints=("Qwen2DecoderLayer",)),
        _compare(
            129,
            "--golden-path xx --my-path xx",
            "--golden-path atb_golden/ait_dump --my-path atb_mine/ait_dump",
            1,
            100,
            "4_Qwen_layer.4_Mlp.0_LinearOperation",
        ),
        _compare(
            138,
            "--op-mapping-file, --log-level, -o",
            "--golden-path torch --my-path atb --op-mapping-file op_mapping --log-level info",
            1,
            50,
            "3_Qwen_layer.1_Attention.5_LinearOperation",
        ),
        _compare(147, "-gp xx.pth -mp xx.bin", "-gp xx.pth -mp xx.bin -l info", 0, 1, "PASS"),
        _compare(
            150,
            "(ATB against torch, -mf)",
            "-gp torch -mp atb -mf op_mapping --log-level warning",
            1,
            50,
            "3_Qwen_layer.1_Attention.5_LinearOperation",
        ),
        _config(214, 'torchair_dump.get_ge_dump_config(dump_path="dump")', 211),
        _config(230, "torchair_dump.get_fx_dump_config()", 227),
        _compare(
            244, "--my-path GE --golden-path FX", f"--my-path {GE} --golden-path {FX}", 1, 20, "FAIL", also=(241,)
        ),
        _config(260, 'torchair_dump.get_ge_dump_config(dump_path="dump")', 257),
        _config(
            276, 'torchair_dump.get_ge_dump_config(dump_path="dump", fusion_switch_file="fusion_switch.json")', 273
        ),
        _compare(305, "(fusion off)", f"--my-path {GE} --golden-path {OFF}", 1, 20, "FAIL", also=(302,)),
        *_OTHERS,
    ],
    key=lambda line: line.at,
)
