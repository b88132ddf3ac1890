"""A hook of mkdocs: README, changes and the like as pages of the site, and links that lead there.

The problem: pages below docs/ link to ``../README.md``, and README links to ``docs/…``; both are right in a checkout
and lead out of a site, whose root is docs/. The idea: the files of the root are pages of the site too, and links are
rewritten as the site is built, never in the tree. A link to a file that is no page (a script) becomes its name, or its
address where mkdocs.yml has ``repo_url``.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "readme.md",
    "README.zh.md": "readme.zh.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "LICENSE": "license.md",
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        text = f"# License\n\n```text\n{text}\n```\n" if name == "LICENSE" else _relinked(text, "", config)
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    return markdown if page.file.src_uri in PAGES.values() else _relinked(markdown, "docs", config)


def _relinked(text: str, folder: str, config: Any) -> str:
    """``text`` of a file in ``folder`` (below the checkout) with links that are right on the site."""

    def one(match: re.Match[str]) -> str:
        image, words, to, anchor = match[1], match[2], match[3], match[4] or ""
        if re.match(r"[a-z]+:", to):
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, to))
        if path in PAGES:
            return f"{image}[{words}]({PAGES[path]}{anchor})"
        if path.startswith("docs/"):
            return f"{image}[{words}]({path.removeprefix('docs/')}{anchor})"
        if config.repo_url:
            return f"{image}[{words}]({config.repo_url.rstrip('/')}/blob/HEAD/{path}{anchor})"
        return words

    parts = re.split(r"(```.*?```)", text, flags=re.DOTALL)
    return "".join(p if p.startswith("```") else _LINK.sub(one, p) for p in parts)
