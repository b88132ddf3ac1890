"""The payload files of a dump of msprobe: ``dump_tensor_data/<data_name>``, .pt or .npy.

The problem: the index says dtype and shape, the file says so too, and one among thousands may be cut off, or be no
tensor at all. The idea: each file is opened for what it says of itself when the dump is, as in all other formats; one
that cannot be read, or that holds something else than the index says, is left out with its reason, and its record keeps
its statistics. Reading is then one read at a known offset.
Not here: the index (msprobe.py), the containers (torchfile.py, tensor_file.py).
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from vllm_accprobe.dump.dtypes import DTYPES
from vllm_accprobe.dump.reader import DumpError
from vllm_accprobe.formats.common.foreign import ForeignDump, Read
from vllm_accprobe.formats.common.msprobe_words import DATA
from vllm_accprobe.formats.io import tensor_file, torchfile
from vllm_accprobe.formats.io.plain_file import FileTensor
from vllm_accprobe.formats.io.torchtensor import TorchTensor

LOST = f"payload missing in {DATA}"
OUTSIDE = "payload outside the dump"


def names_in(dump: ForeignDump, directory: str) -> set[str]:
    """The names of what lies in ``dump_tensor_data``, whatever it is."""
    try:
        with os.scandir(directory) as entries:
            return {e.name for e in entries}
    except FileNotFoundError:  # statistics only
        return set()
    except OSError as e:
        dump.unreadable(f"{directory} cannot be listed: {e.strerror or e}", DATA)
        return set()


def payload(
    dump: ForeignDump, directory: str, name: Any, stored: set[str], said: tuple[str, tuple[int, ...]],
    place: tuple[str, int, str],
) -> Read | None:  # fmt: skip
    """What reads a record's file. said: dtype and shape by the index; place: tap, step, role. Opens the file for what
    it says of itself: one that cannot be read is known before anything is compared, as in all other formats."""
    tap, step, role = place
    if not isinstance(name, str) or os.path.basename(name) != name or "\\" in name or name in ("", ".", ".."):
        dump.skip(tap, OUTSIDE, step, role)
        dump.problem(f"{tap} {role}: its data_name {str(name)[:80]!r} leads out of the dump: not read")
        return None
    if name not in stored:
        dump.skip(tap, LOST, step, role)
        return None
    path = Path(directory, name)
    try:
        found = tensor_file.first(path) if name.endswith(".npy") else _torch_item(path)
        held = _held(found, said[0], path)
    except DumpError as e:
        dump.unreadable(e, tap, step, role)
        return None
    if math.prod(found.shape) != math.prod(said[1]):
        what = f"{list(found.shape)} where {list(said[1])} was announced"
        dump.unreadable(f"{path} holds {what}", tap, step, role)
        return None
    return held


def _torch_item(path: Path) -> TorchTensor:
    found = torchfile.items(path)
    if len(found) != 1:
        raise DumpError(f"{path} holds {len(found)} tensors, not one")
    return found[0][1]


def _held(item: FileTensor | TorchTensor, dtype: str, path: Path) -> Read:
    """What reads the bits of ``dtype``: the file's own, or of a bfloat16 that numpy stored as float32, which takes
    its values to tell. Raises DumpError where the file's dtype is another."""
    if item.dtype == dtype or dtype not in DTYPES:
        return item.read
    other = f"{path} holds {item.dtype} where {dtype} was announced"
    if (item.dtype, dtype) != ("float32", "bfloat16"):
        raise DumpError(other)

    def read() -> np.ndarray:
        whole = np.ascontiguousarray(item.read()).view(np.uint32)
        if (whole & 0xFFFF).any():
            raise DumpError(other)
        return (whole >> 16).astype(np.uint16)

    return read
