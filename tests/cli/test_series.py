"""``accprobe compare GOLDEN DAY1 DAY2 …`` as a person types it."""

import json
from pathlib import Path

import pytest
from synthetic_model import capture, scaled, write

from vllm_accprobe.cli import main, series

CULPRIT = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    root = tmp_path_factory.mktemp("series")
    one = {"prompts": {"a": [3, 14, 15]}, "tokens": 2}
    write(capture(**one), root / "golden")
    write(capture(chunk=2, **one), root / "day1")
    write(capture(faults={CULPRIT: scaled(1.2)}, **one), root / "day2")
    write(capture(prompts={"a": [9]}, tokens=2), root / "other")
    return root


def run(*arguments):
    return main(["compare", *map(str, arguments), "--no-replay"])


def test_each_dump_has_its_line_and_its_folder(dumps, tmp_path, capsys):
    days = [dumps / "day1", dumps / "day2", dumps / "gone", dumps / "other"]
    assert run(dumps / "golden", *days, "-o", tmp_path / "out") == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        f"FAIL: 1 of 4 dumps differ from golden, first day2: {CULPRIT} (RowParallelLinear); "
        "2 dumps could not be compared"
    )
    assert [line.split()[:2] for line in lines[3:7]] == [
        ["day1", "pass"], ["day2", "fail"], ["gone", "unreadable"], ["other", "nothing"],
    ]  # fmt: skip
    assert "does not exist" in lines[5]
    assert "different prompt tokens" in lines[6]
    assert lines[7:] == [f"wrote {tmp_path / 'out' / name}" for name in ("series.json", "series.html")]
    written = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    kinds = ("compare.csv", "compare.html", "compare.json", "measured.npz")
    own = {f"{day}/{name}" for day in ("day1", "day2") for name in kinds}
    assert written == {"series.html", "series.json", *own}
    data = json.loads((tmp_path / "out" / "series.json").read_text())
    assert [d["exit_code"] for d in data["dumps"]] == [0, 1, 2, 3]
    assert data["dumps"][1]["origins"][0]["module"] == CULPRIT
    alone = json.loads((tmp_path / "out" / "day2" / "compare.json").read_text())
    assert alone["origins"][0]["module"] == CULPRIT


def test_exit_codes_and_formats(dumps, tmp_path, capsys):
    golden, day1, day2 = (dumps / name for name in ("golden", "day1", "day2"))
    assert run(golden, day1, day2, "-o", tmp_path / "a", "--format", "json") == 1
    said = capsys.readouterr()
    assert json.loads(said.out) == json.loads((tmp_path / "a" / "series.json").read_text())
    assert "wrote" in said.err
    assert run(golden, day1, day1, "-o", tmp_path / "b", "-q") == 0
    assert "wrote" not in capsys.readouterr().out
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == ["day1", "day1-2", "series.html", "series.json"]
    assert run(golden, day1, dumps / "other", "-o", tmp_path / "c", "--format", "markdown") == 3
    assert capsys.readouterr().out.startswith("## accprobe: INCOMPLETE")


def test_a_golden_that_cannot_be_read_is_one_line(dumps, tmp_path, capsys):
    assert run(dumps / "gone", dumps / "day1", dumps / "day2", "-o", tmp_path / "out") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.strip().splitlines()) == 1
    assert "gone" in said.err
    assert not (tmp_path / "out" / "series.html").exists()


def test_one_after_the_other_and_none_stays(dumps, tmp_path, monkeypatch):
    """Of earlier comparisons nothing is held but their entries, and each leaves the series written."""
    import gc

    from vllm_accprobe.comparison.result import Comparison

    seen = []
    real = series._write

    def counted(golden, entries, out):
        seen.append(sum(isinstance(x, Comparison) for x in gc.get_objects()))
        real(golden, entries, out)
        assert len(json.loads((out / "series.json").read_text())["dumps"]) == len(entries)

    before = sum(isinstance(x, Comparison) for x in gc.get_objects())
    monkeypatch.setattr(series, "_write", counted)
    assert run(dumps / "golden", dumps / "day1", dumps / "day2", dumps / "day1", "-o", tmp_path) == 1
    assert seen == [before] * 3


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["--plan"], "--plan says how two dumps are paired"),
        (["result.csv"], "torch_xray's table of two dumps"),
        (["--rejudge", "x"], "--rejudge judges what was measured"),
    ],
)
def test_what_a_series_has_not(dumps, tmp_path, capsys, more, line):
    assert run(dumps / "golden", dumps / "day1", dumps / "day2", *more, "-o", tmp_path / "out") == 2
    assert line in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_golden_is_no_day_and_a_file_of_somebody_stays(dumps, tmp_path, capsys):
    golden, day1 = dumps / "golden", dumps / "day1"
    assert run(golden, day1, golden, "-o", tmp_path / "out") == 2
    assert "are the same dump" in capsys.readouterr().err
    for name in ("series.json", "series.html", "day1/compare.csv"):
        place = tmp_path / name.replace("/", "-") / name
        place.parent.mkdir(parents=True)
        place.write_text("mine")
        assert run(golden, day1, dumps / "day2", "-o", tmp_path / name.replace("/", "-")) == 2
        assert "not of this command" in capsys.readouterr().err
        assert place.read_text() == "mine"
    assert run(golden, day1, dumps / "day2", "-o", day1) == 2
    assert "never written into" in capsys.readouterr().err


def test_a_series_is_written_over_its_own(dumps, tmp_path):
    for _ in range(2):
        assert run(dumps / "golden", dumps / "day1", dumps / "day2", "-o", tmp_path) == 1


def test_names_of_folders():
    given = ["a/day", "b/day", "c/Day", "series.html", "d/day-2", "x/.."]
    found = series.names([Path(p) for p in given])
    assert found[:5] == ["day", "day-2", "Day-3", "series.html-2", "day-2-2"]
    assert found[5] == Path.cwd().name


def test_only_a_last_csv_is_a_table(tmp_path):
    (tmp_path / "day.csv").mkdir()
    folder = tmp_path / "day.csv"
    assert series.told_apart([Path("a"), Path("r.csv")]) == (Path("r.csv"), [Path("a")])
    assert series.told_apart([folder]) == (None, [folder])
    assert series.told_apart([Path("r.csv"), Path("a")]) == (None, [Path("r.csv"), Path("a")])
