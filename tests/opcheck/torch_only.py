"""A Python that can import torch, pytest and what these two require, and nothing else: no accprobe, vllm or numpy."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

_BOOT = """
import importlib.util, sys
sys.path.insert(0, sys.argv[1])
for name in ("vllm_accprobe", "vllm", "numpy", "safetensors"):
    assert importlib.util.find_spec(name) is None, name
import os, json
import pytest, torch
runs = json.loads(sys.argv[2])
for words in runs[1:]:
    sys.stdout.flush()
    if not (child := os.fork()):
        os._exit((pytest.main(words), sys.stdout.flush())[0])
    os.waitpid(child, 0)
sys.exit(pytest.main(runs[0]) if runs[0] is not None else 0)
"""


def site(root: Path) -> Path:
    """A directory of links to the installed files of torch, pytest and their requirements."""
    root.mkdir()
    waiting, seen = ["torch", "pytest"], set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = distribution(name)
        except PackageNotFoundError:  # for another platform
            continue
        for file in found.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (root / top).exists():
                (root / top).symlink_to(found.locate_file(top))
        for line in found.requires or ():
            required, _, marker = line.partition(";")
            if "extra" not in marker:
                waiting.append(re.split(r"[^A-Za-z0-9_.-]", required.strip())[0])
    return root


def run(site: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest in ``folder``, isolated from this environment's other packages."""
    return _boot(site, folder, [_words(arguments)])


def run_each(site: Path, folder: Path, runs: Sequence[Sequence[str]]) -> list[str]:
    """What pytest counts in ``folder`` with each of these arguments (``2 failed``), in one such Python."""
    done = _boot(site, folder, [None, *(_words(r) for r in runs)])
    found = re.findall(r"^(\d+ [a-z].*) in [\d.]+s", done.stdout, re.MULTILINE)
    assert len(found) == len(runs), done.stdout + done.stderr
    return found


def _words(arguments: Sequence[str]) -> list[str]:
    return ["-q", "-p", "no:cacheprovider", "-rf", *arguments]


def _boot(site: Path, folder: Path, runs: list[list[str] | None]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-S", "-c", _BOOT, str(site), json.dumps(runs)]
    env = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
