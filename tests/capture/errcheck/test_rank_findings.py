"""What a rank has found so far: which alarm counts, and what its report says."""

import dataclasses
from pathlib import Path

from dump.errcheck_reports import FOUND

from vllm_accprobe.capture.errcheck.findings import RankFindings
from vllm_accprobe.config import ProbeConfig
from vllm_accprobe.dump.findings import read

CONFIG = ProbeConfig(errcheck=("nan",))
PARALLEL = {"rank": 3, "pp": (1, 2), "dp": (4, 8)}


def test_the_first_alarm_counts_and_again_when_its_tensors_are_held(tmp_path: Path) -> None:
    findings = RankFindings(tmp_path, CONFIG, PARALLEL)
    assert findings.counts("a", False)
    findings.first = dataclasses.replace(FOUND, tap="a", dtype="")
    assert [findings.counts(*alarm) for alarm in (("b", True), ("a", False), ("a", True))] == [False, False, True]
    findings.first = dataclasses.replace(FOUND, tap="a", dtype="bfloat16")
    assert not findings.counts("a", True)
    findings.steps, findings.taps = 7, 20
    findings.parameters["a"] = ["a.w: 1 NaN, 0 Inf"]
    findings.write("off", "broken")
    (report,) = read(tmp_path)
    assert (report.rank, report.pp, report.dp, report.state, report.why) == (3, 1, 4, "off", "broken")
    assert (report.steps, report.taps, report.later, report.places) == (7, 20, 4, {"b": 1, "a": 3})
    assert (report.first, report.parameters) == (findings.first, ("a.w: 1 NaN, 0 Inf",))


def test_a_second_engine_writes_beside_the_first(tmp_path: Path) -> None:
    roots = []
    for _ in range(2):
        findings = RankFindings(tmp_path / "errcheck", CONFIG, PARALLEL)
        findings.settle()
        findings.write("watching")
        roots.append(findings.root.name)
    assert roots == ["errcheck", "errcheck.2"]
