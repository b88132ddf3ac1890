"""docs/development.md does what it says: its code is run as it stands there, and what is broken is one line."""

import csv
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from dump.dumps import put_event

from vllm_accprobe.cli import main
from vllm_accprobe.dump.writer import RankWriter, write_run_json
from vllm_accprobe.formats import DumpError, open_dump
from vllm_accprobe.formats.common import sniff

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAGE = Path(__file__).parents[2] / "docs/development.md"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE.read_text(), re.M | re.S)


def install(site: Path, package: str, groups: dict[str, dict[str, str]], modules: dict[str, str]) -> None:
    info = site / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"[{g}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for g, points in groups.items()]
    (info / "entry_points.txt").write_text("".join(lines))
    for name, code in modules.items():
        (site / f"{name}.py").write_text(code)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place for packages; what is imported of it is forgotten afterwards. Processes that are started see it too."""
    path = tmp_path / "site"
    path.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(path))
    monkeypatch.syspath_prepend(str(path))
    before = set(sys.modules)
    yield path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(path)):
            del sys.modules[name]


@pytest.fixture
def page(site: Path) -> Path:
    """The page's package, installed."""
    (toml,) = blocks("toml")
    modules = {code.splitlines()[0].removeprefix("# ").removesuffix(".py"): code for code in blocks("python")}
    points = tomllib.loads(toml)["project"]["entry-points"]
    assert {v for group in points.values() for v in group.values()} == set(modules)
    install(site, "our_logger", points, modules)
    return site


def logged(path: Path, factor: float = 1.0) -> Path:
    """A dump of the page's tool: one call of FusedVendorNorm; factor 1.0: its output is right."""
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((6, 32)).astype(np.float32), rng.random(32, np.float32) + 1
    y = x / np.sqrt((x.astype(float) ** 2).mean(-1, keepdims=True) + 1e-6) * weight * factor
    path.mkdir(parents=True)
    lines = [["step", "module", "class", "role", "file"]]
    for role, value in (("param.weight", weight), ("input.x", x), ("output.0", y.astype(np.float32))):
        np.save(path / f"{role}.npy", value)
        lines.append(["0", "layers.0.norm", "FusedVendorNorm", role, f"{role}.npy"])
    with (path / "logger.csv").open("w", newline="") as f:
        csv.writer(f).writerows(lines)
    return path


def checked(out: Path) -> list[tuple[str, str, str]]:
    """(operator, role, status) of each row."""
    with (out / "opcheck.csv").open(newline="") as f:
        return [(r["op"], r["role"], r["status"]) for r in csv.DictReader(f)]


def own(path: Path) -> Path:
    write_run_json(path, {"model": "tests"})
    writer = RankWriter(path, 0, {}, budget_bytes=1 << 30, block_bytes=1 << 16)
    value = np.arange(64, dtype=np.float32)
    event = {"event": "tensor", "step": 0, "tap": "a", "class": "Linear", "role": "output.0", "call": 0, "seq": 0}
    put_event(writer, value, {**event, "dtype": "float32", "shape": [8, 8]})
    writer.close("done", {})
    return path


def test_the_page_s_format_is_a_dump_like_any_other(tmp_path, page, capsys):
    a, b = logged(tmp_path / "a"), logged(tmp_path / "above/b")
    assert [r.name for r in open_dump(a).records] == ["param.weight.npy", "input.x.npy", "output.0.npy"]
    assert main(["inspect", str(a)]) == 0
    assert "layers.0.norm" in capsys.readouterr().out
    above = tmp_path / "above"  # found below it, because the format is strict
    assert main(["compare", str(a), str(above), "--out", str(tmp_path / "out")]) == 0
    assert f"holds one: {b} was opened" in "".join(capsys.readouterr())
    assert main(["inspect", "--formats", str(a)]) == 0
    assert capsys.readouterr().out == "logger\n"
    assert main(["inspect", "--formats"]) == 0
    listed = capsys.readouterr().out.splitlines()
    names = [line.split("  ")[0] for line in listed]  # tests/freeze has all of ours, in their order
    assert (names[0], names[-3:]) == ("accprobe", ["logger", "single file", "folder"])
    assert listed[-3].endswith("a directory with logger.csv (step,module,class,role,file) (our_logger)")


def test_the_page_s_reference_judges_an_operator(tmp_path, page, capsys):
    right, wrong = logged(tmp_path / "right"), logged(tmp_path / "wrong", 1.01)
    for dump, code, word in ((right, 0, "pass"), (wrong, 1, "fail")):
        out = tmp_path / f"out-{word}"
        assert main(["opcheck", str(dump), "--out", str(out)]) == code, "".join(capsys.readouterr())
        assert checked(out) == [("FusedVendorNorm", "output.0", word)]


@pytest.mark.parametrize("way", [["--rerun", "-j", "0"], ["--against", "device", "-j", "0"]], ids=["rerun", "device"])
def test_the_page_s_device_kernel_runs_here(way, tmp_path, page, capsys, monkeypatch):
    monkeypatch.setattr("vllm_accprobe.opcheck.run.rerun.accelerator", lambda: "cpu")  # whatever this machine has
    right, wrong = logged(tmp_path / "right"), logged(tmp_path / "wrong", 1.01)
    for dump, code, word in ((right, 0, "pass"), (wrong, 1, "fail")):
        out = tmp_path / f"out-{word}"
        assert main(["opcheck", str(dump), *way, "--out", str(out)]) == code, "".join(capsys.readouterr())
        assert checked(out) == [("FusedVendorNorm", "output.0", word)]


def test_the_page_s_device_kernel_has_the_reference_s_gradients(tmp_path, page, capsys):
    right, out = logged(tmp_path / "right"), tmp_path / "out"
    assert main(["opcheck", str(right), "--backward", "-j", "0", "--out", str(out)]) == 0, "".join(capsys.readouterr())
    roles = ("output.0", "grad.input.x", "grad.param.weight")
    assert checked(out) == [("FusedVendorNorm", role, "pass") for role in roles]


def test_a_reference_without_a_device_kernel_is_skipped_by_a_rerun(tmp_path, site, capsys):
    (code,) = (code for code in blocks("python") if "@device_kernel" in code)
    only = {"vendor_checks": code.partition("\n\n\n@device_kernel")[0]}
    logger = {"logger_dumps": next(code for code in blocks("python") if "# logger_dumps.py" in code)}
    groups = {"vllm_accprobe.references": {"v": "vendor_checks"}, "vllm_accprobe.formats": {"logger": "logger_dumps"}}
    install(site, "half", groups, only | logger)
    assert main(["opcheck", str(logged(tmp_path / "d")), "--rerun", "-j", "0", "--out", str(tmp_path / "o")]) == 3
    assert "no reference for FusedVendorNorm" in "".join(capsys.readouterr())


BROKEN = {
    "raises": ("raise RuntimeError('no card here')", "RuntimeError: no card here"),
    "lacks": ("NAME, HOW, ORDER = 'x', 'y', 1\ndef open(path): ...\n", "ValueError: it has no function recognise"),
    "ours": ("NAME, HOW, ORDER = 'msprobe', 'y', 1\ndef open(path): ...\ndef recognise(path): ...\n",
             "ValueError: another format is called msprobe"),
    "wrong": ("NAME, HOW, ORDER = 'x', '', 1\n", "ValueError: HOW is ''"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_format_is_a_line_and_is_left_out(kind, tmp_path, site, capsys):
    code, why = BROKEN[kind]
    install(site, "broken", {"vllm_accprobe.formats": {"bad": "bad_format"}}, {"bad_format": code})
    sentence = f"formats of bad cannot be used: {why}"
    assert main(["inspect", "--formats"]) == 0
    said = capsys.readouterr()
    assert said.err == f"note: {sentence}\n"
    assert len(said.out.splitlines()) == 1 + len(sniff.ours())
    np.save(tmp_path / "x.npy", np.ones(3))
    assert open_dump(tmp_path / "x.npy").problems == [sentence]
    (tmp_path / "nothing").mkdir()
    with pytest.raises(DumpError, match=re.escape(sentence)):
        open_dump(tmp_path / "nothing")


CRASHES = """
NAME, HOW, ORDER = "odd", "y", 1


def recognise(path):
    return path.name == "odd" or {}["sniffing"]


def open(path):
    return {}["opening"]
"""


def test_a_format_that_crashes_is_a_line(tmp_path: Path, site: Path) -> None:
    install(site, "crashes", {"vllm_accprobe.formats": {"bad": "odd_format"}}, {"odd_format": CRASHES})
    np.save(tmp_path / "x.npy", np.ones(3))
    assert open_dump(tmp_path / "x.npy").problems == ["formats of odd cannot be used: KeyError: 'sniffing'"]
    (tmp_path / "odd").mkdir()
    with pytest.raises(DumpError, match=r"cannot read .*odd: formats of odd cannot be used: KeyError: 'opening'"):
        open_dump(tmp_path / "odd")


def test_our_own_dumps_need_nobody_s_code(tmp_path: Path, site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(site, "broken", {"vllm_accprobe.formats": {"bad": "bad_format"}}, {"bad_format": "1 / 0"})
    a, b = own(tmp_path / "a"), own(tmp_path / "b")
    for _ in range(2):  # the second time into what is there
        assert main(["compare", str(a), str(b), "--out", str(tmp_path / "out")]) == 0
    assert main(["inspect", str(a)]) == 0
    assert "bad_format" not in sys.modules
    assert "cannot be used" not in "".join(capsys.readouterr())
