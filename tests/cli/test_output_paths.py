"""No command writes into a dump, or over somebody else's file of a name that it uses."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from cli.cli_dumps import make
from support.peer_dumps import unpack

from vllm_accprobe.cli import main
from vllm_accprobe.cli.output_paths import is_same

THEIRS = "name,value\ncosts,12\n"


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    return str(make(tmp_path / "golden")), str(make(tmp_path / "mine"))


def tree(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line of a command that ends with 2."""
    capsys.readouterr()
    code = main(list(words))
    said = capsys.readouterr()
    lines = [line for line in said.err.splitlines() if not line.startswith("note: `accprobe ")]
    assert (code, len(lines)) == (2, 1), (code, said.err, said.out)
    return said.err


@pytest.mark.parametrize("name", ["compare.csv", "compare.json", "compare.html", "measured.npz", "replay.json"])
def test_compare_writes_over_nothing_that_is_not_its_own(name, pair, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_text(THEIRS)
    before = tree(out)
    said = refused(capsys, "compare", *pair, "--no-replay", "--out", str(out))
    assert f"has a {name} that is not of this command: nothing is overwritten" in said
    assert tree(out) == before


def test_compare_writes_over_its_own(pair: tuple[str, str], tmp_path: Path) -> None:
    """By whatever standard it was written, with replay and judged again, interrupted in the middle too."""
    out = tmp_path / "out"
    for more in (["--replay"], ["--no-replay"], ["--no-replay", "--standard", "ait"]):
        assert main(["compare", *pair, *more, "--out", str(out)]) in (0, 1), more
    assert main(["compare", "--rejudge", str(out), "--standard", "strict"]) in (0, 1)
    (out / "compare.json").write_text("")
    (out / "notes.txt").write_text(THEIRS)
    assert main(["compare", *pair, "--no-replay", "--out", str(out)]) == 0
    assert json.loads((out / "compare.json").read_text())["verdict"] == "pass"
    assert (out / "notes.txt").read_text() == THEIRS


def test_nor_through_a_link(pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, target = tmp_path / "out", tmp_path / "precious.json"
    out.mkdir()
    target.write_text("")
    (out / "compare.json").symlink_to(target)
    assert "a link compare.json" in refused(capsys, "compare", *pair, "--no-replay", "--out", str(out))
    assert target.read_text() == ""


@pytest.mark.parametrize(
    "place", ["golden", "mine", "golden/report", "mine/rank0000/new/er", "other", "other/rank0000"]
)
def test_no_report_goes_into_a_dump(place, pair, tmp_path, capsys):
    """Be it read by the command or not, and below it; and by way of a link."""
    make(tmp_path / "other")
    (tmp_path / "link").symlink_to(tmp_path / place)
    before = tree(tmp_path)
    for out in (place, "link"):
        if out == "link" and not (tmp_path / "link").exists():
            continue
        said = refused(capsys, "compare", *pair, "--no-replay", "--out", str(tmp_path / out))
        assert "which is never written into: name another directory with --out" in said
    assert tree(tmp_path) == before


def test_another_programs_run_json_makes_no_dump(pair: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"epochs": 3}')
    assert main(["compare", *pair, "--no-replay", "--out", str(tmp_path / "out")]) == 0


# --- the other commands ----------------------------------------------------------------------------------------------

WRITERS = {
    "opcheck": ("opcheck", "{golden}", "-j", "0", "--out", "{out}"),
    "opcheck-save": ("opcheck", "{golden}", "-j", "0", "--out", "{away}", "--save-failed", "{out}"),
    "gentest": ("gentest", "{golden}", "--ops", "*", "--out", "{out}"),
    "calibrate": ("compare", "{golden}", "{mine}", "--calibrate", "{out}"),
    "labels": ("labels", "{golden}", "--out", "{out}"),
    "opdiff": ("compare", "{csv}/1.csv", "{csv}/2.csv", "--out", "{out}"),
    "convert": ("convert", "{golden}", "{out}/x.h5"),
    "summary": ("inspect", "{golden}", "--csv", "{out}/x.csv"),
    "show": ("inspect", "{golden}", "model.embed_tokens", "--role", "output.0", "--step", "0", "--save", "{out}/x.npy"),
    "run": ("run", "--dir", "{out}/new", "--", "true"),
    "errcheck": ("errcheck", "--dir", "{out}/new", "--", "true"),
}
FILES = {
    "opcheck": ("opcheck.csv", "result.csv", "opcheck.json", "opcheck.csv.part"),
    "calibrate": ("calibration.json",),
    "labels": ("labels.csv", "labels.json"),
    "opdiff": ("details.csv", "result.csv", "opdiff.md"),
    "summary": ("x.csv",),
}


def words(command: str, tmp_path: Path, out: Path) -> list[str]:
    if not (tmp_path / "1.csv").exists():
        row = "matmul,Tensor.matmul,a,0,output.0,0,0,float32,[2],0.0\n"
        for name in ("1.csv", "2.csv"):
            (tmp_path / name).write_text("op,class,tap,call,role,step,rank,dtype,shape,max_abs_err\n" + row)
    places = {"golden": tmp_path / "golden", "mine": tmp_path / "mine", "out": out, "csv": tmp_path,
              "away": tmp_path / "away"}  # fmt: skip
    return [word.format(**places) for word in WRITERS[command]]


@pytest.mark.parametrize("command", WRITERS)
def test_no_command_writes_into_a_dump(command, pair, tmp_path, capsys):
    make(tmp_path / "other")
    for inside in ("golden", "other"):
        if command == "gentest":
            inside += "/new"
        before = tree(tmp_path / "golden"), tree(tmp_path / "other")
        said = refused(capsys, *words(command, tmp_path, tmp_path / inside))
        assert "never written into" in said
        assert (tree(tmp_path / "golden"), tree(tmp_path / "other")) == before


@pytest.mark.parametrize(("command", "name"), [(c, n) for c, names in FILES.items() for n in names])
def test_no_command_writes_over_what_is_not_its_own(command, name, pair, tmp_path, capsys):
    out = tmp_path / "results"
    out.mkdir()
    (out / name).write_text(THEIRS)
    said = refused(capsys, *words(command, tmp_path, out))
    assert "not of this command" in said
    assert tree(out) == {name: THEIRS.encode()}


def _with_calls(tmp_path: Path) -> None:
    """golden: one call that opcheck can check."""
    from opcheck.opcheck_dumps import one_call

    shutil.rmtree(tmp_path / "golden")
    one_call(tmp_path / "golden")


@pytest.mark.parametrize("command", [c for c in FILES if c not in ("opdiff", "labels")])
def test_each_command_writes_over_its_own(command: str, pair: tuple[str, str], tmp_path: Path) -> None:
    if command == "opcheck":
        _with_calls(tmp_path)
    out = tmp_path / "results"
    out.mkdir()
    codes = [main(words(command, tmp_path, out)) for _ in range(2)]
    assert codes[0] == codes[1] != 2
    assert set(FILES[command]) - {"opcheck.csv.part"} <= set(tree(out))


# --- the same dump given twice is a slip of the hand, and is said; a copy of it is compared ---


def test_a_part_of_it(tmp_path: Path) -> None:
    root = unpack("a_msprobe_tensor", tmp_path) / "golden"
    step = root / "step0"
    (process,) = step.iterdir()
    for inner in (step, process, process / "dump.json", process / "dump_tensor_data"):
        assert is_same(root, inner), inner
        assert is_same(inner, root), inner
    shutil.copytree(step, root / "step1")
    assert not is_same(step, root / "step1")
    assert not is_same(root, unpack("a_msprobe_tensor", tmp_path) / "mine")
    # ATB's dump in one of ours, and a folder in a folder, are dumps of their own.
    own = make(tmp_path / "own")
    shutil.copytree(unpack("e_atb", tmp_path) / "golden", own / "atb")
    assert not is_same(own, own / "atb")
    (tmp_path / "folder/mine").mkdir(parents=True)
    for place in ("folder", "folder/mine"):
        np.save(tmp_path / place / "x.npy", np.ones(4))
    assert not is_same(tmp_path / "folder", tmp_path / "folder/mine")
    assert not is_same(tmp_path / "nowhere", tmp_path / "nowhere")


def test_floors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A floor from golden itself is zero, one from what is judged excuses everything that is wrong with it."""
    golden, mine, second = (str(make(tmp_path / n)) for n in ("golden", "mine", "second"))
    out = str(tmp_path / "out")
    for floor, other in ((golden, "GOLDEN"), (mine, "MINE")):
        said = refused(capsys, "compare", golden, mine, "--floor", second, "--floor", floor, "--out", out)
        assert f"--floor and {other} are the same dump" in said
        assert main(["compare", golden, mine, "--floor", second, "--no-replay", "--out", out]) == 0
    assert "GOLDEN and OTHER are" in refused(capsys, "compare", golden, second, golden, "--calibrate", out + "2")
    assert "OTHER and OTHER are" in refused(capsys, "compare", golden, second, second, "--calibrate", out + "2")
    assert main(["compare", golden, second, "--calibrate", out + "2"]) == 0


def test_opcheck_and_opdiff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = str(make(tmp_path / "golden"))
    (tmp_path / "link").symlink_to(dump)
    said = refused(capsys, "opcheck", dump, "--against", str(tmp_path / "link"), "--out", str(tmp_path / "o"))
    assert "DUMP and --against are the same dump" in said
    row = "matmul,Tensor.matmul,a,0,output.0,0,0,float32,[2],0.0\n"
    (tmp_path / "one").mkdir()
    (tmp_path / "one/opcheck.csv").write_text("op,class,tap,call,role,step,rank,dtype,shape,max_abs_err\n" + row)
    one, file = str(tmp_path / "one"), str(tmp_path / "one/opcheck.csv")
    for words in ((one, one), (file, one), (one, file)):
        assert "same" in refused(capsys, "opdiff", *words, "--out", str(tmp_path / "d"))


@pytest.mark.parametrize(
    "name", ["a_msprobe_tensor", "b_sglang_tp", "c_msit_torch", "e_atb", "f_torchair", "d_xray_h5"]
)
def test_nor_into_another_tools(
    name: str, pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = next(p for p in sorted(unpack(name, tmp_path).iterdir()) if p.is_dir())
    assert "is a dump, which is never" in refused(capsys, "compare", *pair, "--no-replay", "--out", str(root))


def test_nor_into_a_folder_of_files_that_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There the report's own measured.npz would be a tensor the next time."""
    for side in ("golden", "mine"):
        (tmp_path / side).mkdir()
        np.save(tmp_path / side / "x.npy", np.ones((2, 2), np.float32))
    sides = [str(tmp_path / s) for s in ("golden", "mine")]
    assert "lies in the dump" in refused(capsys, "compare", *sides, "--out", str(tmp_path / "mine/report"))
    assert "is a dump" in refused(capsys, "compare", *sides, "--out", str(tmp_path / "golden"))
