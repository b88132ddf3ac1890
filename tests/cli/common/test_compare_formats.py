"""``accprobe compare --format``: stdout holds that format alone, at three verbosities."""

import json

import pytest
from synthetic_model import capture, scaled, write

from vllm_accprobe.cli import main


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    root = tmp_path_factory.mktemp("formats")
    one = {"prompts": {"a": [3, 14, 15]}, "tokens": 2}
    write(capture(**one), root / "golden")
    write(capture(faults={"model.layers.1.mlp.down_proj": scaled(1.2)}, **one), root / "wrong")
    return root


def said(dumps, out, capsys, *options):
    assert main(["compare", str(dumps / "golden"), str(dumps / "wrong"), "-o", str(out), *options]) == 1
    return capsys.readouterr()


def test_json_is_compare_json(dumps, tmp_path, capsys):
    text = said(dumps, tmp_path, capsys, "--format", "json")
    assert json.loads(text.out) == json.loads((tmp_path / "compare.json").read_text())
    assert "compare.html" in text.err


def test_github_annotates_and_adds_to_the_summary(dumps, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    lines = said(dumps, tmp_path, capsys, "--format", "github").out.splitlines()
    assert lines[0].startswith("::error title=accprobe%3A culprit::model.layers.1.mlp.down_proj")
    assert all(line.startswith("::") for line in lines)
    assert (tmp_path / "summary.md").read_text().startswith("## accprobe: FAIL\n")


def test_markdown(dumps, tmp_path, capsys):
    assert said(dumps, tmp_path, capsys, "--format", "markdown").out.startswith("## accprobe: FAIL\n\n`FAIL: model.")


def test_three_verbosities(dumps, tmp_path, capsys):
    quiet, usual, full = (said(dumps, tmp_path, capsys, *o).out for o in (["-q"], [], ["-v"]))
    assert quiet.startswith("FAIL: model.layers.1.mlp.down_proj")
    assert len(quiet.splitlines()) == 1
    assert "\ncoverage:\n" in usual
    assert "\nplan:\n" not in usual
    assert "\nplan:\n" in full
    assert set(usual.splitlines()) - set(full.splitlines()) == set()


def test_unknown_format_is_one_line(dumps, tmp_path, capsys):
    assert main(["compare", "a", "b", "--format", "xml"]) == 2
    error = capsys.readouterr().err
    assert "xml" in error
    assert error.count("\n") == 1
