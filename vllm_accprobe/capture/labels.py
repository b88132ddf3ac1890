"""``set_label`` and ``gen_id``: from a label in a model's source to a record in the dump.

The problem: labels stay in a model's source, also in production and in code that torch.compile compiles; a label comes
with a tensor of unknown rows, or with the path of a file that another program writes later; and a plain script attaches
nothing to its model. The idea: while nothing captures, a call reads one global number, which torch.compile guards.
Whatever captures binds its taker. Inside a step a labelled tensor is taken like any tap's, as tap ``label:<id>`` in
role ``pta`` or ``acl``; a path becomes a ``label`` line at once, and the file is copied into the dump when its task or
the capture ends. Where torch.compile insists on whole graphs (vLLM), a traced label is left out and counted. In a
script without vLLM and Probe the first label opens a dump whose steps are the tasks, with settings from the
environment.

Not here: ``set_task_id`` (vllm_accprobe/labels.py), where libraries put files (dump/label_files.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.compiler import is_compiling

from vllm_accprobe.capture import labels
from vllm_accprobe.capture.core import say
from vllm_accprobe.capture.core.layout import Layouts
from vllm_accprobe.capture.core.recording import (
    Recording,
    at_exit,
    distributed,
    process_rank,
    root_of,
    run_facts,
    unsplit,
)
from vllm_accprobe.capture.core.session import HEAD, LANGUAGE, VISION, Session, StepState
from vllm_accprobe.config import ConfigError, ProbeConfig, in_ranges
from vllm_accprobe.dump.journal import LABEL, LABEL_ENDINGS
from vllm_accprobe.dump.label_files import ACL, LABEL_TAP, PTA, Label, label_file, locate
from vllm_accprobe.dump.schema import Step, rank_dir

TASK_ENV = "AIT_CMP_TASK_ID"
"""Accelerator libraries read it, and write their files into a directory of this name."""
_COMPILED = "data_compiled"
Taker = Callable[[str, str, Any, "str | None"], None]
Traced = Callable[[str, str], None]
_NOTHING, _CAPTURES, _WHOLE_GRAPHS = 0, 1, 2

_mode = _NOTHING  # the one thing that a call looks at while nothing captures
_takers: list[tuple[Taker, Traced | None]] = []
_take: Any = None  # see _prepare
_note: Any = None
_numbers = itertools.count()


def set_label(data_src: str, data_id: str, data_val: Any = None, tensor_path: str | None = None) -> None:
    """Labels one side of a pair.

    Args:
        data_src: "pta", the reference, or "acl", the accelerator's own.
        data_id: what `gen_id` gave; the same for both sides.
        data_val: the tensor, any dtype and shape; both sides need as many elements. Its rows are known inside vLLM.
        tensor_path: instead of a value: the file that the accelerator's library writes, now or later, or the end of
            its path. An ATB ``.bin``, or ``.npy``, ``.pt``, ``.pth``, ``.safetensors``.

    Does nothing unless something captures. Never raises; what is wrong is reported once and counted in the dump.
    """
    mode = _mode
    if mode:
        if mode == _WHOLE_GRAPHS and is_compiling():
            _note(data_src, data_id)
        else:
            _take(data_src, data_id, data_val, tensor_path)


def gen_id(name: str | None = None) -> str:
    """An id for a pair: ``name`` itself, which is then the same on every machine and in every run, or a new one made of
    the time. A name that is used again in the same step is distinguished by the order of the calls."""
    if name is not None:
        return name
    if is_compiling():  # the clock would break the graph; labels of one id are distinguished by their order
        return _COMPILED
    if not _mode:
        return f"data_{next(_numbers)}"  # nobody will see it; asking the clock takes five times as long
    return f"data_{time.time_ns() / 1e9:.6f}_{next(_numbers)}"


def taken() -> bool:
    """Whether labels go to anybody."""
    return _mode != _NOTHING


def bind(taker: Taker, traced: Traced | None = None) -> None:
    """From now on labels go to ``taker`` too, until `unbind`: each dump that is open has all of them.

    traced: only where the engine compiles whole graphs, in which no label may break one: it is called, while
    torch.compile traces, of each label that is left out there. Elsewhere a label is an eager part of compiled code.
    """
    global _take
    if traced is not None or "torch._dynamo" in sys.modules:
        _prepare()
    elif _take is None:
        _take = _first_take
    _takers.append((taker, traced))
    _choose()


def others(taker: Taker) -> bool:
    """Whether labels go to another receiver too."""
    return any(one is not taker for one, _ in _takers)


def unbind(taker: Taker) -> None:
    _takers[:] = [pair for pair in _takers if pair[0] is not taker]
    _choose()


def _choose() -> None:
    global _mode
    whole = any(traced is not None for _, traced in _takers)
    _mode = _WHOLE_GRAPHS if whole else _CAPTURES if _takers else _NOTHING


def _prepare() -> None:
    """Makes what compiled code may call. It needs torch._dynamo, whose import takes a second that captures without
    torch.compile can do without."""
    global _take, _note
    if _note is None:
        _take = torch.compiler.disable(_to_taker)
        _note = torch._dynamo.assume_constant_result(_to_traced)  # called while tracing, not by the graph


def _first_take(source: str, name: str, value: Any, path: str | None) -> None:
    if "torch._dynamo" not in sys.modules:
        _to_taker(source, name, value, path)
        return
    _prepare()
    _take(source, name, value, path)


def _to_taker(source: str, name: str, value: Any, path: str | None) -> None:
    for taker, _ in tuple(_takers):
        taker(source, name, value, path)


def _to_traced(source: str, name: str) -> None:
    for _, traced in tuple(_takers):
        if traced is not None:
            traced(source, name)


_MAX_ID = 400
_MANY = 512
"""Labels that wait for their files before those of earlier steps are looked for."""
_CLOSE_S = 10.0
"""How long a capture that ends looks for files: a server's processes have half a minute to end."""
ROOT_ENVS = ("ATB_OUTPUT_DIR", "ACLTRANSFORMER_HOME_PATH", "ASDOPS_LOG_TO_FILE_DIR")
"""Environment variables that name the directories accelerator libraries write to."""


class Labels:
    """The labels of one session, from ``open`` to ``close``.

    parts: gives the part of the model (session.LANGUAGE ...) of each tap, for labels outside the language model's
    forward. whole_graphs: the engine compiles with fullgraph, where a label must leave no trace. outside: labels
    outside of a step are counted as skipped (a script's; an engine's warm-up makes many).
    """

    def __init__(
        self,
        session: Session,
        root: Path,
        rank: int,
        *,
        parts: Callable[[], dict[str, str]] = dict,
        whole_graphs: bool = False,
        outside: bool = True,
    ):
        self._session = session
        self._directory = root / rank_dir(rank)
        self._rank = rank
        self._parts = parts
        self._known: dict[str, str] | None = None
        self._outside = outside
        self._reported: set[str] = set()
        self._pending: list[Label] = []
        self._next_look = _MANY
        self._above: dict[str, Path] = {}  # by path: the directory in which executions are numbered
        self._executions: dict[str, int] = {}
        self._files = 0
        self._copied = 0
        self._taker = self.take  # one object: a bound method is a new one at each access
        self._whole_graphs = whole_graphs

    def open(self) -> None:
        bind(self._taker, self._traced if self._whole_graphs else None)

    def close(self) -> None:
        """Collects the files that labels named. To be called before the sink is closed. Never raises."""
        unbind(self._taker)
        try:
            self.collect(final=True)
        except Exception as error:
            self._session.fail("collecting the labels' files", error)

    def take(self, source: str, name: str, value: Any, path: str | None) -> None:
        """The arguments of ``set_label``. Never raises."""
        session = self._session
        state = session.state
        if value is None and isinstance(path, (str, os.PathLike)):
            # Counted in every call: the library numbers its executions, warm-up and unselected steps too.
            self._executions[os.fspath(path)] = self._executions.get(os.fspath(path), -1) + 1
        if state is None:
            if self._outside and session.dead is None:
                session.sink.skip(f"{LABEL_TAP}{name}"[:_MAX_ID], "a label outside of the model's forward")
            return
        state.taking += 1  # copies that are made here are none of the model's operators
        try:
            wrong = _wrong(source, name, value, path)
            if wrong:
                self._refuse(f"{LABEL_TAP}{name}"[:_MAX_ID], wrong)
            elif value is not None:
                tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
                tap = LABEL_TAP + name
                call = self._call(state, tap, source)
                session.fired.add(tap)
                tensor = self._where_taken(tensor.detach())
                session.take(state, {}, tap, "label", source, call, tensor, self._part(state))
            else:
                self._promise(state, source, LABEL_TAP + name, os.fspath(path or ""))
        except Exception as error:
            session.fail(f"set_label({source!r}, {name!r})", error)
        finally:
            state.taking -= 1

    def _where_taken(self, tensor: torch.Tensor) -> torch.Tensor:
        """On the side, host or device, whose tensors this session takes."""
        if self._session.sink.direct:
            return tensor.cpu()
        return tensor.to(torch.accelerator.current_accelerator()) if tensor.device.type == "cpu" else tensor

    def _traced(self, source: str, name: str) -> None:
        self._session.sink.skip(f"{LABEL_TAP}{name}"[:_MAX_ID], "a label inside a compiled graph", source)

    def _refuse(self, tap: str, reason: str) -> None:
        self._session.sink.skip(tap, reason)
        if reason not in self._reported:
            self._reported.add(reason)
            self._session.say(f"set_label: {reason} (at {tap}); the label is left out")

    def _call(self, state: StepState, tap: str, source: str) -> int:
        key = f"{tap}\0{source}"
        call = state.calls.get(key, 0)
        state.calls[key] = call + 1
        return call

    def _part(self, state: StepState) -> str:
        """Whose rows a tensor has that is labelled here."""
        if state.inside is not None or not state.stack:
            return HEAD if state.inside == HEAD else LANGUAGE
        if self._known is None:
            self._known = self._parts()
        return VISION if self._known.get(state.stack[-1]) == VISION else LANGUAGE

    def _promise(self, state: StepState, source: str, tap: str, path: str) -> None:
        task = os.environ.get(TASK_ENV, "")
        call = self._call(state, tap, source)
        label = Label(self._rank, state.number, tap, source, call, path, os.getpid(), task, self._executions[path])
        if len(self._pending) >= self._next_look:
            self.collect(before=state.number)
            self._next_look = 2 * len(self._pending) + _MANY  # where nothing comes, looking must not become the work
        self._pending.append(label)
        self._session.fired.add(tap)
        self._line(label)

    def collect(self, *, final: bool = False, before: int | None = None) -> None:
        """Copies the files that are there by now. ``final``: of those that are not, the journal says why. ``before``:
        only of steps in front of this one, whose files are no longer written."""
        waiting, self._pending = self._pending, []
        deadline = time.monotonic() + _CLOSE_S
        roots = [Path(value) for name in ROOT_ENVS if (value := os.environ.get(name))]
        roots += [self._directory.parent / "atb", self._directory.parent / "ait_dump", Path.cwd()]
        for label in waiting:
            if before is not None and label.step >= before:
                self._pending.append(label)
                continue
            if time.monotonic() > deadline:
                file, reason = None, f"looking for files took longer than {_CLOSE_S:.0f} s"
            else:
                file, reason = self._place(label, roots)
            ending = file.suffix.lower().lstrip(".") if file is not None else ""
            if file is not None and ending not in LABEL_ENDINGS:
                file, reason = None, f"a file of unknown kind: expected .{', .'.join(LABEL_ENDINGS)}"
            if file is not None:
                reason = self._copy(file, ending)
            if not reason:
                self._line(dataclasses.replace(label, file=self._files, ending=ending))
                self._files += 1
            elif final:
                self._line(dataclasses.replace(label, reason=reason))
            else:
                self._pending.append(label)

    def _place(self, label: Label, roots: list[Path]) -> tuple[Path | None, str]:
        """This process has the path from its own program: an absolute one needs no root."""
        path = Path(label.path)
        if path.is_absolute():
            return (path, "") if path.is_file() else (None, "its file was not found")
        above = self._above.get(label.path)
        if above is not None:  # where the last execution's was, and without a search, unless there is none
            found, _ = locate(label, [above / str(label.execution)])
            if found is not None:
                return found, ""
        found, reason = locate(label, [root for root in roots if root.is_dir()])
        if found is not None:
            front = found.parents[len(path.parts) - 1]
            if front.name == str(label.execution):
                self._above[label.path] = front.parent
        return found, reason

    def _copy(self, file: Path, ending: str) -> str:
        """Copies into the dump, within what is left of the budget; why not, or ""."""
        sink = self._session.sink
        size = file.stat().st_size
        left = self._session.config.budget_bytes - sink.writer.bytes_written - self._copied
        if size > left:
            return "its file is larger than what is left of the budget"
        target = self._directory / label_file(self._files, ending)
        try:
            with open(file, "rb") as source, os.fdopen(os.open(target, _NEW, 0o600), "wb") as copy:
                shutil.copyfileobj(source, copy, 4 << 20)
        except OSError as error:
            target.unlink(missing_ok=True)
            return f"its file could not be copied: {error.strerror or error}"
        self._copied += size
        return ""

    def _line(self, label: Label) -> None:
        self._session.sink.line(LABEL.to_line(label))


_NEW = os.O_CREAT | os.O_EXCL | os.O_WRONLY


def _wrong(source: Any, name: Any, value: Any, path: Any) -> str:
    """What is wrong with a label's arguments, or ""."""
    if source not in (PTA, ACL):
        return f"data_src is {str(source)[:40]!r}, not 'pta' or 'acl'"
    if not isinstance(name, str) or not name or len(name) > _MAX_ID:
        return "data_id is not what gen_id() gives: a short text"
    if value is None and not path:
        return "data_val and tensor_path are both missing"
    if value is None and not isinstance(path, (str, os.PathLike)):
        return "tensor_path is no path"
    return ""


class PlainLabels:
    """This process's labels outside of vLLM and Probe: a step for each task. The dump is opened by the first label,
    because a script that calls ``set_task_id`` may yet build an engine, whose own dump then has the labels."""

    def __init__(self) -> None:
        self._tasks = -1
        self._recording: Recording | None = None
        self._labels: Labels | None = None
        self._closed = False
        self._first: labels.Taker = self._open_first
        labels.bind(self._first)
        at_exit(self.close)

    @property
    def opened(self) -> bool:
        """Whether a label has opened the dump."""
        return self._recording is not None

    def begin_task(self) -> None:
        self._tasks += 1
        if self._recording is not None and self._labels is not None:
            session = self._recording.session
            session.end()
            try:
                self._labels.collect()
            except Exception as error:
                session.fail("collecting the labels' files", error)
            self._begin(session)

    def close(self) -> None:
        labels.unbind(self._first)
        recording = self._recording
        if self._closed or recording is None or self._labels is None:
            return
        self._closed = True
        recording.session.end()
        self._labels.close()
        recording.close("closed")
        if not recording.session.fired:
            say(f"NO label was captured in {self._tasks + 1} tasks; the dump in {recording.root} is empty")

    def _open_first(self, source: str, name: str, value: Any, path: str | None) -> None:
        if labels.others(self._first):
            return
        labels.unbind(self._first)  # whatever comes of it, it is tried once
        try:
            config = ProbeConfig.from_env()
            rank, world = _place()
            if in_ranges(config.ranks, rank):
                self._open(config, rank, world)
        except ConfigError as error:
            say(str(error))
        except Exception as error:
            say(f"labels: {type(error).__name__}: {error}; they are NOT captured")
        if self._labels is not None:
            self._labels.take(source, name, value, path)

    def _open(self, config: ProbeConfig, rank: int, world: int) -> None:
        parallel = unsplit(world)
        run = run_facts(
            config.to_json(),
            model={"path": "", "class": Path(sys.argv[0] or "python").name, "dtype": ""},
            parallel=parallel,
            engine={"runner": "accprobe.labels", "eager": True},
        )
        self._recording = recording = Recording(
            config, root_of(config), run, Layouts({}, 0, 1), lambda part, rows: None,
            rank=rank, parallel=parallel, contents="these labels go", announced=True,
        )  # fmt: skip
        self._labels = Labels(recording.session, recording.root, rank)
        self._labels.open()
        self._begin(recording.session)
        say(f"labels go to {recording.root}")

    def _begin(self, session: Session) -> None:
        if in_ranges(session.config.steps, self._tasks):
            session.begin(Step(self._tasks, {}, time.time()), [], self._tasks == 0)


def _place() -> tuple[int, int]:
    """(rank, world size) of this process: torch.distributed's, else torchrun's."""
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not distributed() and rank.isdecimal() and world.isdecimal():
        return int(rank), int(world)
    return process_rank()
