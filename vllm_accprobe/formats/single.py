"""One file with one tensor or several: .pt, .pth, .npy, .npz, .bin, .safetensors.

The problem: two people send each other single tensors, saved in whatever way was at hand. The idea: a file is its
tensors, whatever its kind; two files with one tensor each meet whatever they are called, several meet by their keys,
and what `accprobe convert` wrote says its places itself.
Not here: what is in a file (io/tensor_file.py), HDF5 (xray.py), folders of files (folder.py).
"""

from __future__ import annotations

from pathlib import Path

from vllm_accprobe.dump.reader import DumpError
from vllm_accprobe.formats.common.foreign import INDEPENDENT, VALUE, ForeignDump, Tensor
from vllm_accprobe.formats.io.containers import RANK_FILE, key_place
from vllm_accprobe.formats.io.plain_file import FileTensor
from vllm_accprobe.formats.io.tensor_file import SUFFIXES, first, items

__all__ = ["HOW", "NAME", "SUFFIXES", "first", "items", "open", "recognise"]
NAME = "single file"
HOW = f"a file that ends in {', '.join(SUFFIXES)}"
ORDER = 80


def recognise(path: Path) -> bool:
    return path.is_file() and path.suffix.lower() in SUFFIXES


def open(path: Path) -> ForeignDump:
    """Raises DumpError."""
    dump = ForeignDump(path, NAME, {INDEPENDENT: True})
    found = items(path)
    for item in found:  # of several the keys alone are places: the two files are called differently, mostly
        add(dump, item, path.name, path.stem if len(found) == 1 else "", alone=len(found) == 1)
    if not found:
        raise DumpError(f"{path} holds no tensor")
    if dump.unread and not dump.records:
        raise DumpError(dump.unread[0])
    return dump


def add(dump: ForeignDump, item: FileTensor, file: str, tap: str, *, alone: bool) -> None:
    """file: the path to be shown; alone: the file has one tensor, whose key then says nothing."""
    if item.problem:
        dump.unreadable(item.problem, tap if alone else ".".join(filter(None, (tap, item.key))))
        return
    if (named := key_place(item.key)) is not None:
        of_file = RANK_FILE.fullmatch(Path(file).stem)
        rank = named.rank if named.rank is not None else int(of_file[1]) if of_file else 0
        if named.role != VALUE:
            dump.run.pop(INDEPENDENT, None)
        dump.add(
            Tensor(f"{file}:{item.key}", named.tap, named.role, item.dtype, item.shape, item.read, step=named.step or 0,
                   rank=rank, call=named.call)
        )  # fmt: skip
        return
    key = "" if alone else item.key
    name = f"{file}:{key}" if key else file
    dump.add(Tensor(name, ".".join(filter(None, (tap, key))), VALUE, item.dtype, item.shape, item.read))
