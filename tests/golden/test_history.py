import json
from pathlib import Path

import pytest
from pack_dumps import dump
from synthetic_model import scaled

from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.golden.history import DIFFERS, EQUAL, FIRST, UNREADABLE, history
from vllm_accprobe.golden.pack import pack

TAP = "model.layers.1.mlp.down_proj"


def one(folder: Path, name: str, vllm: str, model: str = "a", **how: object) -> None:
    where = dump(folder / "dumps" / name, **how)
    run = json.loads((where / "run.json").read_text())
    run |= {"versions": {"vllm": vllm}, "model": {"class": model, "path": f"/models/{model}"}}
    (where / "run.json").write_text(json.dumps(run))
    pack(where, folder / "packs" / name)


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


def test_no_pack(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="has no pack"):
        history(tmp_path)
