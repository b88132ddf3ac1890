"""The machine code of loops (compiler.py), kept on disk, and called.

The problem: translating and optimising the loops takes a second, loading them a twentieth of that. The idea: what LLVM
has made of a module's loops lies in a file in the user's cache, whose name and first line say which sources, which
llvmlite and which processor it belongs to; one that does not fit is made anew. The file is as trusted as Python's own
compiled files: it is read only where nobody else may write. Whoever calls a loop checks what it is called with: the
loop does not.
Not here: the loops (kernels/loops.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm_accprobe import user_cache
from vllm_accprobe.children import HOME
from vllm_accprobe.whole_file import whole

_MAGIC = "accprobe loops 4"
_MOST = 32 << 20
Code = tuple[dict[str, str], bytes]
"""Of each loop what compiler.module_of says of its result and arguments; object code."""


class Unusable(Exception):
    """There is no such machine code here, and why."""


class CompiledLoops:
    """Loops by name, as functions of addresses and numbers: an array is its address and how many elements it has
    (`address`). They give up the interpreter's lock. kept: their file, None where there is none."""

    def __init__(self, found: Code, llvm: Any, kept: Path | None = None):
        import ctypes

        self.kept = kept

        number: Any = ctypes.c_int64
        letters = {"i": [number], "f": [ctypes.c_double], "a": [ctypes.c_void_p, number]}
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), reloc="default", codemodel="jitdefault", jit=True
        )
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)  # whose memory the code is
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(found[1]))
        self._engine.finalize_object()
        self.call: dict[str, Callable[..., Any]] = {}
        for name, words in found[0].items():
            result = None if words[0] == "v" else letters[words[0]][0]
            kind = ctypes.CFUNCTYPE(result, *(kind for letter in words[1:] for kind in letters[letter]))
            if not (at := self._engine.get_function_address(name)):
                raise Unusable(f"no {name} in the machine code")  # called, it would end the process
            self.call[name] = kind(at)


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]  # type: ignore[no-any-return]  # three times as fast as array.ctypes


def loops(module: str, sources: Sequence[str]) -> CompiledLoops:
    """The loops of ``module``, its LOOPS, from their file, which is made where there is none. sources: files of this
    package that they are made of, compiler.py apart. Raises Unusable."""
    try:
        import llvmlite
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        name = _name(module, (*sources, "compiler.py"), llvmlite.__version__, llvm)
        place = user_cache.directory()
        found = None if place is None else _read(place / name, name)
        found = found or _made(module, name, place, llvm)
        return CompiledLoops(found, llvm, place / name if place is not None and (place / name).is_file() else None)
    except Exception as e:  # no llvmlite, or one that does otherwise
        raise Unusable(f"{type(e).__name__}: {e}") from None


def _name(module: str, sources: Sequence[str], version: str, llvm: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in (_MAGIC, version, sys.version, llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()):
        digest.update(part.encode() + b"\0")
    for source in sources:
        digest.update((HOME / source).read_bytes())
    return f"loops-{digest.hexdigest()}-{module.rpartition('.')[2]}.bin"


def _read(path: Path, name: str) -> Code | None:
    """None for a file that is not there, not whole, or that another user may write: of the directory this was checked
    before, and it may be another one by now."""
    try:
        with open(path, "rb") as f:
            about = os.fstat(f.fileno())
            if about.st_size > _MOST or not user_cache.is_own(about):
                return None
            line, _, body = f.read().partition(b"\n")
        head = json.loads(line)
        if head["name"] != name or head["hash"] != _digest(head["loops"], body):
            return None
        return head["loops"], body
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _digest(words: dict[str, str], body: bytes) -> str:
    """Of both: with other arguments than its own, code reads anywhere."""
    return hashlib.blake2b(json.dumps(words, sort_keys=True).encode() + body, digest_size=16).hexdigest()


def _made(module: str, name: str, place: Path | None, llvm: Any) -> Code:
    """Compiled now, and written down where that is possible."""
    from vllm_accprobe.compiler import module_of

    text, words = module_of(importlib.import_module(module).LOOPS)
    body = _compiled(text, llvm)
    if place is not None:
        with contextlib.suppress(OSError):
            for left in place.glob("loops-*.part"):  # whoever wrote it was killed, or writes the same
                left.unlink(missing_ok=True)
        with contextlib.suppress(OSError), whole(place / name, f".{os.getpid()}.part") as part:
            head = {"name": name, "hash": _digest(words, body), "loops": words}
            part.touch(0o600)
            part.write_bytes(json.dumps(head).encode() + b"\n" + body)
    return words, body


def _compiled(text: str, llvm: Any) -> bytes:
    module = llvm.parse_assembly(text)
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3, reloc="default",
        codemodel="jitdefault", jit=True,
    )  # fmt: skip
    tuning = llvm.create_pipeline_tuning_options(speed_level=3)
    tuning.loop_vectorization, tuning.slp_vectorization = True, False
    passes = llvm.create_pass_builder(machine, tuning)
    passes.getModulePassManager().run(module, passes)
    return machine.emit_object(module)  # type: ignore[no-any-return]
