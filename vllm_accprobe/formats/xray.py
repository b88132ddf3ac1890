"""torch_xray's HDF5 files, one per rank.

The problem: torch_xray compares by names, and names differ between a GPU and a Kunlun card where a vendor's layer has
another class; its guide's advice is to edit the library. The idea: a name ``path.Class.n.forward_output.i`` is a module
path, a class and a number; the path is the place, so that two classes at one path are one place, and what has another
path too is paired in the order of execution (align/names.py), which is the order in which the datasets were created.
Layout: ``globalrank-<r>_localrank-<l>.h5``, a group per step, in it datasets ``path.Class.n.forward_input.<i>``,
``...forward_output.<i>``, ``...forward_params.<name>``, the parts ``Class.n`` or ``n`` missing in some releases. HDF5
has no bfloat16: torch_xray stores float32. `accprobe convert` writes such files, with what these names cannot say as an
attribute (formats/io/containers.py).
Not here: HDF5 itself (hdf5.py), the names' grammar (formats/io/containers.py).
"""

from __future__ import annotations

from pathlib import Path

from vllm_accprobe.dump.journal import MODULE, OP
from vllm_accprobe.dump.reader import DumpError
from vllm_accprobe.formats.common import foreign
from vllm_accprobe.formats.common.foreign import UNKNOWN, ForeignDump, Tensor
from vllm_accprobe.formats.io import containers, hdf5
from vllm_accprobe.formats.io.containers import H5_FILE, dataset_place

NAME = "torch_xray"
HOW = "an .h5 file, or a directory with globalrank-<r>_localrank-<l>.h5; a group per step in it"
ORDER, STRICT = 10, True


def recognise(path: Path) -> bool:
    if path.is_file():
        return path.suffix.lower() in hdf5.SUFFIXES or hdf5.is_hdf5(path)
    return not all(_listed(path).values())


def open(path: Path) -> ForeignDump:
    """path: one file or the directory of all ranks' files. Raises DumpError."""
    dump = ForeignDump(path, NAME)
    listed = {path: ""} if path.is_file() else _listed(path)
    ranks: dict[int, Path] = {}
    for file, why in listed.items():
        if why:
            dump.unreadable(f"{file}: {why}", file.name, rank=_rank(file.name))
    for i, file in enumerate(file for file, why in listed.items() if not why):
        rank = _rank(file.name, i)
        if rank in ranks:
            raise DumpError(f"{path} has two files of rank {rank}, {ranks[rank].name} and {file.name}: keep one")
        ranks[rank] = file
        try:
            _add(dump, file, rank)
        except DumpError as e:
            if path.is_file():
                raise
            dump.unreadable(e, file.name, rank=rank)
    foreign.note_values(dump)
    return dump


def _listed(path: Path) -> dict[Path, str]:
    """What has the name of a rank's file, in order of names, and why it is none: "" where it is one."""
    found = {}
    for p in sorted(p for p in path.iterdir() if H5_FILE.fullmatch(p.name)) if path.is_dir() else ():
        no_file = "a directory in place of a file" if p.is_dir() else "not a plain file"
        link = "a link, not followed (a dump's files lie in the dump)"
        found[p] = link if p.is_symlink() else "" if p.is_file() else no_file
    return found


def _rank(name: str, otherwise: int = 0) -> int:
    match = H5_FILE.fullmatch(name)
    return int(match[1]) if match else otherwise


def _add(dump: ForeignDump, file: Path, rank: int) -> None:
    for d in hdf5.datasets(file, dump.problem):
        step = d.group.strip("/").rpartition("/")[2]
        tap, cls, role, call = dataset_place(d.name)
        noted = containers.read_note(containers.NOTED, d.notes) if d.notes else None
        if noted is not None:
            tap, cls, role, call = noted.tap, noted.cls, noted.role, noted.call
        if d.problem:
            dump.skip(tap, f"HDF5: a dataset {d.problem}", None, role)
            continue
        number = int(step) if step.isdecimal() and len(step) < 10 else 0
        layout = UNKNOWN if noted is None else noted.layout
        record = dump.add(
            Tensor(d.name, tap, role, d.dtype, d.shape, d.read, cls, number, rank, call, layout=layout)
        )  # fmt: skip
        if record is not None:
            module = containers.read_note(MODULE, d.notes.get("module"))
            dump.noted(rank, module, containers.read_note(OP, d.notes.get("op"), rank=rank), record)
