"""How a machine computes, as the commands tell it: opcheck, calibrate --profile, compare."""

import json
from pathlib import Path

import machines as m
import pytest

from vllm_accprobe.cli import main

LOW = m.Machine(linear=m.low(1))


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
