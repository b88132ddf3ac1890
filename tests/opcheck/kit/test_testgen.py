"""The folder that gentest writes: right where the engine was right, wrong where it was wrong, with torch alone. Its
files are frozen (tests/freeze, ``gentest``)."""

import ast
import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from opcheck import torch_only
from opcheck.kit import view_kernels
from opcheck.layer_dumps import build
from opcheck.opcheck_dumps import Maker
from support.csv_rows import csv_rows

from vllm_accprobe.capture.torch_model import Probe
from vllm_accprobe.cli import main
from vllm_accprobe.config import ProbeConfig
from vllm_accprobe.formats import open_dump
from vllm_accprobe.opcheck.calls.case import closed
from vllm_accprobe.opcheck.calls.records import Calls
from vllm_accprobe.opcheck.causes import search
from vllm_accprobe.opcheck.compat import xray
from vllm_accprobe.opcheck.kit import shrink
from vllm_accprobe.opcheck.kit.bench import CAPTURED, DEVICE, Bench, Case
from vllm_accprobe.opcheck.kit.shrink import DRAWN, REAL, nbytes, shrunk
from vllm_accprobe.opcheck.kit.testgen import about, write_case, write_folder
from vllm_accprobe.opcheck.reference import Call, Expected, reference
from vllm_accprobe.opcheck.reference_table import References
from vllm_accprobe.opcheck.registry import default_references
from vllm_accprobe.opcheck.run.table import COLUMNS


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return torch_only.site(tmp_path_factory.mktemp("only") / "site")


def counts(text: str) -> dict[str, int]:
    return {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error)", text.splitlines()[-1])}


def test_a_clean_capture_passes_with_torch_and_pytest_alone(tmp_path: Path, site: Path) -> None:
    build(tmp_path / "d")
    assert main(["gentest", str(tmp_path / "d"), "--ops", "*", "-n", "8", "--out", str(tmp_path / "t")]) == 0
    (tmp_path / "t/vendor.py").write_text("open('loaded', 'w')\n")
    done = torch_only.run(site, tmp_path / "t", "--seed", "5", "--detail-csv", "cpu.csv", "--load", "vendor")
    assert (tmp_path / "t/loaded").exists()
    assert done.returncode == 0, done.stdout + done.stderr
    # norm, qkv, attention and o_proj once or more in three ways; attention is not drawn, and NobodyKnows is skipped
    assert counts(done.stdout)["passed"] >= 10
    rows = csv_rows(tmp_path / "t/cpu.csv")
    assert tuple(rows[0]) == (*COLUMNS, "min_val", "max_val")
    checked = [r for r in rows if r["status"] == "pass"]
    assert {r["op"] for r in checked} == {"RMSNorm", "QKVParallelLinear", "Attention", "RowParallelLinear"}
    assert all(0.999 < float(r["cosine"]) <= 1 for r in checked)
    copy = shutil.copy(tmp_path / "t/cpu.csv", tmp_path / "copy.csv")
    assert main(["opdiff", str(tmp_path / "t/cpu.csv"), str(copy), "--out", str(tmp_path / "o")]) == 0


def test_a_faulty_capture_fails_and_the_operator_itself_passes(tmp_path: Path, site: Path) -> None:
    build(tmp_path / "d", "layers.0.self_attn.attn")
    assert main(["gentest", str(tmp_path / "d"), "--failed", "--out", str(tmp_path / "t")]) == 0
    assert len(list((tmp_path / "t/cases").glob("*.json"))) == 1
    done = torch_only.run(site, tmp_path / "t")
    assert done.returncode == 1, done.stdout + done.stderr
    assert counts(done.stdout) == {"passed": 1, "failed": 1}
    failure = next(line for line in done.stdout.splitlines() if line.startswith("FAILED"))
    assert "test_Attention" in failure
    assert "captured" in failure
    assert "times rounding alone" in done.stdout


def test_what_the_folder_cannot_do_is_one_line(tmp_path: Path, site: Path) -> None:
    build(tmp_path / "d")
    main(["gentest", str(tmp_path / "d"), "--ops", "RMSNorm", "-n", "1", "--out", str(tmp_path / "t")])
    done = torch_only.run(site, tmp_path / "t", "--device", "nowhere")
    assert done.returncode == 4
    assert "--device nowhere:" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--failed"], 3, "no call failed"),
        (["--ids", "x"], 2, "is no id"),
        (["--ops", "*", "--weights", "nowhere"], 2, "no directory"),
    ],
)
def test_the_command_says_what_it_cannot_do(tmp_path, capsys, arguments, code, said):
    build(tmp_path / "d")
    assert main(["gentest", str(tmp_path / "d"), *arguments, "--out", str(tmp_path / "t")]) == code
    assert said in capsys.readouterr().err
    assert not (tmp_path / "t").exists()


def test_a_folder_that_is_there_is_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(tmp_path / "d")
    (tmp_path / "t").mkdir()
    (tmp_path / "t/mine.txt").write_text("mine")
    assert main(["gentest", str(tmp_path / "d"), "--ops", "*", "--out", str(tmp_path / "t")]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "t").iterdir()] == ["mine.txt"]


@reference("Odd")
def odd(call: Call) -> Expected:
    return Expected(call.wide("x") * 3.0)


def test_hostile_names_stay_names_and_a_users_reference_is_written_down(tmp_path: Path, site: Path) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    m = Maker(tmp_path / "d")
    tap = "../../etc/'; import os #\n"
    m.module(tap, "Odd")
    m.step(0, [(0, 0, 4)])
    m.call(tap, "Odd", {"x": x}, (x.double() * 3).bfloat16())
    references = References([odd])
    calls = Calls(open_dump(m.close()), None)
    (tmp_path / "t/cases").mkdir(parents=True)
    captured = next(calls.of(0, tap))
    written = write_case(captured, references, tmp_path / "t/cases", 0)
    write_folder([written], tmp_path / "t", "a test")
    assert {p.parent for p in (tmp_path / "t").rglob("0000*")} == {tmp_path / "t/cases"}
    tree = json.loads((tmp_path / f"t/cases/{written.name}.json").read_text())
    assert set(tree["expected"]) == {"output.0"}
    done = torch_only.run(site, tmp_path / "t")
    assert counts(done.stdout) == {"passed": 1, "skipped": 1}, done.stdout + done.stderr


def test_a_dump_of_statistics_becomes_tests_with_drawn_inputs(tmp_path: Path, site: Path) -> None:
    """jprof's way: the words of torch_xray's guide, two machines' csv, and its joined table."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16)).bfloat16()
    probe = Probe(model, ProbeConfig.from_kwargs(dir=tmp_path / "d", task="stats", ops=True))
    with torch.no_grad():
        model(torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).bfloat16())
    probe.close()
    out = tmp_path / "pytests"
    words = ["--cpu_init", "--blacklist", "--factory=load"]
    assert main(["gentest", str(tmp_path / "d"), *words, "--out", str(out)]) == 0
    sheets = [tmp_path / "gpu.csv", tmp_path / "xpu.csv"]
    for found in torch_only.run_each(site, out, [[f"--detail_compare_path={s}", "--seed", "42"] for s in sheets]):
        assert "failed" not in found
        assert "error" not in found
        assert counts(found)["passed"] >= 6
    rows = {r["op"]: r for r in csv_rows(sheets[0])}
    assert {"aten.addmm.default", "aten.gelu.default", "aten.native_layer_norm.default"} <= set(rows)
    assert all("weaker evidence" in r["message"] for r in rows.values() if r["status"] == "pass")
    assert float(rows["aten.gelu.default"]["min_val"]) < 0 < float(rows["aten.gelu.default"]["max_val"])
    joined = tmp_path / "result.csv"
    assert main(["opdiff", *map(str, sheets), str(joined), "--out", str(tmp_path / "diff")]) == 0
    table = csv_rows(joined)
    assert tuple(table[0]) == xray.SUMMARY_COLUMNS
    gelu = next(r for r in table if r["op_name"] == "aten.gelu.default")
    assert (gelu["dtype"], gelu["shape"], gelu["is_pass"]) == ("torch.bfloat16", "[6, 16]", "pass")
    assert float(gelu["min-val"]) == float(rows["aten.gelu.default"]["min_val"])
    assert gelu["xpu_max"] == gelu["gpu_max"] != ""


ROWS, HEAD, WIDTH, WIDE = 520, 32, 200, 328
KERNELS = Path(view_kernels.__file__)


def drawn(*shape: int, seed: int = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@dataclass(frozen=True)
class Fault:
    """kernel, right: names of the wrong and the right one; x: makes the input; made: its memory is another's output."""

    cls: str
    kernel: str
    right: str
    name: str
    x: Callable[[], Any]
    params: Mapping[str, Any] = field(default_factory=dict)
    attrs: Mapping[str, Any] = field(default_factory=dict)
    made: bool = False


NORM = {"variance_epsilon": view_kernels.EPS}
LAYER = {"eps": view_kernels.EPS, "normalized_shape": [WIDTH]}
BY_HEAD, BY_ROW = {"weight": drawn(HEAD, seed=1) + 2}, {"weight": drawn(WIDTH, seed=1) + 2}
LINEAR = {"weight": drawn(WIDE, WIDTH, seed=2)}


def of_heads(seed: int = 0) -> Any:
    """k of qkv, [rows, 2, head] of [rows, 8, head]."""
    return drawn(ROWS, 8, HEAD, seed=seed)[:, 4:6]


FAULTS = {
    "norm, view of qkv": Fault("RMSNorm", "norm_without_gaps", "norm", "x", of_heads, BY_HEAD, NORM, made=True),
    "norm, memory unknown": Fault("RMSNorm", "norm_without_gaps", "norm", "x", lambda: of_heads(5), BY_HEAD, NORM),
    "norm, offset": Fault("RMSNorm", "norm_without_offset", "norm", "x", of_heads, BY_HEAD, NORM, made=True),
    "layer norm, half of each row": Fault(
        "LayerNorm", "layer_norm_without_gaps", "layer_norm", "input", lambda: drawn(ROWS, 2 * WIDTH)[:, WIDTH:],
        {**BY_ROW, "bias": drawn(WIDTH, seed=3)}, LAYER,
    ),
    "activation, view": Fault(
        "SiluAndMul", "silu_and_mul_without_gaps", "silu_and_mul", "x", lambda: drawn(ROWS, 3 * WIDTH)[:, : 2 * WIDTH]
    ),
    "product, transposed input": Fault(
        "ColumnParallelLinear", "linear_without_strides", "linear", "input_", lambda: drawn(WIDTH, ROWS).t(), LINEAR
    ),
    "norm, tail of the rows": Fault(
        "RMSNorm", "norm_of_whole_tiles", "norm", "x", lambda: drawn(ROWS, WIDTH), BY_ROW, NORM
    ),
    "norm, tail of a row": Fault(
        "RMSNorm", "norm_without_last_columns", "norm", "x", lambda: drawn(ROWS, WIDTH), BY_ROW, NORM
    ),
    "product, tail of the columns": Fault(
        "ColumnParallelLinear", "linear_of_whole_tiles", "linear", "input_", lambda: drawn(ROWS, WIDTH), LINEAR
    ),
    "product, tail of the sum": Fault(
        "ColumnParallelLinear", "linear_without_last_terms", "linear", "input_", lambda: drawn(ROWS, WIDTH), LINEAR
    ),
    "activation, tail of the columns": Fault(
        "SiluAndMul", "silu_and_mul_of_whole_tiles", "silu_and_mul", "x", lambda: drawn(ROWS, 2 * WIDTH)
    ),
}  # fmt: skip


def tap(name: str) -> str:
    return "layers." + "".join(c if c.isalnum() else "_" for c in name)


def dump_of(root: Path, faults: Mapping[str, Fault], right: bool = False) -> Path:
    """Each fault is a tap of one step. right: as the right kernels compute."""
    m = Maker(root)
    m.module("<root>", "TinyForCausalLM")
    for name, f in faults.items():
        m.module(tap(name), f.cls, **f.attrs)
        m.param(tap(name), f.cls, **f.params)
    m.request(0, ROWS)
    m.step(0, [(0, 0, ROWS)])
    for name, f in faults.items():
        x = f.x()
        if f.made:
            whole = torch.as_strided(x, (ROWS, x.stride(0)), (x.stride(0), 1), 0)
            m.call(tap(name) + "_before", "NobodyKnows", {}, whole.contiguous())
        function = getattr(view_kernels, f.right if right else f.kernel)
        m.call(tap(name), f.cls, {f.name: x}, function(x, *f.params.values()))
    return m.close()


AT_HAND = ("norm, memory unknown", "norm, tail of the rows", "layer norm, half of each row", "activation, view",
           "product, transposed input", "product, tail of the sum")  # fmt: skip
"""A view and a tail of each class."""
FURTHER = tuple(name for name in FAULTS if name not in AT_HAND)


def further(*names: str) -> Any:
    """More views and tails."""
    return pytest.param(names if len(names) > 1 else names[0], marks=pytest.mark.extra)


@pytest.mark.parametrize("planted", [AT_HAND, further(*FURTHER)], ids=["of each class", "further"])
def test_the_folder_fails_with_the_kernels_that_are_wrong_and_passes_with_right_ones(
    planted, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(search, "_SLOWER", 1000.0)  # a busy machine finds the same causes, and draws the same inputs
    faults = {name: FAULTS[name] for name in planted}
    dump, out = dump_of(tmp_path / "d", faults), tmp_path / "t"
    assert main(["gentest", str(dump), "--failed", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert f"{len(faults)} calls cut to " in printed.out + printed.err
    (out / KERNELS.name).write_text(KERNELS.read_text())
    cases = {json.loads(p.read_text())["about"]["tap"]: p for p in (out / "cases").glob("*.json")}
    assert set(cases) == {tap(name) for name in faults}
    by_kernel: dict[str, list[str]] = {}
    for name, f in faults.items():
        for kernel in (f.kernel, f.right):
            one = f"test_operators.py::test_{f.cls}[device-{cases[tap(name)].stem}]"
            by_kernel.setdefault(kernel, []).append(one)
    runs = [["-k", "captured"], *([*ids, "--kernel", f"{KERNELS.name}:{k}"] for k, ids in by_kernel.items())]
    captured, *found = torch_only.run_each(torch_only.site(tmp_path / "site"), out, runs)
    assert captured == f"{len(faults)} failed, {len(faults)} deselected"
    right = {f.right for f in faults.values()}
    assert dict(zip(by_kernel, found, strict=True)) == {
        k: f"{len(ids)} {'passed' if k in right else 'failed'}" for k, ids in by_kernel.items()
    }
    sizes = []
    for name, path in cases.items():
        whole = next(c for c in Calls(open_dump(dump), None).of(0, name))
        sizes.append(path.with_suffix(".safetensors").stat().st_size / nbytes_of(whole.what))
    assert median(sizes) <= 0.05, sorted(sizes)
    drawn_too = {name for name, path in cases.items() if DRAWN in json.loads(path.read_text())["about"]["values"]}
    always = {"norm, view of qkv", "norm, memory unknown", "product, tail of the sum"}
    assert drawn_too >= {tap(name) for name in always.intersection(planted)}


def nbytes_of(call: Any) -> int:
    tensors = [*call.inputs.values(), *call.outputs.values(), *call.params.values()]
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("name", [AT_HAND[0], AT_HAND[3], AT_HAND[5], *map(further, AT_HAND[1:3]), further(AT_HAND[4])])
def test_a_kernel_at_hand_leaves_what_it_fails_for_with_numbers_of_nobody(name: str, tmp_path: Path) -> None:
    f, references = FAULTS[name], default_references()
    calls = Calls(open_dump(dump_of(tmp_path / "d", {name: f})), None)
    captured = next(calls.of(0, tap(name)))
    wrong = Bench(kernel=getattr(view_kernels, f.kernel), references=references)
    found = shrunk(captured, wrong, about(captured))
    assert found.synthetic
    assert found.values.startswith(DRAWN)
    assert found.kept["rows"][0] <= 2
    old, new = captured.what.inputs[f.name].flatten(1), found.call.inputs[f.name].flatten(1)
    assert old.shape[1] != new.shape[1] or not bool((old.unsqueeze(1) == new).all(-1).any())
    case = Case(about(captured), found.call, {})
    right = Bench(kernel=getattr(view_kernels, f.right), references=references)
    assert [o.status for o in wrong.check(case, DEVICE)] == ["fail"]
    assert [o.status for o in right.check(case, DEVICE)] == ["pass"]
    real = shrunk(captured, wrong, about(captured), real_values=True)
    assert (real.values, real.synthetic) == (REAL, False)
    assert right.check(Case(about(captured), real.call, {}), DEVICE)[0].status == "pass"


PARTS = [("layers.0.norm", "rows"), ("layers.0.self_attn.qkv_proj", "rows"), ("layers.0.self_attn.qkv_proj", "columns"),
         ("layers.0.self_attn.attn", "rows"), ("layers.0.self_attn.attn", "heads"),
         ("layers.0.self_attn.o_proj", "columns")]  # fmt: skip


@pytest.mark.parametrize(("tap", "word"), PARTS)
def test_a_part_of_a_right_call_is_right(tap: str, word: str, tmp_path: Path) -> None:
    """Rows of requests at several positions, with what they look back at; heads with theirs; columns."""
    references = default_references()
    bench, make = Bench(references=references), getattr(shrink, word)
    for captured in Calls(open_dump(build(tmp_path / "d")), None).of(0, tap):
        call = closed(captured.what, references)
        axis = make(call, bench)
        assert axis.word == word
        parts = [[axis.size - 1], [0], list(range(0, axis.size, 2))]
        for at in map(torch.tensor, parts):
            part = axis.cut(call, at)
            assert nbytes(part) < nbytes(call) or len(at) == axis.size
            for way in (CAPTURED, DEVICE):
                assert [o.status for o in bench.check(Case(about(captured), part, {}), way)] == ["pass"], (at, way)


def test_what_fails_of_attention_is_one_row_with_its_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shrink, "GRAIN", 1)
    references, tap = default_references(), "layers.0.self_attn.attn"
    captured = list(Calls(open_dump(build(tmp_path / "d", tap)), None).of(0, tap))[1]  # 5 rows and 1; from 12 on wrong
    captured = replace(captured, what=closed(captured.what, references))
    found = shrunk(captured, Bench(references=references), about(captured))
    assert found.kept == {"rows": (1, 6), "heads": (1, 2)}
    (run,) = found.call.extra["cache"].runs
    assert run.at.tolist() == [0]
    assert run.positions.tolist() == [len(run.past["key"]) - 1]
    assert (found.call.attrs["num_heads"], found.call.attrs["num_kv_heads"]) == (2, 1)
    assert (found.values, found.synthetic) == (REAL, False)


@pytest.mark.parametrize(
    ("kernel", "text"),
    [("nowhere.py:f", "nowhere.py"), ("os:nothing", "has no function nothing"), ("x", "x")],
)
def test_a_kernel_that_cannot_be_loaded_is_one_line(kernel, text, tmp_path, capsys):
    build(tmp_path / "d")
    words = ["--ops", "RMSNorm", "--kernel", kernel, "--out", str(tmp_path / "t")]
    assert main(["gentest", str(tmp_path / "d"), *words]) == 2
    error = capsys.readouterr().err
    assert "--kernel" in error
    assert text in error
    assert "Traceback" not in error


def test_a_wrong_kernel_of_a_right_engine_fails_alone(tmp_path: Path) -> None:
    f, references = FAULTS["norm, view of qkv"], default_references()
    captured = next(Calls(open_dump(dump_of(tmp_path / "d", {"right": f}, right=True)), None).of(0, tap("right")))
    bench = Bench(kernel=view_kernels.norm_without_gaps, references=references)
    found = shrunk(captured, bench, about(captured))
    assert found.kept["rows"][0] == 2
    assert found.values.endswith("the engine was right")
    case = Case(about(captured), found.call, {})
    assert [bench.check(case, way)[0].status for way in (CAPTURED, DEVICE)] == ["pass", "fail"]


def test_a_right_call_stays_whole(tmp_path: Path) -> None:
    f = FAULTS["norm, view of qkv"]
    calls = Calls(open_dump(dump_of(tmp_path / "d", {"right": f}, right=True)), None)
    captured = next(calls.of(0, tap("right")))
    found = shrunk(captured, Bench(references=default_references()), about(captured))
    assert (found.kept, found.before, found.values) == ({}, found.after, REAL)


def test_what_the_folder_imports_is_copied_or_comes_with_python_and_torch(tmp_path: Path) -> None:
    """Read, not run: no test of the folder meets an import inside of a function that it does not call."""
    write_folder([], tmp_path, "dump")
    files = {".".join(p.relative_to(tmp_path).with_suffix("").parts).removesuffix(".__init__"): p
             for p in (tmp_path / "operator_kit").rglob("*.py")}  # fmt: skip
    outside = {"torch", "numpy", "mindspore", *sys.stdlib_module_names}  # numpy and MindSpore where they are installed
    modules = files.keys() - {"operator_kit"}  # whose __init__ is empty
    assert len(modules) > 40
    for place, path in files.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{a.name}" for a in node.names]
            for name in names:
                known = {name, name.rpartition(".")[0]} & modules or name.partition(".")[0] in outside
                assert known, f"{place} imports {name}"
