import json
from dataclasses import replace
from pathlib import Path

import pytest
from pack_dumps import dump
from synthetic_model import scaled

from vllm_accprobe.comparison.pair import NONE_JUDGED, Pair
from vllm_accprobe.comparison.result import Comparison
from vllm_accprobe.golden.history import (
    DIFFERS,
    EQUAL,
    FIRST,
    ONLY_SKETCHED,
    UNREADABLE,
    WITHIN,
    _found,
    _release,
    history,
)
from vllm_accprobe.golden.pack import pack

TAP = "model.layers.1.mlp.down_proj"


def one(folder: Path, name: str, vllm: str, model: str = "a", config: object = None, most: int | None = None,
        **how: object) -> None:  # fmt: skip
    where = dump(folder / "dumps" / name, **how)
    run = json.loads((where / "run.json").read_text())
    run |= {"versions": {"vllm": vllm}, "model": {"class": model, "path": f"/models/{model}", "config": config}}
    (where / "run.json").write_text(json.dumps(run))
    pack(where, folder / "packs" / name, max_bytes=most)


def test_packs_of_a_model_in_the_order_of_releases(tmp_path: Path) -> None:
    fault = {TAP: scaled(1.5)}
    one(tmp_path, "z.golden", "0.9.2")
    one(tmp_path, "b/y.golden", "0.10.0", together=False)
    one(tmp_path, "x.golden", "0.11.0", faults=fault)
    one(tmp_path, "w.golden", "0.11.1", faults=fault, chunk=4)
    one(tmp_path, "other.golden", "0.10.1", "b")
    packs = tmp_path / "packs"
    data = bytearray((packs / "w.golden").read_bytes())
    data[-len(data) // 2] ^= 1
    (packs / "damaged.golden").write_bytes(data)
    found = {line.pack: (line.found, line.where) for line in history(packs)}
    assert found.pop("damaged.golden")[0] == UNREADABLE
    assert found == {
        "z.golden": (FIRST, ""), "b/y.golden": (EQUAL, ""), "x.golden": (DIFFERS, f"{TAP}/output.0"),
        "w.golden": (EQUAL, ""), "other.golden": (FIRST, ""),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("configs", "models"),
    [(({"layers": 2, "_name_or_path": "/x", "torch_dtype": "a"}, {"layers": 2, "transformers_version": "5"}), 1),
     (({"layers": 2}, None), 1), (({"layers": 2}, {"layers": 3}), 2)],
)  # fmt: skip
def test_which_packs_are_of_one_model(tmp_path: Path, configs: tuple[object, object], models: int) -> None:
    for number, config in enumerate(configs):
        one(tmp_path, f"{number}.golden", "0.9", config=config, together=False)
    assert [line.found for line in history(tmp_path / "packs")].count(FIRST) == models


def test_sketched_rows_are_not_equal(tmp_path: Path) -> None:
    one(tmp_path, "a.golden", "0.9", most=40_000, together=False)
    one(tmp_path, "b.golden", "0.10", most=40_000, together=False)
    found = history(tmp_path / "packs")
    assert [(line.pack, line.found, line.where) for line in found] == [
        ("a.golden", FIRST, ""), ("b.golden", WITHIN, ONLY_SKETCHED)]  # fmt: skip


def test_what_differs_and_is_not_judged_is_not_equal() -> None:
    pair = Pair("a", "a", 0, 0, *["float32"] * 2, (1, 8), tap=TAP, role="output.0", message=NONE_JUDGED,
                worst_row_rel_l2=0.0, limit=0.1)  # fmt: skip
    result = Comparison("g", "m", {}, {}, [pair], {}, None, [], {}, "pass", [], [], {})
    assert _found(result)[:2] == (WITHIN, f"{TAP}/output.0")
    assert _found(replace(result, pairs=[replace(pair, worst_row_rel_l2=None)]))[0] == EQUAL  # it has no partner


def test_versions_in_order() -> None:
    order = ["", "0.9.2", "0.10.0.dev5", "0.10.0rc1", "0.10.0rc2", "0.10", "0.10.0.post1", "0.11.0+cpu", "0.11.1"]
    shuffled = [*order[1::2], *order[::2]]
    assert sorted(shuffled, key=_release) == order
