"""scripts/vendor_wheels.sh: a release that cannot be had is a row and a failure, a lack is one unless it is known, and
the table is written between its markers only. The releases themselves: docs/compatibility.md."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import vendor_wheels
from vendor_wheels import BEGIN, END, LIST, Distribution, WheelMissingError

ASCEND = Distribution("vllm-ascend", "0.18.0", "0.18.0", ("_sample",))
LACK = {"owner": "NPUModelRunner", "what": "_sample is not there", "loss": "skipped | counted"}
SAID = {
    "missing": [LACK],
    "modes": [{"mode": "dual-batch overlap", "fate": "refused", "at": "vllm/config/parallel.py:7"},
              {"mode": "xlite", "fate": "refused", "at": "vllm_ascend/xlite.py:9"},
              {"mode": "dspark", "fate": "skipped", "at": "vllm/v1/worker/gpu/model_runner.py:8"},
              {"mode": "Ray", "fate": "works", "at": "vllm/ray.py:1"}],
}  # fmt: skip


def test_a_row_says_what_is_missing_and_whose_line_has_a_mode() -> None:
    assert vendor_wheels.row(ASCEND, SAID) == (
        "| vllm-ascend 0.18.0 | 0.18.0 | NPUModelRunner: _sample is not there: skipped \\| counted "
        "| dual-batch overlap, xlite (vllm_ascend/xlite.py:9) | dspark |"
    )
    own = vendor_wheels.row(Distribution("vllm", "0.33.0"), SAID)
    assert "| dual-batch overlap, xlite (vllm_ascend/xlite.py:9) | dspark |" in own
    assert own.startswith("| vllm 0.33.0 | itself |")


def test_what_two_runners_lack_alike_and_releases_that_differ_in_nothing_are_written_once() -> None:
    both = SAID | {"missing": [LACK, LACK | {"owner": "Other"}]}
    assert "| NPUModelRunner, Other: _sample is not there: skipped" in vendor_wheels.row(ASCEND, both)
    named = [Distribution("vllm-ascend", "0.18.0", sdist=s) for s in (False, True)] + [Distribution("vllm-x", "0.18.0")]
    table = vendor_wheels.table([vendor_wheels.row(one, SAID) for one in named]).splitlines()
    assert [line.split(" | ")[0] for line in table[2:]] == ["| vllm-ascend 0.18.0, 0.18.0 sdist", "| vllm-x 0.18.0"]


def test_only_what_is_known_to_be_missing_is_no_failure() -> None:
    assert vendor_wheels.unknown(ASCEND, SAID) == []
    other = {"missing": [LACK, LACK | {"what": "input_batch is not there"}], "modes": []}
    assert vendor_wheels.unknown(ASCEND, other) == ["vllm-ascend==0.18.0: NPUModelRunner: input_batch is not there"]


def test_the_table_stands_between_its_markers() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert vendor_wheels.placed(page, "new") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    for broken in ("", BEGIN, f"{END}{BEGIN}", page + END, page + BEGIN):
        with pytest.raises(ValueError, match="once each"):
            vendor_wheels.placed(broken, "new")
    text = (vendor_wheels.ROOT / "docs" / "compatibility.md").read_text().partition(BEGIN)[2].partition(END)[0]
    releases = [line[2:].split(" | ")[0].split(" ", 1) for line in text.splitlines() if line.startswith("| vllm")]
    named = [f"{name} {version}" for name, versions in releases for version in versions.split(", ")]
    assert named == [f"{d.name} {d.version}{' sdist' * d.sdist}" for d in LIST]  # the page is of this list


def test_what_cannot_be_downloaded_is_a_row_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """pip fails with a line of its own; a wheel that is there and no archive is told by the doctor itself."""
    gone, broken = Distribution("vllm-gone", "1.0"), Distribution("vllm-broken", "1.0")
    monkeypatch.setattr(vendor_wheels, "LIST", (gone, broken))
    run = subprocess.run

    def no_pip(command: list[str], **other: Any) -> Any:
        if "pip" in command:
            return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: No matching distribution found")
        return run(command, **other)

    monkeypatch.setattr(vendor_wheels.subprocess, "run", no_pip)
    (tmp_path / "vllm-broken-1.0").mkdir()
    (tmp_path / "vllm-broken-1.0" / "vllm_broken-1.0-py3-none-any.whl").write_bytes(b"no zip")
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    assert vendor_wheels.main(["--keep", str(tmp_path), "--into", str(page)]) == 1
    text = page.read_text()
    assert "| vllm-gone 1.0 | itself | **not read**: ERROR: No matching distribution found |  |  |" in text
    assert "not a readable archive" in text
    assert "error: vllm-gone==1.0: ERROR: No matching" in capsys.readouterr().err


def test_a_wheel_that_lacks_everything_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendor_wheels, "LIST", (Distribution("vllm", "0.33.0"),))
    (tmp_path / "vllm-0.33.0").mkdir()
    with zipfile.ZipFile(tmp_path / "vllm-0.33.0" / "vllm-0.33.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("vllm/version.py", "__version__ = '0.33.0'\n")
        wheel.writestr("vllm-0.33.0.dist-info/METADATA", "Name: vllm\nVersion: 0.33.0\n")
    assert vendor_wheels.main(["--keep", str(tmp_path)]) == 1


@pytest.mark.parametrize(("listed", "said"), [
    (b'{"files": []}', "no source distribution"),
    (b'{"files": [{"filename": "vllm_x-1.tar.gz", "url": "https://h/../f", "hashes": {"sha256": "00"}}]}', "hash"),
    (b'{"files": [{"filename": "vllm_x-1.tar.gz", "url": "file:///etc/passwd", "hashes": {}}]}', "not https"),
    (b"<html>", "JSONDecodeError"),
])  # fmt: skip
def test_an_index_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: bytes, said: str) -> None:
    get = vendor_wheels._get

    def answers(url: str, **headers: str) -> bytes:
        return listed if headers else b"x" if url.startswith("https:") else get(url)

    monkeypatch.setattr(vendor_wheels, "_get", answers)
    with pytest.raises(WheelMissingError, match=said):
        vendor_wheels.fetch(Distribution("vllm-x", "1", sdist=True), tmp_path)
    assert not list(tmp_path.rglob("*.tar.gz"))
