"""``accprobe patches list | check``: which patches there are, and which fit the installed source."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vllm_accprobe.cli import options
from vllm_accprobe.cli.options import argument, option
from vllm_accprobe.cli.output import answer
from vllm_accprobe.cli.output_paths import require_directory
from vllm_accprobe.refusals import CommandError, NothingThere

if TYPE_CHECKING:
    from vllm_accprobe.patching.schema import Target


def patches(
    action: str = argument("list|check", "list: name them; check: compare with the source."),
    which: list[str] = argument("[NAME|FILE.toml]...", "Default: all that are shipped.", []),
    source: Path | None = option("--source", None, "A package's directory to check against, e.g. an unpacked wheel's "
                                 "vllm/.", metavar="DIR"),
    verbose: bool = options.verbose(),
) -> None:  # fmt: skip
    """List patches, or check which of them fit the installed vLLM. Nothing is imported, run or changed.

    VLLM_ACCPROBE_PATCHES=NAME,... applies them while the probe is on.
    Exit code 0: all fit, 1: a place is refused, 2: bad usage or no patch, 3: there is nothing to check against.
    """
    from vllm_accprobe.patching.install import ABSENT, FITS, REFUSED, check, package_root, package_version
    from vllm_accprobe.patching.schema import choose
    from vllm_accprobe.report.text import count

    if action not in ("list", "check"):
        raise CommandError(f"patches {action}: write list or check")
    chosen = choose(which or ["all"])
    if action == "list":
        answer(patches=[{"name": p.name, "about": p.about, "places": [_place(t) for t in p.targets]} for p in chosen])
        width = max(len(p.name) for p in chosen)
        for p in chosen:
            typer.echo(f"{p.name:<{width}}  {p.about}")
            for target in p.targets if verbose else ():
                taps = ", ".join(t.name for t in target.taps)
                typer.echo(f"{'':<{width}}    {target.module}:{target.function}: {taps}")
        raise typer.Exit(0)
    roots = {}
    if source is not None:
        require_directory(source, "--source")
        roots[source.resolve().name] = source.resolve()
    packages = dict.fromkeys(t.module.partition(".")[0] for p in chosen for t in p.targets)
    if source is not None and not roots.keys() & packages.keys():
        named = " or ".join(packages)
        raise CommandError(f"--source: {source} is not called {named}: name that package's own directory")
    found = {name: roots.get(name) or package_root(name) for name in packages}
    for name, root in found.items():
        if root is not None:
            typer.echo(f"{name} {package_version(root, name) or 'of unknown version'}")
    if not any(found.values()):
        raise NothingThere(f"{', '.join(packages)} not installed, no --source: nothing to check against")
    refused = 0
    checked: list[dict[str, object]] = []
    for p in chosen:
        outcomes = check(p, roots)
        bad = [o for o in outcomes if o.status == REFUSED]
        fits = [o for o in outcomes if o.status == FITS]
        refused += len(bad)
        word = "refused" if bad else "fits" if fits else "nothing of it here"
        seen = sum(len(o.target.taps) for o in fits)
        places = [_place(o.target) | {"status": o.status, "why": o.why} for o in outcomes]
        checked.append({"name": p.name, "status": word, "places": places})
        typer.echo(f"{p.name}: {word}" + (f", {count(seen, 'tap')} in {count(len(fits), 'function')}" if fits else ""))
        for o in outcomes:
            if o.status == REFUSED or (verbose and o.status != ABSENT) or (verbose and o.why):
                typer.echo(f"  {o.target.function}: {o.status}" + (f": {o.why}" if o.why else ""))
    answer(patches=checked)
    raise typer.Exit(int(bool(refused)))


def _place(target: Target) -> dict[str, object]:
    return {"module": target.module, "function": target.function, "taps": [t.name for t in target.taps]}
