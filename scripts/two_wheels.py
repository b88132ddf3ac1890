#!/usr/bin/env python3
"""The wheels for an index: vllm-accprobe-capture, which is small, and vllm-accprobe, which needs it and is whole.

The problem: a card's machine only captures, and what compares (numba, h5py) is a quarter of a gigabyte that
nobody wants in a vendor's image. The idea: the wheel is 2 MB, and what is large is what it needs. So all of the code
is in vllm-accprobe-capture, which asks for little; vllm-accprobe is that same release and the rest of the
requirements, without a file of its own. A command that wants what is not there says so in one line. A checkout is one
distribution as ever (``pip install .``), because there is no index that has the other.

    python scripts/two_wheels.py --out dist        # needs the package build

Not here: README's links (for_the_index.py, before this), the upload (.github/workflows/release.yml).
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CAPTURE = "vllm-accprobe-capture"
LARGE = ("h5py", "llvmlite", "numba")
"""What capture does without: it reads no HDF5 and draws nothing, and without numba statistics come from numpy."""


def project(text: str) -> tuple[str, str]:
    """pyproject.toml's text -> those of vllm-accprobe-capture and of vllm-accprobe. ValueError where it has not the
    lines that are looked for."""
    version = _one(r'^version = "(.+)"$', text)[1]
    needs = _one(r"^dependencies = \[\n(.*?)^\]\n", text)
    lines = [line for line in needs[1].splitlines() if line.strip()]
    large = [line for line in lines if line.strip().strip('",').split(">")[0] in LARGE]
    if len(large) != len(LARGE):
        raise ValueError(f"dependencies have {len(large)} of {', '.join(LARGE)}")
    small = [line for line in lines if line not in large]
    capture = text.replace(needs[0], "dependencies = [\n" + "\n".join(small) + "\n]\n")
    capture = capture.replace('name = "vllm-accprobe"\n', f'name = "{CAPTURE}"\n', 1)
    whole = text.replace(needs[0], "dependencies = [\n" + "\n".join([f'  "{CAPTURE}=={version}",', *large]) + "\n]\n")
    # The command and the plugin are the other distribution's: two that claim them would both be loaded.
    whole = re.sub(r"^\[project\.(scripts|entry-points[^\]]*)\]\n(?:(?!\[).*\n)*", "", whole, flags=re.MULTILINE)
    find = _one(r"^\[tool\.setuptools\.packages\.find\]\n(?:(?!\[).*\n)*", whole)[0]
    whole = whole.replace(find, "[tool.setuptools]\npackages = []\n\n")
    data = _one(r"^\[tool\.setuptools\.package-data\]\n(?:(?!\[).*\n)*", whole)[0]
    return capture, whole.replace(data, "")


def _one(pattern: str, text: str) -> re.Match[str]:
    found = list(re.finditer(pattern, text, re.MULTILINE | re.DOTALL if "dependencies" in pattern else re.MULTILINE))
    if len(found) != 1:
        raise ValueError(f"pyproject.toml: {len(found)} places look like {pattern!r}, one was expected")
    return found[0]


def build(out: Path, *, isolated: bool = True) -> list[Path]:
    """Both wheels and both source distributions in ``out``; their paths."""
    capture, whole = project((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, text in ((CAPTURE, capture), ("vllm-accprobe", whole)):
            at = Path(folder) / name
            at.mkdir()
            for file in ("README.md", "LICENSE", "CHANGELOG.md"):
                shutil.copy2(ROOT / file, at / file)
            if name == CAPTURE:
                kept = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / "vllm_accprobe", at / "vllm_accprobe", ignore=kept)
            (at / "pyproject.toml").write_text(text, encoding="utf-8")
            argv = [sys.executable, "-m", "build", str(at), "--outdir", str(out.resolve())]
            subprocess.run(argv if isolated else [*argv, "--no-isolation"], check=True, stdout=subprocess.DEVNULL)
    return sorted(out.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where they go")
    for path in build(parser.parse_args().out):
        print(path.name, f"{path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
