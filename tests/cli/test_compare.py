"""``accprobe compare`` as a person types it: exit codes, files, one line for what goes wrong."""

import base64
import gzip
import json
import re
import subprocess
import sys

import pytest
from synthetic_model import capture, scaled, write

from vllm_accprobe.cli import main


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    root = tmp_path_factory.mktemp("cli")
    one = {"prompts": {"a": [3, 14, 15]}, "tokens": 2}
    write(capture(**one), root / "golden")
    write(capture(chunk=2, **one), root / "same")
    write(capture(faults={"model.layers.1.mlp.down_proj": scaled(1.2)}, **one), root / "wrong")
    return root


def run(*arguments):
    return main(["compare", *map(str, arguments)])


def test_a_tokenizer_puts_text_into_the_page_alone(dumps, tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {f"secret{i}": i for i in range(64)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "secret0")).save(str(tmp_path / "tokenizer.json"))
    out = tmp_path / "out"
    assert run(dumps / "golden", dumps / "wrong", "-o", out, "--tokenizer", tmp_path) == 1
    said = capsys.readouterr()
    assert "secret" not in said.out + said.err
    heat = _view(out)["heat"]
    assert [heat["texts"][str(t)] for (t,) in heat["requests"][0]["tokens"][:3]] == ["secret3", "secret14", "secret15"]
    assert b"secret" not in b"".join((out / f"compare.{kind}").read_bytes() for kind in ("csv", "json"))
    assert run("--rejudge", out, "--tokenizer", tmp_path / "tokenizer.json") == 1  # from where mine was
    beside = tmp_path / "out-rejudged"
    assert _view(beside)["heat"]["requests"][0]["tokens"]
    assert run("--rejudge", out) == 1
    assert _view(beside)["heat"]["texts"] == {}
    assert _view(out)["heat"] == heat
    capsys.readouterr()
    assert run(dumps / "golden", dumps / "wrong", "-o", tmp_path / "new", "--tokenizer", dumps) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "new").exists()


def _view(out):
    packed = re.search(r'id="view-json">(.*?)</script>', (out / "compare.html").read_text(), re.S)[1]
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def test_neither_torch_nor_vllm_is_imported(dumps, tmp_path):
    code = (
        "import sys; from vllm_accprobe.cli import main\n"
        f"main(['compare', {str(dumps / 'golden')!r}, {str(dumps / 'same')!r}, '-o', {str(tmp_path)!r}])\n"
        "print(sorted({m.partition('.')[0] for m in sys.modules} & {'torch', 'vllm', 'pandas', 'h5py'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_saved_comparison_is_judged_again_without_the_dumps(dumps, tmp_path, capsys, monkeypatch):
    import shutil

    for name in ("golden", "wrong"):
        shutil.copytree(dumps / name, tmp_path / name)
    assert run(tmp_path / "golden", tmp_path / "wrong", "-o", tmp_path / "out") == 1
    first = (tmp_path / "out" / "compare.csv").read_bytes(), (tmp_path / "out" / "compare.json").read_bytes()
    for name in ("golden", "wrong"):
        shutil.rmtree(tmp_path / name)
    assert run("--rejudge", tmp_path / "out", "-o", tmp_path / "again") == 1
    again = (tmp_path / "again" / "compare.csv").read_bytes(), (tmp_path / "again" / "compare.json").read_bytes()
    assert again == first
    total = len(again[0].splitlines()) - 1
    note = capsys.readouterr().err.splitlines()[-1]
    measured = tmp_path / "out" / "measured.npz"
    assert note == (
        f"note: judged again: the errors of {total:,} pairs are those that were measured ({measured}), nothing was "
        "replayed then; no tensor was read and no operator run again, so that sampled values and histograms are "
        "missing: compare the dumps for these"
    )
    assert run("--rejudge", tmp_path / "out", "--standard", "strict") == 1
    assert json.loads((tmp_path / "out-rejudged" / "compare.json").read_text())["standard"]["name"] == "strict"
    assert first == tuple((tmp_path / "out" / f"compare.{kind}").read_bytes() for kind in ("csv", "json"))
    monkeypatch.chdir(tmp_path / "out")
    assert run("--rejudge", ".") == 1  # beside it, too
    assert first[1] == (tmp_path / "out" / "compare.json").read_bytes()


def test_the_false_alarm_rate_reaches_the_judge_and_the_file(dumps, tmp_path, monkeypatch):
    """What the judge makes of it is tests/judge's."""
    from vllm_accprobe import compare
    from vllm_accprobe.comparison import engine

    given = []
    judge = engine.judge
    monkeypatch.setattr(engine, "judge", lambda *a, rate: given.append(rate) or judge(*a, rate=rate))
    both = dumps / "golden", dumps / "wrong"

    def said(directory):
        return json.loads((directory / "compare.json").read_text())["false_alarm_rate"]

    assert run(*both, "-o", tmp_path / "a") == run(*both, "-o", tmp_path / "b", "--false-alarm-rate", "0.25") == 1
    assert (said(tmp_path / "a"), said(tmp_path / "b")) == (0.001, 0.25)
    assert run("--rejudge", tmp_path / "a", "--false-alarm-rate", "1e-6", "-o", tmp_path / "c") == 1
    assert said(tmp_path / "c") == 1e-6
    assert compare(*both, rate=0.5).to_json()["false_alarm_rate"] == 0.5
    assert given == [0.001, 0.25, 1e-6, 0.5]
    with pytest.raises(engine.CompareError, match="below 1, not '0"):
        compare(*both, rate="0.5")


@pytest.mark.parametrize("alone", [True, False])
def test_the_collector_leaves_out_what_a_command_imported_and_nothing_of_others(dumps, tmp_path, monkeypatch, alone):
    frozen, words = (
        [],
        ["compare", str(dumps / "golden"), str(dumps / "same"), "--no-replay", "-o", str(tmp_path / "o")],
    )
    monkeypatch.setattr("gc.freeze", lambda: frozen.append("vllm_accprobe.comparison.engine" in sys.modules))
    monkeypatch.setattr("atexit.register", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["accprobe", *words])
    assert main(None if alone else words) == 0
    assert frozen == [True] * alone
