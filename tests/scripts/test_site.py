"""The docs as a site, and README on an index page: links that are right in a checkout are right there."""

import re
import subprocess
import sys
from pathlib import Path

import for_the_index
import pytest
import tomllib

ROOT = Path(__file__).resolve().parents[2]


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material is not installed here")
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
                          cwd=ROOT, capture_output=True, text=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr
    pages = {p.name for p in (ROOT / "docs").glob("*.md")}
    built = {p.name for p in (tmp_path / "site").iterdir()}
    assert {p.removesuffix(".md") for p in pages} - {"index"} <= built
    front = (tmp_path / "site" / "readme" / "index.html").read_text(encoding="utf-8")
    assert 'href="../gate/' in front  # README's docs/gate.md
    assert "http://" not in re.sub(r"http://(www\.w3\.org|localhost|mine|new-card)", "", front)


def test_every_page_is_in_the_site_s_menu() -> None:
    menu = set(re.findall(r": ([\w.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    assert {p.name for p in (ROOT / "docs").glob("*.md")} <= menu


def test_links_of_readme_lead_to_the_tag(tmp_path: Path) -> None:
    for name in ("README.md", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    argv = [sys.executable, str(ROOT / "scripts" / "for_the_index.py"), "--root", str(tmp_path), "--tag", "v1.2.3"]
    done = subprocess.run([*argv, "--repository", "https://example.org/a/b"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(links) > 30
    assert all(link.startswith("https://example.org/a/b/") for link in links)
    assert "](https://example.org/a/b/raw/v1.2.3/docs/img/report.png)" in text
    was = re.findall(r"\]\(([^)\s#]+)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert all((ROOT / link).exists() for link in was)
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["urls"]["Changelog"] == "https://example.org/a/b/blob/v1.2.3/CHANGELOG.md"
    again = subprocess.run([*argv, "--repository", "https://example.org/a/b"], capture_output=True, text=True)
    assert again.returncode == 1
    assert again.stderr.startswith("error: pyproject.toml: ")


def test_code_is_left_alone() -> None:
    text = "[a](b.md)\n```bash\n[x](y.md)\n```\n[c](#d) ![e](f.png)"
    assert for_the_index.absolute_links(text, "https://h/o/n", "t") == (
        "[a](https://h/o/n/blob/t/b.md)\n```bash\n[x](y.md)\n```\n[c](#d) ![e](https://h/o/n/raw/t/f.png)"
    )


@pytest.mark.parametrize(("repository", "tag"), [("example.org/a", "v1"), ("https://h/o/n", "a b")])
def test_a_wrong_address_is_one_line(repository: str, tag: str) -> None:
    argv = [sys.executable, str(ROOT / "scripts" / "for_the_index.py"), "--repository", repository, "--tag", tag]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 2
    assert "is needed" in done.stderr


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_pictures_and_badges_of_readme_need_no_network(page: str) -> None:
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", (ROOT / page).read_text(encoding="utf-8"))
    assert "docs/img/badges.svg" in pictures
    assert all((ROOT / picture).is_file() for picture in pictures)
    assert not re.search(r"\b(?:href|src|url)\s*[=(]", (ROOT / "docs/img/badges.svg").read_text(encoding="utf-8"))


OF_OTHER_KINDS = {"AWQ", "GPTQ", "MTP", "n-gram drafts"}
"""Captured with the architectures, and none."""


def test_the_architectures_of_readme_are_those_that_the_page_names() -> None:
    text = (ROOT / "docs/compatibility.md").read_text(encoding="utf-8")
    section = text.partition("\n## Architectures")[2].partition("\n## ")[0]
    names: dict[str, bool] = {}
    for item in re.findall(r"^- (.+?)\.$", section, re.MULTILINE | re.DOTALL):
        if item.startswith("Not run"):
            continue
        text = re.sub(r"\(.*?\)|With AMX: |`opcheck` alone, with AMX: ", "", " ".join(item.split()))
        for name in re.split(r"[,;]| and ", text):
            name = re.split(r" with | that | by ", name.strip().removeprefix("in an older capture").strip())[0]
            names[name] = names.get(name, False) or not item.startswith("`opcheck` alone")
    names = {name: compared for name, compared in names.items() if name not in OF_OTHER_KINDS}
    for page in ("README.md", "README.zh.md"):
        row = next(line for line in (ROOT / page).read_text(encoding="utf-8").splitlines() if "scripts/zoo.py" in line)
        assert re.findall(r"\d+", row.split("|")[3]) == [str(len(names)), str(sum(names.values()))], page
