import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from pack_dumps import dump
from picture_runs import PIXELS, seen
from synthetic_model import write

from vllm_accprobe.align.tokens import POSITION_MASK
from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.reader import open_dump
from vllm_accprobe.dump.schema import RowSpace, Segment
from vllm_accprobe.formats.io.pack_file import MOST, PROMPTS
from vllm_accprobe.golden.pack import (
    BUDGET,
    CANNOT,
    RequestShape,
    _Packing,
    default_bytes,
    is_outer,
    pack,
    public,
    rows_wanted,
)
from vllm_accprobe.golden.pack_sketches import open_pack

MB = 1_000_000


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dump(tmp_path_factory.mktemp("golden") / "dump", together=False)


@pytest.mark.parametrize(
    ("shape", "always"),
    [
        (RequestShape(10, 4), {0, 9, 10, 13}),
        (RequestShape(10), {0, 9}),
        (RequestShape(1), {0}),
        (RequestShape(40, 2, (15, 31, 39)), {0, 15, 31, 39, 40, 41}),
        (RequestShape(5, 0, (99,)), {0, 4}),
        (RequestShape(0, 3), {0, 2}),
    ],
)
def test_rows_by_rule(shape: RequestShape, always: set[int]) -> None:
    found = rows_wanted([shape], 0).of(0)
    assert always <= set(found) <= set(range(shape.prompt_len + shape.generated))
    assert len(found) == len(set(found)) <= len(always) + 6


def test_rows_are_drawn_by_seed_and_prompt_and_begin_with_all_kinds() -> None:
    shapes = [RequestShape(200, 8, prompt=p) for p in ("a", "b", "c")]
    first = rows_wanted(shapes, 0)
    assert first == rows_wanted(shapes, 0)
    assert first.rows[:3] == ((0, 199), (1, 207), (2, 0))
    assert len({first.of(i) for i in range(3)}) == 3
    assert first.of(0) != rows_wanted(shapes, 1).of(0)


@pytest.mark.parametrize(("row", "least", "most"), [(5.66 * MB, 7.9, 8.0), (28 * MB, 20, 25), (10_000, 0.2, 0.3)])
def test_default_sizes(row: int, least: float, most: float) -> None:
    """Of a 7B model, a 70B and a very small one."""
    assert least * MB <= default_bytes(row) <= most * MB


@pytest.mark.parametrize(
    ("tap", "outer"),
    [("model.norm", True), ("lm_head", True), ("model.layers.3", True), ("model.layers.3.mlp", True),
     ("model.layers.3.mlp.down_proj", False), ("model.layers.3.mlp.experts.0", False)],
)  # fmt: skip
def test_outer_calls(tap: str, outer: bool) -> None:
    assert is_outer(tap) is outer


@pytest.mark.parametrize("limit", [None, 60_000, 30_000, 12_000])
def test_a_pack_holds_rows_of_the_dump_bit_by_bit(golden: Path, tmp_path: Path, limit: int | None) -> None:
    out = tmp_path / "x.golden"
    summary = pack(golden, out, max_bytes=limit)
    assert out.stat().st_size == summary.bytes <= (limit or 8 * MB)
    assert bool(summary.left_out.get(BUDGET)) is (limit is not None)
    whole, part = open_dump(golden), open_dump(open_pack(out, tmp_path).dump)
    assert part.problems == []
    rows: dict[object, np.ndarray] = {}
    for r in whole.records:
        if r.step is not None and r.rows is not None:
            for s, at in whole.rows[r.rank, r.step, r.rows].stretches():
                for i in range(s.n):
                    rows[r.tap, r.role, r.call, s.req, s.pos + i] = whole.read(r)[at.start + i]
    full, spaces = 0, set()
    for r in part.records:
        if r.step is None or r.payload is None:
            continue
        assert r.rows is not None
        spaces.add((r.step, r.rows))
        for s, at in part.rows[r.rank, r.step, r.rows].stretches():
            for i in range(s.n):
                known = rows[r.tap, r.role, r.call, s.req, s.pos + i]
                assert np.array_equal(part.read(r)[at.start + i], known)
                full += 1
    assert full > 10
    ids = [{(k[2].partition("/")[0], s.req, s.pos + i): space.ids[at.start + i] for k, space in d.rows.items()
            for s, at in space.stretches() for i in range(s.n) if space.ids} for d in (whole, part)]  # fmt: skip
    assert ids[0] == ids[1]
    assert all(space.n == len(space.ids) for space in part.rows.values() if space.ids)
    assert len({name for step, name in spaces if name.startswith("tokens")}) <= 2
    assert {k[0]: len(r.ids) for k, r in part.rows.items() if k[2] == "tokens"} == {
        k[0]: len(r.ids) for k, r in whole.rows.items() if k[2] == "tokens"
    }


def test_a_pack_says_nothing_of_the_machine(golden: Path, tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir()
    for f in golden.rglob("*"):
        target = private / f.relative_to(golden)
        target.mkdir(exist_ok=True) if f.is_dir() else target.write_bytes(f.read_bytes())
    run = json.loads((private / "run.json").read_text())
    config = {"_name_or_path": "secret-name", "text_config": {"_name_or_path": "secret-name/x", "scale": float("inf")}}
    run |= {"model": {"path": "/home/secret-name/model", "config": config},
            "engine": {"adapters": ["~/secret-name/an adapter"]}, "probe": {"dir": "/secret-name", "task": "tensor"},
            "command": ["secret-name"]}  # fmt: skip
    (private / "run.json").write_text(json.dumps(run))
    journal = private / "rank0000" / "journal.jsonl"
    first, _, rest = journal.read_text().partition("\n")
    journal.write_text(json.dumps(json.loads(first) | {"host": "secret-name", "pid": 424242}) + "\n" + rest
                       + json.dumps({"event": "skip", "tap": "x", "reason": "adapter /a/secret-name/b was not read"})
                       + "\n")  # fmt: skip
    pack(private, tmp_path / "x.golden")
    with zipfile.ZipFile(tmp_path / "x.golden") as archive:
        text = b"".join(archive.read(n) for n in archive.namelist())
    assert b"secret-name" not in text
    assert b"424242" not in text
    assert (tmp_path / "x.golden").stat().st_mode & 0o777 == 0o600
    for kept in (b'"path":"model"', b'"scale":null', b'"an adapter"', b"adapter b was not read"):
        assert kept in text
    assert b'"task":"tensor"' in text


def test_the_page_and_the_manifest_have_one_number_for_sketches() -> None:
    page = (Path(__file__).parents[2] / "docs/golden.md").read_text().lower()
    assert next(line for line in CANNOT if "sketched row" in line) in page


@pytest.mark.parametrize(
    ("text", "left"),
    [("/home/me/my model", "my model"), ("no file ~me/a/b.json", "no file b.json"), ("x=C:\\me\\b, y", "x=b, y"),
     ("file:///me/b", "b"), ("org/model", "org/model"), ("https://x.org/a/b", "https://x.org/a/b")],
)  # fmt: skip
def test_texts_without_folders(text: str, left: str) -> None:
    assert public({"a": [text]}) == {"a": [left]}


@pytest.mark.parametrize(
    ("limit", "prompts", "why"),
    [(2_000, None, "bytes at least, more than the 2,000 allowed"), (None, b"\xff\xfe", "is not UTF-8 text"),
     (None, b"x" * 21, "prompts.jsonl of its pack has 21 bytes")],
)
def test_what_cannot_be_packed(
    golden: Path, tmp_path: Path, limit: int | None, prompts: bytes, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = None
    monkeypatch.setitem(MOST, PROMPTS, 20)
    if prompts is not None:
        file = tmp_path / "prompts"
        file.write_bytes(prompts)
    with pytest.raises(DumpError, match=why):
        pack(golden, tmp_path / "x.golden", max_bytes=limit, prompts=file)
    assert not (tmp_path / "x.golden").exists()


def test_rows_of_images_are_those_that_are_there(tmp_path: Path) -> None:
    """Not as many as a position claims."""
    run = seen(PIXELS, "float32")
    run.rows[0, 0, "vision/4"] = RowSpace(0, "vision/4", 8, (Segment(0, 1000, 8, 0, image=0),))
    found = _Packing(open_dump(write(run, tmp_path / "dump")), 0)
    assert sorted(key & POSITION_MASK for key in found.order_of_images) == list(range(1000, 1008))
    assert {1000, 1007} <= {key & POSITION_MASK for key in found.wanted_images} <= set(range(1000, 1008))
