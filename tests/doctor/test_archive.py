"""Wheels from strangers: bombs, paths out, links, broken files and bad Python are one line each."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from vllm_accprobe.doctor import wheel as archive
from vllm_accprobe.doctor.wheel import Sources, WheelError, read


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
def test_bad_python_is_one_line_and_exit_code_2(tmp_path: Path, source: bytes) -> None:
    path = wheel(tmp_path / "a.whl", {"vllm/__init__.py": b"", "vllm/version.py": source})
    with pytest.raises(WheelError, match=r"vllm/version.py.* cannot be parsed"):
        Sources([read(path)]).module("vllm.version")
    done = subprocess.run(
        [Path(sys.executable).parent / "accprobe", "doctor", "--wheel", path], capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1
