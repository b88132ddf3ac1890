"""Whether a patch fits an installed source, without importing or running any of it.

The problem: which patches will work must be known before a server starts, also for a version that lies unpacked in a
directory. The idea: the package's files are found by its top-level name, parsed, transformed and compiled exactly as
they would be, and the outcome per target is one of four words. Not here: the transformation (install.py), live
functions (install.py).
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_accprobe.patching.install import Insertion, compiled, tapped
from vllm_accprobe.patching.schema import Patch, Target, in_range, numbers
from vllm_accprobe.patching.source import NotThere, find_function, fingerprint, parse_file

FITS, ABSENT, OTHER, REFUSED = "fits", "absent", "other version", "refused"
"""absent: an optional target that this source does not have; other version: outside of the target's ``versions``."""
_VERSION = re.compile(r"^(?:__version__|version)\b.*?['\"](\d+\.\d+[^'\"]*)['\"]", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    target: Target
    status: str
    why: str = ""


def check(patch: Patch, roots: Mapping[str, Path] | None = None) -> list[Outcome]:
    """What becomes of each target. roots: directories of packages by name, instead of the installed ones."""
    return [check_target(patch, target, roots or {}) for target in patch.targets]


def check_target(patch: Patch, target: Target, roots: Mapping[str, Path]) -> Outcome:
    package = target.module.partition(".")[0]
    root = roots.get(package) or package_root(package)
    if root is None:
        return Outcome(target, ABSENT if target.optional else REFUSED, f"{package} is not installed")
    version = package_version(root, package)
    if not in_range(numbers(version), target.versions):
        return Outcome(target, OTHER, f"{package} {version or 'of unknown version'} is not {target.versions}")
    path = module_file(root, target.module)
    try:
        if path is None:
            raise NotThere(f"no module {target.module}")
        tree = parse_file(path)
        found = find_function(tree, target.function)
    except NotThere as error:
        return Outcome(target, ABSENT if target.optional else REFUSED, str(error))
    try:
        function, classes = found
        if target.hashes and fingerprint(function) not in target.hashes:
            raise NotThere(f"its source has changed (it is {fingerprint(function)} now)")
        compiled(tree, function, tapped(function, insertions(patch, target)), classes, str(path), 0)
    except NotThere as error:
        return Outcome(target, REFUSED, str(error))
    except (SyntaxError, ValueError) as error:
        return Outcome(target, REFUSED, f"it could not be compiled: {error}")
    return Outcome(target, FITS)


def insertions(patch: Patch, target: Target) -> list[Insertion]:
    """The taps with keys that are unique in a process."""
    return [
        Insertion(f"{patch.name}|{target.name}|{tap.name}{'|' + tap.label[0] if tap.label else ''}", tap)
        for tap in target.taps
    ]


def package_root(package: str) -> Path | None:
    """Where an installed package lies; it is not imported."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin) if spec.origin else None


def module_file(root: Path, module: str) -> Path | None:
    """The source of ``module``, whose package (or single file) is ``root``."""
    if root.is_file():
        return root if "." not in module else None
    base = root.joinpath(*module.split(".")[1:])
    for path in (base.with_name(base.name + ".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def package_version(root: Path, package: str) -> str:
    """By its ``_version.py`` or ``version.py``, else by the installed metadata; "" if neither knows."""
    for name in ("_version.py", "version.py", "__init__.py"):
        try:
            text = (root / name).read_text(errors="replace")[:20_000]
        except OSError:
            continue
        match = _VERSION.search(text)
        if match:
            return match[1]
    from importlib import metadata

    try:
        return metadata.version(package)
    except (metadata.PackageNotFoundError, ValueError):
        return ""
