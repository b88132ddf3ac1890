"""Settings and disk, on real directories."""

import os

import pytest

from vllm_accprobe.doctor import checks
from vllm_accprobe.doctor.checks import ERROR, OK, WARNING


def levels(findings):
    return [f.level for f in findings]


def test_switch():
    assert levels(checks.switch({})) == [WARNING]
    assert levels(checks.switch({"VLLM_ACCPROBE": "1"})) == [OK]


def test_a_mistyped_setting_is_named_with_the_nearest_valid_one():
    (finding,) = checks.configuration({"VLLM_ACCPROBE": "1", "VLLM_ACCPROBE_TOKNS": "3"})
    assert finding.level == ERROR
    assert "VLLM_ACCPROBE_TOKNS" in finding.text
    assert "VLLM_ACCPROBE_TOKENS" in finding.text
    assert checks.directory({"VLLM_ACCPROBE_TOKNS": "3"}) == []


def test_graphs_is_a_warning():
    assert levels(checks.configuration({})) == [OK]
    assert levels(checks.configuration({"VLLM_ACCPROBE_GRAPHS": "1"})) == [OK, WARNING]


def test_a_directory_to_be_made_is_not_made(tmp_path):
    found = checks.directory({"VLLM_ACCPROBE_DIR": str(tmp_path / "a" / "b"), "VLLM_ACCPROBE_MAX_GB": "0.001"})
    assert [f.check for f in found] == ["free space", "disk speed"]
    assert ERROR not in levels(found)
    assert str(tmp_path) in found[0].text
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_holds_a_dump_or_is_a_file(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    (finding,) = checks.directory({"VLLM_ACCPROBE_DIR": str(tmp_path)})
    assert (finding.level, finding.text) == (ERROR, f"{tmp_path} already holds a dump")
    (finding,) = checks.directory({"VLLM_ACCPROBE_DIR": str(tmp_path / "run.json" / "x")})
    assert finding.level == ERROR
    assert "not a directory" in finding.text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written(tmp_path):
    tmp_path.chmod(0o500)
    assert levels(checks.directory({"VLLM_ACCPROBE_DIR": str(tmp_path / "x")})) == [ERROR]


def test_free_space_against_the_budget(tmp_path):
    assert levels(checks.free_space(tmp_path, 1)) == [OK]
    (finding,) = checks.free_space(tmp_path, 10**18)
    assert finding.level == WARNING
    assert "budget 1e+09 GB per rank" in finding.text


def test_disk_speed_is_measured_and_leaves_nothing(tmp_path):
    rate, _ = checks.write_rate(tmp_path, 8 << 20, 3.0)
    assert rate > 0
    assert list(tmp_path.iterdir()) == []


def test_disk_speed_in_a_place_that_is_gone(tmp_path):
    (finding,) = checks.disk_speed(tmp_path / "gone", 8 << 20)
    assert finding.level == ERROR
    assert "No such file" in finding.text
