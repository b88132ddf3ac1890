"""The lines of documents 001 and 002 on the pre-check: acc_check, run_ut, api_precision_compare, of both frameworks.

Both documents have the same commands under two names; a made dump.json of msprobe's form stands for the card's.
"""

import csv
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from support.peer_dumps import unpack
from support.seeds.columns import CHECK_DETAILS, CHECKED, MINDSPORE, TWO_MACHINES, alike
from support.seeds.line import Line

NO_CARD = "--device 0: torch sees no accelerator on this machine"
DUMP = "single/dump.json"


def _tensor(home: Path, name: str, t: torch.Tensor) -> dict[str, object]:
    torch.save(t, home / "dump_tensor_data" / f"{name}.pt")
    wide = t.double()
    return {"type": "torch.Tensor", "dtype": str(t.dtype), "shape": list(t.shape), "Max": float(wide.max()),
            "Min": float(wide.min()), "Mean": float(wide.mean()), "Norm": float(wide.norm()), "requires_grad": True,
            "data_name": f"{name}.pt"}  # fmt: skip


def dump(home: Path) -> None:
    """msprobe's layout: a product, twice with the same shapes, and an activation."""
    (home / "dump_tensor_data").mkdir(parents=True)
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(6, 16, generator=g), torch.randn(8, 16, generator=g)
    calls = {
        "Functional.linear.0": ((x, w), torch.nn.functional.linear(x, w)),
        "Functional.linear.1": ((2 * x, w), torch.nn.functional.linear(2 * x, w)),
        "Functional.gelu.0": ((x,), torch.nn.functional.gelu(x)),
    }
    data = {}
    for name, (args, out) in calls.items():
        data[f"{name}.forward"] = {
            "input_args": [_tensor(home, f"{name}.forward.input.{k}", t) for k, t in enumerate(args)],
            "input_kwargs": {}, "output": [_tensor(home, f"{name}.forward.output.0", out)],
        }  # fmt: skip
    head = {"task": "tensor", "level": "L1", "framework": "pytorch", "dump_data_dir": str(home / "dump_tensor_data")}
    (home / "dump.json").write_text(json.dumps({**head, "data": data}))


def prepare(home: Path) -> None:
    """``dump_path/step0/rank0`` and ``dump.json``; config files; a dump of MindSpore."""
    dump(home / "dump_path/step0/rank0")
    where = home / "single"
    shutil.copytree(home / "dump_path/step0/rank0", where)
    lists = {"white_list": [], "black_list": ["gelu"], "error_data_path": "./"}
    (home / "config.json").write_text(json.dumps({"task": "run_ut", "run_ut": lists}))
    (home / "config.yaml").write_text("white_list: []\nblack_list: []\nerror_data_path: './'\nprecision: 14\n")
    unpack("mindspore", home)


def _files(out: Path) -> tuple[Path, Path]:
    return next(out.glob("accuracy_checking_result_*.csv")), next(out.glob("accuracy_checking_details_*.csv"))


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as f:
        return list(csv.DictReader(f))


def _checked(folder: str, calls: int = 3) -> Callable[[Path, str], None]:
    def check(home: Path, said: str) -> None:
        result, details = _files(home / folder)
        assert [r["Forward Test Success"] for r in _rows(result)] == ["pass"] * calls
        assert {r["Status"] for r in _rows(details)} == {"pass"}  # -api_info runs them backward, too
        assert len(_rows(details)) >= calls
        assert alike(_rows(result)[0]) == alike(CHECKED)
        assert alike(_rows(details)[0]) == alike(CHECK_DETAILS)

    return check


def _resume(home: Path, said: str) -> None:
    _checked("npu")(home, said)
    assert len(list((home / "npu").glob("accuracy_checking_*.csv"))) == 2


def _going_on(dump: str) -> Callable[[Path], None]:
    def run(home: Path) -> None:
        from vllm_accprobe.cli import main

        result = str(_files(home / "npu")[0].relative_to(home))
        assert main(["opcheck", "-api_info", dump, "-csv_path", result, "--jobs", "0"]) == 0
        _resume(home, "")
        assert main(["opcheck", "--api_info_file", dump, "--result_csv_path", result, "--jobs", "0"]) == 0
        _resume(home, "")

    return run


def _second_stage(home: Path) -> None:
    from vllm_accprobe.cli import main

    sides = [str(_files(home / side)[1]) for side in ("npu", "gpu")]
    assert main(["opdiff", "-npu", sides[0], "-gpu", sides[1], "-o", "compared", "--algorithm", "*=benchmark"]) == 0
    long = ["--npu_csv_path", sides[0], "--gpu_csv_path", sides[1], "--out_path", "compared-long"]
    assert main(["opdiff", *long]) == 0
    assert len(list((home / "compared-long").glob("api_precision_compare_*.csv"))) == 2
    details = _rows(next((home / "compared").glob("api_precision_compare_details_*.csv")))
    result = _rows(next((home / "compared").glob("api_precision_compare_result_*.csv")))
    assert alike(result[0]) == alike(CHECKED)
    assert alike(details[0]) == alike(TWO_MACHINES)
    assert {r["比对结果"] for r in details} == {"pass"}
    assert len(details) >= 3
    assert [r["Forward Test Success"] for r in result] == ["pass"] * 3


def _mindspore(home: Path, said: str) -> None:
    result, details = _files(home / "checker_result")
    assert alike(_rows(details)[0]) == alike(MINDSPORE)
    assert alike(_rows(result)[0]) == alike(CHECKED)
    assert {r["Status"] for r in _rows(details)} <= {"pass", "error", "SKIP"}
    assert "Mint.tanh.0" in {r["API Name"] for r in _rows(result)}


def _all_options(home: Path, said: str) -> None:
    """Two products and an activation: one product stands for the other, and gelu is in config.json's black_list."""
    result, _ = _files(home / ("long" if "wrote long" in said else "short"))
    assert [r["Forward Test Success"] for r in _rows(result)] == ["pass", "SKIP", "SKIP"]


def _kept(home: Path, said: str) -> None:
    """The wrong call, as a case that gentest reads, where error_data_path says: here."""
    (cases,) = home.glob("ut_error_data*")
    assert any(path.is_file() for path in cases.rglob("*"))


def lines(at: dict[str, tuple[int, ...]], command: str, several: str, dump: str = DUMP) -> list[Line]:
    """at: the document's lines of each of these; command, several: how the document calls it, of one process and of
    several."""
    check = ("opcheck", "-api_info", dump, "--jobs", "0", "-o")
    both = ("-save_error_data", "-d", "cpu")
    found = {
        "options": Line(0, f"{command} --api_info_file ... --out_path: every option by its long name",
             ("opcheck", "--api_info_file", dump, *both[:1], "--out_path", "long", "--jit_compile", "--device", "cpu",
              "--num_splits", "1", "--filter_api", "--config_path", "config.json"),
             prints=("--jit_compile: of an NPU's operators, without effect on cpu",), check=_all_options),
        "syntax": Line(0, f"{command} -api_info {dump} -save_error_data -o short -j -d cpu -f -config config.json",
             ("opcheck", "-api_info", dump, *both, "-o", "short", "-j", "--jobs", "0", "-f", "-config", "config.json"),
             prints=("--jit_compile: of an NPU's operators, without effect on cpu",), check=_all_options),
        "plain": Line(0, f"{command} -api_info {dump}", (*check, "npu"), check=_checked("npu")),
        "gpu": Line(0, f"{command} -api_info {dump} -d: on the other machine", (*check, "gpu", "-d", "cpu"),
             check=_checked("gpu")),
        "config": Line(0, "config.json: black_list", (*check, "listed", "-config", "config.json", "-f"),
             prints=("1  calls: in black_list", "another call stands for it")),
        "saved": Line(0, f"{command} -api_info {dump} -save_error_data", (*check, "saved", "-save_error_data"),
             check=_checked("saved")),
        "kept": Line(0, f"{command} -save_error_data, of a wrong kernel: ut_error_data<time>",
             ("opcheck", "-api_info", "fused-wrong/step0/rank0/dump.json", "--ops", "*npu_swiglu", "-j", "0",
              "-save_error_data", "-o", "kept"), code=1, check=_kept),
        "yaml": Line(0, "vim .../config.yaml", (*check, "yaml", "-config", "config.yaml"), check=_checked("yaml")),
        "multi": Line(0, f"{several} -api_info {dump} -n 2 -d cpu",
             ("opcheck", "-api_info", dump, "-n", "2", "-d", "cpu", "-o", "two"), check=_checked("two")),
        "many": Line(0, f"{several} -api_info {dump} -n 32 -d 0 1 2 3",
             ("opcheck", "-api_info", dump, "-n", "32", "-d", "0", "1", "2", "3", "-o", "many"), code=2,
             prints=(NO_CARD,), ends_at="four cards"),
        "again": Line(0, f"{command} -api_info {dump} -csv_path .../accuracy_checking_result_<time>.csv",
             _going_on(dump)),
        "second": Line(0, "api_precision_compare -npu .../accuracy_checking_details_<time>.csv -gpu ...",
             _second_stage),
    }  # fmt: skip
    return [replace(found[name], at=place[0], also=place[1:]) for name, place in at.items()]


OF_001 = [
    *lines({"options": (345, 361), "syntax": (353,), "plain": (335,), "gpu": (355,), "config": (361,), "saved": (375,),
            "kept": (381,), "yaml": (403,), "multi": (489,), "many": (471,), "again": (509,),
            "second": (697, 707, 709)},
           "run_ut", "multi_run_ut"),
    Line(1257, "msprobe -f mindspore run_ut -api_info ./dump.json -o ./checker_result",
         ("opcheck", "-api_info", "mindspore/tensor/step0/rank0/dump.json", "-o", "checker_result", "--jobs", "0"),
         code=1, prints=("Mint.matmul",), check=_mindspore),  # its 1e-4 is absolute, and the numbers are large
]  # fmt: skip
_ALIKE = lines({"options": (57,), "syntax": (50,), "plain": (68,), "gpu": (70,), "config": (64,), "saved": (76,),
                "kept": (78,), "yaml": (88,), "multi": (126,), "many": (143,), "again": (163,), "second": (264, 251)},
               "acc_check", "multi_acc_check")  # fmt: skip
OF_002 = [
    *(replace(line, as_in="001") for line in _ALIKE),
    *lines({"plain": (68,)}, "acc_check", "multi_acc_check", "dump_path/step0/rank0/dump.json"),
]
"""The words of 001, typed there; here the dump below step and rank."""
