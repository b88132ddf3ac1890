"""scripts/vendor_wheels.sh: a release that cannot be had is a row and a failure, a lack is one unless it is known, and
the table is written between its markers only. The releases themselves: docs/compatibility.md."""

import zipfile
from pathlib import Path

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
