"""A hundred spoilt files through every reader, with --all a few hundred; scripts/fuzz_formats.py does ten thousand."""

from pathlib import Path

import fuzz_formats
import pytest

from vllm_accprobe.formats import open_dump, single

FILES = [(130, 0), pytest.param(270, 130, marks=pytest.mark.extra)]
COMPARED = [(20, 50_000), pytest.param(40, 50_020, marks=pytest.mark.extra)]
"""How many, and the first one's number."""


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> list[fuzz_formats.Seed]:
    return fuzz_formats.seeds(tmp_path_factory.mktemp("fuzz"))


def test_every_seed_can_be_read(seeds: list[fuzz_formats.Seed]) -> None:
    kinds = set()
    for root in {s.root for s in seeds}:
        dump = open_dump(root)
        kinds.add(dump.run["format"])
        for record in dump.records:
            if record.payload is not None:
                dump.read(record)
    assert kinds == {"torch_xray", "msprobe", "sglang", "msit", "atb", "torchair", "single file"}
    # of these, one spoilt file among others refuses no dump
    many = {"sglang", "msit", "atb", "torchair_ge", "torchair_fx", "a_msprobe_tensor"}
    assert {s.reader for s in seeds if s.one_of_many} == many


@pytest.mark.parametrize(("files", "first"), FILES)
def test_only_one_clear_line_comes_out(files: int, first: int, seeds: list[fuzz_formats.Seed]) -> None:
    assert fuzz_formats.run(seeds, files, first) == []


@pytest.mark.parametrize(("files", "first"), COMPARED)
def test_compared_with_the_file_as_it_was(files: int, first: int, seeds: list[fuzz_formats.Seed]) -> None:
    assert fuzz_formats.run(seeds, files, first, compared=True) == []


def test_most_mutations_matter(seeds: list[fuzz_formats.Seed]) -> None:
    """The same number makes the same file, and a file is seldom what it was."""
    import random

    seed = next(s for s in seeds if s.reader == "file.pt")
    data = seed.file.read_bytes()
    made = [fuzz_formats.mutate(data, data, random.Random(n)) for n in range(50)]
    assert made == [fuzz_formats.mutate(data, data, random.Random(n)) for n in range(50)]
    assert sum(m == data for m in made) < 10


def careless(path: Path) -> object:
    return {}[path.name]


def patient(path: Path) -> object:
    while True:
        pass


@pytest.mark.parametrize(("reader", "says"), [(careless, "Traceback"), (patient, "no end after 1 s")])
def test_a_reader_that_fails_or_hangs_is_found(reader, says, seeds, monkeypatch) -> None:
    monkeypatch.setattr(single, "items", reader)
    monkeypatch.setattr(fuzz_formats, "SECONDS", 1)
    (finding,) = fuzz_formats.run([s for s in seeds if s.reader == "file.npy"], 1)
    assert finding.startswith(f"#0 file.npy ok.npy: {says}")
