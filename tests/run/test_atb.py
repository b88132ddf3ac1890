"""ATB's variables, the library that is preloaded, and what is collected; without CANN one line says so."""

import os
from pathlib import Path

import pytest

from vllm_accprobe.config import ConfigError
from vllm_accprobe.run.atb import AtbOptions, collect, preload


def test_the_defaults_of_the_document(tmp_path: Path) -> None:
    found = AtbOptions().variables(tmp_path / "atb")
    assert found.pop("ATB_CUR_PID") == str(os.getpid())
    assert found == {
        "ATB_SAVE_TENSOR": "1",
        "ATB_SAVE_TENSOR_IN_BEFORE_OUT_AFTER": "0",
        "ATB_SAVE_TENSOR_TIME": "1",
        "ATB_SAVE_TENSOR_RANGE": "0,0",
        "ATB_SAVE_TENSOR_START": "0",
        "ATB_SAVE_TENSOR_END": "0",
        "ATB_SAVE_TENSOR_PART": "2",
        "ATB_SAVE_CHILD": "1",
        "ATB_SAVE_TILING": "0",
        "ATB_SAVE_CPU_PROFILING": "0",
        "ATB_DUMP_TYPE": "tensor",
        "ATB_OUTPUT_DIR": f"{tmp_path}/atb/",
        "ACLTRANSFORMER_SAVE_TENSOR": "1",
        "ACLTRANSFORMER_SAVE_TENSOR_MAX": "1",
    }


@pytest.mark.parametrize(("bad", "line"), [
    ({"ids": "a"}, "--atb-ids=a"),
    ({"ranges": "1"}, "--atb-range=1"),
    ({"ranges": "3,1"}, "--atb-range=3,1"),
    ({"time": 4}, "--atb-time=4"),
    ({"part": 3}, "--atb-part=3"),
    ({"types": "onnx"}, "--atb-type=onnx: onnx draws what model or layer writes"),
    ({"types": "tensor,picture"}, "--atb-type=picture: known are model, layer, op"),
])  # fmt: skip
def test_bad_values(bad: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        AtbOptions(**bad)  # type: ignore[arg-type]


def toolkit(tmp_path: Path, abi: int) -> Path:
    library = tmp_path / "cann" / "tools" / "ait_backend" / "dump" / f"libatb_probe_abi{abi}.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    library.write_bytes(b"")
    return library


def test_which_library_is_preloaded(tmp_path: Path) -> None:
    one, zero = toolkit(tmp_path, 1), toolkit(tmp_path, 0)
    by_name = tmp_path / "atb" / "cxx_abi_1"
    by_symbols = tmp_path / "plain"
    (by_symbols / "lib").mkdir(parents=True)
    by_name.mkdir(parents=True)
    environ = {"ASCEND_TOOLKIT_HOME": str(tmp_path / "cann"), "ATB_HOME_PATH": str(by_name), "LD_PRELOAD": "a.so"}
    assert preload(environ) == (f"{one}:a.so", "")
    environ = {"ASCEND_TOOLKIT_HOME": str(tmp_path / "cann"), "ATB_HOME_PATH": str(by_symbols)}
    assert preload(environ) == (str(zero), "")
    (by_symbols / "lib" / "libatb.so").write_bytes(b"\0_ZN3atb5Probe9ReportNSt7__cxx1112basic\0")
    assert preload(environ) == (str(one), "")
    one.unlink()
    assert preload(environ)[0] is None
    assert "libatb_probe_abi1.so is missing" in preload(environ)[1]


def test_without_cann_it_is_said(tmp_path: Path) -> None:
    assert preload({}) == (
        None,
        "no CANN is installed here (ASCEND_TOOLKIT_HOME names no directory): ATB will write nothing",
    )
    toolkit(tmp_path, 0)
    assert "ATB_HOME_PATH names no directory" in preload({"ASCEND_HOME_PATH": str(tmp_path / "cann")})[1]


def test_what_appeared_is_counted_and_the_old_librarys_is_brought(tmp_path: Path) -> None:
    new = tmp_path / "d" / "atb" / "msit_dump_1" / "tensors" / "0_1" / "0" / "a.bin"
    old = tmp_path / "acl" / "tensors" / "thread_1" / "a.bin"
    older = tmp_path / "acl" / "tensors" / "thread_0" / "a.bin"
    for file in (new, old, older):
        file.parent.mkdir(parents=True)
        file.write_bytes(b"12345")
    os.utime(older, (1000, 1000))
    environ = {"ACLTRANSFORMER_HOME_PATH": str(tmp_path / "acl")}
    assert collect(tmp_path / "d", environ, since=2000) == (2, 10)
    assert (tmp_path / "d" / "atb" / "tensors" / "thread_1" / "a.bin").read_bytes() == b"12345"


def test_a_file_with_two_names_is_counted_once(tmp_path: Path) -> None:
    """The old library's home below ATB's directory: what is brought beside it is the same file."""
    home = tmp_path / "atb/old"
    (home / "tensors").mkdir(parents=True)
    (home / "tensors/a.bin").write_bytes(b"12345")
    for _ in range(2):
        assert collect(tmp_path, {"ACLTRANSFORMER_HOME_PATH": str(home)}, 0.0) == (1, 5)


def test_an_empty_directory_does_not_stay(tmp_path: Path) -> None:
    (tmp_path / "d" / "atb").mkdir(parents=True)
    assert collect(tmp_path / "d", {}, since=0) == (0, 0)
    assert list((tmp_path / "d").iterdir()) == []


def test_onnx_is_ours_and_not_the_library_s() -> None:
    options = AtbOptions(types="model, onnx,tensor")
    assert options.draws
    assert options.variables(Path("/x"))["ATB_DUMP_TYPE"] == "model|tensor"
    assert not AtbOptions(types="model").draws
