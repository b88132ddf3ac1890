"""What an installation weighs, and how long its first commands take: before and after, in one run.

    python benchmarks/bench_install.py --tree COMMIT --tree . [--wait LOAD] [GOLDEN MINE]

The problem: who tries a tool pays its download and its first start, which no test sees. The idea: pip of an empty
virtual environment, without torch, installs each tree into a folder of its own, whole and as its capture distribution
(scripts/two_wheels.py); sizes are the files' bytes, pip and setuptools not among them. Then `accprobe --help` and
`accprobe compare GOLDEN MINE` with a new cache (cold: it compiles) and again (warm), wall seconds and CPU seconds, the
trees in turn. Files are in the page cache: pip has just written them. Without GOLDEN MINE: 13 MB each (big_dumps.py).
Not here: speed on large dumps (bench_compare.py).
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GOALS = "| goal | 420 | 113 | | 0.15 | 6 | 2 |"
ROUNDS = 3


def unpacked(tree: str, at: Path) -> Path:
    """A checkout's folder: ``tree`` itself, or a commit of this repository in ``at``."""
    if Path(tree).is_dir():
        return Path(tree).resolve()
    at.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", tree], cwd=Path(__file__).parents[1], check=True, capture_output=True)
    subprocess.run(["tar", "x", "-C", str(at)], input=archive.stdout, check=True)
    return at


def installed(python: str, what: str, target: Path) -> float:
    """MB of ``what`` and all that it needs, in ``target``."""
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--target", str(target), what]
    subprocess.run(pip, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return sum(p.lstat().st_size for p in target.rglob("*") if p.is_file() and not p.is_symlink()) / 1e6


def capture_project(tree: Path, out: Path) -> str:
    """A copy of ``tree`` that is the capture distribution."""
    code = "import sys; sys.path.insert(0, 'scripts'); import two_wheels as t; from pathlib import Path; "
    code += "sys.stdout.write(t.project(Path('pyproject.toml').read_text(encoding='utf-8'))[0])"
    text = subprocess.run([sys.executable, "-c", code], cwd=tree, check=True, capture_output=True, text=True).stdout
    copy = out / "capture"
    subprocess.run(["cp", "-r", f"{tree}/.", copy], check=True)
    (copy / "pyproject.toml").write_text(text, encoding="utf-8")
    return str(copy)


def timed(argv: list[str], env: dict[str, str]) -> tuple[float, float]:
    """(wall, CPU) seconds."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    code = subprocess.run(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - begin
    assert code in (0, 1), f"{argv} ended with {code}"
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def made(folder: Path) -> list[Path]:
    """GOLDEN and MINE."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from big_dumps import write_pair

    return list(write_pair(folder, 13_000_000))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dumps", type=Path, nargs="*", metavar="GOLDEN MINE", help="two dumps that differ")
    parser.add_argument("--tree", action="append", required=True, help="a checkout, or a commit; several are compared")
    parser.add_argument("--wait", type=float, default=1e9, help="for a load below this, ten minutes at most")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        golden, mine = arguments.dumps or made(folder / "dumps")
        subprocess.run([sys.executable, "-m", "venv", str(folder / "empty")], check=True)
        python = str(folder / "empty/bin/python")
        found, times = {}, {}
        for number, tree in enumerate(arguments.tree):
            at = folder / str(number)
            source = unpacked(tree, at / "source")
            whole = installed(python, str(source), at / "whole")
            found[tree] = at, whole, installed(python, capture_project(source, at), at / "small")
            times[tree] = [list[tuple[float, float]]() for _ in range(3)]
        waiting = time.monotonic() + 600
        while os.getloadavg()[0] > arguments.wait and time.monotonic() < waiting:
            time.sleep(5)
        load = os.getloadavg()[0]
        for turn in range(ROUNDS):
            for tree, (at, *_) in found.items():
                home = {"HOME": str(at / f"home{turn}"), "PYTHONPATH": str(at / "whole")}
                env = {**home, "PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
                command = [python, str(at / "whole/bin/accprobe")]
                timed([*command, "--version"], env)
                compare = [*command, "compare", str(golden), str(mine), "--out", str(at / f"out{turn}")]
                for kind, words in zip(times[tree], ([*command, "--help"], compare, compare), strict=True):
                    kind.append(timed(words, env))
    print(f"Without torch; best of {ROUNDS} rounds in turn, s (CPU s).\n")
    print("| tree | whole, MB | capture, MB | load | --help | compare, cold | compare, warm |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for tree, (_, whole, small) in found.items():
        row = " | ".join("{:.2f} ({:.2f})".format(*min(kind)) for kind in times[tree])
        print(f"| {tree} | {whole:.0f} | {small:.1f} | {load:.1f} | {row} |")
    print(GOALS)


if __name__ == "__main__":
    main()
