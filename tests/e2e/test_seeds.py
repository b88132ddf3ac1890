"""Every command line of the documents that the product was asked for with, in their order."""

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from support.seeds import columns, seed_000, seed_001, seed_002, seed_003, seed_004
from support.seeds.commands import COMMANDS
from support.seeds.names import ELSEWHERE, NAMES

from vllm_accprobe.cli import main

ROOT = Path(__file__).parents[2]
SPANS = re.findall(r"`([^`\n]+)`", (ROOT / "docs" / "migration.md").read_text(encoding="utf-8"))
TYPED = "\n".join(
    path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "tests" / "support" / "seeds").glob("*.py"))
    if path.name not in ("names.py", "columns.py", "commands.py")
)
"""The modules with the lines."""
SEEDS = {"000": seed_000, "001": seed_001, "002": seed_002, "003": seed_003, "004": seed_004}
LINES = [(number, line) for number, seed in SEEDS.items() for line in seed.LINES if not line.as_in]


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(number: str) -> Path:
        if number not in made:
            home = tmp_path_factory.mktemp(f"seed-{number}")
            SEEDS[number].prepare(home)
            made[number] = home  # not before: a folder half prepared is not taken for one
        return made[number]

    return of


@pytest.mark.xdist_group("seeds")
@pytest.mark.parametrize(("number", "line"), LINES, ids=[f"{n}:{x.at}-{i}" for i, (n, x) in enumerate(LINES)])
def test_a_line_of_the_documents(number, line, homes, monkeypatch, capsys):
    home = homes(number)
    monkeypatch.chdir(home)
    if callable(line.argv):
        line.argv(home)
        code = 0
    else:
        code = main(list(line.argv))
    said = "".join(capsys.readouterr())
    assert code == line.code, f"{line.says}\n{said}"
    for words in line.prints:
        assert words in said, f"{line.says}\n{said}"
    if line.check is not None:
        line.check(home, said)


@pytest.mark.parametrize("seed", SEEDS.values(), ids=SEEDS)
def test_lines_stand_in_the_document_s_order(seed: ModuleType) -> None:
    assert [line.at for line in seed.LINES] == sorted(line.at for line in seed.LINES)


def test_what_is_typed_for_another_document_is_typed_there() -> None:
    for line in (line for seed in SEEDS.values() for line in seed.LINES if line.as_in and not callable(line.argv)):
        assert line.argv in [other.argv for other in SEEDS[line.as_in].LINES], line.says


@pytest.mark.parametrize("number", SEEDS)
def test_no_command_of_a_document_is_left_out(number: str) -> None:
    typed = {at for line in SEEDS[number].LINES for at in (line.at, *line.also)}
    assert set(COMMANDS[number]) - typed == set()


def test_each_line_can_fail() -> None:
    """A line that exits 0 and is looked at by nobody would pass whatever it does."""
    blind = [f"{n}:{x.at} {x.says}" for n, x in LINES if not callable(x.argv) and not (x.prints or x.check or x.code)]
    assert blind == []


def whole(name: str, text: str) -> bool:
    """Whether ``name`` stands there, and not as a part of a longer one; a name that ends with _ is a beginning."""
    end = "" if name.endswith("_") else r"(?![\w-])"
    return re.search(rf"(?<![\w-]){re.escape(name)}{end}" if name[0] != "_" else re.escape(name), text) is not None


@pytest.mark.parametrize("number", SEEDS)
def test_each_name_has_its_place_on_the_page_and_is_typed(number: str) -> None:
    names = NAMES[number].split()
    assert [n for n in names if not any(whole(n, span) for span in SPANS)] == []
    missing = [n for n in names if not whole(n, TYPED)]
    assert set(missing) <= set(ELSEWHERE)
    for name in missing:
        (test,) = (ROOT / "tests").rglob(ELSEWHERE[name])
        assert whole(name, test.read_text(encoding="utf-8")), name


@pytest.mark.parametrize("table", [n for n in dir(columns) if n.isupper()])
def test_each_column_has_its_place_on_the_page(table: str) -> None:
    """As the file spells it; an English name of document 002 stands beside it there."""
    known = {name for span in SPANS for name in columns.alike([span])}
    assert [c for c in getattr(columns, table) if columns.alike([c])[0] not in known] == []
