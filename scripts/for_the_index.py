#!/usr/bin/env python3
"""Makes README and pyproject.toml fit for a package index: links that work there, and the project's addresses.

The problem: on an index page a link such as ``docs/gate.md`` leads nowhere, and the addresses of the project depend on
where it is hosted, so neither can stand in the tree. The idea: the release workflow, which knows its own repository and
tag, rewrites both in its checkout before it builds; relative links become addresses below that tag.

    python scripts/for_the_index.py --repository https://HOST/OWNER/NAME --tag v0.1.0

Not here: the build and the upload (.github/workflows/release.yml).
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<to>[^)\s]+)\)")


def absolute_links(text: str, repository: str, tag: str) -> str:
    """``text`` with each relative link as an address below ``tag``; a picture as its raw file. Code is left alone."""

    def one(match: re.Match[str]) -> str:
        to = match["to"]
        if re.match(r"[a-z]+:|#", to):
            return match[0]
        kind = "raw" if match["image"] else "blob"
        return f"{match['image']}[{match['text']}]({repository}/{kind}/{tag}/{to})"

    parts = re.split(r"(```.*?```)", text, flags=re.DOTALL)
    return "".join(p if p.startswith("```") else _LINK.sub(one, p) for p in parts)


def with_urls(pyproject: str, repository: str, tag: str) -> str:
    """``pyproject`` with ``[project.urls]`` before the section of scripts."""
    urls = {
        "Homepage": repository,
        "Documentation": f"{repository}/blob/{tag}/docs/index.md",
        "Source": repository,
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
    }
    section = "[project.urls]\n" + "".join(f'{name} = "{url}"\n' for name, url in urls.items()) + "\n"
    before, mark, after = pyproject.partition("[project.scripts]")
    if not mark or re.search(r"^\[project\.urls\]", pyproject, re.MULTILINE):
        raise SystemExit("error: pyproject.toml: no [project.scripts], or addresses are there already")
    return before + section + mark + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repository", required=True, help="its address, e.g. https://HOST/OWNER/NAME")
    parser.add_argument("--tag", required=True, help="what is released, e.g. v0.1.0")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout, which is changed")
    said = parser.parse_args()
    if not re.fullmatch(r"https://[\w.-]+(/[\w.-]+)+", said.repository):
        parser.error(f"--repository {said.repository!r}: an address such as https://HOST/OWNER/NAME is needed")
    if not re.fullmatch(r"[\w.+-]+", said.tag):
        parser.error(f"--tag {said.tag!r}: a tag such as v0.1.0 is needed")
    new = {}  # both are made before one is written
    for name, change in (("README.md", absolute_links), ("pyproject.toml", with_urls)):
        new[said.root / name] = change((said.root / name).read_text(encoding="utf-8"), said.repository, said.tag)
    for path, text in new.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
