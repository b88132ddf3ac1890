"""How a machine computes, as the commands tell it: opcheck, calibrate --profile, compare."""

import csv
import json
from pathlib import Path

import machines as m
import pytest

from vllm_accprobe.cli import main
from vllm_accprobe.judge.profile import Profile

LOW = m.Machine(linear=m.low(1))
SAID = "adds up in bfloat16, rounded after every term (up to 64 roundings of bfloat16)"


def test_opcheck_tells_it_once_and_the_files_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = m.dump(tmp_path / "dump", LOW, "linear"), tmp_path / "out"
    assert main(["opcheck", str(path), "-j", "1", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert said.count("adds up in bfloat16") == 1
    assert f"How this machine computes:\n  ReplicatedLinear, bfloat16: {SAID}; rounds to nearest\n" in said
    with (out / "opcheck.csv").open(newline="") as f:
        rows = [r for r in csv.DictReader(f) if r["step"]]
    assert {(r["status"], r["habit"]) for r in rows} == {("pass", "adds up in bfloat16, rounded after every term")}
    assert all(float(r["measured"]) <= float(r["allowed"]) for r in rows)
    assert {h.layers for h in Profile.read(out / "profile.json").habits} == {4}
    again = ["opcheck", str(path), "-j", "1", "--out", str(out), "--resume"]
    assert main(again) == 0
    assert capsys.readouterr().out == said
    assert main([*again[:-1], "--standard", "strict"]) == 1


def test_a_profile_is_made_of_one_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = m.dump(tmp_path / "dump", m.Machine(norm=m.twice_norm))
    assert main(["compare", str(path), "--calibrate", str(tmp_path / "out"), "--profile"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "How this machine computes:"
    assert said[-1] == f"wrote {tmp_path / 'out' / 'profile.json'}"
    found = Profile.read(tmp_path / "out" / "profile.json")
    assert {(h.operator, h.kind) for h in found.habits} >= {("RMSNorm", "twice"), ("ReplicatedLinear", "accumulator")}


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["{dump}", "--calibrate", "{out}"], "name a further run"),
        (["{dump}", "{dump}", "--calibrate", "{out}", "--profile"], "one dump"),
        (["{dump}", "{dump}", "--calibrate", "{out}", "--weights", "."], "--weights goes with --profile"),
        (["{dump}/none", "--calibrate", "{out}", "--profile"], "does not exist"),
        (["{dump}", "--calibrate", "{dump}", "--profile"], "dump"),
    ],
)
def test_what_does_not_fit_is_one_line(args, why, tmp_path, capsys):
    path = m.dump(tmp_path / "dump", m.HONEST, "linear")
    assert main(["compare", *(a.format(dump=path, out=tmp_path / "out") for a in args)]) == 2
    said = capsys.readouterr().err
    assert why in said
    assert said.count("\n") == 1


def test_a_comparison_carries_both_machines(tmp_path: Path) -> None:
    golden, mine = (m.dump(tmp_path / n, x, "linear") for n, x in (("golden", m.HONEST), ("mine", LOW)))
    assert main(["compare", str(golden), str(mine), "--replay", "--out", str(tmp_path / "out")]) == 0
    machines = json.loads((tmp_path / "out" / "replay.json").read_text())["machines"]
    words = {side: {h["words"] for h in habits} for side, habits in machines.items()}
    assert words["golden"] == {"rounds to nearest", "adds up in float32 or wider"}
    assert words["mine"] == {"rounds to nearest", "adds up in bfloat16, rounded after every term"}
    assert json.loads((tmp_path / "out" / "compare.json").read_text())["origins"] == []
