"""Every command line of the documents that the product was asked for with, in their order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from support.seeds import seed_000, seed_001, seed_002, seed_003, seed_004
from support.seeds.line import Line

from vllm_accprobe.cli import main

SEEDS = {"000": seed_000, "001": seed_001, "002": seed_002, "003": seed_003, "004": seed_004}
LINES = [(number, line) for number, seed in SEEDS.items() for line in seed.LINES]


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
def test_a_line_of_the_documents(
    number: str,
    line: Line,
    homes: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
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
