"""scripts/env.sh makes its environment in a place of its own, and goes on with one that was interrupted.

A python that only writes down how it was called stands in for the real one: what is installed takes minutes and is
tested by every run of the suite."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAKE = """#!/bin/bash
echo "$@" >>"$CALLS"
if [ "$1 $2" = "-m venv" ]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; fi
if [ "$1 $2" = "-m pip" ] && [ -n "$PIP_FAILS" ]; then echo "no network"; exit 1; fi
if [ "$2" = "import torch" ] && [ -n "$OF_CUDA" ]; then exit 1; fi
case "$*" in *purelib*) mkdir -p "$SITE"; echo "$SITE" ;; esac
"""


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """Stand-ins for python and for what env.sh looks for besides."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("python3.11", "chromium", "sha256sum"):
        (tools / name).write_text(FAKE if name != "sha256sum" else "#!/bin/sh\nexit 127\n")  # not on every macOS
        (tools / name).chmod(0o755)
    return tools


def source(venv: Path, tools: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": f"{tools}:/usr/bin:/bin", "HOME": str(tools), "ACCPROBE_VENV": str(venv), "SITE": str(tools / "site"),
        "CALLS": str(tools / "calls"), **more,
    }  # fmt: skip
    command = ["bash", "-c", f'source "{ROOT}/scripts/env.sh"; echo went on']
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tools, check=False)


def tree(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*"))


@pytest.mark.parametrize("kind", ["an environment", "a folder", "a file", "a link to an environment"])
def test_what_is_somebody_elses_is_refused(kind: str, tmp_path: Path, tools: Path) -> None:
    theirs = tmp_path / "theirs"
    if kind == "a file":
        theirs.write_text("precious")
    else:
        (theirs / "bin").mkdir(parents=True)
        (theirs / "bin/python" if kind != "a folder" else theirs / "notes.txt").write_text(FAKE)
        (theirs / "bin").rmdir() if kind == "a folder" else (theirs / "bin/python").chmod(0o755)
    place = theirs
    if kind.startswith("a link"):
        place = tmp_path / "link"
        place.symlink_to(theirs)
    before = tree(tmp_path)
    done = source(place, tools)
    assert done.returncode == 2, done.stdout
    assert done.stderr.count("\n") == 1
    assert str(place) in done.stderr
    assert "not made by these scripts" in done.stderr
    assert "went on" not in done.stdout
    assert tree(tmp_path) == before, "nothing was called, and nothing written"


@pytest.mark.parametrize("there", [True, False])
def test_an_interrupted_install_goes_on(there: bool, tmp_path: Path, tools: Path) -> None:
    """In an empty folder or a new one; the marker stands there from the beginning."""
    venv = tmp_path / "new"
    if there:
        venv.mkdir()
    done = source(venv, tools, PIP_FAILS="1")
    assert done.returncode == 2
    assert "could not install" in done.stderr
    assert not (venv / ".accprobe-stamp").exists()
    done = source(venv, tools)
    assert done.returncode == 0, done.stderr
    assert "went on" in done.stdout
    assert (venv / ".accprobe-stamp").exists()
    calls = (tools / "calls").read_text()
    assert calls.count("-m venv") == 1
    assert "-m pip install" in calls
    (tools / "calls").unlink()
    done = source(venv, tools)
    assert "is ready" in done.stdout
    assert "pip" not in ((tools / "calls").read_text() if (tools / "calls").exists() else "")


@pytest.mark.parametrize("cuda", ["", "1"])
def test_a_torch_that_is_built_for_cuda_gets_its_libraries(cuda: str, tmp_path: Path, tools: Path) -> None:
    """PyPI's, where PyTorch's own index cannot be reached: `--no-deps` left them out, and no import worked."""
    done = source(tmp_path / "new", tools, OF_CUDA=cuda)
    assert done.returncode == 0, done.stderr
    calls = (tools / "calls").read_text()
    assert "--index-url https://download.pytorch.org/whl/cpu torch==" in calls
    assert ("-m pip install torch==2.13.0\n" in calls) == bool(cuda)
