"""The environment variables by which Ascend's transformer boost library (ATB) writes its tensors, and what it wrote.

The problem: what ATB dumps is set by variables that a library reads which CANN brings and LD_PRELOAD loads; without
CANN none of it exists. The idea: one frozen description of the choice, spelt as ``ait llm dump`` spells it, becomes
the variables, for today's library and for its ancestor (ACLTRANSFORMER_*); the output lies in the dump, under ``atb``,
so that collecting is finding it there. Names of variables: msit's and ait's documents (docs/capture.md).
Not here: reading what was written (formats/).
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_accprobe.config import ConfigError

TOOLKITS = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")
DEFAULT_TOOLKIT = "/usr/local/Ascend/ascend-toolkit/latest"
TYPES = ("model", "layer", "op", "kernel", "tensor", "cpu_profiling", "stats")
ONNX = "onnx"
"""Among the types: what is written of model and layer is drawn, too. The library knows nothing of it."""
DIRECTORY = "atb"
"""Below the dump: what the library writes."""
AIT = "ait_dump"
"""The same, as ait calls it, for who starts a command as ait does."""


@dataclass(frozen=True)
class AtbOptions:
    """ids: operations, ``2,3_1``; ranges: first and last executions, ``1,3`` or ``3,5,7,7``; names: beginnings of
    operation names; time: 0 before, 1 after, 2 both, 3 inputs before and outputs after; part: 0 inputs, 1 outputs, 2
    both; child: an operation's own operations too; tiling: tiling data too; describe: descriptions without values;
    types: of TYPES, and ONNX; device: only this one. Defaults: ait's."""

    ids: str = ""
    ranges: str = "0,0"
    names: str = ""
    time: int = 1
    part: int = 2
    child: bool = True
    tiling: bool = False
    describe: bool = False
    types: str = "tensor"
    device: int | None = None

    def __post_init__(self) -> None:
        ids, ranges = self.ids.replace(" ", ""), self.ranges.replace(" ", "")
        if ids and not re.fullmatch(r"\d+(_\d+)*(,\d+(_\d+)*)*", ids):
            raise ConfigError(f"--atb-ids={self.ids}: write operations as 2,3_1")
        numbers = ranges.split(",")
        pairs = [numbers[i : i + 2] for i in range(0, len(numbers), 2)]
        if not all(len(p) == 2 and p[0].isdecimal() and p[1].isdecimal() and int(p[0]) <= int(p[1]) for p in pairs):
            raise ConfigError(f"--atb-range={self.ranges}: write first and last executions as 1,3 or 3,5,7,7")
        if self.time not in range(4):
            raise ConfigError(f"--atb-time={self.time}: 0 before, 1 after, 2 both, 3 inputs before and outputs after")
        if self.part not in range(3):
            raise ConfigError(f"--atb-part={self.part}: 0 inputs, 1 outputs, 2 both")
        for word in self._words():
            if word not in (*TYPES, ONNX):
                raise ConfigError(f"--atb-type={word}: known are {', '.join((*TYPES, ONNX))}")
        if self.draws and not {"model", "layer"} & set(self._types()):
            raise ConfigError(f"--atb-type={self.types}: {ONNX} draws what model or layer writes: add one of them")
        if self.draws and importlib.util.find_spec("onnx") is None:
            raise ConfigError(f"--atb-type={self.types}: the package onnx is not installed: "
                              "pip install 'vllm-accprobe[onnx]'")  # fmt: skip

    @property
    def draws(self) -> bool:
        """Whether topologies become ONNX files."""
        return ONNX in self._words()

    def _words(self) -> list[str]:
        return [word for word in (w.strip() for w in self.types.split(",")) if word]

    def _types(self) -> list[str]:
        return [word for word in self._words() if word != ONNX]

    def variables(self, output: Path) -> dict[str, str]:
        """Everything but LD_PRELOAD. output: where the library writes; a trailing slash is part of its protocol."""
        ranges = self.ranges.replace(" ", "")
        last = max(int(n) for n in ranges.split(","))
        names = self.names.replace(" ", "")
        found = {
            "ATB_SAVE_TENSOR": "2" if self.describe else "1",
            "ATB_SAVE_TENSOR_IN_BEFORE_OUT_AFTER": "1" if self.time == 3 else "0",
            "ATB_SAVE_TENSOR_TIME": "1" if self.time == 3 else str(self.time),
            "ATB_SAVE_TENSOR_RANGE": ranges,
            "ATB_SAVE_TENSOR_START": ranges.split(",")[0],
            "ATB_SAVE_TENSOR_END": str(last),
            "ATB_SAVE_TENSOR_PART": str(self.part),
            "ATB_SAVE_CHILD": "1" if self.child else "0",
            "ATB_SAVE_TILING": "1" if self.tiling else "0",
            "ATB_SAVE_CPU_PROFILING": "1" if "cpu_profiling" in self._types() else "0",
            "ATB_DUMP_TYPE": "|".join(self._types()),
            "ATB_OUTPUT_DIR": f"{output}/",
            "ATB_CUR_PID": str(os.getpid()),
            "ACLTRANSFORMER_SAVE_TENSOR": "1",
            "ACLTRANSFORMER_SAVE_TENSOR_MAX": str(last + 1),
        }
        if self.ids:
            found["ATB_SAVE_TENSOR_IDS"] = self.ids.replace(" ", "")
        if names:
            found["ATB_SAVE_TENSOR_RUNNER"] = names.lower()
            found["ACLTRANSFORMER_SAVE_TENSOR_RUNNER"] = names
        if self.device is not None:
            found["ATB_DEVICE_ID"] = str(self.device)
        if {"stats", "tensor"} <= set(self._types()):
            found["ATB_SAVE_TENSOR_STATISTICS"] = "1"
        return found


ANCESTOR = "ACLTRANSFORMER_SAVE_TENSOR"


def options_of(requested: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[AtbOptions, list[str]]:
    """(the choice, lines to print). requested: fields of AtbOptions, None: not set; then what the environment says in
    the words of ATB's ancestor is taken: ``ACLTRANSFORMER_SAVE_TENSOR_MAX``, ``_RUNNER``. Raises ConfigError."""
    found = {name: value for name, value in requested.items() if value is not None}
    notes = []
    most, runner = environ.get(f"{ANCESTOR}_MAX", "").strip(), environ.get(f"{ANCESTOR}_RUNNER", "").strip()
    if most and "ranges" not in found:
        if not most.isdecimal() or not 0 < int(most) < 1 << 31:
            raise ConfigError(f"{ANCESTOR}_MAX={most}: write how many executions to save, for example 2")
        found["ranges"] = f"0,{int(most) - 1}"
        notes.append(f"{ANCESTOR}_MAX={most} is taken as --atb-range {found['ranges']}")
    if runner and "names" not in found:
        found["names"] = runner
        notes.append(f"{ANCESTOR}_RUNNER={runner} is taken as --atb-op {runner}")
    return AtbOptions(**found), notes


def preload(environ: Mapping[str, str]) -> tuple[str | None, str]:
    """(value for LD_PRELOAD, "") or (None, why there is none) by the CANN that ``environ`` names."""
    home = next((environ[name] for name in TOOLKITS if environ.get(name)), DEFAULT_TOOLKIT)
    if not Path(home).is_dir():
        return None, f"no CANN is installed here ({TOOLKITS[0]} names no directory): ATB will write nothing"
    atb = environ.get("ATB_HOME_PATH", "")
    if not atb or not Path(atb).is_dir():
        return None, "no ATB is installed here (ATB_HOME_PATH names no directory): nothing will write its tensors"
    name = f"libatb_probe_abi{int(_cxx11(Path(atb)))}.so"
    library = Path(home) / "tools" / "ait_backend" / "dump" / name
    if not library.is_file():
        return None, f"{library} is missing: install a CANN toolkit that brings it; ATB will write nothing"
    before = environ.get("LD_PRELOAD", "")
    return f"{library}:{before}" if before else str(library), ""


def _cxx11(atb: Path) -> bool:
    """Whether ATB was built with C++11's ABI: by its directory's name, else by the name of its probe's symbols."""
    for part in (str(atb), str(atb.resolve())):
        found = re.search(r"cxx_abi_([01])", part)
        if found:
            return found[1] == "1"
    try:
        with open(atb / "lib" / "libatb.so", "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return re.search(rb"\w*Probe\w*cxx11", data) is not None  # type: ignore[arg-type]
    except (OSError, ValueError):
        return False


def collect(root: Path, environ: Mapping[str, str], since: float, folder: str = DIRECTORY) -> tuple[int, int]:
    """(files, bytes) of what ATB has written into ``folder`` of ``root``. What its ancestor wrote elsewhere since
    ``since`` (seconds since 1970) is brought there."""
    output = root / folder
    home = environ.get("ACLTRANSFORMER_HOME_PATH", "")
    if home and (Path(home) / "tensors").is_dir():
        source = Path(home) / "tensors"
        for file in list(_files(source)):
            if file.stat().st_mtime >= since:
                _bring(file, output / "tensors" / file.relative_to(source))
    # ATB may have been configured for a place below: what is brought is a second name of the same file then.
    found = {(s.st_dev, s.st_ino): s.st_size for s in (file.stat() for file in _files(output))}
    count, nbytes = len(found), sum(found.values())
    if not count and output.is_dir():
        shutil.rmtree(output, ignore_errors=True)
    return count, nbytes


def _files(directory: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(directory):
        for name in names:
            path = Path(parent) / name
            if path.is_file() and not path.is_symlink():
                yield path


def _bring(file: Path, target: Path) -> None:
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        os.link(file, target)
    except FileExistsError:
        return
    except OSError:  # another file system
        shutil.copyfile(file, target)
