"""``scripts/matrix.sh``: captures the same models with many releases of vLLM and writes docs/compatibility.md.

Exit codes: 0 every row is good (vLLM's own refusals of a mode included), 1 one is not, or a release does not run here,
2 bad usage. Not here: environments (matrix_envs.py), captures (matrix_runs.py), the page (matrix_page.py).
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
for folder in ("tests", "scripts"):
    sys.path.insert(0, str(ROOT / folder))

import matrix_page  # noqa: E402
from card_engine import probe_version  # noqa: E402
from matrix_envs import EnvError, Environments, Release, chosen  # noqa: E402
from matrix_runs import CASES, V1, compared, rows_of  # noqa: E402

NEWEST = "0.32.0"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="matrix.sh", description=__doc__.partition("\n")[0])
    parser.add_argument("releases", nargs="*", metavar="RELEASE", help="e.g. 0.28 0.32; none: all that are known")
    parser.add_argument("--envs", type=Path, default=Path("matrix-envs"), help="where environments lie (matrix-envs)")
    parser.add_argument("--keep", type=Path, default=Path("matrix-runs"), help="where dumps and logs go (matrix-runs)")
    parser.add_argument("--into", type=Path, help="the page; rows of other releases in it stay; its data lie beside")
    parser.add_argument("--cases", default="", metavar="NAMES", help=f"of {','.join(c.name for c in CASES)}")
    parser.add_argument("--again", action="store_true", help="capture 0.32 anew, also where --keep has it")
    args = parser.parse_args(arguments)
    names = set(filter(None, args.cases.split(",")))
    if unknown := names - {c.name for c in CASES}:
        parser.error(f"no case {sorted(unknown)[0]!r}: there are {', '.join(c.name for c in CASES)}")
    if names and args.into:
        parser.error("--cases makes no whole row: leave out --into, and the table is printed")
    try:
        releases = chosen(args.releases)
        data = args.into.with_suffix(".json") if args.into else None
        old = matrix_page.read(data) if data else []
    except ValueError as error:
        parser.error(str(error))
    if args.into and not args.into.parent.is_dir():
        parser.error(f"there is no folder {args.into.parent}: make it, or name another page")
    if args.into:
        try:
            matrix_page.placed(matrix_page.before(args.into), "", matrix_page.BEGIN, matrix_page.END)
        except ValueError as error:
            parser.error(f"{args.into}: {error}")
    cases = [c for c in CASES if not names or c.name in names]
    keep, envs = args.keep.absolute(), Environments(args.envs)
    golden = chosen([NEWEST])[0]
    # 0.32 first: the others are compared with its dumps.
    wanted = golden in releases or args.again or not (keep / NEWEST / V1 / cases[-1].name / "run.json").exists()
    order = ([golden] if wanted else []) + [r for r in releases if r != golden]

    def of(release: Release) -> list[dict[str, Any]]:
        only_golden = release == golden and golden not in releases
        python = envs.python(release)
        ready = replace(release, env={**release.env, **envs.preloaded(release)}, v2=release.v2 and not only_golden)
        return rows_of(ready, python, keep, compared, cases, say)

    rows = []
    for release in order:
        found = attempted(release, of)
        shown = release in releases
        rows += found if shown else []
        if not shown and not all(map(matrix_page.good, found)):
            say(f"0.32 itself is not good here: {matrix_page.lines(found)}")
            return 1
        if data and args.into and shown:  # after each release: an interrupted run leaves what it has measured
            matrix_page.write(args.into, data, matrix_page.merged(old, rows))
    print("\n".join(matrix_page.lines(matrix_page.merged([], rows))))
    bad = [row for row in rows if not matrix_page.good(row)]
    for row in bad:
        say(f"not good: {row['release']} {row.get('runner') or ''} {row.get('error') or ''}".rstrip())
    return 1 if bad else 0


def attempted(release: Release, of: Callable[[Release], Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The rows of one release; one that says why, where it has no environment or its engines cannot be had at all."""
    try:
        rows = list(of(release))
    except (EnvError, OSError) as error:
        rows = [{"release": release.version, "error": str(error).splitlines()[0]}]
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return [row | {"day": today, "accprobe": probe_version()["source"], "capability": capability()} for row in rows]


def capability() -> str:
    """What torch takes this processor for: AVX2, AVX512, ..."""
    try:
        import torch

        return str(torch.backends.cpu.get_cpu_capability())
    except (ImportError, AttributeError):
        return "?"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
