"""Which of a library's files a label means, and that no path leads out of the named directories."""

import os
from pathlib import Path

import pytest

from vllm_accprobe.dump.label_files import Label, locate

PATH = "0_Model/3_Attention/after/outTensor0.bin"


def label(path: str = PATH, *, pid: int = 77, task: str = "", execution: int = 0) -> Label:
    return Label(0, 0, "label:x", "acl", 0, path, pid, task, execution)


def put(root: Path, front: str, name: str = "outTensor0.bin") -> Path:
    file = root / front / "0_Model/3_Attention/after" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"x")
    return file


OF_TASK, RUNS = {"task": "77_1"}, tuple(f"tensors/0_77/{n}" for n in (0, 1, 10))
FOUND: dict[str, tuple[tuple[str, ...], dict[str, object], int | str]] = {
    "right there": ((".",), {}, 0),
    **{f"in {front}": ((front,), OF_TASK, 0) for front in (
        "tensors/77/77_1", "tensors/77_1", "msit_dump_2026/tensors/0_77/0", "ait_dump/tensors/1_77/0",
        "tensors/thread_4")},
    "its execution": ((*RUNS, "tensors/0_78/1"), {"execution": 1}, 1),
    "its tenth execution": (RUNS, {"execution": 10}, 2),
    "an execution that was not written": (
        RUNS, {"execution": 2}, "executions 0, 1, 10 were written, this is number 2",
    ),
    "its task": (("tensors/77/77_0", "tensors/77/77_1"), OF_TASK, 1),
    "another process": (("tensors/0_78/0",), {}, "only other processes than 77 have written such a file"),
    "several that fit": (("a", "b"), {}, "2 files fit: a, b ..."),
    "nothing there": ((), {}, "its file was not found"),
}  # fmt: skip
"""Label → the folders that hold a file, what the label says of itself, and which of them it means, or why none."""


@pytest.mark.parametrize("case", FOUND)
def test_the_file_that_a_label_means(case, tmp_path):
    fronts, said, expected = FOUND[case]
    files = [put(tmp_path, front) for front in fronts]
    found = (None, expected) if isinstance(expected, str) else (files[expected], "")
    assert locate(label(**said), [tmp_path / "missing", tmp_path]) == found


def test_newer_libraries_write_small_letters(tmp_path: Path) -> None:
    file = put(tmp_path, "tensors/0_77/0", "outtensor0.bin")
    assert locate(label(), [tmp_path]) == (file, "")


def test_roots_that_lie_in_one_another_find_a_file_once(tmp_path: Path) -> None:
    """The library's directory below the current one, the same one by a link and by another spelling, a second name."""
    file = put(tmp_path / "out/atb", "tensors/thread_4")
    (tmp_path / "link").symlink_to(tmp_path / "out")
    out = tmp_path / "out"
    for roots in ([out / "atb", out], [out, out / "atb"], [out, tmp_path / "link"], [out, out / "atb/.."], [out, out]):
        found, why = locate(label(), roots)
        assert why == "", roots
        assert found is not None
        assert found.samefile(file)
    other = out / "brought/thread_4"
    (other / "0_Model/3_Attention/after").mkdir(parents=True)
    os.link(file, other / PATH)
    assert locate(label(), [out])[1] == ""
    put(tmp_path / "out/atb", "tensors/thread_5")
    assert locate(label(), [out, out / "atb"])[1].startswith("2 files fit: ")


def test_of_the_spellings_the_one_counts_that_says_whose_it_is(tmp_path: Path) -> None:
    """A root may itself be the directory of the process, or of the execution."""
    mine, other = (put(tmp_path, f"tensors/0_{pid}/3") for pid in (77, 78))
    roots = [tmp_path / "tensors/0_77", tmp_path / "tensors/0_78", tmp_path]
    for order in (roots, roots[::-1]):
        found, _ = locate(label(execution=3), order)
        assert found is not None
        assert found.samefile(mine)
        assert not found.samefile(other)


@pytest.mark.parametrize("path", ["../secret.bin", "a/../../secret.bin", "", "a\0b"])
def test_no_path_leads_out(tmp_path: Path, path: str) -> None:
    (tmp_path / "secret.bin").write_bytes(b"x")
    (tmp_path / "dump/a").mkdir(parents=True)
    assert locate(label(path), [tmp_path / "dump"]) == (None, "its path is no path of a file below a directory")


def test_absolute_paths_count_below_named_directories_only(tmp_path: Path) -> None:
    file = put(tmp_path, "out")
    outside = (None, "its file lies outside the directories that were named")
    assert locate(label(str(file)), [tmp_path / "out"]) == (file, "")
    assert locate(label(str(file)), [tmp_path / "dump"]) == outside
    assert locate(label("/etc/passwd"), [tmp_path]) == outside


def test_links_are_not_followed_out(tmp_path: Path) -> None:
    put(tmp_path, "secret")
    (tmp_path / "dump").mkdir()
    os.symlink(tmp_path / "secret", tmp_path / "dump" / "tensors")
    os.symlink(tmp_path / "secret" / "0_Model", tmp_path / "dump" / "0_Model")
    assert locate(label(), [tmp_path / "dump"])[0] is None
