"""How a page is put together: its files, its policy, its holes.

The problem: a page holds names that a stranger's dump has chosen, and its scripts must be the only ones that run. The
idea: a content security policy names the hash of each script and allows no request; a template's holes are filled in
one pass, so that what is filled in is never looked at again. Not here: what is filled in (sections.py).
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping


def policy(scripts: Iterable[str]) -> str:
    """The content security policy that lets run these scripts, as they stand between their tags, and nothing else."""
    hashes = " ".join(
        "'sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii") + "'"
        for text in scripts
        if text
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def asset(name: str) -> str:
    """The text of a file of ``report/html``."""
    from importlib.resources import files

    return files("vllm_accprobe.report.html").joinpath(name).read_text(encoding="utf-8")


def fill(template: str, holes: Mapping[str, str]) -> str:
    """Each ``{{name}}`` once, in a single pass: what is filled in is never looked at again."""
    return re.sub(r"\{\{(\w+)\}\}", lambda m: holes[m[1]], template)
