"""A folder of single files, with or without further folders in it.

The problem: a script that saved tensors under names of its own is a dump, too. The idea: each file's path is its place,
without the ending, so that a.pth meets a.npy; order is that of the names, where numbers count as numbers; a file that
cannot be read is named and left out, and the rest is compared.
Not here: the files (single.py).
"""

from __future__ import annotations

from pathlib import Path

from vllm_accprobe.dump.reader import DumpError
from vllm_accprobe.formats import single
from vllm_accprobe.formats.common.foreign import INDEPENDENT, VALUE, ForeignDump, Tensor
from vllm_accprobe.formats.io import hdf5, plain_file, tensor_file

SUFFIXES = (*tensor_file.SUFFIXES, *hdf5.SUFFIXES)
NAME = "folder"
HOW = f"a directory with files that end in {', '.join(SUFFIXES)}"
ORDER, LOOSE = 90, True


def recognise(path: Path) -> bool:
    return plain_file.probe(path, lambda parts: Path(parts[-1]).suffix.lower() in SUFFIXES)


def open(path: Path) -> ForeignDump:
    """Raises DumpError."""
    dump = ForeignDump(path, NAME, {INDEPENDENT: True})
    passed = plain_file.Passed()
    stems: dict[str, list[plain_file.FoundFile]] = {}
    for found in plain_file.files(path, lambda name: Path(name).suffix.lower() in SUFFIXES, passed):
        stems.setdefault(found.name.rpartition(".")[0], []).append(found)
    for stem, files in stems.items():
        for found in files:  # of two files that differ by their endings alone, each is a place
            name = found.name if len(files) > 1 else stem
            try:
                _add(dump, found, name.replace("/", "."))
            except DumpError as e:
                dump.unreadable(e, name)
    passed.report(dump)
    return dump


def _add(dump: ForeignDump, found: plain_file.FoundFile, tap: str) -> None:
    if found.path.suffix.lower() in hdf5.SUFFIXES:
        for d in hdf5.datasets(found.path, dump.problem):
            place = d.place.strip("/")
            if d.problem:
                dump.skip(f"{tap}.{place}", f"HDF5: a dataset {d.problem}")
            else:
                dump.add(Tensor(f"{found.name}:{place}", f"{tap}.{place}", VALUE, d.dtype, d.shape, d.read))
        return
    items = tensor_file.items(found.path)
    for item in items:
        single.add(dump, item, found.name, tap, alone=len(items) == 1)
