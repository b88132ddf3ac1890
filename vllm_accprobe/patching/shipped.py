"""The patches that come with the package, and how a setting names them.

Not here: what is in them (schema.py).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path

from vllm_accprobe.patching.schema import Patch, PatchError, load

ROOT = Path(__file__).parent / "shipped"
"""Package data, one directory per kind; the repository's ``patches/`` points here."""
ALL = "all"


def names() -> dict[str, Path]:
    """Shipped patches by name: ``qwen2-attention`` is shipped/vllm/qwen2-attention.toml."""
    return {path.stem: path for path in sorted(ROOT.glob("*/*.toml"))}


def choose(wanted: Sequence[str]) -> list[Patch]:
    """The patches that a setting names: shipped names, paths of files, or ``all`` for every shipped one.

    Raises PatchError for a name that is none, with the nearest one, and for a file that is wrong.
    """
    known = names()
    paths: dict[str, Path] = {}
    for item in wanted:
        if item == ALL:
            paths |= known
        elif item in known:
            paths[item] = known[item]
        elif item.endswith(".toml") or "/" in item:
            path = Path(item).expanduser()
            if path.stem in paths and os.path.realpath(paths[path.stem]) != os.path.realpath(path):
                raise PatchError(f"{item}: there is already a patch called {path.stem}; rename the file")
            paths[path.stem] = path
        else:
            near = difflib.get_close_matches(item, [*known, ALL], n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise PatchError(f"{item!r} is no shipped patch and no .toml file{hint}; see `accprobe patches list`")
    return [load(path, name) for name, path in paths.items()]
