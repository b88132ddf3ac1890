"""What an installation weighs, and how long its first commands take: of one checkout, or of an earlier one, too.

    git archive COMMIT | tar x -C before
    python3 -m venv empty    # without torch
    empty/bin/python benchmarks/bench_install.py GOLDEN MINE --tree before --tree . [--wait LOAD]

The problem: who tries a tool pays its download and its first start, which no test sees. The idea: pip installs each
tree into a folder of its own, whole and as its capture distribution (scripts/two_wheels.py), without torch; sizes are
the files' bytes, pip and setuptools not among them. Then `accprobe --help` and `accprobe compare GOLDEN MINE` with a
new cache (cold: it compiles) and again (warm), wall seconds and CPU seconds. Files are in the page cache: pip has
just written them. Not here: speed on large dumps (bench_compare.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def installed(what: str, target: Path) -> float:
    """MB of ``what`` and all that it needs, in ``target``."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--target", str(target), what]
    subprocess.run(pip, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return sum(p.lstat().st_size for p in target.rglob("*") if p.is_file() and not p.is_symlink()) / 1e6


def capture_wheel(tree: Path, out: Path) -> str:
    """The capture distribution's wheel, built from its pyproject by pip."""
    code = "import sys; sys.path.insert(0, 'scripts'); import two_wheels as t; from pathlib import Path; "
    code += "sys.stdout.write(t.project(Path('pyproject.toml').read_text(encoding='utf-8'))[0])"
    text = subprocess.run([sys.executable, "-c", code], cwd=tree, check=True, capture_output=True, text=True).stdout
    copy = out / "capture"
    subprocess.run(["cp", "-r", f"{tree}/.", copy], check=True)
    (copy / "pyproject.toml").write_text(text, encoding="utf-8")
    return str(copy)


def timed(argv: list[str], env: dict[str, str]) -> str:
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    code = subprocess.run(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - begin
    assert code in (0, 1), f"{argv} ended with {code}"
    return f"{wall:.2f} ({after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("golden", type=Path)
    parser.add_argument("mine", type=Path)
    parser.add_argument("--tree", type=Path, action="append", required=True, help="a checkout; several are compared")
    parser.add_argument("--wait", type=float, default=1e9, help="for a load below this, ten minutes at most")
    arguments = parser.parse_args()
    if importlib.util.find_spec("torch"):
        parser.error("this Python has a torch, which compare would import: take one of an empty virtual environment")
    print("| tree | whole, MB | capture, MB | load | --help, s (CPU s) | compare, cold | compare, warm (best of 3) |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        trees = [(tree, Path(folder) / str(i)) for i, tree in enumerate(arguments.tree)]
        sizes = [(installed(str(tree.resolve()), at / "whole"), installed(capture_wheel(tree, at), at / "small"))
                 for tree, at in trees]  # fmt: skip
        for (tree, at), (whole, small) in zip(trees, sizes, strict=True):
            waiting = time.monotonic() + 600
            while os.getloadavg()[0] > arguments.wait and time.monotonic() < waiting:
                time.sleep(5)
            env = {"PYTHONPATH": str(at / "whole"), "HOME": str(at), "PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
            command = [sys.executable, str(at / "whole" / "bin" / "accprobe")]
            compare = [*command, "compare", str(arguments.golden), str(arguments.mine), "--out", str(at / "out")]
            load = os.getloadavg()[0]
            timed([*command, "--version"], env)
            row = [timed([*command, "--help"], env), timed(compare, env), min(timed(compare, env) for _ in range(3))]
            print(f"| {tree} | {whole:.0f} | {small:.0f} | {load:.1f} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
