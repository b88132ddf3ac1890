"""Small dumps of other tools with a planted fault, packed beside the tests, and what their metrics must be."""

import json
import math
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parents[1] / "formats" / "data"
FIELDS = ("cosine", "max_abs_err", "mean_abs_err", "rmse", "rel_l2", "max_rel_err", "nonfinite", "nonfinite_mismatch")
"""Defined in float64 over all elements of both tensors, flattened; see docs/formats.md."""


def unpack(name: str, where: Path) -> Path:
    """The directory that DATA/<name>.tar.xz holds, unpacked into ``where`` once."""
    target = where / name
    if not target.exists():
        with tarfile.open(DATA / f"{name}.tar.xz") as archive:
            for member in archive:
                assert member.isfile() or member.isdir()
            archive.extractall(where)
    return target


def expected(pair: str, file: str = "expected_ascend.json") -> dict[str, Any]:
    pairs: list[dict[str, Any]] = json.loads((DATA / file).read_text())["pairs"]
    return next(p for p in pairs if p["pair"] == pair)


def check_metrics(wanted: dict[str, Any], comparison: Any, golden: str, mine: str) -> int:
    """Holds every tensor of ``wanted`` against its pair in ``comparison``, to 1e-6 relative. golden, mine: the names of
    the two dumps' directories in ``wanted``'s paths. Returns how many were checked."""
    head = wanted["pair"]
    for t in wanted["tensors"]:
        files = [_first(t["golden_file"]), _first(t["mine_file"])]
        names = [f.removeprefix(f"{head}/{d}/") for f, d in zip(files, (golden, mine), strict=True)]
        found = [p for p in comparison.pairs if _is(p.golden, names[0]) and _is(p.mine, names[1])]
        if len(found) > 1:  # a file with several tensors: the name ends with which, "Mm_10 input 1"
            found = [p for p in found if p.mine.endswith(":" + ".".join(t["name"].split()[-2:]))]
        assert len(found) == 1, (t["name"], [p.mine for p in found])
        pair = found[0]
        assert pair.dtype_golden == t["golden_dtype"], t["name"]
        if isinstance(t["mine_file"], str):  # a sum over ranks is told as what its parts were
            assert pair.dtype_mine == t["mine_dtype"], t["name"]
        check_row(pair, t)
    return len(wanted["tensors"])


def check_row(row: Any, wanted: dict[str, Any]) -> None:
    """Those of FIELDS that are ``wanted``, to 1e-6 relative."""
    for field in set(FIELDS) & wanted.keys():
        got, want, what = getattr(row, field), wanted[field], f"{wanted['name']}: {field}"
        assert (got is None) == (want is None), what
        assert want is None or math.isclose(got, want, rel_tol=1e-6, abs_tol=1e-15), (what, got, want)


class RunsCode:
    """Pickled, it runs code: it is written and never loaded."""

    def __reduce__(self) -> Any:
        return (exec, ("import os; open(os.environ['ACCPROBE_MARKER'], 'w').close()",))


def tensor(name: str, **more: Any) -> dict[str, Any]:
    """What msprobe's dump.json says of a tensor."""
    return {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], "data_name": name, **more}


def write(directory: Path, data: Any, values: dict[str, np.ndarray], construct: Any = None, **head: Any) -> Path:
    """A rank's directory of msprobe. data: its records; values: by the name of their file."""
    import torch

    (directory / "dump_tensor_data").mkdir(parents=True)
    (directory / "dump.json").write_text(json.dumps({"task": "tensor", "data": data, **head}))
    if construct is not None:
        (directory / "construct.json").write_text(json.dumps(construct))
    for name, value in values.items():
        if name.endswith(".npy"):
            np.save(directory / "dump_tensor_data" / name, value)
        else:
            torch.save(torch.from_numpy(value), directory / "dump_tensor_data" / name)
    return directory


def _first(files: str | list[str]) -> str:
    return files if isinstance(files, str) else files[0]


def _is(name: str, file: str) -> bool:
    return name == file or name.startswith(f"{file}:")
