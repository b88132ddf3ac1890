"""A standard is one file: written here, and used by compare, opcheck and opdiff without a line elsewhere."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest
from comparison.synthetic_model import capture, scaled, write
from opcheck.layer_dumps import build

from vllm_accprobe import standards
from vllm_accprobe.cli import main

PAGE = Path(__file__).parents[2] / "docs/development.md"
HALF = re.search(r"^```python\n# half.py\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)[1]
"""The standard that the page writes."""
DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture
def fresh():
    """Forgets what was found, before and after."""

    def forget():
        standards.built_in.cache_clear()
        standards.further.cache_clear()

    forget()
    yield
    forget()


@pytest.fixture
def in_the_package(tmp_path, monkeypatch, fresh):
    """A directory that is one more place of the package's files."""
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.setattr(standards, "__path__", [*standards.__path__, str(place)])
    yield place
    for name in list(sys.modules):
        if getattr(sys.modules[name], "__file__", None) in {str(p) for p in place.glob("*.py")}:
            del sys.modules[name]


def install(site, name, text):
    """A package that brings a standard by its entry point."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (site / f"{name}.py").write_text(text)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{standards.GROUP}]\nhalf = {name}\n")


def table(path):
    with path.open(newline="", encoding="utf-8") as f:
        return list(csv.DictReader(f))


def test_a_file_is_known_to_compare_opcheck_and_opdiff(in_the_package, tmp_path, capsys):
    (in_the_package / "half.py").write_text(HALF)
    one = {"prompts": {"a": [3, 14, 15, 9, 2, 6]}, "tokens": 3}
    write(capture(**one), tmp_path / "golden")
    write(capture(faults={DOWN: scaled(1.2)}, **one), tmp_path / "wrong")
    both = str(tmp_path / "golden"), str(tmp_path / "wrong")
    assert main(["compare", *both, "--standard", "half", "-o", str(tmp_path / "c"), "--no-replay"]) == 1
    rows = {(r["tap"], r["role"]): r for r in table(tmp_path / "c/compare.csv") if r["step"] == "0"}
    row = rows[DOWN, "output.0"]
    assert list(row)[-2:] == ["Near", "Said"]
    assert (row["Near"], row["Said"], row["status"]) == ("0.0", "far", "fail")
    assert row["message"] == "half: error, too few are near"
    assert rows["model.layers.0.mlp.down_proj", "output.0"]["status"] == "pass"

    dump = build(tmp_path / "ops", "layers.0.norm")
    assert main(["opcheck", str(dump), "-j", "0", "--standard", "half", "-o", str(tmp_path / "o")]) == 0
    checked = [r for r in table(tmp_path / "o/opcheck.csv") if r["status"] == "pass"]
    assert {r["algorithm"] for r in checked} == {"half"}

    worse = tmp_path / "worse.csv"
    with worse.open("w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, list(checked[0]))
        writer.writeheader()
        writer.writerows({**r, "dual_100": "0.25"} for r in checked)
    two = str(tmp_path / "o"), str(worse)
    assert main(["opdiff", *two, "--standard", "half", "-o", str(tmp_path / "d")]) == 1
    judged = [r for r in table(tmp_path / "d/details.csv") if r["status"] != "skip"]
    assert {(r["status"], r["algorithm"], r["message"]) for r in judged} == {("error", "half", "too few")}

    capsys.readouterr()
    for command, given in (("compare", both), ("opcheck", (str(dump),)), ("opdiff", two)):
        assert main([command, *given, "--standard", "nobody"]) == 2
        said = capsys.readouterr().err
        assert "unknown standard 'nobody': known are " in said
        assert ", half, " in said
        assert main([command, "--help"]) == 0
        assert "half," in capsys.readouterr().out


def test_two_files_of_one_name_are_refused(in_the_package):
    (in_the_package / "half.py").write_text(HALF)
    (in_the_package / "third.py").write_text(HALF)
    with pytest.raises(ValueError, match=r"two standards are called 'half': in .*half and .*third"):
        standards.built_in()


def test_another_package_brings_one(tmp_path, monkeypatch, capsys, fresh):
    """Also to the processes that opcheck starts."""
    install(tmp_path / "site", "half_and_more", HALF)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    dump = build(tmp_path / "ops", "layers.0.norm")
    assert main(["opcheck", str(dump), "-j", "1", "--standard", "half", "-o", str(tmp_path / "o")]) == 0
    assert {r["algorithm"] for r in table(tmp_path / "o/opcheck.csv") if r["status"] == "pass"} == {"half"}
    assert main(["opcheck", str(dump), "--standard", "nobody"]) == 2
    assert "half" in capsys.readouterr().err


def test_one_that_cannot_be_imported_is_said_where_it_may_be_meant(tmp_path, monkeypatch, fresh):
    install(tmp_path, "broken_rules", "import nowhere_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert standards.find("msprobe", standards.PAIRS).name == "msprobe"
    with pytest.raises(standards.UnknownStandard, match="broken_rules, which brings standards, cannot be imported"):
        standards.find("half", standards.PAIRS)


def test_looking_for_them_loads_nothing_heavy():
    code = "import sys; from vllm_accprobe.standards import built_in; built_in(); print(*sorted(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "vllm", "scipy", "importlib.metadata"} & set(out)
