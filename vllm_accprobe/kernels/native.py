"""The loops' machine code, kept on disk and run without numba.

The problem: importing numba and loading what it has compiled takes longer than measuring a gigabyte. The idea: the
first time on a machine numba compiles the loops (loops.code), each in a process of its own, and their object code goes
into files in the user's cache; later llvmlite alone loads it, in a tenth of the time (measured: 0.14 s, 0.85 s by numba
from its own cache). A file's name and first line say which sources, which llvmlite and which processor it belongs to;
one that does not fit is made anew.
On Linux only, where this is tested; elsewhere, and wherever anything of it fails, numba runs the same loops itself.
The file is as trusted as Python's own compiled files: it is read only where nobody else may write.
Not here: the loops (loops.py), when they serve (rows.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

from vllm_accprobe import user_cache
from vllm_accprobe.children import Child
from vllm_accprobe.kernels import BLOCK

SOURCES = ("__init__.py", "bits.py", "vectors.py", "loops.py")
_STUBBED = ("numba_", "NRT_")
_MAGIC = "accprobe loops 2"
_MOST = 32 << 20
_LINE = 64
"""Bytes of a line of the cache."""


LOOPS = ("rows", "structure")
Code = tuple[str, list[str], bytes]
"""A loop's symbol, the symbols that it does not define itself, and its object code."""


class Unusable(Exception):
    """There is no such machine code here, and why."""


class Loops:
    """The loops of loops.py, with buffers of their own for each thread. call: by name, C functions of loops.SIGNATURE.

    The arguments are those of loops.py without the buffers: arrays that are contiguous and of the right types.
    """

    def __init__(self, call: dict[str, Any], keep: Any):
        self._call, self._keep = call, keep
        self._own = threading.local()

    def rows(self, *args: Any) -> None:
        *sides, out, eps, elements = args
        self._run("rows", sides, out, int(out[0, 0]), eps, elements)

    def structure(self, *args: Any) -> None:
        *sides, sums = args
        self._run("structure", sides, sums, sums.shape[1], 0.0, sums)

    def _run(self, name: str, sides: list[Any], out: np.ndarray, width: int, eps: float, elements: np.ndarray) -> None:
        g, gk, gt, gi, m, mk, mt, mi = sides
        arrays = g, gt, gi, m, mt, mi, out, elements
        g_at, gt_at, gi_at, m_at, mt_at, mi_at, out_at, elements_at = map(_address, arrays)
        head = g_at, g.size, gk, gt_at, gi_at, m_at, m.size, mk, mt_at, mi_at
        self._call[name](*head, len(gi), out_at, width, eps, elements_at, *self._buffers(width))

    def _buffers(self, width: int) -> tuple[int, ...]:
        own = self._own
        if getattr(own, "width", 0) < width:
            own.width = max(width, BLOCK)
            own.arrays = buffers(own.width)
            own.at = tuple(a.ctypes.data for a in own.arrays)
        return own.at  # type: ignore[no-any-return]


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]  # type: ignore[no-any-return]  # three times as fast as array.ctypes


def buffers(width: int) -> list[np.ndarray]:
    """The loops' four buffers. Each begins with a cache line, because vectors that lie across two of them cost twice as
    much, and not at the same place of a page as another, which processors take for the same place until they know."""
    out, at = [], 0
    kinds = [np.dtype(t) for t in (np.uint32, np.uint32, np.float64, np.float64)]
    room = np.empty(sum(width * k.itemsize + 2048 for k in kinds) + _LINE, np.uint8)
    at = -room.ctypes.data % _LINE
    for kind in kinds:
        out.append(room[at : at + width * kind.itemsize].view(kind))
        at += -(-width * kind.itemsize // _LINE) * _LINE + 1024
    return out


def loops() -> Loops:
    """The loops from their files, which are made where there are none. Raises Unusable."""
    llvm, name, place = _here()
    return _loaded({loop: _code(loop, name, place) for loop in LOOPS}, llvm)


def _here() -> tuple[Any, str, Path | None]:
    """LLVM, the beginning of the files' names, and where they lie. Raises Unusable."""
    if not sys.platform.startswith("linux"):
        raise Unusable("not on this system")
    try:
        import llvmlite
        import llvmlite.binding as llvm
    except ImportError as e:
        raise Unusable(str(e)) from None
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm, _name(llvmlite.__version__, llvm), user_cache.directory()


def _code(loop: str, name: str, place: Path | None) -> Code:
    """From its file, which a process that was started for it may still be writing; else compiled now."""
    name = f"{name}-{loop}.bin"
    found = None if place is None else _read(place / name, name)
    child = _EARLY.pop(loop, None)
    if found is None and place is not None and child is not None:
        try:
            child.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            child.kill()
        found = _read(place / name, name)
    return _made(loop, name, place) if found is None else found


_EARLY: dict[str, Child] = {}
_PATIENCE_S = 60.0
"""Chosen: compiling takes a few seconds."""


def compile_early() -> None:
    """Where nothing is kept yet, starts a process for each loop that compiles it, while this one opens dumps and pairs
    them. They end with this process."""
    place = user_cache.directory()
    if place is None or not os.access(place, os.W_OK):  # what is compiled could not be kept
        return
    if not sys.platform.startswith("linux") or any(place.glob("loops-*.bin")):
        return
    nothing = subprocess.DEVNULL
    with contextlib.suppress(OSError):
        for loop in LOOPS:
            _EARLY[loop] = Child("vllm_accprobe.kernels.native", loop, stdin=nothing, stdout=nothing, stderr=nothing)


def main() -> None:
    """Of such a process."""
    with contextlib.suppress(Unusable):
        _code(sys.argv[1], *_here()[1:])


def _name(version: str, llvm: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in (_MAGIC, version, sys.version, llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()):
        digest.update(part.encode() + b"\0")
    for source in SOURCES:
        digest.update(Path(__file__).with_name(source).read_bytes())
    return f"loops-{digest.hexdigest()}"


def _read(path: Path, name: str) -> Code | None:
    """None for a file that is not there or not whole."""
    try:
        if path.stat().st_size > _MOST:
            return None
        line, _, body = path.read_bytes().partition(b"\n")
        head = json.loads(line)
        if head["name"] != name or head["hash"] != hashlib.blake2b(body, digest_size=16).hexdigest():
            return None
        return head["symbol"], head["foreign"], body
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _made(loop: str, name: str, place: Path | None) -> Code:
    """Compiled now, and written down where that is possible."""
    try:
        from vllm_accprobe.kernels.loops import code

        symbol, foreign, body = code(loop)
    except Exception as e:  # whatever another release of numba does otherwise
        raise Unusable(f"{type(e).__name__}: {e}") from None
    digest = hashlib.blake2b(body, digest_size=16).hexdigest()
    head = {"name": name, "hash": digest, "symbol": symbol, "foreign": foreign}
    if place is not None:
        with contextlib.suppress(OSError):
            part = place / f"{name}.{os.getpid()}.part"
            part.write_bytes(json.dumps(head).encode() + b"\n" + body)
            part.replace(place / name)
    return symbol, foreign, body


def _loaded(found: dict[str, Code], llvm: Any) -> Loops:
    import ctypes

    _define({s for _, foreign, _ in found.values() for s in foreign}, llvm, ctypes)
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), reloc="default", codemodel="jitdefault", jit=True
    )
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    for _, _, code in found.values():
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    side = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
    rest = (ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, *[ctypes.c_void_p] * 5)
    kind = ctypes.CFUNCTYPE(None, *side, *side, *rest)  # gives up the interpreter's lock
    call = {}
    for loop, (symbol, _, _) in found.items():
        address = engine.get_function_address(symbol)
        if not address:
            raise Unusable(f"no {symbol}")
        call[loop] = kind(address)
    return Loops(call, engine)


def _define(foreign: set[str], llvm: Any, ctypes: Any) -> None:
    """Sees to it that all symbols are known: an unknown one would end the process. What numba brings for errors and
    memory is never reached, and where it were, ends the process too."""
    process = ctypes.CDLL(None)
    for symbol in foreign:
        if llvm.address_of_symbol(symbol) is None:
            known = "abort" if symbol.startswith(_STUBBED) else symbol
            try:
                llvm.add_symbol(symbol, ctypes.addressof(ctypes.c_char.in_dll(process, known)))
            except ValueError:
                raise Unusable(f"unknown symbol {symbol}") from None
