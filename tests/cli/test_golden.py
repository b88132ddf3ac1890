import json
import shutil
from pathlib import Path

import pytest
from pack_dumps import dump
from synthetic_model import scaled

from vllm_accprobe.cli import main


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    dump(home / "golden", together=False)
    dump(home / "mine", faults={"model.layers.1.mlp.down_proj": scaled(1.5)})
    (home / "notes.txt").write_text("mine")
    assert main(["golden", "pack", str(home / "golden"), "--out", str(home / "x.golden")]) == 0
    small = ["--out", str(home / "packs" / "y.golden"), "--max-mb", ".04"]
    assert main(["golden", "pack", str(home / "mine"), *small]) == 0
    data = bytearray((home / "x.golden").read_bytes())
    data[len(data) // 2] ^= 1
    (home / "altered.golden").write_bytes(data)
    (home / "history").mkdir()
    for name in ("x.golden", "altered.golden", "packs/y.golden"):
        shutil.copy(home / name, home / "history")
    shutil.copy(home / "x.golden", home / "history" / "a\nforged.golden")
    return home


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("golden verify x.golden", 0, "PASS: x.golden"),
        ("golden verify x.golden packs/y.golden", 0, "PASS: packs/y.golden: its model is not named; manifest "),
        ("golden verify x.golden altered.golden", 1, "FAIL: altered.golden"),
        ("golden verify x.golden --sha256 0123456789abcdef", 1, "not 0123456789abcdef"),
        ("golden verify x.golden --sha256 01", 2, "16 digits or more"),
        ("golden verify notes.txt", 2, "notes.txt"),
        ("golden verify absent.golden", 2, "absent.golden"),
        ("golden verify notes.txt altered.golden x.golden", 2, "PASS: x.golden"),
        ("golden verify altered.golden notes.txt", 2, "FAIL: notes.txt"),
        ("golden verify history", 1, "PASS: history/a\\nforged.golden"),
        ("golden verify history --index", 1, "FAIL: history/altered.golden"),
        ("golden verify golden", 2, "has no pack"),
        ("golden verify x.golden --index", 2, "--index is of one folder"),
        ("golden verify packs --sha256 0123456789abcdef", 2, "of one pack"),
        ("golden history history", 1, "cannot be compared"),
        ("golden history history", 1, "a\\nforged.golden"),
        ("golden history packs", 0, "first"),
        ("golden history golden", 2, "has no pack"),
        ("golden pack golden --out notes.txt", 2, "is not of this command"),
        ("golden pack golden --out golden/x.golden", 2, "never written into"),
        ("golden pack absent --out z.golden", 2, "does not exist"),
        ("compare x.golden golden --no-replay --out out1", 0, "PASS"),
        ("compare x.golden mine --no-replay --out out2", 1, "model.layers.1.mlp.down_proj"),
        ("compare golden packs/y.golden --no-replay --out out3", 1, "model.layers.1.mlp.down_proj"),
        ("compare altered.golden mine --no-replay --out out4", 2, "altered.golden"),
        ("compare x.golden mine --plan", 0, "requests:"),
        ("compare x.golden mine --ray auto", 2, "without --ray"),
        ("inspect x.golden --limit 1", 0, "is a golden pack"),
    ],
)
def test_commands(home, words, code, said, capsys, monkeypatch):
    monkeypatch.chdir(home)
    assert main(words.split()) == code
    out, err = capsys.readouterr()
    assert said in out + err
    assert code != 2 or "FAIL: " in out or (err.count("\n") == 1 and err.startswith("accprobe: "))


def test_a_collection_has_an_index(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Written where all packs are whole; then another pack, one more and one less are found."""
    packs = tmp_path / "packs"
    (packs / "a").mkdir(parents=True)
    for name in ("a/one.golden", "two.golden"):
        shutil.copy(home / "x.golden", packs / name)
    assert main(["golden", "verify", str(packs), "--index"]) == 0
    index = json.loads((packs / "index.json").read_text())
    assert list(index) == ["a/one.golden", "two.golden"]
    assert index["two.golden"]["bytes"] == (packs / "two.golden").stat().st_size
    assert main(["golden", "verify", str(packs)]) == 0
    shutil.copy(home / "packs" / "y.golden", packs / "two.golden")
    shutil.copy(home / "x.golden", packs / "three.golden")
    capsys.readouterr()
    assert main(["golden", "verify", str(packs)]) == 1
    out = capsys.readouterr().out
    assert "two.golden: its manifest has the SHA-256" in out
    assert "three.golden is not in index.json" in out
    (packs / "a/one.golden").unlink()
    assert main(["golden", "verify", str(packs)]) == 2
    assert "FAIL: cannot read" in capsys.readouterr().out
    for bad in ('{"../x.golden": {"sha256": "%s"}}' % ("0" * 64), "[]", '{"x": {"sha256": 1}}',
                '{"x": {"sha256": %s}}' % ("1" * 64), r'{"\u0000": {"sha256": "%s"}}' % ("0" * 64),
                r'{"\ud800": {"sha256": "%s"}}' % ("0" * 64)):
        (packs / "index.json").write_text(bad)
        assert main(["golden", "verify", str(packs)]) == 2
        assert "is no index of packs" in capsys.readouterr().err


def test_json(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    assert main(["golden", "verify", "x.golden", "altered.golden", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [p["verdict"] for p in found["packs"]] == ["pass", "fail"]
    assert main(["compare", "x.golden", "mine", "--no-replay", "--json", "--out", "out5"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["golden"] == "x.golden"
