"""FlashInfer's flight recorder (FLASHINFER_LOGLEVEL=10): a folder per call of its API, which becomes an operator call.

The problem: a call's tensors lie in two files under keys such as ``arg_0`` and ``kwarg_out``, its other arguments in
the last line of metadata.jsonl; buffers that are only written to are saved before the call; what was recorded inside
a CUDA graph is saved after the replay, when operators in place have overwritten their inputs. The idea: keys become
roles, the line becomes an operator call; a buffer ``out`` is counted and not compared; a call from inside a graph
keeps its tensors for `compare`, and its operator call says why it is not judged. What operators in place made of
their arguments is in no file of the recorder; folders that `gentest --flashinfer` wrote have a third one, INPLACE.
Source: flashinfer/api_logging.py of 0.7.2.
Not here: values of arguments (flashinfer_calls.py), objects and their plans (flashinfer_wrappers.py), the formulas
(opcheck/references/flashinfer), writing (opcheck/kit/flashinfer).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm_accprobe.dump.files import DumpError
from vllm_accprobe.dump.schema import OpCall
from vllm_accprobe.formats.common.flashinfer_calls import arguments, buffers
from vllm_accprobe.formats.common.flashinfer_wrappers import PlannedObjects, known_role
from vllm_accprobe.formats.common.foreign import ForeignDump, Tensor
from vllm_accprobe.formats.io import tensor_file
from vllm_accprobe.formats.io.plain_file import FileTensor, read_text

NAME = "flashinfer"
HOW = "a directory of <time>_pid<p>_<function>_call<n> with metadata.jsonl (FlashInfer's flight recorder, level 10)"
ORDER, STRICT = 35, True
PREFIX = "flashinfer."
"""Before a function's name in the name of its operator."""
_FOLDER = re.compile(r"[0-9]{8}_[0-9]{6}_[0-9]{3}_pid([0-9]{1,10})_([A-Za-z_][A-Za-z0-9_.]{0,119})_call([0-9]{4,9})")
_MAX_LINES = 16 << 20
INPLACE = "inplace"
"""A third file beside inputs and outputs, which FlashInfer does not know: arguments as the call left them."""
_BUFFER = "output buffer that nobody had written to"
_PENDING = "recorded inside a CUDA graph that was never flushed"
_RAISED = "call that did not end"
_IN_PLACE = "what a call without a result wrote in place, which FlashInfer's recorder does not keep"
_GRAPH = "recorded inside a CUDA graph: inputs are saved after its replay"
_EARLIER = "earlier replays of a CUDA graph (graph_flushes)"
_TOLD = "call that only tells an object what a later run needs: its arguments are that run's"


def recognise(path: Path) -> bool:
    return path.is_dir() and any(_is_call(p) for p in _folders(path))


def _folders(path: Path) -> list[Path]:
    """The folders of calls, in order of time, or ``path`` itself where it is one."""
    if _FOLDER.fullmatch(path.name) and (path / "metadata.jsonl").exists():
        return [path]
    return sorted((p for p in path.iterdir() if _FOLDER.fullmatch(p.name)), key=lambda p: p.name)


def _is_call(folder: Path) -> bool:
    return not folder.is_symlink() and (folder / "metadata.jsonl").is_file()


def open(path: Path) -> ForeignDump:
    """Opens such a directory, or one call's folder. Reads headers and no payload. Raises DumpError."""
    dump = ForeignDump(path, NAME)
    folders = _folders(path)
    processes = sorted({_parts(f)[0] for f in folders})
    if len(processes) > 1:
        dump.problem(f"{path} has {len(processes)} processes, and not their ranks: they are numbered by process id")
    objects = PlannedObjects()
    for seq, folder in enumerate(folders):
        pid, function, call = _parts(folder)
        if not _is_call(folder):
            dump.unreadable(f"{folder} is a link, or has no metadata.jsonl", _tap(function))
            continue
        try:
            _add(dump, objects, folder, function, call, processes.index(pid), seq)
        except (DumpError, ValueError, OSError, RecursionError) as why:
            text = str(why) if isinstance(why, DumpError) else f"{folder / 'metadata.jsonl'} cannot be read: {why}"
            dump.unreadable(text, _tap(function))
    return dump


def _parts(folder: Path) -> tuple[int, str, int]:
    """(process, function, number of the call from 0) of a folder's name."""
    found = _FOLDER.fullmatch(folder.name)
    assert found
    return int(found[1]), found[2], max(int(found[3]) - 1, 0)


def _tap(function: str) -> str:
    return f"::{PREFIX}{function}"


def _add(
    dump: ForeignDump, objects: PlannedObjects, folder: Path, function: str, call: int, rank: int, seq: int
) -> None:  # fmt: skip
    told = _last(folder / "metadata.jsonl")
    if told.get("function_name") != function:
        raise ValueError(f"it is of another function than the folder, {str(told.get('function_name'))[:60]}")
    tap = _tap(function)
    if (folder / "graph_flushes").is_dir():
        dump.skip(tap, _EARLIER)
    if told.get("execution_status") == "graph_capture_pending_flush":
        dump.skip(tap, _PENDING)
        return
    if objects.part(told):
        objects.keep(told, dict(_tensors(dump, folder, "inputs", tap)), folder.name)
        dump.skip(tap, _TOLD)
        return
    if told.get("execution_status") != "completed":
        dump.skip(tap, _RAISED)
    elif _file(folder, "outputs") is None and _file(folder, INPLACE) is None:
        dump.skip(tap, _IN_PLACE, 0)

    def add(role: str, item: FileTensor, name: str) -> None:
        dump.add(Tensor(name, tap, role, item.dtype, item.shape, item.read, PREFIX + function, 0, rank, call,
                        order=seq))  # fmt: skip

    unwritten = buffers(told)
    held: dict[str, FileTensor] = {}
    for side in ("inputs", "outputs", INPLACE):
        for role, item in _tensors(dump, folder, side, tap):
            if side == INPLACE:
                add(f"inplace.{role}", item, f"{folder.name}/{side}:{item.key}")
                continue
            held[role] = item
            if item.key in unwritten:
                dump.skip(tap, _BUFFER, 0, role)
            else:
                add(role, item, f"{folder.name}/{side}:{item.key}")
    why = _GRAPH if told.get("graph_capture") else ""
    args, kwargs = arguments(told, held, unwritten, why)
    before = objects.of_run(told)
    for role, (where, item) in before.held.items():
        add(role, item, f"{where}/inputs:{item.key}")
    args = (None, *args[1:]) if told.get("self_id") is not None else args
    dump.ops.append(OpCall(rank, 0, tap, PREFIX + function, call, seq, None, args, {**kwargs, **before.named}, ()))


def _tensors(dump: ForeignDump, folder: Path, side: str, tap: str) -> Iterator[tuple[str, FileTensor]]:
    """(role, tensor) of a file's tensors; what cannot be read, or has an unknown key, is counted."""
    file = _file(folder, side)
    for item in tensor_file.items(file) if file else ():
        role = known_role(item.key, "outputs" if side == "outputs" else "inputs")
        if role is None:
            dump.skip(tap, "tensor under an unknown key", 0)
        elif item.problem:
            dump.unreadable(item.problem, tap, 0, role)
        else:
            yield role, item


def _last(path: Path) -> Mapping[str, Any]:
    """The last line, which has all that the lines before have. Raises ValueError, OSError."""
    lines = [line for line in read_text(path, _MAX_LINES).splitlines() if line.strip()]
    found = json.loads(lines[-1]) if lines else None
    if not isinstance(found, dict):
        raise ValueError("its last line is no call")
    return found


def _file(folder: Path, side: str) -> Path | None:
    """Torch's file goes first, as in FlashInfer's own reader."""
    files = (folder / f"{side}.pt", folder / f"{side}.safetensors")
    return next((f for f in files if f.exists() or f.is_symlink()), None)
