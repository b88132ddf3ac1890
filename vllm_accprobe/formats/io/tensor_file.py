"""The tensors of one file, whatever kind of file it is.

The problem: a file's name says little about what is in it: .bin is torch's or ATB's, .pt may be numpy's. The idea: its
first bytes say what it is, and it becomes a list of `FileTensor`, of which no payload has been read.
Not here: each kind (npy.py, safetensors_file.py, torchfile.py, atb_file.py), the format of single files (single.py).
"""

from __future__ import annotations

import os
from pathlib import Path

from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.formats.io import atb_file, npy, safetensors_file, torchfile
from vllm_accprobe.formats.io.plain_file import FileTensor, opened
from vllm_accprobe.formats.io.zipindex import index

SUFFIXES = (".pt", ".pth", ".npy", ".npz", ".bin", ".safetensors")


def items(path: Path) -> list[FileTensor]:
    """The tensors of a file, told by its beginning and not by its name. Reads no payload. Raises DumpError."""
    with opened(path) as fd:
        size = os.fstat(fd).st_size
        head = os.pread(fd, 16, 0)
        if not head:
            raise DumpError(f"{path} is empty")
        if head.startswith(npy.MAGIC):
            return [npy.item(path, fd, size)]
        if head.startswith(b"PK\x03\x04"):
            members = index(fd, size)
            if not any(n.endswith("data.pkl") for n in members):
                return list(npy.archive_items(path, fd, members))
        elif path.suffix.lower() == ".safetensors":
            return list(safetensors_file.items(path, fd, size))
        elif path.suffix.lower() == ".bin" and b"=" in head:
            return [_atb_item(path)]
    return [FileTensor(key, t.dtype, t.shape, t.read) for key, t in torchfile.items(path)]


def first(path: Path) -> FileTensor:
    """The tensor of a file that has one. Raises DumpError."""
    found = items(path)
    if not found or found[0].problem:
        raise DumpError(found[0].problem if found else f"{path} holds no tensor")
    return found[0]


def _atb_item(path: Path) -> FileTensor:
    header = atb_file.read_header(path)
    if not header.stored:
        raise DumpError(f"{path} holds statistics only, or its values lie in another file")
    return FileTensor("", header.dtype, header.shape, lambda: atb_file.read_tensor(path, header))
